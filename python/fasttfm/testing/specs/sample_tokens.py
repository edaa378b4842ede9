"""sample_tokens: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer
from fasttfm.kernels.sample_tokens import reference
from fasttfm.ops import sample_tokens
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil, triton_kernels


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    rows, words = case.sizes["rows"], case.sizes["words"]

    def values_of(name: str, dtype: torch.dtype) -> Tensor:
        """The values of the case in turn."""
        values = case.sizes[name]
        return torch.tensor([values[row % len(values)] for row in range(rows)], dtype=dtype, device=device)

    return {
        "logits": draw(generator, rows, words, dtype=dtype, device=device, scale=2.0),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device),
        "positions": torch.arange(rows, dtype=torch.int32, device=device) * 7,
        "temperature": values_of("temperature", torch.float32),
        "top_k": values_of("top_k", torch.int32),
        "top_p": values_of("top_p", torch.float32),
    }


def _case(
    name: str,
    rows: int,
    words: int,
    temperature: tuple[float, ...] = (1.0,),
    top_k: tuple[int, ...] = (0,),
    top_p: tuple[float, ...] = (1.0,),
    *,
    interpret: bool = True,
) -> OpCase:
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return OpCase(name, {"rows": rows, "words": words, **options}, interpret=interpret)


CASES = (
    _case("typical", 3, 300, (0.0, 1.0, 0.7), (0, 0, 5), (1.0, 1.0, 0.9)),
    _case("plain", 4, 700, (1.0, 2.0)),
    _case("top_k", 2, 131, (1.0,), (3, 500)),
    _case("top_p", 2, 131, (1.0,), (0,), (0.5, 0.99)),
    _case("one_word", 2, 1, (1.0, 0.0)),
    _case("several_chunks", 2, 40_000, (1.5, 0.0)),
    _case("mixed", 60, 97, (0.0, 1.0, 0.7), (0, 5, 1, 97), (1.0, 0.9, 0.5, 1e-6, 0.2), interpret=False),
    _case("no_rows", 0, 9),
)


def _random_case(source: random.Random) -> OpCase:
    return _case(
        "random",
        source.choice((1, 3, 8)),
        source.choice((1, 7, 300, 5000)),
        tuple(source.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(3)),
        tuple(source.choice((0, 1, 20)) for _ in range(2)),
        tuple(source.choice((1.0, 0.9, 0.3)) for _ in range(2)),
    )


def _cost(case: OpCase, dtype: torch.dtype) -> Cost:
    return Cost(bytes=case.sizes["rows"] * case.sizes["words"] * dtype.itemsize)


def _torch(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """torch's draw from the whole distribution, or its argmax."""
    logits, greedy = inputs["logits"], bool((inputs["temperature"] == 0).all())
    return lambda: logits.argmax(-1) if greedy else torch.multinomial(logits.float().softmax(-1), 1)


BAD_CALLS = (
    BadCall("logits are no tensor", "logits", TypeError, spoil("logits", [1.0])),
    BadCall("logits of one dimension", "logits", ValueError, spoil("logits", torch.ones(300))),
    BadCall("logits without tokens", "logits", ValueError, spoil("logits", torch.ones(3, 0))),
    BadCall("seeds in int32", "seeds", TypeError, spoil("seeds", torch.ones(3, dtype=torch.int32))),
    BadCall("seeds of another batch", "seeds", ValueError, spoil("seeds", torch.ones(2, dtype=torch.int64))),
    BadCall("positions in fp32", "positions", TypeError, spoil("positions", torch.ones(3))),
    BadCall("temperature is a number", "temperature", TypeError, spoil("temperature", 1.0)),
    BadCall("top_k in int64", "top_k", TypeError, spoil("top_k", torch.ones(3, dtype=torch.int64))),
    BadCall("top_p elsewhere", "top_p", ValueError, spoil("top_p", torch.ones(3, device="meta"))),
)


def _changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda **arguments: reference.sample_tokens(**{**arguments, name: change(arguments[name])})


SPEC = OpSpec(
    name="sample_tokens",
    function=sample_tokens,
    reference=reference.sample_tokens,
    inputs=_inputs,
    differentiable=(),
    cases=CASES,
    random_case=_random_case,
    bench_cases=(
        _case("greedy 1x50257", 1, 50257, (0.0,)),
        _case("greedy 128x50257", 128, 50257, (0.0,)),
        _case("plain 128x50257", 128, 50257),
        _case("top_k 1x50257", 1, 50257, (1.0,), (50,)),
        _case("top_p 1x50257", 1, 50257, (1.0,), (0,), (0.9,)),
    ),
    bench_cases_cpu=(_case("greedy 1x50257", 1, 50257, (0.0,)), _case("top_p 1x50257", 1, 50257, (1.0,), (0,), (0.9,))),
    forward_cost=_cost,
    torch_products=True,
    peers=(Peer("torch", _torch),),
    bad_calls=BAD_CALLS,
    mutants={
        "always greedy": _changed("temperature", torch.zeros_like),
        "the same draw at every position": _changed("positions", torch.zeros_like),
        "one more of top_k": _changed("top_k", lambda k: torch.where(k > 0, k + 1, k)),
        "no top_p": _changed("top_p", torch.ones_like),
    },
    triton_kernels=triton_kernels("sample_tokens", ("fp32",), ("bf16",)),
)
