"""``AdamW``: torch's AdamW, on a GPU as one pass over all parameters that also clips and writes 16-bit copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw as torch_adamw

from fasttfm import _native
from fasttfm.ops.core import weight_copies
from fasttfm.ops.core.direct_gradients import Enrolled
from fasttfm.ops.core.library import PLAIN_TENSORS
from fasttfm.ops.core.weight_copies import Entry, StepCopies

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

_STATES = ("exp_avg", "exp_avg_sq", "step")


_DOT = 2**17  # elements: fp32 rounding errors grow with the length of the few sums that a dot product adds up


@torch.no_grad()
def cpu_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together, in fp64: from dot products of the BLAS in fp32. torch's own norm adds squares
    sequentially, and in fp64 it copies the gradients first, which takes as long as AdamW's step."""
    if all(map(_has_fp32_rows, gradients)):
        parts = [part for gradient in gradients for part in gradient.view(-1).split(_DOT)]
        total = torch.stack([torch.dot(part, part) for part in parts]).double().sum()
        if 0 < total.item() < math.inf:  # otherwise squares may be too large or too small for fp32
            return total.sqrt()
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)))


def _has_fp32_rows(gradient: Tensor) -> bool:
    plain = type(gradient) in PLAIN_TENSORS and gradient.layout == torch.strided
    return plain and gradient.dtype == torch.float32 and gradient.is_contiguous()


