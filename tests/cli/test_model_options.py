"""Every option that takes a model or a tokenizer takes all kinds of model directories, and hub ids."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import addresses, save_gpt

from fasttfm.cli.main import COMMANDS, main, parser_of
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.data.commonsense import read_commonsense
from fasttfm.data.texts import shipped_task
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks.finetuning import prepare, save
from fasttfm.tasks.reading import read_examples
from fasttfm.train import Trainer

hub: Any = pytest.importorskip("huggingface_hub", reason="it comes with transformers")
importlib.import_module("huggingface_hub.constants")

KINDS = ("folder", "run", "checkpoint", "sentence-transformers", "hub")
# What other options with a path read or write: no model.
OTHERS = {"--output", "--data", "--prepared", "--texts", "--entities", "--graph-vectors", "--runs", "--vectors"}

# Of every option that takes a model or a tokenizer: the model (a name of MODELS), and the rest of a command that opens
# it. Names in braces are files of the fixture ``files``.
TRAINING = "--data {labels} --epochs 1 --max-length 16 --batch-size 4 --device cpu --quiet"
CORPUS = "--data {corpus} --steps 1 --max-length 16 --device cpu --quiet"
PRETRAINING = f"{CORPUS} --tokens-per-step 128 --no-compare"
DISTILLED = "--tokens-per-batch 128"
TASK = f"{TRAINING} --task classify --recipe tinybert --prediction-epochs 0"
TEXT = "--text state --device cpu --quiet"
KNOWLEDGE = "--entities {entities} --steps 1 --tokens-per-step 128 --max-length 32 --device cpu --quiet"
CASES: dict[tuple[str, str], tuple[str, str]] = {
    ("pretrain", "--init"): ("bert", f"{PRETRAINING} --output"),
    ("pretrain", "--tokenizer"): ("bert", f"{PRETRAINING} --set num_hidden_layers=1 --objective mlm --output"),
    ("finetune", "--model"): ("bert", f"{TRAINING} --task classify --output"),
    ("finetune", "--tokenizer"): ("bert", f"{TRAINING} --task classify --model {{bert}} --output"),
    ("glue", "--model"): ("bert", f"{TRAINING.replace('{labels}', '{glue}')} --output"),
    ("distill", "--teacher"): ("bert", f"{CORPUS} {DISTILLED} --recipe distilbert --output"),
    ("distill", "--student"): ("bert", f"{TASK} --teacher {{classifier}} --output"),
    ("distill", "--augment"): ("bert", f"{TASK} --teacher {{classifier}} --student {{bert}} --copies 1 --output"),
    ("predict", "--model"): ("classifier", "--data {texts} --device cpu --quiet --output"),
    ("predict", "--tokenizer"): ("bert", "--model {classifier} --data {texts} --device cpu --quiet --output"),
    ("embed", "--model"): ("bert", "--data {texts} --device cpu --quiet --output"),
    ("embed", "--tokenizer"): ("bert", "--model {bert} --data {texts} --device cpu --quiet --output"),
    ("search", "--model"): ("bert", "--vectors {vectors} --query state --device cpu --quiet --output"),
    ("search", "--tokenizer"): ("bert", "--model {bert} --vectors {vectors} --query a --device cpu --quiet --output"),
    ("generate", "--model"): ("gpt", "--prompt state --max-new-tokens 1 --device cpu"),
    ("generate", "--tokenizer"): ("gpt", "--model {gpt} --prompt state --max-new-tokens 1 --device cpu"),
    ("serve", "--model"): ("bert", "--device cpu"),
    ("prompt-eval", "--model"): ("gpt", "--data {questions} --device cpu --quiet --output"),
    ("prompt-eval", "--tokenizer"): ("gpt", "--model {gpt} --data {questions} --device cpu --quiet --output"),
    ("fill-mask", "--model"): ("bert", TEXT.replace("state", "[MASK]")),
    ("fill-mask", "--tokenizer"): ("bert", f"--model {{bert}} {TEXT}".replace("state", "[MASK]")),
    ("score", "--model"): ("gpt", TEXT),
    ("score", "--tokenizer"): ("gpt", f"--model {{gpt}} {TEXT}"),
    ("show attention", "--model"): ("bert", "--text state --device cpu --output"),
    ("show attention", "--tokenizer"): ("bert", "--model {bert} --text state --device cpu --output"),
    ("pretrain-knowledge", "--init"): ("bert", f"{KNOWLEDGE} --output"),
    ("pretrain-knowledge", "--tokenizer"): ("bert", f"{KNOWLEDGE} --init {{bert}} --output"),
    ("explain", "--model"): ("kagnet", "--question where --choices kitchen harbour --graph {graph} --device cpu"),
}
OUTPUTS = {"predict": "out.csv", "embed": "out.npy", "search": "out.jsonl", "show attention": "out.html"}


def options_of(parser: argparse.ArgumentParser, command: str) -> Iterator[tuple[str, argparse.Action]]:
    """The options of a command and of its own commands, with the command's name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, kind in action.choices.items():
                yield from options_of(kind, f"{command} {name}".strip())
        elif action.option_strings:
            yield command, action


