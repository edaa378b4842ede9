"""Models with rotary positions against transformers: checkpoints, outputs, gradients and continuations."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import TEXTS, save_tokenizer
from model_parity import IDS, MASKS, SIZES, check_layout, pair, tensors
from torch import Tensor

from fasttfm import models
from fasttfm.generate import CachedDecoder, generate, stream
from fasttfm.inference import EmbedSettings, Session
from fasttfm.models import CheckpointError
from fasttfm.nn import PackedBatch
from fasttfm.ops.layers import stack

transformers = pytest.importorskip("transformers")

IDS_OF_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EURO = {**IDS_OF_TOKENS, "num_key_value_heads": 1, "num_hidden_layers": 3}
QWEN3 = {**IDS_OF_TOKENS, "num_key_value_heads": 1, "head_dim": 24, "num_hidden_layers": 3}
# Three layers: the last two are local, with a window that ends inside of the sequences.
ETTIN = {**IDS_OF_TOKENS, "num_hidden_layers": 3, "local_attention": 6}
# Three layers: the second attends to all tokens, the others to a window that ends inside of the sequences.
GEMMA = {**QWEN3, "sliding_window": 4, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}
DECODER = "ModernBertDecoderForCausalLM"
LAYOUTS = [
    ("EuroBertModel", "right", True),
    ("EuroBertModel", "full", False),
    ("EuroBertForMaskedLM", "right", False),
    ("EuroBertForMaskedLM", "full", True),
    ("EuroBertForSequenceClassification", "right", True),
    ("EuroBertForSequenceClassification", "right", False),
    ("EuroBertForTokenClassification", "right", True),
    ("NomicBertModel", "right", True),
    ("NomicBertForMaskedLM", "full", True),
    ("NomicBertForSequenceClassification", "right", False),
    ("NomicBertForTokenClassification", "full", False),
    ("Qwen3Model", "right", True),
    ("Qwen3Model", "full", False),
    ("Qwen3ForCausalLM", "full", False),
    ("LlamaModel", "right", True),
    ("LlamaForCausalLM", "full", True),
    ("LlamaForSequenceClassification", "full", False),
    ("Qwen3ForSequenceClassification", "full", True),
    ("Gemma3TextModel", "right", True),
    ("Gemma3TextModel", "full", False),
    ("Gemma3ForCausalLM", "full", True),
    ("Gemma3TextForSequenceClassification", "full", False),
    ("ModernBertDecoderModel", "right", True),
    ("ModernBertDecoderForCausalLM", "full", True),
    ("ModernBertDecoderForCausalLM", "full", False),
    ("ModernBertDecoderForSequenceClassification", "full", False),
]


def sizes_of(name: str, **changes: Any) -> dict[str, Any]:
    sizes = {"Euro": EURO, "Nomi": {"num_hidden_layers": 3}, "Qwen": QWEN3, "Llam": EURO, "Mode": ETTIN, "Gemm": GEMMA}
    return {**sizes[name[:4]], **changes}


def of_nomic_bert(ours: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors, of tensors with the names of transformers' modules, which are not those of its checkpoints."""
    names = {"embeddings.LayerNorm": "emb_ln", "self_attn.o_proj": "attn.out_proj", "up_proj": "fc11"}
    names |= {"gate_proj": "fc12", "down_proj": "fc2", "post_attention_layernorm": "norm1"}
    names |= {"post_mlp_layernorm": "norm2", "self_attn.q_proj": "attn.Wqkv"}
    found = {}
    for full, tensor in tensors.items():
        if ".k_proj" in full or ".v_proj" in full:
            continue
        if ".q_proj" in full:
            tensor = torch.cat([tensors[full.replace(".q_proj", f".{part}_proj")] for part in "qkv"])
        name = re.sub(r"\blayers\b", "encoder.layers", full)
        for theirs, stored in names.items():
            name = name.replace(theirs, stored)
        found[name] = tensor
    return dict(ours.own_tensors(found))


@pytest.mark.parametrize(("name", "kind", "packed"), LAYOUTS)
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path, **sizes_of(name))
    nomic = name.startswith("NomicBert")
    translate = partial(of_nomic_bert, ours) if nomic else None
    check_layout(name, ours, theirs, kind, packed=packed, segments=nomic, translate=translate)


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_pooling(pooling: str, tmp_path: Path) -> None:
    name = "EuroBertForSequenceClassification"
    check_layout(name, *pair(name, tmp_path, **EURO, classifier_pooling=pooling), "right", packed=False, segments=False)


