"""Copies of a tensor in every memory layout that inputs and incoming gradients may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

Layout = Callable[[Tensor], Tensor]


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def misaligned(tensor: Tensor) -> Tensor:
    """Contiguous, but one element after an aligned address."""
    wide = tensor.new_empty(tensor.numel() + 1)
    return wide[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """Every second element along the last dimension of a wider tensor, whose others are NaN."""
    if tensor.dim() == 0:
        return tensor
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))
    return wide[..., ::2].copy_(tensor)


def padded_rows(tensor: Tensor) -> Tensor:
    """Rows of a wider tensor, whose other columns are NaN."""
    if tensor.dim() == 0:
        return tensor
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan"))
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def turned(tensor: Tensor) -> Tensor:
    """Reversed order of the dimensions in memory."""
    dims = tuple(reversed(range(tensor.dim())))
    return tensor.permute(dims).contiguous().permute(dims)


def expanded(tensor: Tensor) -> Tensor:
    """One number for all elements, every stride 0, as the gradient of ``y.sum()``."""
    return tensor.reshape(-1)[:1].reshape(()).expand(tensor.shape) if tensor.numel() > 0 else tensor


def one_row(tensor: Tensor) -> Tensor:
    """One row for all, the stride of the rows 0."""
    return tensor[:1].expand(tensor.shape) if tensor.dim() > 1 else tensor


INPUT_LAYOUTS: Mapping[str, Layout] = {
    "contiguous": contiguous,
    "misaligned": misaligned,
    "strided": strided,
    "padded_rows": padded_rows,
    "turned": turned,
}
INCOMING_LAYOUTS: Mapping[str, Layout] = {**INPUT_LAYOUTS, "one_row": one_row, "expanded": expanded}
