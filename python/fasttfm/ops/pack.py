"""``pack`` and ``unpack``: remove padding and restore it; and the ways to come by ``cu_seqlens``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.pack import reference
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, converted, indices
from fasttfm.ops.core.backends import (
    Backend,
    dtype_name,
    from_triton,
    refuse_triton,
    torch_reference,
    triton_absent,
    triton_interpreted,
)
from fasttfm.ops.core.declare import LinearOp
from fasttfm.ops.core.library import is_plain

_PACK, _UNPACK = "pack", "unpack"
_LARGEST = 2**31 - 1  # number in cu_seqlens
_MASK_TYPES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)


def pack(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    total: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Removes the padding at the end of each sequence.

    Args:
        x: ``[B, S, ...]``, of any type.
        cu_seqlens: int32 ``[B + 1]``: sequence i becomes the rows from cu_seqlens[i] to cu_seqlens[i + 1].
        lengths: ``B`` sequence lengths, instead of ``cu_seqlens``.
        total: Rows of the result, at least the sum of the lengths; rows past that are 0, so a fixed ``total`` suits
            CUDA graphs. By default the sum, which is at hand if ``lengths`` are Python's integers or on the CPU; if
            they, or ``cu_seqlens``, are on a GPU, the call waits for it.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        ``[total, ...]``, contiguous. Its gradient is ``unpack``'s.
    """
    if not isinstance(x, Tensor):
        raise checks.bad_type(_PACK, "x", "a tensor", type(x).__name__)
    if x.dim() < 2:
        raise checks.bad_value(_PACK, "x", "at least two dimensions", f"shape {tuple(x.shape)}")
    if (cu_seqlens is None) == (lengths is None):
        raise checks.bad_value(
            _PACK, "cu_seqlens", "either cu_seqlens or lengths", "both" if lengths is not None else "none"
        )
    if lengths is not None:
        cu_seqlens = cu_seqlens_from_lengths(lengths, device=x.device)
        if total is None and not isinstance(lengths, Tensor):
            total = sum(lengths)
    checks.check_cu_seqlens(_PACK, cu_seqlens, like=x)
    assert cu_seqlens is not None
    if cu_seqlens.shape[0] != x.shape[0] + 1:
        got = f"boundaries of {cu_seqlens.shape[0] - 1}"
        raise checks.bad_value(_PACK, "cu_seqlens", f"boundaries of {x.shape[0]} sequences", got)
    if total is None:
        total = int(cu_seqlens[-1])
    _check_count(_PACK, "total", total, most=x.shape[0] * x.shape[1])
    return PACK(x, cu_seqlens, total, backend=backend)


def unpack(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, backend: str | None = None) -> Tensor:
    """Puts sequences back into a padded batch.

    Args:
        packed: ``[T, ...]``, of any type.
        cu_seqlens: int32 ``[B + 1]``, as for ``pack``.
        max_seqlen: Tokens of each sequence in the result: at least the longest's. Not validated on the GPU, where
            tokens past it are lost.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        ``[B, max_seqlen, ...]``, contiguous, 0 where there is no token. Its gradient is ``pack``'s.
    """
    if not isinstance(packed, Tensor):
        raise checks.bad_type(_UNPACK, "packed", "a tensor", type(packed).__name__)
    if packed.dim() < 1:
        raise checks.bad_value(_UNPACK, "packed", "at least one dimension", "none")
    checks.check_cu_seqlens(_UNPACK, cu_seqlens, like=packed)
    _check_count(_UNPACK, "max_seqlen", max_seqlen, most=_LARGEST)
    return UNPACK(packed, cu_seqlens, max_seqlen, backend=backend)


