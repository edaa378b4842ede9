from __future__ import annotations

import pytest
import torch

from fasttfm.ops import sample_tokens
from fasttfm.ops.sample_tokens import Sequences
from fasttfm.testing import harness
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.sample_tokens import SPEC

TestSampleTokens = op_tests(SPEC)
BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_get_their_tokens(backend: str) -> None:
    """One continues, one ends with a stop token, one reaches its limit, and one has ended before."""
    logits = torch.zeros(4, 9).scatter(1, torch.tensor([[5], [6], [7], [8]]), 1.0)
    greedy = (torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.ones(4))
    positions = torch.tensor([3, 1, 2, 4], dtype=torch.int32)
    sequences = Sequences(
        ids=torch.tensor([1, 1, 1, 2]),
        active=torch.tensor([True, True, True, False]),
        limits=torch.tensor([9, 9, 3, 9], dtype=torch.int32),
        ends=torch.tensor([[6, -1], [4, 6], [-1, -1], [-1, -1]]),
        history=torch.full((4, 6), -7),
    )
    drawn = sample_tokens(
        logits, torch.zeros(4, dtype=torch.int64), positions, *greedy, sequences=sequences, backend=backend
    )
    assert drawn.tolist() == [5, 6, 7, 8]
    assert sequences.ids.tolist() == [5, 6, 7, 2]
    assert sequences.active.tolist() == [True, False, False, False]
    expected = torch.full((4, 6), -7)
    expected[torch.arange(4), positions.long()] = torch.tensor([5, 6, 7, 2])
    assert torch.equal(sequences.history, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_logits_give_a_token(backend: str) -> None:
    inputs = harness.draw_inputs(SPEC, SPEC.cases[0], torch.float32)
    for value in (float("nan"), float("inf"), float("-inf")):
        inputs["logits"].fill_(value)
        tokens = sample_tokens(**inputs, backend=backend)
        assert ((tokens >= 0) & (tokens < inputs["logits"].shape[1])).all()


def test_wrong_sequences_are_reported() -> None:
    inputs = harness.draw_inputs(SPEC, SPEC.cases[0], torch.float32)
    good = Sequences(
        ids=torch.zeros(3, dtype=torch.int64),
        active=torch.ones(3, dtype=torch.bool),
        limits=torch.ones(3, dtype=torch.int32),
        ends=torch.full((3, 2), -1),
        history=torch.zeros(3, 99, dtype=torch.int64),
    )
    with pytest.raises(TypeError, match=r"sample_tokens: sequences: expected Sequences or None, got tuple"):
        sample_tokens(**inputs, sequences=tuple(good))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"sequences.limits: expected a tensor of int32, got int64"):
        sample_tokens(**inputs, sequences=good._replace(limits=good.ids))
    with pytest.raises(ValueError, match=r"sequences.ends: expected a contiguous table of 1, 2, 4, ... columns, got 3"):
        sample_tokens(**inputs, sequences=good._replace(ends=torch.zeros(3, 3, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"sequences.ids: expected shape \(3,\)"):
        sample_tokens(**inputs, sequences=good._replace(ids=good.ids[:2]))
