"""benchmarks/decoding.py, its committed rows, and the page that states them, have one format."""

from __future__ import annotations

import csv
import itertools
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
    values = [(row["batch"], row["contender"], row["ms_per_token"], row["ms_first_token"]) for row in rows]
    contenders = [("session", "0.5000", "12.250"), ("graph replay, fused", "0.2500", "")]
    assert values == [(batch, *figure) for batch in ("1", "16") for figure in contenders]


Times = dict[tuple[str, str], str]


def tables_of(page: Path) -> list[Times]:
    """The times of each table whose columns are numbers of sequences."""
    lines = page.read_text().splitlines()
    tables = []
    for start in (index for index, line in enumerate(lines) if line.startswith("| sequences |")):
        rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
        header, _, *body = ([cell.strip().strip("*") for cell in row.strip("|").split("|")] for row in rows)
        tables.append(
            {
                (f"graph replay, {name}", batch): time
                for name, *times in body
                for batch, time in zip(header[1:], times, strict=True)
            }
        )
    return tables


def test_each_table_of_the_page_is_one_run_of_the_rows() -> None:
    runs: dict[str, Times] = {}
    for row in read(ROOT / "benchmarks" / "results" / "nvidia-h200-decoding.csv"):
        if row["contender"].startswith("graph replay"):
            runs.setdefault(row["steps"], {})[row["contender"], row["batch"]] = row["ms_per_token"]
    assert tables_of(ROOT / "docs" / "generation.md") == list(runs.values())
