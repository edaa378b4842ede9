"""The choice of a backend: made at call time, explained on request, without silent fallback."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from fasttfm import _gpus, _native

_tables: dict[str, BackendTable] = {}


class BackendRefused(ValueError):
    """No backend, or not the requested one, supports a call; the message lists every backend's reason."""


def _no_backward(*_: Any) -> Any:
    raise NotImplementedError("this op's gradient needs no kernel")


def _nothing(*_: Any, **__: Any) -> str | None:
    return None


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Backend:
    """One implementation of an op.

    ``absent()`` returns why this machine or build lacks it; ``refuse(...)``, called with the forward's tensors and
    options, why it does not support that call; ``refuse_backward(...)``, with the same, why it supports only the
    forward, so that the next backend computes the backward; ``yield_forward(...)`` and ``yield_backward(...)`` why the
    next one is preferable for the call or for its backward, unless this backend was requested by name. All return None
    if there is no reason.
    ``infer``, where given, is the forward of calls without gradients: it returns only the first output, and does not
    compute what only the backward reads. ``sums_columns(...)`` returns whether the backward also gives its gradients'
    sums over rows, as ``column_sums``.
    ``by_name`` is the reason why a backend comes after one that supports every call, and so must be requested by name.
    """

    name: str
    absent: Callable[[], str | None]
    refuse: Callable[..., str | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any] = field(default=_no_backward)
    _: KW_ONLY
    refuse_backward: Callable[..., str | None] = field(default=_nothing)
    yield_forward: Callable[..., str | None] = field(default=_nothing)
    yield_backward: Callable[..., str | None] = field(default=_nothing)
    sums_columns: Callable[..., bool] = field(default=_never)
    infer: Callable[..., Any] | None = None
    by_name: str | None = None

    @functools.cached_property
    def has_reasons(self) -> bool:
        """Whether another backend may compute the backward."""
        return self.refuse_backward is not _nothing or self.yield_backward is not _nothing

    def backward_reason(self, requested: str | None, *args: Any, **options: Any) -> str | None:
        """Why another backend computes the backward; None if this one does."""
        reason = self.refuse_backward(*args, **options)
        return reason if reason or requested == self.name else self.yield_backward(*args, **options)


@dataclass(frozen=True)
class BackendTable:
    """The backends of one op, best first."""

    op: str
    backends: tuple[Backend, ...]
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(backend.name for backend in self.backends))
        _tables[self.op] = self

    def reasons(self, *args: Any, **options: Any) -> dict[str, str | None]:
        """For each backend: None if it supports a call with these arguments, otherwise why not."""
        return {backend.name: backend.absent() or backend.refuse(*args, **options) for backend in self.backends}

    def select(self, requested: str | None, *args: Any, **options: Any) -> Backend:
        """The requested backend, or the first that does not refuse."""
        unfit = "cpu" if args[0].is_cuda else None  # this backend certainly refuses
        for backend in self.backends:
            if backend.name == unfit or (requested is not None and requested != backend.name):
                continue
            if backend.absent() is not None or backend.refuse(*args, **options) is not None:
                continue
            if requested is not None or backend.yield_forward(*args, **options) is None:
                return backend
        self._raise_refused(requested, *args, **options)
        raise AssertionError("unreachable")

    def select_backward(self, requested: str | None, *args: Any, **options: Any) -> Backend:
        """The backend of the call's forward or, if that does not compute the backward, the first after it that does."""
        forward = self.select(requested, *args, **options)
        if forward.backward_reason(requested, *args, **options) is None:
            return forward
        following = self.backward_after(forward, *args, **options)
        if following is not None:
            return following
        if forward.refuse_backward(*args, **options) is None:
            return forward
        raise BackendRefused(f"{self.op}: no backend after {forward.name!r} supports the backward of this call")

    def backward_after(self, passed: Backend, *args: Any, **options: Any) -> Backend | None:
        """The first backend after ``passed`` that supports a call's backward."""
        for backend in self.backends[self.names.index(passed.name) + 1 :]:
            reason = backend.absent() or backend.refuse(*args, **options) or backend.refuse_backward(*args, **options)
            if reason is None:
                return backend
        return None

    def check_name(self, requested: str | None) -> None:
        if requested is not None and requested not in self.names:
            raise ValueError(f"{self.op}: backend: expected one of {', '.join(self.names)}, got {requested!r}")

    def _raise_refused(self, requested: str | None, *args: Any, **options: Any) -> None:
        reasons = self.reasons(*args, **options)
        lines = [f"  {name}: {reason or 'supports this call'}" for name, reason in reasons.items()]
        asked = f"backend {requested!r} does not support this call" if requested else "no backend supports this call"
        raise BackendRefused("\n".join([f"{self.op}: {asked}:", *lines]))


