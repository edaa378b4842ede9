"""The common part of specs of row-wise ops: x in several layouts, parameters of [C], costs and bad calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.testing.spec import BadCall, Cost, Inputs, OpCase, draw, spoil

BAD_ROWS = (
    BadCall("x is no tensor", "x", TypeError, spoil("x", [1.0])),
    BadCall("x is of integers", "x", TypeError, spoil("x", torch.ones(3, 64, dtype=torch.int64))),
    BadCall("x has no dimension", "x", ValueError, spoil("x", torch.tensor(1.0))),
    BadCall("x has no column", "x", ValueError, spoil("x", torch.ones(3, 0))),
)
TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda u: functional.gelu(u, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def row_case(name: str, *shape: int, options: dict[str, Any], **sizes: Any) -> OpCase:
    """A case with x of ``shape``. Sizes that draw_rows() knows: parameters (names), parameter_dtype, scale,
    offset, layout."""
    return OpCase(name, {"shape": shape, **sizes}, options)


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
    layout = case.sizes.get("layout", "contiguous")
    if layout == "transposed":  # [A, B, C] seen as [B, A, C]
        x = x.transpose(0, 1)
    elif layout == "sliced":  # every second row of a wider tensor
        wide = tensor(2 * x.shape[0], columns + 5, dtype=dtype)
        wide[::2, :columns] = x
        x = wide[::2, :columns]
    elif layout == "strided columns":
        x = x.repeat_interleave(2, dim=-1)[..., ::2]
    parameter_dtype = dtype if dtype == torch.float64 else case.sizes.get("parameter_dtype") or dtype
    present = case.sizes.get("parameters", parameters)
    drawn = {name: tensor(columns, dtype=parameter_dtype) if name in present else None for name in parameters}
    return {"x": x, **drawn}


def row_cost(times: float) -> Callable[[OpCase, torch.dtype], Cost]:
    """The cost of a kernel that reads and writes the elements of x, ``times`` in all."""
    return lambda case, dtype: Cost(bytes=times * torch.Size(case.sizes["shape"]).numel() * dtype.itemsize)
