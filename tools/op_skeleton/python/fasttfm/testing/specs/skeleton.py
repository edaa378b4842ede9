"""skeleton: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer
from fasttfm.kernels.skeleton import reference
from fasttfm.ops import skeleton
from fasttfm.testing.random_sizes import random_shape
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    x = draw(generator, *case.sizes["shape"], dtype=dtype, device=device)
    return {"x": x.transpose(0, 1) if case.sizes.get("transposed") else x}


def _case(name: str, *shape: int, factor: float = 0.3, **sizes: Any) -> OpCase:
    return OpCase(name, {"shape": shape, **sizes}, {"factor": factor})


CASES = (
    _case("typical", 3, 5, 64),
    _case("odd", 7, 33, factor=-1.7),
    _case("no_elements", 0, 16),
    _case("transposed", 6, 10, transposed=True),
)


def _random_case(source: random.Random) -> OpCase:
    return _case("random", *random_shape(source), factor=source.choice((-1.7, 0.0, 0.3)))


def _cost(case: OpCase, dtype: torch.dtype) -> Cost:
    return Cost(bytes=2 * torch.Size(case.sizes["shape"]).numel() * dtype.itemsize)


def _torch_multiply(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    return lambda: inputs["x"] * options["factor"]


BAD_CALLS = (
    BadCall("x is no tensor", "x", TypeError, spoil("x", [1.0])),
    BadCall("x is of integers", "x", TypeError, spoil("x", torch.ones(3, dtype=torch.int64))),
    BadCall("factor is text", "factor", TypeError, spoil("factor", "half")),
    BadCall("factor is infinite", "factor", ValueError, spoil("factor", float("inf"))),
)


def _without_factor(x: Tensor, factor: float) -> Tensor:
    return x * 1.0


SPEC = OpSpec(
    name="skeleton",
    function=skeleton,
    reference=reference.skeleton,
    inputs=_inputs,
    differentiable=("x",),
    cases=CASES,
    random_case=_random_case,
    bench_cases=(_case("32768x1024", 32768, 1024),),
    bench_cases_cpu=(_case("2048x768", 2048, 768),),
    forward_cost=_cost,
    backward_cost=_cost,
    peers=(Peer("torch", _torch_multiply),),
    bad_calls=BAD_CALLS,
    mutants={"without the factor": _without_factor},
)