class _Requests:
    """The use_backend() blocks that are open, in one thread or in all. ``name`` is the backend that the innermost block
    requests. torch.compile guards on the attributes, so that compiled functions follow them."""

    def __init__(self) -> None:
        self.open: list[list[str | None]] = []
        self.any = False
        self.name: str | None = None

    def enter(self, request: list[str | None]) -> None:
        self._set([*self.open, request])

    def leave(self, request: list[str | None]) -> None:
        """Blocks of several threads, or of generators, may be left in any order."""
        self._set([other for other in self.open if other is not request])

    def _set(self, requests: list[list[str | None]]) -> None:
        self.open = requests
        self.name = requests[-1][0] if requests else None
        self.any = bool(requests)


class _ThreadRequests(threading.local):
    def __init__(self) -> None:
        self.scope = _Requests()


_here = _ThreadRequests()
_everywhere = _Requests()
_changing = threading.Lock()


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Requests one backend for every call inside the ``with`` block; ``None`` restores the free choice.

    It applies to the thread that entered the block, and to threads that are in no block themselves: these follow the
    block that was entered last in any thread.

    A call that the backend refuses raises. The backward of a call uses the backend that its forward requested; a
    backend that supports only the forward of a call (``explain`` says so) leaves the backward to the next in the op's
    order, and one that was not requested does so also if the next is faster.
    """
    known = sorted({backend for table in _tables.values() for backend in table.names})
    if name is not None and name not in known:
        raise ValueError(f"use_backend: name: expected one of {', '.join(known)}, got {name!r}")
    request, scopes = [name], (_here.scope, _everywhere)
    with _changing:
        for scope in scopes:
            scope.enter(request)
    try:
        yield
    finally:
        with _changing:
            for scope in scopes:
                scope.leave(request)


def requested(backend: str | None) -> str | None:
    """The backend that a call requests: its own argument, otherwise the surrounding use_backend()."""
    if backend is not None:
        return backend
    scope = _here.scope
    return scope.name if scope.any else _everywhere.name


@dataclass(frozen=True)
class Explanation:
    """Which backend runs a call, and why the others do not. Prints as a table."""

    op: str
    chosen: str | None
    reasons: Mapping[str, str | None]
    backward: str | None  # the backend that runs the backward
    backward_reason: str | None = None  # why that is another one
    by_name: Mapping[str, str] = field(default_factory=dict)  # why some that support the call are used only by name
    of_call: bool = True  # False if no arguments were passed: ``reasons`` say only why backends are unavailable

    def __str__(self) -> str:
        if not self.of_call:
            hint = f"the backends of this machine; explain({self.op!r}, x, ...) says which one runs a call"
            lines = [f"  {name:<10} {reason or 'available'}" for name, reason in self.reasons.items()]
            return "\n".join([f"{self.op}: {hint}", *lines])

        def verdict(name: str, reason: str | None) -> str:
            if name == self.chosen:
                other = f", {self.backward} its backward: {name} {self.backward_reason}" if self.backward_reason else ""
                return f"runs this call{other}"
            if reason is None and name in self.by_name:
                return f"supports this call, used only by name: {self.by_name[name]}"
            return reason or "supports this call"

        lines = [f"  {name:<10} {verdict(name, reason)}" for name, reason in self.reasons.items()]
        return "\n".join([f"{self.op}: {self.chosen or 'no backend'}", *lines])


def explain(op: str, *args: Any, backend: str | None = None, **options: Any) -> Explanation:
    """Returns which backends would run ``fasttfm.ops.<op>(*args, **options)``, forward and backward. Nothing is
    computed. Without arguments, it returns which of the op's backends are available on this machine.

    Options that do not influence the choice of a backend may be omitted; ops without other options accept none here.
    """
    table = _tables.get(op)
    if table is None:
        raise ValueError(f"explain: op: expected one of {', '.join(sorted(_tables))}, got {op!r}")
    table.check_name(backend)
    if not args and not options:
        available = {candidate.name: candidate.absent() for candidate in table.backends}
        return Explanation(op, None, available, None, of_call=False)
    asked = requested(backend)
    try:
        reasons = table.reasons(*args, **options)
    except (TypeError, AttributeError) as error:  # of the checks, which expect the op's tensors
        raise TypeError(f"explain: expected the arguments of {_call_text(op)}, got others: {error}") from error
    by_name = {candidate.name: candidate.by_name for candidate in table.backends if candidate.by_name is not None}
    able = []
    for candidate in table.backends:
        if reasons[candidate.name] is not None or asked not in (None, candidate.name):
            continue
        slower = candidate.yield_forward(*args, **options) if asked is None else None
        if slower is not None:
            by_name[candidate.name] = slower
        else:
            able.append(candidate)
    if not able:
        return Explanation(op, None, reasons, None, by_name=by_name)
    chosen = able[0]
    backward = table.select_backward(asked, *args, **options).name
    left = None if backward == chosen.name else chosen.backward_reason(asked, *args, **options)
    return Explanation(op, chosen.name, reasons, backward, left, by_name)


def _call_text(op: str) -> str:
    """The op's public function with its arguments."""
    package = __package__.rpartition(".")[0]
    function = getattr(importlib.import_module(package), op, None)
    return f"{package}.{op}{'' if function is None else inspect.signature(function)}"


