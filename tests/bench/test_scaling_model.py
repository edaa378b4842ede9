"""The projection to many GPUs: its formulas, the committed rows, and its check on this machine."""

from __future__ import annotations

import csv
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scaling_model.py"


@pytest.fixture(scope="module")
def model() -> Any:
    spec = importlib.util.spec_from_file_location("scaling_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling_model"] = module
    spec.loader.exec_module(module)
    return module


def timeline(model: Any, **changes: Any) -> Any:
    """A backward from 1 s to 3 s with four buckets, and an optimizer of half a second."""
    size = model.BUCKET
    values = {"ready": (1.5, 2.0, 2.5, 3.0), "bytes": (size,) * 4, "backward_end": 3.0, "step": 3.5, **changes}
    return model.Timeline(**values)


def test_an_all_reduce(model: Any) -> None:
    network = model.Network(nvlink=100.0, adapter=10.0, nvlink_latency=0.0, adapter_latency=0.0, launch=0.0)
    assert network.all_reduce(800, 1) == 0
    assert network.all_reduce(800, 2) == pytest.approx(800 / 100)
    assert network.all_reduce(800, 8) == pytest.approx(2 * 7 / 8 * 800 / 100)
    assert network.all_reduce(800, 16) == pytest.approx(14 + 2 * 1 / 2 * 800 / 8 / 10)
    times = [model.Network().all_reduce(1 << 25, 1 << power) for power in range(11)]
    assert times == sorted(times)


def test_buckets(model: Any) -> None:
    mib = model.MIB
    buckets = model.buckets(
        model.Timeline((1.0, 2.0, 3.0, 4.0, 5.0), (mib, 20 * mib, 10 * mib, 3 * mib, mib), 5.0, 6.0)
    )
    assert buckets == [(1.0, mib), (3.0, 30 * mib), (5.0, 4 * mib)]


def test_a_step(model: Any) -> None:
    step = timeline(model)
    for costs, options, expected in (
        ((0.0,) * 4, {}, 3.5),
        ((0.5,) * 4, {}, 3.5 + 0.5),  # the last bucket's is exposed
        ((0.1,) * 4, {}, 3.5 + 0.1),
        ((1.0,) * 4, {}, 1.5 + 4 + 0.5),  # one after the other, from the first bucket on
        ((0.5, 0.5, 0.5, 0.0), {"interference": 1.0}, 3.5 + 1.5),  # nothing is hidden
        ((0.0,) * 4, {"waits": 0.25}, 3.75),
    ):
        assert model.step_time(step, costs, **options) == pytest.approx(expected)


def test_the_slowest_of_many(model: Any) -> None:
    random = np.random.default_rng(0)
    for ranks in (2, 8, 256):
        expected = random.normal(size=(4000, ranks)).max(1).mean()
        assert model.slowest(ranks, 2.0) == pytest.approx(2 * expected, rel=0.05)
    assert model.slowest(1, 2.0) == 0


def test_the_committed_rows_are_those_of_the_model(model: Any) -> None:
    """They change with the measured rows: python benchmarks/scaling_model.py --out benchmarks/results."""
    with (model.RESULTS / "nvidia-h200-scaling.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    expected = model.projection([1 << power for power in range(11)], model.Network())
    assert [{name: str(value) for name, value in row.items()} for row in expected] == rows
    for row in expected:
        assert 0.85 < row["efficiency"] <= 1
        if row["gpus"] == 1:
            assert row["projected_ms"] == row["measured_step_ms"]
    sizes = model.h200_timeline(*model.STEPS[0][1:])
    assert sum(sizes.bytes) == pytest.approx(4 * 335e6, rel=0.01)
    assert sizes.ready == tuple(sorted(sizes.ready))
    assert model.mlperf(model.Network()).endswith("ratio 1.15")


def test_a_measured_timeline(model: Any, tmp_path: Path) -> None:
    size = model.Size("tiny", 2, 32, 3)
    trainer, batch = model.trainer_of(size, model.World(model.torch.device("cpu")))
    timeline = model.measured_timeline(trainer, batch, size.steps)
    parameters = [parameter for parameter in trainer.module.parameters() if parameter.requires_grad]
    assert sum(timeline.bytes) == 4 * sum(parameter.numel() for parameter in parameters)
    assert 0 < timeline.ready[0] < timeline.ready[-1] == timeline.backward_end < timeline.step


@pytest.mark.slow
def test_the_check_predicts_a_step_of_two_ranks(tmp_path: Path) -> None:
    """How close a prediction is depends on the machine's other work, so only a factor of three is a fault here."""
    options = ["--ranks", "2", "--size", "tiny", "--sequences", "2", "--length", "32", "--steps", "5"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--check", *options, "--out", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert "2 ranks: without communication " in said.stdout, said.stderr
    with (tmp_path / "cpu-scaling-check.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert said.returncode == int(abs(float(row["error"])) > 0.15)
    assert abs(math.log(float(row["predicted_ms"]) / float(row["measured_ms"]))) < math.log(3)
