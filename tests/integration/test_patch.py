"""``fasttfm.patch`` against the unpatched models of transformers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import tensors, theirs_of
from patched_models import CAUSAL, IDS, LANGUAGE_MODELS, MASKS, SEGMENTS, WORDS, B, S, batch, check_patched, pair
from torch import Tensor

import fasttfm
from fasttfm.testing.alterations import alterations_of, check_altered
from fasttfm.testing.modules import run_module

transformers = pytest.importorskip("transformers")
from fasttfm.patching import gpt2  # noqa: E402
from fasttfm.patching.attention import attend  # noqa: E402

HEADS = (
    "BertModel",
    "BertForPreTraining",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    "RobertaForSequenceClassification",
    "AlbertForPreTraining",
    "AlbertForTokenClassification",
    "ElectraModel",
    "ElectraForPreTraining",
    "DistilBertForQuestionAnswering",
    "GPT2ForSequenceClassification",
)


def caller(given: dict[str, Tensor], *outputs: str) -> Any:
    """Calls a model; returns hidden states and token logits without the rows of padding."""
    mask = given.get("attention_mask")

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        found = tensors(module(**given), mask)
        return {key: value for key, value in found.items() if key.startswith(outputs)}

    return call


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_training_loss_and_gradients(name: str, mask: str) -> None:
    ours, theirs = (module.train() for module in pair(name))
    check_patched(ours, theirs, caller(batch(name, mask), "loss"))


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_evaluation_gives_logits_and_the_loss(name: str) -> None:
    ours, theirs = pair(name)
    check_patched(ours, theirs, caller(batch(name), "loss", "logits"))


@pytest.mark.parametrize("name", HEADS)
def test_other_heads(name: str) -> None:
    ours, theirs = (module.train() for module in pair(name))
    check_patched(ours, theirs, caller(batch(name), "loss", "last_hidden_state", "pooler_output"))


@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification",
        "BertForNextSentencePrediction",
        "RobertaForSequenceClassification",
        "AlbertForSequenceClassification",
        "ElectraForSequenceClassification",
        "DistilBertForSequenceClassification",
    ],
)
def test_a_first_column_of_padding_is_classified_as_unpatched(name: str) -> None:
    ours, theirs = pair(name)
    mask = torch.arange(S) >= torch.tensor([0, 3, 9, 1, 12, 0, 5, 14] * 2)[:, None]
    given = {"input_ids": IDS.where(mask, 1), "attention_mask": mask.long(), "labels": torch.arange(B) % 2}
    check_patched(ours, theirs, caller(given, "loss", "logits"))


def test_question_answering_reads_rows_of_padding_as_unpatched() -> None:
    ours, theirs = pair("BertForQuestionAnswering")
    given = batch("BertForQuestionAnswering")

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors(module(**given))  # padding's rows too

    check_patched(ours, theirs, call)


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "AlbertModel", "DistilBertModel", "GPT2Model"])
def test_hidden_states_and_attentions(name: str) -> None:
    ours, theirs = pair(name, attn_implementation="eager")
    given = {"attention_mask": MASKS["right"], "output_hidden_states": True, "output_attentions": True}
    mask = MASKS["right"].bool()

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        found = tensors(module(IDS, **given), mask)  # type: ignore[arg-type]
        return {
            key: value.transpose(1, 2)[mask] if key.startswith("attentions") else value for key, value in found.items()
        }

    check_patched(ours, theirs, call)
    assert len(ours(IDS, **given).attentions) == 2


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "DistilBertModel"])
def test_embeddings_with_all_arguments(name: str) -> None:
    ours, theirs = pair(name)
    own = {} if name == "DistilBertModel" else {"token_type_ids": SEGMENTS if name == "BertModel" else 0 * SEGMENTS}
    positions = torch.arange(S).flip(0)[None]
    embedded = torch.randn(B, S, 48)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        by_id = module(IDS, position_ids=positions, **own)
        given = module(inputs_embeds=inputs["embedded"], **own)
        return {"by id": by_id.last_hidden_state, "given": given.last_hidden_state}

    check_patched(ours, theirs, call, {"embedded": embedded})


def test_the_padding_token_of_roberta_has_no_position_gradient() -> None:
    ours, theirs = pair("RobertaModel")
    ids = IDS.clone()
    ids[:, 5:] = theirs.config.pad_token_id

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(ids).last_hidden_state}

    check_patched(ours, theirs, call)
    gradients = run_module(ours, call, {}).gradients
    assert not gradients["embeddings.position_embeddings.weight"][theirs.config.pad_token_id].any()


def test_an_explicit_mask_is_kept() -> None:
    ours, theirs = pair("BertModel")
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(4)) < 0.6
    mask |= torch.eye(S, dtype=torch.bool)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(IDS, attention_mask=mask).last_hidden_state}

    check_patched(ours, theirs, call)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_dropout_is_applied_only_in_training(name: str) -> None:
    ours, _ = pair(name, dropout=0.1)
    given = batch(name)

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(**given).loss

    assert loss(0) == loss(1)
    ours.train()
    assert loss(0) == loss(0)
    assert loss(0) != loss(1)


# ---- interface -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_unpatch_restores_every_bit(name: str) -> None:
    module = theirs_of(name)
    given = batch(name)
    before, attributes, kinds = module(**given), set(vars(module)), [type(each) for each in module.modules()]
    fasttfm.patch(module)
    assert [type(each) for each in module.modules()] != kinds
    assert [type(each).__name__ for each in module.modules()] == [kind.__name__ for kind in kinds]
    fasttfm.unpatch(module)
    after = module(**given)
    assert [type(each) for each in module.modules()] == kinds
    assert module.config._attn_implementation == "sdpa"
    assert set(vars(module)) == attributes
    assert torch.equal(after.loss, before.loss)
    assert torch.equal(after.logits, before.logits)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_parameters_are_the_same_objects_under_the_same_names(name: str) -> None:
    module = theirs_of(name)
    before, state = dict(module.named_parameters()), module.state_dict()
    fasttfm.patch(module)
    after = dict(module.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[key] is value for key, value in before.items())
    assert list(module.state_dict()) == list(state)


def test_checkpoints_of_a_patched_model_are_transformers(tmp_path: Path) -> None:
    ours, theirs = pair("BertForMaskedLM")
    ours.save_pretrained(tmp_path)
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, theirs(IDS).logits)
    assert again.config._attn_implementation == "sdpa"
    assert ours.config.architectures == ["BertForMaskedLM"]


def test_logits_in_training() -> None:
    ours, theirs = (module.train() for module in pair("BertForMaskedLM"))
    output = ours(IDS, labels=WORDS)
    assert output.logits is None
    assert output[0] is output.loss
    assert len(ours(IDS, labels=WORDS, return_dict=False)) == 1
    assert ours(IDS).logits.shape == theirs(IDS).logits.shape
    fasttfm.unpatch(ours)
    fasttfm.patch(ours, logits_in_training=True)
    assert ours(IDS, labels=WORDS).logits.shape == theirs(IDS).logits.shape


def test_positional_arguments() -> None:
    ours, theirs = (module.train() for module in pair("BertForMaskedLM"))
    labels = WORDS.where(MASKS["right"].bool(), -100)
    given = (IDS, MASKS["right"], SEGMENTS, None, None, None, None, labels)
    torch.testing.assert_close(ours(*given).loss, theirs(*given).loss)


def test_gpt_logits_of_some_rows() -> None:
    ours, theirs = pair(CAUSAL)
    with torch.no_grad():
        for kept in (3, torch.tensor([0, 2])):
            found, expected = (module(IDS, logits_to_keep=kept).logits for module in (ours, theirs))
            torch.testing.assert_close(found, expected)


def test_gpt_loss_divided_by_the_count_of_a_larger_batch() -> None:
    ours, theirs = (module.train() for module in pair(CAUSAL))
    losses = [module(IDS, labels=IDS, num_items_in_batch=torch.tensor(77)).loss for module in (ours, theirs)]
    torch.testing.assert_close(*losses)


def test_gpt_loss_of_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache, transformers takes positions that restart for documents; by default there is a cache."""
    ours, theirs = (module.train() for module in pair(CAUSAL, n_layer=1))
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    fused = []
    monkeypatch.setattr(gpt2, "attend", lambda *args, **kwargs: fused.append(args) or attend(*args, **kwargs))
    for given in ({}, {"position_ids": positions}, {"position_ids": positions, "use_cache": False}):
        found, expected = (module(IDS, labels=IDS, **given) for module in (ours, theirs))
        assert found.past_key_values is None
        torch.testing.assert_close(found.loss, expected.loss)
    assert len(fused) == 3


