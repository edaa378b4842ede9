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
TILES = 13  # without a producer warp
# Rows, columns, inner and whether K may be split: us of the fastest of sixteen tiles with a producer warp on an H200,
# and of the kept tiles that are close to it, by index (they follow the other tiles) and number of parts. Run 9 of
# benchmarks/results/nvidia-h200-kernel_variants.csv.
MEASURED: dict[tuple[int, int, int, bool], tuple[float, dict[tuple[int, int], float]]] = {
    (288, 2304, 768, False): (5.105, {(13, 1): 5.105, (14, 1): 5.421}),
    (576, 2304, 768, False): (6.060, {(14, 1): 6.060, (15, 1): 6.614}),
    (1152, 2304, 768, False): (9.287, {(16, 1): 9.287}),
    (288, 3072, 768, False): (6.755, {(13, 1): 6.755, (14, 1): 6.919}),
    (576, 3072, 768, False): (8.117, {(15, 1): 8.117}),
    (1152, 3072, 768, False): (13.699, {(17, 1): 13.699}),
    (288, 768, 768, True): (3.043, {(13, 2): 3.154, (13, 3): 3.191}),
    (576, 768, 768, True): (3.938, {(13, 1): 4.019, (13, 2): 4.006}),
    (1152, 768, 768, True): (4.948, {(13, 1): 5.074, (14, 1): 5.503}),
    (288, 768, 3072, True): (5.655, {(13, 3): 5.843, (13, 4): 5.655}),
    (576, 768, 3072, True): (7.673, {(13, 2): 7.673, (14, 3): 8.057}),
    (1152, 768, 3072, True): (11.340, {(13, 1): 11.340, (15, 2): 11.643}),
}


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


@pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_a_plan_is_close_to_the_fastest_tile(sizes: tuple[int, int, int, bool]) -> None:
    """Within 4%, which is what the kept tiles allow."""
    rows, columns, inner, partial = sizes
    given = (rows, columns, inner, 132, int(partial))
    core = _native.core()
    fastest, times = MEASURED[sizes]
    assert times[core.few_rows_tile(*given), core.few_rows_parts(*given)] <= 1.04 * fastest
