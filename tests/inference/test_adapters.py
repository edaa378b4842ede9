"""Sessions with several LoRA adapters: a text gets the result of its adapter, next to texts with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_parity import config_of

from fasttfm import models
from fasttfm.inference import Session
from fasttfm.models import CheckpointError, add_adapter, merge_adapter, save_adapter
from fasttfm.models.lora import adapters_in

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
LENGTHS = (5, 30, 12, 40, 7, 60, 33, 2, 1, 21)
NAMES = ["queries", "codes", None, "titles", "queries", "codes", "titles", "queries", None, "codes"]
TARGETS = {"queries": ("qkv", "out", "up", "down"), "codes": ("qkv", "down"), "titles": ("up",)}
SESSIONS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="cuda"),
]


def inputs() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(5, 97, length).tolist() for length in LENGTHS]


def written(name: str, directory: Path) -> Any:
    """A model, and adapters of different ranks in folders of its directory."""
    torch.manual_seed(0)
    changes: dict[str, Any] = {"initializer_range": 0.1, "pad_token_id": 0}
    if name.startswith("Qwen3"):
        changes |= {"num_key_value_heads": 1, "head_dim": 64}
    kind = getattr(models, name)
    kind(config_of(models, name, {**SIZES, **changes})).save_pretrained(directory)
    for number, (adapter, targets) in enumerate(TARGETS.items()):
        model = kind.from_pretrained(directory)
        add_adapter(model, 4 + number, targets=targets, rslora=number == 1)
        for _, module in adapters_in(model):
            torch.nn.init.normal_(module.lora_b, std=0.1)
        save_adapter(model, directory / adapter)
    return kind


def session_of(kind: Any, directory: Path, device: str, **options: Any) -> Session:
    model = kind.from_pretrained(directory)
    names = {name: directory / name for name in TARGETS}
    return Session(model, device=device, adapters=names, **options)


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel", "Qwen3Model", "AlbertModel", "MPNetModel"])
@pytest.mark.parametrize("device", SESSIONS)
def test_each_text_has_its_adapter(name: str, device: str, tmp_path: Path) -> None:
    """All of one batch, and of several, are those of models with merged adapters."""
    kind = written(name, tmp_path)
    texts = inputs()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 0.05, "atol": 0.05}
    with session_of(kind, tmp_path, device) as session, session_of(kind, tmp_path, device, max_tokens=64) as small:
        found = [each.encode(texts, adapter=NAMES) for each in (session, small)]
        states = session.encode(texts, adapter=NAMES, output="states")
        again = session.encode(texts, adapter=NAMES)  # by a CUDA graph, on a GPU
        plain = session.encode(texts)
        alone = session.encode(texts[1], adapter="codes")
    expected = np.empty_like(plain)
    for adapter in (None, *TARGETS):
        model = kind.from_pretrained(tmp_path)
        if adapter is not None:
            merge_adapter(model, tmp_path / adapter)
        with Session(model, device=device, dtype=dtype) as merged:
            own = [index for index, each in enumerate(NAMES) if each == adapter]
            expected[own] = merged.encode([texts[index] for index in own])
            if adapter is None:
                np.testing.assert_allclose(plain, merged.encode(texts), **tolerance)
            else:
                assert np.abs(expected[own] - plain[own]).max() > 0.05
    for each in (*found, again):
        np.testing.assert_allclose(each, expected, **tolerance)
    np.testing.assert_allclose(alone, expected[1], **tolerance)
    assert [len(each) for each in states] == list(LENGTHS)


def test_requests_with_adapters_form_a_batch(tmp_path: Path) -> None:
    kind = written("BertModel", tmp_path)
    texts = inputs()
    with session_of(kind, tmp_path, "cpu") as session:
        expected = session.encode(texts, adapter=NAMES)
        futures = [session.submit(text, adapter=name) for text, name in zip(texts, NAMES, strict=True)]
        for future, row in zip(futures, expected, strict=True):
            np.testing.assert_allclose(future.result(), row, rtol=1e-4, atol=1e-5)
        sequences = session.read(texts, adapter=NAMES)
        np.testing.assert_allclose(session.submit_sequences(sequences).result(), expected, rtol=1e-4, atol=1e-5)


def test_adapters_stay_when_weights_are_taken(tmp_path: Path) -> None:
    kind = written("BertModel", tmp_path)
    model = kind.from_pretrained(tmp_path)
    names = {name: tmp_path / name for name in TARGETS}
    with Session(model, device="cpu", adapters=names) as session:
        before = session.encode(inputs(), adapter=NAMES)
        with torch.no_grad():
            model.encoder.layers[0].up.weight.mul_(1.5)
        assert session.take_weights(model)
        after = session.encode(inputs(), adapter=NAMES)
    assert np.abs(before - after).max() > 1e-3
    with Session(model, device="cpu", adapters=names) as session:
        np.testing.assert_allclose(after, session.encode(inputs(), adapter=NAMES), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        ("code", "adapter: expected queries, codes, titles, got 'code'"),
        (["codes", "code"], "adapter: expected queries, codes, titles, got 'code'"),
        (["codes"], "adapter: expected a name, or one for each of 2 inputs, got 1"),
    ],
)
def test_wrong_names(adapter: Any, sentence: str, tmp_path: Path) -> None:
    kind = written("BertModel", tmp_path)
    with session_of(kind, tmp_path, "cpu") as session, pytest.raises(ValueError, match=sentence):
        session.encode(inputs()[:2], adapter=adapter)
    with (
        Session(kind.from_pretrained(tmp_path), device="cpu") as session,
        pytest.raises(ValueError, match="because the session has no adapters"),
    ):
        session.encode(inputs()[:2], adapter="codes")


def test_what_sessions_do_not_take(tmp_path: Path) -> None:
    kind = written("BertModel", tmp_path)
    with pytest.raises(ValueError, match="adapters: expected without precision"):
        session_of(kind, tmp_path, "cpu", precision="int8")
    model = kind.from_pretrained(tmp_path)
    add_adapter(model, 4)
    with pytest.raises(ValueError, match="precision: expected a model without adapters"):
        Session(model, device="cpu", precision="int8")
    classifier = models.BertForSequenceClassification(config_of(models, "BertModel", SIZES))
    add_adapter(classifier, 4)
    save_adapter(classifier, tmp_path / "head", heads=["classifier.weight", "classifier.bias"])
    classifier = models.BertForSequenceClassification(config_of(models, "BertModel", SIZES)).eval()
    with pytest.raises(CheckpointError, match="expected an adapter without modules_to_save"):
        Session(classifier, device="cpu", adapters={"head": tmp_path / "head"})


def test_a_trained_adapter_that_is_not_merged(tmp_path: Path) -> None:
    """A session of a model with an adapter computes it in its plan."""
    kind = written("BertModel", tmp_path)
    model = kind.from_pretrained(tmp_path)
    models.load_adapter(model, tmp_path / "queries")
    merged = kind.from_pretrained(tmp_path)
    merge_adapter(merged, tmp_path / "queries")
    found, expected = (Session(each, device="cpu").encode(inputs()) for each in (model, merged))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