def test_the_report_lists_what_is_fused() -> None:
    report = fasttfm.patch(theirs_of("GPT2LMHeadModel"))
    text = str(report)
    assert text.startswith("GPT2LMHeadModel, patched by fasttfm")
    assert "fused, on the product for q, k and v" in text
    assert "(2 modules)" in text
    assert "no logits" in text
    assert "embeddings: GPT2Model adds them up in its own forward" in text
    other = fasttfm.patch(theirs_of("BertForMaskedLM", hidden_act="gelu_10"), logits_in_training=True)
    assert "ClippedGELUActivation" in " ".join(other.left)
    assert other.left["language-modelling loss"] == "requested"


def test_an_activation_without_a_kernel_is_that_of_transformers() -> None:
    ours, theirs = (module.train() for module in pair("BertForMaskedLM", hidden_act="gelu_10"))
    check_patched(ours, theirs, caller(batch("BertForMaskedLM"), "loss"))


def test_errors_name_what_was_given() -> None:
    module = theirs_of("BertModel")
    with pytest.raises(TypeError, match=r"expected a BERT, .* got torch\.nn\.modules\.linear\.Linear"):
        fasttfm.patch(torch.nn.Linear(3, 3))
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    llama = transformers.LlamaModel(transformers.LlamaConfig(**sizes, intermediate_size=32, num_key_value_heads=2))
    hint = r"fasttfm\.register_attention\(\); model\.set_attn_implementation\(\"fasttfm\"\)"
    with pytest.raises(TypeError, match=rf"LlamaModel\. Its attention can run on fasttfm's kernels: {hint}"):
        fasttfm.patch(llama)
    deberta = transformers.DebertaV2Model(transformers.DebertaV2Config(**sizes, intermediate_size=32))
    with pytest.raises(TypeError, match="register_attention has no effect on it either: DebertaV2Model"):
        fasttfm.patch(deberta)
    with pytest.raises(TypeError, match=r"got fasttfm\.models\.bert\.BertModel"):
        fasttfm.patch(fasttfm.models.BertModel(fasttfm.models.BertConfig.named("tiny")))
    with pytest.raises(ValueError, match="BertModel that is not patched"):
        fasttfm.unpatch(module)
    fasttfm.patch(module)
    with pytest.raises(ValueError, match="got a patched BertModel"):
        fasttfm.patch(module)


