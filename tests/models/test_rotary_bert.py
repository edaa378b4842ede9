"""GTE and jina-embeddings-v3 against transformers: checkpoints, outputs and gradients, padded and packed."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import IDS, MASKS, SIZES, check_layout, check_question_answering, pair, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm import models
from fasttfm.ops.layers import stack

transformers = pytest.importorskip("transformers")

LAYOUTS = [
    ("GteModel", "right", True),
    ("GteModel", "full", False),
    ("GteForMaskedLM", "right", False),
    ("GteForSequenceClassification", "full", True),
    ("GteForTokenClassification", "right", False),
    ("JinaEmbeddingsV3Model", "full", True),
    ("JinaEmbeddingsV3Model", "right", False),
    ("JinaEmbeddingsV3ForMaskedLM", "full", True),
    ("JinaEmbeddingsV3ForSequenceClassification", "right", False),
    ("JinaEmbeddingsV3ForTokenClassification", "full", False),
]
GTE = {"post_attention_layernorm": "attn_ln", "post_mlp_layernorm": "mlp_ln", "lm_head.layer_norm": "lm_head.norm"}
GTE |= {"self_attn.o_proj": "attention.o_proj", "self_attn.qkv": "attention.qkv_proj"}
GTE |= {"mlp.up_proj": "mlp.up_gate_proj", r"\blayers\b": "encoder.layer"}
JINA = {"post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2", "self_attn.o_proj": "mixer.out_proj"}
JINA |= {"self_attn.qkv": "mixer.Wqkv", "embeddings.LayerNorm": "emb_ln", r"\blayers\b": "encoder.layers"}


def of_checkpoints(ours: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors, of tensors with the names of transformers' modules, which are not those of its checkpoints."""
    names = GTE if type(ours).__name__.startswith("Gte") else JINA
    found = {}
    for full, tensor in tensors.items():
        if re.search(r"\.(k_proj|v_proj|gate_proj)\.", full):
            continue
        if ".q_proj." in full:
            tensor = torch.cat([tensors[full.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
        elif ".up_proj." in full:
            tensor = torch.cat([tensor, tensors[full.replace(".up_proj.", ".gate_proj.")]])
        name = full.replace(".q_proj.", ".qkv.")
        for theirs, stored in names.items():
            name = re.sub(theirs, stored, name)
        found[name] = tensor
    return dict(ours.own_tensors(found))


@pytest.mark.parametrize(("name", "kind", "packed"), LAYOUTS)
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path, num_hidden_layers=3, type_vocab_size=2)
    check_layout(name, ours, theirs, kind, packed=packed, translate=partial(of_checkpoints, ours))


def test_question_answering(tmp_path: Path) -> None:
    ours, theirs = pair("JinaEmbeddingsV3ForQuestionAnswering", tmp_path, num_labels=2)
    check_question_answering(ours, theirs, translate=partial(of_checkpoints, ours))


def test_a_model_without_segments(tmp_path: Path) -> None:
    ours, theirs = pair("GteModel", tmp_path, type_vocab_size=0)
    assert ours.embeddings.segment is None
    with torch.no_grad():
        expected = theirs(IDS).last_hidden_state
        torch.testing.assert_close(ours(IDS).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["GteForMaskedLM", "JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Model"])
def test_checkpoints_go_both_ways(name: str, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = getattr(transformers, name).from_pretrained(tmp_path / "ours").eval()
    assert again.config.rope_parameters == theirs.config.rope_parameters
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    made = getattr(models, name)(type(ours.config)(**SIZES)).eval()
    made.save_pretrained(tmp_path / "made")
    read = getattr(transformers, name).from_pretrained(tmp_path / "made").eval()
    with torch.no_grad():
        found, expected = tensors(made(IDS)), tensors(read(IDS))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-4)


def test_checkpoints_with_the_former_prefix(tmp_path: Path) -> None:
    """Released files of GTE call the encoder ``new``."""
    ours, _ = pair("GteForSequenceClassification", tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {re.sub(r"^gte\.", "new.", name): value for name, value in load_file(path).items()}
    assert any(name.startswith("new.") for name in renamed)
    save_file(renamed, path)
    for kind in (models.GteForSequenceClassification, models.GteModel):
        read = kind.from_pretrained(tmp_path)
        inner = getattr(read, "gte", read)
        for name, value in inner.encoder.state_dict().items():
            assert torch.equal(value, ours.gte.encoder.state_dict()[name]), name


def test_weights_and_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention weights are those of transformers, and the layers run by one plan."""
    calls: list[int] = []
    run = stack.run_stack
    monkeypatch.setattr(stack, "run_stack", lambda specs, *rest: calls.append(len(specs)) or run(specs, *rest))
    for name in ("GteModel", "JinaEmbeddingsV3Model"):
        ours, theirs = pair(name, tmp_path / name, attn_implementation="eager")
        mask = MASKS["right"]
        with torch.no_grad():
            ours(IDS, mask)
            found, expected = (model(IDS, mask.long(), output_attentions=True).attentions for model in (ours, theirs))
        for got, true in zip(found, expected, strict=True):
            there = mask[:, None, :, None]
            torch.testing.assert_close(got * there, true * there, rtol=1e-4, atol=1e-4)
    assert calls == [2, 2]
