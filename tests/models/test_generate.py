"""``generate`` against transformers and against models without a cache, and its sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import models
from fasttfm.generate import CachedDecoder, Sampling, generate, stream
from fasttfm.kernels.sample_tokens.reference import kept_logits
from fasttfm.nn import PackedBatch
from fasttfm.ops import sample_tokens
from fasttfm.ops.layers import stack
from fasttfm.ops.layers.support import missing_cpu
from fasttfm.testing import compare
from fasttfm.testing.tolerance import OUTPUT_FACTOR

B, S, V, PAD = 4, 7, 61, 60
LENGTHS = [4, 7, 1, 6]
SIZES = {"vocab_size": V, "n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": 40, "pad_token_id": PAD}
FAMILIES = {"GPT2": {}, "OpenAIGPT": {}, "GPT3": {"local_window": 4}}
LEFT_PADDED = torch.arange(S) >= S - torch.tensor(LENGTHS)[:, None]  # padding before the prompts
RIGHT_PADDED = torch.arange(S) < torch.tensor(LENGTHS)[:, None]
PROMPTS = torch.randint(5, PAD, (B, S), generator=torch.Generator().manual_seed(0))


def model(family: str = "GPT2", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(models, f"{family}Config")(**{**SIZES, **FAMILIES[family], "eos_token_id": 3, **changes})
    made = getattr(models, f"{family}LMHeadModel")(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def naive(module: Any, prompt: Tensor, new: int, ends: list[int]) -> Tensor:
    """The most likely continuation of one prompt, computed without a cache."""
    ids = prompt
    for _ in range(new):
        token = module(ids[None]).logits[0, -1].argmax()
        ids = torch.cat([ids, token[None]])
        if token in ends:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_changes_nothing(family: str) -> None:
    """The hidden state of every step, for sequences of different lengths, against those of the whole sequences."""
    module = model(family).transformer
    decoder = CachedDecoder(module, S + 5)
    batch = PackedBatch.of(PROMPTS, lengths=LENGTHS)
    following = torch.randint(5, PAD, (B, 5), generator=torch.Generator().manual_seed(1))
    states = [decoder.read(batch.pack(PROMPTS), batch)] + [decoder.step(following[:, i]) for i in range(5)]
    found = torch.stack(states, 1)
    for row, length in enumerate(LENGTHS):
        whole = torch.cat([PROMPTS[row, :length], following[row]])[None]
        with torch.no_grad():
            expected = module(whole).last_hidden_state[0, length - 1 :]
            exact = module.double()(whole).last_hidden_state[0, length - 1 :]
            module.float()
        comparison = compare("states", found[row], expected, exact, OUTPUT_FACTOR)
        assert comparison.ok, str(comparison)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["left", "right", "lengths"])
def test_greedy_continuations_of_different_prompts(family: str, layout: str) -> None:
    module = model(family)
    ends = sorted({int(naive(module, PROMPTS[0, : LENGTHS[0]], 4, [])[2]), 3})  # one sequence ends early
    mask = LEFT_PADDED if layout == "left" else RIGHT_PADDED
    options = {"lengths": LENGTHS} if layout == "lengths" else {"attention_mask": mask}
    ids = PROMPTS.where(mask, PAD)
    found = generate(module, ids, **options, max_new_tokens=12, eos_token_id=ends)
    assert torch.equal(found[:, :S], ids)
    expected = [naive(module, ids[row][mask[row]], 12, ends) for row in range(B)]
    assert min(map(len, expected)) <= 3
    padded = torch.nn.utils.rnn.pad_sequence(expected, batch_first=True, padding_value=PAD)
    assert torch.equal(found[:, S:], padded)


def decoders() -> dict[str, Any]:
    """Models that the core reads prompts of, by family, and one that it does not."""
    sizes = {"vocab_size": V, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 40}
    torch.manual_seed(0)
    made: dict[str, Any] = {family: model(family).transformer for family in FAMILIES}
    for family in ("Llama", "Qwen3", "Gemma3Text"):
        config = getattr(models, f"{family}Config")(**sizes, **heads, pad_token_id=PAD)
        made[family] = getattr(models, f"{family}Model")(config).eval()
    return made


@pytest.mark.skipif(missing_cpu() is not None, reason=f"CPU: {missing_cpu()}")
@pytest.mark.parametrize("family", [*FAMILIES, "Llama", "Qwen3", "Gemma3Text"])
def test_the_core_reads_prompts_and_runs_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states and the cache are those of the layers' ops, which run Gemma 3, whose blocks have norms of their
    own."""
    module = decoders()[family]
    batch, slots = PackedBatch.of(PROMPTS, lengths=LENGTHS), torch.tensor([2, 0, 4, 1])
    found, plain, exact = (CachedDecoder(each, S + 5, 5) for each in (module, module, module))
    by_core: list[Any] = []
    run = stack.run_cached
    monkeypatch.setattr(stack, "run_cached", lambda *call: by_core.append(run(*call)) or by_core[-1])
    active = torch.arange(5) != 3  # a slot without a sequence

    def states_of(decoder: CachedDecoder) -> Tensor:
        read = decoder.read(batch.pack(PROMPTS), batch, slots)
        stepped = [decoder.step(PROMPTS[0, :5] + number, active)[active] for number in range(2)]
        return torch.cat([read, *stepped])

    states = [states_of(found)]
    assert [each is not None for each in by_core] == ([] if family == "Gemma3Text" else [True] * 3)
    monkeypatch.setattr(CachedDecoder, "_described", lambda *_: None)
    states.append(states_of(plain))
    module.double()
    states.append(states_of(exact))
    for name, tensors in (
        ("states", states),
        ("keys", [each.keys for each in (found, plain, exact)]),
        ("values", [each.values for each in (found, plain, exact)]),
    ):
        comparison = compare(name, *tensors, OUTPUT_FACTOR)
        assert comparison.ok, str(comparison)
    assert found.lengths.tolist() == [2 + LENGTHS[1], 2 + LENGTHS[3], 2 + LENGTHS[0], 0, 2 + LENGTHS[2]]
    assert not found.keys[:, 3, :, 1:].any()


