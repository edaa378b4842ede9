"""Models with altered modules: hooks, LoRA, wrappers. None of them is bypassed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttfm import generate, models
from fasttfm.testing.alterations import checkpointed, forward_hook, low_rank

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
}
GPT_SIZES = {"vocab_size": 61, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2}
DISTILBERT_SIZES = {
    "vocab_size": 61,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 24,
    "max_position_embeddings": 20,
}
IDS = torch.randint(5, 60, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(7) < torch.tensor([7, 3, 5])[:, None]
CLASSES = torch.tensor([0, 1, 0])
CASES: dict[str, dict[str, Tensor]] = {
    "BertModel": {},
    "BertForMaskedLM": {"labels": IDS},
    "BertForPreTraining": {"labels": IDS, "next_sentence_label": CLASSES},
    "BertForQuestionAnswering": {"start_positions": CLASSES, "end_positions": CLASSES},
    "AlbertForMaskedLM": {"labels": IDS},
    "ElectraForPreTraining": {"labels": IDS % 2},
    "ElectraForSequenceClassification": {"labels": CLASSES},
    "RobertaForSequenceClassification": {"labels": CLASSES},
    "DistilBertForMaskedLM": {"labels": IDS},
    "ModernBertForMaskedLM": {"labels": IDS},
    "ModernBertForSequenceClassification": {"labels": CLASSES},
    "GPT2LMHeadModel": {"labels": IDS},
    "OpenAIGPTForSequenceClassification": {"labels": CLASSES, "lm_labels": IDS},
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    kind = getattr(models, name)
    sizes: dict[str, Any] = GPT_SIZES if "GPT" in name else DISTILBERT_SIZES if "Distil" in name else SIZES
    own: dict[str, Any] = {"embedding_size": 12} if name.startswith(("Albert", "Electra")) else {}
    own = {"pad_token_id": 0, "local_attention": 4} if name.startswith("Modern") else own
    model = kind(kind.config_class(**sizes, **own)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def value(name: str, model: Any) -> Tensor:
    output = model(IDS, MASK, **CASES[name])
    return output.pooler_output if name == "BertModel" else output.loss


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that computes something. Heads without a classifier have a dropout that is not used."""
    return {
        path: module
        for path, module in model.named_modules()
        if path and not isinstance(module, (nn.ModuleList, nn.Dropout))
    }


@pytest.mark.parametrize("name", CASES)
def test_hooks_of_every_module_are_called_and_change_nothing(name: str) -> None:
    model = make(name)
    expected = value(name, model)
    for path, module in modules_of(model).items():
        seen: list[str] = []
        handle = module.register_forward_hook(lambda *_, path=path, seen=seen: seen.append(path))
        torch.testing.assert_close(value(name, model), expected, msg=lambda text, path=path: f"{path}: {text}")
        assert seen, path
        handle.remove()


@pytest.mark.parametrize("name", CASES)
def test_lora_is_the_merged_weight(name: str) -> None:
    model = make(name)
    for path, module in modules_of(model).items():
        if not isinstance(module, nn.Linear):
            continue
        adapted, merged = copy.deepcopy(model), copy.deepcopy(model)
        low_rank(adapted, path)
        layer, linear = adapted.get_submodule(path), merged.get_submodule(path)
        linear.weight = nn.Parameter((linear.weight + layer.b @ layer.a).detach())  # unties a tied decoder
        losses = [value(name, each) for each in (adapted, merged)]
        torch.testing.assert_close(*losses, msg=lambda text, path=path: f"{path}: {text}")
        torch.autograd.grad(losses[0].sum(), [layer.a, layer.b])
        with pytest.raises(AssertionError):
            torch.testing.assert_close(losses[0], value(name, model))


@pytest.mark.parametrize(("name", "base"), [("BertForMaskedLM", "bert"), ("GPT2LMHeadModel", "transformer")])
def test_outputs_of_hooks_of_a_model_without_a_head_are_used(name: str, base: str) -> None:
    model = make(name)

    def double(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * 2
        return output

    plain = value(name, model)
    model.get_submodule(base).register_forward_hook(double)
    assert value(name, model) != plain


def test_a_wrapped_model_without_a_head_is_refused_and_wrapped_layers_are_called() -> None:
    model = make("BertForMaskedLM")
    expected = value("BertForMaskedLM", model)
    checkpointed(model, "bert.encoder.layers.0")
    torch.testing.assert_close(value("BertForMaskedLM", model), expected)
    checkpointed(model, "bert")
    with pytest.raises(TypeError, match=r"BertForMaskedLM.bert: expected a model without a head itself"):
        value("BertForMaskedLM", model)


def test_layers_in_training_drop_in_a_model_in_evaluation() -> None:
    """Monte Carlo dropout: packed layers and embeddings have dropout themselves, not as modules."""
    model = make("BertForMaskedLM")
    for module in (model.bert.embeddings, model.bert.encoder.layers[1]):
        assert value("BertForMaskedLM", model) == value("BertForMaskedLM", model)
        module.train()
        assert value("BertForMaskedLM", model) != value("BertForMaskedLM", model)
        module.eval()


def test_generated_tokens_are_those_of_the_merged_weight() -> None:
    model = make("GPT2LMHeadModel")
    for part in ("qkv", "out", "up", "down"):
        adapted, merged = copy.deepcopy(model), copy.deepcopy(model)
        path = f"transformer.encoder.layers.0.{part}"
        low_rank(adapted, path)
        layer = adapted.get_submodule(path)
        with torch.no_grad():
            merged.get_submodule(path).weight += layer.b @ layer.a
        words = [generate.generate(each, IDS, max_new_tokens=8, eos_token_id=[]) for each in (adapted, merged)]
        assert torch.equal(*words), part


@pytest.mark.parametrize("path", ["transformer", "transformer.encoder", "transformer.encoder.layers.1"])
def test_generating_with_hooks_is_refused(path: str) -> None:
    model = make("GPT2LMHeadModel")
    forward_hook(model, path)
    with pytest.raises(ValueError, match="generate: model: expected a model, an encoder and layers without hooks"):
        generate.generate(model, IDS, max_new_tokens=2)
