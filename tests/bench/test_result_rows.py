"""The committed rows of ops: all contenders of a case ran in one run, and a ratio is that of the run's best peer."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RUN = ("device", "copy_tb_per_s", "gemm_tflop_per_s", "torch_version", "triton_version")  # measured once in a run
RATIOS = {"ratio": "ms_p50", "gpu_ratio": "gpu_ms"}
ROUNDING = 5e-6  # of times and ratios, which are written with six digits


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


FILES = [path for path in sorted(RESULTS.glob("*.csv")) if {"op", *RUN, *RATIOS} <= set(_read(path)[0])]


def _faults(rows: list[dict[str, str]]) -> list[str]:
    """Cases with rows of several runs, with a contender twice, or with ratios that are not those of the rows."""
    cases: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[name] for name in ("op", "case", "dtype", "direction")), []).append(row)
    faults = []
    for case, group in cases.items():
        name = " ".join(case)
        if len({tuple(row[column] for column in RUN) for row in group}) > 1:
            faults.append(f"{name}: several runs")
        if len({row["contender"] for row in group}) < len(group):
            faults.append(f"{name}: a contender twice")
        for ratio, time in RATIOS.items():
            peers = [float(row[time]) for row in group if not row["contender"].startswith("fasttfm") and row[time]]
            for row in group:
                ours = row["contender"].startswith("fasttfm") and row[time]
                expected = min(peers) / float(row[time]) if ours and peers else math.nan
                written = float(row[ratio] or math.nan)
                if written != pytest.approx(expected, rel=3 * ROUNDING, nan_ok=True):
                    faults.append(f"{name}: {ratio} of {row['contender']}")
    return faults


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_of_a_case_are_of_one_run(path: Path) -> None:
    assert _faults(_read(path)) == []


def test_rows_of_several_runs_are_found() -> None:
    assert FILES
    common = {"op": "a", "case": "b", "dtype": "c", "direction": "d", **dict.fromkeys(RUN, "1")}
    ours = {**common, "contender": "fasttfm", "ms_p50": "2", "gpu_ms": "1", "ratio": "2", "gpu_ratio": "3"}
    peer = {**common, "contender": "torch", "ms_p50": "4", "gpu_ms": "3", "ratio": "", "gpu_ratio": ""}
    assert _faults([ours, peer]) == []
    assert _faults([ours, {**peer, "gemm_tflop_per_s": "2"}]) == ["a b c d: several runs"]
    assert _faults([ours, peer, peer]) == ["a b c d: a contender twice"]
    faster = {**peer, "contender": "fa4", "gpu_ms": "2"}
    assert _faults([ours, peer, faster]) == ["a b c d: gpu_ratio of fasttfm"]
