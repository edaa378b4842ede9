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
from fasttfm.ops import checks
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    dtype_name,
    requested,
    triton_absent,
    triton_interpreted,
)
from fasttfm.ops.library import OpFunction, is_plain, needs_gradient, register, unshared

OP = "pack"
_UNPACK = "unpack"
_LARGEST = 2**31 - 1  # number in cu_seqlens


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
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[total, ...]``, contiguous. Its gradient is ``unpack``'s.
    """
    if not isinstance(x, Tensor):
        raise checks.bad_type(OP, "x", "a tensor", type(x).__name__)
    if x.dim() < 2:
        raise checks.bad_value(OP, "x", "at least two dimensions", f"shape {tuple(x.shape)}")
    if (cu_seqlens is None) == (lengths is None):
        raise checks.bad_value(
            OP, "cu_seqlens", "either cu_seqlens or lengths", "both" if lengths is not None else "none"
        )
    if lengths is not None:
        cu_seqlens = cu_seqlens_from_lengths(lengths, device=x.device)
        if total is None and not isinstance(lengths, Tensor):
            total = sum(lengths)
    checks.check_cu_seqlens(OP, cu_seqlens, like=x)
    assert cu_seqlens is not None
    if cu_seqlens.shape[0] != x.shape[0] + 1:
        got = f"boundaries of {cu_seqlens.shape[0] - 1}"
        raise checks.bad_value(OP, "cu_seqlens", f"boundaries of {x.shape[0]} sequences", got)
    if total is None:
        total = int(cu_seqlens[-1])
    _check_count(OP, "total", total, most=x.shape[0] * x.shape[1])
    TABLE.check_name(backend)
    return _packed(x, cu_seqlens, total, requested(backend))


def unpack(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, backend: str | None = None) -> Tensor:
    """Puts sequences back into a padded batch.

    Args:
        packed: ``[T, ...]``, of any type.
        cu_seqlens: int32 ``[B + 1]``, as for ``pack``.
        max_seqlen: Tokens of each sequence in the result: at least the longest's. Not validated on the GPU, where
            tokens past it are lost.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[B, max_seqlen, ...]``, contiguous, 0 where there is no token. Its gradient is ``pack``'s.
    """
    if not isinstance(packed, Tensor):
        raise checks.bad_type(_UNPACK, "packed", "a tensor", type(packed).__name__)
    if packed.dim() < 1:
        raise checks.bad_value(_UNPACK, "packed", "at least one dimension", "none")
    checks.check_cu_seqlens(_UNPACK, cu_seqlens, like=packed)
    _check_count(_UNPACK, "max_seqlen", max_seqlen, most=_LARGEST)
    UNPACK_TABLE.check_name(backend)
    return _unpacked(packed, cu_seqlens, max_seqlen, requested(backend))


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
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    if device is None or torch.device(device).type != "cuda":
        return boundaries.to(device)
    return boundaries.pin_memory().to(device, non_blocking=True)


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
    return philox.packed_positions(torch.arange(total, device=cu_seqlens.device), cu_seqlens)[1]


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Pack(OpFunction):
    op = OP
    instead = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, cu_seqlens: Tensor, total: int, backend: str | None) -> Tensor:
        ctx.save_for_backward(*unshared(cu_seqlens))
        ctx.max_seqlen, ctx.backend = x.shape[1], backend
        packed: Tensor = _pack_op(x, cu_seqlens, total, backend)
        return packed

    @staticmethod
    def backward(ctx: Any, dpacked: Tensor) -> tuple[Tensor, None, None, None]:
        (cu_seqlens,) = ctx.saved_tensors
        return _unpacked(dpacked, cu_seqlens, ctx.max_seqlen, ctx.backend), None, None, None


class _Unpack(OpFunction):
    op = _UNPACK
    instead = None

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str | None) -> Tensor:
        ctx.save_for_backward(*unshared(cu_seqlens))
        ctx.total, ctx.backend = packed.shape[0], backend
        x: Tensor = _unpack_op(packed, cu_seqlens, max_seqlen, backend)
        return x

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        (cu_seqlens,) = ctx.saved_tensors
        return _packed(dx, cu_seqlens, ctx.total, ctx.backend), None, None, None


def _packed(x: Tensor, *options: Any) -> Tensor:
    packed: Tensor = _Pack.apply(x, *options) if needs_gradient(x) else _pack_op(x, *options)
    return packed


def _unpacked(packed: Tensor, *options: Any) -> Tensor:
    x: Tensor = _Unpack.apply(packed, *options) if needs_gradient(packed) else _unpack_op(packed, *options)
    return x


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _pack(x: Tensor, cu_seqlens: Tensor, total: int, backend: str | None) -> Tensor:
    checks.check_cu_seqlens_values(OP, cu_seqlens, total, longest=x.shape[1], exact=False)
    packed: Tensor = TABLE.select(backend, x).forward(x, cu_seqlens, total)
    return packed


def _pack_fake(x: Tensor, cu_seqlens: Tensor, total: int, backend: str | None) -> Tensor:
    return x.new_empty((total, *x.shape[2:]))


def _unpack(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str | None) -> Tensor:
    checks.check_cu_seqlens_values(_UNPACK, cu_seqlens, packed.shape[0], longest=max_seqlen, exact=False)
    x: Tensor = UNPACK_TABLE.select(backend, packed).forward(packed, cu_seqlens, max_seqlen)
    return x


def _unpack_fake(packed: Tensor, cu_seqlens: Tensor, max_seqlen: int, backend: str | None) -> Tensor:
    return packed.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:]))


_pack_op = register("pack(Tensor x, Tensor cu_seqlens, SymInt total, str? backend) -> Tensor", _pack, _pack_fake)
_unpack_op = register(
    "unpack(Tensor packed, Tensor cu_seqlens, SymInt max_seqlen, str? backend) -> Tensor", _unpack, _unpack_fake
)


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


def _pack_triton(*args: Any) -> Tensor:
    from fasttfm.kernels.pack import triton

    packed: Tensor = triton.pack_triton(*args)
    return packed


def _unpack_triton(*args: Any) -> Tensor:
    from fasttfm.kernels.pack import triton

    x: Tensor = triton.unpack_triton(*args)
    return x


def _refuse_native(tensor: Tensor, *_: Any) -> str | None:
    return None if tensor.device.type == "cpu" else f"takes CPU tensors, got {tensor.device.type}"


_CUDA_BYTES = 2**24  # beyond it the copy decides, not the launch, and Triton's kernels copy faster


def _refuse_cuda(tensor: Tensor, *_: Any) -> str | None:
    if not tensor.is_cuda:
        return f"takes CUDA tensors, got {tensor.device.type}"
    if (reason := _native.missing_on(tensor.get_device())) is not None:
        return reason
    if (given := tensor.numel() * tensor.element_size()) > _CUDA_BYTES:
        return f"takes up to {_CUDA_BYTES} bytes, got {given}"
    return None


def _refuse_triton(tensor: Tensor, *_: Any) -> str | None:
    expected = "cpu" if triton_interpreted() else "cuda"
    if tensor.device.type != expected:
        return f"takes {expected} tensors, got {tensor.device.type}"
    return f"takes real numbers, got {dtype_name(tensor.dtype)}" if tensor.dtype.is_complex else None


# The CPU core comes before Triton, so that Triton's interpreter serves a CPU tensor only when it is requested by name.
TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, _refuse_native, _pack_native, _unpack_native),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, _pack_native, _unpack_native),
        Backend("triton", triton_absent, _refuse_triton, _pack_triton, _unpack_triton),
        Backend("reference", always, lambda *_: None, reference.pack, reference.unpack),
    ),
)
UNPACK_TABLE = BackendTable(
    _UNPACK, tuple(replace(b, forward=b.backward, backward=b.forward) for b in TABLE.backends if b.backward is not None)
)