def test_the_same_tokens_as_transformers(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    ours = model()
    ours.save_pretrained(tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    ids = PROMPTS.where(LEFT_PADDED, PAD)
    ends = [3, int(theirs.generate(ids, attention_mask=LEFT_PADDED.int(), max_new_tokens=5, do_sample=False)[1, S + 3])]
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ends}
    expected = theirs.generate(ids, attention_mask=LEFT_PADDED.int(), **options, pad_token_id=PAD)
    assert torch.equal(generate(ours, ids, LEFT_PADDED, **options), expected)


def test_the_length_is_that_of_the_longest_sequence() -> None:
    module = model()
    first = generate(module, PROMPTS[:1], max_new_tokens=20, eos_token_id=[])[0, S:]
    end = int(first[1])
    found = generate(module, PROMPTS[:1], max_new_tokens=20, eos_token_id=end)
    assert found[0, S:].tolist() == first[: first.tolist().index(end) + 1].tolist()
    assert generate(module, PROMPTS, max_new_tokens=0) is PROMPTS


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"temperature": 0.7}, [("TemperatureLogitsWarper", 0.7)]),
        ({"top_k": 5}, [("TopKLogitsWarper", 5)]),
        ({"top_p": 0.6}, [("TopPLogitsWarper", 0.6)]),
        ({"top_k": 200}, []),
        (
            {"temperature": 1.3, "top_k": 9, "top_p": 0.8},
            [("TemperatureLogitsWarper", 1.3), ("TopKLogitsWarper", 9), ("TopPLogitsWarper", 0.8)],
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_logits_are_filtered_as_by_transformers(options: dict[str, Any], warpers: list[tuple[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(0)) * 2
    expected = logits
    for name, value in warpers:
        expected = getattr(transformers, name)(value)(PROMPTS, expected)
    _, *row = Sampling(do_sample=True, **options).row(seed=0)
    types = (torch.float32, torch.int32, torch.float32)
    columns = (torch.full((50,), value, dtype=dtype) for value, dtype in zip(row, types, strict=True))
    assert torch.equal(kept_logits(logits, *columns), expected)


def test_tokens_are_sampled_with_their_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5])
    draws = 20_000
    options = (torch.full((draws,), 0.8), torch.full((draws,), 4, dtype=torch.int32), torch.ones(draws))
    seeds = torch.arange(draws) * 2**33
    found = sample_tokens(logits.expand(draws, -1), seeds, seeds.int(), *options).bincount(minlength=5) / draws
    expected = torch.tensor([0.0, 1.0, 2.0, float("-inf"), 1.5]).div(0.8).softmax(-1)
    deviations = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() <= 5 * deviations).all()


def test_a_generator_reproduces_samples() -> None:
    module = model()

    def run(seed: int) -> Tensor:
        options = {"do_sample": True, "top_p": 0.9, "generator": torch.Generator().manual_seed(seed)}
        return generate(module, PROMPTS, max_new_tokens=10, **options)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert torch.equal(generate(module, PROMPTS, do_sample=True, top_k=1), generate(module, PROMPTS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 34}, r"max_new_tokens: expected no more than 40 tokens with the prompt, got 34 after 7"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected at least 0, got -1"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"top_k": 0}, "top_k: expected None or a number of tokens, at least 1, got 0"),
        ({"top_p": 1.5}, r"top_p: expected None or a probability in \(0, 1\], got 1.5"),
        ({"lengths": [7, 7, 0, 7]}, "input_ids: expected prompts of at least one token, got an empty one"),
    ],
)
def test_wrong_calls_are_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model(), PROMPTS, **options)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ValueError, match="expected evaluation mode"):
        generate(model().train(), PROMPTS)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 1.5, "top_k": 20}])
def test_a_stream_yields_the_tokens_of_generate(sampling: dict[str, Any]) -> None:
    module = model()
    prompt = PROMPTS[1]
    ended = int(naive(module, prompt, 5, [])[3])
    for ends in ([], [ended]):
        options = {"max_new_tokens": 12, "eos_token_id": ends, **sampling}
        torch.manual_seed(2)
        expected = generate(module, prompt[None], **options)[0, S:].tolist()
        torch.manual_seed(2)
        assert list(stream(module, prompt, **options)) == expected
    assert sampling or len(expected) <= 4
    assert list(stream(module, prompt, max_new_tokens=0)) == []
    with pytest.raises(ValueError, match="max_new_tokens: expected no more than"):
        stream(module, prompt, max_new_tokens=1000)
    with pytest.raises(
        ValueError, match=r"input_ids: expected one prompt, of shape \[S\] or \[1, S\], got shape \(4, "
    ):
        stream(module, PROMPTS)


def test_a_stream_computes_tokens_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    module = model()
    calls: list[int] = []
    step = CachedDecoder.step
    monkeypatch.setattr(CachedDecoder, "step", lambda self, *given: calls.append(1) or step(self, *given))
    tokens = stream(module, PROMPTS[1], max_new_tokens=12, eos_token_id=[])
    next(tokens)
    assert not calls
    next(tokens)
    assert len(calls) == 1
