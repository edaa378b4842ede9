"""The numbers of papers for each task, and the options that replace them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.data.task_files import QuestionExample
from fasttfm.models.families import FAMILIES
from fasttfm.tasks.finetuning_recipes import recipe_of
from fasttfm.tasks.registry import TASKS


@pytest.mark.parametrize(
    ("family", "task", "impossible", "expected"),
    [
        ("bert", "qa", False, (3, 32, 5e-5)),
        ("albert", "qa", True, (2, 48, 5e-5)),
        ("bert", "choice", False, (3, 16, 2e-5)),
        ("electra", "pair", False, (3, 32, 5e-5)),
        ("gpt", "choice", False, (3, 32, 6.25e-5)),
        ("vit", "image", False, (3, 32, 5e-5)),
    ],
)
def test_the_numbers_of_a_task(family: str, task: str, impossible: bool, expected: tuple[float, ...]) -> None:
    train = [QuestionExample("1", "q", "c", [], False), QuestionExample("2", "q", "c", [], impossible)]
    recipe = recipe_of(FAMILIES[family], TASKS[task], train if task == "qa" else [])
    assert recipe[1:] == expected
    assert bool(recipe.paper) == (task != "image")


def test_the_numbers_are_printed_and_options_replace_them(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.jsonl"
    rows = [{"ctx": "The sky is", "endings": ["blue.", "a fish."], "label": 0} for _ in range(20)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    call = ["finetune", "--task", "choice", "--model", str(bert_directory), "--data", str(path), "--device", "cpu"]
    assert main([*call, "--epochs", "1", "--max-length", "16", "--output", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "recipe of BERT (Devlin et al., 2018): 1 epochs (paper: 3), 16 examples per batch, learning rate" in said
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["settings"]["batch_size"] == 16
    assert (
        main([*call, "--epochs", "1", "--max-length", "16", "--batch-size", "8", "--output", str(tmp_path / "b")]) == 0
    )
    assert "8 examples per batch (paper: 16)" in capsys.readouterr().out
