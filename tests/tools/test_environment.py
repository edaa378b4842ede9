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
    environment.install_package(tmp_path / "bin" / "python", lay_over)
    torch, package = ("--extra-index-url", "builds", "--no-deps", "torch"), installed[1 if lay_over else 2]
    assert (torch in installed[:2]) is not lay_over
    assert package[:2] == ("--no-build-isolation", "--editable")
    assert package[2].endswith("[tasks]")  # finetune is the next command after the demo; no tools of tests


def test_docs_need_no_package(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is compiled for the site."""
    installed: list[str] = []
    monkeypatch.setattr(environment, "works", lambda python: True)
    monkeypatch.setattr(environment, "sees_gpu", lambda python: False)
    monkeypatch.setattr(environment, "constraints_for", lambda python, lay_over: tmp_path)
    monkeypatch.setattr(environment, "pip", lambda python, constraints, *arguments: installed.extend(arguments))
    assert environment.main([str(tmp_path), "docs"]) == 0
    assert installed == ["mkdocs-material", "mkdocstrings[python]", "ruff"]


def test_an_unknown_purpose_is_refused(environment: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert environment.main([".venv", "everything"]) == 1
    assert "and one of package, checks, docs; got '.venv everything'" in capsys.readouterr().err
