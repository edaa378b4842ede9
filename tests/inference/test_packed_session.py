"""Sessions in fp32 on a CPU: calls with few rows read packed copies of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import _native, data, models
from fasttfm.inference import Session, cpu_linear
from fasttfm.ops.layers import core_executor

pytestmark = pytest.mark.skipif(_native.missing() is not None, reason=str(_native.missing()))
SENTENCES = [list(range(5, 5 + length)) for length in (3, 17, 40, 1)]
SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
FAMILIES = {
    "post-LN": lambda: models.BertModel(models.BertConfig(**SIZES, intermediate_size=160)),
    "shared layers": lambda: models.AlbertModel(models.AlbertConfig(**SIZES, intermediate_size=128, embedding_size=32)),
    "pre-LN": lambda: models.GPT2Model(models.GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=2)),
    "rotary": lambda: models.ModernBertModel(models.ModernBertConfig(**SIZES, intermediate_size=96, pad_token_id=0)),
}


@pytest.fixture
def precisions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The precisions of the plans of all calls."""
    precisions: list[str] = []
    forward = core_executor.forward

    def counted(plan: Any, *arguments: Any) -> Any:
        gemms = [step for step in plan.forward if type(step).__name__.endswith("Gemm")]
        precisions.append(type(gemms[0]).__name__)
        return forward(plan, *arguments)

    monkeypatch.setattr(core_executor, "forward", counted)
    return precisions


def saved(make: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(folder)
    data.train_tokenizer("wordpiece", ["peace and trade with all nations"] * 9, 100).save(folder)
    return model


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_few_rows_read_packed_weights(make: Any, tmp_path: Path, precisions: list[str]) -> None:
    """As a session of the model, which shares the model's weights, to the rounding of sums in another order."""
    model = saved(make, tmp_path)
    many = [list(range(5, 205))] * (1 + cpu_linear._MOST_FP32_ROWS * torch.get_num_threads() // 200)
    with Session(str(tmp_path), device="cpu") as packed, Session(model) as shared:
        for texts, gemm in ((SENTENCES, "PackedGemm"), (many, "Gemm")):
            precisions.clear()
            found = packed.encode(texts)
            assert precisions == [gemm]
            np.testing.assert_allclose(found, shared.encode(texts), rtol=0, atol=2e-6)
            assert precisions == [gemm, "Gemm"]


def test_modules_that_are_watched_are_called(tmp_path: Path, precisions: list[str]) -> None:
    saved(FAMILIES["post-LN"], tmp_path)
    with Session(str(tmp_path), device="cpu") as session:
        expected = session.encode(SENTENCES)
        seen: list[torch.Size] = []
        layer = session.network.base.encoder.layers[1].up
        hook = layer.register_forward_hook(lambda module, inputs, y: seen.append(y.shape))
        np.testing.assert_allclose(session.encode(SENTENCES), expected, rtol=0, atol=2e-6)
        assert seen == [(61, 160)]
        hook.remove()
        precisions.clear()
        assert np.array_equal(session.encode(SENTENCES), expected)
        assert precisions == ["PackedGemm"]


def test_copies_of_large_models_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(FAMILIES["post-LN"], tmp_path)
    monkeypatch.setattr(cpu_linear, "_MOST_FP32_BYTES", 4 * (3 * 64 * (4 * 64 + 2 * 160)) - 1)
    with Session(str(tmp_path), device="cpu") as session:
        assert session.network.base.encoder.packed is None
    monkeypatch.undo()
    with Session(str(tmp_path), device="cpu") as session:
        assert session.network.base.encoder.packed is not None


def test_sessions_of_models_follow_their_weights(tmp_path: Path) -> None:
    """They share the memory of a model that somebody else holds, so there is no copy that would become stale."""
    model = saved(FAMILIES["post-LN"], tmp_path)
    with Session(model) as session:
        assert session.network.base.encoder.packed is None
        before = session.encode(SENTENCES)
        with torch.no_grad():
            model.encoder.layers[0].up.weight.mul_(2)
        assert session.take_weights(model)
        assert np.abs(session.encode(SENTENCES) - before).max() > 1e-3
