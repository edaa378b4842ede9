"""The plan and the index arithmetic of the GEMMs for few rows: the kernel, emulated thread by thread on the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fasttfm import _native

ROOT = Path(__file__).parent.parent.parent
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
# Rows, columns, inner and whether K may be split: us of the fastest of sixteen tiles with a producer warp on an H200,
# and of the kept tiles that are close to it, by index and number of parts. Runs 9 and 14 of
# benchmarks/results/nvidia-h200-kernel_variants.csv.
MEASURED: dict[tuple[int, int, int, bool], tuple[float, dict[tuple[int, int], float]]] = {
    (32, 2304, 768, False): (3.437, {(1, 1): 3.437, (2, 1): 3.560}),
    (64, 2304, 768, False): (3.318, {(1, 1): 3.318, (2, 1): 3.576}),
    (128, 2304, 768, False): (3.739, {(2, 1): 3.739, (1, 1): 3.851, (4, 1): 3.866}),
    (192, 2304, 768, False): (3.980, {(4, 1): 3.980, (2, 1): 4.185}),
    (256, 2304, 768, False): (4.431, {(3, 1): 4.431, (4, 1): 4.678}),
    (288, 2304, 768, False): (5.105, {(4, 1): 5.105, (3, 1): 5.279, (5, 1): 5.421}),
    (576, 2304, 768, False): (6.060, {(5, 1): 6.060}),
    (1152, 2304, 768, False): (9.287, {(7, 1): 9.287}),
    (32, 3072, 768, False): (4.257, {(1, 1): 4.257, (2, 1): 4.384, (4, 1): 4.595}),
    (64, 3072, 768, False): (3.822, {(1, 1): 3.822}),
    (128, 3072, 768, False): (4.672, {(2, 1): 4.672, (3, 1): 4.723, (4, 1): 4.823}),
    (192, 3072, 768, False): (5.407, {(4, 1): 5.407, (2, 1): 5.501}),
    (256, 3072, 768, False): (5.448, {(3, 1): 5.448, (5, 1): 5.622}),
    (288, 3072, 768, False): (6.755, {(4, 1): 6.755, (5, 1): 6.919}),
    (576, 3072, 768, False): (8.117, {(6, 1): 8.117}),
    (1152, 3072, 768, False): (13.699, {(8, 1): 13.699}),
    (32, 768, 768, True): (1.766, {(2, 8): 1.766, (1, 8): 1.880, (2, 6): 1.883}),
    (64, 768, 768, True): (1.980, {(1, 4): 1.980, (1, 6): 2.003, (2, 8): 2.042}),
    (128, 768, 768, True): (2.239, {(2, 4): 2.239, (1, 4): 2.310, (1, 3): 2.385, (2, 3): 2.393}),
    (192, 768, 768, True): (2.589, {(1, 3): 2.589, (2, 4): 2.653, (2, 3): 2.674, (2, 2): 2.710}),
    (256, 768, 768, True): (2.714, {(2, 2): 2.714, (2, 4): 2.899, (2, 3): 2.910}),
    (288, 768, 768, True): (3.043, {(2, 3): 3.043, (2, 2): 3.133, (4, 2): 3.154}),
    (576, 768, 768, True): (3.938, {(3, 2): 3.938, (4, 2): 4.006, (4, 1): 4.019, (2, 1): 4.044}),
    (1152, 768, 768, True): (4.948, {(3, 1): 4.948, (4, 1): 5.074}),
    (32, 768, 3072, True): (2.989, {(2, 8): 2.989, (4, 8): 3.048, (2, 6): 3.103}),
    (64, 768, 3072, True): (2.815, {(2, 8): 2.815}),
    (128, 768, 3072, True): (3.870, {(2, 4): 3.870, (3, 6): 4.075, (4, 6): 4.110}),
    (192, 768, 3072, True): (4.841, {(2, 4): 4.841, (2, 3): 4.890, (4, 4): 4.997}),
    (256, 768, 3072, True): (5.167, {(3, 4): 5.167, (4, 4): 5.305, (2, 3): 5.314}),
    (288, 768, 3072, True): (5.655, {(4, 4): 5.655, (2, 3): 5.740, (4, 3): 5.843}),
    (576, 768, 3072, True): (7.673, {(4, 2): 7.673, (5, 3): 8.057}),
    (1152, 768, 3072, True): (11.340, {(4, 1): 11.340, (6, 2): 11.643, (3, 1): 12.024}),
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


def test_the_small_tile_multiplies(emulated: ctypes.CDLL) -> None:
    """With small integers, whose sums are exact; rows, columns and K that are no multiples of a tile; several parts of
    K."""
    generator = np.random.default_rng(0)
    for rows, columns, inner, parts in [(1, 8, 8, 1), (16, 96, 256, 2), (53, 136, 200, 3)]:
        x, weight = (generator.integers(-4, 5, size).astype(np.float32) for size in ((rows, inner), (columns, inner)))
        found = np.full((parts, rows, columns), np.nan, dtype=np.float32)
        tensors = [ctypes.c_void_p(each.ctypes.data) for each in (x, weight, found)]
        emulated.few_rows_product_emulated(parts, *tensors, rows, columns, inner)
        assert np.array_equal(found.sum(0), x @ weight.T), f"{rows} rows"


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
    tiles = [core.few_rows_tile(rows, 3072, 768, 132, 0) for rows in (1, 16, 17, 128, 512)]
    assert tiles[:2] == [0, 0]  # the tile with 16 rows
    assert len(set(tiles)) > 2
    assert all(tiles[2:])


@pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
def test_up_to_16_rows_have_the_small_tile_if_an_sm_has_at_most_one_block() -> None:
    core = _native.core()
    assert core.few_rows_tile(16, 32 * 132, 768, 132, 0) == 0
    assert core.few_rows_tile(16, 32 * 132 + 8, 768, 132, 0) > 0
    assert core.few_rows_tile(16, 384, 1536, 132, 1) == 0
    assert core.few_rows_parts(16, 384, 1536, 132, 1) == 8
    assert core.few_rows_parts(16, 384, 640, 132, 1) == 5  # of two stages each, as eight parts would have
    assert core.few_rows_tile(16, 768, 768, 132, 1) > 0  # 24 blocks for each of eight parts


@pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_a_plan_is_close_to_the_fastest_tile(sizes: tuple[int, int, int, bool]) -> None:
    """Within 6%, and 7% where K is split: there the plan may have fewer parts, which the next kernel adds sooner."""
    rows, columns, inner, partial = sizes
    given = (rows, columns, inner, 132, int(partial))
    core = _native.core()
    fastest, times = MEASURED[sizes]
    found = times[core.few_rows_tile(*given), core.few_rows_parts(*given)]
    assert found <= (1.07 if partial else 1.06) * fastest
