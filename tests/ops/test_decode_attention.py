from __future__ import annotations

from typing import Any

import pytest
import torch

from fasttfm.ops import decode_attention
from fasttfm.testing import harness
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.decode_attention import SPEC

TestDecodeAttention = op_tests(SPEC)
CASES = {case.name: case for case in SPEC.cases}


@pytest.mark.parametrize("backend", ["cpu", "reference", pytest.param("triton", marks=interpreted)])
def test_new_tokens_are_written_and_nothing_else(backend: str) -> None:
    case = CASES["splits"]
    inputs = harness.draw_inputs(SPEC, case, torch.float32)
    before = {name: inputs[name].clone() for name in ("key_cache", "value_cache")}
    arrived = torch.zeros(4, 2, dtype=torch.int32)
    decode_attention(**inputs, arrived=arrived, backend=backend)
    assert not arrived.any()
    for name, new in (("key_cache", "k"), ("value_cache", "v")):
        for row, length in enumerate(case.sizes["lengths"]):
            before[name][row, length] = inputs[new][row]
        assert torch.equal(inputs[name], before[name])


@interpreted
def test_large_batches_are_as_accurate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs use tensor cores and other splits."""
    from fasttfm.kernels.decode_attention import triton as kernels

    small = kernels.tile

    def tile(batch: int, *others: Any) -> dict[str, int]:
        sizes = small(128, 12, 1, 16, wide=False)
        assert sizes["PART_G"] == 16
        return {**small(batch, *others), **sizes}

    monkeypatch.setattr(kernels, "tile", tile)
    for name in ("typical", "splits", "window"):
        harness.check_accuracy(SPEC, CASES[name], torch.float32, "triton")


def test_a_long_cache_has_longer_splits() -> None:
    """A grid has up to 65,535 programs along z."""
    pytest.importorskip("triton")
    from fasttfm.kernels.decode_attention.triton import tile

    assert tile(1, 12, 1, 64, False, 8_000_000)["SPLIT"] == 128
    for room in (8_388_480, 8_388_481, 10**8, 10**9):
        assert -(-room // tile(1, 12, 1, 64, False, room)["SPLIT"]) <= 65535


@pytest.mark.gpu
@pytest.mark.large_memory
def test_heads_that_are_two_to_the_31_elements_apart() -> None:
    heads, room, width = 32, 600_000, 128  # a head has 76.8 million elements
    keys, values = (torch.zeros(1, heads, room, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    keys[:, :, :100].normal_()
    values[:, :, :100].normal_()
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [1, room, heads, width]
    q, k, v = (torch.randn(1, heads, width, device="cuda").bfloat16() for _ in range(3))
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        found = decode_attention(q, k, v, keys, values, lengths, backend="triton")
        last = (x[:, 28:] for x in (q, k, v))
        expected = decode_attention(*last, keys[:, :, 28:], values[:, :, 28:], lengths, backend="triton")
    assert torch.equal(found[:, 28:], expected)
