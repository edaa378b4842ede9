"""Answers found on the device: the spans of an exhaustive search, of every window of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import models
from fasttfm.inference import AnswerSpans, EmbedSettings, Session
from fasttfm.inference.batches import bucket_for, buffer_size, pack, split_buffer, write_bucket
from fasttfm.inference.formats import Format, Tokens
from fasttfm.inference.network import Inputs, Network, Output
from fasttfm.tasks.answers import Window, window_answer

AFTER = 1


def windows(generator: np.random.Generator, count: int) -> list[Window]:
    """Windows with first + size + AFTER tokens; one has no context, one a single token."""
    sizes = [0, 1, *generator.integers(1, 40, count - 2).tolist()]
    return [
        Window(Tokens([1] * (first + size + AFTER), [0] * first + [1] * (size + AFTER)), first, 7, size)
        for first, size in zip(generator.integers(1, 9, count).tolist(), sizes, strict=True)
    ]


@pytest.mark.parametrize("longest", [1, 4, 30, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_spans_are_those_of_the_search(longest: int, ties: bool) -> None:
    generator = np.random.default_rng(longest)
    batch = windows(generator, 12)
    lengths = [len(window.tokens.ids) for window in batch]
    logits = generator.normal(size=(sum(lengths), 2)).astype(np.float32)
    if ties:
        logits = logits.round()
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    segments = torch.tensor([each for window in batch for each in window.tokens.segments])
    found = AnswerSpans(longest, AFTER).found(torch.from_numpy(logits), segments, torch.from_numpy(bounds), 64)
    for window, first, row in zip(batch, bounds.tolist(), found.tolist(), strict=False):
        start, end = logits[first : first + len(window.tokens.ids)].T
        expected = window_answer(window, start, end, longest)
        span = window.span_at(int(row[2]), int(row[3]), row[1])
        assert (span, row[0]) == (expected.span, pytest.approx(expected.none))
    assert found[0].tolist()[1:] == [-np.inf, -1.0, -1.0]


def test_without_segments_there_is_no_context() -> None:
    found = AnswerSpans().found(torch.randn(5, 2), None, torch.tensor([0, 5], dtype=torch.int32), 8)
    assert found[0, 1:].tolist() == [-np.inf, -1.0, -1.0]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = models.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    made = models.BertForQuestionAnswering(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_session_returns_the_spans_of_its_logits(model: Any, device: str) -> None:
    """Of sequences in several batches, with the segments that each was given; on a GPU also by CUDA graphs."""
    form, generator = Format([1], [2], [2], 60), np.random.default_rng(0)
    questions, contexts = (generator.integers(5, 60, (9, width)).tolist() for width in (5, 40))
    sequences = [
        form.joined(question, context[: 3 + 4 * number])
        for number, (question, context) in enumerate(zip(questions, contexts, strict=True))
    ]
    session = Session(model, answers=AnswerSpans(max_answer=6), max_tokens=70, device=device, dtype=torch.float32)
    found = [session.submit_sequences(sequences, output="spans").result() for _ in range(3)][-1]
    assert device == "cpu" or session.graph_counts.replayed > 0
    logits = session.submit_sequences(sequences, output="logits").result()
    assert found.shape == (9, 4)
    for row, rows, tokens in zip(found.tolist(), logits, sequences, strict=True):
        window = Window(tokens, 7, 0, len(tokens.ids) - 8)
        expected = window_answer(window, *rows.T, 6)
        assert window.span_at(int(row[2]), int(row[3]), row[1])[:2] == expected.span[:2]
        assert (row[1], row[0]) == pytest.approx((expected.span.score, expected.none), rel=1e-5)
    assert session.encode([], output="spans").shape == (0, 4)
    session.close()


def test_a_bucket_changes_no_span(model: Any) -> None:
    """The padding of a CUDA graph's shapes: more tokens in sequences of their own, empty sequences, longer rows."""
    generator = np.random.default_rng(3)
    batch = windows(generator, 7)
    ids = [generator.integers(1, 60, len(window.tokens.ids)).tolist() for window in batch]
    packed = pack(ids, [window.tokens.segments for window in batch])
    network = Network(model, EmbedSettings(), torch.device("cpu"), torch.float32, answers=AnswerSpans(4, AFTER))
    bucket = bucket_for(packed.tokens, packed.sequences, packed.max_seqlen, max_length=128)
    assert (bucket.tokens, bucket.sequences) != (packed.tokens, packed.sequences)
    buffer = np.full(buffer_size(bucket, True), -1, np.int32)
    write_bucket(buffer, packed, bucket, padding=0)
    inputs = Inputs(*split_buffer(torch.from_numpy(buffer), bucket, True), bucket.max_seqlen)
    found = network.run(Output.SPANS, inputs)[: packed.sequences]
    expected = network.run(Output.SPANS, Inputs.of(packed, torch.device("cpu")))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert expected[:, 1].isfinite().tolist() == [window.size > 0 for window in batch]


def test_wrong_calls_are_reported(model: Any) -> None:
    with pytest.raises(ValueError, match="max_answer: expected at least 1, got 0"):
        AnswerSpans(max_answer=0)
    plain = Session(model.bert, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="output: spans: expected a model with a head for"):
        plain.encode([[1, 2]], output="spans")
