"""The common part of specs of row-wise ops: x in several layouts and parameters of [C]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.testing.spec import Inputs, OpCase, draw


def row_case(name: str, *shape: int, options: dict[str, Any], **sizes: Any) -> OpCase:
    """A case with x of ``shape``. Sizes that draw_rows() knows: parameters (names), parameter_dtype, scale, layout."""
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

    x = tensor(*shape, dtype=dtype, scale=case.sizes.get("scale", 1.0))
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


def rows_and_columns(case: OpCase) -> tuple[int, int]:
    *leading, columns = case.sizes["shape"]
    return int(torch.Size(leading).numel()), columns
