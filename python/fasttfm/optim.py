"""``AdamW``: torch's, on a GPU as one pass over all parameters that also clips and writes 16-bit copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import register_optimizer_step_post_hook

from fasttfm import _native
from fasttfm.ops import weight_copies
from fasttfm.ops.library import PLAIN_TENSORS
from fasttfm.ops.weight_copies import Entry

# kernels/adamw/op.h: AdamWTensor and AdamWGroup
_ADDRESSES = ("parameter", "exp_avg", "exp_avg_sq", "step", "gradient", "copy")
TENSOR = np.dtype(
    [(name, "i8") for name in (*_ADDRESSES, "size")]
    + [(name, "i4") for name in ("group", "gradient_dtype", "copy_dtype", "unused")]
)
GROUP = np.dtype(
    [("learning_rate", "f8"), ("learning_rate_on_device", "i8")]
    + [(name, "f8") for name in ("beta1", "beta2", "epsilon", "weight_decay")]
)

_Parts = list[tuple[dict[str, Any], list[Tensor]]]  # groups, and those of their parameters that have a gradient


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, with the same state: checkpoints of either go on with the other.

    On a GPU a step is one CUDA kernel over all parameters, whose gradients may be in fp32 or 16 bits; nothing waits for
    the GPU, and a CUDA graph can hold the step. Parameters there are fp32 and contiguous. On a CPU it is torch's fused
    step.

    Args:
        params: Parameters or groups of them, all on one device.
        lr: A number, or a tensor of one, which a CUDA graph that holds the step reads anew in each replay.
        max_norm: Gradients whose norm, of all together, is greater are scaled down to it, as
            ``torch.nn.utils.clip_grad_norm_`` does, but inside the step: they themselves stay as they are.
        weight_copies: Keep copies of parameters in the type that forwards under autocast cast them to, written by the
            step itself, on a GPU. Whoever then changes parameters in a way that torch does not count (through
            ``parameter.data``) must call ``refresh_copies(everything=True)``.
        capturable: As in torch; the step here can always be captured.

    Attributes:
        last_norm: Of the gradients of the last step, before they were clipped; None without ``max_norm``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        weight_copies: bool = False,
        capturable: bool = False,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"AdamW: max_norm: expected a number above 0 or None, got {max_norm}")
        self.max_norm = max_norm
        self.weight_copies = weight_copies
        self.last_norm: Tensor | None = None
        self._checked: dict[str, list[int]] = {}
        self._entries: list[Entry] = []
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True, capturable=capturable
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``grad_scale`` and ``found_inf``, which torch's gradient scaler sets, are followed as by torch's
        fused optimizers, but the gradients of a GPU are not written."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        parts = self._parts()
        if parts:
            (self._step_gpu if parts[0][1][0].is_cuda else self._step_cpu)(parts)
        return result

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The norm of all gradients together: one pass over them; the same bits each time."""
        parts = self._parts()
        if not parts:
            return torch.zeros(())
        if parts[0][1][0].is_cuda:
            if (reason := _native.missing_cuda()) is not None:
                raise ValueError(f"AdamW: {reason}")
            call = _Call(parts, norm=True)
            _native.core().adamw_norm_cuda(**call.fields())
            assert call.norm is not None
            return call.norm
        gradients = [each.grad for _, parameters in parts for each in parameters if each.grad is not None]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64))).float()

    def _parts(self) -> _Parts:
        found = [(group, [each for each in group["params"] if each.grad is not None]) for group in self.param_groups]
        return [part for part in found if part[1]]

    def _step_gpu(self, parts: _Parts) -> None:
        addresses = self._addresses(parts)
        call = _Call(parts, norm=self.max_norm is not None)
        call.add_tensors(addresses)
        call.add_groups([group for group, _ in parts])
        scale, found_inf = (
            None if value is None else value.to(call.device, torch.float32, non_blocking=True)
            for value in (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        )
        _native.core().adamw_step_cuda(**call.fields(self.max_norm, scale, found_inf))
        weight_copies.written(call.parameters)
        self.last_norm = call.norm

    def _addresses(self, parts: _Parts) -> dict[str, list[int]]:
        """Of parameters and state. They are checked where they are not those of the step before."""
        parameters = [each for _, own in parts for each in own]
        states = [state for group, own in parts for state in self._states(group, own)]
        found = {"parameter": [each.data_ptr() for each in parameters]}
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found[name] = [state[name].data_ptr() for state in states]
        if found != self._checked:
            if (reason := refusal(parameters)) is not None:
                raise ValueError(f"AdamW: {reason}; torch.optim.AdamW takes others")
            _check_states(parameters, states)
            self._checked = found
        return found

    def _step_cpu(self, parts: _Parts) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.max_norm is not None:
            self.last_norm = self.gradient_norm()
            norm = self.last_norm if scale is None else self.last_norm / scale
            clipping = ((norm + 1e-6) / self.max_norm).clamp(min=1.0)
            scale = clipping if scale is None else clipping * scale
        for group, parameters in parts:
            if any(not each.is_cpu for each in parameters):
                raise ValueError("AdamW: params: expected all on the CPU or all on one GPU")
            states = self._states(group, parameters)
            beta1, beta2 = group["betas"]
            torch_adamw(
                parameters,
                [each.grad for each in parameters if each.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=scale,
                found_inf=found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            weight_copies.forget(parameters)

    def _states(self, group: dict[str, Any], parameters: list[Tensor]) -> list[dict[str, Tensor]]:
        """As torch keeps them; made where there are none."""
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ValueError(f"AdamW: {option}: expected False, got True: torch.optim.AdamW can do that")
        found = [self.state[each] for each in parameters]
        for each, state in zip(parameters, found, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=each.device)
                state["exp_avg"] = torch.zeros_like(each, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(each, memory_format=torch.preserve_format)
        return found

    # ---- copies ------------------------------------------------------------------------------------------------------

    def refresh_copies(self, *, everything: bool = False) -> None:
        """Brings the copies up to date with parameters that others have changed.

        Eager forwards notice what torch counts by themselves. A CUDA graph cannot: call this before a replay where
        parameters may have changed, and with ``everything`` after changes that torch does not count.
        """
        weight_copies.refresh(self._entries, everything=everything)

    def _enroll(self) -> None:
        if self.weight_copies:
            _listen_to_others()
            self._entries = weight_copies.enroll(each for group in self.param_groups for each in group["params"])

    # ---- state -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._enroll()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also of an optimizer that was not fused, and had its step counts on the CPU."""
        groups = [{**group, "fused": True, "foreach": None} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "max_norm": self.max_norm,
            "weight_copies": self.weight_copies,
            "last_norm": None,
            "_checked": {},
            "_entries": [],
        }
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enroll()


@functools.cache
def _listen_to_others() -> None:
    """torch does not count what its fused optimizers change."""

    def forget(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not isinstance(optimizer, AdamW):
            for group in optimizer.param_groups:
                weight_copies.forget(group["params"])

    register_optimizer_step_post_hook(forget)


def refusal(parameters: Iterable[Tensor]) -> str | None:
    """Why ``AdamW`` cannot step over the parameters on a GPU; None if it can."""
    if (reason := _native.missing_cuda()) is not None:
        return reason
    parameters = list(parameters)
    if not all(each.is_cuda for each in parameters) or len({each.get_device() for each in parameters}) > 1:
        return f"takes parameters on one GPU, got {', '.join(sorted({str(each.device) for each in parameters}))}"
    if parameters and (reason := _native.missing_on(parameters[0].get_device())) is not None:
        return reason
    for each in parameters:
        if type(each) not in PLAIN_TENSORS:
            return f"takes plain tensors, got {type(each).__name__}"
        if each.dtype != torch.float32:
            return f"takes fp32 parameters, got {each.dtype}"
        if not each.is_contiguous():
            return f"takes contiguous parameters, got one of shape {tuple(each.shape)} with strides {each.stride()}"
    return None


def _check_states(parameters: list[Tensor], states: list[dict[str, Tensor]]) -> None:
    for parameter, state in zip(parameters, states, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            given, size = state[name], 1 if name == "step" else parameter.numel()
            if given.dtype != torch.float32 or given.device != parameter.device or not given.is_contiguous():
                raise ValueError(
                    f"AdamW: state: {name}: expected contiguous fp32 numbers on {parameter.device}, "
                    f"got {_described(given)}"
                )
            if given.numel() != size:
                raise ValueError(f"AdamW: state: {name}: expected {size} numbers, got {given.numel()}")


class _Call:
    """One call of the kernel: its table, and the memory that it works in."""

    def __init__(self, parts: _Parts, *, norm: bool) -> None:
        self.parameters = [each for _, parameters in parts for each in parameters]
        self.device, self.index = self.parameters[0].device, self.parameters[0].get_device()
        self.gradients = [_dense(each.grad, self.index) for each in self.parameters]
        core, count, groups = _native.core(), len(self.parameters), len(parts)
        starts, rows = (count + 1) // 2, count * TENSOR.itemsize // 8
        self.table = np.zeros(starts + rows + groups * GROUP.itemsize // 8, np.int64)
        self.tensors = self.table[starts : starts + rows].view(TENSOR)
        self.groups = self.table[starts + rows :].view(GROUP)

        self.tensors["gradient"] = [each.data_ptr() for each in self.gradients]
        self.tensors["gradient_dtype"] = [_native.DTYPE_CODES[each.dtype] for each in self.gradients]
        self.tensors["size"] = [each.numel() for each in self.parameters]
        self.tensors["group"] = [index for index, (_, parameters) in enumerate(parts) for _ in parameters]
        chunks = -(-self.tensors["size"] // core.adamw_chunk)
        self.table[:starts].view(np.int32)[:count] = chunks.cumsum() - chunks
        self.chunks = int(chunks.sum())

        workspace = core.adamw_workspace_cuda(count, groups)
        self.workspace = torch.empty(workspace, dtype=torch.int64, device=self.device)
        self.norm = torch.empty((), device=self.device) if norm else None
        self.partial_norms = torch.empty(self.chunks, device=self.device) if norm else None

    def add_tensors(self, addresses: dict[str, list[int]]) -> None:
        """What a step changes: parameters, their state and their copies."""
        for name, column in addresses.items():
            self.tensors[name] = column
        captured = torch.cuda.is_current_stream_capturing()
        copies = [weight_copies.to_write(each, captured=captured) for each in self.parameters]
        self.tensors["copy"] = [_native.address(each) for each in copies]
        self.tensors["copy_dtype"] = [_native.dtype_code(each) for each in copies]

    def add_groups(self, groups: list[dict[str, Any]]) -> None:
        for row, group in zip(self.groups, groups, strict=True):
            rate = group["lr"]
            if isinstance(rate, Tensor) and rate.is_cuda:
                if rate.dtype != torch.float32 or rate.device != self.device or rate.numel() != 1:
                    raise ValueError(f"AdamW: lr: expected one fp32 number on {self.device}, got {rate!r}")
                row["learning_rate_on_device"] = rate.data_ptr()
            else:
                row["learning_rate"] = float(rate)
            row["beta1"], row["beta2"] = group["betas"]
            row["epsilon"], row["weight_decay"] = group["eps"], group["weight_decay"]

    def fields(
        self, max_norm: float | None = None, scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> dict[str, Any]:
        return {
            "table": self.table.ctypes.data,
            "workspace": self.workspace.data_ptr(),
            "partial_norms": _native.address(self.partial_norms),
            "norm": _native.address(self.norm),
            "max_norm": max_norm or 0.0,
            "grad_scale": _native.address(scale),
            "found_inf": _native.address(found_inf),
            "tensors": len(self.tensors),
            "groups": len(self.groups),
            "chunks": self.chunks,
            "device": self.index,
            "stream": _native.stream(self.workspace),
        }


def _dense(gradient: Tensor | None, index: int) -> Tensor:
    assert gradient is not None
    if type(gradient) not in PLAIN_TENSORS or gradient.layout != torch.strided or gradient.get_device() != index:
        raise ValueError(f"AdamW: gradient: expected a dense tensor on the parameter's GPU, got {_described(gradient)}")
    if gradient.dtype not in _native.DTYPE_CODES:
        raise ValueError(f"AdamW: gradient: expected fp32, bf16 or fp16, got {_described(gradient)}")
    return gradient if gradient.is_contiguous() else gradient.contiguous()


def _described(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
