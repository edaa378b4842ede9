"""Shared parts of ops with linear layers: autocast, checks, and GEMMs of torch."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import empty_output as empty_output
from fasttfm.ops.core import checks, weight_copies
from fasttfm.ops.core.backends import dtype_name, requested
from fasttfm.ops.core.library import is_plain, needs_gradient

_BLOCK_COLUMNS = 32
_EMULATED_ROWS = 16  # with at least this many rows, fp32 is faster than bf16 emulated by oneDNN


def autocast(x: Any, *others: Any) -> tuple[Any, ...]:
    """The tensors in autocast's dtype, if it is enabled for x's device, as in torch's linear layers."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(x, Tensor):
        return (x, *others)
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):  # torch has none for the meta device
        return (x, *others)
    dtype = torch.get_autocast_dtype(device)

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype in (dtype, torch.float64) or not value.is_floating_point():
            return value
        return value.to(dtype)

    return tuple(cast(value) for value in (x, *others))


def in_type(tensors: Sequence[Tensor | None], dtype: torch.dtype, *, copies: bool = False) -> list[Any]:
    """The tensors in a type, by one launch for all of them; itself where one is in it already.

    Args:
        copies: Whether copies that an optimizer keeps (weight_copies.py) may be given.
    """
    others = [tensor for tensor in tensors if tensor is not None and tensor.dtype != dtype]
    if others and is_plain(others):
        kept = weight_copies.copies_of(others, dtype) if copies else [None] * len(others)
        missing = [tensor for tensor, copy in zip(others, kept, strict=True) if copy is None]
        made = [torch.empty_like(tensor, dtype=dtype) for tensor in missing]
        if made:
            torch._foreach_copy_(made, missing)
        new = iter(made)
        cast = [next(new) if copy is None else copy for copy in kept]
    else:
        cast = [tensor.to(dtype) for tensor in others]
    ready = iter(cast)
    return [tensor if tensor is None or tensor.dtype == dtype else next(ready) for tensor in tensors]


MOST_FEW_ROWS = 8  # on a CPU


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x @ weight.T + bias`` of up to ``MOST_FEW_ROWS`` rows on a CPU, without a gradient, by the core; None if the
    core does not run the call. It reads the weight once; a BLAS may read it several times."""
    given = [x, weight] if bias is None else [x, weight, bias]
    fits = all(each.is_cpu and each.dtype == torch.float32 and each.is_contiguous() for each in given)
    if not fits or not 0 < len(x) <= MOST_FEW_ROWS or _native.missing() is not None or not is_plain(given):
        return None
    if needs_gradient(*given) or torch.is_autocast_enabled("cpu") or requested(None) not in (None, "cpu"):
        return None
    y = x.new_empty(len(x), len(weight))
    _native.core().linear_cpu(x, weight, bias, y)
    return y


def check_input(op: str, x: Any) -> None:
    checks.check_floating(op, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(op, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")


def check_weight(op: str, argument: str, weight: Any, columns: int, x: Tensor, *, like: str = "x") -> None:
    """``weight`` is a matrix of any number of rows, at least one, that takes ``columns`` columns."""
    checks.check_floating(op, argument, weight)
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != columns:
        raise checks.bad_value(op, argument, f"shape (at least 1, {columns})", f"shape {tuple(weight.shape)}")
    _check_like(op, argument, weight, x, like)


def check_bias(op: str, argument: str, bias: Any, weight: Tensor, x: Tensor, *, like: str = "x") -> None:
    """``bias`` is None or has one element for each of the weight's rows."""
    if bias is not None:
        checks.check_floating(op, argument, bias, optional=True)
        checks.check_shape(op, argument, bias, (weight.shape[0],))
        _check_like(op, argument, bias, x, like)


def _check_like(op: str, argument: str, tensor: Tensor, x: Tensor, like: str) -> None:
    checks.check_device(op, argument, tensor, like=x)
    if tensor.dtype != x.dtype:
        raise checks.bad_type(op, argument, f"{dtype_name(x.dtype)} like {like}", dtype_name(tensor.dtype))