def tables() -> Mapping[str, BackendTable]:
    """Every op's backends, by op name."""
    return dict(_tables)


# ---- common reasons --------------------------------------------------------------------------------------------------


def always() -> str | None:
    return None


@functools.cache
def triton_absent() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available() or triton_interpreted():
        return None
    return "torch sees no CUDA device (TRITON_INTERPRET=1 runs Triton kernels on the CPU, slowly, for tests)"


@functools.cache
def triton_interpreted() -> bool:
    """Whether Triton kernels run in Triton's interpreter: on CPU tensors, one program at a time."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def refuse_native_cpu(tensor: torch.Tensor, *_: Any) -> str | None:
    if not tensor.is_cpu:
        return f"takes CPU tensors, got {tensor.device.type}"
    return _refuse_dtype(tensor)


def refuse_cuda(tensor: torch.Tensor) -> str | None:
    if not tensor.is_cuda:
        return f"takes CUDA tensors, got {tensor.device.type}"
    return _native.missing_on(tensor.get_device()) or _refuse_dtype(tensor)


@functools.cache
def refuse_cuda_memory(index: int, memory: Callable[..., int], *arguments: int) -> str | None:
    """The refusal of CUDA kernels whose blocks need ``memory(*arguments, limit)`` bytes of shared memory on a GPU that
    allows ``limit``. Computed once for each GPU and shape."""
    limit = _native.block_memory(index)
    return _gpus.refuse_block_memory(memory(*arguments, limit), limit)


# The elements that CUDA kernels over rows load at a time: 16 bytes of a 16-bit dtype.
CUDA_VECTOR = 8


def refuse_cuda_rows(rows: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor | None] = ()) -> str | None:
    """The refusal of CUDA kernels that read ``rows`` [..., C] and ``parameters`` [C] in whole vectors."""
    for tensor in rows:
        if tensor is None:
            continue
        if tensor.shape[-1] % CUDA_VECTOR:
            return f"takes a multiple of {CUDA_VECTOR} columns, got {tensor.shape[-1]}"
        if not tensor.is_contiguous() and any(stride % CUDA_VECTOR for stride in tensor.stride()[:-1]):
            return f"takes rows whose strides are multiples of {CUDA_VECTOR}, got {tensor.stride()}"
    for tensor in parameters:
        if tensor is not None and not tensor.is_contiguous():
            return "takes contiguous parameters"
    for tensor in (*rows, *parameters):
        if tensor is not None and tensor.data_ptr() % 16:
            return "takes tensors that start at a multiple of 16 bytes"
    return None


def refuse_backward_memory(op: str) -> Callable[..., str | None]:
    """The refusal of CUDA kernels whose shared memory is bound as ``<op>_backward_memory_cuda(columns, dtype,
    limit)``."""

    def refuse(x: torch.Tensor, *_: Any) -> str | None:
        memory = getattr(_native.core(), f"{op}_backward_memory_cuda")
        return refuse_cuda_memory(x.get_device(), memory, x.shape[-1], _native.DTYPE_CODES[x.dtype])

    return refuse


def refuse_columns(most: int) -> Callable[..., str | None]:
    """The refusal of kernels that support rows of at most ``most`` columns."""

    def refuse(x: torch.Tensor, *_: Any) -> str | None:
        return f"takes up to {most} columns, got {x.shape[-1]}" if x.shape[-1] > most else None

    return refuse


def refuse_triton(tensor: torch.Tensor, *_: Any) -> str | None:
    expected = "cpu" if triton_interpreted() else "cuda"
    if tensor.device.type != expected:
        return f"takes {expected} tensors, got {tensor.device.type}"
    return _refuse_dtype(tensor)


def _refuse_dtype(tensor: torch.Tensor) -> str | None:
    if tensor.dtype not in _native.DTYPE_CODES:
        return f"takes float32, bfloat16 and float16, got {dtype_name(tensor.dtype)}"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- the backends of ops over rows, in this order --------------------------------------------------------------------
# ``refuse`` functions get the op's tensors, rows first, and run before other checks.


def native_cpu(
    forward: Callable[..., Any], backward: Callable[..., Any], infer: Callable[..., Any] | None = None
) -> Backend:
    """The CPU core. It comes before Triton, so that Triton's interpreter runs only if it is requested by name."""
    return Backend("cpu", _native.missing, refuse_native_cpu, forward, backward, infer=infer)


