"""The extras that error messages tell users to install exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fasttfm import _extras

ROOT = Path(__file__).parents[1]


def named_extras() -> set[str]:
    """The last argument of every call of ``_extras.missing`` and ``_extras.how_to_install``."""
    found = set()
    for path in (ROOT / "python").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and ast.unparse(node.func) in ("_extras.missing", "_extras.how_to_install"):
                found.add(ast.literal_eval(node.args[-1]))
    return found


def test_every_extra_that_a_message_names_exists() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"train", "tasks", "hf", "hub"} <= named_extras()
    assert named_extras() <= project["optional-dependencies"].keys()


def test_no_message_writes_the_command_itself() -> None:
    written = [path for path in (ROOT / "python").rglob("*.py") if "pip install 'fasttfm[" in path.read_text()]
    assert [path.name for path in written] == ["_extras.py"]


def test_the_message() -> None:
    found = str(_extras.missing("the progress bar", "tqdm", "train"))
    assert found == "the progress bar needs tqdm: pip install 'fasttfm[train]' (from a clone: pip install '.[train]')"