def make_output(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """The output [..., O] of a declared op with rows [..., C] and a weight [O, C]."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, shape: Sequence[int] | None = None) -> Tensor:
    """``a @ b + bias`` of matrices, summed in fp32, rounded once: a new tensor of ``shape``, else [rows, columns].

    The bias goes into the GEMM's epilogue. Writing into a tensor of the final shape means that the result is not a
    view, so that autograd lets users change it in place; and autocast, which was already applied to the arguments,
    ignores calls with ``out``. If neither matters the GEMM allocates its own result, which costs less host time.
    """
    a, b = _whole_blocks(a, b)
    if shape is None and not _widened(a) and _autocast_leaves(a):
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    out = torch.empty(*shape or (a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    matrix = out if shape is None else out.view(a.shape[0], b.shape[1])
    if _widened(a):
        wide = torch.empty(*matrix.shape, dtype=torch.float32, device=a.device)
        product = torch.mm(a.float(), b.float(), out=wide)
        matrix.copy_(product if bias is None else product.add_(bias))
    elif bias is None:
        torch.mm(a, b, out=matrix)
    else:
        torch.addmm(bias, a, b, out=matrix)
    return out


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b`` of matrices in total's place: the product's epilogue reads it. Rounded once."""
    a, b = _whole_blocks(a, b)
    if _widened(a):
        return total.copy_(torch.addmm(total.float(), a.float(), b.float()))
    return torch.addmm(total, a, b, out=total)


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, in fp32 if torch's GEMM in x's dtype is very slow."""
    if not is_widened(x):
        return torch.nn.functional.linear(x, weight, bias)
    x, weight, bias = autocast(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)


def is_widened(x: Tensor) -> bool:
    """Whether ``dense`` computes in fp32, for x's dtype or autocast's. Compiled graphs use torch's linear."""
    return not torch.compiler.is_compiling() and x.is_cpu and _widened(autocast(x)[0])


def _whole_blocks(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices; in bf16 on a CPU padded with zeros to a multiple of 32 columns of ``a``.

    oneDNN multiplies bf16 in blocks of columns. It multiplies the numbers after the end of a row, which are padding or
    the next row, by 0, which gives NaN if such a number is NaN or infinite.
    """
    if not a.is_cpu or a.dtype != torch.bfloat16 or a.stride(1) != 1 or a.shape[1] % _BLOCK_COLUMNS == 0:
        return a, b
    missing = -a.shape[1] % _BLOCK_COLUMNS
    return torch.nn.functional.pad(a, (0, missing)), torch.nn.functional.pad(b, (0, 0, 0, missing))


def _autocast_leaves(a: Tensor) -> bool:
    """Whether autocast would not change a GEMM in a's dtype."""
    if not torch._C._is_any_autocast_enabled():
        return True
    return (a.is_cuda or a.is_cpu) and a.dtype == torch.get_autocast_dtype("cuda" if a.is_cuda else "cpu")


def _widened(a: Tensor) -> bool:
    """Whether GEMMs of this dtype run in fp32: bf16 on CPUs without bf16 instructions. If torch has no bf16 kernel
    either, its bf16 GEMM is hundreds of times slower than fp32. If oneDNN emulates bf16, fp32 is three to four times as
    fast, except for few rows, where converting the weight takes longer than the GEMM."""
    if not a.is_cpu or a.dtype != torch.bfloat16:
        return False
    kind = bf16_products()
    if kind == "emulated":
        return min(a.numel() // max(1, a.shape[-1]), a.shape[-1]) >= _EMULATED_ROWS
    return kind == "none"


@functools.cache
def bf16_products() -> str:
    """How this CPU multiplies bf16: by ``instructions`` (AMX, AVX512-BF16, Arm's BF16 extension), ``emulated`` by
    oneDNN, or ``none``."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "none"
    if platform.machine() not in ("x86_64", "AMD64"):
        return "instructions"
    has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "instructions" if has else "emulated"
