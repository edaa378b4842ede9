"""ERNIE of Tsinghua against the equations of its paper in plain torch, on padded batches, in fp64 with gradients.

``plain`` reads tensors by the names of the released checkpoint, so that it also documents these names.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fasttfm import models, nn
from fasttfm.inference.opening import family_of
from fasttfm.models import CheckpointError
from fasttfm.models.entity_files import read_entities, read_names, read_vectors, write_embeddings
from fasttfm.models.ernie_knowledge import EntityTargets

B, S, V, E, N = 3, 9, 61, 20, 7
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
    "layer_types": ["sim", "mix", "norm", "norm"],
    "entity_hidden_size": E,
    "entity_num_attention_heads": 4,
    "num_entities": N,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(5, V, (B, S), generator=GENERATOR)
MASK = torch.arange(S) < torch.tensor([[9], [6], [2]])
ENTITIES = torch.where(torch.rand(B, S, generator=GENERATOR) < 0.3, torch.randint(N, (B, S), generator=GENERATOR), -1)
ENTITIES[:, 0] = -1
ENTITIES[2] = -1  # a sequence without a mention
WORDS = torch.where((torch.rand(B, S, generator=GENERATOR) < 0.3) & MASK, IDS, -100)
LABELS = torch.where((ENTITIES >= 0) & MASK, ENTITIES, -100)
FOLLOWS = torch.tensor([0, 1, 1])


def model(name: str = "PreTraining", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    torch.manual_seed(0)
    cls = models.ErnieKnowledgeModel if name == "Model" else getattr(models, f"ErnieKnowledgeFor{name}")
    made = cls(models.ErnieKnowledgeConfig(**{**SIZES, **changes})).to(dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def losses(made: Any, **changes: Any) -> Any:
    targets = {"labels": WORDS, "next_sentence_label": FOLLOWS, "entity_labels": LABELS, "entities": ENTITIES}
    return made(IDS, MASK, **{**targets, **changes})


# ---- the equations, in plain torch -----------------------------------------------------------------------------------


class Plain:
    """The released model: all streams are padded, tokens without an entity have the zero vector."""

    def __init__(self, weights: dict[str, Tensor], config: Any) -> None:
        self.weights, self.config = weights, config

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + self.config.layer_norm_eps).sqrt()
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def attention(self, name: str, output: str, x: Tensor, mask: Tensor, heads: int) -> Tensor:
        """LN(x + softmax(Q K^T / sqrt(d)) V W_o)"""
        q, k, v = (
            self.linear(f"{name}.{part}", x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        context = (scores.masked_fill(~mask[:, None, None], -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.norm(f"{output}.LayerNorm", x + self.linear(f"{output}.dense", context))

    def layer(self, name: str, kind: str, x: Tensor, e: Tensor, mask: Tensor, aligned: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        x = self.attention(f"{name}.attention.self", f"{name}.attention.output", x, mask, config.num_attention_heads)
        if kind == "sim":
            h = functional.gelu(self.linear(f"{name}.intermediate.dense", x))
            return self.norm(f"{name}.output.LayerNorm", x + self.linear(f"{name}.output.dense", h)), e
        if kind == "norm":
            parts = (f"{name}.attention.self_ent", f"{name}.attention.output_ent")
            e = self.attention(*parts, e, aligned, config.entity_num_attention_heads)
        e = e * aligned[..., None]
        fused = self.linear(f"{name}.intermediate.dense", x) + self.linear(f"{name}.intermediate.dense_ent", e)
        h = functional.gelu(fused)
        x = self.norm(f"{name}.output.LayerNorm", x + self.linear(f"{name}.output.dense", h))
        return x, self.norm(f"{name}.output.LayerNorm_ent", e + self.linear(f"{name}.output.dense_ent", h))

    def encode(self, ids: Tensor, mask: Tensor, entities: Tensor, vectors: Tensor) -> list[Tensor]:
        """The token stream before each layer and after the last."""
        w, at = self.weights, "bert.embeddings"
        x = w[f"{at}.word_embeddings.weight"][ids] + w[f"{at}.position_embeddings.weight"][: ids.shape[1]]
        x = self.norm(f"{at}.LayerNorm", x + w[f"{at}.token_type_embeddings.weight"][0])
        aligned = entities >= 0
        e = torch.where(aligned[..., None], vectors[entities.clamp(min=0)], 0.0)
        aligned = aligned & mask
        aligned[:, 0] = True
        states = [x]
        for number, kind in enumerate(self.config.types()):
            x, e = self.layer(f"bert.encoder.layer.{number}", kind, x, e, mask, aligned)
            states.append(x)
        return states

    def transform(self, name: str, x: Tensor) -> Tensor:
        return self.norm(f"{name}.LayerNorm", functional.gelu(self.linear(f"{name}.dense", x)))

    def loss(self, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w = self.weights
        words = self.transform("cls.predictions.transform", x) @ w["bert.embeddings.word_embeddings.weight"].T
        masked_lm = functional.cross_entropy((words + w["cls.predictions.bias"])[WORDS >= 0], WORDS[WORDS >= 0])
        pooled = torch.tanh(self.linear("bert.pooler.dense", x[:, 0]))
        follows = functional.cross_entropy(self.linear("cls.seq_relationship", pooled), FOLLOWS)
        candidates = LABELS[LABELS >= 0].unique()
        table = torch.cat([vectors.new_zeros(1, vectors.shape[1]), vectors[candidates]])  # the null entity first
        scores = self.transform("cls.predictions_ent.transform", x)[LABELS >= 0] @ table.T
        right = torch.searchsorted(candidates, LABELS[LABELS >= 0]) + 1
        return masked_lm, follows, functional.cross_entropy(scores, right)


def plain_of(made: Any) -> Plain:
    weights = made.checkpoint_tensors(dict(made.state_dict()))
    return Plain({name: value.clone().requires_grad_() for name, value in weights.items()}, made.config)


def test_every_layer_matches_the_equations() -> None:
    made = model("Model")
    full = {f"bert.{name}": value for name, value in made.checkpoint_tensors(dict(made.state_dict())).items()}
    states = Plain(full, made.config).encode(IDS, MASK, ENTITIES, made.entity_embeddings.weight)
    found = made(IDS, MASK, entities=ENTITIES, output_hidden_states=True).hidden_states
    assert len(found) == len(states) == 5
    for ours, theirs in zip(found, states, strict=True):
        torch.testing.assert_close(ours[MASK], theirs[MASK], rtol=1e-10, atol=1e-12)
    ignored = made(IDS, MASK, output_hidden_states=True).hidden_states
    assert torch.equal(ignored[1], found[1])  # a layer of BERT reads no entity
    assert not torch.allclose(ignored[2][MASK], found[2][MASK])


def test_gradients_match_the_equations() -> None:
    made = model("Model")
    tensors = made.checkpoint_tensors(dict(made.state_dict()))
    full = {f"bert.{name}": value.clone().requires_grad_() for name, value in tensors.items()}
    weight = torch.randn(B, S, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * MASK[..., None]
    last = Plain(full, made.config).encode(IDS, MASK, ENTITIES, made.entity_embeddings.weight)[-1]
    (last * weight).sum().backward()
    (made(IDS, MASK, entities=ENTITIES).last_hidden_state * weight).sum().backward()
    gradients = {name: each.grad for name, each in made.named_parameters() if each.grad is not None}
    assert len(gradients) > 70
    for name, gradient in made.checkpoint_tensors(gradients).items():
        torch.testing.assert_close(gradient, full[f"bert.{name}"].grad, rtol=1e-9, atol=1e-11, msg=name)


def test_losses_match_the_equations() -> None:
    """Losses divide by their counts in fp32: one rounding of it in every gradient."""
    made = model()
    plain, vectors = plain_of(made), made.knowledge.entity_embeddings.weight
    parts = plain.loss(plain.encode(IDS, MASK, ENTITIES, vectors)[-1], vectors)
    output = losses(made)
    torch.testing.assert_close(output.entity_loss, parts[2])
    torch.testing.assert_close(output.loss, sum(parts))
    output.loss.backward()
    sum(parts).backward()  # type: ignore[union-attr]
    unused = [name for name, each in made.named_parameters() if each.grad is None]
    last = "bert.encoder.layers.3"
    assert {name.rpartition(".")[0] for name in unused} == {
        "bert.entity_embeddings", f"{last}.entity_down", f"{last}.entity_norm2"
    }  # fmt: skip
    gradients = {name: each.grad for name, each in made.named_parameters() if each.grad is not None}
    bound = torch.finfo(torch.float32).eps * max(float(each.abs().max()) for each in gradients.values())
    for name, gradient in made.checkpoint_tensors(gradients).items():
        torch.testing.assert_close(gradient, plain.weights[name].grad, rtol=0, atol=bound, msg=name)


def test_a_wrong_equation_is_detected() -> None:
    """The comparison rejects equations without the bias of entities for tokens without one."""
    made = model("Model")
    full = {f"bert.{name}": value for name, value in made.checkpoint_tensors(dict(made.state_dict())).items()}
    full["bert.encoder.layer.1.intermediate.dense_ent.bias"] = torch.zeros(40, dtype=torch.float64)
    states = Plain(full, made.config).encode(IDS, MASK, ENTITIES, made.entity_embeddings.weight)
    found = made(IDS, MASK, entities=ENTITIES).last_hidden_state
    assert not torch.allclose(found[MASK], states[-1][MASK])


# ---- other layouts and paths -----------------------------------------------------------------------------------------


def packed() -> tuple[Tensor, dict[str, Any]]:
    cu_seqlens = nn.PackedBatch.of(IDS, MASK).cu_seqlens
    aligned = nn.AlignedEntities.of(ENTITIES[MASK], cu_seqlens, 64)
    return IDS[MASK], {"cu_seqlens": cu_seqlens, "max_seqlen": 64, "entities": aligned}


def test_a_packed_batch_with_its_entities_prepared() -> None:
    made = model()
    ids, layout = packed()
    expected = losses(made)
    entity_labels = EntityTargets.of(LABELS[MASK])
    found = made(ids, labels=WORDS[MASK], next_sentence_label=FOLLOWS, entity_labels=entity_labels, **layout)
    torch.testing.assert_close(found.loss, expected.loss)
    aligned = layout["entities"]
    assert aligned.count == int((ENTITIES[MASK] >= 0).sum()) + B  # and the first tokens
    assert aligned.cu_seqlens[-1] == aligned.count
    assert torch.equal(ENTITIES[MASK][aligned.positions], aligned.ids)


def test_modules_with_hooks_are_called() -> None:
    made, other = model("Model"), model("Model")
    calls: list[str] = []
    for name in ("up", "entity_up", "down", "entity_down", "entity_qkv", "norm2"):
        module = other.encoder.layers[2].get_submodule(name)
        module.register_forward_hook(lambda *_, name=name: calls.append(name))
    expected = made(IDS, MASK, entities=ENTITIES).last_hidden_state
    torch.testing.assert_close(other(IDS, MASK, entities=ENTITIES).last_hidden_state, expected)
    assert set(calls) == {"up", "entity_up", "down", "entity_down", "entity_qkv", "norm2"}


class Wrapped(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Adapted(torch.nn.Linear):
    """A linear layer with a term of low rank, as LoRA has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x[..., :1] * self.weight[:, 0]