def _check_count(op: str, argument: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise checks.bad_type(op, argument, "an integer", type(value).__name__)
    if not 0 <= value <= most:
        raise checks.bad_value(op, argument, f"a number in [0, {most}]", value)


# ---- where sequences begin and end -----------------------------------------------------------------------------------


def cu_seqlens_from_lengths(lengths: Sequence[int] | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """int32 ``[B + 1]``: 0 and the running sum of the lengths. Waits for no GPU, wherever the lengths are."""
    op = "cu_seqlens_from_lengths"
    if isinstance(lengths, Tensor):
        checks.check_index(op, "lengths", lengths)
        if lengths.dim() != 1:
            raise checks.bad_value(op, "lengths", "one dimension", f"shape {tuple(lengths.shape)}")
        if lengths.is_cpu and is_plain((lengths,)):
            _check_lengths(op, lengths.tolist())
        ends = lengths.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(ends, (1, 0)).to(device)
    for position, length in enumerate(lengths):
        if isinstance(length, bool) or not isinstance(length, int):
            raise checks.bad_type(op, "lengths", "integers", f"{type(length).__name__} at {position}")
    _check_lengths(op, lengths)
    boundaries = [0, *itertools.accumulate(lengths)]
    if device is None or torch.device(device).type != "cuda":
        return torch.tensor(boundaries, dtype=torch.int32, device=device)
    pinned = torch.tensor(boundaries, dtype=torch.int32, device="cpu", pin_memory=True)
    return pinned.to(device, non_blocking=True)


def _check_lengths(op: str, lengths: Sequence[int]) -> None:
    for position, length in enumerate(lengths):
        if length < 0:
            raise checks.bad_value(op, "lengths", "no negative number", f"{length} at {position}")
    if sum(lengths) > _LARGEST:
        raise checks.bad_value(op, "lengths", f"a sum of at most {_LARGEST}, as int32 holds", sum(lengths))


def cu_seqlens_from_mask(mask: Tensor) -> Tensor:
    """``cu_seqlens`` of a mask ``[B, S]`` that is true (or not 0) for tokens and false for the padding after them.

    A mask with gaps has sequences that no ``cu_seqlens`` describes: ``token_indices_from_mask`` is for those.
    """
    return cu_seqlens_from_lengths(_as_mask("cu_seqlens_from_mask", mask).sum(dim=1))


def token_indices_from_mask(mask: Tensor, *, total: int | None = None) -> Tensor:
    """The indices of the tokens in the flattened mask ``[B, S]``, int64 ``[total]``, for any mask: ``x.flatten(0,
    1)[indices]`` has them without padding. Without ``total``, their number, it synchronizes with the GPU."""
    flat = _as_mask("token_indices_from_mask", mask).flatten()
    if total is None:
        return flat.nonzero().squeeze(1)
    return torch.nonzero_static(flat, size=total).squeeze(1)


def _as_mask(op: str, mask: Any) -> Tensor:
    if not isinstance(mask, Tensor):
        raise checks.bad_type(op, "mask", "a tensor", type(mask).__name__)
    if mask.dim() != 2:
        raise checks.bad_value(op, "mask", "shape (B, S)", f"shape {tuple(mask.shape)}")
    return mask if mask.dtype == torch.bool else mask != 0


def position_ids_from_cu_seqlens(cu_seqlens: Tensor, *, total: int | None = None) -> Tensor:
    """Each packed token's index in its own sequence, int64 ``[total]``. Without ``total`` it synchronizes with the
    GPU."""
    op = "position_ids_from_cu_seqlens"
    checks.check_cu_seqlens(op, cu_seqlens, like=cu_seqlens)
    if total is None:
        total = int(cu_seqlens[-1])
    if is_plain((cu_seqlens,)):
        checks.check_cu_seqlens_values(op, cu_seqlens, total, exact=False)
        if cu_seqlens.shape[0] > 1 and _has_kernels(cu_seqlens):
            positions = torch.empty(total, dtype=torch.int64, device=cu_seqlens.device)
            _native.core().packed_positions_cuda(cu_seqlens.contiguous(), positions)
            return positions
    return philox.packed_positions(torch.arange(total, device=cu_seqlens.device), cu_seqlens)[1]


def _has_kernels(x: Tensor) -> bool:
    """Whether the native core has CUDA kernels for a tensor's GPU."""
    return x.is_cuda and _native.missing_cuda() is None and _native.missing_on(x.get_device()) is None


def layout_of_mask(mask: Tensor) -> tuple[Tensor, int, bool] | None:
    """The layout of a plain mask ``[B, S]`` on a GPU, not 0 for tokens: ``cu_seqlens``, the number of tokens, and
    whether in every row they precede the padding. It synchronizes with the GPU once. None without the native core's
    CUDA kernels."""
    if not _has_kernels(mask):
        return None
    mask = (mask if mask.dtype in _MASK_TYPES else mask.bool()).contiguous()
    cu_seqlens = torch.empty(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
    layout = torch.empty(2, dtype=torch.int32, device="cpu", pin_memory=True)
    _native.core().mask_layout_cuda(mask, cu_seqlens, layout.data_ptr(), mask.element_size())
    torch.cuda.current_stream(mask.device).synchronize()
    tokens, first = layout.tolist()
    return cu_seqlens, tokens, bool(first)


# ---- means -----------------------------------------------------------------------------------------------------------


def sequence_means(x: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, skipped: int = 0) -> Tensor:
    """The mean of the tokens of each packed sequence except the first ``skipped``: fp32 ``[B, C]``, 0 where there are
    none. Arguments are not validated. Where a gradient is needed, the mean is computed from a padded batch."""
    without_gradient = is_plain((x, cu_seqlens)) and not (x.requires_grad and torch.is_grad_enabled())
    if x.is_cuda and without_gradient and triton_absent() is None and refuse_triton(x) is None:
        from fasttfm.kernels.pack.triton_mean import sequence_means_triton

        means: Tensor = sequence_means_triton(x, cu_seqlens, skipped)
        return means
    whole = x.is_cpu and without_gradient and cu_seqlens.shape[0] == 2 and cu_seqlens.tolist() == [0, x.shape[0]]
    if whole and x.shape[0] == max_seqlen > skipped:
        return (x[skipped:] if skipped else x).mean(0, keepdim=True, dtype=torch.float32)
    padded = unpack(x, cu_seqlens, max_seqlen)[:, skipped:]
    counts = (cu_seqlens.diff() - skipped).clamp(min=1)
    return padded.sum(1, dtype=torch.float32) / counts[:, None]


# ---- the native core -------------------------------------------------------------------------------------------------


def _pack_native(x: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    x = x.contiguous()
    packed = torch.empty((total, *x.shape[2:]), dtype=x.dtype, device=x.device)
    _native.core().pack(x, packed, cu_seqlens.contiguous(), x.shape[1], total, _token_bytes(packed))
    return packed


def _unpack_native(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    packed = packed.contiguous()
    shape = (cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:])
    x = torch.empty(shape, dtype=packed.dtype, device=packed.device)
    _native.core().unpack(packed, x, cu_seqlens.contiguous(), max_seqlen, packed.shape[0], _token_bytes(packed))
    return x


def _token_bytes(packed: Tensor) -> int:
    return packed.shape[1:].numel() * packed.element_size()


# ---- backends --------------------------------------------------------------------------------------------------------


def _refuse_native(tensor: Tensor, *_: Any) -> str | None:
    return None if tensor.device.type == "cpu" else f"takes CPU tensors, got {tensor.device.type}"


_CUDA_BYTES = 2**24  # beyond it the copy decides, not the launch, and Triton's kernels copy faster


def _refuse_cuda(tensor: Tensor, *_: Any) -> str | None:
    if not tensor.is_cuda:
        return f"takes CUDA tensors, got {tensor.device.type}"
    if (reason := _native.missing_on(tensor.get_device())) is not None:
        return reason
    if (size := tensor.numel() * tensor.element_size()) > _CUDA_BYTES:
        return f"takes up to {_CUDA_BYTES} bytes, got {size}"
    return None


def _refuse_triton(tensor: Tensor, *_: Any) -> str | None:
    expected = "cpu" if triton_interpreted() else "cuda"
    if tensor.device.type != expected:
        return f"takes {expected} tensors, got {tensor.device.type}"
    return f"takes real numbers, got {dtype_name(tensor.dtype)}" if tensor.dtype.is_complex else None


# The CPU core comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
_BACKENDS = (
    Backend("cpu", _native.missing, _refuse_native, _pack_native, _unpack_native),
    Backend("cuda", _native.missing_cuda, _refuse_cuda, _pack_native, _unpack_native),
    Backend(
        "triton", triton_absent, _refuse_triton, from_triton(_PACK, "pack_triton"), from_triton(_PACK, "unpack_triton")
    ),
    torch_reference(reference.pack, reference.unpack),
)


# ---- the declarations ------------------------------------------------------------------------------------------------


def _check_packed(x: Tensor, cu_seqlens: Tensor, total: int) -> None:
    checks.check_cu_seqlens_values(_PACK, cu_seqlens, total, longest=x.shape[1], exact=False)


def _check_unpacked(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
    checks.check_cu_seqlens_values(_UNPACK, cu_seqlens, packed.shape[0], longest=max_seqlen, exact=False)


PACK: LinearOp = LinearOp(
    _PACK,
    inputs=(checked("x"), indices("cu_seqlens")),
    options=(converted("total", "SymInt"),),
    output=lambda x, cu_seqlens, total, *_: x.new_empty((total, *x.shape[2:])),
    adjoint=lambda dy, shape, _, cu_seqlens, total, backend: UNPACK.apply(dy, cu_seqlens, shape[1], backend),
    check_values=_check_packed,
    backends=_BACKENDS,
)
UNPACK: LinearOp = LinearOp(
    _UNPACK,
    inputs=(checked("packed"), indices("cu_seqlens")),
    options=(converted("max_seqlen", "SymInt"),),
    output=lambda x, bounds, max_seqlen, *_: x.new_empty((bounds.shape[0] - 1, max_seqlen, *x.shape[1:])),
    adjoint=lambda dy, shape, _, cu_seqlens, max_seqlen, backend: PACK.apply(dy, cu_seqlens, shape[0], backend),
    check_values=_check_unpacked,
    backends=[replace(backend, forward=backend.backward, backward=backend.forward) for backend in _BACKENDS],
)
