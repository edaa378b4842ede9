"""Linear layers whose three GEMMs have FP8 operands with one scale for each tensor.

    forward            y = x8 W8^T + bias
    gradient of x      dx = g8 W8
    gradient of W      dW = g8^T x8

x8, W8 and g8 are the input, the weight and the incoming gradient, rounded as kernels/fp8/reference.py says. Hopper's
FP8 tensor cores need both operands contiguous along the summed dimension, so every tensor is stored in two layouts,
``rows`` and ``columns``, which one pass writes. GEMMs accumulate in fp32. Results have the dtype of the activations,
gradients of weights that of the weight.

Scaling is delayed: a tensor's scale follows from its largest magnitudes in the last steps, so that casting reads the
tensor only once. Scales are powers of two, so dividing by them does not round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.fp8 import reference
from fasttfm.kernels.fp8.reference import ALIGNMENT as ALIGNMENT
from fasttfm.kernels.fp8.reference import LIMITS
from fasttfm.kernels.fp8.reference import record_amax as record_amax
from fasttfm.ops import checks, counted_changes, fp8_native
from fasttfm.ops.backends import Backend, BackendTable, always
from fasttfm.ops.bias_gelu import backward_op as bias_gelu_backward_op
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS: Mapping[str, torch.dtype] = {"e4m3": E4M3, "e5m2": E5M2}
_EXPONENT_BITS = 0x7F800000  # of an fp32 number
_ALIGNED = 4  # fp32 numbers in 16 bytes
_MIN_SCALE, _MAX_SCALE = 2.0**-100, 2.0**100  # their products with tensors do not overflow fp32


def missing(device: torch.device) -> str | None:
    """Why a device has no FP8 GEMMs; None if it has: on tensor cores, or emulated on the CPU."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"takes CPU and CUDA tensors, got {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"needs a GPU with FP8 tensor cores, of compute capability 8.9 or later, got {major}.{minor}"
    return None


# ---- scales ----------------------------------------------------------------------------------------------------------


class Scales:
    """The scales of many tensors and the histories of their magnitudes, in fp32 tensors that are never reallocated: a
    CUDA graph can read and write them. Steps write them in the order of the current stream; only ``_Readback`` reads
    them on the host.

    A tensor without a history, all of whose magnitudes were 0 or not finite so far, is measured before each cast. The
    device decides by the history whether the measured scale is used, so that a CUDA graph that measures is right in all
    its replays. The host decides whether to measure at all: until it has read that there is a history, at the update
    after the one that wrote it. It reads only while tensors are measured, and only what the GPU has completed a step
    before.

    Args:
        formats: The FP8 dtype of each tensor.
        history: The number of steps whose largest magnitudes determine a scale.
    """

    def __init__(self, formats: list[torch.dtype], history: int, device: torch.device) -> None:
        count, options = len(formats), {"dtype": torch.float32, "device": device}
        self.limits = torch.tensor([LIMITS[each] for each in formats], **options)
        self.amax = torch.zeros(count, **options)  # of the current step
        self.history = torch.zeros(history, count, **options)  # the latest step first
        self.scale = torch.ones(count, **options)
        # One per 16 bytes: cuBLASLt requires scales at aligned addresses.
        self.inverse = torch.ones(count, _ALIGNED, **options)[:, 0]
        self.updates = 0  # the number of calls of update
        self._measured: set[int] = set()  # the slots that were measured since the last update
        self._readback: _Readback | None = None
        self.slots = [Slot(self, index, each) for index, each in enumerate(formats)]

    @torch.no_grad()
    def update(self) -> None:
        """Ends a step. An infinite or NaN magnitude is replaced by that of the previous step."""
        amax = torch.where(self.amax.isfinite(), self.amax, self.history[0])
        self.history.copy_(torch.cat([amax[None], self.history[:-1]]))
        _set_scales(self.history.amax(0), self.limits, self.scale, self.inverse)
        self.amax.zero_()
        self.updates += 1
        if (self._measured or self._readback is not None) and not is_capturing(self.scale.device):
            self._find_histories()

    def set_magnitudes(self, amax: Tensor | float) -> None:
        """Sets the scales for these largest magnitudes, as a step with them does, and ends all measuring."""
        self.amax[:] = amax
        self.update()
        for slot in self.slots:
            slot.measuring = False

    def note_measured(self, index: int) -> None:
        self._measured.add(index)

    def _find_histories(self) -> None:
        """Ends the measuring of slots that had a history at the previous update, and asks for those that were measured
        in this step."""
        if self._readback is not None:
            for index in self._readback.indices():
                self.slots[index].measuring = False
        waiting = [index for index in self._measured if self.slots[index].measuring]
        self._readback = _Readback(self.history) if waiting else None
        self._measured.clear()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: getattr(self, name).cpu().clone() for name in _STATE}
        state["measuring"] = torch.tensor([each.measuring for each in self.slots], dtype=torch.bool, device="cpu")
        return {**state, "reading": self._readback is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also loads states whose ``measuring`` is one flag for all tensors, as earlier versions have written them."""
        for name in _STATE:
            own, loaded = getattr(self, name), state[name]
            if own.shape != loaded.shape:
                got = f"shape {tuple(loaded.shape)}"
                raise checks.bad_value("fp8", name, f"the state of the same model, shape {tuple(own.shape)}", got)
            own.copy_(loaded)
        self.inverse.copy_(self.scale.reciprocal())
        measuring = state["measuring"]
        if isinstance(measuring, bool):
            measuring = (state["history"] == 0).all(0)
        for slot, each in zip(self.slots, measuring.tolist(), strict=True):
            slot.measuring = each
        self._measured.clear()
        self._readback = _Readback(self.history) if state.get("reading", False) else None


_STATE = ("amax", "history", "scale")


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Readback:
    """A copy to the host of which slots have a history, in flight on the current stream."""

    def __init__(self, history: Tensor) -> None:
        known = (history > 0).any(0)
        self._event = None
        if history.is_cuda:
            self._known = torch.empty(known.shape, dtype=torch.bool, device="cpu", pin_memory=True)
            self._known.copy_(known, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._known = known

    def indices(self) -> list[int]:
        """The slots that have a history."""
        if self._event is not None:
            self._event.synchronize()
        return [index for index, known in enumerate(self._known.tolist()) if known]


def _set_scales(largest: Tensor, limits: Tensor, scale: Tensor, inverse: Tensor) -> None:
    """Sets each scale to the largest power of two with ``scale * largest <= limit``; a tensor of zeros keeps its
    scale."""
    quotient = (limits / largest).clamp(_MIN_SCALE, _MAX_SCALE)
    power = (quotient.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    scale.copy_(torch.where(largest > 0, power, scale))
    inverse.copy_(scale.reciprocal())


class Slot:
    """One tensor's elements of ``Scales``, as zero-dimensional views.

    Attributes:
        measuring: Whether casts have to call ``measure`` first.
    """

    def __init__(self, scales: Scales, index: int, dtype: torch.dtype) -> None:
        self.scales, self.index, self.dtype = scales, index, dtype
        self.scale, self.inverse, self.amax, self.limit = (
            each[index] for each in (scales.scale, scales.inverse, scales.amax, scales.limits)
        )
        self._history = scales.history[:, index]
        self.measuring = True

    @torch.no_grad()
    def measure(self, x: Tensor) -> None:
        """Sets the scale from the largest magnitude of ``x`` if there is no history."""
        self.scales.note_measured(self.index)
        largest = self._magnitude(x)
        self._set(torch.where(self._history.amax() > 0, 0.0, largest))

    @torch.no_grad()
    def measure_changed(self, x: Tensor) -> None:
        """Sets the scale from the largest magnitude of ``x``, which is no longer that of the history."""
        self._set(self._magnitude(x))

    def _magnitude(self, x: Tensor) -> Tensor:
        largest = torch.zeros_like(self.amax)
        record_amax(largest, x)
        return torch.where(largest.isfinite(), largest, 0.0)

    def _set(self, largest: Tensor) -> None:
        _set_scales(largest, self.limit, self.scale, self.inverse)


# ---- casts -----------------------------------------------------------------------------------------------------------


class Quantized(NamedTuple):
    """A matrix in FP8. ``rows`` [N, C] or ``columns`` [C, P] is empty if it is not needed."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor  # 1 / scale


def cast(x: Tensor, slot: Slot, *, with_columns: bool = True, backend: str | None = None) -> Quantized:
    """Casts ``x`` [N, C] to both layouts, or only to rows, with the slot's format and scale, and records its largest
    magnitude."""
    if slot.measuring:
        slot.measure(x)
    x = as_rows(x)
    rows, columns = empty_layouts(x, slot.dtype, with_columns=with_columns)
    TABLE.select(backend, x).forward("cast", x, slot.scale, slot.amax, rows, columns)
    return Quantized(rows, columns, slot.inverse)


def drops_in_cast(x: Tensor, slot: Slot) -> bool:
    """Whether ``cast_dropped`` supports x; not while x has to be measured."""
    return not slot.measuring and _native.missing_hopper() is None and fp8_native.refuse(x) is None


def cast_dropped(x: Tensor, slot: Slot, dropout: tuple[Tensor, Tensor, float]) -> Quantized:
    """``cast`` of x after the dropout of ``dropout_add_layer_norm``, given by ``cu_seqlens``, seed and p."""
    rows, columns = empty_layouts(x, slot.dtype)
    fp8_native.cast_dropped(x, slot.scale, slot.amax, rows, columns, dropout)
    return Quantized(rows, columns, slot.inverse)


def empty_layouts(x: Tensor, dtype: torch.dtype, *, with_columns: bool = True) -> tuple[Tensor, Tensor]:
    """Rows and columns of ``x`` [N, C], uninitialized; the columns are empty if they are not needed."""
    rows = torch.empty(*x.shape, dtype=dtype, device=x.device)
    shape = (x.shape[1], reference.padded(x.shape[0])) if with_columns else (0,)
    return rows, torch.empty(shape, dtype=dtype, device=x.device)


def gelu(h: Tensor, bias: Tensor | None, kind: str, slot: Slot, backend: str | None = None) -> Quantized:
    """The activation of ``h + bias`` in FP8, only as rows."""
    if slot.measuring:
        slot.measure(bias_gelu_forward_op(h, bias, kind, None))
    rows: Tensor = TABLE.select(backend, h).forward("gelu_forward", h, bias, kind, slot.scale, slot.amax, slot.dtype)
    return Quantized(rows, rows.new_empty(0), slot.inverse)


def gelu_backward(
    da: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    a_slot: Slot,
    slot: Slot,
    want_dbias: bool,
    backend: str | None = None,
) -> tuple[Quantized, Quantized, Tensor]:
    """The gradient dh of ``h`` in both layouts, the recomputed activation as columns, and the bias's gradient."""
    if slot.measuring:
        slot.measure(bias_gelu_backward_op(da, h, bias, kind, False, False, None)[0])
    run = TABLE.select(backend, h).forward
    scales = (a_slot.scale, a_slot.dtype, slot.scale, slot.amax, slot.dtype)
    rows, columns, again, dbias = run("gelu_backward", da, h, bias, kind, *scales, want_dbias)
    return Quantized(rows, columns, slot.inverse), Quantized(again.new_empty(0), again, a_slot.inverse), dbias


def _run_reference(name: str, *arguments: Any) -> Any:
    return getattr(reference, f"fp8_{name}")(*arguments)


TABLE = BackendTable(
    "fp8",
    (
        Backend("cuda", _native.missing_hopper, fp8_native.refuse, fp8_native.run),
        Backend("reference", always, lambda _: None, _run_reference),
    ),
)


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


def gemm(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool
) -> Tensor:
    """``a b^T + bias`` of FP8 matrices a [M, K] and b [N, K], each with its inverse scale.

    Args:
        fast: Whether Hopper's tensor cores accumulate over all of K, in fewer bits than fp32 has. Gradients do not use
            it, because sums over tokens are long; ``gelu_product_backward``, which sums over columns, does.
    """
    (left, left_scale), (right, right_scale) = a, b
    if not left.is_cuda:
        with torch.autocast("cpu", enabled=False):  # autocast would round the operands to bf16
            total = (left.float() @ right.float().t()).mul_(left_scale * right_scale)
        return (total if bias is None else total.add_(bias.float())).to(dtype)
    own = bias if bias is None or bias.dtype == dtype else bias.to(dtype)
    return torch._scaled_mm(left, right.t(), left_scale, right_scale, bias=own, out_dtype=dtype, use_fast_accum=fast)


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
        if not slot.measuring and fp8_native.refuse_gelu_product(x.rows, dtype) is None:
            operands = (x.rows, x.inverse), (self.rows, self.weight.inverse)
            found, rows = fp8_native.gelu_product(*operands, bias, kind, slot.scale, slot.amax, keep_h=keep_h)
            return found, Quantized(rows, rows.new_empty(0), slot.inverse)
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
        own = x.detach()  # keeps its address in use
        self._given = own, own._version, x8

    def cast_input(self, x: Tensor) -> Quantized:
        """``x`` in both layouts: what ``give_input`` was passed if ``x`` is that tensor, or else a cast."""
        given, self._given = self._given, None
        if given is not None:
            own, version, x8 = given
            if own.data_ptr() == x.data_ptr() and own.shape == x.shape and own._version == version == x._version:
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
        if fused and fp8_native.refuse_gelu_product(dy.rows, h.dtype) is None:
            operands = (dy.rows, dy.inverse), (self.columns, self.weight.inverse)
            scales = (self.input.scale, slot.scale, slot.amax)
            rows, columns, again, dbias = fp8_native.gelu_product_backward(
                *operands, h, bias, kind, *scales, want_dbias=want_dbias
            )
            a8 = Quantized(again.new_empty(0), again, self.input.inverse)
            return Quantized(rows, columns, slot.inverse), a8, dbias
        return gelu_backward(self.input_gradient(dy, h.dtype), h, bias, kind, self.input, slot, want_dbias)

    def add_input_gradient(self, total: Tensor, dy: Quantized) -> Tensor:
        """Adds the input's gradient to ``total`` in place, and rounds once. ``dy`` needs rows."""
        operands = (dy.rows, dy.inverse), (self.columns, self.weight.inverse)
        if total.is_cuda and fp8_native.refuse_add_gemm(total) is None:
            return fp8_native.add_gemm(total, *operands)
        return total.copy_(gemm(*operands, torch.float32, fast=False).add_(total))

    def weight_gradient(self, dy: Quantized, x: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """``dy`` needs columns; ``x`` are the input's columns and their inverse scale."""
        return gemm((dy.columns, dy.inverse), x, dtype, fast=False)


def refresh_all(layers: Sequence[Fp8Linear], table: fp8_native.CastTable | None) -> fp8_native.CastTable | None:
    """Refreshes all layers, by one launch on Hopper. Returns the launch's table, which the next call can use again."""
    if not all(fp8_native.CastTable.takes(each.parameter) for each in layers):
        for each in layers:
            each.refresh()
        return None
    if table is None or table.addresses != [each.parameter.data_ptr() for each in layers]:
        table = fp8_native.CastTable([each.cast_arguments() for each in layers])
    table.run()
    for each in layers:
        each.note_version()
    return table


class LayerFp8(NamedTuple):
    """The linear layers of a transformer layer."""

    qkv: Fp8Linear
    out: Fp8Linear
    up: Fp8Linear
    down: Fp8Linear