def test_every_option_that_takes_a_path_is_tested_here() -> None:
    options = set()
    modules = {name: importlib.import_module(path) for name, path in COMMANDS.items()}
    for command, action in options_of(parser_of(modules)[0], ""):
        name = action.option_strings[0]
        if action.metavar == "MODEL" or name == "--tokenizer":
            options.add((command, name))
        else:
            assert action.metavar not in ("DIR", "PATH", "FOLDER") or name in OTHERS, (command, name)
    assert options == set(CASES)


# ---- the models and their directories --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(
    wordpiece: Tokenizer, bpe: Tokenizer, bert_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Models and data by the names in CASES."""
    root = tmp_path_factory.mktemp("files")
    texts = [text[:1000] for text in addresses(12)]
    paths = {name: root / name for name in ("bert", "gpt", "classifier", "kagnet", "glue", "entities")}
    shutil.copytree(bert_directory, paths["bert"])
    save_gpt(bpe, paths["gpt"])
    for name, content in {
        "labels.tsv": "text\tlabel\n" + "".join(f"{word} state\t{word}\n" for word in ("good", "bad") * 4),
        "texts.txt": "the state\n",
        "corpus.txt": "\n\n".join(texts),
        "questions.jsonl": json.dumps({"input": "a", "output": "b", "choices": ["b", "c"]}) + "\n",
        "vectors.jsonl": json.dumps({"text": "a", "vector": [1.0] * 64}) + "\n",
        "graph.tsv": "\n".join(
            f"AtLocation\tkettle{n}\t{place}\t1" for n in range(4) for place in ("kitchen", "harbour")
        ),
    }.items():
        (root / name).write_text(content)
        paths[name.partition(".")[0]] = root / name
    (paths["glue"] / "CoLA").mkdir(parents=True)
    for part in ("train", "dev"):
        (paths["glue"] / "CoLA" / f"{part}.tsv").write_text("a\t1\t\tthe state\na\t0\t*\tstate the\n" * 2)
    assert main(["transe", "--epochs", "1", "--width", "8", "--quiet", "--output", str(paths["entities"])]) == 0
    examples = read_examples("classify", paths["labels"], None, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # new heads
        save(*prepare("classify", paths["bert"], examples.train, max_length=16), paths["classifier"])
        questions = read_commonsense(shipped_task("commonsense")["dev"])[:2]
        save(*prepare("commonsense", paths["bert"], questions, graph=paths["graph"]), paths["kagnet"])
    return paths


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def as_kind(kind: str, model: Path, directory: Path, cache: Path) -> str:
    """What an option gets for a copy of the model."""
    if kind == "hub":
        folder = cache / "models--org--small"
        commit = hashlib.sha1(b"first").hexdigest()
        shutil.copytree(model, folder / "snapshots" / commit)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        return "org/small"
    if kind in ("run", "checkpoint"):
        shutil.copytree(model, directory / "checkpoint-000002")
        (directory / "latest").symlink_to("checkpoint-000002")
        (directory / "log.csv").write_text("")
        return str(directory if kind == "run" else directory / "checkpoint-000002")
    if kind == "sentence-transformers":
        shutil.copytree(model, directory / "0_Transformer")
        pooling = directory / "1_Pooling" / "config.json"
        pooling.parent.mkdir()
        pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
        modules = [("0_Transformer", "Transformer"), ("1_Pooling", "Pooling")]
        listed = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in modules]
        (directory / "modules.json").write_text(json.dumps(listed))
        return str(directory)
    shutil.copytree(model, directory)
    return str(directory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("command", "option"), CASES)
def test_an_option_takes_all_kinds_of_directories(
    command: str,
    option: str,
    kind: str,
    files: dict[str, Path],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, rest = CASES[command, option]
    arguments = rest.format(**files).split()
    if arguments[-1] == "--output":
        arguments.append(str(tmp_path / OUTPUTS.get(command, "out")))
    ends_when_models_are_open(monkeypatch)
    directory = as_kind(kind, files[name], tmp_path / "model", cache)
    with contextlib.suppress(Opened):
        assert main([*command.split(), *arguments, option, directory]) == 0


class Opened(BaseException):
    """A command has opened its models and begins to work."""


def ends_when_models_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first training step, and when a server has loaded its models."""
    from fasttfm.serve import models, server

    def begin(*_: Any, **__: Any) -> None:
        raise Opened

    def load(settings: Any, **_: Any) -> None:
        assert [models.load(source).source for source in settings.sources] == settings.sources
        raise Opened

    monkeypatch.setattr(Trainer, "step", begin)
    monkeypatch.setattr(server, "run", load)


def test_the_functions_take_all_kinds_of_directories(files: dict[str, Path], cache: Path, tmp_path: Path) -> None:
    expected = open_model(files["bert"], Head.MASKED_LM).state_dict()
    fingerprint = load_tokenizer(files["bert"]).fingerprint
    for kind in KINDS:
        directory = as_kind(kind, files["bert"], tmp_path / kind, cache)
        parameters = open_model(directory, Head.MASKED_LM).state_dict()
        assert all(parameters[key].equal(expected[key]) for key in expected)
        assert load_tokenizer(directory).fingerprint == fingerprint