@pytest.mark.parametrize("window", [4, 5])
def test_gemma_attends_in_both_directions(window: int, tmp_path: Path) -> None:
    changes = {**GEMMA, "use_bidirectional_attention": True, "sliding_window": window, "attention_bias": True}
    ours, theirs = pair("Gemma3TextModel", tmp_path, **changes)
    check_layout("Gemma3TextModel", ours, theirs, "right", packed=False, segments=False)
    ours.save_pretrained(tmp_path / "again")
    again = transformers.Gemma3TextModel.from_pretrained(tmp_path / "again")
    assert again.config.sliding_window == theirs.config.sliding_window


def test_biases_of_a_modernbert_decoder(tmp_path: Path) -> None:
    names = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    changes = {**ETTIN, **dict.fromkeys(names, True), "decoder_bias": False}
    for name in ("ModernBertDecoderForCausalLM", "ModernBertDecoderForSequenceClassification"):
        check_layout(name, *pair(name, tmp_path / name, **changes), "full", packed=False, segments=False)


@pytest.mark.parametrize("changes", [{"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 3}], ids=str)
def test_biases_and_heads(changes: dict[str, Any], tmp_path: Path) -> None:
    name = "EuroBertForMaskedLM"
    check_layout(name, *pair(name, tmp_path, **{**EURO, **changes}), "right", packed=False, segments=False)


def test_a_reranker_reads_the_last_token(tmp_path: Path) -> None:
    """Of each padded text, the last token that is not padding."""
    name = "Qwen3ForSequenceClassification"
    ours, theirs = pair(name, tmp_path, **{**QWEN3, "num_labels": 1})
    mask = MASKS["right"]
    ids = IDS.where(mask, 0)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask.long()).logits
        torch.testing.assert_close(ours(ids, mask).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["EuroBertForMaskedLM", "NomicBertForMaskedLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", DECODER]
)
def test_checkpoints_go_both_ways(name: str, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path, **sizes_of(name))
    ours.save_pretrained(tmp_path / "again")
    again = getattr(transformers, name).from_pretrained(tmp_path / "again").eval()
    assert again.config.rope_parameters == theirs.config.rope_parameters
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    made = getattr(models, name)(type(ours.config)(**{**SIZES, **sizes_of(name)})).eval()
    made.save_pretrained(tmp_path / "made")
    read = getattr(transformers, name).from_pretrained(tmp_path / "made").eval()
    with torch.no_grad():
        found, expected = tensors(made(IDS, output_logits=True)), tensors(read(IDS))
    torch.testing.assert_close(found["logits.0"], expected["logits.0"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["EuroBertModel", "NomicBertModel", "Qwen3Model", "ModernBertDecoderModel"])
def test_layers_run_by_one_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = stack.run_stack
    monkeypatch.setattr(stack, "run_stack", lambda specs, *rest: calls.append(len(specs)) or run(specs, *rest))
    config = getattr(models, name.replace("Model", "Config"))(**{**SIZES, **sizes_of(name)})
    model = getattr(models, name)(config).eval()
    plain = model(IDS).last_hidden_state
    assert calls == [3]
    states = model(IDS, output_hidden_states=True)  # layer by layer, by ops
    assert calls == [3]
    torch.testing.assert_close(states.last_hidden_state, plain, rtol=1e-4, atol=1e-4)


def test_weights_of_a_causal_model_are_those_of_transformers(tmp_path: Path) -> None:
    ours, theirs = pair("Qwen3Model", tmp_path, **QWEN3, attn_implementation="eager")
    with torch.no_grad():
        found, expected = (model(IDS, output_attentions=True).attentions for model in (ours, theirs))
    for got, true in zip(found, expected, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("LlamaForCausalLM", 1),
        ("LlamaForCausalLM", 3),
        ("Qwen3ForCausalLM", 1),
        ("Qwen3ForCausalLM", 3),
        ("Gemma3ForCausalLM", 1),
        (DECODER, 3),
    ],
)
def test_continuations_are_those_of_transformers(name: str, heads: int, tmp_path: Path) -> None:
    """Greedy and by beams, of prompts of different lengths, with a cache of grouped heads."""
    ours, theirs = pair(name, tmp_path, **sizes_of(name, num_key_value_heads=heads, eos_token_id=None))
    mask = MASKS["right"].long().flip(-1)  # transformers continues after padding in front
    ids = IDS.where(mask.bool(), 0)
    for options in ({}, {"num_beams": 2}):
        own = {"max_new_tokens": 6, "pad_token_id": 0, **options}
        expected = theirs.generate(ids, attention_mask=mask, do_sample=False, **own)
        assert torch.equal(generate(ours, ids, mask, **own), expected)
    assert list(stream(ours, IDS[0], max_new_tokens=4)) == generate(ours, IDS[:1], max_new_tokens=4)[0, -4:].tolist()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", DECODER])
def test_the_cache_changes_nothing(name: str) -> None:
    """The state of every step against those of the whole sequences."""
    torch.manual_seed(0)
    kind = getattr(models, name)
    model = kind(kind.config_class(**{**SIZES, **sizes_of(name)})).eval()
    lengths, batch = [4, 9, 1], PackedBatch.of(IDS, lengths=[4, 9, 1])
    decoder = CachedDecoder(model.model, IDS.shape[1] + 5)
    following = IDS[:, :5].flip(0)
    states = [decoder.read(batch.pack(IDS), batch), *(decoder.step(following[:, column]) for column in range(5))]
    for row, length in enumerate(lengths):
        whole = torch.cat([IDS[row, :length], following[row]])[None]
        with torch.no_grad():
            expected = model.model(whole).last_hidden_state[0, length - 1 :]
        torch.testing.assert_close(torch.stack(states, 1)[row], expected, rtol=1e-4, atol=1e-4)


def test_generation_needs_causal_attention() -> None:
    config = models.Gemma3TextConfig(**{**SIZES, **GEMMA, "use_bidirectional_attention": True})
    with pytest.raises(ValueError, match="expected causal attention, got layers that attend to later tokens"):
        generate(models.Gemma3ForCausalLM(config).eval(), IDS, max_new_tokens=2)


def test_sequences_end_at_the_last_position(tmp_path: Path) -> None:
    ours, _ = pair("LlamaForCausalLM", tmp_path, **EURO)
    with pytest.raises(ValueError, match="expected no more than 21 tokens with the prompt, got 13 after 9"):
        generate(ours, IDS[:1], max_new_tokens=13)


def save_with_tokenizer(name: str, first: str, directory: Path) -> None:
    """A tiny model and its tokenizer."""
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config").named("tiny", vocab_size=300, pad_token_id=0, initializer_range=0.1)
    getattr(models, f"{name}Model")(config).save_pretrained(directory)
    save_tokenizer(first, directory)


@pytest.mark.parametrize(
    ("name", "first", "pooling"), [("EuroBert", "<|begin|>", "mean"), ("Qwen3", "", "last")], ids=["EuroBert", "Qwen3"]
)
def test_vectors_of_texts_are_those_of_transformers(name: str, first: str, pooling: str, tmp_path: Path) -> None:
    save_with_tokenizer(name, first, tmp_path)
    theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXTS, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        states = theirs(**inputs).last_hidden_state
    mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = mean if pooling == "mean" else states[torch.arange(len(TEXTS)), mask.sum(1) - 1]
    settings = EmbedSettings(pooling=pooling)
    with Session(tmp_path, settings=settings, device="cpu") as session:
        torch.testing.assert_close(torch.as_tensor(session.encode(TEXTS)), expected, rtol=1e-4, atol=1e-5)
    with Session(tmp_path, settings=settings, device="cpu", precision="int8") as session:
        similar = torch.cosine_similarity(torch.as_tensor(session.encode(TEXTS)), expected)
    assert similar.min() > 0.99


def test_embeddinggemma_folder(tmp_path: Path) -> None:
    """Attention in both directions, means, two dense layers without activations, and unit length, as the published
    folder."""
    library = pytest.importorskip("sentence_transformers", reason="the vectors are compared with its own")
    save_with_tokenizer("Gemma3Text", "<|begin|>", tmp_path / "model")
    config = models.Gemma3TextConfig.from_pretrained(tmp_path / "model")
    config.use_bidirectional_attention, config.sliding_window = True, 6
    config.save_pretrained(tmp_path / "model")
    modules = library.sentence_transformer.modules
    parts = [modules.Transformer(str(tmp_path / "model")), modules.Pooling(128, "mean")]
    for sizes in ((128, 96), (96, 128)):
        parts.append(modules.Dense(*sizes, bias=False, activation_function=torch.nn.Identity()))
    theirs = library.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    theirs.save(str(tmp_path / "folder"))
    with Session(tmp_path / "folder", device="cpu") as session:
        found = torch.as_tensor(session.encode(TEXTS))
    torch.testing.assert_close(found, torch.as_tensor(theirs.encode(TEXTS)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "field", "value", "sentence"),
    [
        (
            "EuroBertModel",
            "rope_parameters",
            {"rope_type": "longrope"},
            "rope_type: expected .*, got .longrope.",
        ),
        ("Qwen3Model", "use_sliding_window", True, "use_sliding_window: expected False"),
        ("Gemma3TextModel", "final_logit_softcapping", 30.0, "final_logit_softcapping: expected .*, got 30.0"),
        ("EuroBertForSequenceClassification", "classifier_pooling", "max", "expected bos, mean, late, got 'max'"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, field: str, value: Any, sentence: str, tmp_path: Path) -> None:
    config = getattr(models, f"{name.partition('For')[0].removesuffix('Model')}Config")
    getattr(models, name)(config(**{**SIZES, **sizes_of(name)})).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=sentence):
        getattr(models, name).from_pretrained(tmp_path)
