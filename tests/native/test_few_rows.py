"""The plan and the index arithmetic of the GEMMs for few rows: the kernel, emulated thread by thread on the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fasttfm import _native

ROOT = Path(__file__).parent.parent.parent
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
TILES = 13


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    library = tmp_path_factory.mktemp("few_rows") / "emulated.so"
    source = Path(__file__).with_name("few_rows_emulated.cpp")
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-I", str(ROOT / "kernels")]
    subprocess.run([COMPILER, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def test_every_tile_multiplies(emulated: ctypes.CDLL) -> None:
    """With small integers, whose sums are exact; rows, columns and K that are no multiples of a tile; several parts of
    K."""
    assert emulated.few_rows_tile_count() == TILES
    generator = np.random.default_rng(0)
    for tile, (rows, columns, inner, parts) in product(range(TILES), [(1, 8, 8, 1), (133, 136, 200, 3)]):
        x, weight = (generator.integers(-4, 5, size).astype(np.float32) for size in ((rows, inner), (columns, inner)))
        found = np.full((parts, rows, columns), np.nan, dtype=np.float32)
        tensors = [ctypes.c_void_p(each.ctypes.data) for each in (x, weight, found)]
        emulated.few_rows_product_emulated(tile, parts, *tensors, rows, columns, inner)
        assert np.array_equal(found.sum(0), x @ weight.T), f"tile {tile}"


def test_rows_that_are_read_together_are_in_different_banks(emulated: ctypes.CDLL) -> None:
    assert [emulated.few_rows_bank_conflicts(chunks) for chunks in (4, 8, 16)] == [0, 0, 0]


@pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
def test_a_plan_fills_the_gpu() -> None:
    """On 132 SMs, for the sizes of BERT-base: about one block for each SM, and K in one part without partial sums."""
    core = _native.core()
    sizes = {"rows": 128, "columns": 3072, "inner": 768, "processors": 132}
    assert core.few_rows_parts(*sizes.values(), 0) == 1
    assert core.few_rows_parts(128, 768, 3072, 132, 1) > 1
    assert core.few_rows_parts(1, 8, 64, 132, 1) == 1  # K of one stage
    tiles = {core.few_rows_tile(rows, 3072, 768, 132, 0) for rows in (1, 32, 128, 512)}
    assert len(tiles) > 1
    assert core.few_rows_tile(1, 3072, 768, 132, 0) == 0  # the tile with the fewest rows
