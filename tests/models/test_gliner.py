"""GLiNER against the gliner package, if it is installed, against what it has computed before, and its invariants."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import data
from fasttfm.models import CheckpointError, DebertaV2Config, GLiNER, GLiNERConfig, SpanLoss
from fasttfm.models.gliner_texts import entities_in, words_of

TEXTS = [
    "Marie Curie worked in Paris with Pierre-Gilles.",
    "peace",
    "The army of France met the 3rd army; in war-time, Zürich waited: 東京へ行く。",
    "A nation of commerce and of peace in Europe.",
]
LABELS = ["person", "city or town", "army", "国"]
ENTITIES = [[(0, 1, "person"), (4, 4, "city or town"), (6, 6, "person")], [], [(1, 3, "army")], [(0, 8, "army")]]
ENCODER = {
    "vocab_size": 200,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
SIZES: dict[str, Any] = {"hidden_size": 16, "max_width": 4, "max_len": 30, "dropout": 0.0}
EXPECTED = Path(__file__).with_name("gliner_expected.json")
VARIANTS = {
    "projected": {},
    "same width": {"hidden_size": 24},
    "no LSTM": {"num_rnn_layers": 0},
    "two LSTM layers": {"num_rnn_layers": 2},
    "token after the marker": {"embed_ent_token": False},
}


def small(**changes: Any) -> GLiNER:
    """A model with the same parameters with every version of torch: noise whose sizes keep logits near 0."""
    tokenizer = data.train_tokenizer("wordpiece", [*TEXTS, *LABELS] * 3, 160)
    model = GLiNER(GLiNERConfig(encoder_config=dict(ENCODER), **{**SIZES, **changes}), tokenizer).eval()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            waves = torch.arange(parameter.numel(), dtype=torch.float64).mul(12.9898).add(78.233 * number).sin()
            noise = waves.mul(43758.5453).frac().abs().mul(2).sub(1).view_as(parameter)
            if parameter.dim() == 2:
                gain = 5.0 if name.startswith(("span", "prompt")) else 1.5
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)
            elif "norm" not in name:
                parameter.copy_(noise * 0.1)
    return model


def words(texts: list[str]) -> list[list[str]]:
    return [[word.text for word in words_of(text)] for text in texts]


def found(results: list[list[dict[str, Any]]]) -> list[list[tuple[Any, ...]]]:
    return [[(each["start"], each["end"], each["text"], each["label"]) for each in result] for result in results]


def measured(model: GLiNER) -> dict[str, Any]:
    """Numbers of a model that are stored: two losses, a mixture of all logits, and entities."""
    batch = model.batch_of(words(TEXTS), LABELS, ENTITIES)
    focal = SpanLoss(alpha=0.75, gamma=2.0, label_smoothing=0.1, reduction="mean")
    with torch.no_grad():
        output, other = model(**batch), model(**batch, loss=focal)
    logits = output.logits[output.span_mask].double().flatten()
    mixture = logits @ torch.arange(len(logits), dtype=torch.float64).cos()
    entities = found(model.predict_entities(TEXTS, LABELS))
    return {"loss": float(output.loss), "focal": float(other.loss), "logits": float(mixture), "entities": entities}


# ---- against the gliner package --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_that_the_gliner_package_has_computed(variant: str) -> None:
    """Its version 0.2.29, with the same parameters (``tests/models/gliner_expected.json``)."""
    expected, got = json.loads(EXPECTED.read_text())[variant], measured(small(**VARIANTS[variant]))
    for name in ("loss", "focal", "logits"):
        assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-3)
    assert got["entities"] == [[tuple(each) for each in text] for text in expected["entities"]]


def package_of(directory: Path) -> Any:
    gliner = pytest.importorskip("gliner", reason="the gliner package is not installed")
    return gliner.GLiNER.from_pretrained(str(directory), local_files_only=True)


def called(package: Any, **loss: Any) -> Any:
    """The package's output for the texts and entities."""
    options = {"return_tokens": True, "return_entities": True, "return_id_to_classes": True, "prepare_labels": True}
    collate = package.data_collator_class(package.config, data_processor=package.data_processor, **options)
    read = zip(words(TEXTS), ENTITIES, strict=True)
    rows = [{"tokenized_text": text, "ner": entities} for text, entities in read]
    return package.model(**collate(rows, entity_types=[LABELS] * len(rows)), **loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gliner_package_has_the_same_numbers(variant: str, tmp_path: Path) -> None:
    """Logits, losses, all gradients and entities; it opens our files, and we open its files."""
    model = small(**VARIANTS[variant])
    model.save_pretrained(tmp_path / "ours")
    package = package_of(tmp_path / "ours")
    output, theirs = model(**model.batch_of(words(TEXTS), LABELS, ENTITIES)), called(package)
    inside = output.span_mask
    torch.testing.assert_close(output.logits[inside], theirs.logits[inside], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.loss, theirs.loss)
    output.loss.backward()
    theirs.loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = model.checkpoint_tensors(ours)
    expected = {name: x.grad for name, x in package.model.named_parameters() if x.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max()
    for threshold, flat, multi_label in itertools.product((0.2, 0.5, 0.8), (True, False), (True, False)):
        options = {"threshold": threshold, "multi_label": multi_label}
        got = found(model.predict_entities([*TEXTS, "", " "], [*LABELS, "person"], flat=flat, **options))
        assert got == found(package.inference([*TEXTS, "", " "], [*LABELS, "person"], flat_ner=flat, **options))
    package.save_pretrained(tmp_path / "theirs")
    again = GLiNER.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again(**again.batch_of(words(TEXTS), LABELS)).logits, output.logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", [{"alpha": 0.75}, {"gamma": 2.0, "alpha": 0.3}, {"label_smoothing": 0.2}])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_gliner_package_has_the_same_losses(loss: dict[str, Any], reduction: str, tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    batch = model.batch_of(words(TEXTS), LABELS, ENTITIES)
    got = model(**batch, loss=SpanLoss(**loss, reduction=reduction)).loss
    torch.testing.assert_close(got, called(package_of(tmp_path), reduction=reduction, **loss).loss)


# ---- without it ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_span_has_the_score_of_the_formula(variant: str) -> None:
    """One span at a time, by the first formula of ``gliner_spans``, from the states of the encoder."""
    model = small(**VARIANTS[variant])
    text, width = words(TEXTS)[2], model.config.max_width
    batch = model.batch_of([text], LABELS)
    with torch.no_grad():
        logits = model(**batch).logits[0]
        states = model.projection(model.encoder(batch["input_ids"][None]).last_hidden_state[0])
        x = states[batch["words_mask"] > 0]
        x = x if model.rnn is None else model.rnn(x[None])[0][0]
        markers = (batch["input_ids"] == model.config.class_token_index).nonzero()[:, 0]
        types = model.prompt(states[markers + (not model.config.embed_ent_token)])
        for first, length in itertools.product(range(len(text)), range(width)):
            if first + length >= len(text):
                assert bool(logits[first, length].isneginf().all())
                continue
            ends = torch.cat([model.start(x[first]), model.end(x[first + length])]).relu()
            torch.testing.assert_close(logits[first, length], types @ model.span(ends), rtol=1e-4, atol=1e-4)


def test_a_text_has_the_same_scores_in_a_batch_and_padded() -> None:
    model = small()
    batch = model.batch_of(words(TEXTS), LABELS)
    ends = batch["cu_seqlens"].tolist()
    pieces = [slice(*each) for each in itertools.pairwise(ends)]
    padded = [
        torch.nn.utils.rnn.pad_sequence([x[piece] for piece in pieces], batch_first=True)
        for x in (batch["input_ids"], batch["words_mask"], torch.ones_like(batch["input_ids"]))
    ]
    with torch.no_grad():
        together = model(**batch).logits
        torch.testing.assert_close(model(*padded).logits, together)
        for number, text in enumerate(words(TEXTS)):
            alone = model(**model.batch_of([text], LABELS)).logits[0]
            torch.testing.assert_close(together[number, : len(text)], alone, rtol=1e-4, atol=1e-5)


def test_texts_may_have_types_of_their_own() -> None:
    model = small()
    texts, types = words(TEXTS[:2]), [LABELS[:3], LABELS[3:]]
    output = model(**model.batch_of(texts, types, ENTITIES[:2]))
    assert output.type_mask.tolist() == [[True] * 3, [True, False, False]]
    alone = [
        model(**model.batch_of([text], each, [entities]))
        for text, each, entities in zip(texts, types, ENTITIES[:2], strict=True)
    ]
    torch.testing.assert_close(output.loss, alone[0].loss + alone[1].loss)


def test_saved_files_have_the_same_bits_and_the_names_of_the_package(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = small()
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"rnn.lstm.weight_hh_l0_reverse", "prompt_rep_layer.3.bias", "token_rep_layer.projection.weight"} < names
    assert "span_rep_layer.span_rep_layer.out_project.0.weight" in names
    assert "token_rep_layer.bert_layer.model.encoder.layer.1.attention.self.query_proj.weight" in names
    again = GLiNER.from_pretrained(tmp_path)
    assert not again.training
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    assert again.predict_entities(TEXTS, LABELS) == model.predict_entities(TEXTS, LABELS)


def test_files_of_the_first_releases(tmp_path: Path) -> None:
    """Weights in torch's format, without tokenizer and encoder's configuration, whose directory is named."""
    model = small()
    model.save_pretrained(tmp_path / "new")
    (tmp_path / "encoder").mkdir()
    model.config.encoder.save_pretrained(tmp_path / "encoder")
    fields = {**SIZES, "model_name": str(tmp_path / "encoder"), "name": "span level", "span_mode": "markerV0"}
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "gliner_config.json").write_text(json.dumps(fields))
    state = {**model.checkpoint_tensors(model.state_dict())}
    state["token_rep_layer.bert_layer.model.embeddings.position_ids"] = torch.arange(64)[None]
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="class_token_index: expected the id of '<<ENT>>' below 200, or a token"):
        GLiNER.from_pretrained(tmp_path / "old")
    old = GLiNER.from_pretrained(tmp_path / "old", tokenizer=data.load_tokenizer(tmp_path / "new"))
    assert old.predict_entities(TEXTS, LABELS) == model.predict_entities(TEXTS, LABELS)
    assert old.config.extra == {"name": "span level", "span_mode": "markerV0"}