# ---- altered models --------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Linear):
    """A linear layer with an additional branch, like LoRA's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5 + 0.25


@pytest.mark.parametrize("part", ["query", "dense"])
def test_layers_in_the_place_of_linear_ones_are_called(part: str) -> None:
    ours, theirs = (module.train() for module in pair("BertForMaskedLM"))
    for module in (ours, theirs):
        for each in module.modules():
            if isinstance(getattr(each, part, None), torch.nn.Linear):
                getattr(each, part).__class__ = Adapted
    check_patched(ours, theirs, caller(batch("BertForMaskedLM"), "loss"))


@pytest.mark.parametrize("part", ["attention.self.key", "attention.output.LayerNorm", "intermediate.dense"])
def test_hooks_inside_are_called(part: str) -> None:
    ours, theirs = pair("BertModel")
    seen = []
    ours.encoder.layer[1].get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    check_patched(ours, theirs, lambda module, _: {"states": module(IDS).last_hidden_state})
    assert set(seen) == {part}


def test_a_forward_that_was_replaced_is_called_and_reported() -> None:
    """As by Accelerate, for modules that it offloads or casts."""
    theirs = theirs_of("BertForMaskedLM")
    ours, seen = copy.deepcopy(theirs), []
    attention, dense = ours.bert.encoder.layer[0].attention.self, ours.bert.encoder.layer[1].intermediate.dense
    for module in (attention, dense):
        original = module.forward
        module.forward = lambda *args, original=original, **kwargs: (seen.append(original), original(*args, **kwargs))[
            1
        ]
    report = fasttfm.patch(ours)
    assert report.left["BertSelfAttention bert.encoder.layer.0.attention.self"]
    given = batch("BertForMaskedLM")
    check_patched(ours, theirs, lambda module, _: {"loss": module(**given).loss})
    assert len(set(seen)) == 2
    fasttfm.unpatch(ours)
    fasttfm.patch(ours)
    ours.forward = ours.forward
    with pytest.raises(ValueError, match="without wrappers around them, got BertForMaskedLM"):
        fasttfm.unpatch(ours)


def test_removed_dropout_modules() -> None:
    ours, _ = pair("DistilBertForMaskedLM", dropout=0.1)
    for module in list(ours.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, torch.nn.Identity())
    given = batch("DistilBertForMaskedLM")
    assert ours.train()(**given).loss == ours(**given).loss


def test_a_subclass_keeps_its_own_loss() -> None:
    class Own(transformers.BertForMaskedLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = output.loss * 2
            return output

    theirs = theirs_of("BertForMaskedLM").train()
    ours = copy.deepcopy(theirs)
    ours.__class__ = Own
    report = fasttfm.patch(ours)
    assert "language-modelling loss" in report.left
    ours, theirs = ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(IDS, labels=WORDS).loss, 2 * theirs(IDS, labels=WORDS).loss)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "AlbertForMaskedLM"])
def test_feed_forward_in_chunks(name: str) -> None:
    ours, theirs = (module.train() for module in pair(name, chunk_size_feed_forward=4))
    check_patched(ours, theirs, caller(batch(name, "full"), "loss"))


LAYER = "encoder.layer.1."
PATHS = tuple(
    LAYER + part
    for part in (
        "attention.self.query",
        "intermediate.intermediate_act_fn",
        "output.dense",
        "output.dropout",
        "output.LayerNorm",
    )
)
ALTERATIONS = alterations_of(theirs_of("BertModel"), PATHS)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_transformers(name: str) -> None:
    ours, theirs = pair("BertModel")

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(IDS[:2]).last_hidden_state}

    check_altered(ours, theirs, call, {}, ALTERATIONS[name])


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_hooks_of_every_module_are_called_in_training(name: str) -> None:
    """For the modules that transformers calls, in a model that computes its own loss."""
    ours, theirs = (module.train().double() for module in pair(name))
    given = {key: value[:2] for key, value in batch(name, "full").items()}
    paths = [
        path
        for path, module in theirs.named_modules()
        if path and not isinstance(module, torch.nn.ModuleList) and not re.search(r"\.(layer|h)\.0\b", path)
    ]
    called: set[str] = set()
    for path in paths:
        theirs.get_submodule(path).register_forward_hook(lambda *_, path=path: called.add(path))
    expected = theirs(**given).loss
    for path in paths:
        seen: list[str] = []
        handle = ours.get_submodule(path).register_forward_hook(lambda *_, seen=seen: seen.append("called"))
        loss = ours(**given).loss  # that of transformers may be fp32
        torch.testing.assert_close(loss.float(), expected.float(), msg=lambda text, path=path: f"{path}: {text}")
        assert seen or path not in called, path
        handle.remove()


@pytest.mark.parametrize("part", ["attention.self", "attention.self.dropout", "attention.output.dropout"])
def test_dropout_modules_have_their_own_training_mode_as_in_transformers(part: str) -> None:
    """As in Monte Carlo dropout. transformers reads the rate of attention's dropout and not whether it trains."""
    ours, theirs = (module.eval() for module in pair("BertModel"))
    for module in (ours, theirs):
        altered = module.encoder.layer[0].get_submodule(part)
        getattr(altered, "dropout", altered).p = 1.0
        altered.train()

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(IDS[:2]).last_hidden_state}

    check_altered(ours, theirs, call, {})


def test_altered_embedding_tables_are_called() -> None:
    ours, theirs = pair("BertModel")
    for module in (ours, theirs):
        module.embeddings.word_embeddings.max_norm = 0.5

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"states": module(IDS[:2]).last_hidden_state}

    check_altered(ours, theirs, call, {})


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_embeddings_with_a_norm_without_parameters(name: str) -> None:
    ours, theirs = pair(name, **({"pad_token_id": 0} if name.startswith("Modern") else {}))
    for model in (ours, theirs):
        for each in model.embeddings.modules():
            if isinstance(each, torch.nn.LayerNorm):
                each.weight = each.bias = None
    torch.testing.assert_close(ours.embeddings(IDS), theirs.embeddings(IDS))
