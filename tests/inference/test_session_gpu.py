"""Sessions on a GPU: CUDA graphs give the results of the model, are bounded in number, and share memory."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, small_bert
from torch import Tensor

from fasttfm import models, ops
from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.batches import pack, plan
from fasttfm.inference.network import Output
from fasttfm.ops.core import graph_launch
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

pytestmark = pytest.mark.gpu

Ids = Sequence[Sequence[int]]
FAMILIES: dict[str, Any] = {
    "bert": lambda: small_bert("BertModel", hidden_size=128),
    "bert, heads of 32": lambda: small_bert("BertModel", hidden_size=128, num_attention_heads=4),
    "roberta": lambda: models.RobertaModel(models.RobertaConfig(**_sizes(), max_position_embeddings=130)),
    "modernbert": lambda: models.ModernBertModel(models.ModernBertConfig(**_sizes(), pad_token_id=0)),
    "gpt": lambda: models.GPT2Model(
        models.GPT2Config(vocab_size=300, n_embd=128, n_layer=2, n_head=2, n_positions=128)
    ),
}


def _sizes() -> dict[str, int]:
    return {
        "vocab_size": 300,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    }


@torch.no_grad()
def pooled(model: Any, ids: Sequence[int]) -> Tensor:
    found: Tensor = model(torch.tensor([ids]).to(next(model.parameters()).device)).last_hidden_state[0].float()
    return found.mean(0).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_give_the_results_of_the_model(name: str, dtype: torch.dtype, sentences: Ids) -> None:
    torch.manual_seed(0)
    model = FAMILIES[name]().eval()
    cuda = copy.deepcopy(model).cuda().to(dtype)
    chosen = [ids for ids in sentences if len(ids) <= 64][:12]
    with Session(model, device="cuda", dtype=dtype, max_tokens=256, max_graphs=0) as session:
        first = session.encode(chosen)
    with Session(model, device="cuda", dtype=dtype, max_tokens=256) as session:
        session.encode(chosen)  # graphs are captured when a shape repeats
        second, third = session.encode(chosen), session.encode(chosen)
        assert session.graph_counts.captured > 0
        assert session.graph_counts.replayed >= 2 * session.graph_counts.captured
    assert np.array_equal(second, third)
    exact = torch.stack([pooled(copy.deepcopy(cuda).cpu().double(), ids) for ids in chosen])
    naive = torch.stack([pooled(cuda, ids) for ids in chosen])
    for found in (first, second):
        comparison = compare(name, torch.from_numpy(found), naive, exact.float(), OUTPUT_FACTOR)
        assert comparison.ok, str(comparison)


def test_every_output_and_a_sentence_among_others(sentences: Ids) -> None:
    model = small_bert(hidden_size=128)
    with Session(model, device="cuda", max_tokens=512) as session:
        for output in ("vectors", "states", "logits"):
            together = [session.encode(sentences, output=output) for _ in range(3)]
            alone = [session.encode(sentences[7], output=output) for _ in range(3)]
            for again in (*(each[7] for each in together), *alone):
                assert again.shape == alone[0].shape
                assert np.abs(again - alone[0]).max() <= 0.05 * np.abs(alone[0]).max()


def apart(session: Session, groups: Sequence[Ids]) -> list[np.ndarray]:
    """The vectors of each group, computed after those of the group before are on the host."""
    return [session.run(pack(group), Output.VECTORS)() for group in groups]


@pytest.mark.parametrize("native", [True, False])
def test_batches_in_flight_do_not_change_each_other(
    native: bool, sentences: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that share graphs and input buffers, small ones after large ones, and no result read before all are
    launched."""
    if not native:  # as without the native core
        monkeypatch.setattr(graph_launch, "_native", SimpleNamespace(missing_cuda=lambda: "not for this test"))
    shapes = [(0, 60), (3, 4), (60, 128), (5, 6), (61, 128), (64, 65), (10, 70), (0, 60)]
    groups = [sentences[first:last] for first, last in shapes]
    with Session(small_bert("BertModel", hidden_size=128), device="cuda") as session:
        for _ in range(3):
            expected = apart(session, groups)
        captured = session.graph_counts.captured
        assert captured >= 4
        for _ in range(3):
            waiting = [session.run(pack(group), Output.VECTORS) for group in groups]
            session.run(pack(groups[0]), Output.VECTORS)  # its result is not read
            for index in (3, 0, 7, 2, 1, 6, 5, 4):
                assert np.array_equal(waiting[index](), expected[index])
        assert session.graph_counts.captured == captured
    ops.check_errors()


