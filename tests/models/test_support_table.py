"""The table of docs/models.md that shows what works with each family: small models do it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from every_family import padded, refused, small

from fasttfm import data, models
from fasttfm.cli.main import main
from fasttfm.data import Tokenizer
from fasttfm.data.images import ImageExample
from fasttfm.data.task_files import Answer, ChoiceExample, QuestionExample, TagExample, TextExample
from fasttfm.generate import generate
from fasttfm.inference import Session
from fasttfm.models.families import FAMILIES, trained_on_text
from fasttfm.models.family import Head
from fasttfm.models.onnx_export import _plain, _PlainModel
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare
from fasttfm.tasks.rates import Rates

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TEXTS = ["peace and commerce", "war and the army", "the peace of nations", "an army in war"]
EXAMPLES: dict[str, tuple[Head, list[Any]]] = {
    "classify": (Head.SEQUENCE_CLASSIFICATION, [TextExample(text, None, text.split()[0]) for text in TEXTS]),
    "tag": (Head.TOKEN_CLASSIFICATION, [TagExample(text.split(), ["O"] * len(text.split())) for text in TEXTS]),
    "qa": (
        Head.QUESTION_ANSWERING,
        [QuestionExample(text, "what?", text, [Answer(text[:3], 0)], False) for text in TEXTS],
    ),
    "choice": (Head.MULTIPLE_CHOICE, [ChoiceExample(text, "", ["yes", "no"], 0) for text in TEXTS]),
}
OWN_COMMANDS = ("ernie_knowledge",)  # pretrain-knowledge


def table() -> dict[str, dict[str, bool]]:
    """Whether each column holds for each family, by its name."""
    lines = PAGE.read_text().partition("## What works where")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines if line.startswith("|")]
    header, _, *families = [[re.sub(r"[`*]", "", cell) for cell in row] for row in rows]
    assert all(cell in ("yes", "-") for _, *cells in families for cell in cells)
    return {name: dict(zip(header[1:], (cell == "yes" for cell in cells), strict=True)) for name, *cells in families}


TABLE = table()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return data.train_tokenizer("wordpiece", TEXTS * 30, 60)


def saved(name: str, tokenizer: Tokenizer, directory: Path, head: Head = Head.NONE) -> Path:
    model = small(name, head, vocab_size=max(60, tokenizer.vocab_size))
    model.save_pretrained(directory)
    if FAMILIES[name].tokenizer is not None:
        tokenizer.save(directory, model_max_length=32, config=model.config)
    return directory


def test_every_family_has_a_row() -> None:
    assert list(TABLE) == list(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """``Session``, ``embed`` and the commands that read its files."""
    directory, texts, output = saved(name, tokenizer, tmp_path), tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("\n".join(TEXTS) + "\n")
    call = ["embed", "--model", directory, "--data", texts, "--output", output, "--device", "cpu", "--quiet"]
    if not TABLE[name]["vectors"]:
        with pytest.raises((ValueError, TypeError)):
            Session(directory, device="cpu")
        return
    assert main([str(each) for each in call]) == 0
    vectors = Session(directory, device="cpu").encode(TEXTS)
    assert np.isfinite(vectors).all()
    assert np.allclose(np.load(output), vectors, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_fine_tuning(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A step of each task that the family has a head for, and predictions."""
    heads = FAMILIES[name].models
    tasks = {task: examples for task, (head, examples) in EXAMPLES.items() if head in heads}
    if Head.IMAGE_CLASSIFICATION in heads:
        pixels = np.zeros((32, 32, 3), np.uint8)
        tasks = {"image": [ImageExample(label, pixels + shade, label) for shade, label in ((0, "a"), (90, "b"))]}
    assert bool(tasks) == TABLE[name]["fine-tuning"]
    directory = saved(name, tokenizer, tmp_path)
    for task_name, examples in tasks.items():
        model, task = prepare(task_name, directory, examples)
        settings = FinetuneSettings(rates=Rates(1e-3), epochs=1, warmup=0.0)
        FineTuning(model, task, examples, settings).run(lambda results: None)
        assert len(predict(model, task, examples)) == len(examples)


@pytest.mark.parametrize("name", FAMILIES)
def test_pretraining(name: str) -> None:
    """tests/train/test_pretrain.py trains each of these families; tests/train/test_knowledge.py ERNIE."""
    assert TABLE[name]["pretrain"] == (name in trained_on_text() or name in OWN_COMMANDS)


@pytest.mark.parametrize("name", FAMILIES)
def test_generation(name: str) -> None:
    assert TABLE[name]["generate"] == (Head.CAUSAL_LM in FAMILIES[name].models)
    if TABLE[name]["generate"]:
        assert generate(small(name, Head.CAUSAL_LM), torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize("name", FAMILIES)
def test_patching(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import fasttfm

    kind = FAMILIES[name].models[Head.NONE].__name__
    if not hasattr(transformers, kind):  # it has no such model
        assert not TABLE[name]["patch"]
        return
    theirs = getattr(transformers, kind).from_pretrained(saved(name, tokenizer, tmp_path)).eval()
    if not TABLE[name]["patch"]:
        with pytest.raises(TypeError, match="patch: model: expected a BERT"):
            fasttfm.patch(theirs)
        return
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state
        fasttfm.patch(theirs)
        torch.testing.assert_close(theirs(ids).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_export(name: str) -> None:
    """What ``export_onnx`` traces has the model's numbers; tests/models/test_onnx_export.py exports each head."""
    model = small(name, Head.NONE)
    assert refused(model) != TABLE[name]["export_onnx"]
    if TABLE[name]["export_onnx"]:
        inputs = padded(model)
        there = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state[there]
            with _plain(model):
                found = _PlainModel(model).called(*inputs.values()).last_hidden_state[there]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_classes_of_the_table_exist() -> None:
    prefixes = re.findall(r"^\| \[[^|]*\| ((?:`\w+`(?:, )?)+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(prefixes) == len(FAMILIES)
    for prefix in (each for cell in prefixes for each in re.findall(r"`(\w+)`", cell)):
        assert any(name.startswith(prefix) for name in models.__all__)
