"""Parts of the Hopper kernels that programs in C++ check on the host: the tiles of attention with windows, the numbers
of query tiles of heads that share k and v, the copies and stores of attention of short sequences, which tiles of a GEMM
each cluster computes, how results of GEMMs for few rows pass through shared memory, what the blocks of the kernel for
all layers exchange, GELU's polynomial, and spans of packed sequences."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("c++")
PROGRAMS = [
    *("window_tiles", "grouped_tiles", "short_attention", "gemm_schedule", "gemm_result", "chunk_banks"),
    *("layers_shape", "gelu_tail", "packed"),
]


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="requires a C++ compiler")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_finds_no_error(name: str, tmp_path: Path) -> None:
    source, program = HERE / f"{name}.cpp", tmp_path / name
    kernels = HERE.parents[1] / "kernels"
    subprocess.run([str(COMPILER), "-O1", "-std=c++17", f"-I{kernels}", source, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "ok\n")
