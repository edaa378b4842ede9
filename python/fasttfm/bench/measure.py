"""Times an op and its peers on the cases its OpSpec declares, forward and backward: one Row for each measurement.

Contenders use the same input sets in turns. Together these exceed twice the last-level cache, so a set is not in the
cache any more when it is used again. Two times are measured: ``ms``, back-to-back calls as a user issues them, which
include host overhead if the op is small; and on a GPU ``gpu_ms``, the same as CUDA graph replays.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fasttfm._version import __version__
from fasttfm.bench import timing
from fasttfm.bench.peers import Build, Inputs, PeerCall, PeerUnavailable, version_of
from fasttfm.ops.core.backends import Backend, BackendTable, dtype_name, tables
from fasttfm.ops.core.checks import in_one_line
from fasttfm.ops.core.declare import KnownCalls
from fasttfm.testing.harness import draw_inputs
from fasttfm.testing.spec import Cost, OpCase, OpSpec, outputs_of

OURS = "fasttfm"  # or "fasttfm:<backend>", which names one backend
DIRECTIONS = ("forward", "backward", "forward+backward")
_WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Row:
    """One contender in one direction of one case. Without times, ``note`` says why."""

    op: str
    case: str
    dtype: str
    direction: str
    device: str
    contender: str
    backend: str = ""  # the backend that ran, observed in the call; only for ours
    ms_p20: float | None = None
    ms_p50: float | None = None
    ms_p80: float | None = None
    gpu_ms: float | None = None
    bytes: float = 0.0
    flops: float = 0.0
    rate: float | None = None
    rate_unit: str = ""  # TB/s or TFLOP/s, whichever bounds the case
    fraction: float | None = None  # the device's limit divided by the time: at most 1
    ratio: float | None = None  # the best peer's ms divided by ours: above 1 we are faster
    gpu_ratio: float | None = None  # the same with gpu_ms
    peak_mib: float | None = None  # the peak memory of a call, in addition to what is allocated before it
    copy_tb_per_s: float = 0.0
    gemm_tflop_per_s: float = 0.0
    torch_version: str = str(torch.__version__)
    triton_version: str = ""
    peer_version: str = ""
    fasttfm_version: str = __version__
    note: str = ""
    samples: tuple[float, ...] = field(default=(), repr=False, metadata={"csv": False})  # timings in seconds

    @property
    def ours(self) -> bool:
        return self.contender.partition(":")[0] == OURS


@dataclass(frozen=True)
class Selection:
    """The selected cases. Empty means all that the device has."""

    cases: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    contenders: tuple[str, ...] = ()
    quick: bool = False  # the first case in its first dtype, fewer rounds

    @property
    def partial(self) -> bool:
        return self != Selection()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def calls_of(spec: OpSpec, device: torch.device, selection: Selection) -> list[tuple[OpCase, torch.dtype]]:
    """The (case, dtype) pairs of a run. Selected cases that the op does not have on this device are ignored."""
    on_gpu = device.type == "cuda"
    dtypes = selection.dtypes or ((torch.bfloat16,) if on_gpu else (torch.float32, torch.bfloat16))
    cases = spec.bench_cases if on_gpu else spec.bench_cases_cpu
    pairs = [
        (case, dtype)
        for case in cases
        if not selection.cases or case.name in selection.cases
        for dtype in dtypes
        if dtype in case.dtypes
    ]
    return pairs[:1] if selection.quick else pairs


def contender_names(spec: OpSpec, device: torch.device, selection: Selection) -> tuple[str, ...]:
    """By default ours, on a GPU also its backends that are used only by name, and the peers."""
    table = tables()[spec.name].backends if device.type == "cuda" else ()
    named = [f"{OURS}:{backend.name}" for backend in table if backend.by_name is not None and backend.absent() is None]
    return selection.contenders or (OURS, *named, *(peer.name for peer in spec.peers))


def directions_of(spec: OpSpec) -> tuple[str, ...]:
    """The directions in which an op is measured. If its forward computes the gradients, the backward has no row."""
    if not spec.differentiable:
        return DIRECTIONS[:1]
    return tuple(name for name in DIRECTIONS if name != "backward" or not spec.gradients_in_forward)


def contenders_in(spec: OpSpec, direction: str, names: Iterable[str]) -> list[str]:
    """The names of those that are measured in a direction."""
    backward_only = {peer.name for peer in spec.peers if peer.backward_only}
    return [name for name in names if direction == "backward" or name not in backward_only]


def bench_op(spec: OpSpec, device: torch.device, selection: Selection) -> Iterator[list[Row]]:
    """Measures an op, one list of rows for each case and dtype."""
    for case, dtype in calls_of(spec, device, selection):
        yield bench_case(
            spec,
            case,
            dtype,
            device,
            contenders=contender_names(spec, device, selection),
            effort=timing.effort_for(device, selection.quick),
        )


def bench_case(
    spec: OpSpec,
    case: OpCase,
    dtype: torch.dtype,
    device: torch.device,
    *,
    contenders: Iterable[str],
    effort: timing.Effort,
) -> list[Row]:
    """Measures one case in every direction. A contender that is unavailable or fails gets rows with the reason."""
    torch.compiler.reset()  # every shape gets a compilation of its own, and the limit on recompilations is not met
    gc.collect()  # once for each case: with torch.compile loaded it takes a good part of a second
    ceilings = timing.ceilings(device)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    notes: dict[str, str] = {}
    ready: dict[str, _Calls] = {}
    names = list(dict.fromkeys(contenders))
    # Everything runs on one side stream, where graphs can be captured: a backward goes to the stream of its forward.
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        sets = _input_sets(spec, case, dtype, device)
        gradients = _IncomingGradients(len(sets))
        for name in names:
            try:
                ready[name] = _Calls(_build(spec, name), sets, spec, case, gradients)
            except PeerUnavailable as error:
                notes[name] = str(error)
            except Exception as error:
                notes[name] = in_one_line(error)
        rows = []
        for direction in directions_of(spec) if any(calls.leaves[0] for calls in ready.values()) else DIRECTIONS[:1]:
            blank = functools.partial(_blank_row, spec, case, dtype, device, direction, ceilings)
            here = contenders_in(spec, direction, names)
            calls = {name: ready[name] for name in here if name in ready}
            measured = _measure_direction(direction, calls, stream, effort)
            unmeasured = {**notes, **measured.failures}
            filled = [
                _fill_row(blank(name), ready[name], direction, measured)
                if name in measured.seconds
                else replace(blank(name), note=unmeasured[name])
                for name in here
            ]
            rows += with_ratios([with_limit(row, spec, case, dtype, ceilings) for row in filled])
    return rows


def run_once(spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    """Calls every contender once in every direction and ignores failures: fills the caches of compiled kernels."""
    sets = _input_sets(spec, case, dtype, device, count=1)
    gradients = _IncomingGradients(len(sets))
    for name in contender_names(spec, device, Selection()):
        with contextlib.suppress(Exception):  # the measurement reports it
            calls = _Calls(_build(spec, name), sets, spec, case, gradients)
            calls.forward(0)


# ---- rows ------------------------------------------------------------------------------------------------------------


def _blank_row(
    spec: OpSpec,
    case: OpCase,
    dtype: torch.dtype,
    device: torch.device,
    direction: str,
    ceilings: timing.Ceilings,
    contender: str,
) -> Row:
    name = timing.device_name(device)
    row = Row(
        op=spec.name,
        case=case.name,
        dtype=dtype_name(dtype),
        direction=direction,
        device=name if device.type == "cuda" else f"{name}, {torch.get_num_threads()} threads",
        contender=contender,
        copy_tb_per_s=ceilings.copy_bytes_per_second / 1e12,
        gemm_tflop_per_s=ceilings.gemm_flops_per_second / 1e12,
        triton_version=version_of("triton"),
    )
    return row if row.ours else replace(row, peer_version=version_of(contender))


def _fill_row(row: Row, calls: _Calls, direction: str, measured: _Measured) -> Row:
    samples = measured.seconds[row.contender]
    p20, p50, p80 = timing.percentiles(samples)
    gpu_seconds = measured.gpu_seconds.get(row.contender)
    return replace(
        row,
        backend=calls.backend(direction),
        ms_p20=p20 * 1e3,
        ms_p50=p50 * 1e3,
        ms_p80=p80 * 1e3,
        gpu_ms=timing.percentiles(gpu_seconds)[1] * 1e3 if gpu_seconds else None,
        peak_mib=calls.peak_mib if direction == "forward+backward" else None,
        note=measured.capture_failures.get(row.contender, ""),
        samples=tuple(samples),
    )


def with_limit(row: Row, spec: OpSpec, case: OpCase, dtype: torch.dtype, ceilings: timing.Ceilings) -> Row:
    """Adds what the case must move and compute, and how close the contender comes to the device's limit."""
    parts = [_cost(spec, part, case, dtype) for part in row.direction.split("+")]
    if row.direction == "forward" and spec.inference_cost is not None:
        parts = [spec.inference_cost(case, dtype)]
    total = Cost(sum(part.bytes for part in parts), sum(part.flops for part in parts))
    row = replace(row, bytes=total.bytes, flops=total.flops)
    milliseconds = row.ms_p50 if row.gpu_ms is None else row.gpu_ms
    if milliseconds is None:
        return row
    seconds = milliseconds * 1e-3
    limit = sum(ceilings.limit_seconds(part.bytes, part.flops) for part in parts)
    by_memory = total.bytes / ceilings.copy_bytes_per_second >= total.flops / ceilings.gemm_flops_per_second
    return replace(
        row,
        rate=(total.bytes if by_memory else total.flops) / seconds / 1e12,
        rate_unit="TB/s" if by_memory else "TFLOP/s",
        fraction=limit / seconds,
    )


