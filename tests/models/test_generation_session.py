"""``GenerationSession``: a sequence does not depend on the others that start and end meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fasttfm import models
from fasttfm.generate import CachedDecoder, GenerationSession, generate, stream
from fasttfm.ops.layers import few_rows

SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 40}
PROMPTS = [[5, 9, 11], [7], [20, 21, 22, 23, 24, 25, 26], [8, 8], [30, 31, 32, 33], [12]]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    made = models.GPT2LMHeadModel(models.GPT2Config(**SIZES, eos_token_id=3)).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def alone(model: Any, prompt: list[int], **options: Any) -> list[int]:
    return GenerationSession(model, max_batch=1).submit(prompt, **options).result()


OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 9},
    {"max_new_tokens": 4, "do_sample": True, "seed": 7},
    {"max_new_tokens": 12, "do_sample": True, "temperature": 1.5, "top_k": 7, "seed": -1},
    {"max_new_tokens": 1},
    {"max_new_tokens": 15, "do_sample": True, "top_p": 0.8, "seed": 2**40},
    {"max_new_tokens": 6, "eos_token_id": []},
]


@pytest.mark.parametrize("max_batch", [1, 2, 4])
def test_sequences_are_those_of_separate_sessions(model: Any, max_batch: int) -> None:
    """More sequences than slots, of different lengths and options: they wait, finish and move to other slots."""
    session = GenerationSession(model, max_batch=max_batch)
    running = [session.submit(prompt, **options) for prompt, options in zip(PROMPTS, OPTIONS, strict=True)]
    late = None
    for index, generation in enumerate(running):
        assert generation.result() == alone(model, PROMPTS[index], **OPTIONS[index])
        if index == 2:
            late = session.submit(PROMPTS[0], **OPTIONS[0])
    assert late is not None
    assert late.result() == running[0].result()


def test_greedy_tokens_are_those_of_whole_sequences(model: Any) -> None:
    ids = list(PROMPTS[2])
    for _ in range(10):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert alone(model, PROMPTS[2], max_new_tokens=10, eos_token_id=[]) == ids[len(PROMPTS[2]) :]


def test_a_seed_determines_the_samples(model: Any) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": []}
    first = alone(model, PROMPTS[0], seed=1, **options)
    assert alone(model, PROMPTS[0], seed=1, **options) == first
    assert alone(model, PROMPTS[0], seed=2, **options) != first


def test_tokens_are_streamed_while_others_continue(model: Any) -> None:
    session = GenerationSession(model, max_batch=2)
    streamed = session.submit(PROMPTS[0], max_new_tokens=8, eos_token_id=[])
    other = session.submit(PROMPTS[1], max_new_tokens=8, eos_token_id=[])
    tokens = iter(streamed)
    next(tokens)
    assert len(streamed.tokens) == len(other.tokens) == 1
    next(tokens)
    assert len(streamed.tokens) == len(other.tokens) == 2
    assert [*streamed.tokens, *tokens] == alone(model, PROMPTS[0], max_new_tokens=8, eos_token_id=[])
    assert other.done


def test_a_finished_sequence_frees_its_slot(model: Any) -> None:
    whole = alone(model, PROMPTS[4], max_new_tokens=20, eos_token_id=[])
    end = whole[2]
    session = GenerationSession(model, max_batch=1)
    first, second = (session.submit(PROMPTS[4], max_new_tokens=20, eos_token_id=[end, 60]) for _ in range(2))
    assert first.result() == whole[: whole.index(end) + 1]
    assert not second.done
    assert second.result() == first.result()


def test_a_cancelled_sequence_frees_its_slot(model: Any) -> None:
    session = GenerationSession(model, max_batch=1)
    first, second, third = (session.submit(prompt, max_new_tokens=9, eos_token_id=[]) for prompt in PROMPTS[:3])
    next(iter(first))
    first.cancel()
    third.cancel()
    assert len(first.result()) == 1
    assert third.result() == []
    assert second.result() == alone(model, PROMPTS[1], max_new_tokens=9, eos_token_id=[])
    second.cancel()
    assert len(second.tokens) == 9


def test_threads_may_submit_and_wait(model: Any) -> None:
    session = GenerationSession(model, max_batch=3)
    found: dict[int, list[int]] = {}

    def run(index: int) -> None:
        found[index] = session.submit(PROMPTS[index], **OPTIONS[index]).result()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: alone(model, PROMPTS[index], **OPTIONS[index]) for index in range(len(PROMPTS))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch: expected at least 1, got 0"),
        ({"max_length": 41}, "max_length: expected from 1 to the model's 40 positions, got 41"),
        ({"graphs": True}, "graphs: expected modules without hooks and wrappers on a GPU, got others"),
    ],
)
def test_wrong_session_options_are_reported(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationSession(model, **options)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "input_ids: expected prompts of at least one token"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens: expected at least 0, got -1"),
        ([1, 2], {"max_new_tokens": 9}, "expected no more than 10 tokens with the prompt, got 9 after 2"),
        ([1], {"max_new_tokens": 1, "eos_token_id": list(range(9))}, "eos_token_id: expected at most 8 tokens, got 9"),
        ([1], {"max_new_tokens": 1, "top_k": 0}, "top_k: expected None or a number of tokens"),
        ([1, 61], {}, "input_ids: expected ids from 0 to 60, got 1 to 61"),
        ([-1], {}, "input_ids: expected ids from 0 to 60, got -1 to -1"),
        ([1.5], {}, r"input_ids: expected a list of ids, got \[1.5\]"),
        ([[1, 2]], {}, r"input_ids: expected a list of ids, got \[\[1, 2\]\]"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens: expected at least 0, got 2.5"),
        ([1], {"max_new_tokens": 1, "eos_token_id": "a"}, "eos_token_id: expected one token or several, got 'a'"),
        ([1], {"max_new_tokens": 1, "do_sample": True, "seed": 2**63}, "seed: expected a whole number"),
        ([1], {"max_new_tokens": 1, "temperature": "hot"}, "temperature: expected a number above 0, got 'hot'"),
    ],
)
def test_wrong_prompts_are_reported(model: Any, prompt: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationSession(model, max_length=10).submit(prompt, **options)


@pytest.mark.parametrize("ends", [np.int64(3), torch.tensor(3), torch.tensor([3, 4])])
def test_ends_may_be_arrays(model: Any, ends: Any) -> None:
    assert alone(model, PROMPTS[2], eos_token_id=ends) == alone(model, PROMPTS[2], eos_token_id=np.ravel(ends).tolist())


def test_a_failed_step_ends_those_that_ran_in_it(model: Any) -> None:
    """They raise instead of blocking forever; those that are submitted later are not affected."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("unlucky")

    expected = alone(model, PROMPTS[0], max_new_tokens=9)
    session = GenerationSession(model)
    first, second = (session.submit(prompt, max_new_tokens=9) for prompt in PROMPTS[:2])
    hook = model.transformer.encoder.layers[0].qkv.register_forward_hook(fail)
    try:
        with pytest.raises(ArithmeticError, match="unlucky"):
            first.result()
        for each in (first, second):
            with pytest.raises(RuntimeError, match="a step of the session has failed: ArithmeticError"):
                each.result()
        with pytest.raises(RuntimeError, match="a step of the session has failed"):
            list(second)
        assert session.submit(PROMPTS[0], max_new_tokens=9).result() == expected
    finally:
        hook.remove()


