"""Sessions in int8 and in bf16 on a CPU: all layers in one native call."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import models, use_backend
from fasttfm.inference import Session, cpu_linear
from fasttfm.nn.plain import Tree
from fasttfm.ops.layers import core_executor

SENTENCES = [list(range(5, 5 + length)) for length in (3, 17, 40, 1, 128, 33, 64, 9)]
SIZES = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
NAMES = ("qkv", "out", "up", "down")
GROUPED = {"num_key_value_heads": 1}
PRECISIONS: dict[str, dict[str, Any]] = {"int8": {"precision": "int8"}, "bf16": {"dtype": torch.bfloat16}}


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """bf16 also on CPUs without instructions for it, where sessions would use fp32."""
    monkeypatch.setattr(cpu_linear, "has_bf16_instructions", lambda: True)
    return request.param


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.BertModel(models.BertConfig(**SIZES, intermediate_size=160)),
        lambda: models.AlbertModel(models.AlbertConfig(**SIZES, intermediate_size=128, embedding_size=32)),
        lambda: models.GPT2Model(models.GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=2)),
        lambda: models.ModernBertModel(models.ModernBertConfig(**SIZES, intermediate_size=96, pad_token_id=0)),
        lambda: models.NomicBertModel(models.NomicBertConfig(**SIZES, intermediate_size=96)),
        lambda: models.Qwen3Model(models.Qwen3Config(**SIZES, **GROUPED, intermediate_size=96, head_dim=32)),
    ],
    ids=["post-LN", "shared layers", "pre-LN", "rotary", "post-LN rotary", "RMSNorm and grouped heads"],
)
def test_layers_in_one_call_have_the_bits_of_single_layers(
    make: Any, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    calls: list[int] = []
    forward = core_executor.forward
    monkeypatch.setattr(core_executor, "forward", lambda *args: calls.append(1) or forward(*args))
    with Session(make().eval(), **PRECISIONS[precision]) as session:
        whole = session.encode(SENTENCES)
        assert len(calls) == 1
        session.network.base.encoder.packed = None
        assert np.array_equal(session.encode(SENTENCES), whole)
        assert len(calls) == 1
        assert copy.deepcopy(cpu_linear.PackedLayers.of(session.network.base.encoder, precision)) is None


def test_the_largest_columns_of_an_input_stay_in_fp32() -> None:
    """Those to which a norm gives large weights; the same ones each time."""
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(**SIZES, intermediate_size=128)).eval()
    model.encoder.layers[0].norm1.weight.data[[7, 50]] *= 80
    found = []
    for _ in range(2):
        with Session(model, precision="int8") as session:
            layers = session.network.base.encoder.layers
            found.append([[getattr(layer, name).weight.outliers.tolist() for name in NAMES] for layer in layers])
            assert layers[0].up.weight.panels[:, 50 // 4, :, 50 % 4].any().item() is False
    assert found[0] == found[1]
    assert found[0][0][NAMES.index("up")] == [7, 50]
    assert len({tuple(columns) for layer in found[0] for columns in layer}) > 3  # each input has its own


def test_sessions_in_bf16_run_no_ids_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16_instructions", lambda: True)
    monkeypatch.setattr(cpu_linear, "outlier_columns", lambda *args: pytest.fail("columns are of int8 alone"))
    Session(models.BertModel(models.BertConfig(**SIZES, intermediate_size=128)).eval(), dtype=torch.bfloat16)


def test_layers_with_different_activations(precision: str) -> None:
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(**SIZES, intermediate_size=128)).eval()
    model.encoder.layers[1].activation = "relu"
    with Session(model, **PRECISIONS[precision]) as session:
        whole = session.encode(SENTENCES)
        session.network.base.encoder.packed = None
        assert np.array_equal(session.encode(SENTENCES), whole)


def test_norms_of_heads_with_different_epsilons_run_one_by_one() -> None:
    torch.manual_seed(0)
    model = models.Qwen3Model(models.Qwen3Config(**SIZES, **GROUPED, intermediate_size=96, head_dim=32)).eval()
    model.encoder.layers[1].k_norm.eps = 0.5
    with Session(model, precision="int8") as session:
        assert session.network.base.encoder.packed is None
        assert np.isfinite(session.encode(SENTENCES)).all()


def test_a_requested_backend_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(**SIZES, intermediate_size=160)).eval()
    with Session(model, precision="int8") as session:
        calls: list[int] = []
        forward = core_executor.forward
        monkeypatch.setattr(core_executor, "forward", lambda *args: calls.append(1) or forward(*args))
        x, bounds = torch.randn(9, 64), torch.tensor((0, 9), dtype=torch.int32)
        encoder = session.network.base.encoder
        with torch.inference_mode():
            encoder(x, bounds, 9)
            assert len(calls) == 1
            with use_backend("reference"):
                encoder(x, bounds, 9)
            assert len(calls) == 1


@pytest.mark.parametrize("options", [{}, *PRECISIONS.values()], ids=["fp32", *PRECISIONS])
def test_a_call_looks_at_its_modules_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bf16_instructions", lambda: True)
    looks: list[Any] = []
    is_unchanged = Tree.is_unchanged
    monkeypatch.setattr(Tree, "is_unchanged", lambda tree: looks.append(tree.root) or is_unchanged(tree))
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(**SIZES, intermediate_size=128)).eval()
    with Session(model, **options) as session:
        expected = session.encode(SENTENCES[0])
        looks.clear()
        assert np.array_equal(session.encode(SENTENCES[0]), expected)
        assert looks == [session.network.base.encoder]


@pytest.mark.parametrize("watched", ["layers.0", "layers.2.norm1"])
def test_hooks_on_the_modules_of_a_session_run_from_then_on(watched: str) -> None:
    """Between two calls: the second one calls the modules."""
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(**SIZES, intermediate_size=128)).eval()
    with Session(model, precision="int8") as session:
        plain = session.encode(SENTENCES[0])
        hook = session.network.base.encoder.get_submodule(watched).register_forward_hook(_changed)
        assert not np.array_equal(session.encode(SENTENCES[0]), plain)
        hook.remove()
        assert np.array_equal(session.encode(SENTENCES[0]), plain)


@pytest.mark.parametrize("watched", ["layers.0", "layers.1.up", "layers.2.norm1"])
def test_hooks_of_the_model_run(watched: str) -> None:
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(**SIZES, intermediate_size=128)).eval()
    with Session(model, precision="int8") as session:
        plain = session.encode(SENTENCES)
    model.encoder.get_submodule(watched).register_forward_hook(_changed)
    with Session(model, precision="int8") as session:
        found = session.encode(SENTENCES)
        session.network.base.encoder.packed = None
        assert np.array_equal(session.encode(SENTENCES), found)
    assert not np.array_equal(found, plain)


def _changed(module: Any, inputs: Any, output: Any) -> Any:
    rows, *others = output if isinstance(output, tuple) else (output,)
    rows = 3 * rows + torch.arange(rows.shape[-1], dtype=rows.dtype)
    return (rows, *others) if others else rows
