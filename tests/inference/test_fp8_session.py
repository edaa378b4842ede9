"""Sessions in FP8: close to the model's own numbers, with scales from texts or from the checkpoint's file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import save_bert

from fasttfm import models
from fasttfm.data import Tokenizer
from fasttfm.inference import Calibration, EmbedSettings, Session
from fasttfm.inference.calibration import CALIBRATION
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.ops import fp8
from fasttfm.ops.fp8 import native as fp8_native

Ids = Sequence[Sequence[int]]
SETTINGS = EmbedSettings(normalize=True)
SMALL = {"num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 300}
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def model_of(kind: str, width: int = 64) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = models.GPT2Config(n_embd=width, n_layer=3, n_head=2, vocab_size=300, n_positions=256)
        return models.GPT2Model(config).eval()
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, **SMALL}
    wide = {"initializer_range": 0.06}  # with which pre-LN layers change the stream
    if kind == "modernbert":
        return models.ModernBertModel(models.ModernBertConfig(pad_token_id=0, **sizes, **wide)).eval()
    if kind == "qwen3":
        heads = {"num_key_value_heads": 1, "head_dim": width // 2}
        return models.Qwen3Model(models.Qwen3Config(**sizes, **heads, **wide)).eval()
    if kind == "albert":
        return models.AlbertModel(models.AlbertConfig(embedding_size=32, **sizes)).eval()
    return models.BertModel(models.BertConfig(**sizes)).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bert", "albert", "gpt2", "modernbert", "qwen3"])
def test_vectors_are_close(kind: str, device: str, sentences: Ids) -> None:
    model, sentences = model_of(kind).to(device), sentences[:24]
    expected = Session(model, settings=SETTINGS).encode(sentences)
    with Session(model, settings=SETTINGS, precision="fp8", calibration=sentences[:8]) as session:
        found = session.encode(sentences)
        again = session.encode(sentences)
        states = session.encode(sentences[:3], output="states")
    cosines = (found * expected).sum(1)
    assert cosines.min() >= 0.99
    assert cosines.max() < 1 - 1e-6  # it is not the model's own precision
    assert np.array_equal(found, again)
    assert [each.shape for each in states] == [(len(ids), 64) for ids in sentences[:3]]
    assert model.encoder.fp8 is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bert", "albert", "gpt2", "modernbert"])
def test_one_native_call_has_the_bits_of_the_ops(kind: str, sentences: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    """If both multiply with the core's choice of cuBLASLt's algorithms."""

    def multiply(a: Any, b: Any, dtype: torch.dtype, bias: Any = None, *, fast: bool) -> torch.Tensor:
        d = torch.empty(len(a[0]), len(b[0]), dtype=dtype, device=a[0].device)
        return fp8_native.gemm(d, a, b, bias, fast=fast)

    inputs = [*sentences, list(range(1, 201))]
    model = model_of(kind, width=128).to("cuda")
    with Session(model, precision="fp8", calibration=sentences[:8], max_graphs=0) as session:
        stack, calls = session.network.base.encoder.fp8, []
        run_whole = stack.run_whole
        monkeypatch.setattr(stack, "run_whole", lambda *given: calls.append(run_whole(*given)) or calls[-1])
        found = session.encode(inputs, output="states")
        assert calls
        assert all(each is not None for each in calls)
        monkeypatch.setattr(stack, "run_whole", lambda *_: None)
        monkeypatch.setattr(fp8, "gemm", multiply)
        expected = session.encode(inputs, output="states")
    assert all(np.array_equal(own, known) for own, known in zip(found, expected, strict=True))


def test_hidden_states_are_those_of_fp8(sentences: Ids) -> None:
    model = model_of("gpt2")
    calibration = {"precision": "fp8", "calibration": sentences[:8]}
    for layers in ("last", "second-to-last", "concat:3"):
        settings = EmbedSettings(layers=layers)
        expected = Session(model, settings=settings).encode(sentences[5], output="states")
        found = Session(model, settings=settings, **calibration).encode(sentences[5], output="states")
        assert found.shape == expected.shape
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 1e-6 < error < 0.1


def test_a_calibration_holds_the_largest_magnitudes(sentences: Ids) -> None:
    """The first one is that of the embeddings."""
    model = model_of("bert")
    inputs = []
    hooks = [each.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for each in model.encoder.layers]
    with torch.no_grad():
        for ids in sentences[:4]:
            model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    session = Session(model, precision="fp8", calibration=sentences[:4], max_tokens=64)
    assert session.calibration is not None
    assert session.calibration.tokens == sum(map(len, sentences[:4]))
    for layer, amax in enumerate(session.calibration.amax):
        expected = max(each.abs().max().item() for each in inputs[layer::3])
        assert amax[0] == pytest.approx(expected, rel=1e-5)
        assert all(0 < each < 100 for each in amax)


def test_an_input_within_the_room_does_not_saturate(sentences: Ids) -> None:
    model = model_of("bert")
    session = Session(model, precision="fp8", calibration=sentences[:4])
    assert session.calibration is not None
    static = session.network.base.encoder.fp8._static
    for layer, amax in zip(static, session.calibration.amax, strict=True):
        for linear, largest in zip(layer, amax, strict=True):
            assert 448 / 4 < linear.input.scale.item() * largest <= 448 / 2


def test_the_file_next_to_a_checkpoint(wordpiece: Tokenizer, tmp_path: Path, sentences: Ids) -> None:
    save_bert(wordpiece, tmp_path)
    sentences = [[index % wordpiece.vocab_size for index in ids] for ids in sentences[:16]]
    with pytest.raises(ValueError, match=f"calibration: expected texts, or {CALIBRATION} next to the checkpoint"):
        Session(tmp_path, precision="fp8")
    first = Session(tmp_path, precision="fp8", calibration=sentences[:16])
    assert first.calibration is not None
    assert first.calibration.save(tmp_path) == tmp_path / CALIBRATION
    second = Session(tmp_path, precision="fp8")
    assert second.calibration == first.calibration
    assert np.array_equal(first.encode(sentences[:8]), second.encode(sentences[:8]))
    given = Session(tmp_path, precision="fp8", calibration=first.calibration)
    assert np.array_equal(first.encode(sentences[:8]), given.encode(sentences[:8]))

    stored = json.loads((tmp_path / CALIBRATION).read_text())
    del stored["amax"][0]["down"]
    (tmp_path / CALIBRATION).write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match="expected magnitudes of layers, got KeyError"):
        Session(tmp_path, precision="fp8")


def test_bad_calibrations() -> None:
    model = model_of("bert")
    with pytest.raises(ValueError, match="calibration: expected None with precision=None"):
        Session(model, calibration=[[1, 2]])
    with pytest.raises(ValueError, match="calibration: expected texts with tokens, got none"):
        Session(model, precision="fp8", calibration=[])
    with pytest.raises(ValueError, match=r"amax: expected finite magnitudes of shape \(3, 4\)"):
        Session(model, precision="fp8", calibration=Calibration(((1.0,) * 4,) * 2, 5))
    with pytest.raises(ValueError, match="amax: expected finite magnitudes"):
        Session(model, precision="fp8", calibration=Calibration(((float("nan"),) * 4,) * 3, 5))


def test_layers_of_other_classes_are_refused(sentences: Ids) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    model = models.MPNetModel(models.MPNetConfig(vocab_size=300, **sizes)).eval()
    with pytest.raises(ValueError, match="model: expected one whose layers are PackedLayers or RotaryLayers"):
        Session(model, precision="fp8", calibration=sentences[:2])


def test_layers_with_hooks_are_refused(sentences: Ids) -> None:
    """They are not called."""
    model = model_of("bert")
    model.encoder.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="model: expected layers that are not watched"):
        Session(model, precision="fp8", calibration=sentences[:2])
