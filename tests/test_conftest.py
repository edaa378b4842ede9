"""Tests whose packages are not installed are skipped with a reason; nothing else is."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = {
    "test_whole_file.py": "import no_such_package\n\ndef test_it(): pass\n",
    "test_one.py": """
def test_imports_it():
    import no_such_package.part

def test_is_told_that_it_is_needed():
    try:
        import no_such_package
    except ModuleNotFoundError as error:
        raise ImportError("pip install no_such_package") from error

def test_fails():
    assert 1 == 2

def test_imports_another():
    import no_other_package
""",
}


def test_tests_that_need_a_missing_package_are_skipped(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace('"accelerate"', '"no_such_package"'))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    durations = tmp_path / "durations.json"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FASTTFM_DURATIONS": str(durations)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsf"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "2 failed, 3 skipped" in done.stdout, done.stdout
    assert done.stdout.count("no_such_package is not installed") == 3
    for name in ("test_fails", "test_imports_another"):
        assert f"FAILED test_one.py::{name}" in done.stdout
    # A skipped file has no duration, and a function that takes less than a second none either.
    seconds = json.loads(durations.read_text())
    assert {name.partition("::")[0] for name in seconds} <= {"test_one.py"}
    assert all(mean >= 1 for mean in seconds.values()), seconds


class Item:
    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, set(marks)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def test_measured_functions_have_a_limit() -> None:
    spec = importlib.util.spec_from_file_location("conftest_copy", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    many = [Item(f"a.py::many[{number}]") for number in range(12)]
    others = [Item("a.py::long"), Item("a.py::one"), Item("a.py::unknown"), Item("a.py::many[gpu]", "gpu")]
    seconds = {"a.py::many": 0.9, "a.py::long": 10.5, "a.py::one": 8.0}
    conftest.mark_slow([*many, *others], seconds)
    assert [number for number, item in enumerate(many) if not item.marks] == [0, 4, 8]  # 2.7 seconds
    assert [item.marks for item in others] == [{"slow"}, set(), set(), {"gpu"}]
