"""Timing of training steps and calls of whole models, which the scripts in ``benchmarks`` share."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fasttfm.bench.timing import clock_for
from fasttfm.ops.core.graph_capture import GraphPool

Output = TypeVar("Output")


@dataclass(frozen=True)
class Timed:
    """The median of a call in milliseconds, and the most memory that it had allocated, in GiB (0 on a CPU)."""

    milliseconds: float
    memory: float


def training_step(
    loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: torch.device
) -> Callable[[], None]:
    """Forward, backward and optimizer: bf16 autocast on a GPU, fp32 weights."""

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def captured(step: Callable[[], Output], warmup: int = 3) -> Callable[[], Output]:
    """The step as a CUDA graph. A replay returns the output of the captured call, which the next replay overwrites."""
    pool = GraphPool(empty_cache=True)
    pool.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(pool.stream):  # kernels are compiled and selected before the capture
        for _ in range(warmup):
            step()
    graph, output = pool.capture(step)

    def replay(held: object = step) -> Output:  # the graph only has addresses: the step keeps model and batch alive
        graph.replay()
        return output

    return replay


def timed_in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, warmup: int = 3
) -> dict[str, Timed]:
    """Medians over rounds in which the calls alternate. A call that fails is skipped, and its error is printed."""
    clock = clock_for(device)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for name, call in calls.items():
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            for _ in range(warmup):
                call()
            clock.synchronize()
            memory[name] = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            seconds[name] = []
        except Exception:
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
    for _ in range(rounds):
        for name, times in seconds.items():
            clock.synchronize()
            start = clock.mark()
            calls[name]()
            end = clock.mark()
            clock.synchronize()
            times.append(clock.seconds(start, end))
    return {name: Timed(1e3 * statistics.median(times), memory[name]) for name, times in seconds.items()}


def print_times(times: Mapping[str, Timed]) -> None:
    """Prints a line for each contender: time, memory, and its time relative to the first one's."""
    first = next(iter(times.values()), None)
    for name, timed in times.items():
        ratio = timed.milliseconds / first.milliseconds if first is not None else 0.0
        print(f"{name:28} {timed.milliseconds:10.2f} ms {timed.memory:8.1f} GiB {ratio:8.2f}x", flush=True)