def test_large_batches_run_as_graphs() -> None:
    """A call of two groups, with results equal to those of the groups by themselves. Results with a row for each
    token have no graphs of this size."""
    generator = np.random.default_rng(0)
    given = [generator.integers(1, VOCABULARY, length).tolist() for length in generator.integers(100, 129, 250)]
    with Session(small_bert("BertModel", hidden_size=128), device="cuda", max_tokens=16384) as session:
        found = [session.encode(given) for _ in range(3)][-1]
        assert session.graph_counts.captured > 0
        groups = plan([len(ids) for ids in given], session.max_tokens, session.max_batch)
        assert len(groups) == 2
        assert all(sum(len(given[index]) for index in group) > 8192 for group in groups)
        rows = apart(session, [[given[index] for index in group] for group in groups])
        for group, expected in zip(groups, rows, strict=True):
            assert np.array_equal(found[group], expected)
        captured = session.graph_counts.captured
        for _ in range(3):
            states = session.encode(given, output="states")
        assert session.graph_counts.captured == captured
        means = np.stack([each.mean(0) for each in states])
        assert np.abs(means - found).max() <= 0.05 * np.abs(found).max()
    ops.check_errors()


def test_graphs_are_bounded_and_memory_is_flat(sentences: Ids) -> None:
    model = small_bert(hidden_size=128)
    generator = np.random.default_rng(0)
    with Session(model, device="cuda", max_graphs=4) as session:

        def some() -> None:
            chosen = generator.choice(128, generator.integers(1, 40), replace=False)
            session.encode([sentences[index] for index in chosen])

        for _ in range(200):
            some()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        captured = session.graph_counts.captured
        for _ in range(200):
            some()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 2**20
        assert session._scheduler.graphs is not None
        assert len(session._scheduler.graphs._cache) <= 4
        assert session.graph_counts.captured - captured < 20


def test_threads_share_a_session(sentences: Ids) -> None:
    model = small_bert(hidden_size=128)
    settings = EmbedSettings(normalize=True)
    with Session(model, settings=settings, device="cuda", max_tokens=1024) as session:
        expected = session.encode(sentences)
        found: dict[int, np.ndarray] = {}

        def ask(start: int) -> None:
            for _ in range(3):
                futures = {index: session.submit(sentences[index]) for index in range(start, 128, 4)}
                found.update({index: future.result(60) for index, future in futures.items()})

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    together = np.stack([found[index] for index in range(128)])
    assert (together * expected).sum(1).min() > 0.999


@pytest.mark.parametrize("labels", [1, 3, 64])
def test_rows_of_any_width_are_written_to_the_host(labels: int, sentences: Ids) -> None:
    """By the last kernel of a graph: rows that are not whole vectors, and more than one block's."""
    model = small_bert(hidden_size=128, num_labels=labels)
    groups = [sentences[:count] for count in (1, 2, 7, 100)]
    with Session(model, device="cuda", max_graphs=0) as session:
        expected = [session.encode(group, output="logits") for group in groups]
    with Session(model, device="cuda") as session:
        for _ in range(4):
            found = [session.encode(group, output="logits") for group in groups]
        assert session.graph_counts.replayed >= 3 * len(groups)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert np.abs(ours - theirs).max() <= 0.05 * np.abs(theirs).max()


def test_a_thread_does_not_lower_the_shared_memory_of_another() -> None:
    """The same kernel takes less of it in the narrower model, whose blocks exchange nothing."""
    ids = [[1 + index % 20 for index in range(100)]]
    wide, narrow = (
        Session(small_bert("BertModel", hidden_size=size), device="cuda", max_graphs=0) for size in (128, 64)
    )
    with wide, narrow:
        expected = wide.encode(ids)
        thread = threading.Thread(target=narrow.encode, args=(ids,))
        thread.start()
        thread.join()
        assert np.array_equal(wide.encode(ids), expected)


def test_threads_replay_the_same_graph() -> None:
    """With different ids, on one stream and through one slot: every call has the bits of the same ids before."""
    generator = np.random.default_rng(0)
    given = [[generator.integers(1, VOCABULARY, length) for length in (70, 9, 33)] for _ in range(8)]
    failures: list[Any] = []
    with Session(small_bert("BertModel", hidden_size=128), device="cuda") as session:
        expected = [[session.encode(ids) for _ in range(3)][-1] for ids in given]

        def ask(start: int) -> None:
            for turn in range(100):
                index = (start + turn) % len(given)
                if not np.array_equal(session.encode(given[index]), expected[index]):
                    failures.append(index)

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.graph_counts.captured == 1
    assert not failures
    assert len({each.tobytes() for each in expected}) == len(given)


