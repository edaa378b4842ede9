"""Timing of benchmarks: clocks, rounds in which contenders alternate, CUDA graphs, and a device's peak rates."""

from __future__ import annotations

import functools
import gc
import math
import platform
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from fasttfm.ops.core.checks import in_one_line
from fasttfm.ops.core.graph_capture import GraphPool

# Calls in one round. 256 sets of inputs already exceed twice the cache unless a set is smaller than 0.8% of it.
MAX_CALLS = 256


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds of back-to-back calls, as many as fit into the budget of each contender."""

    round_seconds: float
    budget_seconds: float
    min_rounds: int = 10
    max_rounds: int = 100

    def rounds(self, seconds_per_round: float) -> int:
        return max(self.min_rounds, min(self.max_rounds, round(self.budget_seconds / max(seconds_per_round, 1e-9))))

    def calls(self, seconds_per_call: float, rotation: int) -> int:
        """Calls that fill a round: a whole number of passes over the input sets."""
        calls = min(MAX_CALLS, math.ceil(self.round_seconds / max(seconds_per_call, 1e-9)))
        return math.ceil(max(1, calls) / rotation) * rotation


def effort_for(device: torch.device, quick: bool = False, *, one_case: bool = False) -> Effort:
    """``one_case`` of each op, as ``pytest benchmarks`` measures by default, has half of the rounds on a GPU."""
    if device.type == "cuda":
        return Effort(1e-3, 0.01 if quick else 0.02 if one_case else 0.04, min_rounds=5 if one_case else 10)
    return Effort(5e-3, 0.05, min_rounds=5) if quick else Effort(5e-3, 0.25)


@dataclass(frozen=True)
class Work:
    """``run()`` makes ``calls`` calls. ``setup()`` runs before each round and is not timed.

    With ``drain`` the device is idle when the timed part starts, so that the time includes the host's overhead, as a
    user sees it. Without it, the device is still busy with the setup while the host issues ``run``, so that only device
    time is measured.
    """

    run: Callable[[], object]
    calls: int
    setup: Callable[[], object] | None = None
    drain: bool = True


class Clock(Protocol):
    """Marks points in a device's timeline; ``seconds`` may be called after ``synchronize``."""

    def mark(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def synchronize(self) -> None: ...


class HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass


class CudaClock:
    """Events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e-3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


def time_calls(function: Callable[[], object], calls: int, clock: Clock) -> float:
    """A rough measurement of the seconds per call, to plan the length of a round."""
    clock.synchronize()
    start = clock.mark()
    for _ in range(calls):
        function()
    end = clock.mark()
    clock.synchronize()
    return clock.seconds(start, end) / calls


@dataclass(frozen=True)
class Samples:
    """Seconds per call in each round, by contender, and the reasons of failures."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def measure(works: Mapping[str, Work], clock: Clock, effort: Effort) -> Samples:
    """Times all contenders alternately (A B A B ...), so that a change of clock rate or other load affects all of them.

    A contender that raises is excluded from further rounds, with the reason; the others continue.
    """
    failures: dict[str, str] = {}

    def one_round(name: str) -> tuple[Any, Any] | None:
        work = works[name]
        try:
            if work.setup is not None:
                work.setup()
            if work.drain:
                clock.synchronize()
            start = clock.mark()
            work.run()
            return start, clock.mark()
        except Exception as error:  # a contender may fail in any way; the report says how
            failures[name] = in_one_line(error)
            return None

    for name in works:  # fills the allocator's cache, and measures the length of a round
        one_round(name)
    alive = [name for name in works if name not in failures]
    if not alive:
        return Samples(failures=failures)
    pass_seconds = time_calls(lambda: [one_round(name) for name in alive], 1, clock)

    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in alive}
    gc.disable()
    try:
        for _ in range(effort.rounds(pass_seconds / len(alive))):
            for name in alive:
                if name not in failures and (pair := one_round(name)) is not None:
                    marks[name].append(pair)
        clock.synchronize()
    finally:
        gc.enable()
    seconds = {
        name: [clock.seconds(*pair) / works[name].calls for pair in pairs]
        for name, pairs in marks.items()
        if name not in failures
    }
    return Samples(seconds, failures)


