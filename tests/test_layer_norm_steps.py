"""The steps of docs/start/write_kernels.md run, and the page prints what is in their files."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "docs" / "start" / "layer_norm"
PAGE = FOLDER.with_name("write_kernels.md")
_NVCC = shutil.which("nvcc") or ("/usr/local/cuda/bin/nvcc" if Path("/usr/local/cuda/bin/nvcc").exists() else None)


def test_the_page_prints_the_files() -> None:
    blocks = re.findall(r"^```(?:python|cuda)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    files = "\n".join(path.read_text() for path in sorted(FOLDER.glob("step*")))
    assert len(blocks) == 5
    assert [block for block in blocks if block.strip("\n") not in files] == []


def _run(*arguments: str, hide_gpu: bool) -> str:
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hide_gpu else {})}
    if not hide_gpu:
        environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_steps_run_on_a_cpu() -> None:
    pytest.importorskip("triton")
    printed = _run("--rows", "5", "--columns", "100", hide_gpu=True)
    assert re.findall(r"^step (\d).* correct", printed, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.gpu
@pytest.mark.skipif(_NVCC is None, reason="nvcc is not installed")
def test_all_steps_run_on_a_gpu() -> None:
    printed = _run("--rows", "1000", "--columns", "1000", hide_gpu=False)
    assert re.findall(r"^step (\d).* correct .* GB/s", printed, re.MULTILINE) == ["1", "2", "3", "4", "5"]


@pytest.mark.skipif(_NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.cu")), ids=lambda path: path.stem)
def test_cuda_steps_compile(source: Path, tmp_path: Path) -> None:
    command = [str(_NVCC), "-std=c++17", "-arch=sm_80", "-Werror=all-warnings", "-c", str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "step.o")], check=True)


def _load_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # run.py may set it
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("layer_norm_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = _load_run(monkeypatch)
    exact = torch.linspace(0, 1, 100, dtype=torch.float64)
    naive = exact.float()
    run.check("right", (naive,), (exact,), (naive,))
    for wrong in (naive + 1e-5, torch.full_like(naive, torch.nan)):
        with pytest.raises(SystemExit, match="wrong: result 0: expected an error of at most"):
            run.check("wrong", (wrong,), (exact,), (naive,))
