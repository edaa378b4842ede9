"""The plan of the GEMMs for few rows: close to the fastest tile of measurements on an H200."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from fasttfm import _native

ROOT = Path(__file__).parent.parent.parent
VARIANTS = ROOT / "benchmarks/results/nvidia-h200-kernel_variants.csv"
# kProductTiles: rows, columns and blocks of a cluster.
TILES = (
    *((64, 32, 4), (64, 64, 2), (64, 64, 4), (64, 96, 2), (128, 64, 2)),
    *((64, 128, 2), (128, 96, 1), (128, 128, 1), (128, 192, 1), (128, 256, 2)),
)
WIDTHS = {"BERT-base": 768, "BERT-large": 1024, "MiniLM-L6": 384}
# Rows, columns, inner and whether K may be split: us of the fastest of sixteen tiles, and of the kept tiles that are
# close to it, by index and number of parts. Runs 9 and 14 of the file above.
MEASURED: dict[tuple[int, int, int, bool], tuple[float, dict[tuple[int, int], float]]] = {
    (576, 2304, 768, False): (6.060, {(6, 1): 6.060}),
    (1152, 2304, 768, False): (9.287, {(8, 1): 9.287}),
    (576, 3072, 768, False): (8.117, {(7, 1): 8.117}),
    (1152, 3072, 768, False): (13.699, {(9, 1): 13.699}),
    (576, 768, 768, True): (3.938, {(4, 2): 3.938, (5, 2): 4.006, (5, 1): 4.019, (3, 1): 4.044}),
    (1152, 768, 768, True): (4.948, {(4, 1): 4.948, (5, 1): 5.074}),
    (576, 768, 3072, True): (7.673, {(5, 2): 7.673, (6, 3): 8.057}),
    (1152, 768, 3072, True): (11.340, {(5, 1): 11.340, (7, 2): 11.643, (4, 1): 12.024}),
}

pytestmark = pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")


def layers() -> dict[tuple[int, int], dict[int, float]]:
    """By width and rows: us of all layers with each tile, with the best number of parts of K. Run 19."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    with VARIANTS.open(newline="") as file:
        for row in csv.DictReader(file):
            shape = re.match(r"(\d+)x(\d+), (\d+) blocks", row["variant"])
            if row["run"] != "19" or shape is None:
                continue
            model, rows, _ = row["case"].split()
            tile = tuple(map(int, shape.groups()))
            if tile in TILES:
                found.setdefault((WIDTHS[model], int(rows)), {})[TILES.index(tile)] = float(row["us"])
    return found


LAYERS = layers()


def gemms(width: int) -> tuple[tuple[int, int, int], ...]:
    """Columns, inner and whether K may be split."""
    return (3 * width, width, 0), (width, width, 1), (4 * width, width, 0), (width, 4 * width, 1)


def plan(rows: int, columns: int, inner: int, partial: int) -> tuple[int, int]:
    core, sizes = _native.core(), (rows, columns, inner, 132, partial)
    return core.few_rows_tile(*sizes), core.few_rows_parts(*sizes)


def test_a_plan_splits_k_only_if_that_is_allowed() -> None:
    assert plan(128, 3072, 768, 0)[1] == 1
    assert plan(128, 768, 3072, 1)[1] > 1
    assert plan(1, 8, 64, 1)[1] == 1  # K of one stage
    assert _native.core().few_rows_parts(128, 768, 3072, 1, 1) == 1  # a single SM


@pytest.mark.parametrize(("width", "rows"), LAYERS, ids=str)
def test_the_gemms_of_a_layer_have_one_tile_that_is_close_to_the_fastest(width: int, rows: int) -> None:
    """Within 5% of the layers' time."""
    (tile,) = {plan(rows, *gemm)[0] for gemm in gemms(width)}
    times = LAYERS[width, rows]
    assert times[tile] <= 1.05 * min(times.values())


@pytest.mark.parametrize("rows", [1, 8, 17, 100, 320])
def test_any_number_of_rows_has_one_tile(rows: int) -> None:
    for width in (384, 768, 1024):
        assert len({plan(rows, *gemm)[0] for gemm in gemms(width)}) == 1