@pytest.mark.parametrize("max_graphs", [0, 8])
def test_changed_weights_are_taken(max_graphs: int, sentences: Ids) -> None:
    """The same bits as those of a new session, with and without graphs, which read the weights in place."""
    torch.manual_seed(0)
    model = small_bert("BertForSequenceClassification", hidden_size=128).cuda()
    chosen = sentences[:6]
    with Session(model, max_graphs=max_graphs) as session:
        before = [session.encode(chosen, output="logits") for _ in range(3)]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert session.take_weights(model)
        after = session.encode(chosen, output="logits")
        assert session.graph_counts.captured == bool(max_graphs)
    with Session(model, max_graphs=max_graphs) as session:
        expected = [session.encode(chosen, output="logits") for _ in range(3)]
    assert np.array_equal(after, expected[-1])
    assert not np.array_equal(after, before[-1])


def test_a_model_that_is_moved_leaves_the_session_its_memory() -> None:
    """Graphs contain the addresses of the weights: other tensors must not get that memory."""
    torch.manual_seed(0)
    model = small_bert("BertModel", hidden_size=256, intermediate_size=1024).cuda().bfloat16()
    given = [[1 + (index + first) % 200 for index in range(100)] for first in range(20)]  # not the folded kernels
    with Session(model) as session:
        expected = [session.encode(given) for _ in range(4)][-1]
        assert session.graph_counts.captured == 1
        model.cpu()
        others = [torch.full((256, 256 * k), 7.0, dtype=torch.bfloat16, device="cuda") for k in (1, 3, 4, 4) * 20]
        assert np.array_equal(session.encode(given), expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert session.take_weights(model)
        changed = session.encode(given)
        assert not np.array_equal(changed, expected)
        del others
    with Session(model.cuda()) as session:
        assert np.array_equal([session.encode(given) for _ in range(4)][-1], changed)


@pytest.mark.parametrize("max_graphs", [1, 2])
def test_the_only_graph_may_be_evicted(max_graphs: int) -> None:
    """The memory pool stays without a graph, and others are captured with it."""
    model = small_bert("BertModel", hidden_size=128).cuda().bfloat16()
    groups = [
        [[1 + index % 200 for index in range(length)]] * count for length, count in ((50, 4), (100, 8), (120, 30))
    ]
    with Session(model, max_graphs=max_graphs) as session, warnings.catch_warnings():
        warnings.filterwarnings("error", message="Session")
        found = []
        for turn, group in enumerate(groups):
            found.append([session.encode(group) for _ in range(3 * (turn + 1) ** 2)][-1])
        assert session.graph_counts.captured == 3
        assert session.graph_counts.evicted == 3 - max_graphs
        for group, rows in zip(groups, found, strict=True):
            assert np.abs(session.encode(group) - rows).max() <= 0.05 * np.abs(rows).max()


def test_a_collection_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it frees must not wait for the device: a session, and a launch whose result was not read."""
    model = small_bert("BertModel", hidden_size=128).cuda().bfloat16()
    given = [[1 + index % 200 for index in range(100)]] * 4
    old = Session(model)
    for _ in range(3):
        old.encode(given)
    cycle: list[Any] = [old.run(pack(given), Output.VECTORS), old]
    cycle.append(cycle)
    with Session(model) as session, warnings.catch_warnings():
        warnings.filterwarnings("error", message="Session")
        session.encode(given)
        run = session.network.run
        collected: list[int] = []

        def run_and_collect(*arguments: Any) -> Any:
            rows = run(*arguments)
            if torch.cuda.is_current_stream_capturing():
                collected.append(gc.collect())
            return rows

        monkeypatch.setattr(session.network, "run", run_and_collect)
        gc.disable()
        try:
            del old, cycle
            rows = [session.encode(given) for _ in range(2)]
        finally:
            gc.enable()
        assert collected
        assert session.graph_counts.captured == 1
        assert np.array_equal(*rows)


def test_a_session_captures_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes without the graph meanwhile."""
    model = small_bert("BertModel", hidden_size=128).cuda().bfloat16()
    given = [[1 + index % 200 for index in range(100)]] * 4
    with Session(model) as session:
        expected = session.encode(given)
        run, failures = session.network.run, iter(range(1))

        def run_and_wait(*arguments: Any) -> Any:
            if torch.cuda.is_current_stream_capturing() and next(failures, None) is not None:
                torch.cuda.synchronize()  # which a capture does not allow
            return run(*arguments)

        monkeypatch.setattr(session.network, "run", run_and_wait)
        with pytest.warns(UserWarning, match="runs without a new CUDA graph for a while"):
            found = [session.encode(given)]
        found += [session.encode(given) for _ in range(80)]
        assert session.graph_counts.captured == 1
        assert session.graph_counts.replayed > 10
        for each in found:
            assert np.abs(each - expected).max() <= 0.05 * np.abs(expected).max()
        torch.rand(3, device="cuda")  # torch's generator has left the capture
