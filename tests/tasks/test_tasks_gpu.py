"""Fine-tuning, distillation, embeddings and prompts on a GPU, in bf16, by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import save_bert

from fasttfm.cli.main import main
from fasttfm.data import Tokenizer

pytestmark = pytest.mark.gpu


def run(*arguments: Any) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.mark.parametrize(
    ("task", "epochs", "score"), [("tag", 15, "f1"), ("qa", 6, "exact"), ("choice", 6, "accuracy")]
)
def test_a_task_is_learnt(task: str, epochs: int, score: str, bert_directory: Path, tmp_path: Path) -> None:
    call = ("finetune", "--task", task, "--model", bert_directory, "--output", tmp_path, "--quiet", "--device", "cuda")
    run(*call, "--epochs", epochs, "--learning-rate", 3e-3, "--tokens-per-batch", 1024, "--max-length", 64)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["dev"][score] > metrics["majority"][score] + 0.05, metrics


@pytest.mark.parametrize("recipe", ["distilbert", "tinybert"])
def test_a_student_approaches_its_teacher(recipe: str, wordpiece: Tokenizer, tmp_path: Path) -> None:
    teacher = save_bert(wordpiece, tmp_path / "teacher", num_hidden_layers=2, initializer_range=0.2)
    output = tmp_path / "student"
    call = ("distill", "--recipe", recipe, "--teacher", teacher, "--output", output, "--quiet", "--device", "cuda")
    run(*call, "--steps", 30, "--tokens-per-batch", 2048, "--learning-rate", 2e-3)
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["held_out"]["loss"] < 0.9 * metrics["held_out_before"]["loss"], metrics


def test_vectors_and_tokens_are_those_of_the_cpu(
    bert_directory: Path, gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("Peace and commerce.\n\nWar.\n")
    texts = []
    for device in ("cpu", "cuda"):
        output = tmp_path / f"{device}.npy"
        run(
            *("embed", "--model", bert_directory, "--data", tmp_path / "texts.txt", "--output", output),
            *("--device", device, "--precision", "float32"),
        )
        capsys.readouterr()
        run("generate", "--model", gpt_directory, "--prompt", "The war", "--max-new-tokens", 5, "--device", device)
        texts.append(capsys.readouterr().out)
    assert np.allclose(np.load(tmp_path / "cpu.npy"), np.load(tmp_path / "cuda.npy"), atol=1e-3)
    assert texts[0] == texts[1]