def test_a_plain_loop_lowers_the_loss() -> None:
    torch.manual_seed(0)
    tokenizer: Any = small().tokenizer
    model = GLiNER(GLiNERConfig(encoder_config=dict(ENCODER), **{**SIZES, "dropout": 0.1}), tokenizer).train()
    model.tokenizer = None
    with pytest.raises(ValueError, match="GLiNER: tokenizer: expected from_pretrained"):
        model.batch_of(words(TEXTS), LABELS)
    model.tokenizer = tokenizer
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    batch, losses = model.batch_of(words(TEXTS), LABELS, ENTITIES), []
    for _ in range(40):
        loss = model(**batch).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.rnn.parameters())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 5
    model.predict_entities(TEXTS, LABELS)
    assert model.training  # as it was


# ---- edge cases ------------------------------------------------------------------------------------------------------


def test_words() -> None:
    text = "Zürich's war-time, 東京 C++ a_b"
    assert [word.text for word in words_of(text)] == ["Zürich", "'", "s", "war-time", ",", "東京", "C", "+", "+", "a_b"]
    assert all(text[word.start : word.end] == word.text for word in words_of(text))


def test_texts_and_types_that_are_empty_or_repeated() -> None:
    model = small()
    assert model.predict_entities([], LABELS) == []
    assert model.predict_entities(["", " \n", TEXTS[0]], []) == [[], [], []]
    assert model.predict_entities("", LABELS) == []
    one = model.predict_entities(TEXTS[0], LABELS, threshold=0.2)
    assert one
    again = model.predict_entities(["", TEXTS[0]], [*LABELS, *LABELS], threshold=0.2)
    assert found(again) == found([[], one])
    alone = model.predict_entities(TEXTS, LABELS, tokens_per_batch=1)
    assert found(model.predict_entities(TEXTS, LABELS)) == found(alone)
    (word,) = model.predict_entities("peace", LABELS, threshold=0.0)
    assert (word["start"], word["end"], word["text"]) == (0, 5, "peace")


