"""Sequences of one and two texts, batches, the special tokens of GPT-1, and learning rates by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.data.tokenizer_training import train_tokenizer
from fasttfm.inference.batches import prefetch
from fasttfm.inference.opening import base_of, family_of, model_class
from fasttfm.models.families import FAMILIES, longest_input
from fasttfm.models.family import Head
from fasttfm.models.openai_gpt import task_sequence
from fasttfm.tasks.finetuning import FinetuneSettings, format_of, shuffled_steps
from fasttfm.tasks.gpt_inputs import TASK_TOKENS, grow_vocabulary, with_task_tokens
from fasttfm.tasks.inputs import Feature, Format, Tokens, by_budget, collate
from fasttfm.tasks.rates import Rates, default_rate, freeze
from fasttfm.tasks.registry import TASKS

BERT = Format([1], [2], [2], max_length=10)
SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 40}


def bert(**changes: Any) -> models.BertForSequenceClassification:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return models.BertForSequenceClassification(models.BertConfig(**sizes, intermediate_size=32, **changes))


# ---- sequences -------------------------------------------------------------------------------------------------------


def test_one_text() -> None:
    assert BERT.one([5, 6]) == Tokens([1, 5, 6, 2], [0, 0, 0, 0])
    assert BERT.one(list(range(20))).ids == [1, *range(8), 2]


def test_two_texts() -> None:
    assert BERT.two([5, 6], [7]) == Tokens([1, 5, 6, 2, 7, 2], [0, 0, 0, 0, 1, 1])
    assert Format([1], [2, 2], [2], 10, segments=False).two([5], [7]) == Tokens([1, 5, 2, 2, 7, 2], [0] * 6)


@pytest.mark.parametrize("first", range(12))
@pytest.mark.parametrize("second", [0, 3, 4, 9])
def test_the_longer_text_loses_tokens(first: int, second: int) -> None:
    """Against a loop that removes one token at a time."""
    a, b = list(range(100, 100 + first)), list(range(200, 200 + second))
    expected_a, expected_b = list(a), list(b)
    while len(expected_a) + len(expected_b) > BERT.room:
        (expected_a if len(expected_a) >= len(expected_b) else expected_b).pop()
    assert BERT.two(a, b).ids == [1, *expected_a, 2, *expected_b, 2]


def test_batches_are_packed() -> None:
    features = [Feature(0, [BERT.one([5, 6])]), Feature(1, [BERT.two([7], [8]), BERT.two([7], [9])])]
    batch = collate(features)
    assert batch.input_ids.tolist() == [1, 5, 6, 2, 1, 7, 2, 8, 2, 1, 7, 2, 9, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 9, 14]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 64
    assert batch.token_type_ids is not None
    assert batch.token_type_ids.tolist() == [0] * 4 + [0, 0, 0, 1, 1] * 2
    assert "token_type_ids" not in collate(features, segments=False).inputs()


def test_one_batch_is_prefetched() -> None:
    begun: list[int] = []
    ahead = prefetch(range(5), lambda item: begun.append(item) or 10 // (4 - item))  # type: ignore[func-returns-value]
    assert next(ahead) == 2
    assert begun in ([0], [0, 1])
    assert [next(ahead), next(ahead), next(ahead)] == [3, 5, 10]
    with pytest.raises(ZeroDivisionError):
        next(ahead)
    assert list(prefetch([], len)) == []


def test_a_budget_of_tokens_is_kept() -> None:
    features = [Feature(index, [Tokens([0] * size, [0] * size)]) for index, size in enumerate([3, 4, 9, 2, 2, 2])]
    groups = list(by_budget(features, 7))
    assert [[feature.example for feature in group] for group in groups] == [[0, 1], [2], [3, 4, 5]]


# ---- families --------------------------------------------------------------------------------------------------------


def test_every_encoder_has_every_head() -> None:
    # transformers has only some of their heads
    some = ("EuroBERT", "NomicBERT", "GTE", "jina-embeddings-v3", "T5", "mT5")
    encoders = [family for family in FAMILIES.values() if not family.causal and family.tokenizer is not None]
    encoders = [family for family in encoders if family.title not in some]
    assert len(encoders) == 12
    for family in encoders:
        for head in (*(task.head for task in TASKS.values() if task.reads == "text"), Head.MASKED_LM, Head.NONE):
            if head is Head.GRAPH_CHOICE and family.title in (
                "MPNet",
                "ModernBERT",
                "DeBERTa",
                "XLNet",
                "ERNIE (Tsinghua)",
            ):
                assert head not in family.models  # KagNet's graph goes with the others
                continue
            assert issubclass(model_class(family, head).config_class, family.config)  # KagNet's has more fields
    assert model_class(FAMILIES["gpt"], Head.MULTIPLE_CHOICE) is models.OpenAIGPTDoubleHeadsModel
    with pytest.raises(ValueError, match=r"tag: expected a model of bert, .*; gpt2 has no head for it"):
        model_class(FAMILIES["gpt2"], TASKS["tag"].head, "tag")


def test_a_directory_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(models.CheckpointError, match="nowhere: expected a directory with a model"):
        family_of(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "bart"}')
    with pytest.raises(models.CheckpointError, match=r"model_type: expected one of bert, .* got 'bart'"):
        family_of(tmp_path)


def test_longest_inputs() -> None:
    assert longest_input(models.BertConfig()) == 512
    assert longest_input(models.RobertaConfig(max_position_embeddings=514)) == 512
    assert longest_input(models.GPT2Config()) == 1024


# ---- GPT-1 -----------------------------------------------------------------------------------------------------------


def test_gpt_writes_tasks_with_three_new_tokens() -> None:
    tokenizer = train_tokenizer("bpe", ["to be or not to be, that is the question"], 280)
    before = tokenizer.vocab_size
    tokenizer = with_task_tokens(tokenizer)
    assert tokenizer.vocab_size == before + 3
    assert with_task_tokens(tokenizer).vocab_size == before + 3
    form = format_of(FAMILIES["gpt"], None, tokenizer, 20)
    start, delimiter, extract = (tokenizer.backend.token_to_id(token) for token in TASK_TOKENS)
    assert sorted([start, delimiter, extract]) == [before, before + 1, before + 2]
    marks = {"start": start, "delimiter": delimiter, "extract": extract}
    assert form.two([5, 6], [7]).ids == task_sequence([5, 6], [7], **marks)
    assert form.one([5, 6]).ids == task_sequence([5, 6], **marks)
    assert tokenizer.decode([start, *tokenizer.encode("not to be"), extract]) == "not to be"


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_grows_and_keeps_its_rows(tied: bool) -> None:
    model = models.GPT2LMHeadModel(models.GPT2Config(**SIZES, tie_word_embeddings=tied)).eval()
    ids = torch.arange(10)[None]
    before, rows = model(ids).logits, model.transformer.embeddings.word.weight.clone()
    grow_vocabulary(model, 64)
    assert torch.equal(model.transformer.embeddings.word.weight[:61], rows)
    assert (model.transformer.embeddings.word.weight is model.lm_head.decoder.weight) is tied
    after = model(torch.tensor([[*range(9), 63]])).logits
    assert after.shape[-1] == model.config.vocab_size == 64
    assert torch.allclose(after[:, :9, :61], before[:, :9], atol=1e-5)
    grow_vocabulary(model, 50)
    assert model.config.vocab_size == 64


# ---- learning rates --------------------------------------------------------------------------------------------------


def rates_by_name(model: Any, rates: Rates) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in rates.groups(model)
        for parameter in group["params"]
    }


def test_lower_layers_have_lower_rates() -> None:
    model = bert()
    rates = rates_by_name(model, Rates(1.0, head_rate=7.0, layer_decay=0.5, weight_decay=0.1))
    assert set(rates) == {name for name, _ in model.named_parameters()}
    assert [rates[f"bert.encoder.layers.{layer}.up.weight"] for layer in range(3)] == [
        (0.25, 0.1),
        (0.5, 0.1),
        (1, 0.1),
    ]
    assert rates["bert.encoder.layers.0.up.bias"] == (0.25, 0.0)
    assert rates["bert.embeddings.word.weight"] == (0.125, 0.1)
    assert rates["bert.embeddings.norm.weight"] == (0.125, 0.0)
    assert rates["bert.pooler.weight"] == (1.0, 0.1)
    assert rates["classifier.weight"] == (7.0, 0.1)
    assert rates_by_name(model, Rates(1.0))["classifier.bias"] == (1.0, 0.0)


@pytest.mark.parametrize("bad", [{"rate": 0.0}, {"rate": 1.0, "layer_decay": 0.0}, {"rate": 1.0, "head_rate": -1.0}])
def test_rates_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"rates: .*: expected"):
        Rates(**bad)


def test_narrow_models_have_higher_default_rates() -> None:
    assert default_rate(bert()) == pytest.approx(24 * 5e-5)  # its width is a 24th of 768


def test_a_frozen_encoder_has_neither_gradients_nor_dropout() -> None:
    model = bert()
    freeze(model)
    assert set(rates_by_name(model, Rates(1.0))) == {
        "bert.pooler.weight",
        "bert.pooler.bias",
        "classifier.weight",
        "classifier.bias",
    }
    ids = torch.arange(12)[None]
    model.train()
    states = [base_of(model)(ids).last_hidden_state for _ in range(2)]
    assert torch.equal(*states)


def test_the_content_of_a_feature_is_all_that_is_trained_on() -> None:
    contents = {
        b"".join(Feature(0, [Tokens([1, 2], segments, 0)], target).content())
        for segments in ([0, 0], [0, 1])
        for target in (0, 1, 0.5, [1.0, 0.0])
    }
    assert len(contents) == 8


@pytest.mark.parametrize("seed", [0, 20_250_101_123_456, 2**63 - 1])
def test_large_seeds_shuffle(seed: int) -> None:
    steps = list(shuffled_steps([1, 2, 3], FinetuneSettings(seed=seed), 2))  # type: ignore[list-item]
    assert sorted(feature for step in steps for group in step for feature in group) == [1, 2, 3]  # type: ignore[type-var]
