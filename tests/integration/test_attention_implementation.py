"""``attn_implementation="fasttfm"`` against transformers' own implementations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_parity import PAD, SIZES, theirs_of
from patched_models import IDS, LANGUAGE_MODELS, MASKS, B, S, batch, check_patched, pair, with_dropout
from torch import Tensor

import fasttfm
from fasttfm import ops
from fasttfm.testing import compare
from fasttfm.testing.tolerance import OUTPUT_FACTOR

transformers = pytest.importorskip("transformers")
fasttfm.register_attention()

PROMPTS = IDS[:4, :7]
LEFT = torch.arange(7) >= torch.tensor([0, 3, 6, 1])[:, None]  # the mask of left-padded prompts


def twins(name: str, implementation: str = "fasttfm", **changes: Any) -> tuple[Any, Any]:
    theirs = with_dropout(theirs_of(name, attn_implementation="eager", **changes), 0.0)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(implementation)
    assert theirs.config._attn_implementation == "eager"
    return ours, theirs


def llama() -> Any:
    """A decoder that fasttfm does not patch, with one kv head for two query heads."""
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
        pad_token_id=PAD,
    )
    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(config).eval()


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["BertModel", "GPT2LMHeadModel"])
def test_masks(name: str, mask: str) -> None:
    ours, theirs = twins(name)
    given = {key: value for key, value in batch(name, mask).items() if key in ("input_ids", "attention_mask")}
    tokens = MASKS[mask].bool()

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(**given)[0][tokens]}

    check_patched(ours, theirs, call)


@pytest.mark.parametrize("make", [twins, pair])
def test_scores_of_another_scale(make: Any) -> None:
    ours, theirs = make("GPT2Model", scale_attn_by_inverse_layer_idx=True)
    check_patched(ours, theirs, lambda module, _: {"states": module(IDS).last_hidden_state})


@pytest.mark.parametrize("name", LANGUAGE_MODELS[1:-1])
def test_losses(name: str) -> None:
    ours, theirs = (module.train() for module in twins(name))
    given = batch(name)
    check_patched(ours, theirs, lambda module, _: {"loss": module(**given).loss})


def test_fasttfm_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda *args, **kwargs: calls.append(kwargs) or attention(*args, **kwargs))
    ours, _ = twins("BertModel")
    ours(IDS)
    assert len(calls) == 2
    assert "lengths_k" not in calls[0]
    ours(IDS, attention_mask=MASKS["right"])
    assert calls[2]["lengths_k"].tolist() == MASKS["right"].sum(1).tolist()
    ours(IDS, attention_mask=MASKS["full"])  # a mask without padding
    assert "lengths_k" not in calls[4]


def test_attention_weights_are_returned_if_requested() -> None:
    ours, theirs = twins("BertModel")
    given = {"attention_mask": MASKS["right"], "output_attentions": True}

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"weights {layer}": weights for layer, weights in enumerate(module(IDS, **given).attentions)}

    check_patched(ours, theirs, call)


def test_dropout() -> None:
    ours, _ = twins("BertModel")
    for module in ours.train().modules():
        if type(module).__name__ == "BertSelfAttention":
            module.dropout.p = 0.5

    def states(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(IDS).last_hidden_state

    assert torch.equal(states(0), states(0))
    assert not torch.equal(states(0), states(1))
    ours.eval()
    assert torch.equal(states(0), states(1))


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_is_not_supported_is_refused(name: str) -> None:
    ours, _ = twins("BertModel")
    with pytest.raises(ValueError, match=name):
        ours(IDS, **{name: torch.ones(1)})


# ---- decoders --------------------------------------------------------------------------------------------------------


def model_pairs() -> dict[str, Any]:
    def own() -> tuple[Any, Any]:
        theirs = llama()
        ours = copy.deepcopy(theirs)
        ours.set_attn_implementation("fasttfm")
        return ours, theirs

    return {
        "GPT-2": lambda: twins("GPT2LMHeadModel"),
        "GPT-2, patched": lambda: pair("GPT2LMHeadModel"),
        "BERT": lambda: twins("BertLMHeadModel", is_decoder=True),
        "BERT, patched": lambda: pair("BertLMHeadModel", is_decoder=True),
        "Llama": own,
    }


DECODERS = model_pairs()


def check(found: Tensor, theirs: Any, run: Any) -> None:
    """``found`` against ``run`` of transformers' model, by the tolerance rule."""
    exact = copy.deepcopy(theirs).double()
    exact.set_attn_implementation("sdpa")  # eager rounds Llama's weights to fp32
    comparison = compare("result", found, run(theirs), run(exact), OUTPUT_FACTOR)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("decoder", DECODERS)
