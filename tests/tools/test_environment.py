"""tools/environment.py: which torch the environment of the Makefile gets."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def environment() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "environment.py"
    spec = importlib.util.spec_from_file_location("environment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("driver", [False, True])
def test_without_a_driver_torch_comes_from_the_index_of_cpu_builds(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    monkeypatch.setattr(environment.os.path, "exists", lambda path: False)
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
    options = environment.torch_index()
    assert (environment.CPU_TORCH in options) is not driver


@pytest.mark.parametrize("lay_over", [False, True])
def test_torch_is_installed_first_unless_the_machine_brings_it(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lay_over: bool
) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(environment, "pip", lambda python, constraints, *arguments: installed.append(arguments))
    monkeypatch.setattr(environment, "torch_index", lambda: ["--extra-index-url", "builds"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    environment.install(tmp_path / "bin" / "python", lay_over)
    torch, package = ("--extra-index-url", "builds", "--no-deps", "torch"), installed[1 if lay_over else 2]
    assert (torch in installed[:2]) is not lay_over
    assert package[:2] == ("--no-build-isolation", "--editable")
