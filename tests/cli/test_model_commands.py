"""The commands for trained models: embed, distill and generate, and errors for wrong arguments."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from small_models import addresses, save_bert

from fasttfm import models
from fasttfm._extras import how_to_install
from fasttfm.cli.main import COMMANDS, main
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.data.texts import shipped_task
from fasttfm.generate import generate
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks.distillation_recipes import TinyBertRecipe
from fasttfm.tasks.distillation_runs import PredictionRecipe
from fasttfm.train import Trainer

TEXTS = ["Peace and commerce with all nations.", "War.", "The army and the navy of the United States."]


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def stopped(capsys: pytest.CaptureFixture[str], arguments: Sequence[Any]) -> tuple[int, str]:
    """The exit status and the last line on stderr of a command that fails."""
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    return int(error.value.code or 0), capsys.readouterr().err.splitlines()[-1]


# ---- embed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_vectors_are_the_hidden_states(
    pooling: str, bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    output = tmp_path / "vectors.npy"
    options = ("--pooling", pooling, "--device", "cpu", "--tokens-per-batch", 12, "--precision", "float32")
    assert (
        run(
            "embed",
            "--model",
            bert_directory,
            "--data",
            tmp_path / "texts.txt",
            "--output",
            output,
            *options,
        )
        == 0
    )
    assert "note:" not in capsys.readouterr().err
    vectors = np.load(output)
    tokenizer, model = load_tokenizer(bert_directory), open_model(bert_directory, Head.NONE)
    special = tokenizer.special
    for vector, text in zip(vectors, TEXTS, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([[special.cls, *tokenizer.encode(text), special.sep]])).last_hidden_state[0]
        expected = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
        assert np.allclose(vector, expected, atol=1e-5)


def test_several_layers_are_concatenated(wordpiece: Tokenizer, tmp_path: Path) -> None:
    directory = save_bert(wordpiece, tmp_path / "model", num_hidden_layers=3)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    call = ("embed", "--model", directory, "--data", tmp_path / "texts.jsonl", "--device", "cpu")
    assert run(*call, "--output", tmp_path / "one.safetensors") == 0
    assert run(*call, "--layers", 2, "--output", tmp_path / "two.safetensors") == 0
    one, two = (load_file(tmp_path / f"{name}.safetensors")["vectors"] for name in ("one", "two"))
    assert (one.shape, two.shape) == ((3, 64), (3, 128))
    assert np.allclose(one, two[:, 64:], atol=1e-6)
    assert not np.allclose(one, two[:, :64], atol=1e-2)


def test_vectors_of_a_gpt(gpt_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    output = tmp_path / "vectors.npy"
    assert run("embed", "--model", gpt_directory, "--data", tmp_path, "--output", output, "--device", "cpu") == 0
    tokenizer, model = load_tokenizer(gpt_directory), models.OpenAIGPTModel.from_pretrained(gpt_directory)
    with torch.no_grad():
        expected = model(torch.tensor([tokenizer.encode(TEXTS[2])])).last_hidden_state[0].mean(0)
    assert np.allclose(np.load(output)[2], expected, atol=1e-5)


def test_vectors_are_not_overwritten_unless_requested(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    output = tmp_path / "vectors.npy"
    output.write_bytes(b"others' vectors")
    call = ("embed", "--model", bert_directory, "--data", tmp_path / "texts.txt", "--output", output, "--device", "cpu")
    status, line = stopped(capsys, call)
    assert (status, output.read_bytes()) == (2, b"others' vectors")
    assert line.endswith(f"--output: expected a new file, got {output}, which exists; --overwrite replaces it")
    assert run(*call, "--overwrite") == 0
    assert np.load(output).shape == (3, 64)


# ---- generate --------------------------------------------------------------------------------------------------------


def continued(directory: Path, prompt: str, **options: Any) -> str:
    """What ``generate`` adds to a prompt."""
    tokenizer, model = load_tokenizer(directory), open_model(directory, Head.CAUSAL_LM)
    ids = torch.tensor([tokenizer.encode(prompt)])
    tokens = generate(model, ids, eos_token_id=tokenizer.special.eos, **options)[0, ids.shape[1] :]
    return tokenizer.decode(tokens)


def test_the_terminal_shows_the_output_of_generate(gpt_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = (
        "generate",
        "--model",
        gpt_directory,
        "--prompt",
        "The state of the",
        "--max-new-tokens",
        20,
        "--device",
        "cpu",
    )
    assert run(*call) == 0
    assert capsys.readouterr().out == continued(gpt_directory, "The state of the", max_new_tokens=20) + "\n"
    for _ in range(2):
        assert run(*call, "--temperature", 0.9, "--top-k", 50, "--seed", 3) == 0
    torch.manual_seed(3)
    sampled = continued(gpt_directory, "The state of the", max_new_tokens=20, do_sample=True, temperature=0.9, top_k=50)
    assert capsys.readouterr().out == f"{sampled}\n" * 2
    assert run(*call, "--num-beams", 3) == 0
    assert (
        capsys.readouterr().out == continued(gpt_directory, "The state of the", max_new_tokens=20, num_beams=3) + "\n"
    )


def test_examples_precede_the_prompt(gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shots = tmp_path / "examples.jsonl"
    shots.write_text("".join(json.dumps({"input": f"{n} plus 1", "output": str(n + 1)}) + "\n" for n in range(3)))
    call = ("generate", "--model", gpt_directory, "--prompt", "4 plus 1", "--device", "cpu", "--show-prompt")
    call += ("--max-new-tokens", 1, "--template", r"{input} = {output}", "--separator", r"\n", "--stop", "")
    assert run(*call, "--shots", shots, "--count", 2, "--description", "Add:") == 0
    prompt = "Add:\n0 plus 1 = 1\n1 plus 1 = 2\n4 plus 1 ="
    assert capsys.readouterr().out == prompt + continued(gpt_directory, prompt, max_new_tokens=1) + "\n"


def test_examples_that_do_not_fit_are_reported(
    gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shots = tmp_path / "examples.jsonl"
    shots.write_text("".join(json.dumps({"input": f"question {n}", "output": "answer"}) + "\n" for n in range(30)))
    assert (
        run(
            "generate",
            "--model",
            gpt_directory,
            "--prompt",
            "x",
            "--shots",
            shots,
            "--max-new-tokens",
            2,
            "--device",
            "cpu",
        )
        == 0
    )
    assert "of 30 examples do not fit and are left out, the first ones" in capsys.readouterr().err


# ---- distill ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("\n\n".join(addresses(12)))
    return path


def distilled(recipe: str, teacher: Path, output: Path, *options: Any) -> dict[str, Any]:
    call = ("distill", "--recipe", recipe, "--teacher", teacher, "--output", output, "--quiet", "--device", "cpu")
    assert run(*call, "--max-length", 48, "--tokens-per-batch", 512, "--learning-rate", 2e-3, *options) == 0
    metrics: dict[str, Any] = json.loads((output / "metrics.json").read_text())
    return metrics


def test_a_distilbert_from_a_corpus(wordpiece: Tokenizer, corpus: Path, tmp_path: Path) -> None:
    import transformers

    teacher = save_bert(wordpiece, tmp_path / "teacher", num_hidden_layers=4, initializer_range=0.2)
    metrics = distilled("distilbert", teacher, tmp_path / "student", "--data", corpus, "--steps", 20)
    before, after = metrics["held_out_before"], metrics["held_out"]
    assert all(after[term] < 0.9 * before[term] for term in ("loss", "soft_targets", "cosine")), metrics
    assert after["masked_lm"] < before["masked_lm"]
    student = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "student").eval()
    assert (student.config.model_type, student.config.n_layers) == ("distilbert", 2)
    ids = torch.arange(5, 15)[None]
    ours = models.DistilBertForMaskedLM.from_pretrained(tmp_path / "student")
    with torch.no_grad():
        assert torch.allclose(student(ids).logits, ours(ids).logits, atol=1e-4)
    with (tmp_path / "student" / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"soft_targets", "masked_lm", "cosine"} < rows[0].keys()


def test_an_interrupted_distillation_continues_with_the_same_bits(
    wordpiece: Tokenizer,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = save_bert(wordpiece, tmp_path / "teacher", num_hidden_layers=2)
    call = ("distill", "--recipe", "distilbert", "--teacher", teacher, "--data", corpus, "--steps", 3, "--quiet")
    call += ("--device", "cpu", "--max-length", 16, "--tokens-per-batch", 128, "--output")
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert run(*call, whole) == 0
    step = Trainer.step

    def stopped_at_the_second(trainer: Trainer, batches: Any) -> Any:
        if trainer.completed == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, batches)

    monkeypatch.setattr(Trainer, "step", stopped_at_the_second)
    assert stopped(capsys, (*call, part))[1].startswith("fasttfm distill: stopped by a signal after step 2; ")
    monkeypatch.setattr(Trainer, "step", step)
    assert "seed was 0, is 1" in stopped(capsys, (*call, part, "--resume", "--seed", 1))[1]
    assert run(*call, part, "--resume") == 0
    for name in ("model.safetensors", "metrics.json"):
        assert (part / name).read_bytes() == (whole / name).read_bytes()
    assert not list(part.glob("checkpoint-*"))


@pytest.mark.parametrize("stopped_at", [("layers", 2), ("predictions", 1), ("predictions", 2)], ids=str)
def test_an_interrupted_second_stage_continues_with_the_same_bits(
    wordpiece: Tokenizer,
    corpus: Path,
    stopped_at: tuple[str, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped before a part's first checkpoint, the run continues with the last one of the part before it."""
    teacher = save_bert(wordpiece, tmp_path / "teacher", num_hidden_layers=1)
    general, tuned, whole, part = (tmp_path / name for name in ("general", "tuned", "whole", "part"))
    distilled("tinybert", teacher, general, "--data", corpus, "--steps", 1, "--layers", 1, "--width", 32)
    data = tmp_path / "data.tsv"
    rows = [f"{word} and {word}\t{label}" for label, word in enumerate(("war", "peace"))] * 6
    data.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    options = ("--task", "classify", "--data", data, "--dev", data, "--epochs", 1, "--batch-size", 4)
    options += ("--max-length", 16, "--quiet", "--device", "cpu")
    assert run("finetune", *options, "--model", teacher, "--output", tuned) == 0
    call = ("distill", "--recipe", "tinybert", "--teacher", tuned, "--student", general, *options)
    call += ("--prediction-epochs", 1, "--output")
    assert run(*call, whole) == 0
    step, names = Trainer.step, {"layers": TinyBertRecipe, "predictions": PredictionRecipe}

    def interrupted(trainer: Trainer, batches: Any) -> Any:
        name, number = stopped_at
        if isinstance(trainer.module, names[name]) and trainer.completed + 1 == number:
            if number == 1:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)
        return step(trainer, batches)

    monkeypatch.setattr(Trainer, "step", interrupted)
    if stopped_at[1] == 1:
        assert run(*call, part) == 130
    else:
        assert "stopped by a signal after step 2" in stopped(capsys, (*call, part))[1]
    monkeypatch.setattr(Trainer, "step", step)
    assert "prediction epochs was 1, is 2" in stopped(capsys, (*call, part, "--resume", "--prediction-epochs", 2))[1]
    assert run(*call, part, "--resume") == 0
    for name in ("model.safetensors", "projections.safetensors", "metrics.json"):
        assert (part / name).read_bytes() == (whole / name).read_bytes(), name
    assert (part / "predictions" / "log.csv").exists()
    assert not list(part.glob("*/checkpoint-*"))
    assert "expected a checkpoint of layers or predictions" in stopped(capsys, (*call, part, "--resume"))[1]


