"""decode_linear: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer
from fasttfm.kernels.decode_linear import reference
from fasttfm.ops import ACTIVATIONS, decode_linear
from fasttfm.testing.random_sizes import random_size
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, TritonKernel, draw, spoil

_ALL = ("bias", "norm_weight", "norm_bias", "residual")


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    sizes = case.sizes
    rows, outputs, columns = sizes["rows"], sizes["outputs"], sizes["columns"]
    stream = torch.float32 if sizes.get("fp32_stream") and dtype != torch.float64 else dtype

    def tensor(*shape: int, dtype: torch.dtype = dtype, scale: float = 1.0) -> Tensor:
        return draw(generator, *shape, dtype=dtype, device=device, scale=scale)

    drawn: Inputs = {
        "x": tensor(rows, columns, dtype=stream),
        "weight": tensor(outputs, columns, scale=columns**-0.5),
        "bias": tensor(outputs),
        "norm_weight": tensor(columns),
        "norm_bias": tensor(columns),
        "residual": tensor(rows, outputs, dtype=stream),
    }
    return {name: value if name not in _ALL or name in sizes["present"] else None for name, value in drawn.items()}


def _case(
    name: str,
    rows: int,
    outputs: int,
    columns: int,
    *,
    present: tuple[str, ...] = _ALL,
    eps: float | None = 1e-5,
    activation: str | None = None,
    **sizes: Any,
) -> OpCase:
    all_sizes = {"rows": rows, "outputs": outputs, "columns": columns, "present": present, **sizes}
    return OpCase(name, all_sizes, {"eps": eps, "activation": activation})


CASES = (
    _case("typical", 1, 12, 24, activation="gelu_new"),
    _case("rows", 19, 33, 80, activation="gelu"),
    _case("plain", 3, 17, 24, present=(), eps=None),
    _case("odd", 1, 7, 33, present=("bias", "norm_weight"), activation="relu"),
    _case("chunks", 1, 9, 4200, present=("bias", "residual"), eps=None),
    _case("chunks_of_rows", 4, 20, 1100, fp32_stream=True),
    _case("no_rows", 0, 8, 16),
)


def _random_case(source: random.Random) -> OpCase:
    eps = source.choice((None, 1e-5, 0.1))
    optional = _ALL if eps is not None else ("bias", "residual")
    return _case(
        "random",
        source.choice((1, 1, random_size(source, 40))),
        random_size(source, 100),
        max(5, random_size(source)),
        present=tuple(name for name in optional if source.random() < 0.7),
        eps=eps,
        activation=source.choice((None, *ACTIVATIONS)),
        fp32_stream=source.random() < 0.3,
    )


def _cost(case: OpCase, dtype: torch.dtype) -> Cost:
    rows, outputs, columns = (case.sizes[name] for name in ("rows", "outputs", "columns"))
    elements = outputs * columns + rows * (columns + 2 * outputs)
    return Cost(bytes=elements * dtype.itemsize, flops=2 * rows * outputs * columns)


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
    activation: str | None,
) -> Tensor:
    kind = "" if activation is None else ACTIVATIONS[activation]
    return reference.decode_linear(x, weight, bias, norm_weight, norm_bias, residual, eps, kind, weight.dtype)


def _torch(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
    """LayerNorm, the linear layer and the addition as separate calls."""
    x, residual = inputs["x"], inputs["residual"]
    functional = torch.nn.functional

    def run() -> Tensor:
        eps, activation = options["eps"], options["activation"]
        norm = (x.shape[-1:], inputs["norm_weight"], inputs["norm_bias"], eps)
        u = x if eps is None else functional.layer_norm(x, *norm)
        u = functional.linear(u, inputs["weight"], inputs["bias"])
        if activation is not None:
            u = functional.gelu(u, approximate="tanh")
        return u if residual is None else u + residual

    return run


BAD_CALLS = (
    BadCall("x is no tensor", "x", TypeError, spoil("x", [1.0])),
    BadCall("x is of integers", "x", TypeError, spoil("x", torch.ones(1, 24, dtype=torch.int64))),
    BadCall("x has no column", "x", ValueError, spoil("x", torch.ones(1, 0))),
    BadCall("weight of other columns", "weight", ValueError, spoil("weight", torch.ones(12, 23))),
    BadCall("weight of one dimension", "weight", ValueError, spoil("weight", torch.ones(24))),
    BadCall("bias too short", "bias", ValueError, spoil("bias", torch.ones(11))),
    BadCall("norm_weight too short", "norm_weight", ValueError, spoil("norm_weight", torch.ones(23))),
    BadCall("norm_bias elsewhere", "norm_bias", ValueError, spoil("norm_bias", torch.ones(24, device="meta"))),
    BadCall("residual of x's shape", "residual", ValueError, spoil("residual", torch.ones(1, 24))),
    BadCall("a norm without eps", "norm_weight", ValueError, spoil("eps", None)),
    BadCall("eps is negative", "eps", ValueError, spoil("eps", -1.0)),
    BadCall("activation is a number", "activation", TypeError, spoil("activation", 1)),
    BadCall("activation is unknown", "activation", ValueError, spoil("activation", "swish2")),
    BadCall("x wants a gradient", "x", ValueError, spoil("x", torch.ones(1, 24, requires_grad=True))),
)


def _without(name: str) -> Callable[..., Tensor]:
    """The reference without one of its parts."""
    return lambda **arguments: _reference(**{**arguments, name: None})


def _residual_first(**arguments: Any) -> Tensor:
    """The residual inside the activation."""
    inner = _reference(**{**arguments, "activation": None})
    return torch.nn.functional.gelu(inner, approximate="tanh")


def _triton_kernels() -> list[TritonKernel]:
    from fasttfm.kernels.decode_linear import triton as kernels

    signatures = []
    for rows in (1, 16):
        for outputs, columns in ((2304, 768), (768, 3072), (50257, 768)):
            signatures += kernels.compile_signatures(rows, outputs, columns, "bf16", "fp32")
        signatures += kernels.compile_signatures(rows, 768, 3072, "bf16", "bf16")
        signatures += kernels.compile_signatures(rows, 2304, 768, "fp32", "fp32")
    return [TritonKernel(**description) for description in signatures]


def _bench(rows: int, outputs: int, columns: int, **options: Any) -> OpCase:
    return _case(f"{rows}x{columns}x{outputs}", rows, outputs, columns, **options)


SPEC = OpSpec(
    name="decode_linear",
    function=decode_linear,
    reference=_reference,
    inputs=_inputs,
    differentiable=(),
    cases=CASES,
    random_case=_random_case,
    bench_cases=tuple(
        _bench(rows, outputs, columns, **options)
        for rows in (1, 16)
        for outputs, columns, options in (
            (2304, 768, {"present": ("bias", "norm_weight", "norm_bias")}),
            (3072, 768, {"present": ("bias", "norm_weight", "norm_bias"), "activation": "gelu_new"}),
            (768, 3072, {"present": ("bias", "residual"), "eps": None}),
            (50257, 768, {"present": ("norm_weight", "norm_bias")}),
        )
    ),
    bench_cases_cpu=(_bench(1, 2304, 768, present=("bias", "norm_weight", "norm_bias")),),
    forward_cost=_cost,
    torch_products=True,
    peers=(Peer("torch", _torch),),
    bad_calls=BAD_CALLS,
    mutants={
        "without the bias": _without("bias"),
        "without LayerNorm's bias": _without("norm_bias"),
        "without the residual": _without("residual"),
        "the residual inside the activation": _residual_first,
    },
    triton_kernels=_triton_kernels,
)
