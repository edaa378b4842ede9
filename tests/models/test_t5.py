"""The encoders of T5 and mT5 against transformers: checkpoints, outputs and gradients, padded and packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import TEXTS, save_tokenizer
from model_parity import IDS, MASKS, SIZES, check_layout, config_of, pair, tensors
from safetensors.torch import load_file

from fasttfm import models
from fasttfm.inference import Session
from fasttfm.models.relative_bias import buckets

transformers = pytest.importorskip("transformers")

SMALL = {"head_dim": 8, "num_hidden_layers": 3, "relative_attention_num_buckets": 8}  # 3 * 8 columns of a width of 48
LAYOUTS = [
    ("T5EncoderModel", "right", True, {"feed_forward_proj": "relu"}),
    ("T5EncoderModel", "right", False, {"feed_forward_proj": "gated-gelu", "relative_attention_max_distance": 6}),
    ("T5EncoderModel", "anywhere", False, {"feed_forward_proj": "gated-silu"}),
    ("T5ForTokenClassification", "full", True, {"head_dim": 16}),
    ("MT5EncoderModel", "full", False, {"num_attention_heads": 5}),  # which do not divide the width
    ("MT5ForTokenClassification", "right", False, {}),
]


@pytest.mark.parametrize(("name", "kind", "packed", "changes"), LAYOUTS)
def test_same_numbers_as_transformers(
    name: str, kind: str, packed: bool, changes: dict[str, Any], tmp_path: Path
) -> None:
    ours, theirs = pair(name, tmp_path, **{**SMALL, **changes})

    def own_gradients(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(ours.own_tensors(gradients))

    check_layout(name, ours, theirs, kind, packed=packed, segments=False, translate=own_gradients)


@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (8, 6), (64, 1000)])
def test_buckets_of_all_distances(count: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    positions = torch.arange(1200)
    distances = positions[None, :] - positions[:, None]
    expected = T5Attention._relative_position_bucket(distances, num_buckets=count, max_distance=farthest)
    assert torch.equal(buckets(positions, count, farthest), expected)


def test_attention_weights(tmp_path: Path) -> None:
    ours, theirs = pair("T5EncoderModel", tmp_path, **SMALL, attn_implementation="eager")
    mask = MASKS["right"]
    with torch.no_grad():
        found, expected = (model(IDS, mask.long(), output_attentions=True).attentions for model in (ours, theirs))
    there = mask[:, None, :, None]
    for got, true in zip(found, expected, strict=True):
        torch.testing.assert_close(got * there, true * there, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["T5EncoderModel", "MT5ForTokenClassification"])
def test_checkpoints_go_both_ways(name: str, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path / "theirs", **SMALL)
    ours.save_pretrained(tmp_path / "ours")
    again = getattr(transformers, name).from_pretrained(tmp_path / "ours").eval()
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    made = getattr(models, name)(config_of(models, name, {**SIZES, **SMALL})).eval()
    made.save_pretrained(tmp_path / "made")
    read = getattr(transformers, name).from_pretrained(tmp_path / "made").eval()
    with torch.no_grad():
        found, expected = tensors(made(IDS)), tensors(read(IDS))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-4)


def test_the_encoder_of_a_whole_model(tmp_path: Path) -> None:
    """Its decoder and its head are not read."""
    config = config_of(transformers, "T5", {**SIZES, **SMALL, "is_encoder_decoder": True, "decoder_start_token_id": 0})
    torch.manual_seed(0)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    assert any(name.startswith("decoder.") for name in load_file(tmp_path / "model.safetensors"))
    ours = models.T5EncoderModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs.get_encoder()(IDS).last_hidden_state
        torch.testing.assert_close(ours(IDS).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_initial_values() -> None:
    """Their standard deviations are transformers'; 8192 values or more estimate them within 5 %."""
    sizes = {"vocab_size": 512, "d_model": 128, "d_kv": 32, "num_heads": 2, "d_ff": 256, "num_layers": 1}
    torch.manual_seed(0)
    theirs = transformers.T5EncoderModel(transformers.T5Config(**sizes))
    ours = models.T5EncoderModel(models.T5Config(**sizes))
    expected = ours.own_tensors(dict(theirs.state_dict()))
    attended = 64
    for name, value in ours.named_parameters():
        for part in (slice(attended), slice(attended, None)) if "qkv" in name else (slice(None),):
            if value[part].numel() >= 8192:
                assert value[part].std().item() == pytest.approx(expected[name][part].std().item(), rel=0.05), name


def test_dropout_of_all_parts() -> None:
    """In training, of embeddings, weights, blocks and the last states."""
    torch.manual_seed(0)
    model = models.T5EncoderModel(config_of(models, "T5EncoderModel", {**SIZES, **SMALL, "dropout_rate": 0.5})).train()
    (layer, *_) = model.encoder.in_order()
    assert layer.probabilities() == (0.5, 0.5, 0.5)
    assert (layer.intermediate_dropout, model.embeddings.dropout) == (0.5, 0.5)
    dropped = (model(IDS).last_hidden_state == 0).float().mean()
    assert 0.4 < dropped < 0.6


def test_positions_are_refused() -> None:
    model = models.T5EncoderModel(config_of(models, "T5EncoderModel", {**SIZES, **SMALL})).eval()
    with pytest.raises(ValueError, match=r"position_ids: expected None .*, got a tensor"):
        model(IDS, position_ids=torch.arange(9))


def test_sentence_t5_folder(tmp_path: Path) -> None:
    """A mean, a dense layer without a bias and an activation, and unit length, as the published folder."""
    library = pytest.importorskip("sentence_transformers", reason="the vectors are compared with its own")
    torch.manual_seed(0)
    config = models.T5Config.named("tiny", vocab_size=300)
    models.T5EncoderModel(config).save_pretrained(tmp_path / "model")
    save_tokenizer("", tmp_path / "model")
    modules = library.sentence_transformer.modules
    dense = modules.Dense(128, 96, bias=False, activation_function=torch.nn.Identity())
    parts = [modules.Transformer(str(tmp_path / "model")), modules.Pooling(128, "mean"), dense, modules.Normalize()]
    theirs = library.SentenceTransformer(modules=parts, device="cpu")
    theirs.save(str(tmp_path / "folder"))
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["model_type"] == "t5"
    with Session(tmp_path / "folder", device="cpu") as session:
        found = torch.as_tensor(session.encode(TEXTS))
    expected = torch.as_tensor(theirs.encode(TEXTS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with Session(tmp_path / "folder", device="cpu", precision="int8") as session:
        similar = torch.cosine_similarity(torch.as_tensor(session.encode(TEXTS)), expected)
    assert similar.min() > 0.99