def native_cuda(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    rows: int = 1,
    refuse: Callable[..., str | None] = _nothing,
    refuse_on_gpu: Callable[..., str | None] = _nothing,
    infer: Callable[..., Any] | None = None,
) -> Backend:
    """CUDA kernels that read whole vectors of the first ``rows`` tensors, and of the parameters that follow.
    ``refuse_on_gpu`` is called when the tensors are on a GPU and can be read like that."""

    def refuse_call(*tensors: torch.Tensor | None) -> str | None:
        x = tensors[0]
        assert x is not None
        return (
            refuse(*tensors)
            or refuse_cuda(x)
            or refuse_cuda_rows(tensors[:rows], tensors[rows:])
            or refuse_on_gpu(*tensors)
        )

    return Backend("cuda", _native.missing_cuda, refuse_call, forward, backward, infer=infer)


def from_triton(op: str, function: str) -> Callable[..., Any]:
    """A function of kernels/<op>/triton.py, which is imported when it is called."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(f"...kernels.{op}.triton", __package__), function)(*args)

    return call


def triton_kernels(op: str, *, refuse: Callable[..., str | None] = _nothing) -> Backend:
    """``<op>_forward_triton`` and ``<op>_backward_triton``."""

    def refuse_call(x: torch.Tensor, *others: torch.Tensor | None) -> str | None:
        return refuse(x, *others) or refuse_triton(x)

    forward, backward = (from_triton(op, f"{op}_{direction}_triton") for direction in ("forward", "backward"))
    return Backend("triton", triton_absent, refuse_call, forward, backward)


def torch_reference(forward: Callable[..., Any], backward: Callable[..., Any] = _no_backward) -> Backend:
    return Backend("reference", always, _nothing, forward, backward)
