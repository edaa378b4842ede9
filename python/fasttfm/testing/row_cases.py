"""The common part of specs of row-wise ops and of linear layers: x in several layouts, parameters, costs, bad calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.bench.peers import Inputs, Peer
from fasttfm.testing.spec import BadCall, Cost, OpCase, draw, spoil

BAD_ROWS = (
    BadCall("x is no tensor", "x", TypeError, spoil("x", [1.0])),
    BadCall("x is of integers", "x", TypeError, spoil("x", torch.ones(3, 64, dtype=torch.int64))),
    BadCall("x has no dimension", "x", ValueError, spoil("x", torch.tensor(1.0))),
    BadCall("x has no column", "x", ValueError, spoil("x", torch.ones(3, 0))),
)
BAD_EPS = (
    BadCall("eps is text", "eps", TypeError, spoil("eps", "small")),
    BadCall("eps is negative", "eps", ValueError, spoil("eps", -1.0)),
    BadCall("eps is not a number", "eps", ValueError, spoil("eps", float("nan"))),
)
TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda u: functional.gelu(u, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def bad_parameter(name: str, columns: int = 64) -> tuple[BadCall, ...]:
    """Unusable values of a parameter of [columns]."""
    return (
        BadCall(f"{name} too short", name, ValueError, spoil(name, torch.ones(63))),
        BadCall(f"{name} of two dimensions", name, ValueError, spoil(name, torch.ones(1, columns))),
        BadCall(f"{name} elsewhere", name, ValueError, spoil(name, torch.ones(columns, device="meta"))),
        BadCall(f"{name} is a number", name, TypeError, spoil(name, 1.0)),
        BadCall(f"double {name}, single x", "x", TypeError, spoil(name, torch.ones(columns, dtype=torch.float64))),
    )


def row_case(name: str, *shape: int, options: dict[str, Any], **sizes: Any) -> OpCase:
    """A case with x of ``shape``. Sizes that draw_rows() knows: parameters (names), parameter_dtype, scale,
    offset, layout."""
    return OpCase(name, {"shape": shape, **sizes}, options)


def in_layout(x: Tensor, layout: str, tensor: Callable[..., Tensor], padding: int = 5) -> Tensor:
    """The numbers of x in another layout. ``tensor`` draws a wider tensor, by ``padding`` columns, for "sliced"."""
    if layout == "transposed":  # [A, B, C] seen as [B, A, C]
        return x.transpose(0, 1)
    if layout in ("strided", "strided columns"):
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "sliced":  # every second row of a wider tensor
        wide, columns = tensor(2 * x.shape[0], x.shape[-1] + padding), x.shape[-1]
        wide[::2, :columns] = x
        return wide[::2, :columns]
    return x


def draw_rows(
    case: OpCase,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    parameters: tuple[str, ...],
) -> Inputs:
    """x, and those of ``parameters`` that the case has; the others are None."""
    shape = case.sizes["shape"]
    columns = shape[-1]

    def tensor(*sizes: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    x = tensor(*shape, dtype=dtype, scale=case.sizes.get("scale", 1.0)) + case.sizes.get("offset", 0.0)
    x = in_layout(x, case.sizes.get("layout", "contiguous"), functools.partial(tensor, dtype=dtype))
    parameter_dtype = dtype if dtype == torch.float64 else case.sizes.get("parameter_dtype") or dtype
    present = case.sizes.get("parameters", parameters)
    drawn = {name: tensor(columns, dtype=parameter_dtype) if name in present else None for name in parameters}
    return {"x": x, **drawn}


def row_cost(times: float) -> Callable[[OpCase, torch.dtype], Cost]:
    """The cost of a kernel that reads and writes the elements of x, ``times`` in all."""
    return lambda case, dtype: Cost(bytes=times * torch.Size(case.sizes["shape"]).numel() * dtype.itemsize)


def row_kernels(*columns: int) -> Iterator[tuple[int, str, str]]:
    """Columns, and types of rows and parameters, that Triton's kernels are compiled for."""
    for types in itertools.product(columns, (("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32"))):
        yield types[0], *types[1]


def linear_cost(case: OpCase, dtype: torch.dtype, outputs: int, gemms: int) -> Cost:
    """The flops of GEMMs of x's rows with a weight [outputs, C]; each reads its two operands and writes its result."""
    *leading, columns = case.sizes["shape"]
    rows = torch.Size(leading).numel()
    bytes_of_one = (rows * (columns + outputs) + columns * outputs) * dtype.itemsize
    return Cost(bytes=gemms * bytes_of_one, flops=gemms * 2 * rows * columns * outputs)


class _BareGemm(torch.autograd.Function):
    """A linear layer's three GEMMs without anything else, as a lower bound for every fused op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t())

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(dy, weight), torch.mm(dy.t(), x)


def bare_gemms(*weights: str) -> Peer:
    """The peer of ops that apply linear layers with these weights to ``x``, one after the other."""

    def build(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Tensor]:
        x, layers = inputs["x"].flatten(0, -2), [inputs[name] for name in weights]
        return lambda: functools.reduce(_BareGemm.apply, layers, x)

    return Peer("bare GEMMs", build)
