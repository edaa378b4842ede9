"""Merged LoRA adapters give the outputs of PEFT over transformers' models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import TEXTS, save_tokenizer
from model_parity import IDS, pair, tensors
from safetensors.torch import load_file, save_file

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.inference import Session
from fasttfm.models import CheckpointError, merge_adapter

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("JinaEmbeddingsV3Model", ["q_proj", "v_proj", "o_proj", "fc1", "fc2", "word_embeddings"], {}),
    ("JinaEmbeddingsV3ForSequenceClassification", ["k_proj", "fc1", "classifier.dense"], {}),
    ("GteModel", ["q_proj", "up_proj", "down_proj"], {}),
    ("GteForMaskedLM", ["gate_proj", "lm_head.dense"], {"use_rslora": True}),
    ("NomicBertModel", ["v_proj", "gate_proj", "down_proj"], {}),
    ("Qwen3ForCausalLM", ["q_proj", "k_proj", "gate_proj"], {}),
    ("BertModel", ["query", "value", "dense"], {}),
    ("ModernBertModel", ["Wqkv", "Wi"], {}),
    ("GPT2Model", ["c_attn", "c_proj"], {"fan_in_fan_out": True}),
]


def adapted(name: str, targets: list[str], options: dict[str, Any], directory: Path) -> tuple[Any, Any]:
    """Our model, and transformers' with an adapter, which is saved in the folder ``task`` of the directory."""
    sizes = {"Qwen": {"num_key_value_heads": 1, "head_dim": 24}, "Mode": {"pad_token_id": 0}}.get(name[:4], {})
    ours, theirs = pair(name, directory, **sizes)
    config = peft.LoraConfig(r=4, lora_alpha=3, target_modules=targets, init_lora_weights=False, **options)
    theirs = peft.get_peft_model(theirs, config).eval()
    theirs.save_pretrained(directory / "task")
    return ours, theirs


@pytest.mark.parametrize(("name", "targets", "options"), CASES)
def test_outputs_are_those_of_peft(name: str, targets: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = adapted(name, targets, options, tmp_path)
    with torch.no_grad():
        before = tensors(ours(IDS))
        merge_adapter(ours, tmp_path / "task")
        found, expected = tensors(ours(IDS)), tensors(theirs(IDS))
    for key, value in found.items():
        assert not torch.allclose(value, before[key], atol=1e-2)
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=1e-3)


def test_a_session_with_an_adapter_of_its_folder(tmp_path: Path) -> None:
    """Vectors with an adapter and without one differ; those with one are those of the merged model."""
    torch.manual_seed(0)
    model = models.Qwen3Model(models.Qwen3Config.named("tiny", vocab_size=300, initializer_range=0.1)).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer("", tmp_path)
    task = tmp_path / "retrieval_query"
    task.mkdir()
    a, b = torch.randn(4, 128), torch.randn(128, 4)
    key = "base_model.model.layers.0.self_attn.q_proj"
    save_file({f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}, task / "adapter_model.safetensors")
    (task / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 1}))
    with Session(tmp_path, device="cpu") as session:
        plain = torch.as_tensor(session.encode(TEXTS))
    with Session(tmp_path, device="cpu", adapter="retrieval_query") as session:
        found = torch.as_tensor(session.encode(TEXTS))
        tokenizer, settings = session.tokenizer, session.settings
    merge_adapter(model, task)
    with Session(model, tokenizer, settings, device="cpu") as session:
        torch.testing.assert_close(found, torch.as_tensor(session.encode(TEXTS)))
    assert not torch.allclose(plain, found, atol=1e-3)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = ["--model", str(tmp_path), "--adapter", "retrieval_query", "--data", str(tmp_path / "texts.txt")]
    assert main(["embed", *options, "--device", "cpu", "--quiet", "--output", str(tmp_path / "vectors.npy")]) == 0
    written = torch.as_tensor(np.load(tmp_path / "vectors.npy"))
    torch.testing.assert_close(written, found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: peft_type: expected 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora: expected False, got True"),
        ({"r": None}, "expected numbers r and lora_alpha, got None and 3"),
    ],
)
def test_other_adapters_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    ours, _ = adapted("BertModel", ["query"], {}, tmp_path)
    path = tmp_path / "task" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=sentence):
        merge_adapter(ours, tmp_path / "task")


def test_nothing_changes_if_a_module_is_unknown(tmp_path: Path) -> None:
    ours, _ = adapted("BertModel", ["query"], {}, tmp_path)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    path = tmp_path / "task" / "adapter_model.safetensors"
    whole = load_file(path)
    renamed = {key.replace("layer.1", "layer.7"): value for key, value in whole.items()}
    for wrong, sentence in (
        (renamed, "expected modules of BertModel, got bert.encoder.layer.7.attention.self.query.weight"),
        (dict([*whole.items()][1:]), "expected a matrix of LoRA, and a second one for the same module"),
        ({key: value[..., :3] for key, value in whole.items()}, r"expected matrices \[r, inputs\] and \[outputs, r\]"),
        ({key: value[:, :9] for key, value in whole.items()}, r"expected a product of shape \(48, 48\), got"),
    ):
        save_file({key: value.contiguous() for key, value in wrong.items()}, path)
        with pytest.raises(CheckpointError, match=sentence):
            merge_adapter(ours, tmp_path / "task")
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name])
