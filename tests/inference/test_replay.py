"""Calls of ids whose graph is captured, with graphs that run on the CPU: what `Session.encode` does on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, small_bert

from fasttfm import _native
from fasttfm.inference import Session, graphs
from fasttfm.inference.batches import pack, split_buffer
from fasttfm.inference.graphs import Graphs
from fasttfm.inference.network import Inputs, Output

pytestmark = pytest.mark.skipif(_native.missing() is not None, reason="needs the native core")

Ids = Sequence[Sequence[int]]


class HostStaging:
    def __init__(self, size: int, stream: Any) -> None:
        self.input_array, self.result_array = np.full(size, -7, np.int32), np.full(2**16, np.nan, np.float32)


class HostGraph:
    def __init__(self, network: Any, key: Any) -> None:
        self.network, self.key, self.launches = network, key, 0

    def launch(self, host: HostStaging, rows: int, results: torch.Tensor | None = None) -> None:
        self.launches += 1
        buffer, bucket = torch.from_numpy(host.input_array), self.key.bucket
        inputs = Inputs(*split_buffer(buffer, bucket, self.key.segments), bucket.max_seqlen)
        found = self.network.run(self.key.output, inputs)[:rows].reshape(-1)
        target = torch.from_numpy(host.result_array) if results is None else results
        target[: len(found)] = found

    def wait(self, host: HostStaging) -> None:
        pass


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """With graphs on the CPU, two at most."""
    torch.manual_seed(0)
    monkeypatch.setattr(graphs, "_Staging", HostStaging)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    stream: Any = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)

    def capture(self: Graphs, key: Any) -> Any:
        width = self._network.vector_width
        return graphs._Graph(HostGraph(self._network, key), key.bucket, (width,), width)  # type: ignore[arg-type]

    monkeypatch.setattr(Graphs, "_capture", capture)
    with Session(small_bert("BertModel"), device="cpu") as opened:
        opened._scheduler.graphs = Graphs(
            *(opened.network, stream),
            kept=None,  # type: ignore[arg-type]
            limit=2,
            max_tokens=2048,
            max_batch=60,
            max_length=128,
            vocabulary=VOCABULARY,
            padding=0,
        )
        yield opened


def capture(session: Session, ids: Ids) -> None:
    assert session._scheduler.graphs is not None
    launched = [
        session._scheduler.graphs.launch(Output.VECTORS, pack([each for each in ids if len(each)])) for _ in range(2)
    ]
    assert launched[1] is not None


def replays(session: Session) -> int:
    return session.graph_counts.replayed


def expected(session: Session, ids: Ids) -> np.ndarray:
    return np.stack([session.run(pack([each]), Output.VECTORS)()[0] for each in ids])


@pytest.mark.parametrize("kind", [list, np.array, lambda ids: np.array(ids, np.int32)])
def test_rows_are_in_the_given_order(session: Session, kind: Any, sentences: Ids) -> None:
    """Of sequences in another order, with other ids and with empty ones, in batches of the same sizes."""
    chosen = [ids for ids in sentences if len(ids) <= 60][:12]
    capture(session, chosen)
    others = [chosen[index] for index in np.random.default_rng(0).permutation(len(chosen))]
    before = replays(session)
    for given in (chosen, others, [[id % 7 for id in ids] for ids in chosen], [[], *chosen[:5], [], *chosen[5:]]):
        found = session.encode([kind(ids) if ids else [] for ids in given])
        filled = [index for index, ids in enumerate(given) if ids]
        assert found.dtype == np.float32
        assert np.allclose(found[filled], expected(session, [given[index] for index in filled]), atol=1e-5)
        assert not found[[index for index, ids in enumerate(given) if not ids]].any()
    assert replays(session) == before + 4
    assert (session.counts.texts, session.counts.empty) == (4 * 12 + 2, 2)
    assert session.counts.tokens == 4 * sum(map(len, chosen))


def test_a_single_sequence(session: Session, sentences: Ids) -> None:
    capture(session, sentences[:1])
    before = replays(session)
    for kind in (list, np.array, tuple):
        found = session.encode(kind(sentences[0]) if kind is not tuple else (sentences[0],))
        assert np.allclose(found, expected(session, sentences[:1])[0], atol=1e-5)
        assert found.shape == ((session.width,) if kind is not tuple else (1, session.width))
    assert replays(session) == before + 3


def test_a_result_is_not_overwritten(session: Session, sentences: Ids) -> None:
    """By a later call, which uses the same staging memory."""
    capture(session, sentences[:1])
    first = session.encode(sentences[:1])
    copy = first.copy()
    session.encode([[id % 5 for id in sentences[0]]])
    assert np.array_equal(first, copy)


def test_batches_of_other_sizes_use_the_graph_of_their_bucket(session: Session, sentences: Ids) -> None:
    """Up to the limits of a batch: with more tokens or sequences, and without tokens, it is another call."""
    capture(session, [sentences[0][:20], sentences[1][:20]])
    given = [sentences[0][:20], sentences[1][:19]]
    before = replays(session)
    for _ in range(2):
        assert np.allclose(session.encode(given), expected(session, given), atol=1e-5)
    assert replays(session) == before + 2
    many = [[1, 2]] * 61  # more than max_batch
    capture(session, many)
    before = replays(session)
    assert session.encode(many).shape == (61, session.width)
    assert not session.encode([[], []]).any()
    assert replays(session) == before


def test_other_calls_are_not_replayed(session: Session, sentences: Ids) -> None:
    """Those of other sizes, of outputs with a row for each token, and wrong ids, whose messages are the same."""
    capture(session, sentences[:3])
    before = replays(session)
    session.encode(sentences[:2])
    session.encode(sentences[:3], output="states")
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, f"expected ids from 0 to {VOCABULARY - 1}, got", VOCABULARY),
        (ValueError, f"expected ids from 0 to {VOCABULARY - 1}, got -1 to", -1),
        (TypeError, "expected texts, pairs of texts or lists of ids", 0.5),
    ]
    for error, message, value in wrong:
        for index in range(3):
            ids = [list(each) for each in sentences[:3]]
            ids[index][-1] = value
            with pytest.raises(error, match=message):
                session.encode(ids)
    assert replays(session) == before
    session.encode(sentences[:3])
    assert replays(session) == before + 1
    session.close()
    with pytest.raises(RuntimeError, match="expected an open session"):
        session.encode(sentences[:3])


def test_several_batches_are_not_staged(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session._scheduler.graphs is not None
    monkeypatch.setattr(session._scheduler.graphs, "_stage", lambda *_: pytest.fail("staged"))
    assert session._scheduler.graphs.replay(Output.VECTORS, [[1, 2]] * 61) is None


def test_an_evicted_graph_is_not_replayed(session: Session, sentences: Ids) -> None:
    groups = [sentences[:1], sentences[:10], sentences[:24]]
    capture(session, groups[0])
    capture(session, groups[1])
    assert session._scheduler.graphs is not None
    for _ in range(4):
        session._scheduler.graphs.launch(Output.VECTORS, pack(groups[2]))
    assert session.graph_counts.evicted == 1
    before = replays(session)
    found = [session.encode(group) for group in groups]
    assert replays(session) == before + 2
    for group, rows in zip(groups, found, strict=True):
        assert np.allclose(rows, expected(session, group), atol=1e-5)


def test_lists_that_another_thread_changes() -> None:
    """Ids are read twice, for lengths and for values; a list may have become shorter or longer in between."""
    for change in (lambda ids: ids.pop(), lambda ids: ids.append(1)):
        given = [[1, 2, 3], [4, 5]]
        found = _native.sequences(given, 10)  # type: ignore[misc]
        change(given[1])
        with pytest.raises(ValueError, match="expected lists that do not change"):
            found.sorted(100)
