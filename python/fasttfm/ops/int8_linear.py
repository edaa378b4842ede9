"""Linear layers with int8 GEMMs on a CPU, for inference: kernels/int8_linear/op.h has the formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops.core import checks

_NAME = "int8_linear"
_PANEL, _GROUP = 16, 4  # the layout of a weight: panels of 16 columns, groups of 4 elements of K
_BLOCK, _STEP = 32, 64  # N and K are padded to multiples of these
OUTLIERS = 2  # the columns of an input that may be left out of the rounding
_ROW_FLOATS = 2 + OUTLIERS  # what the kernel keeps of each row
PRODUCTS = ("generic", "words", "vnni", "amx", "arm_dot", "arm_matrix")  # the slower ones of a CPU first


class Int8Weight(NamedTuple):
    """A weight ``[N, K]`` in the kernel's layout, which ``pack_int8`` computes."""

    panels: Tensor  # int8 [N / 16, K / 4, 16, 4]
    sums: Tensor  # int32 [N]
    scales: Tensor  # fp32 [N]
    bias: Tensor | None  # fp32 [N]
    outliers: Tensor | None  # int32 [2]
    outlier_weights: Tensor | None  # fp32 [2, N]
    shape: tuple[int, int]  # of the weight, without padding


def pack_int8(weight: Tensor, bias: Tensor | None = None, outliers: Sequence[int] | None = None) -> Int8Weight:
    """Rounds a weight to int8 with one scale per row (per-channel quantisation).

    Args:
        outliers: Two columns of the weight, in ascending order, that stay in fp32. Rows of the input are rounded
            without them: columns with much larger elements than all others would take most of the steps.
    """
    checks.check_floating(_NAME, "weight", weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise checks.bad_value(_NAME, "weight", "shape (N, K), both from 1 on", f"shape {tuple(weight.shape)}")
    rows, columns = weight.shape
    if bias is not None:
        checks.check_floating(_NAME, "bias", bias)
        checks.check_shape(_NAME, "bias", bias, (rows,))
    exact = weight.detach().to("cpu", torch.float32)
    more = (0, -rows % _BLOCK)
    indices = outlier_weights = None
    if outliers is not None:
        if len(outliers) != OUTLIERS or not 0 <= outliers[0] < outliers[1] < columns:
            expected = f"two ascending columns below {columns}"
            raise checks.bad_value(_NAME, "outliers", expected, repr(outliers))
        indices = torch.tensor(outliers, dtype=torch.int32, device="cpu")
        outlier_weights = torch.nn.functional.pad(exact[:, list(outliers)].T, more).contiguous()
        exact = exact.clone()
        exact[:, list(outliers)] = 0
    scales = exact.abs().amax(1) / 127
    rounded = (exact / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    padded = torch.nn.functional.pad(rounded, (0, -columns % _STEP, 0, -rows % _BLOCK)).to(torch.int8)
    panels = padded.unflatten(1, (-1, _GROUP)).unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()
    own_bias = None if bias is None else torch.nn.functional.pad(bias.detach().to("cpu", torch.float32), more)
    sums = padded.sum(1, dtype=torch.int32)
    own_scales = torch.nn.functional.pad(scales, more)
    return Int8Weight(panels, sums, own_scales, own_bias, indices, outlier_weights, (rows, columns))


def supported_products() -> list[str]:
    """The elements of ``PRODUCTS`` that this CPU and the active instruction set support, the fastest last."""
    codes = _native.core().int8_products_cpu()
    return [name for code, name in enumerate(PRODUCTS) if codes >> code & 1]


def fastest_products() -> int:
    """The code of the fastest instructions that this CPU has for int8 GEMMs."""
    return PRODUCTS.index(supported_products()[-1])


def int8_workspaces(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """The memory for the rounded rows of a GEMM's input [rows, columns], and for their ranges and outliers."""
    room, inner = -(-rows // _BLOCK) * _BLOCK, -(-columns // _STEP) * _STEP
    return x.new_empty(room, inner, dtype=torch.int8), x.new_empty(room, _ROW_FLOATS)


def int8_linear(x: Tensor, weight: Int8Weight, *, activation: str | None = None, products: str | None = None) -> Tensor:
    """``activation(x @ weight.T + bias)`` with the rows of ``x`` rounded to int8: fp32 ``[..., N]``, without gradient.

    Args:
        x: fp32 ``[..., K]`` on the CPU.
        activation: One of the values of ``ops.ACTIVATIONS``.
        products: One of ``PRODUCTS``; by default the fastest that the CPU supports. All give the same bits.
    """
    checks.check_floating(_NAME, "x", x)
    rows, columns = weight.shape
    if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1:] != (columns,):
        got = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        raise checks.bad_value(_NAME, "x", f"float32 [..., {columns}] on the CPU", got)
    for name, choice, known in (("activation", activation, CODES), ("products", products, PRODUCTS)):
        if choice is not None and choice not in known:
            raise checks.bad_value(_NAME, name, f"None or one of {', '.join(known)}", repr(choice))
    supported = supported_products()
    chosen = supported[-1] if products is None else products
    if chosen not in supported:
        raise checks.bad_value(_NAME, "products", f"one that this CPU has: {', '.join(supported)}", repr(products))
    flat = x.detach().contiguous().view(-1, columns)
    y = flat.new_empty(len(flat), rows)
    if len(flat) == 0:
        return y.view(*x.shape[:-1], rows)
    rounded, row_ranges = int8_workspaces(flat, len(flat), columns)
    code = -1 if activation is None else CODES[activation]
    _native.core().int8_linear_cpu(
        *(flat, weight.panels, weight.sums, weight.scales, weight.bias, weight.outliers, weight.outlier_weights),
        *(y, rounded, row_ranges, code, PRODUCTS.index(chosen)),
    )
    return y.view(*x.shape[:-1], rows)
