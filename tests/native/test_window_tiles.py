"""The tiles of Hopper's attention with windows, checked on the host by window_tiles.cpp."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="requires a C++ compiler")
def test_tiles_meet_where_queries_and_keys_do(tmp_path: Path) -> None:
    source, program = HERE / "window_tiles.cpp", tmp_path / "window_tiles"
    kernels = HERE.parents[1] / "kernels"
    subprocess.run([str(COMPILER), "-O1", "-std=c++17", f"-I{kernels}", source, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ok\n")