def test_the_last_tokens_come_with_the_end(model: Any) -> None:
    """Another thread may set the end between two reads of an iteration."""
    session = GenerationSession(model)
    generation = session.submit(PROMPTS[0], max_new_tokens=2, eos_token_id=[])

    looks: list[int] = []

    class Tokens(list[int]):
        def __len__(self) -> int:
            before = super().__len__()
            looks.append(before)
            if len(looks) == 1:
                session._advance(8)  # after the length is read
            return before

    generation.tokens = Tokens()
    assert list(generation) == alone(model, PROMPTS[0], max_new_tokens=2, eos_token_id=[])


def test_a_model_that_is_trained_meanwhile_is_refused(model: Any) -> None:
    session = GenerationSession(model)
    waiting = session.submit(PROMPTS[0])
    model.train()
    try:
        with pytest.raises(ValueError, match="expected evaluation mode"):
            session.submit(PROMPTS[0])
        with pytest.raises(ValueError, match="expected evaluation mode"):
            waiting.result()
    finally:
        model.eval()


def test_a_low_temperature_takes_the_most_likely(model: Any) -> None:
    options = {"max_new_tokens": 6, "eos_token_id": []}
    assert alone(model, [5], do_sample=True, temperature=1e-44, **options) == alone(model, [5], **options)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}])
