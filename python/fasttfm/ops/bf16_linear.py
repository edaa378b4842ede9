"""Linear layers with bf16 GEMMs on a CPU, for inference: kernels/bf16_linear/op.h has the formula."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops.core import checks

_NAME = "bf16_linear"
_PANEL, _GROUP = 16, 2  # the layout of a weight: panels of 16 columns, pairs of elements of K
_BLOCK, _STEP = 32, 32  # N and K are padded to multiples of these
PRODUCTS = ("generic", "avx512", "amx", "arm_matrix")  # the slower ones of a CPU first


class Bf16Weight(NamedTuple):
    """A weight ``[N, K]`` in the kernel's layout, which ``pack_bf16`` computes."""

    panels: Tensor  # bf16 [N / 16, K / 2, 16, 2]
    bias: Tensor | None  # fp32 [N]
    shape: tuple[int, int]  # of the weight, without padding


def pack_bf16(weight: Tensor, bias: Tensor | None = None) -> Bf16Weight:
    """Rounds a weight to bf16, in the order in which the kernel reads it."""
    checks.check_floating(_NAME, "weight", weight)
    if weight.dim() != 2 or 0 in weight.shape:
        raise checks.bad_value(_NAME, "weight", "shape (N, K), both from 1 on", f"shape {tuple(weight.shape)}")
    rows, columns = weight.shape
    if bias is not None:
        checks.check_floating(_NAME, "bias", bias)
        checks.check_shape(_NAME, "bias", bias, (rows,))
    rounded = weight.detach().to("cpu", torch.bfloat16)
    padded = torch.nn.functional.pad(rounded, (0, -columns % _STEP, 0, -rows % _BLOCK))
    panels = padded.unflatten(1, (-1, _GROUP)).unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()
    more = (0, -rows % _BLOCK)
    own_bias = None if bias is None else torch.nn.functional.pad(bias.detach().to("cpu", torch.float32), more)
    return Bf16Weight(panels, own_bias, (rows, columns))


@functools.cache
def _products(codes: int) -> list[str]:
    return [name for code, name in enumerate(PRODUCTS) if codes >> code & 1]


def supported_products() -> list[str]:
    """The elements of ``PRODUCTS`` that this CPU and the active instruction set support, the fastest last. ``generic``
    multiplies in fp32."""
    return _products(_native.core().bf16_products_cpu())


def fastest_products() -> int:
    """The code of the fastest instructions that this CPU has for bf16 GEMMs."""
    return PRODUCTS.index(supported_products()[-1])


def bf16_linear(x: Tensor, weight: Bf16Weight, *, activation: str | None = None, products: str | None = None) -> Tensor:
    """``activation(x @ weight.T + bias)`` with ``x`` rounded to bf16: fp32 ``[..., N]``, without gradient.

    Args:
        x: fp32 ``[..., K]`` on the CPU.
        activation: One of the values of ``ops.ACTIVATIONS``.
        products: One of ``PRODUCTS``; by default the fastest that the CPU supports.
    """
    checks.check_floating(_NAME, "x", x)
    rows, columns = weight.shape
    if x.dtype != torch.float32 or not x.is_cpu or x.shape[-1:] != (columns,):
        got = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
        raise checks.bad_value(_NAME, "x", f"float32 [..., {columns}] on the CPU", got)
    for name, given, known in (("activation", activation, CODES), ("products", products, PRODUCTS)):
        if given is not None and given not in known:
            raise checks.bad_value(_NAME, name, f"None or one of {', '.join(known)}", repr(given))
    supported = supported_products()
    chosen = supported[-1] if products is None else products
    if chosen not in supported:
        raise checks.bad_value(_NAME, "products", f"one that this CPU has: {', '.join(supported)}", repr(products))
    flat = x.detach().contiguous().view(-1, columns)
    y = flat.new_empty(len(flat), rows)
    if len(flat) == 0:
        return y.view(*x.shape[:-1], rows)
    panels, _, padded, _ = weight.panels.shape
    room, inner = -(-len(flat) // _BLOCK) * _BLOCK, _GROUP * weight.panels.shape[1]
    rounded = flat.new_empty(room, inner, dtype=torch.bfloat16)
    code = -1 if activation is None else CODES[activation]
    _native.core().bf16_linear_cpu(
        flat, weight.panels, weight.bias, y, rounded, panels * padded, code, PRODUCTS.index(chosen)
    )
    return y.view(*x.shape[:-1], rows)