def test_a_gpt_from_a_corpus(
    gpt_directory: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = tmp_path / "student"
    metrics = distilled("distilbert", gpt_directory, student, "--data", corpus, "--steps", 20, "--layers", 1)
    before, after = metrics["held_out_before"], metrics["held_out"]
    assert after["loss"] < before["loss"], metrics
    assert models.OpenAIGPTLMHeadModel.from_pretrained(student).config.n_layer == 1
    call = ("distill", "--recipe", "distilbert", "--teacher", gpt_directory, "--soft-targets", "masked")
    assert stopped(capsys, call)[1].endswith("expected all tokens for a GPT, which has no masked tokens, got masked")


def test_a_tinybert_in_two_stages(wordpiece: Tokenizer, corpus: Path, tmp_path: Path) -> None:
    teacher = save_bert(wordpiece, tmp_path / "teacher", num_hidden_layers=2)
    general, tuned, special = (tmp_path / name for name in ("general", "tuned", "special"))
    options = ("--data", corpus, "--steps", 20, "--layers", 1, "--width", 32)
    metrics = distilled("tinybert", teacher, general, *options)
    for term in ("embeddings", "attention_1", "hidden_1"):
        assert metrics["held_out"][term] < metrics["held_out_before"][term]
    assert (general / "projections.safetensors").is_file()
    call = ("finetune", "--task", "pair", "--model", teacher, "--output", tuned, "--quiet", "--device", "cpu")
    assert run(*call, "--epochs", 4, "--learning-rate", 3e-3, "--tokens-per-batch", 1024, "--max-length", 48) == 0
    options = ("--task", "pair", "--student", general, "--epochs", 1, "--prediction-epochs", 5)
    scores = distilled("tinybert", tuned, special, *options)
    assert scores["teacher"]["accuracy"] > scores["majority"]["accuracy"] + 0.2
    assert scores["student"]["accuracy"] > scores["majority"]["accuracy"] + 0.1
    joint = tmp_path / "joint"
    options = ("--task", "pair", "--student", general, "--epochs", 1, "--joint")
    assert distilled("tinybert", tuned, joint, *options)["student"]["accuracy"] >= 0
    with (joint / "joint" / "log.csv").open() as file:
        row = next(csv.DictReader(file))
    parts = ("embeddings", "attention_1", "hidden_1", "predictions")
    assert float(row["loss"]) == pytest.approx(sum(float(row[name]) for name in parts), rel=1e-5)
    student = models.BertForSequenceClassification.from_pretrained(special)
    assert (student.config.hidden_size, student.config.num_hidden_layers) == (32, 1)
    assert (special / "predictions.tsv").is_file()
    with (special / "predictions" / "log.csv").open() as file:
        losses = [float(row["predictions"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_reported(
    bert_directory: Path, gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune = ("finetune", "--model", bert_directory, "--output", tmp_path / "out", "--task")
    cases: list[tuple[Sequence[Any], int, str]] = [
        (("finetune", "--task", "tag", "--model", tmp_path / "none"), 1, "none: expected a directory with a model"),
        (("finetune", "--task", "tag", "--model", gpt_directory), 2, "openai-gpt has no head for it"),
        ((*finetune, "pair", "--data", tmp_path / "none.tsv"), 1, "none.tsv"),
        ((*finetune, "tag", "--values"), 2, "values: expected with the tasks classify and pair, got tag"),
        ((*finetune, "classify", "--epochs", "0"), 2, "--epochs: expected a number from 1 on, got 0"),
        (
            ("glue", "--model", bert_directory, "--data", tmp_path, "--epochs", "0"),
            2,
            "--epochs: expected a number from 1",
        ),
        ((*finetune, "classify", "--auxiliary", "0.5"), 2, "expected a GPT-1, or a GPT with choice"),
        (
            (*finetune, "qa", "--data", shipped_task("classify")["train"]),
            1,
            "line 1: expected JSON of questions in the format of SQuAD",
        ),
        (
            (*finetune, "classify", "--layer-decay", "2"),
            2,
            "layer_decay: expected a number above 0 and up to 1, got 2.0",
        ),
        ((*finetune, "classify", "--max-length", "999"), 2, "expected no more than the model's 128 positions, got 999"),
        ((*finetune, "qa", "--max-length", "64", "--stride", "60"), 2, "stride: expected 1 to"),
        ((*finetune, "classify", "--device", "tpu"), 2, "device: expected cpu, cuda or cuda:<number>, got 'tpu'"),
        (
            ("embed", "--model", bert_directory, "--data", tmp_path, "--output", "x.txt"),
            2,
            "ends in .npy, .npz, .safetensors",
        ),
        (("generate", "--model", bert_directory, "--prompt", "a"), 2, "bert has no head for it"),
        (("generate", "--model", gpt_directory, "--prompt", ""), 2, "--prompt: expected a text with tokens, got none"),
        (("generate", "--model", gpt_directory, "--prompt", "a", "--top-p", "2"), 2, "top_p: expected"),
        (("distill", "--recipe", "distilbert", "--teacher", bert_directory, "--task", "tag"), 2, "fasttfm finetune"),
        (("distill", "--recipe", "tinybert", "--teacher", bert_directory, "--task", "tag"), 2, "--student: expected"),
        (
            ("distill", "--recipe", "tinybert", "--teacher", bert_directory, "--width", "7"),
            2,
            "width: expected a multiple",
        ),
    ]
    for arguments, status, expected in cases:
        code, line = stopped(capsys, arguments)
        assert expected in line, (arguments, line)
        assert code == status, (arguments, line)
    assert not (tmp_path / "out").exists()


def test_nothing_is_trained_that_cannot_be_scored(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    call = ("finetune", "--task", "classify", "--model", bert_directory, "--output", tmp_path / "out")
    expected = f"fasttfm finetune: computing scores needs scikit-learn: {how_to_install('tasks')}"
    assert stopped(capsys, call) == (1, expected)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run(command, "--help")
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert f"\n  fasttfm {command}" in text  # an example
    assert "``" not in text
    assert not re.search(r"\(default: (None|False|\[\]|\(\))\)", text)
    assert "by default" not in text.partition("\noptions:\n")[2], "options end in (default: X)"