def _cost(spec: OpSpec, direction: str, case: OpCase, dtype: torch.dtype) -> Cost:
    cost = spec.forward_cost if direction == "forward" else spec.backward_cost
    if cost is None:
        raise ValueError(f"bench: {spec.name}: expected a {direction}_cost in its OpSpec, got None")
    return cost(case, dtype)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Adds the ratio of the best peer's time to ours to our rows; ``rows`` are the contenders of one measurement."""

    def ratio(row: Row, time: Callable[[Row], float | None]) -> float | None:
        peers = [peer_time for peer in rows if not peer.ours and (peer_time := time(peer)) is not None]
        our_time = time(row)
        return min(peers) / our_time if peers and our_time is not None else None

    return [
        replace(row, ratio=ratio(row, lambda r: r.ms_p50), gpu_ratio=ratio(row, lambda r: r.gpu_ms))
        if row.ours
        else row
        for row in rows
    ]


# ---- contenders and their inputs -------------------------------------------------------------------------------------


def _build(spec: OpSpec, name: str) -> Build:
    """Builds the contender of this name for one set of inputs."""
    provider, _, backend = name.partition(":")
    if provider == OURS:

        def build(inputs: Inputs, options: Mapping[str, Any]) -> Callable[[], Any]:
            return functools.partial(spec.function, **inputs, **options, backend=backend or None)

        return build
    for peer in spec.peers:
        if peer.name == name:
            return peer.build
    raise PeerUnavailable(f"{spec.name} has no such peer")