class _StepInputs(NamedTuple):
    """The parameters of a step: those that have a gradient, in the order of their groups."""

    groups: list[dict[str, Any]]
    counts: list[int]  # parameters of each group
    parameters: list[Tensor]
    gradients: list[Tensor]

    def split(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The tensors of each group."""
        ends = np.cumsum(self.counts).tolist()
        return [tensors[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, with the same state: each loads checkpoints of the other.

    On a GPU a step is one CUDA kernel over all parameters, whose gradients may be in fp32 or 16 bits. It does not
    synchronize with the GPU, and a CUDA graph can capture it. Parameters must be fp32 and contiguous. On a CPU it is
    torch's fused step.

    Args:
        params: Parameters or groups of them, all on one device.
        lr: A number, or a tensor of one element, which a CUDA graph of the step reads in each replay.
        max_norm: The maximum total norm of the gradients, to which larger ones are scaled, as in
            ``torch.nn.utils.clip_grad_norm_``, but inside the step: on a GPU the gradients themselves are not changed.
            Infinity only computes the norm.
        weight_copies: Whether a step on a GPU also writes copies of parameters in the dtype to which forwards under
            autocast cast them. Code that changes parameters in a way that torch does not count (through
            ``parameter.data``) must then call ``refresh_copies(everything=True)``.
        direct_gradients: Whether backward passes of encoder layers may write the parameters' gradients to ``.grad``
            without autograd's node for each parameter, which saves host time. ``torch.autograd.grad`` then does not
            find these parameters, and hooks of their autograd nodes do not run; hooks of parameters do.
        capturable: Accepted for compatibility with torch; the step can always be captured.

    Attributes:
        last_norm: The norm of the gradients of the last step before clipping, divided by ``grad_scale`` where a
            gradient scaler has set it; None without ``max_norm``.
    """

    counts_changes = True  # for ops/core/counted_changes.py

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
        direct_gradients: bool = False,
        capturable: bool = False,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"AdamW: max_norm: expected a number above 0 or None, got {max_norm}")
        self.max_norm = max_norm
        self.weight_copies, self.direct_gradients = weight_copies, direct_gradients
        self.last_norm: Tensor | None = None
        self._table: _Table | None = None
        self._entries: list[Entry] = []
        self._enrolled: Enrolled | None = None
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True, capturable=capturable
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs a step. ``grad_scale`` and ``found_inf``, which torch's gradient scaler sets, are respected as in
        torch's fused optimizers, but gradients on a GPU are not written. With ``found_inf`` and ``max_norm``, a norm
        that is not finite skips the step, too."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        inputs = self._step_inputs()
        self.last_norm = None
        if inputs.parameters:
            (self._step_gpu if inputs.parameters[0].is_cuda else self._step_cpu)(inputs)
        return result

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The norm of all gradients together: one pass over them; the same bits each time."""
        inputs = self._step_inputs()
        if not inputs.parameters:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        if inputs.parameters[0].is_cuda:
            if (reason := _native.missing_cuda()) is not None:
                raise ValueError(f"AdamW: {reason}")
            table = self._table_of(inputs)
            memory = table.take_gradients(inputs.gradients, norm=True)
            _native.core().adamw_cuda(*table.arguments(memory, norm_only=True))
            assert memory.norm is not None
            return memory.norm
        _check_on_cpu(inputs)
        return cpu_norm(inputs.gradients).float()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works as torch's. By default it only releases the gradients, without reading them and without a range for
        profilers."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _step_inputs(self) -> _StepInputs:
        inputs = _StepInputs([], [], [], [])
        for group in self.param_groups:
            parameters = group["params"]
            gradients = [p.grad for p in parameters]
            present = [gradient for gradient in gradients if gradient is not None]
            if len(present) < len(parameters):
                parameters = [p for p, grad in zip(parameters, gradients, strict=True) if grad is not None]
            if present:
                inputs.groups.append(group)
                inputs.counts.append(len(present))
                inputs.parameters.extend(parameters)
                inputs.gradients.extend(present)
        return inputs

    def _step_gpu(self, inputs: _StepInputs) -> None:
        table = self._table_of(inputs)
        states = self._states(inputs)
        table.take_addresses(states)
        memory = table.take_gradients(inputs.gradients, norm=self.max_norm is not None)
        table.take_copies(captured=torch.cuda.is_current_stream_capturing())
        table.take_groups(inputs.groups)
        scale, found_inf = (
            None if value is None else value.to(table.device, torch.float32, non_blocking=True)
            for value in (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        )
        _native.core().adamw_cuda(*table.arguments(memory, self.max_norm, scale, found_inf))
        table.step_copies.written()
        self.last_norm = None if memory.norm is None else _unscaled(memory.norm, scale)

    def _table_of(self, inputs: _StepInputs) -> _Table:
        """The table of the previous step, if the same parameters have gradients; otherwise a new one."""
        if self._table is None or not self._table.is_of(inputs):
            self._table = _Table(inputs, enrolled=self.weight_copies)
        return self._table

    def _step_cpu(self, inputs: _StepInputs) -> None:
        _check_on_cpu(inputs)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.max_norm is not None:
            norm = self.last_norm = _unscaled(self.gradient_norm(), scale)
            clipping = ((norm + 1e-6) / self.max_norm).clamp(min=1.0)
            scale = clipping if scale is None else clipping * scale
            if found_inf is not None:
                found_inf = torch.maximum(found_inf, (norm * 0 != 0).to(found_inf.dtype))
        states = self._states(inputs)
        exp_avgs, exp_avg_sqs, steps = ([state[name] for state in states] for name in _STATES)
        columns, copied = in_one_layout(inputs.parameters, inputs.gradients, exp_avgs, exp_avg_sqs)
        by_group = zip(*(inputs.split(column) for column in (*columns, steps)), strict=True)
        for group, tensors in zip(inputs.groups, by_group, strict=True):
            lr, weight_decay = group["lr"], group["weight_decay"]
            options = {"lr": lr, "weight_decay": weight_decay, "grad_scale": scale, "found_inf": found_inf}
            adamw_step(Columns(*tensors), group, **options)
        for tensor, copy in copied:
            tensor.copy_(copy)
        increment_version(inputs.parameters)

    def _states(self, inputs: _StepInputs) -> list[dict[str, Tensor]]:
        """The states in torch's format, created if there are none."""
        for group in inputs.groups:
            for option in ("amsgrad", "maximize", "differentiable"):
                if group.get(option):
                    raise ValueError(f"AdamW: {option}: expected False, got True: use torch.optim.AdamW for that")
        states = [self.state[parameter] for parameter in inputs.parameters]
        if not all(states):
            for parameter, state in zip(inputs.parameters, states, strict=True):
                if not state:
                    state.update(  # at once: an allocation that fails leaves no half of a state
                        step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                        exp_avg=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        exp_avg_sq=torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    )
        return states

    # ---- copies ------------------------------------------------------------------------------------------------------

    def refresh_copies(self, *, everything: bool = False) -> None:
        """Updates the copies of parameters that were changed outside of the step.

        Eager forwards detect changes that torch counts. A CUDA graph cannot: call this before a replay if parameters
        may have changed, and with ``everything`` after changes that torch does not count.
        """
        weight_copies.refresh(self._entries, everything=everything)

    def _enroll(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.weight_copies:
            self._entries = weight_copies.enroll(parameters)
        if self.direct_gradients:
            self._enrolled = Enrolled(parameters)

    # ---- state -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._enroll()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads the state of an optimizer that is not fused, which has its step counts on the CPU."""
        groups = [{**group, "fused": True, "foreach": None} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "max_norm": self.max_norm,
            "weight_copies": self.weight_copies,
            "direct_gradients": self.direct_gradients,
            "last_norm": None,
            "_table": None,
            "_entries": [],
            "_enrolled": None,
        }
        return {**super().__getstate__(), **attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enroll()


def _unscaled(norm: Tensor, scale: Tensor | None) -> Tensor:
    return norm if scale is None else norm / scale


def _check_on_cpu(inputs: _StepInputs) -> None:
    if not all(parameter.is_cpu for parameter in inputs.parameters):
        raise ValueError("AdamW: params: expected all on the CPU or all on one GPU")
    check_gradients("AdamW", inputs.gradients)


def check_gradients(name: str, gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        if gradient.layout != torch.strided or gradient.is_complex():
            got = gradient.dtype if gradient.layout == torch.strided else gradient.layout
            raise ValueError(f"{name}: params: expected dense gradients of real numbers, got one of {got}")


class Columns(NamedTuple):
    """For each parameter of a step, what it reads and writes."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]


def adamw_step(
    columns: Columns,
    group: dict[str, Any],
    *,
    lr: float | Tensor,
    weight_decay: float,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """torch's fused AdamW with the betas and the epsilon of a group: one pass, with a step count for each parameter."""
    beta1, beta2 = group["betas"]
    torch_adamw(
        list(columns.parameters),
        list(columns.gradients),
        list(columns.exp_avgs),
        list(columns.exp_avg_sqs),
        [],
        list(columns.steps),
        fused=True,
        grad_scale=grad_scale,
        found_inf=found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=group["eps"],
        maximize=False,
    )


def in_one_layout(
    parameters: list[Tensor], gradients: list[Tensor], *states: list[Tensor]
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Each parameter with its gradient and states in one memory layout, because torch's fused step reads them in memory
    order. Tensors with other strides or gaps are copied; copies that the step changes have to be written back."""
    columns = (parameters, gradients, *states)
    contiguous, copied = [list(column) for column in columns], []
    for index, row in enumerate(zip(*columns, strict=True)):
        strides = row[0].stride()
        if row[0].is_contiguous() and all(tensor.stride() == strides for tensor in row[1:]):
            continue
        for column, tensor in zip(contiguous, row, strict=True):
            column[index] = tensor.contiguous()
            if column[index] is not tensor and column is not contiguous[1]:
                copied.append((tensor, column[index]))
    return contiguous, copied


def refusal(parameters: Iterable[Tensor]) -> str | None:
    """Why ``AdamW`` cannot step over the parameters on a GPU; None if it can."""
    if (reason := _native.missing_cuda()) is not None:
        return reason
    parameters = list(parameters)
    if not all(p.is_cuda for p in parameters) or len({p.get_device() for p in parameters}) > 1:
        return f"takes parameters on one GPU, got {', '.join(sorted({str(p.device) for p in parameters}))}"
    if parameters and (reason := _native.missing_on(parameters[0].get_device())) is not None:
        return reason
    for parameter in parameters:
        if type(parameter) not in PLAIN_TENSORS:
            return f"takes plain tensors, got {type(parameter).__name__}"
        if parameter.dtype != torch.float32:
            return f"takes fp32 parameters, got {parameter.dtype}"
        if not parameter.is_contiguous():
            got = f"shape {tuple(parameter.shape)} with strides {parameter.stride()}"
            return f"takes contiguous parameters, got one of {got}"
    return None


def _check_states(parameters: list[Tensor], states: list[dict[str, Tensor]]) -> None:
    for parameter, state in zip(parameters, states, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            values, size = state[name], 1 if name == "step" else parameter.numel()
            if values.dtype != torch.float32 or values.device != parameter.device or not values.is_contiguous():
                raise ValueError(
                    f"AdamW: state: {name}: expected contiguous fp32 numbers on {parameter.device}, "
                    f"got {_described(values)}"
                )
            if values.numel() != size:
                raise ValueError(f"AdamW: state: {name}: expected {size} numbers, got {values.numel()}")


class _Memory(NamedTuple):
    """The buffers of one call of the kernel."""

    workspace: Tensor
    norm: Tensor | None
    partial_norms: Tensor | None
    gradients: list[Tensor]  # as the kernel reads them


class _Table:
    """The kernel's table of parameters, kept between steps: addresses that have not changed are not written again."""

    def __init__(self, inputs: _StepInputs, *, enrolled: bool) -> None:
        core, count, groups = _native.core(), len(inputs.parameters), len(inputs.groups)
        self.parameters, self.counts = inputs.parameters, inputs.counts
        self.device, self.index = self.parameters[0].device, self.parameters[0].get_device()
        starts, rows = (count + 1) // 2, count * TENSOR.itemsize // 8
        self.table = np.zeros(starts + rows + groups * GROUP.itemsize // 8, np.int64)
        self.starts = self.table[:starts].view(np.int32)[:count]
        self.tensors = self.table[starts : starts + rows].view(TENSOR)
        self.groups = self.table[starts + rows :].view(GROUP)
        self.tensors["group"] = np.repeat(np.arange(groups), self.counts)
        self.chunk, self.chunks = core.adamw_chunk, 0
        self.workspace = core.adamw_workspace_cuda(count, groups)
        self.sizes: list[int] = []
        self.addresses = np.zeros((1 + len(_STATES), count), np.int64)  # of parameters and states, as checked
        self.current = np.zeros_like(self.addresses)  # as they are now
        self.gradients = np.zeros(count, np.int64)
        self.moved = True  # whether something is not where it was in the step before
        self.step_copies = StepCopies(self.parameters, enrolled=enrolled)
        self.copies: list[tuple[int, int]] = []  # addresses and dtype codes

    def is_of(self, inputs: _StepInputs) -> bool:
        return self.counts == inputs.counts and all(map(operator.is_, self.parameters, inputs.parameters))

    def take_addresses(self, states: list[dict[str, Tensor]]) -> None:
        """Writes the addresses of parameters and states. They are checked if they differ from the previous step's."""
        tensors = [*self.parameters, *[state[name] for name in _STATES for state in states]]
        _write_addresses(tensors, self.current)
        self.moved = not np.array_equal(self.current, self.addresses)
        if not self.moved:
            return
        if (reason := refusal(self.parameters)) is not None:
            raise ValueError(f"AdamW: {reason}; torch.optim.AdamW supports others")
        _check_states(self.parameters, states)
        for name, column in zip(("parameter", *_STATES), self.current, strict=True):
            self.tensors[name] = column
        self.addresses[:] = self.current

    def take_gradients(self, gradients: list[Tensor], *, norm: bool) -> _Memory:
        code = _write_addresses(gradients, self.gradients)
        if code in _native.DTYPE_CODES.values() and gradients[0].get_device() == self.index:
            self.tensors["gradient_dtype"] = code
        else:  # several dtypes, gaps, or not supported by the kernel
            for gradient in gradients:
                _check_gradient(gradient, self.index)
            gradients = [gradient if gradient.is_contiguous() else gradient.contiguous() for gradient in gradients]
            self.gradients[:] = [gradient.data_ptr() for gradient in gradients]
            self.tensors["gradient_dtype"] = [_native.DTYPE_CODES[gradient.dtype] for gradient in gradients]
        self.tensors["gradient"] = self.gradients
        sizes = [parameter.numel() for parameter in self.parameters]
        if sizes != self.sizes:
            self.tensors["size"] = sizes
            chunks = -(-self.tensors["size"] // self.chunk)
            self.starts[:] = chunks.cumsum() - chunks
            self.chunks, self.sizes = int(chunks.sum()), sizes
        return _Memory(
            torch.empty(self.workspace, dtype=torch.int64, device=self.device),
            torch.empty((), dtype=torch.float32, device=self.device) if norm else None,
            torch.empty(self.chunks, dtype=torch.float32, device=self.device) if norm else None,
            gradients,
        )

    def take_copies(self, *, captured: bool) -> None:
        """The copies that the step writes, up to date before it."""
        copies = self.step_copies.find(captured=captured, moved=self.moved)
        if copies is None:
            return
        addresses = [(0, 0) if copy is None else (copy.data_ptr(), _native.DTYPE_CODES[copy.dtype]) for copy in copies]
        if addresses != self.copies:
            self.tensors["copy"], self.tensors["copy_dtype"] = zip(*addresses, strict=True)
            self.copies = addresses

    def take_groups(self, groups: list[dict[str, Any]]) -> None:
        for index, group in enumerate(groups):
            rate = group["lr"]
            on_device = isinstance(rate, Tensor) and rate.is_cuda
            if on_device and (rate.dtype != torch.float32 or rate.device != self.device or rate.numel() != 1):
                raise ValueError(f"AdamW: lr: expected one fp32 number on {self.device}, got {rate!r}")
            rates = (0.0, rate.data_ptr()) if on_device else (float(rate), 0)
            self.groups[index] = (*rates, *group["betas"], group["eps"], group["weight_decay"])

    def arguments(
        self,
        memory: _Memory,
        max_norm: float | None = None,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        *,
        norm_only: bool = False,
    ) -> tuple[Any, ...]:
        """The arguments of ``_C.adamw_cuda``."""
        counts = (len(self.tensors), len(self.groups), self.chunks)
        buffers = (memory.workspace, memory.partial_norms, memory.norm)
        return (self.table.ctypes.data, *counts, *buffers, max_norm or 0.0, scale, found_inf, norm_only)


def _write_addresses(tensors: list[Any], target: np.ndarray) -> int:
    """Writes the tensors' addresses. Returns the code of their type if all are plain, contiguous, of one type and on
    one device, else a negative number."""
    code: int = _native.core().tensor_table(tensors, target.ctypes.data, len(tensors))
    if code < 0 and all(tensor.layout == torch.strided for tensor in tensors):  # the core may not have read all of them
        target.reshape(-1)[:] = [tensor.data_ptr() for tensor in tensors]
    return code


def _check_gradient(gradient: Tensor, index: int) -> None:
    if type(gradient) not in PLAIN_TENSORS or gradient.layout != torch.strided or gradient.get_device() != index:
        raise ValueError(f"AdamW: gradient: expected a dense tensor on the parameter's GPU, got {_described(gradient)}")
    if gradient.dtype not in _native.DTYPE_CODES:
        raise ValueError(f"AdamW: gradient: expected fp32, bf16 or fp16, got {_described(gradient)}")


def _described(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
