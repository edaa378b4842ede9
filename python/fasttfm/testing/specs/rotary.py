"""rotary: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.rotary import reference
from fasttfm.ops import rotary
from fasttfm.testing.random_sizes import random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, draw, spoil, triton_kernels

_BASE = 10_000.0


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = case.sizes["shape"]
    layout = case.sizes.get("layout", "contiguous")
    if layout == "qkv":  # queries and keys of [T, 3, H, D]
        x = draw(generator, shape[0], 3, shape[1] // 2, shape[2], dtype=dtype, device=device)[:, :2].flatten(1, 2)
    elif layout == "heads_first":  # [B, H, S, D] seen as [B, S, H, D]
        x = draw(generator, shape[0], shape[2], shape[1], shape[3], dtype=dtype, device=device).transpose(1, 2)
    else:
        x = draw(generator, *shape, dtype=dtype, device=device)
    return {"x": x, **table_inputs(case, shape[:-2], dtype, device, generator)}


def table_inputs(
    case: OpCase, tokens: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Inputs:
    """cos and sin of the case's ``positions`` and ``pairs``, and positions of the type ``drawn``, or None."""
    pairs, most = case.sizes["pairs"], case.sizes["positions"]
    rates = _BASE ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(most, dtype=torch.float64)[:, None] * rates
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs: Inputs = {"cos": angles.cos().to(wide).to(device), "sin": angles.sin().to(wide).to(device)}
    drawn = case.sizes.get("drawn")
    inputs["positions"] = None
    if drawn is not None:
        inputs["positions"] = torch.randint(most, tokens, generator=generator).to(drawn).to(device)
    return inputs


