"""``fasttfm predict --labels``: entities by GLiNER, from texts and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttfm import data
from fasttfm.cli.main import main
from fasttfm.models import DebertaV2Config, GLiNER, GLiNERConfig

TEXTS = ["peace in Paris", "", "the army of France"]
TYPES = ["person", "place of war"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = data.train_tokenizer("wordpiece", [*TEXTS, *TYPES] * 5, 100)
    config = GLiNERConfig(encoder_config=DebertaV2Config.named("tiny", vocab_size=110), hidden_size=32)
    folder = tmp_path_factory.mktemp("gliner")
    GLiNER(config, tokenizer).save_pretrained(folder)
    return folder


def run(*arguments: object) -> int:
    return main(["predict", *map(str, arguments), "--device", "cpu", "--quiet"])


def test_texts_and_files(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record for each text, also an empty one, with what the model finds."""
    options = ("--model", folder, "--labels", *TYPES, "--threshold", 0.4)
    assert run(*options, "--text", *TEXTS) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["text"] for record in records] == TEXTS
    expected = GLiNER.from_pretrained(folder).predict_entities(TEXTS, TYPES, threshold=0.4)
    assert [record["entities"] for record in records] == expected
    assert any(expected)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    for name in ("texts.jsonl", "texts.txt"):
        output = tmp_path / f"{name}.out.jsonl"
        assert run(*options, "--data", tmp_path / name, "--output", output) == 0
        assert [json.loads(line) for line in output.read_text().splitlines()] == records


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--labels: expected the types of entities for GLiNER"),
        (("--labels", "a", "--task", "tag"), None),
        (("--labels", "a", "--max-length", "9"), "--max-length: expected without --labels, got 9"),
        (("--labels", "a", "--format", "csv"), "--format: expected jsonl with --labels, got csv"),
        (("--labels", "a", "--threshold", "3"), r"threshold: expected a number in [0, 1], got 3.0"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str | None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--model", folder, "--text", "peace", *options)
    assert message is None or message in capsys.readouterr().err
