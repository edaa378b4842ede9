"""column_sum: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.column_sum import reference
from fasttfm.ops import column_sum
from fasttfm.testing.random_sizes import random_shape
from fasttfm.testing.row_cases import BAD_ROWS, in_layout
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil, triton_kernels


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    tensor = functools.partial(draw, generator, dtype=dtype, device=device)
    x = tensor(*case.sizes["shape"]) + case.sizes.get("offset", 0.0)
    return {"x": in_layout(x, case.sizes.get("layout", "contiguous"), tensor, padding=8)}


def _case(name: str, *shape: int, dtype: torch.dtype | None = None, **sizes: Any) -> OpCase:
    return OpCase(name, {"shape": shape, **sizes}, {"dtype": dtype})


CASES = (
    _case("typical", 3, 5, 64),
    _case("odd", 7, 33),
    _case("one_row", 1, 100),
    _case("one_column", 5, 1),
    _case("vector", 40),
    _case("no_rows", 0, 16),
    _case("many_rows", 1031, 40),
    _case("wide", 67, 2312),
    _case("large_mean", 300, 96, offset=100.0),
    _case("transposed", 4, 6, 32, layout="transposed"),
    _case("sliced", 9, 32, layout="sliced"),
)


def _random_case(source: random.Random) -> OpCase:
    return _case("random", *random_shape(source), dtype=source.choice((None, torch.float32)))


def _forward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    return Cost(bytes=torch.Size(case.sizes["shape"]).numel() * dtype.itemsize)


def _backward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    return Cost(bytes=case.sizes["shape"][-1] * dtype.itemsize)  # the gradient is a view of dsum


def _torch_sum(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    return lambda: inputs["x"].flatten(0, -2).sum(dim=0, dtype=options["dtype"])


BAD_CALLS = (
    *BAD_ROWS,
    BadCall("dtype of integers", "dtype", TypeError, spoil("dtype", torch.int32)),
    BadCall("dtype is text", "dtype", TypeError, spoil("dtype", "float32")),
    BadCall("double sum of singles", "dtype", TypeError, spoil("dtype", torch.float64)),
)


def _reference(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return reference.column_sum(x, dtype or x.dtype)


def _without_last_row(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return _reference(x.reshape(-1, x.shape[-1])[:-1], dtype)


def _mean(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return _reference(x, dtype) / max(1, x.numel() // x.shape[-1])


SPEC = OpSpec(
    name="column_sum",
    function=column_sum,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x",),
    cases=CASES,
    random_case=_random_case,
    bench_cases=(
        _case("32768x3072", 32768, 3072),
        _case("32768x1024", 32768, 1024),
        _case("32768x4096", 32768, 4096),
        _case("512x768", 512, 768),
    ),
    bench_cases_cpu=(_case("2048x768", 2048, 768), _case("2048x2304", 2048, 2304)),
    forward_cost=_forward_cost,
    backward_cost=_backward_cost,
    peers=torch_peers(_torch_sum),
    bad_calls=BAD_CALLS,
    mutants={"without the last row": _without_last_row, "the mean": _mean},
    triton_kernels=triton_kernels("column_sum", ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")),
)