@pytest.mark.parametrize("sizes", MEASURED, ids=str)
def test_a_plan_for_more_rows_is_close_to_the_fastest_tile(sizes: tuple[int, int, int, bool]) -> None:
    """Within 6%, and 7% where K is split: there the plan may have fewer parts, which the next kernel adds sooner."""
    rows, columns, inner, partial = sizes
    fastest, times = MEASURED[sizes]
    assert times[plan(rows, columns, inner, int(partial))] <= (1.07 if partial else 1.06) * fastest


# ---- layers whose LayerNorms are parts of their GEMMs ----------------------------------------------------------------

FOLDED = ("qkv", "out", "up", "down")


def layer_plan(rows: int, width: int, processors: int = 132) -> dict[str, tuple[tuple[int, int], int, int]]:
    """Of each GEMM: rows and columns of its tile, the blocks that share x, and the parts of K."""
    core, sizes = _native.core(), (rows, width, 4 * width, processors)
    found = {}
    for index, name in enumerate(FOLDED):
        tile = TILES[core.few_rows_layer_tile(*sizes, index)][:2]
        found[name] = (tile, core.few_rows_layer_cluster(*sizes, index), core.few_rows_layer_parts(*sizes, index))
    return found


@pytest.mark.parametrize(
    ("width", "rows", "rounded", "added"),
    [
        *((384, rows, ((64, 32), 4, 1), ((64, 32), 2, 4)) for rows in (33, 64)),
        *((384, rows, ((64, 64), 1, 1), ((64, 64), 1, 4)) for rows in (128, 256)),
        *((768, rows, ((64, 64), 4, 1), ((64, 64), 2, 4)) for rows in (33, 64)),
        *((768, rows, ((128, 64), 1, 1), ((128, 64), 1, 4)) for rows in (65, 128, 256)),
        (1024, 64, ((64, 64), 2, 1), ((64, 64), 2, 4)),
        (1024, 128, ((128, 64), 1, 1), ((128, 64), 1, 4)),
        (1024, 256, ((128, 64), 1, 1), ((128, 64), 1, 2)),
    ],
)
def test_the_plan_of_folded_layers_was_measured(width: int, rows: int, rounded: Any, added: Any) -> None:
    """The fastest on an H200, or within 3% of it: docs/notes/few_tokens.md."""
    assert layer_plan(rows, width) == {"qkv": rounded, "out": added, "up": rounded, "down": added}


@pytest.mark.parametrize("width", [64, 128, 384, 512, 768, 1024, 2048])
@pytest.mark.parametrize("processors", [16, 132])
def test_the_gemms_of_folded_layers_have_one_kernel(width: int, processors: int) -> None:
    for rows in range(1, 257):
        found = layer_plan(rows, width, processors)
        ((tile, columns),) = {each for each, _, _ in found.values()}
        joined = 1 if columns % 64 == 0 else 2
        for name, (_, sharing, parts) in found.items():
            assert sharing * parts <= 8
            assert parts == 1 or (name in ("out", "down") and tile // 8 % (joined * parts) == 0)
            assert name in ("qkv", "up") or sharing % joined == 0
            assert parts <= (4 if name == "down" else 1) * width // 64


@pytest.mark.parametrize("width", WIDTHS.values())
def test_the_rows_of_folded_layers(width: int) -> None:
    """Where they are faster: docs/kernels.md."""
    fits = _native.core().few_rows_layer_fits
    assert [rows for rows in range(1, 600) if fits(rows, width, 4 * width, 132)] == [*range(33, 129), *range(193, 257)]


def test_folded_layers_have_at_most_one_block_per_sm() -> None:
    fits = _native.core().few_rows_layer_fits
    assert fits(64, 768, 3072, 48)
    assert not fits(64, 768, 3072, 47)
    assert fits(128, 2048, 8192, 132)
    assert not fits(256, 2048, 8192, 132)
