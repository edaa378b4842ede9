"""LoRA adapters that are not merged: outputs, gradients and files are those of PEFT over transformers' models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import IDS, MASKS, config_of, pair, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm import models
from fasttfm.models import CheckpointError, add_adapter, load_adapter, merge_adapter, merge_added_adapter, save_adapter
from fasttfm.models.lora import adapter_tensors, adapters_in
from fasttfm.nn import PackedTransformer
from fasttfm.nn.lora import LoraLinear

# Class names, PEFT's targets, options of its configuration.
CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("BertModel", ["query", "value"], {}),
    ("BertModel", ["query", "key", "value", "dense"], {"use_rslora": True}),
    ("ModernBertModel", ["Wqkv", "Wo", "Wi"], {}),
    ("Qwen3Model", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], {}),
    ("EuroBertModel", ["q_proj", "up_proj"], {}),
    ("GteModel", ["q_proj", "gate_proj", "down_proj"], {}),
    ("GPT2Model", ["c_attn", "c_proj"], {"fan_in_fan_out": True}),
    ("AlbertModel", ["query", "ffn"], {}),
    ("MPNetModel", ["q", "dense"], {}),
]


def changes_of(name: str) -> dict[str, Any]:
    drops = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    own = {
        "Qwen": {"num_key_value_heads": 1, "head_dim": 16},
        "Mode": {"pad_token_id": 0},
        "Euro": {"pad_token_id": 0},
    }.get(name[:4], {})
    if name.startswith("GPT2"):
        return {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return own if name[:4] in ("Qwen", "Mode", "Euro") else {**own, **dict.fromkeys(drops, 0.0)}


def with_peft(name: str, targets: list[str], options: dict[str, Any], directory: Path) -> tuple[Any, Any]:
    """Our model, and transformers' with an adapter, which is saved in the folder ``task``."""
    peft = pytest.importorskip("peft")
    ours, theirs = pair(name, directory, **changes_of(name))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(theirs, config).train()
    adapted.save_pretrained(directory / "task")
    return ours, adapted


def loss_of(outputs: Any, weights: Tensor) -> Tensor:
    total: Tensor = (outputs.last_hidden_state.double() * weights.double()).sum()
    pooled = getattr(outputs, "pooler_output", None)
    return total if pooled is None else total + pooled.double().square().sum()


