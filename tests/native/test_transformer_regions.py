"""The memory layout of a transformer layer: tensors that are in use at the same time do not overlap, all are aligned,
and sizes that overflow 64 bits are refused."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from fasttfm.ops.transformer_native import BACKWARD, BETWEEN, FORWARD, KEPT, Region, Shape, regions

SHAPE = Shape(
    layers=3, tokens=37, width=64, intermediate=136, heads=2, sequences=4, max_seqlen=11, processors=2, pre_norm=0,
    training=1, recompute=0, keep_activation=0, dtype=1, residual_dtype=1,
)  # fmt: skip
FLAGS = [dict(zip(("pre_norm", "training", "recompute", "keep_activation"), each, strict=True))
         for each in product((0, 1), repeat=4)]  # fmt: skip
WORKSPACE = 5000


def overlapping(found: list[Region]) -> list[tuple[Region, Region]]:
    def meet(a: Region, b: Region) -> bool:
        in_time = a.first <= b.last and b.first <= a.last
        return in_time and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes

    return [(a, b) for a, b in combinations(found, 2) if a.bytes and b.bytes and meet(a, b)]


@pytest.mark.parametrize("kind", [KEPT, BETWEEN, FORWARD, BACKWARD])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_regions_in_use_at_the_same_time_do_not_overlap(kind: int, flags: dict[str, int]) -> None:
    for tokens, layers, fused in product((1, 37, 4096), (1, 12), (False, True)):
        shape = SHAPE._replace(**flags, tokens=tokens, layers=layers)
        found, total = regions(kind, shape, workspace_bytes=WORKSPACE, fused_activation=fused)
        assert overlapping(found) == []
        assert all(region.offset % 256 == 0 and region.offset + region.bytes <= total for region in found)


def test_an_overlap_is_detected() -> None:
    assert overlapping([Region(512, 0, 3, 0), Region(256, 3, 4, 256)]) != []
    assert overlapping([Region(512, 0, 2, 0), Region(256, 3, 4, 256)]) == []


def test_regions_share_memory_over_time() -> None:
    found, total = regions(BACKWARD, SHAPE._replace(tokens=4096), workspace_bytes=WORKSPACE)
    assert total < 0.8 * sum(region.bytes for region in found)


@pytest.mark.parametrize("changed", [{"recompute": 1}, {"keep_activation": 1}], ids=str)
def test_what_is_kept_follows_the_options(changed: dict[str, int]) -> None:
    tokens, width, intermediate = SHAPE.tokens, SHAPE.width, SHAPE.intermediate
    _, before = regions(KEPT, SHAPE)
    _, after = regions(KEPT, SHAPE._replace(**changed))
    expected = -2 * tokens * width if "recompute" in changed else 2 * tokens * intermediate
    assert abs(after - before - expected) < 512  # regions are rounded up


@pytest.mark.parametrize("kind", [KEPT, BETWEEN, FORWARD, BACKWARD])
def test_sizes_that_do_not_fit_are_refused(kind: int) -> None:
    absurd: dict[str, Any] = {"tokens": 2**40, "width": 2**40}
    with pytest.raises(ValueError, match="64 bits count"):
        regions(kind, SHAPE._replace(**absurd), workspace_bytes=WORKSPACE)


def test_every_size_of_the_core_covers_its_regions() -> None:
    """Three layers: the kept buffer has the regions of the layers and what they pass to each other."""
    from array import array

    from fasttfm import _native

    shape, sizes = SHAPE._replace(dtype=0, residual_dtype=0), array("q", [0, 0, 0])
    _native.core().transformer_block_sizes_cpu(*shape, sizes.buffer_info()[0])
    (_, layer), (_, between) = regions(KEPT, shape), regions(BETWEEN, shape)
    assert sizes[0] == 3 * layer + 2 * between
    assert min(sizes) > 0
    for absurd in ({"tokens": 2**62}, {"layers": 2**62}):
        with pytest.raises(ValueError, match="64 bits count"):
            _native.core().transformer_block_sizes_cpu(*shape._replace(**absurd), sizes.buffer_info()[0])
