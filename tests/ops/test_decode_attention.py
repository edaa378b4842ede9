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