def _input_sets(
    spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device, count: int | None = None
) -> list[Inputs]:
    """Equal inputs at different addresses: ``count`` sets, by default at least two that are together more than twice
    the cache (see MAX_CALLS)."""
    first = draw_inputs(spec, case, dtype, device)
    if count is None:
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
            for value in first.values()
            if isinstance(value, Tensor)
        }
        count = 2 * timing.cache_bytes(device) // max(1, sum(storages.values())) + 1
        count = min(max(2, count), timing.MAX_CALLS)
    sets = [first, *(_copy(first) for _ in range(count - 1))]
    for inputs in sets:
        for name in spec.differentiable:
            if inputs.get(name) is not None:
                inputs[name].requires_grad_()
    return sets


def _copy(inputs: Inputs) -> Inputs:
    """A copy with the same strides; tensors that are views of one storage stay views of one storage."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        address = value.untyped_storage().data_ptr()
        if address not in storages:
            storages[address] = value.untyped_storage().clone()
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(storages[address], value.storage_offset(), value.shape, value.stride())

    return {name: copy(value) for name, value in inputs.items()}


class _IncomingGradients:
    """The incoming gradients of outputs: fixed, one for each input set, the same for outputs of the same shape."""

    def __init__(self, sets: int) -> None:
        self._sets = sets
        self._known: dict[Any, list[list[Tensor]]] = {}

    def __call__(self, outputs: list[Tensor]) -> list[list[Tensor]]:
        key = tuple((output.shape, output.stride(), output.dtype) for output in outputs)
        if key not in self._known:
            first = [torch.randn_like(output, requires_grad=False) for output in outputs]
            self._known[key] = [first, *([value.clone() for value in first] for _ in range(self._sets - 1))]
        return self._known[key]


class _Calls:
    """One contender, built for every input set and warmed up."""

    def __init__(
        self, build: Build, sets: list[Inputs], spec: OpSpec, case: OpCase, gradients: _IncomingGradients
    ) -> None:
        self.functions = [build(inputs, case.options) for inputs in sets]
        self.leaves = [
            function.leaves
            if isinstance(function, PeerCall)
            else [inputs[name] for name in spec.differentiable if inputs.get(name) is not None]
            for function, inputs in zip(self.functions, sets, strict=True)
        ]
        outputs, selected = _observed(self.functions[0])
        self.on_gpu = outputs_of(outputs)[0].is_cuda
        self.incoming = gradients(_roots(outputs))
        self.backends = {"forward": selected}
        if selected and self.leaves[0]:
            _, self.backends["backward"] = _observed(lambda: self.backward(0, _roots(outputs)))
        self.peak_mib: float | None = None
        if self.leaves[0] and self.on_gpu:
            self.forward_backward(0)
            self.peak_mib = _peak_mib(lambda: self.forward_backward(0))

    def backend(self, direction: str) -> str:
        """Our backends that run in a direction, in their order."""
        selected = [name for part in direction.split("+") for name in self.backends.get(part, "").split("+") if name]
        return "+".join(dict.fromkeys(selected))

    def forward(self, index: int) -> Any:
        with torch.no_grad():
            return self.functions[index]()

    def outputs(self, index: int) -> list[Tensor]:
        """The outputs of a forward with gradients, from which the backward starts."""
        return _roots(self.functions[index]())

    def backward(self, index: int, outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(outputs, self.leaves[index], self.incoming[index], allow_unused=True)

    def forward_backward(self, index: int) -> tuple[Tensor | None, ...]:
        return self.backward(index, self.outputs(index))

    def work(self, direction: str, calls: int) -> timing.Work:
        """``calls`` calls, which continue over the input sets from round to round.

        On a GPU results are kept for one rotation, so that writes do not stay in the cache either. On a CPU they are
        freed at once: otherwise new pages would be mapped at every call, which is not part of the op.
        """
        rotation = itertools.cycle(range(len(self.functions)))
        results: deque[Any] = deque(maxlen=len(self.functions) if self.on_gpu else 1)
        if direction != "backward":
            call = self.forward if direction == "forward" else self.forward_backward

            def run() -> None:
                for _ in range(calls):
                    results.append(call(next(rotation)))

            return timing.Work(run, calls)

        pending: list[tuple[int, list[Tensor]]] = []

        def run_forward() -> None:
            pending.clear()
            pending.extend((index, self.outputs(index)) for index in itertools.islice(rotation, calls))

        def run_backward() -> None:
            for index, outputs in pending:
                results.append(self.backward(index, outputs))

        return timing.Work(run_backward, calls, setup=run_forward)


def _roots(result: Any) -> list[Tensor]:
    return [output for output in outputs_of(result) if output.requires_grad]


def _observed(function: Callable[[], Any]) -> tuple[Any, str]:
    """Calls ``function``, and returns its result and the names of our backends that it selected."""
    selected: list[str] = []

    def recorded(choose: Callable[..., Backend]) -> Callable[..., Backend]:
        def chosen(table: BackendTable, *args: Any, **options: Any) -> Backend:
            before = len(selected)
            backend = choose(table, *args, **options)
            selected[before:] = [backend.name]  # replaces those that the selection itself ran
            return backend

        return chosen

    with (
        mock.patch.object(KnownCalls, "find", return_value=None),  # every call selects
        mock.patch.object(BackendTable, "select", recorded(BackendTable.select)),
        mock.patch.object(BackendTable, "select_backward", recorded(BackendTable.select_backward)),
    ):
        result = function()
    return result, "+".join(dict.fromkeys(selected))


def _peak_mib(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


# ---- one direction ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    seconds: dict[str, list[float]]
    failures: dict[str, str]
    gpu_seconds: dict[str, list[float]]
    capture_failures: dict[str, str]


def _measure_direction(
    direction: str, ready: Mapping[str, _Calls], stream: torch.cuda.Stream | None, effort: timing.Effort
) -> _Measured:
    clock: timing.Clock = timing.HostClock() if stream is None else timing.CudaClock()
    works: dict[str, timing.Work] = {}
    failures: dict[str, str] = {}
    for name, calls in ready.items():
        try:
            works[name] = _planned(direction, calls, clock, effort, whole_rotations=stream is not None)
        except Exception as error:
            failures[name] = in_one_line(error)
    measured = timing.measure(works, clock, effort)
    failures |= measured.failures
    if stream is None:
        return _Measured(measured.seconds, failures, {}, {})
    graphs: dict[str, timing.Work] = {}
    capture_failures: dict[str, str] = {}
    for name in measured.seconds:
        try:
            graphs[name] = timing.captured(works[name], stream)
        except Exception as error:
            capture_failures[name] = f"no CUDA graph: {in_one_line(error.__cause__ or error)}"
    replayed = timing.measure(graphs, clock, effort)
    return _Measured(measured.seconds, failures, replayed.seconds, capture_failures | replayed.failures)


def _planned(
    direction: str, calls: _Calls, clock: timing.Clock, effort: timing.Effort, whole_rotations: bool
) -> timing.Work:
    """Warms up and chooses the number of calls per round: for graphs whole rotations, because each replay starts
    over."""
    call = calls.forward if direction == "forward" else calls.forward_backward
    timing.time_calls(lambda: call(0), _WARM_UP_CALLS, clock)
    seconds = timing.time_calls(lambda: call(0), _WARM_UP_CALLS, clock)
    return calls.work(direction, effort.calls(seconds, len(calls.functions) if whole_rotations else 1))
