"""Linear layers whose three GEMMs have FP8 operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.ops.core import counted_changes
from fasttfm.ops.fp8 import native
from fasttfm.ops.fp8.casts import TABLE, Quantized, cast, gelu, gelu_backward
from fasttfm.ops.fp8.scales import E4M3, Slot


def gemm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool
) -> Tensor:
    """``a b^T + bias`` of FP8 matrices a [M, K] and b [N, K], each with its inverse scale.

    Args:
        fast: Whether Hopper's tensor cores accumulate over all of K, in fewer bits than fp32 has. Gradients do not use
            it, because sums over tokens are long; ``gelu_gemm_backward``, which sums over columns, does.
    """
    (left, left_scale), (right, right_scale) = a, b
    if not left.is_cuda:
        with torch.autocast("cpu", enabled=False):  # autocast would round the operands to bf16
            total = (left.float() @ right.float().t()).mul_(left_scale * right_scale)
        return (total if bias is None else total.add_(bias.float())).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, bias=bias, out_dtype=dtype, use_fast_accum=fast)


class Fp8Weight:
    """The weight [outputs, inputs] of a linear layer in FP8, as rows, and the slots of its input and of itself."""

    def __init__(self, weight: Tensor, slots: tuple[Slot, Slot]) -> None:
        self.input, self.weight = slots
        self.rows = torch.empty(weight.shape, dtype=self.weight.dtype, device=weight.device)

    def forward(self, x: Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """``x`` needs rows."""
        return gemm((x.rows, x.inverse), (self.rows, self.weight.inverse), dtype, bias, fast=True)

    def forward_gelu(
        self, x: Quantized, dtype: torch.dtype, bias: Tensor | None, kind: str, slot: Slot, *, keep_h: bool
    ) -> tuple[Tensor | None, Quantized]:
        """The GEMM's result ``h`` without the bias, None unless it is kept, and the activation of ``h + bias`` in FP8,
        as rows. On Hopper with bf16, the GEMM's epilogue computes the activation."""
        if not slot.measuring and native.refuse_gelu_gemm(x.rows, dtype) is None:
            operands = (x.rows, x.inverse), (self.rows, self.weight.inverse)
            kept_h, rows = native.gelu_gemm(*operands, bias, kind, slot.scale, slot.amax, keep_h=keep_h)
            return kept_h, Quantized(rows, rows.new_empty(0), slot.inverse)
        h = self.forward(x, dtype)
        return h if keep_h else None, gelu(h, bias, kind, slot)