def test_a_model_that_is_not_finite_is_reported(options: dict[str, Any]) -> None:
    broken = models.GPT2LMHeadModel(models.GPT2Config(**SIZES)).eval()
    with torch.no_grad():
        broken.transformer.encoder.layers[0].up.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="logits: expected numbers, got NaN"):
        generate(broken, torch.tensor([[5, 9]]), **options)


def test_generate_and_stream_are_sessions(model: Any) -> None:
    prompt = torch.tensor([PROMPTS[2]])
    expected = alone(model, PROMPTS[2], max_new_tokens=10)
    assert generate(model, prompt, max_new_tokens=10)[0, len(PROMPTS[2]) :].tolist() == expected
    assert list(stream(model, prompt, max_new_tokens=10)) == expected


def _transpose_storage(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t().contiguous().t()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "cast": lambda model: model.half(),
    "new storage": lambda model: setattr(model.transformer.encoder.layers[1].down.weight, "data", torch.ones(32, 128)),
    "other strides": lambda model: _transpose_storage(model.transformer.encoder.layers[0].out.weight),
    "another parameter": lambda model: setattr(
        model.transformer.encoder.layers[1].up, "weight", nn.Parameter(torch.ones(128, 32))
    ),
    "another module": lambda model: setattr(model.transformer.encoder.layers[0], "norm1", nn.LayerNorm(32)),
    "no bias": lambda model: setattr(model.transformer.encoder.final_norm, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_steps_validate_parameters_only_if_they_have_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for few rows read parameters by address, so that no step may use what was found for others."""
    model = models.GPT2LMHeadModel(models.GPT2Config(**SIZES)).eval()
    decoder, ids = CachedDecoder(model.transformer, 40, 3, fused=True), torch.zeros(3, dtype=torch.int64)
    validated: list[list[Any]] = []

    def refuse(rows: int, device: torch.device, parameters: list[Any]) -> str:
        validated.append(parameters)
        return f"call {len(validated)} with {rows} rows"

    monkeypatch.setattr(few_rows, "refuse", refuse)
    assert [decoder._refuse_few_rows(ids) for _ in range(3)] == ["call 1 with 3 rows"] * 3
    with torch.no_grad():
        model.transformer.encoder.layers[0].up.weight.mul_(2)  # the kernels read values when they run
    assert decoder._refuse_few_rows(ids) == "call 1 with 3 rows"
    CHANGES[change](model)
    assert [decoder._refuse_few_rows(ids) for _ in range(2)] == ["call 2 with 3 rows"] * 2
    assert decoder._refuse_few_rows(ids[:2]) == "call 3 with 2 rows"
    used = [each for name, each in model.transformer.named_parameters() if not name.startswith("embeddings")]
    assert {id(each) for each in validated[-1]} == {id(each) for each in used}


def test_a_model_that_is_cast_meanwhile_is_refused() -> None:
    """Its cache has the dtype of the first parameters; with them again, the sequence continues."""
    torch.manual_seed(0)
    config = models.GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    module = models.GPT2LMHeadModel(config).eval()
    expected = alone(module, PROMPTS[0], max_new_tokens=6, eos_token_id=[])
    session = GenerationSession(module)
    sequence = session.submit(PROMPTS[0], max_new_tokens=6, eos_token_id=[])
    assert next(iter(sequence)) == expected[0]
    module.double()
    message = "model: expected parameters in float32 on cpu as at first, got float64 on cpu"
    for call in (lambda: session.submit(PROMPTS[1]), sequence.result):
        with pytest.raises(ValueError, match=message):
            call()
    module.float()
    assert sequence.result() == expected