PARTS = ("qkv", "out", "norm1", "up", "down", "norm2")
ALL_PARTS = (*PARTS, *(f"entity_{name}" for name in PARTS))


@pytest.mark.parametrize("name", ALL_PARTS)
def test_replaced_modules_are_called(name: str) -> None:
    """A wrapper, a subclass, a plain module of another kind and one with a hook: all change the result as their
    formula says, and the other layers stay as they are."""
    expected = model("Model")(IDS, MASK, entities=ENTITIES).last_hidden_state
    is_norm = "norm" in name

    def replaced(change: Any) -> Tensor:
        made = model("Model")
        change(made.encoder.layers[2], made.encoder.layers[2].get_submodule(name))
        found = made(IDS, MASK, entities=ENTITIES).last_hidden_state
        found.sum().backward()
        return found

    def wrap(layer: Any, module: Any) -> None:
        setattr(layer, name, Wrapped(module))

    def scale(layer: Any, module: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= 2

    def adapt(layer: Any, module: Any) -> None:
        module.__class__ = Adapted

    def merge(layer: Any, module: Any) -> None:
        with torch.no_grad():
            module.weight[:, 0] += module.weight[:, 0]

    def hook(layer: Any, module: Any) -> None:
        module.register_forward_hook(lambda *given: 2 * given[-1])

    def identity(layer: Any, module: Any) -> None:
        setattr(layer, name, torch.nn.Identity())

    def wrapped_identity(layer: Any, module: Any) -> None:
        setattr(layer, name, torch.nn.Sequential(torch.nn.Identity()))

    twice = replaced(scale)
    assert not torch.allclose(twice, expected)
    pairs = [(wrap, scale), (hook, scale), *([(identity, wrapped_identity)] if is_norm else [(adapt, merge)])]
    for change, same in pairs:
        torch.testing.assert_close(replaced(change), replaced(same))


def test_gradient_checkpointing_and_copies_change_nothing() -> None:
    made = model(dtype=torch.float32, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2).train()
    again = copy.deepcopy(made)
    again.gradient_checkpointing_enable()
    assert len([each for each in again.modules() if isinstance(each, nn.KnowledgeLayer)]) == 3
    results = []
    for each in (made, again):
        torch.manual_seed(3)
        loss = losses(each).loss
        loss.backward()
        results.append((loss.detach(), each.bert.encoder.layers[2].entity_up.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    torch.manual_seed(4)
    assert not torch.equal(losses(made).loss, results[0][0])  # another seed drops other elements


def test_autocast_and_a_projection() -> None:
    made = model(dtype=torch.float32, entity_embedding_size=12)
    assert made.knowledge.entity_embeddings(torch.tensor([-1, 2])).shape == (2, E)
    assert not made.knowledge.entity_embeddings(torch.tensor([-1])).any()
    expected = losses(made).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses(made).loss
    found.backward()
    assert float(((found - expected).abs() / expected).detach()) < 0.05
    assert made.knowledge.entity_embeddings.projection.weight.grad.isfinite().all()


def test_entities_that_do_not_exist_are_refused() -> None:
    made = model("Model")
    with pytest.raises(ValueError, match="ids: expected a number from -1 to 6, got 7"):
        made(IDS, MASK, entities=torch.full_like(IDS, 7))
    with pytest.raises(ValueError, match="set_entities: vectors: expected shape"):
        made.set_entities(["a"], torch.zeros(1, 3))
    for changes, message in (
        ({"layer_types": ["sim", "sun"]}, "layer_types: expected up to 4 of sim, mix, norm, got 'sun'"),
        ({"layer_types": ["sim"] * 5}, "layer_types: expected up to 4 of sim, mix, norm, got 5 layers"),
        ({"entity_num_attention_heads": 3}, "expected a divisor of entity_hidden_size, 20, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            model("Model", **changes)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def release(folder: Path) -> dict[str, Tensor]:
    """A file with the names and shapes of thunlp's release, written without this package's models, and its settings."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, width: int) -> None:
        shapes[f"{name}.gamma"] = shapes[f"{name}.beta"] = (width,)  # as files of that time have them

    width, inner = SIZES["hidden_size"], SIZES["intermediate_size"]
    for table, rows in (("word", V), ("position", SIZES["max_position_embeddings"]), ("token_type", 2)):
        shapes[f"bert.embeddings.{table}_embeddings.weight"] = (rows, width)
    norm("bert.embeddings.LayerNorm", width)
    for number, kind in enumerate(SIZES["layer_types"]):
        at = f"bert.encoder.layer.{number}"
        streams = [("", width), *([("_ent", E)] if kind == "norm" else [])]
        for suffix, size in streams:
            for part in ("query", "key", "value"):
                linear(f"{at}.attention.self{suffix}.{part}", size, size)
            linear(f"{at}.attention.output{suffix}.dense", size, size)
            norm(f"{at}.attention.output{suffix}.LayerNorm", size)
        for suffix, size in [("", width), *([("_ent", E)] if kind != "sim" else [])]:
            linear(f"{at}.intermediate.dense{suffix}", inner, size)
            linear(f"{at}.output.dense{suffix}", size, inner)
            norm(f"{at}.output.LayerNorm{suffix}", size)
    linear("bert.pooler.dense", width, width)
    for head, size in (("predictions", width), ("predictions_ent", E)):
        linear(f"cls.{head}.transform.dense", size, width)
        norm(f"cls.{head}.transform.LayerNorm", size)
    shapes["cls.predictions.bias"] = (V,)
    linear("cls.seq_relationship", 2, width)
    generator = torch.Generator().manual_seed(5)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    known = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    config = {name: SIZES[name] for name in (*known, "max_position_embeddings", "layer_types")}
    config |= {"hidden_act": "gelu", "type_vocab_size": 2, "initializer_range": 0.02}
    (folder / "ernie_config.json").write_text(json.dumps(config))
    return tensors


def test_the_release_of_thunlp_is_loaded_by_its_names(tmp_path: Path) -> None:
    tensors = release(tmp_path)
    assert family_of(tmp_path) is models.families.FAMILIES["ernie_knowledge"]
    changes = {"entity_hidden_size": E, "entity_num_attention_heads": 4}
    made = models.ErnieKnowledgeForPreTraining.from_pretrained(tmp_path, **changes)
    vectors = torch.randn(N, E, generator=torch.Generator().manual_seed(1))
    made.set_entities([f"Q{number}" for number in range(N)], vectors)
    named = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): each for name, each in tensors.items()}
    plain = Plain(named, made.config)
    expected = plain.loss(plain.encode(IDS, MASK, ENTITIES, vectors)[-1], vectors)
    torch.testing.assert_close(losses(made).loss, sum(expected))
    assert made.config.types() == SIZES["layer_types"]
    with pytest.raises(CheckpointError, match=r"layer.1.intermediate.dense_ent.weight: expected shape"):
        models.ErnieKnowledgeModel.from_pretrained(tmp_path, entity_hidden_size=24)


def test_a_checkpoint_keeps_the_entities(tmp_path: Path) -> None:
    made = model(dtype=torch.float32).eval()
    made.set_entities([f"entity {number}" for number in range(N)], torch.randn(N, E))
    made.save_pretrained(tmp_path)
    again = models.ErnieKnowledgeForPreTraining.from_pretrained(tmp_path)
    assert again.entity_names == made.entity_names
    assert not again.knowledge.entity_embeddings.weight.requires_grad
    for name, value in made.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    with pytest.warns(UserWarning, match="classifier"):
        other = models.ErnieKnowledgeForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert other(IDS, MASK, entities=ENTITIES).logits.shape == (B, 5)
    (tmp_path / "entity2id.txt").write_text("1\nonly\t0\n")
    with pytest.raises(CheckpointError, match=r"entity2id.txt: expected 7 entities, got 1"):
        models.ErnieKnowledgeModel.from_pretrained(tmp_path)


def test_files_of_vectors(tmp_path: Path) -> None:
    vectors, relations = torch.randn(3, 4), torch.randn(2, 4)
    write_embeddings(tmp_path, ["Ahab", "the Pequod", "Nantucket"], ["sails", "is"], vectors, relations)
    names, read = read_entities(tmp_path)
    assert names == ["Ahab", "the Pequod", "Nantucket"]
    torch.testing.assert_close(read, vectors, atol=1e-6, rtol=0)
    for text, message in (
        ("", "line 1: expected the number of lines that follow, got an empty file"),
        ("2\na\t0\nb 1\n", "line 3: expected a name, a tab and a number"),
        ("2\na\t0\nb\t0\n", "line 3: expected a number below 2 that no other line has, got 0"),
        ("2\na\t0\n", "expected 2 names, got none with the number 1"),
    ):
        (tmp_path / "names").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_names(tmp_path / "names")
    for text, message in (
        ("1\t2\n3\n", "line 2: expected 2 finite numbers, as in line 1, got 1"),
        ("1\tx\n", "line 1: expected numbers, separated by tabs"),
        ("", "expected a vector a line, got none"),
    ):
        (tmp_path / "vectors").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_vectors(tmp_path / "vectors")
    (tmp_path / "entity2vec.vec").write_text("1\t2\n")
    with pytest.raises(CheckpointError, match="expected a vector for each of the 3 entities"):
        read_entities(tmp_path)
    with pytest.raises(CheckpointError, match="expected a readable file of UTF-8 text"):
        read_names(tmp_path / "nowhere")


# ---- one node, or modules --------------------------------------------------------------------------------------------

LAYER = {"width": 24, "heads": 3, "intermediate": 40, "entity_width": 20, "entity_heads": 4}


def layer_results(
    layer: Any, x: Tensor, entities: Tensor, aligned: Any, cu_seqlens: Tensor, drop: bool
) -> dict[str, Tensor]:
    """Both outputs, and the gradients of a sum of them weighted by numbers."""
    x, entities = x.clone().requires_grad_(), entities.clone().requires_grad_()
    layer.zero_grad()
    seeds = torch.arange(6) * 7919 if drop else None
    found = layer(x, cu_seqlens, S, entities=entities, aligned=aligned, seeds=seeds)
    outputs = [each for each in found if each is not None]
    sum((each * torch.arange(each.numel()).view_as(each).sin()).sum() for each in outputs).backward()
    gradients = {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}
    return {**dict(enumerate(outputs)), "x": x.grad, "entities": entities.grad, **gradients}


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, ()),
        ({"last": True, "keep_activation": True}, ("up", "entity_out.bias")),
        ({"entity_attention": False, "recompute": True}, ("entity_up", "down")),
        ({"recompute": True, "activation": "relu"}, ("qkv", "entity_qkv", "entity_norm2", "norm1.weight")),
    ],
)
@pytest.mark.parametrize("drop", [False, True])
def test_the_autograd_node_matches_the_modules(changes: dict[str, Any], frozen: tuple[str, ...], drop: bool) -> None:
    torch.manual_seed(0)
    rate = 0.25 if drop else 0.0
    layer = nn.KnowledgeLayer(**LAYER, dropout=rate, attention_dropout=rate, dtype=torch.float64, **changes)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if name.startswith(frozen):
            parameter.requires_grad_(False)
    called = copy.deepcopy(layer)
    calls: list[Any] = []
    for module in called.children():
        module.register_forward_hook(lambda *_: calls.append(0))
    cu_seqlens = nn.PackedBatch.of(IDS, MASK).cu_seqlens
    aligned = nn.AlignedEntities.of(ENTITIES[MASK], cu_seqlens, S)
    inputs = (torch.randn(int(MASK.sum()), 24).double(), torch.randn(aligned.count, 20).double())
    expected, found = (layer_results(each, *inputs, aligned, cu_seqlens, drop) for each in (called, layer))
    assert calls
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=str(name))


def test_entities_that_leave_a_layer_unused() -> None:
    """Their gradient is None in the backward of the node."""
    torch.manual_seed(0)
    layer = nn.KnowledgeLayer(**LAYER, dropout=0.0, attention_dropout=0.0, dtype=torch.float64)
    cu_seqlens = nn.PackedBatch.of(IDS, MASK).cu_seqlens
    aligned = nn.AlignedEntities.of(ENTITIES[MASK], cu_seqlens, S)
    inputs = (torch.randn(int(MASK.sum()), 24).double(), torch.randn(aligned.count, 20).double().requires_grad_())
    gradients = []
    for factor in (None, 0.0):
        y, e = layer(inputs[0], cu_seqlens, S, entities=inputs[1], aligned=aligned)
        loss = y.square().sum() if factor is None else y.square().sum() + factor * e.sum()
        gradients.append(torch.autograd.grad(loss, [inputs[1], layer.entity_up.weight, layer.down.weight]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_without_entities_in_other_dtypes(dtype: torch.dtype) -> None:
    model = models.ErnieKnowledgeModel(models.ErnieKnowledgeConfig(**{**SIZES, "num_entities": 0})).to(dtype)
    assert model(IDS).last_hidden_state.dtype == dtype
