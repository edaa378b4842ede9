"""qkv_projection: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, torch_peers
from fasttfm.kernels.layer_norm import reference as layer_norm_reference
from fasttfm.kernels.qkv_projection import reference
from fasttfm.kernels.rotary import reference as rotary_reference
from fasttfm.ops import qkv_projection
from fasttfm.testing.random_sizes import NORMALISED, random_shape, random_size
from fasttfm.testing.row_cases import BAD_ROWS, bare_gemms, in_layout, linear_cost
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, TritonKernel, draw, op_case, spoil
from fasttfm.testing.specs.rotary import table_inputs, torch_rotary

# The harness passes tensors by name: the LayerNorm's two come as arguments of their own.
_EPS = 1e-5
_TABLES = ("cos", "sin", "positions")


def _with_layer_norm(
    x: Any,
    weight: Any,
    bias: Any,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_heads: Any,
    layer_norm: Any = None,
    **options: Any,
) -> Tensor:
    if norm_weight is not None:
        layer_norm = (norm_weight, norm_bias, _EPS)
    return qkv_projection(x, weight, bias, num_heads, layer_norm=layer_norm, **options)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    interleaved: bool = False,
    project: Callable[..., Tensor] = reference.qkv_projection,
    rotate: Callable[..., Tensor] = rotary_reference.rotary,
) -> Tensor:
    if norm_weight is not None:
        x = layer_norm_reference.layer_norm(x, norm_weight, norm_bias, _EPS)
    qkv = project(x, weight, bias, num_heads)
    if cos is None:
        return qkv
    positions = None if positions is None else positions.long()
    return rotate(qkv.flatten(-3, -2), cos, sin, positions, interleaved, 2 * num_heads).view(qkv.shape)


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    shape = case.sizes["shape"]
    columns = shape[-1]

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    x = in_layout(tensor(*shape), case.sizes.get("layout", "contiguous"), tensor)
    weight = tensor(3 * columns, columns, scale=columns**-0.5)
    normed = case.sizes.get("layer_norm", False)
    tables: Inputs = dict.fromkeys(_TABLES)
    if "pairs" in case.sizes:
        tables = table_inputs(case, x.shape[:-1], dtype, device, generator)
    return {
        "x": x,
        "weight": weight.t().contiguous().t() if case.sizes.get("transposed_weight") else weight,
        "bias": tensor(3 * columns) if case.sizes.get("bias", True) else None,
        "norm_weight": tensor(columns) if normed else None,
        "norm_bias": tensor(columns) if normed else None,
        **tables,
    }


def _case(name: str, *shape: int, num_heads: int, **sizes: Any) -> OpCase:
    """With ``pairs``, a rotary embedding: tables of ``positions`` rows, as many as the sequence has by default, and
    positions of the type ``drawn``."""
    options: dict[str, Any] = {"num_heads": num_heads}
    if "pairs" in sizes:
        sizes = {"positions": max(1, shape[-2]), **sizes}
        options["interleaved"] = sizes.pop("interleaved", False)
    return op_case(name, options, shape=shape, **sizes)


CASES = (
    _case("typical", 3, 5, 64, num_heads=4),
    _case("packed", 37, 48, num_heads=3),
    _case("odd", 7, 33, num_heads=11),
    _case("one_row", 1, 40, num_heads=1),
    _case("vector", 40, num_heads=2),
    _case("no_rows", 0, 16, num_heads=2),
    _case("many_rows", 601, 24, num_heads=2),
    _case("no_bias", 9, 32, num_heads=2, bias=False),
    _case("layer_norm", 3, 5, 64, num_heads=4, layer_norm=True),
    _case("layer_norm_no_bias", 11, 32, num_heads=4, layer_norm=True, bias=False),
    _case("transposed", 4, 6, 32, num_heads=4, layout="transposed"),
    _case("transposed_weight", 9, 32, num_heads=4, transposed_weight=True),
    _case("sliced", 9, 32, num_heads=4, layout="sliced"),
    _case("rotary", 2, 7, 48, num_heads=3, pairs=8),
    _case("rotary_packed", 19, 64, num_heads=2, pairs=16, positions=9, drawn=torch.int64, bias=False),
    _case("rotary_interleaved", 2, 5, 32, num_heads=4, pairs=4, interleaved=True, layer_norm=True),
    _case("rotary_some_columns", 11, 60, num_heads=3, pairs=6, positions=13, drawn=torch.int32),
    _case("rotary_odd", 7, 33, num_heads=3, pairs=3, layout="sliced"),
    _case("rotary_odd_interleaved", 7, 35, num_heads=5, pairs=3, interleaved=True),
    _case("rotary_no_rows", 0, 16, num_heads=2, pairs=4),
)


def _random_case(source: random.Random) -> OpCase:
    heads = source.randint(1, 6)
    *leading, _ = random_shape(source, largest=96)
    head_columns = NORMALISED - 1 + random_size(source, 16)
    options: dict[str, Any] = {
        "bias": source.random() < 0.7,
        "layer_norm": source.random() < 0.4,
        "transposed_weight": source.random() < 0.2,
    }
    if leading and head_columns > 1 and source.random() < 0.5:
        options |= {"pairs": source.randint(1, head_columns // 2), "interleaved": source.random() < 0.5}
        options |= {"positions": max(1, leading[-1]) + random_size(source, 10)}
        options |= {"drawn": source.choice((None, torch.int64, torch.int32))}
    return _case("random", *leading, heads * head_columns, num_heads=heads, **options)


def _torch_linear(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    x, weight, bias, heads = inputs["x"], inputs["weight"], inputs["bias"], options["num_heads"]
    columns = x.shape[-1]
    rotate = torch_rotary(inputs) if inputs["cos"] is not None else None

    def call() -> Tensor:
        normed = x
        if inputs["norm_weight"] is not None:
            normed = torch.nn.functional.layer_norm(x, (columns,), inputs["norm_weight"], inputs["norm_bias"], _EPS)
        qkv = torch.nn.functional.linear(normed, weight, bias).view(*x.shape[:-1], 3, heads, columns // heads)
        if rotate is None:
            return qkv
        return torch.cat([rotate(qkv[..., :2, :, :].flatten(-3, -2)).unflatten(-2, (2, heads)), qkv[..., 2:, :, :]], -3)

    return call


def _spoil_tables(**changed: Any) -> Callable[[Inputs, dict[str, Any]], None]:
    """The typical call with tables for its 5 tokens and heads of 16 columns, and something else changed."""

    def change(inputs: Inputs, options: dict[str, Any]) -> None:
        for name, value in {"cos": torch.ones(5, 8), "sin": torch.ones(5, 8), **changed}.items():
            (inputs if name in inputs else options)[name] = value

    return change


BAD_CALLS = (
    *BAD_ROWS,
    BadCall("weight is no tensor", "weight", TypeError, spoil("weight", "w")),
    BadCall("weight of other columns", "weight", ValueError, spoil("weight", torch.ones(192, 63))),
    BadCall("weight of other rows", "weight", ValueError, spoil("weight", torch.ones(128, 64))),
    BadCall("weight transposed", "weight", ValueError, spoil("weight", torch.ones(64, 192))),
    BadCall("weight of another type", "weight", TypeError, spoil("weight", torch.ones(192, 64).bfloat16())),
    BadCall("weight elsewhere", "weight", ValueError, spoil("weight", torch.ones(192, 64, device="meta"))),
    BadCall("two weights", "weight", ValueError, spoil("weight", (torch.ones(64, 64), torch.ones(64, 64)))),
    BadCall("three weights, one bias", "bias", TypeError, spoil("weight", (torch.ones(64, 64),) * 3)),
    BadCall("bias too short", "bias", ValueError, spoil("bias", torch.ones(64))),
    BadCall("bias of another type", "bias", TypeError, spoil("bias", torch.ones(192, dtype=torch.float64))),
    BadCall("num_heads no divisor", "num_heads", ValueError, spoil("num_heads", 5)),
    BadCall("num_heads is zero", "num_heads", ValueError, spoil("num_heads", 0)),
    BadCall("num_heads is a fraction", "num_heads", TypeError, spoil("num_heads", 4.0)),
    BadCall("layer_norm is a tensor", "layer_norm", TypeError, spoil("layer_norm", torch.ones(64))),
    BadCall("layer_norm lacks eps", "layer_norm", TypeError, spoil("layer_norm", (None, None))),
    BadCall("cos without sin", "sin", TypeError, spoil("cos", torch.ones(5, 8))),
    BadCall("sin without cos", "cos", TypeError, spoil("sin", torch.ones(5, 8))),
    BadCall("positions without tables", "positions", ValueError, spoil("positions", torch.zeros(3, 5).long())),
    BadCall("more pairs than columns", "cos", ValueError, _spoil_tables(cos=torch.ones(5, 9), sin=torch.ones(5, 9))),
    BadCall("fewer positions than tokens", "cos", ValueError, _spoil_tables(cos=torch.ones(4, 8))),
    BadCall("sin of another shape", "sin", ValueError, _spoil_tables(sin=torch.ones(5, 7))),
    BadCall("a table with gradient", "cos", ValueError, _spoil_tables(cos=torch.ones(5, 8, requires_grad=True))),
    BadCall("positions of a row", "positions", ValueError, _spoil_tables(positions=torch.zeros(5).long())),
    BadCall("a position past the tables", "positions", ValueError, _spoil_tables(positions=torch.full((3, 5), 5))),
    BadCall("a negative position", "positions", ValueError, _spoil_tables(positions=torch.full((3, 5), -1))),
    BadCall("interleaved is a number", "interleaved", TypeError, _spoil_tables(interleaved=1)),
    BadCall("one row with tables", "x", ValueError, _spoil_tables(x=torch.ones(64))),
)


def _without_bias(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    return reference.qkv_projection(x, weight, None, num_heads)


def _heads_outermost(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """[H, 3, D] in place of [3, H, D]: how some models order their fused weight."""
    columns = x.shape[-1]
    mixed = reference.qkv_projection(x, weight, bias, num_heads).flatten(-3)
    return mixed.unflatten(-1, (num_heads, 3, columns // num_heads)).transpose(-3, -2)


def _rotated_values(heads: Tensor, cos: Tensor, sin: Tensor, positions: Any, interleaved: bool, rotated: int) -> Tensor:
    return rotary_reference.rotary(heads, cos, sin, positions, interleaved, heads.shape[-2])


def _rotated_queries(
    heads: Tensor, cos: Tensor, sin: Tensor, positions: Any, interleaved: bool, rotated: int
) -> Tensor:
    return rotary_reference.rotary(heads, cos, sin, positions, interleaved, rotated // 2)


def _other_pairs(heads: Tensor, cos: Tensor, sin: Tensor, positions: Any, interleaved: bool, rotated: int) -> Tensor:
    return rotary_reference.rotary(heads, cos, sin, positions, not interleaved, rotated)


def _mutant(**parts: Any) -> Callable[..., Tensor]:
    return lambda **arguments: _reference(**arguments, **parts)


def _triton_kernels() -> list[TritonKernel]:
    from fasttfm.kernels.qkv_projection import triton as kernels

    signatures = kernels.compile_signatures("fp16", 32768, 12, 64)
    for element in ("bf16", "fp32"):
        signatures += kernels.compile_signatures(element, 32768, 12, 64)
        signatures += kernels.compile_signatures(element, 32768, 12, 64, pairs=32)
        signatures += kernels.compile_signatures(element, 32768, 12, 64, pairs=32, interleaved=True)
    signatures += kernels.compile_signatures("bf16", 16, 12, 64, pairs=32)
    signatures += kernels.compile_signatures("bf16", 64, 12, 64, pairs=32)
    signatures += kernels.compile_signatures("bf16", 4096, 8, 80, pairs=16)  # partly rotated
    signatures += kernels.compile_signatures("bf16", 4096, 3, 33, pairs=16)  # odd, and a last part of the sum
    return [TritonKernel(**description) for description in signatures]


SPEC = OpSpec(
    name="qkv_projection",
    function=_with_layer_norm,
    reference=_reference,
    inputs=_inputs,
    differentiable=("x", "weight", "bias", "norm_weight", "norm_bias"),
    cases=CASES,
    property_cases=("typical", "layer_norm", "rotary"),
    torch_products=True,
    random_case=_random_case,
    bench_cases=(
        _case("32768x768", 32768, 768, num_heads=12),
        _case("32768x1024", 32768, 1024, num_heads=16),
        _case("32768x1024, pre-LN", 32768, 1024, num_heads=16, layer_norm=True),
        _case("4096x768", 4096, 768, num_heads=12),
        _case("32768x768, RoPE", 32768, 768, num_heads=12, pairs=32, positions=1024, drawn=torch.int64),
    ),
    # fp32 only: where a CPU has no instructions for bf16, torch's own product takes minutes.
    bench_cases_cpu=(_case("256x768", 256, 768, num_heads=12, dtypes=(torch.float32,)),),
    forward_cost=lambda case, dtype: linear_cost(case, dtype, 3 * case.sizes["shape"][-1], 1),
    backward_cost=lambda case, dtype: linear_cost(case, dtype, 3 * case.sizes["shape"][-1], 2),
    peers=(
        *torch_peers(_torch_linear),
        bare_gemms("weight"),
    ),
    bad_calls=BAD_CALLS,
    mutants={
        "without the bias": _mutant(project=_without_bias),
        "heads outermost": _mutant(project=_heads_outermost),
        "values rotated": _mutant(rotate=_rotated_values),
        "keys not rotated": _mutant(rotate=_rotated_queries),
        "other pairs": _mutant(rotate=_other_pairs),
    },
    triton_kernels=_triton_kernels,
)
