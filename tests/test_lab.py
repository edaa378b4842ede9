"""benchmarks/lab: its README names every file, and its harness reads what ``fasttfm bench`` writes."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fasttfm.bench.measure import Row
from fasttfm.bench.report import write_csv

LAB = Path(__file__).parents[1] / "benchmarks" / "lab"


@pytest.fixture(scope="module")
def variants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("variants", LAB / "variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_names_every_file() -> None:
    named = re.findall(r"^\| `([\w.]+)` \|", (LAB / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in LAB.iterdir() if path.is_file() and path.name != "README.md")


def test_a_variant_is_a_name_and_macros(variants: ModuleType) -> None:
    assert variants.variant("base=") == ("base", "")
    assert variants.variant("two=-DLAB_A -DLAB_B=2") == ("two", "-DLAB_A -DLAB_B=2")
    with pytest.raises(Exception, match="expected NAME=MACROS"):
        variants.variant("-DLAB_A")


def test_times_are_read_and_compared(variants: ModuleType, tmp_path: Path) -> None:
    row = Row("layer_norm", "4x8", "bfloat16", "forward", "a chip", "fasttfm", ms_p50=2.0, gpu_ms=1.0)
    unmeasured = replace(row, direction="backward", gpu_ms=None)
    write_csv(tmp_path / "rows.csv", [row, unmeasured])
    times = variants.times_of((tmp_path / "rows.csv").read_text().splitlines())
    call = ("4x8", "bfloat16", "forward")
    assert times == {call: 1.0}
    found = variants.table({"base": [{call: 4.0}, {call: 1.0}, {call: 2.0}], "faster": [{call: 1.0}] * 3})
    assert found.splitlines()[1] == "4x8 bfloat16 forward | 2.0000 ms (1.000x) | 1.0000 ms (2.000x)"
