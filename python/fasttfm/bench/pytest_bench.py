"""Turns an OpSpec into pytest-benchmark tests. A benchmark file is one line: ``test_<op> = bench_test(SPEC)``.

pytest-benchmark uses a host clock and times one contender after another; measure.py uses the device's clock and
alternates between contenders. So each case is measured once, by measure.py, and pytest-benchmark's timer plays back its
samples: its statistics, its JSON and its comparisons have the same numbers as the table at the end.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest
import torch

from fasttfm.bench import measure, timing
from fasttfm.ops.core.backends import dtype_name
from fasttfm.testing.spec import OpCase, OpSpec
from fasttfm.testing.specs import every_spec

_MAX_PROCESSES = 8  # each has a CUDA context and the inputs of one case

# Rows of the session, by op, case and dtype: the first test of a case measures all its contenders and directions.
_measured: dict[tuple[str, str, torch.dtype], list[measure.Row]] = {}


def session_rows() -> list[measure.Row]:
    """All rows that this session has measured."""
    return [row for rows in _measured.values() for row in rows]


def bench_test(spec: OpSpec) -> Callable[..., None]:
    """A test with one parameter set for each case, dtype, direction and contender on this machine's device.

    Every case but the op's first in its first dtype carries the mark ``further_case``."""
    device, everything = measure.default_device(), measure.Selection()
    contenders = measure.contender_names(spec, device, everything)
    parameters = [
        pytest.param(
            case,
            dtype,
            direction,
            name,
            id=f"{case}-{dtype_name(dtype)}-{direction}-{name}",
            marks=[pytest.mark.further_case] if index else [],
        )
        for index, (case, dtype) in enumerate(measure.calls_of(spec, device, everything))
        for direction in measure.directions_of(spec)
        for name in measure.contenders_in(spec, direction, contenders)
    ]

    @pytest.mark.benchmark(timer=_playback.read)
    @pytest.mark.parametrize(("case", "dtype", "direction", "contender"), parameters)
    def test(
        benchmark: Any, request: pytest.FixtureRequest, case: OpCase, dtype: torch.dtype, direction: str, contender: str
    ) -> None:
        key = (spec.name, case.name, dtype)
        if key not in _measured:
            quick, every = (request.config.getoption(name, default=False) for name in ("--quick", "--all"))
            effort = timing.effort_for(device, quick, one_case=not every)
            _measured[key] = measure.bench_case(spec, case, dtype, device, contenders=contenders, effort=effort)
        row = next(row for row in _measured[key] if (row.direction, row.contender) == (direction, contender))
        if row.ms_p50 is None:
            (pytest.fail if row.ours else pytest.skip)(f"{contender}: {row.note}")
        benchmark.group = f"{row.op} {row.case} {row.dtype} {row.direction}"
        benchmark.extra_info.update({name: value for name, value in asdict(row).items() if name != "samples"})
        _playback.load(row.samples)
        benchmark.pedantic(lambda: None, rounds=len(row.samples))

    return test


def compile_ahead(tests: Iterable[pytest.Function]) -> None:
    """Runs the cases of these tests once, in several processes at the same time: afterwards the kernels of Triton and
    torch.compile are in their caches, and the tests, which run one after another, do not wait for compilers."""
    chosen = [(test.originalname, test.callspec.params) for test in tests]
    # An op without cases on this device has a parameter that is not one.
    calls = {
        (name, parameters["case"].name, parameters["dtype"])
        for name, parameters in chosen
        if isinstance(parameters["case"], OpCase)
    }
    processes = min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2, len(calls))
    if processes > 1 and measure.default_device().type == "cuda":
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, initializer=_compile_in_this_process) as pool:
            list(pool.map(_run_once, *zip(*sorted(calls, key=str), strict=True)))


def _compile_in_this_process() -> None:
    """Without processes of torch.compile's own, of which each of ours would start one for each core."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1


def _run_once(test: str, case_name: str, dtype: torch.dtype) -> None:
    (spec,) = (candidate for candidate in every_spec() if f"test_{candidate.name}" == test)
    (case,) = (candidate for candidate in spec.bench_cases if candidate.name == case_name)
    measure.run_once(spec, case, dtype, measure.default_device())


class _Playback:
    """A timer that is read at the start and the end of each round; the difference is an earlier sample."""

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, samples: Sequence[float]) -> None:
        self._readings = (reading for sample in samples for reading in (0.0, sample))

    def read(self) -> float:
        return next(self._readings)


_playback = _Playback()
