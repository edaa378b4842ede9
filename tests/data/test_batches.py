"""Batches: the contents of sequences, token budgets, ranks, workers, and resuming at any batch."""

from __future__ import annotations

import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traced_corpus import FIRST, Traced, trace

from fasttfm.data import Batch, BatchStream, Masking, SequenceFormat, TokenShards
from fasttfm.data.blocks import Blocks

CLS, SEP, MASK, END = 2, 3, 4, 5
KINDS = ("nsp", "sop", "single", "electra", "causal")


def stream(shards: TokenShards, kind: Any = "nsp", length: int = 64, **options: Any) -> BatchStream:
    short = options.pop("short_probability", 0.1)
    masking = options.pop("masking", None)
    options = {"tokens_per_batch": 1024, "seed": 1, "epochs": 1, "block_tokens": 8000, **options}
    return BatchStream(shards, SequenceFormat(kind, length, short), masking, **options)


def contents(batch: Batch) -> list[Any]:
    values = (getattr(batch, name) for name in Batch.__dataclass_fields__)
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


def sequences(batches: list[Batch]) -> list[tuple[np.ndarray, np.ndarray | None, int | None]]:
    """Unmasked ids, segment ids and sentence label of every sequence."""
    rows: list[tuple[np.ndarray, np.ndarray | None, int | None]] = []
    for batch in batches:
        ids = batch.input_ids.clone()
        if batch.positions is not None and batch.labels is not None:
            ids[batch.positions] = batch.labels
        for number, (low, high) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
            types = None if batch.token_type_ids is None else batch.token_type_ids[low:high].numpy()
            label = None if batch.sentence_labels is None else int(batch.sentence_labels[number])
            rows.append((ids[low:high].numpy(), types, label))
    return rows


