"""Sessions on a CPU: the results of the model, in the order of the inputs, whatever else is in the batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, save_bert, small_bert
from torch import Tensor

from fasttfm import models
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.inference import EmbedSettings, Session, cpu_linear
from fasttfm.inference import session as session_module
from fasttfm.inference.sentence_folder import Normalize
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

Ids = Sequence[Sequence[int]]


@torch.no_grad()
def states_of(model: Any, ids: Sequence[int]) -> Tensor:
    found: Tensor = model.bert(torch.tensor([ids])).last_hidden_state[0]
    return found


def check(found: Any, model: Any, ids: Sequence[int], pooled: bool) -> None:
    """By the tolerance rule, with the model on the sequence by itself as plain fp32."""
    exact, naive = states_of(copy.deepcopy(model).double(), ids), states_of(model, ids)
    if pooled:
        exact, naive = exact.mean(0), naive.mean(0)
    comparison = compare("session", torch.from_numpy(np.array(found)), naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, str(comparison)


def test_results_are_those_of_the_model_in_order(bert: Any, sentences: Ids) -> None:
    with Session(bert, max_tokens=200) as session:
        vectors, states = session.encode(sentences), session.encode(sentences, output="states")
        logits = session.encode(sentences, output="logits")
    assert vectors.shape == (128, 64)
    assert logits.shape == (128, 2)
    assert [state.shape for state in states] == [(len(ids), 64) for ids in sentences]
    for index in (0, 17, 127):
        check(vectors[index], bert, sentences[index], pooled=True)
        check(states[index], bert, sentences[index], pooled=False)
        with torch.no_grad():
            expected = bert(torch.tensor([sentences[index]])).logits[0]
        assert np.allclose(logits[index], expected, atol=1e-5)
    assert session.counts.texts == 3 * 128
    assert session.counts.tokens == 3 * sum(map(len, sentences))


def test_arrays_of_ids(bert: Any, sentences: Ids) -> None:
    """Of any integer type, also among lists and without tokens."""
    with Session(bert) as session:
        vectors = session.encode(sentences[:4])
        for kind in (np.int64, np.uint16):
            assert np.array_equal(session.encode([np.array(ids, kind) for ids in sentences[:4]]), vectors)
        mixed = session.encode([np.array(sentences[0]), sentences[1], np.array([], np.int64)])
        assert np.allclose(mixed[:2], vectors[:2], atol=1e-5)
        assert not mixed[2].any()


def test_a_sentence_by_itself_and_among_127_others(bert: Any, sentences: Ids) -> None:
    with Session(bert, max_tokens=100_000) as session:
        together = session.encode(sentences)
        for index in (5, 64):
            check(session.encode(sentences[index]), bert, sentences[index], pooled=True)
            check(together[index], bert, sentences[index], pooled=True)
        assert session.counts.batches == 3


def test_requests_of_threads(bert: Any, sentences: Ids) -> None:
    with Session(bert, max_tokens=300) as session:
        expected = session.encode(sentences)
        logits = session.encode(sentences, output="logits")
        found: dict[int, np.ndarray] = {}

        def ask(start: int) -> None:
            own = range(start, 128, 4)
            kind = "logits" if start % 2 else "vectors"
            futures = {index: session.submit(sentences[index], output=kind) for index in own}
            found.update({index: future.result(60) for index, future in futures.items()})

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, result in found.items():
            assert np.allclose(result, logits[index] if index % 2 else expected[index], atol=1e-5)
        assert len(found) == 128
    with pytest.raises(RuntimeError, match="closed"):
        session.encode(sentences[0])
    with pytest.raises(RuntimeError, match="closed"):
        session.submit(sentences[0])


def test_autocast_of_the_calling_thread_changes_nothing(bert: Any, sentences: Ids) -> None:
    with Session(bert) as session:
        expected = session.encode(sentences[:8])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = session.encode(sentences[:8])
    assert np.array_equal(found, expected)


def test_a_subclass_of_a_model_has_its_head(bert: Any, sentences: Ids) -> None:
    class Doubled(models.BertForSequenceClassification):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    doubled = Doubled(bert.config).eval()
    doubled.load_state_dict(bert.state_dict())
    with Session(bert) as session, Session(doubled) as other:
        expected = 2 * session.encode(sentences[:8], output="logits")
        assert np.array_equal(other.encode(sentences[:8], output="logits"), expected)


def test_inputs_may_change_once_they_are_submitted(bert: Any, sentences: Ids) -> None:
    with Session(bert) as session:
        expected = session.encode(sentences[0])
        for kind in (list, np.array, torch.tensor):
            given = kind(sentences[0])
            with session._scheduler.lock:  # nothing is computed yet
                future = session.submit(given)
                given[:] = kind([10**6] * len(given))
            assert np.array_equal(future.result(60), expected)


def test_a_session_does_not_change_the_model(sentences: Ids) -> None:
    model = small_bert().train()
    parameter = next(model.parameters())
    session = Session(model, dtype=torch.bfloat16)
    session.encode(sentences[:3])
    assert model.training
    assert parameter.dtype == torch.float32
    assert parameter.requires_grad


@pytest.mark.parametrize("pooling", ["mean", "first", "last", "max", "mean-sqrt", "weighted"])
def test_pooling_and_normalisation(bert: Any, sentences: Ids, pooling: str) -> None:
    settings = EmbedSettings(pooling=pooling, normalize=True)
    ids = sentences[:4]
    for found, own in zip(Session(bert, settings=settings).encode(ids), ids, strict=True):
        states = states_of(bert, own).double()
        numbers = torch.arange(1, len(own) + 1)[:, None]
        expected = {
            "mean": states.mean(0),
            "first": states[0],
            "last": states[-1],
            "max": states.amax(0),
            "mean-sqrt": states.mean(0),  # of length 1, the same
            "weighted": (states * numbers).sum(0),
        }[pooling]
        assert np.allclose(found, expected / expected.norm(), atol=1e-5)


def test_texts_pairs_and_ids(bert_directory: Path) -> None:
    tokenizer = load_tokenizer(bert_directory)
    texts = ["Peace and commerce.", "", "The army and the navy of the United States."]
    with Session(bert_directory) as session:
        vectors = session.encode(texts)
        first, last = tokenizer.special.cls, tokenizer.special.sep
        assert first is not None
        assert last is not None
        ids = [[first, *tokenizer.encode(text), last] for text in texts]
        assert np.allclose(session.encode(ids), vectors, atol=1e-5)
        assert np.allclose(session.encode(texts[2]), vectors[2], atol=1e-5)
        assert np.allclose(session.encode(torch.tensor(ids[0])), vectors[0], atol=1e-5)
        pair = session.encode((texts[0], texts[2]))
        other = session.encode([*ids[0], *ids[2][1:]])  # the same ids, of one segment
        assert pair.shape == other.shape
        assert not np.allclose(pair, other, atol=1e-3)
        logits = session.encode(texts, output="logits")  # the checkpoint's head predicts masked tokens
        assert [each.shape for each in logits] == [(len(own), tokenizer.vocab_size) for own in ids]
        assert session.encode([]).shape == (0, 64)


def test_many_windows_of_an_iterator(bert_directory: Path) -> None:
    texts = [f"The number {index} " * (1 + index % 7) for index in range(1100)]
    with Session(bert_directory) as session:
        some = session.encode(texts[::100])
        found = np.stack(list(session.stream(iter(texts))))
    assert np.allclose(found[::100], some, atol=1e-5)


def test_a_text_without_tokens(gpt_directory: Path) -> None:
    with Session(gpt_directory) as session:
        assert not session.encode("").any()
        nothing, something = session.encode(["", "war"], output="states")
        assert nothing.shape == (0, 64)
        assert len(something) > 0
        assert not session.submit("").result(60).any()


def test_a_row_for_each_token_has_smaller_batches_by_default(
    bert: Any, sentences: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(session_module._MAX_TOKENS, "cpu", 1024)
    monkeypatch.setattr(session_module, "_MAX_ROWS", 256)
    for max_tokens in (None, 1024):
        with Session(bert, max_tokens=max_tokens) as session:
            session.encode(sentences)
            batches = session.counts.batches
            session.encode(sentences, output="states")
            more = session.counts.batches - batches
            assert more == batches if max_tokens is not None else more >= 3 * batches


def test_rows_of_several_batches_and_of_sequences_without_tokens(bert: Any, sentences: Ids) -> None:
    given = [sentences[0], [], *sentences[1:9], [], np.array(sentences[9]), torch.tensor(sentences[10])]
    with Session(bert, max_tokens=40) as session:
        vectors, states = session.encode(given), session.encode(given, output="states")
        assert session.counts.batches > 2
        assert session.counts.empty == 4
        assert session.counts.tokens == 2 * sum(len(ids) for ids in given)
        for index, ids in enumerate(given):
            assert states[index].shape == (len(ids), 64)
            if len(ids):
                assert np.allclose(vectors[index], session.encode(ids), atol=1e-5)
            else:
                assert not vectors[index].any()
        assert session.encode([[], []]).shape == (2, 64)
        assert vectors.base is None  # no view of a batch's memory
        assert session.encode([given[0]]).base is None


def test_a_prompt_that_is_excluded_from_pooling(wordpiece: Tokenizer, tmp_path: Path) -> None:
    directory = save_bert(wordpiece, tmp_path)
    settings = EmbedSettings(prompt="query: ", pool_prompt=False)
    with Session(directory, settings=settings) as session, Session(directory) as plain:
        states = plain.encode("query: peace", output="states")
        skipped = 1 + len(wordpiece.encode("query: "))
        assert np.allclose(session.encode("peace"), states[skipped:].mean(0), atol=1e-5)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda s: s.encode([[1, 300]]), "inputs: expected ids from 0 to 299, got 1 to 300"),
        (lambda s: s.encode([[1] * 129]), "inputs: expected up to 128 ids, got 129"),
        (lambda s: s.encode([np.array([1, 300])]), "inputs: expected ids from 0 to 299, got 1 to 300"),
        (lambda s: s.encode([np.array([]), np.array([-1])]), "inputs: expected ids from 0 to 299, got -1 to -1"),
        (lambda s: s.encode([np.array([-1, 2], np.int8)]), "inputs: expected ids from 0 to 299, got -1 to 2"),
        (lambda s: s.encode([np.array([1]), np.array([1.5])]), "inputs: expected texts, pairs of texts or lists of"),
        (lambda s: s.encode([np.array([[1]])]), "inputs: expected texts, pairs of texts or lists of ids"),
        (lambda s: s.encode([np.ones(129, np.uint8)]), "inputs: expected up to 128 ids, got 129"),
        (lambda s: s.encode([[1.5]]), "inputs: expected texts, pairs of texts or lists of ids"),
        (
            lambda s: s.encode([[1], [1, 2.5]]),
            r"inputs: expected texts, pairs of texts or lists of ids, got \[1, 2.5\]",
        ),
        (lambda s: s.encode([[1], [2**70]]), "inputs: expected texts, pairs of texts or lists of ids, got"),
        (
            lambda s: s.encode([[1], [True, True]]),
            r"inputs: expected texts, pairs of texts or lists of ids, got \[True",
        ),
        (lambda s: s.encode([[1], [1, -2]]), "inputs: expected ids from 0 to 299, got -2 to 1"),
        (lambda s: s.encode(["a text"]), "tokenizer: expected one for texts, got None"),
        (
            lambda s: s.encode([[1]], output="tokens"),
            "output: expected vectors, states, logits, sparse, multi, multi-query, spans, got 'tokens'",
        ),
        (lambda s: s.encode(5), "inputs: expected texts, pairs of texts or lists of ids, got int"),
        (lambda s: s.encode([[1, [2]]]), r"inputs: expected texts, pairs of texts or lists of ids, got \[1, \[2\]\]"),
        (lambda s: copy.deepcopy(s), "expected to stay in its process"),
        (lambda s: Session(torch.nn.Linear(2, 2)), "model: expected a model of fasttfm.models, .*, got Linear"),
        (lambda s: Session(vit()), "model: expected one that reads tokens, got ViTModel"),
        (lambda s: Session(s.network.model, dtype="float16"), "dtype: expected a floating-point type .*'float16'"),
        (lambda s: Session(s.network.model, device="cpu", dtype=torch.float16), "dtype: .* on a CPU, .*got float16"),
        (lambda s: Session(s.network.model, dtype=torch.int8), "dtype: expected a floating-point type .*torch.int8"),
        (lambda s: Session(s.network.model, max_tokens="9"), "max_tokens: expected a number from 1 on, got '9'"),
        (lambda s: s.submit([1, -1]), "inputs: expected ids from 0 to 299, got -1 to 1"),
        (lambda s: Session(s.network.model, max_tokens=0), "max_tokens: expected a number from 1 on, got 0"),
        (
            lambda s: Session(s.network.model, settings=EmbedSettings(max_length=200)),
            "max_length: expected 3 to the model's 128 positions, got 200",
        ),
        (
            lambda s: Session(small_bert("BertModel")).encode([1, 2], output="logits"),
            "logits: expected a model with a head for labels of sequences, .*, got hidden states",
        ),
    ],
)
def test_wrong_arguments_are_reported(bert: Any, call: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(Session(bert))


def vit() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return models.ViTModel(models.ViTConfig(**sizes, image_size=32))


@pytest.mark.parametrize("options", [{}, {"precision": "int8"}])
def test_training_the_model_does_not_change_the_session(sentences: Ids, options: dict[str, Any]) -> None:
    """A session has no dropout, and the model can still be trained."""
    model = small_bert(hidden_dropout_prob=0.5)
    with Session(model, **options) as session:
        expected = session.encode(sentences[:8])
        model.train()
        model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).loss.backward()
        assert np.array_equal(session.encode(sentences[:8]), expected)
    assert model.bert.encoder.layers[0].qkv.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "taken"),
    [({}, True), ({"dtype": torch.float64}, True), ({"dtype": torch.bfloat16}, False), ({"precision": "int8"}, False)],
)
def test_a_session_takes_changed_weights(sentences: Ids, options: dict[str, Any], taken: bool) -> None:
    """Shared and copied ones; not those that are packed."""
    model = small_bert("BertForSequenceClassification").eval()
    with Session(model, **options) as session:
        before = session.encode(sentences[:3], output="logits")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        assert session.take_weights(model) == taken
        after = session.encode(sentences[:3], output="logits")
        with Session(model, **options) as new:
            assert np.array_equal(after, new.encode(sentences[:3], output="logits")) == taken
        assert np.array_equal(after, before) != taken
        model.classifier = torch.nn.Sequential(model.classifier)
        assert not session.take_weights(model)  # of another tree of modules


def test_a_pair_is_lowercased_and_has_no_prompt(bert_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    encode = Tokenizer.encode_batch
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts: read.extend(texts) or encode(self, texts))
    Session(bert_directory, settings=EmbedSettings(lowercase=True)).encode(["Peace", ("PEACE", "War")])
    assert read == ["peace", "peace", "war"]
    session = Session(bert_directory, settings=EmbedSettings(prompt="query: "))
    with pytest.raises(ValueError, match="expected single texts with a prompt, got a pair"):
        session.encode([("peace", "war")])


def test_logits_of_no_token_have_a_width() -> None:
    found = Session(small_bert("BertForMaskedLM")).encode([[], [1, 2]], output="logits")
    assert [each.shape for each in found] == [(0, VOCABULARY), (2, VOCABULARY)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_a_child_process_has_a_session(bert: Any, sentences: Ids) -> None:
    with Session(bert) as session:
        expected = session.submit(sentences[0]).result(30)
        with session._scheduler.lock:  # another thread computes
            child = os.fork()
            if child == 0:
                result = 1
                with contextlib.suppress(BaseException):
                    signal.alarm(60)
                    found = session.submit(sentences[0]).result(30)
                    result = int(not np.allclose(found, expected, atol=1e-5))
                os._exit(result)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def test_a_deleted_session_is_freed(sentences: Ids) -> None:
    session = Session(small_bert())
    session.submit(sentences[0]).result(30)
    gone, thread = weakref.ref(session), session._dispatcher._thread
    del session
    assert thread is not None
    for _ in range(50):  # the thread releases the request after its result is set
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            break
    assert gone() is None


def test_the_first_dimensions(bert: Any, sentences: Ids) -> None:
    """Vectors that were normalized before are normalized again, as those of a folder of sentence-transformers."""
    whole = Session(bert).encode(sentences)
    found = Session(bert, settings=EmbedSettings(dimensions=8)).encode(sentences)
    assert np.array_equal(found, whole[:, :8])
    lengths = np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    for settings in (EmbedSettings(dimensions=8, normalize=True), EmbedSettings(dimensions=8, after=(Normalize(),))):
        np.testing.assert_allclose(Session(bert, settings=settings).encode(sentences), found / lengths, atol=1e-6)
    width = whole.shape[1]
    for wrong in (0, width + 1, 2.0):
        with pytest.raises(ValueError, match=f"dimensions: expected a whole number from 1 to {width}, got {wrong}"):
            Session(bert, settings=EmbedSettings(dimensions=wrong))  # type: ignore[arg-type]


# ---- GEMMs in other types --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"precision": "int8"}], ids=["bf16", "int8"])
def test_gemms_in_other_types_are_close(
    bert: Any, sentences: Ids, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also on CPUs without bf16 instructions, where a session would use fp32.
    monkeypatch.setattr(cpu_linear, "has_bf16_instructions", lambda: True)
    settings = EmbedSettings(normalize=True)
    expected = Session(bert, settings=settings).encode(sentences)
    with Session(bert, settings=settings, **options) as session:
        found, logits = session.encode(sentences), session.encode(sentences, output="logits")
        assert (found * expected).sum(1).min() >= 0.99
        assert not np.array_equal(found, expected)
        assert np.isfinite(logits).all()
        # Each row has its own scale, so that a sentence's result does not depend on the others.
        assert np.allclose(session.encode(sentences[9]), found[9], atol=1e-3)
    assert type(bert.bert.encoder.layers[0].qkv) is torch.nn.Linear


def test_bf16_is_fp32_on_a_cpu_without_it(bert: Any, sentences: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16_instructions", lambda: False)
    found = Session(bert, dtype=torch.bfloat16).encode(sentences[:8])
    assert np.array_equal(found, Session(bert).encode(sentences[:8]))


def test_int8_of_other_families(sentences: Ids) -> None:
    config = models.ModernBertConfig(
        vocab_size=300,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        initializer_range=0.1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = models.ModernBertModel(config).eval()
    settings = EmbedSettings(normalize=True)
    expected = Session(model, settings=settings).encode(sentences[:8])
    found = Session(model, settings=settings, precision="int8").encode(sentences[:8])
    assert (found * expected).sum(1).min() >= 0.99


def test_int8_is_for_fp32_on_a_cpu(bert: Any) -> None:
    with pytest.raises(ValueError, match="precision: expected float32 on a CPU with 'int8', got bfloat16 on cpu"):
        Session(bert, precision="int8", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="precision: expected None, 'auto', 'int8' or 'fp8', got 'int4'"):
        Session(bert, precision="int4")


def test_a_session_that_a_callback_closes_computes_the_waiting_requests() -> None:
    session = Session(small_bert("BertModel"), device="cpu", max_tokens=8)
    futures = [session.submit([1, 2, 3, 4]) for _ in range(1)]
    futures[0].add_done_callback(lambda _: session.close())
    with contextlib.suppress(RuntimeError):  # once the callback has closed the session
        for _ in range(20):
            futures.append(session.submit([5, 6, 7]))
    assert all(np.isfinite(each.result(60)).all() for each in futures)
    session.close()
    with pytest.raises(RuntimeError, match="expected an open session, got a closed one"):
        session.encode([[1, 2]])


def test_a_dictionary_is_no_list_of_texts() -> None:
    with Session(small_bert("BertModel"), device="cpu") as session:
        for call in (session.encode, lambda inputs: list(session.stream(inputs))):
            with pytest.raises(TypeError, match="expected texts, pairs of texts or lists of ids, got dict"):
                call({"input_ids": [[1, 2]]})


def test_a_stream_of_one_input_has_one_result() -> None:
    with Session(small_bert("BertModel"), device="cpu") as session:
        (found,) = session.stream([1, 2, 3])
        assert np.array_equal(found, session.encode([1, 2, 3]))


@pytest.mark.parametrize("given", [torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2).bfloat16()], ids=str)
def test_tensors_of_floats_are_refused(given: torch.Tensor) -> None:
    with (
        Session(small_bert("BertModel"), device="cpu") as session,
        pytest.raises(TypeError, match="expected texts, pairs of texts or lists of ids, got tensor"),
    ):
        session.encode([given])


@pytest.mark.parametrize("value", ["x", -1, 0.5])
def test_a_wrong_number_of_graphs_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"max_graphs: expected a number from 0 on, got"):
        Session(small_bert("BertModel"), device="cpu", max_graphs=value)


def test_the_warning_of_a_stream_is_about_its_own_texts(bert_directory: Path) -> None:
    long, short = "peace and commerce " * 20, "Peace."
    with Session(bert_directory, settings=EmbedSettings(max_length=8)) as session:
        with pytest.warns(UserWarning, match="^Session: a text of "):
            session.encode([long])
        with pytest.warns(UserWarning, match=r"^1 of 2 texts have more than 8 tokens and are truncated"):
            list(session.stream([long, short]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(session.stream([short]))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", [lambda model: model.to(torch.bfloat16), lambda model: model.double()])
def test_a_model_that_is_cast_leaves_the_session_as_it_is(sentences: Ids, move: Any) -> None:
    model = small_bert().eval()
    with Session(model) as session:
        expected = session.encode(sentences[:4])
        move(model)
        assert np.array_equal(session.encode(sentences[:4]), expected)
        assert {each.dtype for each in session.network.model.parameters()} == {torch.float32}


def test_a_session_shares_the_memory_of_the_model(sentences: Ids) -> None:
    """No second copy of the weights, also not of tied ones; changes in place are changes of both."""
    model = small_bert("BertForMaskedLM").eval()
    with Session(model) as session:
        own = session.network.model
        given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = {**dict(own.named_parameters()), **dict(own.named_buffers())}
        assert found.keys() == given.keys()
        for name, tensor in given.items():
            assert found[name] is not tensor
            assert found[name].data_ptr() == tensor.data_ptr()
            assert not found[name].requires_grad
        assert len({id(each) for each in own.parameters()}) == len({id(each) for each in model.parameters()})
        before = session.encode(sentences[:2])
        model.load_state_dict({name: 1.5 * each for name, each in model.state_dict().items()})
        after = session.encode(sentences[:2])
        assert session.take_weights(model)
        assert np.array_equal(session.encode(sentences[:2]), after)
        assert not np.array_equal(after, before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_are_taken_from_a_model_that_was_cast(sentences: Ids) -> None:
    """It has other memory then."""
    model = small_bert().eval()
    with Session(model) as session:
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        assert session.take_weights(model)
        found = session.encode(sentences[:3])
    with Session(model.float()) as session:
        assert np.array_equal(session.encode(sentences[:3]), found)


@pytest.mark.parametrize("options", [{}, {"precision": "int8"}])
def test_a_session_is_freed_without_the_collector(sentences: Ids, options: dict[str, Any]) -> None:
    """A collection may run at any time, also in a capture."""
    gc.collect()
    gc.disable()
    try:
        session = Session(small_bert(), **options)
        session.encode(sentences[:3])
        session.submit(sentences[0]).result(30)
        with pytest.raises(ValueError, match="expected ids from 0"):
            session.submit([10**6])
        session.close()  # its thread releases the request
        gone = [weakref.ref(each) for each in (session, session._dispatcher, session.network, session.network.model)]
        del session
        assert [each() for each in gone] == [None] * 4
    finally:
        gc.enable()


def test_sequences_of_a_request_have_one_future(bert: Any, sentences: Ids) -> None:
    from fasttfm.inference.formats import Tokens

    with Session(bert, max_tokens=300) as session:
        launched: list[tuple[list[Any], int, int]] = []
        session.on_launch = lambda *batch: launched.append(batch)
        parts = [sentences[:5], sentences[5:6], sentences[6:20]]
        outputs = ("vectors", "logits", "states")
        futures = [
            session.submit_sequences([Tokens(ids, []) for ids in part], output=output, tag=output)
            for part, output in zip(parts, outputs, strict=True)
        ]
        for part, output, future in zip(parts, outputs, futures, strict=True):
            expected = session.encode(part, output=output)
            for found, row in zip(future.result(60), expected, strict=True):
                np.testing.assert_allclose(found, row, atol=1e-5)
        assert [tag for tags, _, _ in launched for tag in tags] == list(outputs)
        assert sum(count for _, count, _ in launched) == 20
        assert sum(tokens for _, _, tokens in launched) == sum(map(len, sentences[:20]))
