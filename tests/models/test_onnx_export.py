"""ONNX export: the plain form that is exported gives the results of the model, and so does onnxruntime."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from every_family import padded, refused, small
from torch import Tensor

from fasttfm import models
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.models.onnx_export import _output_names, _plain, _PlainModel

_ALL = [(name, head) for name, family in FAMILIES.items() for head in family.models]


def of_tokens(output: Any, key: str, inputs: dict[str, Tensor]) -> Tensor:
    """An output without the rows of padding."""
    value, mask = torch.as_tensor(output), inputs["attention_mask"]
    return value[mask.bool()] if value.shape[: mask.dim()] == mask.shape and key != "start_logits" else value


@pytest.mark.parametrize(("name", "head"), _ALL, ids=[f"{name}-{head.name}" for name, head in _ALL])
def test_the_plain_form_matches_the_model(name: str, head: Head) -> None:
    model = small(name, head)
    other = name in ("ernie_knowledge", "vit") or (name, head) == ("electra", Head.PRETRAINING)
    other = other or head is Head.GRAPH_CHOICE
    assert refused(model) == other
    if refused(model):
        return
    model, inputs = model.double(), padded(model)
    with torch.no_grad():
        expected = model(**inputs)
        with _plain(model):
            found = _PlainModel(model).called(*inputs.values())
        again = model(**inputs)
    assert found.keys() == expected.keys()
    for key in expected.keys():  # noqa: SIM118 - an output is no mapping
        assert torch.equal(again[key], expected[key])
        # fp64: a few roundings of numbers around 1.
        assert torch.allclose(of_tokens(found[key], key, inputs), of_tokens(expected[key], key, inputs), atol=1e-10)


_DISTANCES = {
    "relative_attention": True,
    "position_buckets": 4,
    "max_relative_positions": 8,
    "norm_rel_ebd": "layer_norm",
}


@pytest.mark.parametrize("terms", [["c2p"], ["p2c", "c2p"]], ids="|".join)
@pytest.mark.parametrize("shared", [True, False])
def test_distances_of_deberta(terms: list[str], shared: bool) -> None:
    changes = {**_DISTANCES, "pos_att_type": terms, "share_att_key": shared}
    model = small("deberta-v2", Head.SEQUENCE_CLASSIFICATION, **changes).double()
    inputs = padded(model)
    with torch.no_grad(), _plain(model):
        found = _PlainModel(model).called(*inputs.values()).logits
    with torch.no_grad():
        assert torch.allclose(found, model(**inputs).logits, atol=1e-10)


@pytest.mark.parametrize("name", ["deberta-v2", "xlnet"])
def test_models_that_read_distances_are_traced_for_all_sizes(name: str) -> None:
    model = small(name, Head.NONE, **(_DISTANCES | {"pos_att_type": ["p2c", "c2p"]} if name == "deberta-v2" else {}))
    inputs = padded(model)
    sizes = {index: torch.export.Dim(axis, min=1) for index, axis in enumerate(("batch", "sequence"))}
    with torch.no_grad(), _plain(model):
        plain = _PlainModel(model).eval()
        example = tuple(value[:2, :5].contiguous() for value in inputs.values())
        program = torch.export.export(plain, example, dynamic_shapes=tuple(dict(sizes) for _ in example))
        assert not [node for node in program.graph.nodes if "fasttfm" in str(node.target)]
        found = program.module()(*inputs.values())[0]
    there = inputs["attention_mask"].bool()
    with torch.no_grad():
        torch.testing.assert_close(found[there], model(**inputs).last_hidden_state[there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gemma3_text"])
def test_the_plain_form_has_ops_of_torch_only(name: str) -> None:
    model = small(name, Head.NONE)
    with torch.no_grad(), _plain(model):
        program = torch.export.export(_PlainModel(model).eval(), tuple(padded(model).values()))
    assert not [node for node in program.graph.nodes if "fasttfm" in str(node.target)]


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "modernbert"])
def test_hidden_states_and_attentions_of_the_configuration(name: str) -> None:
    model = small(name, Head.SEQUENCE_CLASSIFICATION, output_hidden_states=True, output_attentions=True).double()
    inputs = padded(model)
    there = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs)
        with _plain(model):
            found = _PlainModel(model).called(*inputs.values())
    layers = len(expected.attentions)
    states = [f"hidden_states.{index}" for index in range(layers + 1)]
    assert _output_names(found) == ["logits", *states, *(f"attentions.{index}" for index in range(layers))]
    for own, plain in zip(expected.hidden_states, found.hidden_states, strict=True):
        assert torch.allclose(own[there], plain[there], atol=1e-10)
    for own, plain in zip(expected.attentions, found.attentions, strict=True):
        # The model's weights are in fp32: 2**-23 of numbers below 1.
        assert torch.allclose(own.double().transpose(1, 2)[there], plain.transpose(1, 2)[there], atol=2**-23)


@pytest.mark.parametrize("head", [Head.SEQUENCE_CLASSIFICATION, Head.MULTIPLE_CHOICE], ids=lambda head: head.name)
@pytest.mark.parametrize("pad_token_id", [None, 7])
def test_gpt_heads_read_the_last_token_wherever_padding_is(head: Head, pad_token_id: int | None) -> None:
    model = small("gpt2", head, pad_token_id=pad_token_id).double()
    inputs = padded(model)
    inputs["attention_mask"] = inputs["attention_mask"].flip(-1)  # padding in front
    inputs["input_ids"].view(4, 9)[0, 6:] = 7  # padding by its id, which the mask does not exclude
    inputs["input_ids"].view(4, 9)[1, 5:] = 7  # only padding: the first token is read
    with torch.no_grad():
        expected = model(**inputs)
        with _plain(model):
            found = _PlainModel(model).called(*inputs.values())
    key = "mc_logits" if head is Head.MULTIPLE_CHOICE else "logits"
    assert torch.allclose(found[key], expected[key], atol=1e-10)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert", Head.QUESTION_ANSWERING),
        ("roberta", Head.MASKED_LM),
        ("albert", Head.MULTIPLE_CHOICE),
        ("electra", Head.REPLACED_TOKENS),
        ("distilbert", Head.SEQUENCE_CLASSIFICATION),
        ("modernbert", Head.SEQUENCE_CLASSIFICATION),
        ("gpt2", Head.CAUSAL_LM),
        ("gpt2", Head.SEQUENCE_CLASSIFICATION),
        ("gpt2", Head.MULTIPLE_CHOICE),
        ("gpt", Head.SEQUENCE_CLASSIFICATION),
        ("gpt3", Head.MULTIPLE_CHOICE),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_onnxruntime_computes_the_same(name: str, head: Head, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch exports with it")
    onnxruntime = pytest.importorskip("onnxruntime", reason="it runs the file")
    model = small(name, head, output_hidden_states=head is Head.MASKED_LM, output_attentions=head is Head.MASKED_LM)
    inputs = padded(model)
    names = models.export_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_outputs()] == names
    found = session.run(names, {key: value.numpy() for key, value in inputs.items()})
    with torch.no_grad():
        single = model(**inputs)
        exact = model.double()(**inputs)
    for full_name, value in zip(names, found, strict=True):
        key, _, index = full_name.partition(".")
        one, reference = (output[key][int(index)] if index else output[key] for output in (single, exact))
        if key == "attentions":  # by queries
            value, one, reference = (torch.as_tensor(each).transpose(1, 2) for each in (value, one, reference))
        expected = of_tokens(reference, key, inputs)
        own = (of_tokens(one, key, inputs) - expected).abs().max()
        # As far from fp64 as the model in fp32, up to the order of sums.
        tolerance = max(4 * float(own), 4 * torch.finfo(torch.float32).eps * float(expected.abs().max()))
        assert float((of_tokens(value, key, inputs) - expected).abs().max()) <= tolerance


def test_the_exported_module_is_in_evaluation_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of one in training mode."""
    seen: list[bool] = []

    def export(module: torch.nn.Module, inputs: Any, path: Path, **options: Any) -> None:
        seen.extend(each.training for each in module.modules())
        path.touch()

    monkeypatch.setitem(sys.modules, "onnxscript", ModuleType("onnxscript"))
    monkeypatch.setattr(torch.onnx, "export", export)
    models.export_onnx(small("bert", Head.MASKED_LM).train(), tmp_path / "model.onnx")
    assert seen
    assert not any(seen)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    cases = [
        (small("electra", Head.PRETRAINING), path, "one of its two models, got ElectraForJointPreTraining"),
        (small("bert", Head.NONE).bfloat16(), path, "expected fp32 parameters on a CPU, got embeddings.*bfloat16"),
        (small("bert", Head.NONE), tmp_path / "model.pt", "a name that ends in .onnx"),
    ]
    for model, target, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            models.export_onnx(model, target)
    assert not list(tmp_path.iterdir())


def test_torchscript_is_refused() -> None:
    model = small("bert", Head.NONE)
    with pytest.raises(RuntimeError, match=r"BertModel: torch\.jit\.trace .* torch\.export"):
        torch.jit.trace(model, (torch.ones(2, 5, dtype=torch.int64),), strict=False)