def halves(ids: np.ndarray, types: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A and B of a pair; asserts its special tokens and segment ids."""
    assert types is not None
    (middle, last) = np.flatnonzero(ids == SEP)
    assert ids[0] == CLS
    assert last == len(ids) - 1
    assert np.array_equal(types, np.arange(len(ids)) > middle)
    a, b = ids[1:middle], ids[middle + 1 : last]
    for part in (a, b):
        assert len(part) > 0
        assert np.array_equal(part, np.arange(part[0], part[0] + len(part)))  # as in the text
    return a, b


def half(count: int, total: int) -> bool:
    return abs(count - total / 2) <= 4 * math.sqrt(total) / 2


# ---- contents of a sequence ------------------------------------------------------------------------------------------


def test_next_sentence_pairs(traced: Traced) -> None:
    rows = sequences(list(stream(traced.shards, "nsp", epochs=3)))
    for ids, types, label in rows:
        a, b = halves(ids, types)
        assert traced.document[a[0]] == traced.document[a[-1]]
        assert traced.document[b[0]] == traced.document[b[-1]]
        # Sentences of up to 30 tokens are whole, so that both parts begin with one.
        assert traced.starts[a[0]] or np.sum(traced.sentence == traced.sentence[a[0]]) > 30
        assert traced.starts[b[0]] or np.sum(traced.sentence == traced.sentence[b[0]]) > 30
        if label == 0:
            assert b[0] == a[-1] + 1
            assert traced.document[a[0]] == traced.document[b[0]]
        else:
            assert traced.document[a[0]] != traced.document[b[0]]
    assert half(sum(label for *_, label in rows if label), len(rows))


def test_sentence_order(traced: Traced) -> None:
    rows = sequences(list(stream(traced.shards, "sop", epochs=3)))
    for ids, types, label in rows:
        a, b = halves(ids, types)
        first, second = (a, b) if label == 0 else (b, a)
        assert second[0] == first[-1] + 1
        assert traced.document[first[0]] == traced.document[second[-1]]
    assert half(sum(label for *_, label in rows if label), len(rows))


@pytest.mark.parametrize("kind", ["single", "electra"])
def test_single_sequences_have_every_token_once(traced: Traced, kind: str) -> None:
    texts = []
    for ids, types, label in sequences(list(stream(traced.shards, kind))):
        assert types is None
        assert label is None
        assert ids[0] == CLS
        assert ids[-1] == SEP
        assert np.array_equal(ids[1:-1], np.arange(ids[1], ids[-2] + 1))
        assert traced.document[ids[1]] == traced.document[ids[-2]]
        texts.append(ids[1:-1])
    assert np.array_equal(np.sort(np.concatenate(texts)), FIRST + np.arange(traced.words))


def test_causal_sequences_have_every_token_once(traced: Traced) -> None:
    batches = list(stream(traced.shards, "causal"))
    assert all(batch.positions is batch.labels is batch.token_type_ids is None for batch in batches)
    assert all(batch.predictions == batch.tokens - batch.sequences for batch in batches)
    last_words = set(np.flatnonzero(np.diff(traced.document, append=-1)).tolist()) - {FIRST - 1}
    texts = []
    for ids, _, _ in sequences(batches):
        ended = ids[-1] == END
        text = ids[: len(ids) - ended]
        assert np.array_equal(text, np.arange(text[0], text[0] + len(text)))
        assert traced.document[text[0]] == traced.document[text[-1]]
        # Pieces are full except for the last of a document, which has the end token if there was room for it.
        assert len(ids) == 64 or text[-1] in last_words
        assert ended == (text[-1] in last_words and len(text) < 64)
        texts.append(text)
    assert np.array_equal(np.sort(np.concatenate(texts)), FIRST + np.arange(traced.words))


def test_end_tokens(tmp_path: Path) -> None:
    corpus = trace(tmp_path, [[63], [64], [65], [10]])
    rows = sequences(list(stream(corpus.shards, "causal")))
    assert sorted((len(ids), int(ids[-1] == END)) for ids, _, _ in rows) == [
        (2, 1),
        (11, 1),
        (64, 0),
        (64, 0),
        (64, 1),
    ]


def test_masks_are_drawn_again_in_every_epoch(tmp_path: Path) -> None:
    """The same sequence has other masks in every epoch."""
    corpus = trace(tmp_path, [[30] * 2])
    batches = list(stream(corpus.shards, "single", short_probability=0, epochs=10))
    assert len({tuple(ids.tolist()) for ids, _, _ in sequences(batches)}) == 1
    assert len({str(batch.positions) for batch in batches}) == 10


def test_short_sequences(tmp_path: Path) -> None:
    """With sentences of one word, sequences have their target length: 30 words, or any number from 2 to 30."""
    corpus = trace(tmp_path, [[1] * 20_000, [1] * 20_000])
    for probability in (0.0, 0.25, 1.0):
        batches = stream(corpus.shards, "single", 32, short_probability=probability, block_tokens=1 << 22)
        lengths = np.array([len(ids) for ids, _, _ in sequences(list(batches))])
        shorter, share = np.sum(lengths < 32), probability * 28 / 29
        # Documents are processed in parts, and the last sequence of a part has the remaining words.
        parts = 2 * math.ceil(20_000 / (64 * 32))
        assert abs(shorter - share * len(lengths)) <= 4 * math.sqrt(len(lengths) * share * (1 - share)) + parts
        if probability == 1:
            assert np.mean(lengths) == pytest.approx(18, abs=0.6)


def test_batches_are_masked(novel: TokenShards) -> None:
    batches = list(stream(novel, "nsp", 128, tokens_per_batch=8192, block_tokens=1 << 22, masking=Masking()))
    predictions, text = 0, 0
    for batch, ids in ((batch, batch.input_ids) for batch in batches):
        assert batch.positions is not None
        assert batch.labels is not None
        assert batch.labels.min() > MASK
        assert batch.predictions == len(batch.positions) == len(batch.labels)
        assert (ids[batch.cu_seqlens[:-1].long()] == CLS).all()
        assert (ids[batch.cu_seqlens[1:].long() - 1] == SEP).all()
        predictions += batch.predictions
        text += batch.tokens - 3 * batch.sequences
    assert predictions == pytest.approx(0.15 * text, abs=len(batches))


def test_types_and_bounds(traced: Traced) -> None:
    stream_ = stream(traced.shards, "nsp", 100)
    batch = next(iter(stream_))
    assert batch.input_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 128
    assert batch.tokens == len(batch.input_ids) == batch.cu_seqlens[-1]
    assert batch.predictions <= (stream_.max_predictions or 0)
    assert int(batch.cu_seqlens.diff().max()) <= 100
    moved = batch.to("cpu")
    assert contents(moved) == contents(batch)


# ---- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "budget"), [(128, 4096), (128, 16384), (512, 8192), (512, 32768)])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_full(novel: TokenShards, kind: str, length: int, budget: int) -> None:
    batches = list(stream(novel, kind, length, tokens_per_batch=budget, block_tokens=1 << 22))
    *full, _ = (batch.tokens for batch in batches)  # one block, whose last batch has the remaining tokens
    assert max(full) <= budget
    assert np.mean(full) >= 0.98 * budget
    assert len(batches) <= math.ceil(sum(batch.tokens for batch in batches) / (0.98 * budget))


LENGTHS = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=12), min_size=2, max_size=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS, st.sampled_from(KINDS), st.integers(5, 40), st.integers(0, 100), st.integers(0, 2**64 - 1))
def test_any_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: Any, kind: str, length: int, more: int, seed: int
) -> None:
    corpus = trace(tmp_path_factory.mktemp("any"), documents, shard_characters=200)
    options = {"tokens_per_batch": length + more, "seed": seed, "block_tokens": 1}
    longest = (length - 3) // 2  # longer sentences count as several
    if kind in ("nsp", "sop") and all(len(lengths) == 1 and lengths[0] <= longest for lengths in documents):
        with pytest.raises(ValueError, match=f"expected documents of two sentences or more for {kind}"):
            list(stream(corpus.shards, kind, length, **options))
        return
    batches = list(stream(corpus.shards, kind, length, **options))
    for batch in batches:
        assert 0 < batch.tokens <= length + more
        assert int(batch.cu_seqlens.diff().max()) <= length
        assert int(batch.cu_seqlens.diff().min()) >= 1
    if kind not in ("nsp", "sop"):
        text = np.concatenate([ids[ids >= FIRST] for ids, _, _ in sequences(batches)])
        assert np.array_equal(np.sort(text), FIRST + np.arange(corpus.words))


def test_long_documents_are_cut_without_loss(tmp_path: Path) -> None:
    """One document that is hundreds of times as long as a sequence, and one such sentence."""
    corpus = trace(tmp_path, [[7] * 1500 + [9000] + [7] * 100, [3, 3]])
    for kind in ("single", "causal"):
        rows = sequences(list(stream(corpus.shards, kind, 16, block_tokens=4000, tokens_per_batch=128)))
        text = np.concatenate([ids[ids >= FIRST] for ids, _, _ in rows])
        assert np.array_equal(np.sort(text), FIRST + np.arange(corpus.words))
        short = [ids for ids, _, _ in rows if kind == "causal" and len(ids) < 16]
        assert len(short) <= 2  # only at documents' ends


def test_parts_of_long_documents(tmp_path: Path) -> None:
    """Documents are split after sentences, unless a sentence is longer than a part."""
    lengths = [[7] * 1500 + [9000] + [7] * 100, [3, 3], [2000]]
    corpus = trace(tmp_path, lengths)
    most = 64 * 16
    parts = Blocks(corpus.shards, SequenceFormat("single", 16), 4000, 0).parts
    owner, start, size = parts[:, 0], parts[:, 4], parts[:, 5]
    assert np.array_equal(np.bincount(owner, size), [sum(parts) for parts in lengths])
    assert np.array_equal(start[1:], (start + size)[:-1])
    assert size.min() > 0
    assert size.max() <= 1.5 * most
    inside = np.array([not corpus.starts[FIRST + index] for index in start])
    assert inside.sum() <= 9000 // (most // 2) + 3


def test_next_sentences_of_a_block_with_one_document(tmp_path: Path) -> None:
    corpus = trace(tmp_path, [[7] * 3000, [3, 3]])
    batches = list(stream(corpus.shards, "nsp", 16, block_tokens=4000, tokens_per_batch=128))
    rows = sequences(batches)
    for ids, types, label in rows:
        a, b = halves(ids, types)
        assert (traced_document(corpus, a) != traced_document(corpus, b)) == bool(label)
    assert half(sum(label for *_, label in rows if label), len(rows))


def traced_document(corpus: Traced, part: np.ndarray) -> int:
    return int(corpus.document[part[0]])


# ---- order, ranks, workers, resuming ---------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"epochs": 2, "masking": Masking(whole_word=True, ngram=3)}


@pytest.fixture(scope="module")
def reference(traced: Traced) -> list[list[Any]]:
    batches = [contents(batch) for batch in stream(traced.shards, **SETTINGS)]
    assert len(batches) > 60
    return batches


def test_epochs_and_seeds_differ(traced: Traced, reference: list[list[Any]]) -> None:
    assert [contents(batch) for batch in stream(traced.shards, **SETTINGS)] == reference
    first = list(stream(traced.shards, masking=SETTINGS["masking"]))
    assert [contents(batch) for batch in first] == reference[: len(first)]
    assert not [batch for batch in reference[len(first) :] if batch in reference[: len(first)]]
    other = [contents(batch) for batch in stream(traced.shards, **SETTINGS, seed=2)]
    assert not [batch for batch in other if batch in reference]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_alternate(traced: Traced, reference: list[list[Any]], ranks: int) -> None:
    for rank in range(ranks):
        batches = stream(traced.shards, **SETTINGS, rank=rank, world_size=ranks)
        assert [contents(batch) for batch in batches] == reference[rank::ranks]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_change_nothing(traced: Traced, reference: list[list[Any]], workers: int) -> None:
    state = torch.get_rng_state()
    assert [contents(batch) for batch in stream(traced.shards, **SETTINGS, workers=workers)] == reference
    batches = stream(traced.shards, **SETTINGS, workers=workers, rank=1, world_size=2)
    assert [contents(batch) for batch in batches] == reference[1::2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_a_batch(traced: Traced, reference: list[list[Any]], workers: int) -> None:
    stops = (*range(0, len(reference), 3), len(reference)) if not workers else (0, 41, len(reference) - 1)
    for stop in stops:
        before = stream(traced.shards, **SETTINGS, workers=workers)
        list(itertools.islice(before, stop))
        state = before.state_dict()
        assert all(isinstance(value, (int, str)) for value in state.values())
        after = stream(traced.shards, **SETTINGS)
        after.load_state_dict(state)
        # A prefetched batch that was not yielded comes again.
        assert contents(next(iter(after), None) or EMPTY) == (reference[stop] if stop < len(reference) else [None] * 9)


EMPTY = Batch(*[None] * 9)  # type: ignore[arg-type]


def test_a_resumed_stream_has_all_remaining_batches(traced: Traced, reference: list[list[Any]]) -> None:
    before = stream(traced.shards, **SETTINGS)
    list(itertools.islice(before, 37))
    after = stream(traced.shards, **SETTINGS)
    after.load_state_dict(before.state_dict())
    assert [contents(batch) for batch in after] == reference[37:]


@pytest.mark.parametrize(("ranks", "later"), [(2, 2), (2, 1), (3, 2), (1, 4)])
def test_resuming_with_another_number_of_ranks(
    traced: Traced, reference: list[list[Any]], ranks: int, later: int
) -> None:
    for rank, steps in itertools.product(range(ranks), (4, 12)):
        before = stream(traced.shards, **SETTINGS, rank=rank, world_size=ranks)
        list(itertools.islice(before, steps))
        for new in range(later):
            after = stream(traced.shards, **SETTINGS, rank=new, world_size=later)
            after.load_state_dict(before.state_dict())
            assert [contents(batch) for batch in after] == reference[steps * ranks + new :: later]


def test_a_finished_stream_starts_again(traced: Traced) -> None:
    batches = stream(traced.shards)
    assert [contents(batch) for batch in batches] == [contents(batch) for batch in batches]


def test_an_endless_stream_goes_through_epochs(traced: Traced, reference: list[list[Any]]) -> None:
    endless = stream(traced.shards, masking=SETTINGS["masking"], epochs=None)
    batches = [contents(batch) for batch in itertools.islice(endless, len(reference) + 5)]
    assert batches[: len(reference)] == reference
    assert endless.state_dict()["epoch"] == 2


def test_another_process_makes_the_same_batches(traced: Traced, reference: list[list[Any]]) -> None:
    """As for a worker that is spawned, not forked."""
    batches = stream(traced.shards, **SETTINGS)
    list(itertools.islice(batches, 3))
    copy = pickle.loads(pickle.dumps(batches))
    assert len(pickle.dumps(traced.shards)) < 10_000  # not the tokens
    assert [contents(batch) for batch in copy] == reference[3:]


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"tokens_per_batch": 2048}, {"masking": Masking(0.2)}, {"kind": "sop"}, {"length": 32}],
    ids=str,
)
def test_resuming_with_other_settings_is_refused(traced: Traced, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"BatchStream: state\['\w+'\]: expected this stream's"):
        stream(traced.shards, **change).load_state_dict(stream(traced.shards).state_dict())


def test_resuming_with_other_texts_is_refused(traced: Traced) -> None:
    part, _ = traced.shards.split(0.1)
    with pytest.raises(ValueError, match=r"state\['corpus'\]"):
        stream(part).load_state_dict(stream(traced.shards).state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_batch": 32}, "tokens_per_batch: expected at least max_length, 64, got 32"),
        ({"rank": 2, "world_size": 2}, r"rank: expected one in \[0, 2\), got 2"),
        ({"workers": -1}, "workers: expected 0 or more, got -1"),
        ({"epochs": 0}, "epochs: expected 1 or more, or None, got 0"),
        ({"seed": -1}, "seed: expected a number"),
        ({"kind": "causal", "masking": Masking()}, "masking: expected None with a causal sequence_format"),
        ({"kind": "gpt"}, "SequenceFormat: kind: expected one of nsp, sop, single, electra, causal, got 'gpt'"),
        ({"length": 4}, "SequenceFormat: max_length: expected 5 or more, got 4"),
    ],
)
def test_bad_arguments(traced: Traced, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(traced.shards, **options)


def test_one_document_has_no_next_sentence(tmp_path: Path) -> None:
    corpus = trace(tmp_path, [[5, 5, 5]])
    with pytest.raises(ValueError, match="two documents or more for next sentences"):
        stream(corpus.shards, "nsp")
    assert len(list(stream(corpus.shards, "sop"))) == 1