@pytest.mark.parametrize(("name", "targets", "options"), CASES)
def test_outputs_and_gradients_are_those_of_peft(
    name: str, targets: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    """In fp32, against PEFT in fp64: at most some times PEFT's own error in fp32."""
    ours, theirs = with_peft(name, targets, options, tmp_path)
    load_adapter(ours, tmp_path / "task", dropout=0.0)
    ours.train()
    exact = copy.deepcopy(theirs).double()
    mask, weights = MASKS["right"].long(), torch.randn(*IDS.shape, 48, generator=torch.Generator().manual_seed(3))
    weights = weights * mask[..., None]
    found, gradients = [], []
    for model in (ours, theirs, exact):
        outputs = model(input_ids=IDS, attention_mask=mask)
        loss_of(outputs, weights).backward()
        found.append(outputs.last_hidden_state.detach().double() * mask[..., None])
    trained = {each: parameter.grad for each, parameter in ours.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in each for each in trained)
    # The gradients by PEFT's names.
    for target, module in adapters_in(ours):
        assert module.lora_a.grad is not None
        with torch.no_grad():
            module.lora_a.copy_(module.lora_a.grad)
            module.lora_b.copy_(module.lora_b.grad)  # type: ignore[arg-type]
        assert target.modules
    gradients = [adapter_tensors(ours)]
    for model in (theirs, exact):
        gradients.append(
            {
                each.replace(".default", ""): parameter.grad
                for each, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        )
    assert gradients[0].keys() == gradients[2].keys()
    values = [found, *([own[key] for own in gradients] for key in gradients[0])]
    for got, plain, true in values:
        largest = true.abs().max()
        error, own = ((each.double() - true).abs().max() for each in (got, plain))
        assert error <= 4 * own + 1e-6 * largest


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel", "Qwen3Model", "GPT2Model"])
def test_one_call_runs_all_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gives the results of the modules, which are not called."""
    ours, _ = pair(name, tmp_path, **changes_of(name))
    add_adapter(ours, 4)
    draw(ours)
    called: list[Any] = []
    forward = LoraLinear.forward
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: called.append(self) or forward(self, x))
    for training in (True, False):
        results = []
        ours.train(training)
        for plain in (True, False):
            if not plain:
                monkeypatch.setattr(PackedTransformer, "plain_layers", lambda self: None)
            ours.zero_grad()
            states = ours(IDS).last_hidden_state
            if training:
                states.square().sum().backward()
            gradients = [each.grad for each in ours.parameters() if each.grad is not None]
            results.append([states.detach(), *gradients])
            assert bool(called) is not plain
            called.clear()
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        monkeypatch.undo()
        monkeypatch.setattr(LoraLinear, "forward", lambda self, x: called.append(self) or forward(self, x))


def draw(model: Any) -> None:
    for _, module in adapters_in(model):
        torch.nn.init.normal_(module.lora_b, std=0.1, generator=torch.Generator().manual_seed(module.out_features))


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "ModernBertModel", "GteModel", "GPT2Model"])
def test_a_saved_adapter_opens_in_peft(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ours, theirs = pair(name, tmp_path, **changes_of(name))
    heads = [each for each, _ in ours.named_parameters() if ours._head(each)]
    add_adapter(ours, 3, alpha=2, targets=["qkv", "down"])
    draw(ours)
    for each in heads:
        torch.nn.init.normal_(ours.get_parameter(each))
    save_adapter(ours, tmp_path / "saved", heads=heads)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "saved").eval()
    with torch.no_grad():
        found, expected = tensors(ours.eval()(IDS)), tensors(adapted(IDS))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3)
    # And here again, merged or not.
    merged, loaded = (getattr(models, name).from_pretrained(tmp_path) for _ in range(2))
    merge_adapter(merged, tmp_path / "saved")
    load_adapter(loaded, tmp_path / "saved")
    merge_added_adapter(ours)
    assert not adapters_in(ours)
    for model in (merged, loaded.eval(), ours):
        with torch.no_grad():
            for key, value in tensors(model(IDS)).items():
                torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 56}
    return models.BertModel(config_of(models, "BertModel", {**sizes, "vocab_size": 61})).eval()


def test_a_new_adapter_changes_nothing(model: Any) -> None:
    before = model(IDS).last_hidden_state
    add_adapter(model, 4)
    torch.testing.assert_close(model(IDS).last_hidden_state, before)
    trained = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 4  # A and B of four linear layers in two layers
    assert model.encoder.layers[0].qkv.lora_a.shape == (12, 48)  # of query, key and value


def test_seams(model: Any) -> None:
    """A copy, another dtype, a state dict: the adapter is part of the model's parameters."""
    add_adapter(model, 4)
    draw(model)
    expected = model(IDS).last_hidden_state
    again = copy.deepcopy(model)
    torch.testing.assert_close(again(IDS).last_hidden_state, expected)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for _, module in adapters_in(model):
            module.lora_b.zero_()
    assert not torch.allclose(model(IDS).last_hidden_state, expected, atol=1e-3)
    model.load_state_dict(state)
    torch.testing.assert_close(model(IDS).last_hidden_state, expected)
    half = again.to(torch.bfloat16)(IDS).last_hidden_state
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)
    wide = again.double()(IDS).last_hidden_state
    torch.testing.assert_close(wide.float(), expected, rtol=0.1, atol=0.1)


def test_weights_in_16_bits_have_adapters_in_fp32(model: Any) -> None:
    add_adapter(model.to(torch.bfloat16), 4)
    for _, module in adapters_in(model):
        assert module.lora_a.dtype == module.lora_b.dtype == torch.float32
    draw(model)
    model(IDS).last_hidden_state.float().square().sum().backward()
    for _, module in adapters_in(model):
        assert module.lora_a.grad.dtype == torch.float32  # type: ignore[union-attr]


def test_dropout_is_computed_by_modules(model: Any) -> None:
    add_adapter(model, 4, dropout=0.5)
    draw(model)
    assert model.encoder.plain_layers() is not None
    torch.testing.assert_close(model(IDS).last_hidden_state, model(IDS).last_hidden_state)
    model.train()
    for layer in model.encoder.layers:
        layer.dropout = layer.attention_dropout = layer.feed_forward_dropout = 0.0
    model.embeddings.dropout = 0.0
    assert model.encoder.plain_layers() is None
    assert not torch.allclose(model(IDS).last_hidden_state, model(IDS).last_hidden_state, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rank": 0}, "add_adapter: rank: expected at least 1, got 0"),
        ({"targets": ["query", "fc9"]}, "targets: expected some of .*qkv.*, got fc9"),
        ({"targets": []}, "targets: expected some of .*, got none"),
        ({"dropout": 1.5}, "LoraLinear: dropout: expected a number in .0.0, 1.0., got 1.5"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], sentence: str, model: Any) -> None:
    with pytest.raises(ValueError, match=sentence):
        add_adapter(model, **{"rank": 4, **options})


def test_only_one_adapter_is_trained(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_adapter: model: expected one with an adapter, got BertModel without"):
        save_adapter(model, tmp_path)
    add_adapter(model, 4)
    with pytest.raises(ValueError, match=r"expected a model without an adapter .*, got one in encoder.layers.0.qkv"):
        add_adapter(model, 4)
    with pytest.raises(ValueError, match="save_pretrained: expected a model without an adapter"):
        model.save_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda key, value: (key.replace("layer.1", "layer.7"), value), "got encoder.layer.7"),
        (lambda key, value: (key, value[:, :9]), r"expected matrices \(\(4, 48\), \(48, 4\)\)"),
        (lambda key, value: (key, value[..., :3]), r"expected matrices \[r, inputs\]"),
    ],
    ids=["layer", "shape", "rank"],
)
def test_files_that_do_not_fit(change: Any, sentence: str, model: Any, tmp_path: Path) -> None:
    add_adapter(model, 4, targets=["query", "up"])
    save_adapter(model, tmp_path)
    merge_added_adapter(model)
    path = tmp_path / "adapter_model.safetensors"
    changed = dict(change(key, value) for key, value in load_file(path).items())
    save_file({key: value.contiguous() for key, value in changed.items()}, path)
    with pytest.raises(CheckpointError, match=sentence):
        load_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert "encoder.layer.0.attention.self.query" in config["target_modules"]
    assert "encoder.layer.0.attention.self.key" not in config["target_modules"]
