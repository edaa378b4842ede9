"""The scales of tensors in FP8, delayed: a tensor's scale follows from its largest magnitudes in the last steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.fp8.reference import LIMITS, record_amax
from fasttfm.ops.core import checks

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
        count = len(formats)
        options: Any = {"dtype": torch.float32, "device": device}
        self.limits = torch.tensor([LIMITS[format_dtype] for format_dtype in formats], **options)
        self.amax = torch.zeros(count, **options)  # of the current step
        self.history = torch.zeros(history, count, **options)  # the latest step first
        self.scale = torch.ones(count, **options)
        # One per 16 bytes: cuBLASLt requires scales at aligned addresses.
        self.inverse = torch.ones(count, _ALIGNED, **options)[:, 0]
        self.updates = 0  # the number of calls of update
        self._measured: set[int] = set()  # the slots that were measured since the last update
        self._readback: _Readback | None = None
        self.slots = [Slot(self, index, format_dtype) for index, format_dtype in enumerate(formats)]

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
        state["measuring"] = torch.tensor([slot.measuring for slot in self.slots], dtype=torch.bool, device="cpu")
        return {**state, "reading": self._readback is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also loads states whose ``measuring`` is one flag for all tensors, as earlier versions have written them."""
        for name in _STATE:
            current, loaded = getattr(self, name), state[name]
            if current.shape != loaded.shape:
                got = f"shape {tuple(loaded.shape)}"
                raise checks.bad_value("fp8", name, f"the state of the same model, shape {tuple(current.shape)}", got)
            current.copy_(loaded)
        self.inverse.copy_(self.scale.reciprocal())
        measuring = state["measuring"]
        if isinstance(measuring, bool):
            measuring = (state["history"] == 0).all(0)
        for slot, is_measuring in zip(self.slots, measuring.tolist(), strict=True):
            slot.measuring = is_measuring
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
        self._event: Any = None
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
            values[index] for values in (scales.scale, scales.inverse, scales.amax, scales.limits)
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