def _case(
    name: str,
    *shape: int,
    pairs: int | None = None,
    interleaved: bool = False,
    positions: int = 0,
    rotary_heads: int | None = None,
    **sizes: Any,
) -> OpCase:
    """``positions``: rows of the tables; as many as the sequence has by default."""
    tables = {"pairs": pairs or shape[-1] // 2, "positions": positions or max(1, shape[-3])}
    options: dict[str, Any] = {"interleaved": interleaved, "rotary_heads": rotary_heads}
    return OpCase(name, {"shape": shape, **tables, **sizes}, options)


CASES = (
    _case("typical", 2, 5, 3, 16),
    _case("packed", 11, 4, 32, positions=9, drawn=torch.int64),
    _case("interleaved", 2, 7, 3, 16, interleaved=True),
    _case("some_columns", 2, 5, 2, 24, pairs=5, positions=8, drawn=torch.int32),
    _case("some_columns_interleaved", 5, 2, 23, pairs=4, interleaved=True),
    _case("one_pair", 3, 2, 2),
    _case("odd", 7, 3, 13),
    _case("no_tokens", 0, 2, 8),
    _case("qkv", 9, 8, 16, layout="qkv"),
    _case("some_heads", 9, 6, 16, rotary_heads=4, positions=12, drawn=torch.int64),
    _case("no_head", 2, 5, 3, 16, rotary_heads=0),
    _case("heads_first", 2, 6, 3, 8, layout="heads_first"),
    _case("long", 2, 300, 1, 64),
    _case("wide_head", 3, 2, 256),
)


def _random_case(source: random.Random) -> OpCase:
    columns = 2 * random_size(source, 80)
    shape = (*[random_size(source, 3)] * source.randint(0, 1), random_size(source, 40), random_size(source, 5), columns)
    positions = max(1, shape[-3]) + random_size(source, 10)
    drawn = source.choice((None, torch.int64, torch.int32))
    pairs = source.choice((columns // 2, random.Random(columns).randint(1, columns // 2)))
    options: dict[str, Any] = {
        "interleaved": source.random() < 0.5,
        "rotary_heads": source.choice((None, source.randint(0, shape[-2]))),
    }
    return _case("random", *shape, pairs=pairs, positions=positions, drawn=drawn, **options)


def _cost(case: OpCase, dtype: torch.dtype) -> Cost:
    return Cost(bytes=2 * torch.Size(case.sizes["shape"]).numel() * dtype.itemsize)


def _torch_rotary(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    rotate = torch_rotary(inputs)
    return lambda: rotate(inputs["x"])


def torch_rotary(inputs: Inputs) -> Callable[[Tensor], Tensor]:
    """As models of transformers write it: tables of the model's type for each token, halves swapped by a copy."""
    positions = inputs["positions"]
    cos, sin = (torch.cat([inputs[name]] * 2, dim=-1).to(inputs["x"].dtype) for name in ("cos", "sin"))

    def call(x: Tensor) -> Tensor:
        if positions is None:
            c, s = (table[: x.shape[-3], None] for table in (cos, sin))
        else:
            c, s = (table[positions][..., None, :] for table in (cos, sin))
        first, second = x.chunk(2, dim=-1)
        return x * c + torch.cat((-second, first), dim=-1) * s

    return call


BAD_CALLS = (
    BadCall("x is no tensor", "x", TypeError, spoil("x", [1.0])),
    BadCall("x is of integers", "x", TypeError, spoil("x", torch.ones(2, 5, 3, 16, dtype=torch.int64))),
    BadCall("x has no heads", "x", ValueError, spoil("x", torch.ones(5, 16))),
    BadCall("x has no column", "x", ValueError, spoil("x", torch.ones(5, 3, 0))),
    BadCall("cos is no tensor", "cos", TypeError, spoil("cos", None)),
    BadCall("cos has three dimensions", "cos", ValueError, spoil("cos", torch.ones(1, 5, 8))),
    BadCall("more pairs than columns", "cos", ValueError, spoil("cos", torch.ones(5, 9))),
    BadCall("fewer positions than tokens", "cos", ValueError, spoil("cos", torch.ones(4, 8))),
    BadCall("sin of another shape", "sin", ValueError, spoil("sin", torch.ones(5, 7))),
    BadCall("a table with gradient", "cos", ValueError, spoil("cos", torch.ones(5, 8, requires_grad=True))),
    BadCall("positions of another shape", "positions", ValueError, spoil("positions", torch.zeros(5).long())),
    BadCall("positions are no integers", "positions", TypeError, spoil("positions", torch.zeros(2, 5))),
    BadCall("a position past the tables", "positions", ValueError, spoil("positions", torch.full((2, 5), 5))),
    BadCall("a negative position", "positions", ValueError, spoil("positions", torch.full((2, 5), -1))),
    BadCall("rotary_heads is no integer", "rotary_heads", TypeError, spoil("rotary_heads", 1.0)),
    BadCall("more rotated heads than heads", "rotary_heads", ValueError, spoil("rotary_heads", 4)),
    BadCall("interleaved is a number", "interleaved", TypeError, spoil("interleaved", 1)),
)


def _reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, rotary_heads: int | None
) -> Tensor:
    heads = x.shape[-2] if rotary_heads is None else rotary_heads
    return reference.rotary(x, cos, sin, None if positions is None else positions.long(), interleaved, heads)


def _rotated_back(x: Tensor, cos: Tensor, sin: Tensor, *options: Any, **named: Any) -> Tensor:
    return _reference(x, cos, -sin, *options, **named)


def _other_pairs(x: Tensor, *, interleaved: bool, **named: Any) -> Tensor:
    return _reference(x, interleaved=not interleaved, **named)


def _next_position(x: Tensor, cos: Tensor, sin: Tensor, *options: Any, **named: Any) -> Tensor:
    return _reference(x, cos.roll(-1, 0), sin.roll(-1, 0), *options, **named)


def _every_head(x: Tensor, *, rotary_heads: int | None, **named: Any) -> Tensor:
    return _reference(x, rotary_heads=None, **named)


SPEC = OpSpec(
    name="rotary",
    function=rotary,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x",),
    cases=CASES,
    random_case=_random_case,
    property_cases=("typical", "packed", "interleaved"),
    bench_cases=(
        _case("65536x24x64", 65536, 24, 64, positions=1024, drawn=torch.int64, layout="qkv"),
        _case("65536x36x64", 65536, 36, 64, positions=1024, drawn=torch.int64, rotary_heads=24),
        _case("16384x32x128", 16384, 32, 128, positions=4096, drawn=torch.int64),
        _case("512x24x64", 512, 24, 64, positions=128, drawn=torch.int64, layout="qkv"),
    ),
    bench_cases_cpu=(_case("1024x24x64", 1024, 24, 64, positions=128, drawn=torch.int64, layout="qkv"),),
    forward_cost=_cost,
    backward_cost=_cost,
    peers=torch_peers(_torch_rotary),
    bad_calls=BAD_CALLS,
    mutants={
        "rotated back": _rotated_back,
        "other pairs": _other_pairs,
        "the next position": _next_position,
        "every head": _every_head,
    },
    triton_kernels=triton_kernels(
        "rotary",
        *(
            (element, *call)
            for element in ("bf16", "fp16", "fp32")
            for call in ((64, 32, False), (64, 32, True), (128, 64, False), (80, 16, False))
        ),
    ),
)
