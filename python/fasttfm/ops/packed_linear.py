"""Linear layers on a CPU whose weights are packed in the order in which the kernel reads them, in fp32 or bf16, for
inference: kernels/packed_linear/op.h has the formula."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops.core import checks

_NAME = "packed_linear"
_PANEL = 16  # columns of a panel
_BLOCK, _STEP = 32, 32  # N and K are padded to multiples of these
_GROUPS = {torch.float32: 1, torch.bfloat16: 2}  # elements of K that follow each other
# The instructions for a weight in bf16, the slower ones of a CPU first, and those for a weight in fp32.
PRODUCTS = ("generic", "avx512", "amx", "arm_matrix", "fp32")


class PackedWeight(NamedTuple):
    """A weight ``[N, K]`` in the kernel's layout, which ``pack_weight`` computes."""

    panels: Tensor  # fp32 [N / 16, K, 16, 1] or bf16 [N / 16, K / 2, 16, 2]
    bias: Tensor | None  # fp32 [N]
    shape: tuple[int, int]  # of the weight, without padding


def pack_weight(weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """Casts a weight to fp32 or bf16, in the order in which the kernel reads it."""
    checks.check_floating(_NAME, "weight", weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise checks.bad_value(_NAME, "weight", "shape (N, K), both from 1 on", f"shape {tuple(weight.shape)}")
    if dtype not in _GROUPS:
        raise checks.bad_value(_NAME, "dtype", "torch.float32 or torch.bfloat16", str(dtype))
    rows, columns = weight.shape
    if bias is not None:
        checks.check_floating(_NAME, "bias", bias)
        checks.check_shape(_NAME, "bias", bias, (rows,))
    rounded = weight.detach().to("cpu", dtype)
    padded = torch.nn.functional.pad(rounded, (0, -columns % _STEP, 0, -rows % _BLOCK))
    panels = padded.unflatten(1, (-1, _GROUPS[dtype])).unflatten(0, (-1, _PANEL)).transpose(1, 2)
    padded_bias = None
    if bias is not None:
        padded_bias = torch.nn.functional.pad(bias.detach().to("cpu", torch.float32), (0, -rows % _BLOCK))
    return PackedWeight(panels.contiguous(), padded_bias, (rows, columns))


@functools.cache
def _products(codes: int) -> list[str]:
    return [name for code, name in enumerate(PRODUCTS) if codes >> code & 1]


def supported_products() -> list[str]:
    """The elements of ``PRODUCTS`` for a weight in bf16 that this CPU and the active instruction set support, the
    fastest last. ``generic`` multiplies in fp32."""
    return _products(_native.core().packed_products_cpu())


def fastest_products(dtype: torch.dtype) -> int:
    """The code of the fastest instructions that this CPU has for GEMMs with weights in fp32 or bf16."""
    return PRODUCTS.index("fp32" if dtype == torch.float32 else supported_products()[-1])


def packed_linear(
    x: Tensor, weight: PackedWeight, *, activation: str | None = None, products: str | None = None
) -> Tensor:
    """``activation(x @ weight.T + bias)``, with ``x`` rounded to the weight's dtype: fp32 ``[..., N]``, without
    gradient.

    Args:
        x: fp32 ``[..., K]`` on the CPU.
        activation: One of the values of ``ops.ACTIVATIONS``.
        products: Of a weight in bf16, one of ``PRODUCTS``; by default the fastest that the CPU supports.
    """
    checks.check_floating(_NAME, "x", x)
    rows, columns = weight.shape
    if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1:] != (columns,):
        got = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        raise checks.bad_value(_NAME, "x", f"float32 [..., {columns}] on the CPU", got)
    for name, choice, known in (("activation", activation, CODES), ("products", products, PRODUCTS)):
        if choice is not None and choice not in known:
            raise checks.bad_value(_NAME, name, f"None or one of {', '.join(known)}", repr(choice))
    dtype = weight.panels.dtype
    supported = ["fp32"] if dtype == torch.float32 else supported_products()
    chosen = supported[-1] if products is None else products
    if chosen not in supported:
        expected = f"one that this CPU has for {str(dtype).removeprefix('torch.')}: {', '.join(supported)}"
        raise checks.bad_value(_NAME, "products", expected, repr(products))
    flat = x.detach().contiguous().view(-1, columns)
    y = flat.new_empty(len(flat), rows)
    if len(flat) == 0:
        return y.view(*x.shape[:-1], rows)
    panels, groups, padded, group = weight.panels.shape
    rounded = flat.new_empty(-(-len(flat) // _BLOCK) * _BLOCK, groups * group, dtype=dtype)
    code = -1 if activation is None else CODES[activation]
    _native.core().packed_linear_cpu(
        flat, weight.panels, weight.bias, y, rounded, panels * padded, code, PRODUCTS.index(chosen)
    )
    return y.view(*x.shape[:-1], rows)