class Fp8Linear(Fp8Weight):
    """The scales of one linear layer in training, and its weight in FP8.

    Args:
        weight: ``[outputs, inputs]``, both multiples of 16. The layer's parameter itself, which ``refresh`` reads.
        slots: The slots of input, weight and gradient.
    """

    def __init__(self, weight: Tensor, slots: tuple[Slot, Slot, Slot]) -> None:
        super().__init__(weight, slots[:2])
        self.parameter = weight
        counted_changes.watch([weight])
        self.gradient = slots[2]
        self._cast_version = -1, -1  # version and address of the weight that was cast
        self._given: tuple[Tensor, int, Quantized] | None = None  # the next input, its version, and its casts
        outputs, inputs = weight.shape
        self.columns = torch.empty(inputs, outputs, dtype=self.weight.dtype, device=weight.device)

    def give_input(self, x: Tensor, x8: Quantized) -> None:
        """Passes the next input with its casts, which the kernel that computed it has written."""
        alias = x.detach()  # keeps its address in use
        self._given = alias, alias._version, x8

    def cast_input(self, x: Tensor) -> Quantized:
        """``x`` in both layouts: what ``give_input`` was passed if ``x`` is that tensor, or else a cast."""
        next_input, self._given = self._given, None
        if next_input is not None:
            alias, version, x8 = next_input
            if alias.data_ptr() == x.data_ptr() and alias.shape == x.shape and alias._version == version == x._version:
                return x8
        return cast(x, self.input)

    @torch.no_grad()
    def refresh(self) -> None:
        """Casts the weight with its delayed scale, in place, so that a CUDA graph can read it."""
        arguments = self.cast_arguments()
        TABLE.select(None, arguments[0]).forward("cast", *arguments)
        self.note_version()

    def cast_arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of ``fp8_cast`` for the weight."""
        return self.parameter.detach(), self.weight.scale, self.weight.amax, self.rows, self.columns

    def note_version(self) -> None:
        """Records that the FP8 weight is up to date."""
        self._cast_version = self.parameter._version, self.parameter.data_ptr()

    def refresh_changed(self) -> None:
        """Casts the weight again, with a scale from its own magnitude, if its address or torch's version counter has
        changed since ``refresh``."""
        if self._cast_version != (self.parameter._version, self.parameter.data_ptr()):
            self.weight.measure_changed(self.parameter)
            self.refresh()

    def input_gradient(self, dy: Quantized, dtype: torch.dtype) -> Tensor:
        """``dy`` needs rows."""
        return gemm((dy.rows, dy.inverse), (self.columns, self.weight.inverse), dtype, fast=False)

    def input_gradient_gelu(
        self, dy: Quantized, h: Tensor, bias: Tensor | None, kind: str, slot: Slot, want_dbias: bool
    ) -> tuple[Quantized, Quantized, Tensor]:
        """``gelu_backward`` of the input's gradient, if the input is the activation of ``h + bias``. On Hopper with
        bf16, the GEMM's epilogue computes it. ``dy`` needs rows."""
        fused = not slot.measuring and dy.rows.dtype == slot.dtype and self.input.dtype == E4M3
        if fused and native.refuse_gelu_gemm(dy.rows, h.dtype) is None:
            operands = (dy.rows, dy.inverse), (self.columns, self.weight.inverse)
            scales = (self.input.scale, slot.scale, slot.amax)
            rows, columns, again, dbias = native.gelu_gemm_backward(
                *operands, h, bias, kind, *scales, want_dbias=want_dbias
            )
            a8 = Quantized(again.new_empty(0), again, self.input.inverse)
            return Quantized(rows, columns, slot.inverse), a8, dbias
        return gelu_backward(self.input_gradient(dy, h.dtype), h, bias, kind, self.input, slot, want_dbias)

    def add_input_gradient(self, total: Tensor, dy: Quantized) -> Tensor:
        """Adds the input's gradient to ``total`` in place, and rounds once. ``dy`` needs rows."""
        operands = (dy.rows, dy.inverse), (self.columns, self.weight.inverse)
        if total.is_cuda and native.refuse_add_gemm(total) is None:
            return native.add_gemm(total, *operands)
        return total.copy_(gemm(*operands, torch.float32, fast=False).add_(total))

    def weight_gradient(self, dy: Quantized, x: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """``dy`` needs columns; ``x`` are the input's columns and their inverse scale."""
        return gemm((dy.columns, dy.inverse), x, dtype, fast=False)


def refresh_all(layers: Sequence[Fp8Linear], table: native.CastTable | None) -> native.CastTable | None:
    """Refreshes all layers, by one launch on Hopper. Returns the launch's table, which the next call can use again."""
    if not all(native.CastTable.takes(layer.parameter) for layer in layers):
        for layer in layers:
            layer.refresh()
        return None
    if table is None or table.addresses != [layer.parameter.data_ptr() for layer in layers]:
        table = native.CastTable([layer.cast_arguments() for layer in layers])
    table.run()
    for layer in layers:
        layer.note_version()
    return table


class LayerFp8(NamedTuple):
    """The linear layers of a transformer layer."""

    qkv: Fp8Linear
    out: Fp8Linear
    up: Fp8Linear
    down: Fp8Linear
