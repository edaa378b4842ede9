"""Every command with wrong arguments and files: an error message and an exit status, no traceback, no training and no
loss of data."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fasttfm.cli.main import main
from fasttfm.data.task_files import TextExample, read_texts
from fasttfm.tasks.finetuning import prepare, save
from fasttfm.train import Trainer

SQUAD = {
    "context": "The state of the union.",
    "qas": [{"id": "1", "question": "What?", "answers": [{"text": "union", "answer_start": 17}]}] * 3,
}
FILES: dict[str, bytes] = {
    "empty.txt": b"",
    "empty.tsv": b"",
    "binary.txt": bytes(range(256)),
    "binary.jsonl": bytes(reversed(range(256))),
    "binary.parquet": bytes(range(256)),
    "binary.txt.gz": bytes(range(256)),
    "latin.txt": "caf\xe9".encode("latin-1"),
    "column.jsonl": b'{"body": "a text"}\n',
    "deep.jsonl": b"[" * 100_000,
    "surrogate.jsonl": b'{"text": "\\ud800"}\n',
    "masks.txt": b"one [MASK] three\n",
    "texts.txt": b"one two three. Four five six.\n\n" * 30,
    "column.tsv": b"a\tb\n1\t2\n",
    "column.csv": b"a,b\n1,2\n",
    "good.tsv": b"sentence\tlabel\n" + b"the state\t1\nthe union\t0\n" * 8,
    "marked.csv": b"\xef\xbb\xbftext,label\r\n\r\n"
    + b'"the ""state"", then",1\r\nunion,0\r\n' * 8,  # as Excel writes it
    "semicolons.csv": b"text;label\n" + b"the state, then;1\nthe union;0\n" * 8,
    "utf16.csv": "text,label\nthe state,1\n".encode("utf-16"),
    "open.csv": b'text,label\n"the state,1\nthe union,0\n',
    "gaps.csv": b"text,label\nthe state,1\nthe union,\n",
    "words.csv": b"text,label\nthe state,1\nthe union,good\n",
    "sheet.xlsx": b"PK\x03\x04" + bytes(100),
    "vectors.npy": b"not numbers",
    "nothing.json": b"{}",
    "unlabelled.tsv": b"sentence\nthe state\nthe union\n",
    "list.json": b"[1, 2]",
    "squad.json": json.dumps({"data": [{"paragraphs": [SQUAD]}]}).encode(),
    "squad-paragraphs.json": b'{"data": [{"paragraphs": 5}]}',
    "squad-null.json": b'{"data": [{"paragraphs": [{"context": "a", "qas": [{"id": 3, "question": null}]}]}]}',
    "full/thesis.txt": b"years of work",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, bert_directory: Path, gpt_directory: Path) -> Iterator[Path]:
    """A directory of models and files, good and bad. None of them changes."""
    root = tmp_path_factory.mktemp("hostile")
    for name, content in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    (root / "folder").mkdir()
    (root / "folder.npy").mkdir()
    (root / "loop").symlink_to("loop")
    (root / "dangling").symlink_to("nowhere/at-all")
    shutil.copytree(gpt_directory, root / "gpt")
    shutil.copytree(bert_directory, root / "bert")
    (root / "link").symlink_to("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(
            *prepare("classify", bert_directory, [TextExample("a", None, "0"), TextExample("b", None, "1")]),
            root / "classifier",
        )
    for name in ("truncated", "hollow", "wordless", "types", "nan", "labels"):
        shutil.copytree(bert_directory, root / name)
    weights = root / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (root / "hollow" / "model.safetensors").write_bytes(b"")
    (root / "wordless" / "tokenizer.json").write_text("{}")
    change(root / "types", hidden_size="abc")
    change(root / "labels", id2label={"good": "bad"})
    for name in ("nan", "gpt"):
        target = root / ("nan" if name == "nan" else "nan-gpt")
        if name == "gpt":
            shutil.copytree(root / "gpt", target)
        tensors = load_file(target / "model.safetensors")
        for tensor in tensors.values():
            tensor.view(-1)[0] = torch.nan
        save_file(tensors, target / "model.safetensors")
    before = contents(root)
    yield root
    assert contents(root) == before


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: Any) -> None:
        raise AssertionError("a step of training")

    monkeypatch.setattr(Trainer, "step", step)


PRETRAIN = "pretrain bert --device cpu --data texts.txt --tokenizer bert --size tiny --max-length 32 --steps 3 "
PRETRAIN += "--tokens-per-step 64 --held-out 0.1 --quiet --output OUT"
FINETUNE = "finetune --task classify --device cpu --model bert --data good.tsv --quiet --output OUT"
QUESTIONS = "finetune --task qa --device cpu --model bert --data squad.json --quiet --output OUT"
DISTILL = "distill --recipe distilbert --device cpu --teacher bert --data texts.txt --steps 2 --quiet --output OUT "
DISTILL += "--max-length 32 --tokens-per-batch 64 --held-out 0.1"
TINYBERT = DISTILL.replace("distilbert", "tinybert")
EMBED = "embed --device cpu --model bert --data texts.txt --output OUT.npy"
PREDICT = "predict --device cpu --model classifier --data good.tsv --quiet --output OUT.csv"
FILL_MASK = "fill-mask --device cpu --model bert --data masks.txt --quiet --output OUT.csv"
SCORE = "score --device cpu --model gpt --data masks.txt --quiet --output OUT.csv"
SHOW = "show attention --device cpu --model bert --text the"
SEARCH = "search --device cpu --model bert --query the --vectors"
GENERATE = "generate --device cpu --model gpt --prompt the --max-new-tokens 2"

NUMBERS = {
    PRETRAIN: {
        "--steps": "-1 0 nan",
        "--tokens-per-step": "-1 0 1e9",
        "--accumulation": "-1 0",
        "--learning-rate": "-1 nan inf abc",
        "--weight-decay": "-1 nan inf",
        "--clip": "-1 nan inf",
        "--dropout": "-1 1 nan",
        "--seed": "-1 99999999999999999999",
        "--max-length": "-5 0",
        "--held-out": "-1 0 1 nan",
        "--masking": "-1 0 2 nan",
        "--ngram": "-1 0",
        "--vocabulary": "-1 0",
        "--warmup": "-1 4",
        "--keep": "-1 0",
        "--log-every": "-1 0",
        "--evaluate-every": "-1 0",
        "--evaluation-batches": "-1 0",
        "--checkpoint-every": "-1 0",
        "--workers": "-1",
        "--bad-steps": "-1 0",
    },
    FINETUNE: {
        "--learning-rate": "-1 0 nan inf",
        "--head-rate": "-1 nan inf",
        "--warmup-share": "-1 2 nan",
        "--weight-decay": "-1 nan inf",
        "--clip": "-1 nan inf",
        "--accumulation": "-1 0",
        "--seed": "-1 99999999999999999999",
        "--max-length": "-5 0 3 9999",
        "--tokens-per-batch": "-1 0",
        "--layer-decay": "-1 0 2 nan",
        "--auxiliary": "-1 nan inf",
        "--epochs": "-1",
    },
    QUESTIONS: {"--stride": "-1 0", "--max-question": "-1 0 9999", "--max-answer": "-1 0", "--max-length": "-5 4"},
    DISTILL: {
        "--steps": "-1 0",
        "--learning-rate": "-1 nan inf",
        "--temperature": "-1 0 nan inf",
        "--weights": "-1 nan inf",
        "--layers": "-1 0 99",
        "--max-length": "-5 0",
        "--tokens-per-batch": "-1 0",
        "--masking": "-1 2 nan",
        "--held-out": "-1 0 1 nan",
        "--seed": "-1",
    },
    TINYBERT: {"--layers": "-1 0", "--width": "-1 0 7", "--intermediate": "-1 0", "--layer-map": "-1 0 9 x"},
    EMBED: {"--layers": "-1 0 99", "--max-length": "-1 0 9999", "--tokens-per-batch": "-1 0"},
    PREDICT: {"--max-length": "-5 0 3 9999", "--tokens-per-batch": "-1 0", "--threshold": "1"},
    FILL_MASK: {"--top-k": "-1 0 99999", "--tokens-per-batch": "-1 0"},
    SCORE: {"--stride": "-1 0 9999", "--tokens-per-batch": "-1 0"},
    GENERATE: {
        "--max-new-tokens": "-1 9999",
        "--count": "-1",
        "--temperature": "-1 0 nan inf",
        "--top-k": "-1 0",
        "--top-p": "-1 0 2 nan",
        "--seed": "-1 99999999999999999999",
    },
}


def numbers() -> list[Any]:
    cases = []
    for command, options in NUMBERS.items():
        for option, values in options.items():
            for value in values.split():
                call = [option, *[value] * (3 if option == "--weights" else 1)]
                cases.append(pytest.param(command, call, id=f"{command.split()[0]} {option} {value}"))
    return cases


CASES: list[tuple[str, str, int, str]] = [
    # ---- configurations
    *((PRETRAIN, f"--set {field}", 2, sentence) for field, sentence in (
        ("hidden_size=abc", "hidden_size: expected a whole number from 1 on, got 'abc'"),
        ("num_hidden_layers=-1", "num_hidden_layers: expected a whole number from 1 on, got -1"),
        ("hidden_size=7", "expected a divisor of the width 7"),
        ("hidden_size=1000000000000", "expected sizes of a model that torch can make"),
        ("vocab_size=5", "vocab_size: expected no fewer than the tokenizer's"),
        ("extra={}", "extra: expected a field of BertConfig"),
        ("hidden_sizes=3", "hidden_sizes: expected a field of BertConfig; did you mean hidden_size?"),
        ("zzz=3", "zzz: expected a field of BertConfig: "),
        ("hidden_act=swish9", "activation: expected one of"),
    )),
    (PRETRAIN, "--resume --overwrite", 2, "--resume: expected without --overwrite"),
    # ---- outputs
    *((command, f"--output {output}", status, sentence) for command in (PRETRAIN, FINETUNE, DISTILL)
      for output, status, sentence in (
        ("texts.txt/run", 1, "texts.txt"),
        ("/proc/nowhere/run", 1, "/proc/nowhere"),
        ("loop", 1, "loop"),
    )),
    (PRETRAIN, "--output texts.txt", 1, "texts.txt: File exists"),
    (PRETRAIN, "--output full", 1, "full: expected a new or empty directory, got one with thesis.txt"),
    (PRETRAIN, "--output bert --tokenizer bert/tokenizer.json --overwrite", 2, "tokenizer: expected one outside of"),
    *((command, f"--output {output}", 2, sentence) for command in (FINETUNE, DISTILL) for output, sentence in (
        ("texts.txt", "--output: expected a directory, got the file texts.txt"),
        ("full", "expected a new or empty directory, got full with thesis.txt; --overwrite writes to it"),
        ("bert", "--output: expected another directory than --"),
        ("link --overwrite", "--output: expected another directory than --"),
        ("full/../bert --overwrite", "--output: expected another directory than --"),
    )),
    (EMBED, "--output full", 2, "expected a name that ends in .npy, .npz, .safetensors, .jsonl, .csv"),
    (EMBED, "--output texts.txt/x.npy", 1, "texts.txt"),
    (EMBED, "--output /proc/nowhere/x.npy", 1, "/proc/nowhere"),
    (EMBED, "--output bert/model.safetensors --overwrite", 2, "expected a file that is not the model's"),
    *((command, f"--output {name}", 2, sentence) for command in (FILL_MASK, SCORE) for name, sentence in (
        ("folder", "--output: expected a file, got the directory folder"),
        ("latin.txt", "expected a new file, got latin.txt, which exists; --overwrite replaces it"),
        ("masks.txt --overwrite", "--output: expected another file than --data, got masks.txt"),
    )),
    (PREDICT, "--output folder", 2, "--output: expected a file, got the directory folder"),
    (PREDICT, "--output latin.txt", 2, "expected a new file, got latin.txt, which exists; --overwrite replaces it"),
    (PREDICT, "--output good.tsv --overwrite", 2, "--output: expected another file than --data, got good.tsv"),
    (PREDICT, "--output classifier/config.json --overwrite", 2, "expected a file that is not the model's"),
    (PREDICT, "--output texts.txt/x.csv", 1, "texts.txt"),
    (PREDICT, "--output /proc/nowhere/x.csv", 1, "/proc/nowhere"),
    (EMBED, "--output /proc/x.npy", 1, "/proc: expected a directory that can be written to, got No such file"),
    (SHOW, "--output /proc/x.html", 1, "/proc: expected a directory that can be written to, got No such file"),
    ("experiment shots --output /proc/x", "", 1, "/proc/x: No such file or directory"),
    # ---- models
    *((command, f"{option} {model}", 1, sentence) for command, option in (
        (FINETUNE, "--model"), (DISTILL, "--teacher"), (EMBED, "--model"), (GENERATE, "--model"))
      for model, sentence in (
        ("truncated", "model.safetensors: cannot be read"),
        ("hollow", "model.safetensors: cannot be read"),
        ("wordless", "tokenizer.json"),
        ("types", "config.json: hidden_size: expected a whole number"),
        ("labels", "id2label: expected an object with a label for each number"),
        ("nan", "expected finite numbers, got inf or NaN"),
        ("folder", "folder"),
        ("texts.txt", "texts.txt"),
        ("nowhere", "nowhere"),
        ("loop", "loop"),
    ) if not (command == GENERATE and model not in ("wordless", "folder", "texts.txt", "nowhere", "loop"))),
    (FILL_MASK, "--model gpt", 2, "openai-gpt has no head for it"),
    (FILL_MASK, "--model classifier", 1, "expected a model with a trained head, got one without a head for masked"),
    *((command, f"--model {model}", 1, model) for command in (FILL_MASK, SCORE)
      for model in ("folder", "texts.txt")),
    (PREDICT, "--model bert", 1, "bert: expected a model that was trained for a task (fasttfm finetune), got"),
    (PREDICT, "--model folder", 1, "config.json: there is no such file"),
    (PREDICT, "--model texts.txt", 1, "texts.txt: expected a directory with a model, got a file"),
    (GENERATE, "--model nan-gpt", 1, "expected finite numbers, got inf or NaN"),
    # ---- data
    *((command, f"--data {name}", 1, sentence) for command in (PRETRAIN, DISTILL, EMBED) for name, sentence in (
        ("binary.txt", "binary.txt, line"),
        ("binary.jsonl", "binary.jsonl, line 1: expected UTF-8 text"),
        ("binary.parquet", "binary.parquet"),
        ("binary.txt.gz", "binary.txt.gz: expected a whole gzip file"),
        ("latin.txt", "latin.txt, line 1: expected UTF-8 text, got byte 0xe9"),
        ("column.jsonl", "column.jsonl, line 1: expected a text in 'text', got 'body'"),
        ("deep.jsonl", "deep.jsonl, line 1: expected a JSON object"),
        ("surrogate.jsonl", "surrogate.jsonl, line 1: expected UTF-8 text, got half of a surrogate pair"),
        ("folder", "folder: expected files that end in"),
        ("loop", "loop"),
        ("dangling", "dangling"),
    )),
    (PRETRAIN, "--data empty.txt", 1, "expected text, got no document with a token"),
    (PRETRAIN, "--prepared texts.txt", 1, "texts.txt: File exists"),
    (DISTILL, "--data empty.txt", 1, "expected text, got no document with a token"),
    (EMBED, "--data empty.txt", 1, "--data: expected texts, got none"),
    *((FINETUNE, f"--task {task} --data {name}", 1, name.split(".")[0]) for task, names in (
        ("classify", "empty.txt binary.txt latin.txt column.tsv folder loop dangling nowhere.tsv"),
        ("tag", "empty.txt binary.txt folder"),
        ("qa", "empty.txt binary.txt list.json squad-paragraphs.json squad-null.json deep.jsonl"),
        ("choice", "empty.txt binary.txt column.csv"),
    ) for name in names.split()),
    *((command, f"--data {name}", 1, sentence) for command in (FILL_MASK, SCORE) for name, sentence in (
        ("empty.txt", "empty.txt: expected texts, got none"),
        ("column.jsonl", "column.jsonl: object 1: expected a string 'text', got body"),
        ("deep.jsonl", "deep.jsonl, line 1: expected a JSON object"),
        ("latin.txt", "latin.txt, line 1: expected UTF-8 text, got byte 0xe9"),
        ("good.tsv", "good.tsv: expected a name that ends in .txt, .txt.gz, .jsonl, .jsonl.gz, or - for stdin"),
        ("dangling.txt", "dangling.txt"),
    )),
    (FILL_MASK, "--data texts.txt", 1, "text 1: expected [MASK] where a word is missing"),
    (FILL_MASK, "--text a", 2, "--text: expected one of --text and --data, got both"),
    *((PREDICT, f"--data {name}", 1, sentence) for name, sentence in (
        ("empty.txt", "empty.txt: expected examples, got none"),
        ("empty.tsv", "empty.tsv: expected a header line and examples, got an empty file"),
        ("binary.txt", "binary.txt, line"),
        ("latin.txt", "latin.txt, line 1: expected UTF-8 text, got byte 0xe9"),
        ("column.tsv", "column.tsv, line 1: expected a header with the columns"),
        ("deep.jsonl", "deep.jsonl, line 1: expected a JSON object"),
        ("surrogate.jsonl", "surrogate.jsonl, line 1: expected UTF-8 text, got half of a surrogate pair"),
        ("binary.txt.gz", "binary.txt.gz: expected a whole gzip file"),
        ("folder", "folder"),
        ("loop", "loop"),
        ("dangling", "dangling"),
        ("nowhere.tsv", "nowhere.tsv"),
    )),
    (FINETUNE, "--data utf16.csv", 1, "utf16.csv, line 1: expected UTF-8 text, got byte 0xff as number 1 of the line"),
    (FINETUNE, "--data open.csv", 1, 'open.csv, line 2: expected a closing " for each opening one, got the end of'),
    (FINETUNE, "--data gaps.csv --dev good.tsv", 1, "training example 2: expected a label, got none"),
    (FINETUNE, "--data gaps.csv --dev good.tsv --values", 1, "training example 2: expected a label, got none"),
    (FINETUNE, "--data words.csv --dev good.tsv --values", 1, "example 2: expected a number as label, got 'good'"),
    (FINETUNE, "--dev words.csv --values", 1, "dev set, example 2: expected a number as label, got 'good'"),
    (FINETUNE, "--data sheet.xlsx", 1, "sheet.xlsx: expected text, or a name that ends in .csv, .tsv, .jsonl, .json, "),
    (FINETUNE, "--class-weights nothing.json", 1, "expected a weight for each of the labels 0, 1, got none"),
    (SEARCH, "vectors.npy", 1, "vectors.npy: expected a file of vectors, got the magic string is not correct"),
    (SEARCH, "folder.npy", 1, "folder.npy: expected a folder of part files, with _manifest.json, got none"),
    (GENERATE, "--num-beams 3 --top-k 5", 2, "--num-beams: expected 1 with --temperature, --top-k or --top-p, got 3"),
    (FINETUNE, "--dev empty.txt", 1, "empty.txt: expected a header line and examples, got an empty file"),
    (FINETUNE, "--test column.tsv", 1, "column.tsv"),
    (GENERATE, "--shots empty.txt", 1, "empty.txt: expected examples, one object per line, got none"),
    (GENERATE, "--shots binary.jsonl", 1, "binary.jsonl, line 1: expected UTF-8 text"),
    (GENERATE, "--shots folder", 1, "folder"),
    (GENERATE, "--template x", 2, "template: expected {input} once"),
    (GENERATE, "--prompt \udcff", 2, "--prompt: expected UTF-8 text, got other bytes"),
    # ---- bench
    ("bench --quick --ops column_sum --output texts.txt", "", 1, "texts.txt"),
    ("bench --ops nothing", "", 2, "--ops: expected some of"),
    ("bench --ops column_sum --cases nothing", "", 2, "the chosen ops have no such cases on this device"),
]  # fmt: skip


def answer(command: str, arguments: list[str], capsys: pytest.CaptureFixture[str], output: Path) -> tuple[Any, str]:
    words = [word.replace("OUT", str(output)) for word in command.split()]
    try:
        status: Any = main([*words, *arguments])
    except SystemExit as stopped:
        status = stopped.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("command", "arguments"), numbers())
def test_numbers_outside_their_range(
    command: str,
    arguments: list[str],
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    code, said = answer(command, arguments, capsys, tmp_path / "output")
    assert code == 2, said
    assert arguments[0].strip("-").split("-")[0] in said.splitlines()[-1].lower()
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("command", "arguments", "status", "sentence"),
    [pytest.param(*case, id=f"{case[0].split()[0]} {case[1]}".encode(errors="replace").decode()) for case in CASES],
)
def test_unusable_input_is_named(
    command: str,
    arguments: str,
    status: int,
    sentence: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    code, said = answer(command, arguments.split(), capsys, tmp_path / "output")
    assert sentence in said.splitlines()[-1]
    assert code == status, said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["marked.csv", "semicolons.csv"])
def test_what_spreadsheets_write_is_read(name: str, place: Path) -> None:
    first = "the state, then" if name == "semicolons.csv" else 'the "state", then'
    assert [(example.first, example.label) for example in read_texts(place / name)][:2] == [
        (first, "1"),
        ("the union" if name == "semicolons.csv" else "union", "0"),
    ]


# ---- output ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_for_stdout(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["info"]) == 1
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert "fasttfm info: [Errno 28] No space left on device" in capfd.readouterr().err


def test_an_interruption_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttfm.cli.info.run", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "fasttfm info: interrupted\n"
