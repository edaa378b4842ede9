"""Scaled rotations against transformers: rates of every type, and models with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import IDS, MASKS, SIZES, pair

from fasttfm import models
from fasttfm.generate import generate
from fasttfm.models import CheckpointError
from fasttfm.nn.rotation import at_length, rates, stated_rotation

transformers = pytest.importorskip("transformers")

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"original_max_position_embeddings": 4096}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3.2": {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **YARN},
    "yarn, more": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False, **YARN},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7, **YARN},
    "yarn, attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, **YARN},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("columns", [16, 64, 128])
@pytest.mark.parametrize("longest", [100, 40000])
def test_rates_are_those_of_transformers(name: str, columns: int, longest: int) -> None:
    rope = {"rope_theta": 500_000.0, **ROPES[name]}
    config = transformers.LlamaConfig(rope_parameters=dict(rope), head_dim=columns, max_position_embeddings=32768)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    expected, factor = compute(config, torch.device("cpu"), seq_len=longest)
    theta = at_length(stated_rotation("rope_parameters", rope, 10_000.0, 32768), columns, longest)
    found, own_factor = rates(theta, columns, device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor)


# In texts of 9 tokens: P is below, so that every type differs from the rotation without scaling.
SMALL = {"rope_theta": 100.0, "original_max_position_embeddings": 6, "factor": 4.0}
SMALL |= {"low_freq_factor": 0.3, "high_freq_factor": 2.0, "beta_fast": 3, "beta_slow": 0.1}
MODELS = {
    "LlamaModel": {"num_key_value_heads": 1},
    "Qwen3Model": {"num_key_value_heads": 1, "head_dim": 24},
    "EuroBertModel": {},
    "GteModel": {},
    "NomicBertModel": {},
    "JinaEmbeddingsV3Model": {},
    "ModernBertModel": {"local_attention": 4},
    "Gemma3TextModel": {"head_dim": 24, "num_key_value_heads": 1, "sliding_window": 4, "sliding_window_pattern": 2},
}


def with_rope(name: str, kind: str, **changes: Any) -> dict[str, Any]:
    rope = {**SMALL, "rope_type": kind}
    by_kind = name.startswith(("ModernBert", "Gemma"))
    stated = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10.0}}
    sizes = {**MODELS[name], "pad_token_id": 0, "max_position_embeddings": 6, "num_hidden_layers": 2, **changes}
    return {**sizes, "rope_parameters": stated if by_kind else rope}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_models_with_scaled_rotations(name: str, kind: str, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path, **with_rope(name, kind))
    mask = MASKS["full"]
    with torch.no_grad():
        expected = theirs(IDS, attention_mask=mask).last_hidden_state
        found = ours(IDS, mask).last_hidden_state
        layers = ours(IDS, mask, output_hidden_states=True).last_hidden_state  # layer by layer
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layers, found, rtol=1e-4, atol=1e-4)
    ours.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert again.config.rope_parameters == theirs.config.rope_parameters


def test_gradients_and_tables_of_each_length(tmp_path: Path) -> None:
    """Of rope_type dynamic, texts that are not longer than those of pre-training are as without scaling."""
    ours, theirs = pair("LlamaModel", tmp_path, **with_rope("LlamaModel", "dynamic"))
    for length in (4, 9, 8, 5):
        ids = IDS[:, :length]
        if length > 6:
            theirs.rotary_emb.max_seq_len_cached = 6  # transformers keeps the rotation of longer texts
        with torch.no_grad():
            expected = theirs(ids).last_hidden_state
            torch.testing.assert_close(ours(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-4)
    ours.train()(IDS).last_hidden_state.square().sum().backward()
    theirs(IDS).last_hidden_state.square().sum().backward()
    gradients = {name: each.grad for name, each in theirs.named_parameters()}
    for name, true in ours.own_tensors(gradients).items():
        torch.testing.assert_close(ours.get_parameter(name).grad, true, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lengths", [[9, 4, 7], [3, 5, 6]])
def test_the_bound_of_a_packed_batch_changes_nothing(lengths: list[int]) -> None:
    """Of rope_type dynamic, the longest text counts, above P tokens and below."""
    torch.manual_seed(0)
    model = models.LlamaModel(models.LlamaConfig.from_dict({**SIZES, **with_rope("LlamaModel", "dynamic")})).eval()
    ids = torch.cat([row[:length] for row, length in zip(IDS, lengths, strict=True)])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    with torch.no_grad():
        padded = model(IDS, lengths=lengths).last_hidden_state
        expected = torch.cat([row[:length] for row, length in zip(padded, lengths, strict=True)])
        for bound in (max(lengths), 16, 64):
            for options in ({}, {"output_hidden_states": True}):
                found = model(ids, cu_seqlens=cu_seqlens, max_seqlen=bound, **options).last_hidden_state
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_continuations_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    changes = with_rope("LlamaModel", kind, max_position_embeddings=21, eos_token_id=None)
    ours, theirs = pair("LlamaForCausalLM", tmp_path, **changes)
    options = {"max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(generate(ours, IDS, **options), theirs.generate(IDS, do_sample=False, **options))


@pytest.mark.parametrize("name", ["LlamaModel", "ModernBertModel", "Gemma3TextModel"])
def test_older_configurations(name: str, tmp_path: Path) -> None:
    """``rope_scaling`` beside the base; of ModernBERT it is about all layers, of Gemma 3 about the global ones."""
    scaling = {"type" if name == "LlamaModel" else "rope_type": "linear", "factor": 8.0}
    sizes = {**SIZES, **MODELS[name], "pad_token_id": 0, "num_hidden_layers": 3}
    kind = name.removesuffix("Model")
    theirs = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**sizes, rope_scaling=scaling)).eval()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    del written["rope_parameters"]
    path.write_text(json.dumps({**written, "rope_scaling": scaling}))
    ours = getattr(models, name).from_pretrained(tmp_path)
    assert any(getattr(layer.theta, "factor", 1) == 8 for layer in ours.encoder.in_order())
    with torch.no_grad():
        expected = theirs(IDS).last_hidden_state
        torch.testing.assert_close(ours(IDS).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        ({"rope_type": "longrope"}, "rope_type: expected default, linear, dynamic, llama3, yarn, got 'longrope'"),
        ({"rope_type": "linear"}, "factor: expected a number above 0, got None"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor: expected a number above 0, got None"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 .*, got 0.5"),
    ],
)
def test_what_is_not_supported_is_refused(rope: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    models.LlamaModel(models.LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    with pytest.raises(CheckpointError, match=f"rope_parameters: {sentence}"):
        models.LlamaModel.from_pretrained(tmp_path)


def test_rotations_by_length_are_not_exported(tmp_path: Path) -> None:
    ours, _ = pair("LlamaModel", tmp_path, **with_rope("LlamaModel", "dynamic"))
    with pytest.raises(ValueError, match="expected a rotation for all lengths, got LlamaModel with rope_type dynamic"):
        models.export_onnx(ours, tmp_path / "model.onnx")