def test_generation_with_a_cache_and_padding_in_front(decoder: str) -> None:
    ours, theirs = DECODERS[decoder]()
    options = {"attention_mask": LEFT.long(), "max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    options |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    found = ours.generate(PROMPTS, **options)
    assert torch.equal(found.sequences, theirs.generate(PROMPTS, **options).sequences)
    check(torch.stack(found.logits), theirs, lambda module: torch.stack(module.generate(PROMPTS, **options).logits))


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_sequence_in_parts(decoder: str) -> None:
    """With a cache, several tokens at a time, and padding between them."""
    ours, theirs = DECODERS[decoder]()
    tokens = MASKS["right"][:4].bool()
    tokens[:, 9:] = torch.tensor([[1, 1, 1, 0, 1, 1, 1]]).bool()
    for padded in (False, True):
        cache, parts = None, []
        for part in (slice(0, 9), slice(9, 10), slice(10, 16)):
            mask = tokens[:, : part.stop].long() if padded else None
            output = ours(IDS[:4, part], attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        kept = tokens if padded else torch.ones_like(tokens)
        whole = {"attention_mask": kept.long()}
        check(torch.cat(parts, 1)[kept], theirs, lambda module: module(IDS[:4], **whole).logits[kept])  # noqa: B023


@pytest.mark.parametrize("decoder", ["GPT-2", "GPT-2, patched", "Llama"])
def test_a_static_cache(decoder: str) -> None:
    ours, theirs = DECODERS[decoder]()
    options = {"attention_mask": LEFT.long(), "max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
    options["eos_token_id"] = None
    found = ours.generate(PROMPTS, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(found, theirs.generate(PROMPTS, **options))


@pytest.mark.parametrize("decoder", ["GPT-2", "GPT-2, patched"])
def test_documents_packed_into_one_row(decoder: str) -> None:
    """transformers detects them by position ids that restart."""
    ours, theirs = DECODERS[decoder]()
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]

    def run(module: Any) -> Tensor:
        return module(IDS[:1], position_ids=positions).logits

    check(run(ours), theirs, run)
    assert not torch.allclose(run(ours)[:, -1], ours(IDS[:1]).logits[:, -1])


def test_packed_sequences_by_their_boundaries() -> None:
    """transformers' arguments for attention over packed tokens."""
    ours, theirs = twins("BertModel")
    boundaries = torch.tensor([0, 6, 16], dtype=torch.int32)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    packed = {f"cu_seq_lens_{side}": boundaries for side in "qk"} | {f"max_length_{side}": 10 for side in "qk"}
    found = ours(IDS[:1], position_ids=positions, **packed).last_hidden_state
    check(found[:, :6], theirs, lambda module: module(IDS[:1, :6]).last_hidden_state)
    check(found[:, 6:], theirs, lambda module: module(IDS[:1, 6:]).last_hidden_state)


@pytest.mark.parametrize("make", [twins, pair])
def test_cross_attention_under_a_mask(make: Any) -> None:
    ours, theirs = make("BertLMHeadModel", is_decoder=True, add_cross_attention=True)
    states = torch.randn(B, S, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))

    def run(module: Any) -> Tensor:
        given = {"encoder_hidden_states": states.to(module.dtype), "encoder_attention_mask": MASKS["anywhere"]}
        return module(IDS[:, :5], **given).logits

    check(run(ours), theirs, run)
