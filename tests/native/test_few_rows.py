"""The plan of the GEMMs for few rows: close to the fastest tile of measurements on an H200."""

from __future__ import annotations

import csv
import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from fasttfm import _native

ROOT = Path(__file__).parent.parent.parent
VARIANTS = ROOT / "benchmarks/results/nvidia-h200-kernel_variants.csv"
# kGemmTiles: rows, columns and blocks of a cluster.
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

GEMMS = ("qkv", "out", "up", "down")
FIRST, BOTH = 1, 2


def layer_plan(
    rows: int, width: int, processors: int = 132, norms: int = BOTH, *, times: int = 4
) -> dict[str, tuple[Any, int, int]]:
    """Of each GEMM: rows and columns of its tile, the blocks that share x, and the parts of K. The feed-forward block
    has `times` as many columns."""
    table = array("q", bytes(8 * 12))
    _native.core().few_rows_layer_plan(norms, rows, width, times * width, processors, table.buffer_info()[0])
    found = zip(GEMMS, table[::3], table[1::3], table[2::3], strict=True)
    return {name: (TILES[tile][:2], cluster or TILES[tile][2], parts) for name, tile, cluster, parts in found}


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


@pytest.mark.parametrize(
    ("width", "rows", "tile"),
    [
        *((384, rows, (64, 64)) for rows in (384, 576, 768, 1152)),
        *((768, rows, (64, 64)) for rows in (384, 576)),
        *((768, rows, (128, 64)) for rows in (768, 1152)),
        *((1024, rows, (64, 64)) for rows in (257, 288, 384)),
        *((1024, rows, (128, 64)) for rows in (576, 768)),
    ],
)
def test_the_out_projection_with_the_first_norm_folded_was_measured(width: int, rows: int, tile: Any) -> None:
    """Its tile is the fastest on an H200, or within 1% of it: docs/notes/few_tokens.md."""
    assert layer_plan(rows, width, norms=FIRST)["out"] == (tile, 1, 1)


@pytest.mark.parametrize("processors", [16, 132])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("width", [256, 384, 768, 1024, 2048])
def test_with_the_first_norm_folded_every_gemm_has_a_kernel(width: int, times: int, processors: int) -> None:
    """The GEMM before it has a tile that adds a residual to one part, with at most one block per SM; the others have
    those of layers with separate LayerNorms. All tiles have a kernel that reads statistics."""
    norms = _native.core().few_rows_folded_norms
    for rows in range(257, 1281):
        if norms(rows, width, times * width, processors) != FIRST:
            continue
        folded, separate = (layer_plan(rows, width, processors, each, times=times) for each in (FIRST, 0))
        out = folded.pop("out")
        del separate["out"]
        assert folded == separate
        assert out in [((64, 64), 1, 1), ((128, 64), 1, 1)]
        assert -(-rows // out[0][0]) * (width // 64) <= processors


@pytest.mark.parametrize(
    ("width", "first"), [(384, range(321, 1281)), (768, range(321, 1281)), (1024, range(257, 1025))], ids=str
)
def test_the_rows_of_folded_layers(width: int, first: range) -> None:
    """Where they are faster: docs/kernels_few_tokens.md."""
    norms = _native.core().few_rows_folded_norms
    found = {rows: norms(rows, width, 4 * width, 132) for rows in range(1, 1281)}
    both = [*range(33, 321)] if width <= 512 else [*range(33, 129), *range(193, 257)]
    assert [rows for rows, each in found.items() if each == BOTH] == both
    assert [rows for rows, each in found.items() if each == FIRST] == list(first)


def test_layers_with_both_norms_folded_have_at_most_one_block_per_sm() -> None:
    norms = _native.core().few_rows_folded_norms
    assert norms(64, 768, 3072, 48) == BOTH
    assert norms(64, 768, 3072, 47) == 0
    assert norms(128, 2048, 8192, 132) == BOTH
    assert norms(256, 2048, 8192, 132) == 0


def test_folded_layers_fit_into_the_workspace() -> None:
    norms = _native.core().few_rows_folded_norms
    many = 1000  # SMs
    assert norms(1024, 4096, 16384, many) == FIRST
    assert norms(1025, 4096, 16384, many) == 0
    assert norms(576, 776, 3104, 132) == 0  # no multiple of 64 columns