def test_a_long_text_is_truncated_with_a_warning() -> None:
    model = small(max_len=5)
    with pytest.warns(UserWarning, match="words is truncated to its first 5; so are 2 others"):
        results = model.predict_entities(TEXTS, LABELS, threshold=0.0)
    assert found(results[2:3]) == found(model.predict_entities(["The army of France met"], LABELS, threshold=0.0))
    assert model.tokenizer is not None
    model.config.max_len, model.tokenizer.max_tokens = 30, 20
    with pytest.warns(UserWarning, match="is truncated to its first"):
        short = model.predict_entities(TEXTS[2], LABELS, threshold=0.0)
    assert 0 < len(short) < 17
    model.tokenizer.max_tokens = 5
    with pytest.raises(ValueError, match="labels: expected less than 5 tokens, got"):
        model.predict_entities(TEXTS[2], LABELS)


@pytest.mark.parametrize(("flat", "multi_label"), [*itertools.product((True, False), (True, False))])
def test_entities_by_a_search_of_all_pairs(flat: bool, multi_label: bool) -> None:
    """Against the definition: a candidate is kept if it conflicts with none that was kept."""

    def conflicts(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        if one[:2] == other[:2]:
            return not multi_label
        apart = one[0] > other[1] or other[0] > one[1]
        nested = one[0] <= other[0] <= other[1] <= one[1] or other[0] <= one[0] <= one[1] <= other[1]
        return not apart and (flat or not nested)

    random = np.random.default_rng(0)
    for _ in range(20):
        probabilities = random.random((9, 4, 2)).round(1).astype(np.float32)  # some are equal
        places = [(s, s + w, c) for s, w, c in zip(*np.nonzero(probabilities > 0.3), strict=True)]
        kept: list[tuple[int, ...]] = []
        for place in sorted(places, key=lambda p: -probabilities[p[0], p[1] - p[0], p[2]]):
            if not any(conflicts(place, other) for other in kept):
                kept.append(place)
        kept.sort(key=lambda place: place[0])
        got = entities_in(probabilities, 0.3, flat=flat, multi_label=multi_label)
        assert [each[:3] for each in got] == kept


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("span_mode", "token_level", "span_mode: expected 'markerV0' .*got 'token_level'"),
        ("labels_encoder", "bge-small", "labels_encoder: expected none .*got 'bge-small'"),
        ("labels_decoder", "gpt2", "labels_decoder: expected none .*got 'gpt2'"),
        ("relations_layer", "biaffine", "relations_layer: expected none .*got 'biaffine'"),
        ("model_type", "gliner_bi_encoder_span", "model_type: expected 'gliner_uni_encoder_span' .*got 'gliner_bi_e"),
        ("subtoken_pooling", "mean", "subtoken_pooling: expected 'first' .*got 'mean'"),
        ("words_splitter_type", "spacy", "words_splitter_type: expected 'whitespace' .*got 'spacy'"),
        ("fuse_layers", True, "fuse_layers: expected False .*got True"),
        ("encoder_config", {"model_type": "bert"}, "encoder_config: model_type: expected 'deberta-v2', got 'bert'"),
        ("hidden_size", 15, "hidden_size: expected an even number, got 15"),
        ("max_width", 0, "max_width: expected a whole number from 1 on, got 0"),
        ("dropout", 1.5, r"dropout: expected a number in \[0, 1\), got 1.5"),
    ],
)
def test_other_variants_are_refused(field: str, value: Any, message: str, tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    path = tmp_path / "gliner_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(CheckpointError, match=f"gliner_config.json: GLiNERConfig: {message}"):
        GLiNER.from_pretrained(tmp_path)


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(TypeError, match="labels: expected a list of texts, got 'person'"):
        model.predict_entities(TEXTS, "person")
    with pytest.raises(ValueError, match=r"threshold: expected a number in \[0, 1\], got 2"):
        model.predict_entities(TEXTS, LABELS, threshold=2)
    with pytest.raises(ValueError, match="texts: expected a word and a type or more for each text"):
        model.batch_of([["a"], []], LABELS)
    with pytest.raises(ValueError, match="entities: expected a list for each of 4 texts, got 1"):
        model.batch_of(words(TEXTS), LABELS, [[]])
    batch = model.batch_of(words(TEXTS), LABELS)
    with pytest.raises(ValueError, match=r"labels: expected shape \(4, 17, 4, 4\), got \(1,\)"):
        model(**batch, labels=torch.zeros(1))
    with pytest.raises(ValueError, match="words_mask: expected a word or more in every sequence"):
        model(**{**batch, "words_mask": torch.zeros_like(batch["words_mask"])})
    with pytest.raises(ValueError, match="class_token_index: expected the id of '<<ENT>>' below 200, or a tokenizer"):
        GLiNER(GLiNERConfig(encoder_config=DebertaV2Config(**ENCODER)))


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_wrong_weights_are_refused(change: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    small().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["prompt_rep_layer.0.bias"]
    else:
        tensors["prompt_rep_layer.0.bias" if change == "shape" else "cross_fuser.weight"] = torch.zeros(3)
    save_file(tensors, path)
    message = {
        "missing": "prompt_rep_layer.0.bias: missing",
        "unknown": "cross_fuser.weight: expected only parameters of the model that gliner_config.json describes",
        "shape": r"prompt_rep_layer.0.bias: expected shape \(64,\), got \(3,\)",
    }[change]
    with pytest.raises(CheckpointError, match=f"model.safetensors: {message}"):
        GLiNER.from_pretrained(tmp_path)