def captured(work: Work, stream: torch.cuda.Stream) -> Work:
    """The same work as CUDA graphs, which measure only device time. It must already have run on ``stream``.

    Setup and run become two graphs on one memory pool, replayed in the order of capture, so that a backward finds the
    tensors that its forward saved. Without a setup, the run itself is replayed first, so that the timed replay is
    enqueued while the device is busy.
    """
    pool = GraphPool(stream, empty_cache=True)
    setup = None if work.setup is None else pool.capture(work.setup)
    run, _ = pool.capture(work.run)
    return Work(run.replay, work.calls, setup=run.replay if setup is None else setup[0].replay, drain=False)


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80."""
    p20, p50, p80 = numpy.percentile(samples, [20, 50, 80])
    return float(p20), float(p50), float(p80)


# ---- the device's limits ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """The device's peak rates, measured in the same run."""

    copy_bytes_per_second: float  # bytes read plus bytes written
    gemm_flops_per_second: float  # bf16 on a GPU; fp32 on a CPU, which may have no bf16 instructions

    def limit_seconds(self, bytes: float, flops: float) -> float:
        """The lower bound of the time: the larger of the times for moving the bytes and for computing the GEMMs."""
        return max(bytes / self.copy_bytes_per_second, flops / self.gemm_flops_per_second)


@functools.cache
def ceilings(device: torch.device) -> Ceilings:
    """Copies a buffer far larger than the cache, and multiplies two square matrices."""
    on_gpu = device.type == "cuda"
    elements, size, dtype = (1 << 29, 8192, torch.bfloat16) if on_gpu else (1 << 25, 1024, torch.float32)
    source = torch.zeros(elements, dtype=dtype, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    calls = 8 if on_gpu else 1
    works = {
        "copy": Work(lambda: [target.copy_(source) for _ in range(calls)], calls),
        "gemm": Work(lambda: [torch.mm(a, b, out=product) for _ in range(calls)], calls),
    }
    timings = measure(works, clock_for(device), effort_for(device))
    if timings.failures:
        raise RuntimeError(f"the ceilings of {device} could not be measured: {timings.failures}")
    copy, gemm = (percentiles(timings.seconds[name])[1] for name in ("copy", "gemm"))
    return Ceilings(2 * source.nbytes / copy, 2 * size**3 / gemm)


def cache_bytes(device: torch.device) -> int:
    """The last-level cache."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20}
    matches = [re.fullmatch(r"(\d+)([KM])", path.read_text().strip()) for path in sizes]
    return max((int(size[1]) * units[size[2]] for size in matches if size), default=32 << 20)


@functools.cache
def device_name(device: torch.device) -> str:
    """The name of the chip, for example ``NVIDIA H200`` or ``Neoverse-N1``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        described = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        described = ""
    return _cpu_name(described) or platform.machine()


def _cpu_name(lscpu: str) -> str:
    """The CPU's name in lscpu's output. Family and model are added if the name, as in virtual machines, has no number
    but the clock's: ``Intel(R) Xeon(R) Processor @ 2.50GHz``."""
    fields = dict(re.findall(r"^(Model name|CPU family|Model):\s*(.+?)\s*$", lscpu, re.MULTILINE))
    name = re.sub(r"\s*@.*", "", fields.get("Model name", ""))
    if name and not re.search(r"\d", name) and "Model" in fields:
        name += f" family {fields.get('CPU family', '-')} model {fields['Model']}"
    return name


def file_stem(device: torch.device) -> str:
    """The name of the chip for file names: ``nvidia-h200``, ``cpu-neoverse-n1``."""
    name = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", " ", device_name(device), flags=re.IGNORECASE)
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return words if device.type == "cuda" else f"cpu-{words}"
