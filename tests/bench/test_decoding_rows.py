"""benchmarks/decoding.py, its committed rows, and the page that states them, have one format."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-decoding.csv"))


@pytest.fixture(scope="module")
def script() -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "decoding.py")))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_results_have_the_columns_and_contenders_of_the_script(script: Any) -> None:
    assert RESULTS
    known = {*script.SAMPLING, *script.REPLAYS, "transformers", "transformers static"}
    for path in RESULTS:
        rows = read(path)
        assert tuple(rows[0]) == script.COLUMNS, path.name
        for row in rows:
            assert None not in (*row, *row.values()), f"{path.name}: {row}"
            assert row["contender"] in known, f"{path.name}: {row}"
            assert min(int(row["batch"]), float(row["ms_per_token"])) > 0


def test_rows_are_appended_under_the_same_header(script: Any, tmp_path: Path) -> None:
    device = torch.device("cpu")
    figures = {"session": (0.5, 12.25), "graph replay, fused": (0.25, None)}
    for batch in (1, 16):
        path = script.write(tmp_path, script.rows_of(batch, 60, figures, device), device)
    assert path.name.endswith("-decoding.csv")
    rows = read(path)
    assert tuple(rows[0]) == script.COLUMNS
    found = [(row["batch"], row["contender"], row["ms_per_token"], row["ms_first_token"]) for row in rows]
    each = [("session", "0.5000", "12.250"), ("graph replay, fused", "0.2500", "")]
    assert found == [(batch, *figure) for batch in ("1", "16") for figure in each]


def test_the_pages_table_is_that_of_the_rows() -> None:
    lines = (ROOT / "docs" / "generation.md").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("| sequences |"))
    header, _, *body = (
        [cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines[start : start + 4]
    )
    stated = {
        (f"graph replay, {name}", batch): time
        for name, *times in body
        for batch, time in zip(header[1:], times, strict=True)
    }
    rows = read(ROOT / "benchmarks" / "results" / "nvidia-h200-decoding.csv")
    measured = {
        (row["contender"], row["batch"]): row["ms_per_token"]
        for row in rows
        if row["contender"].startswith("graph replay")
    }
    assert stated == measured
