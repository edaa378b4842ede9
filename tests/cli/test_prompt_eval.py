"""``fasttfm prompt-eval``: random examples, answers by likelihood and by generation, scores, and files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.cli import prompt_eval as command
from fasttfm.cli.main import main
from fasttfm.data import load_tokenizer
from fasttfm.data.lines import DataError
from fasttfm.data.prompt_files import Question, read_prompts
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks.prompt_eval import PRESETS, Evaluation, prompt_scores
from fasttfm.tasks.prompts import Prompt

LABELS = ("peace", "war", "commerce with all nations")
QUESTIONS = [Question(f"the state of the union {n}", [LABELS[n % 3]], []) for n in range(5)]
SHOTS = [Question(f"report {n}", [LABELS[n % 3]], []) for n in range(6)]


def written(path: Path, questions: list[Question]) -> Path:
    rows = [{"input": question.input, "output": question.outputs[0]} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def evaluation(gpt_directory: Path) -> Evaluation:
    return Evaluation(
        open_model(gpt_directory, Head.CAUSAL_LM), load_tokenizer(gpt_directory), Prompt(template="{input}: {output}")
    )


def test_likelihoods_are_those_of_the_model(evaluation: Evaluation) -> None:
    encode = evaluation.tokenizer.encode
    pairs = [(encode("The state of"), encode(" the Union")), (encode("War"), encode(" and peace, and so on"))]
    evaluation.tokens_per_batch = 8  # one sequence per batch
    likelihoods = evaluation.log_likelihoods(pairs)
    for (first, last), value in zip(pairs, likelihoods, strict=True):
        with torch.no_grad():
            logits = evaluation.model(torch.tensor([[*first, *last]])).logits[0].log_softmax(-1)
        expected = sum(float(logits[len(first) - 1 + index, id]) for index, id in enumerate(last))
        assert value == pytest.approx(expected, abs=1e-4)
    evaluation.tokens_per_batch = 16384


@pytest.mark.parametrize("normalization", ["none", "tokens", "bytes", "unconditional"])
def test_the_most_likely_choice_is_the_answer(normalization: str, evaluation: Evaluation) -> None:
    normalized = Evaluation(evaluation.model, evaluation.tokenizer, evaluation.prompt, normalization=normalization)
    encode = normalized.tokenizer.encode
    for question, answer in zip(QUESTIONS, normalized.answers(QUESTIONS, SHOTS, 0, 0), strict=True):
        scores = {}
        for label in LABELS:
            ids = encode(f" {label}")
            (score,) = normalized.log_likelihoods([(encode(f"{question.input}:"), ids)])
            (without,) = normalized.log_likelihoods([(encode(":"), ids)])
            scores[label] = {
                "none": score,
                "tokens": score / len(ids),
                "bytes": score / len(label.encode()),
                "unconditional": score - without,
            }[normalization]
        assert answer == max(scores, key=scores.__getitem__)


def test_examples_are_drawn_by_the_seed(evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def record(self: Evaluation, prompt: Prompt, question: Question, choices: Any) -> str:
        prompts.append(prompt.text(question.input))
        return "peace"

    monkeypatch.setattr(Evaluation, "_most_likely", record)

    def drawn(k: int, seed: int) -> list[str]:
        prompts.clear()
        assert list(evaluation.answers(QUESTIONS, SHOTS, k, seed)) == ["peace"] * 5
        return list(prompts)

    assert drawn(0, 0) == [f"{question.input}:" for question in QUESTIONS]
    first = drawn(2, 0)
    assert all(prompt.count("report ") == 2 for prompt in first)
    assert first == drawn(2, 0) != drawn(2, 1)
    with pytest.raises(ValueError, match="shots: expected at least 7 examples to draw from, got 6"):
        drawn(7, 0)


def test_the_command_writes_scores_answers_and_a_curve(
    gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, shots = written(tmp_path / "dev.jsonl", QUESTIONS), written(tmp_path / "train.jsonl", SHOTS)
    call = ["prompt-eval", "--model", gpt_directory, "--data", data, "--shots", shots, "--device", "cpu", "--quiet"]
    run = tmp_path / "run"
    assert main([str(argument) for argument in [*call, "--k", "0,2,4", "--seeds", 2, "--output", run]]) == 0
    metrics = json.loads((run / "metrics.json").read_text())
    assert [row["k"] for row in metrics["runs"]] == [0, 2, 2, 4, 4]
    assert [row["k"] for row in metrics["curve"]] == [0, 2, 4]
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 25
    right = [row["answer"] == row["output"][0] for row in answers if (row["k"], row["seed"]) == (2, 1)]
    assert metrics["runs"][2]["accuracy"] == pytest.approx(sum(right) / 5)
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "k=4, seed 1: accuracy" in capsys.readouterr().out
    options = ["--task", "reading", "--max-new-tokens", 3, "--limit", 2, "--output", tmp_path / "reading"]
    assert main([str(argument) for argument in [*call, *options]]) == 0
    assert "exact match" in capsys.readouterr().out
    for wrong, expected in (
        (["--k", "x"], "--k: expected numbers from 0 on such as 0,1,8, got 'x'"),
        (["--metrics", "meteor", "--output", tmp_path / "none"], "metrics: expected accuracy, f1"),
        (["--template", "{input}"], "template: expected {input} once and then {output}"),
    ):
        with pytest.raises(SystemExit) as error:
            main([str(argument) for argument in [*call, *wrong]])
        assert error.value.code == 2
        assert expected in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_scores_of_texts() -> None:
    questions = [
        Question("", ["the cat sat on the mat"], []),
        Question("", ["a dog", "the dog barks loudly today"], []),
    ]
    perfect = [question.outputs[-1] for question in questions]
    assert prompt_scores(("exact_match", "answer_f1", "accuracy"), questions, perfect) == {
        "exact_match": 1.0,
        "answer_f1": 1.0,
        "accuracy": 1.0,
    }
    assert prompt_scores(("answer_f1",), questions, ["cat", "cat"])["answer_f1"] == pytest.approx(
        (2 / 5) / 2
    )  # one of four words, without articles


def test_bleu_and_rouge() -> None:
    sacrebleu = pytest.importorskip("sacrebleu", reason="it computes BLEU")
    pytest.importorskip("rouge_score", reason="it computes ROUGE")
    gold = ["the cat sat on the mat", "the dog barks loudly today"]
    answers = ["the cat sat on a mat", "the dog barks loudly today"]
    questions = [Question("", [text], []) for text in gold]
    scores = prompt_scores(("bleu", "rouge"), questions, answers)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(answers, [gold]).score)
    # Five of six words, three of five pairs; the longest common subsequence has five words.
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx((5 / 6 + 1) / 2)
    assert scores["rouge2"] == pytest.approx((3 / 5 + 1) / 2)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"input": "a"}', 'line 1: expected an object with the texts "input" and "output"'),
        ('{"input": "a", "output": []}', "line 1: expected an object"),
        ('{"input": "a", "output": "b", "choices": ["c"]}', 'line 1: expected "output" among "choices", got b'),
        ("", "expected examples, got none"),
    ],
)
def test_lines_that_are_no_examples(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(DataError, match=sentence):
        read_prompts([path], "classify")


def test_summaries_have_up_to_100_tokens(gpt_directory: Path, tmp_path: Path) -> None:
    """As in GPT-2's paper; an option has priority."""
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    data = written(tmp_path / "data.jsonl", QUESTIONS)
    for task, more, expected in (("tldr", [], 100), ("reading", [], 50), ("tldr", ["--max-new-tokens", "7"], 7)):
        options = ["--model", str(gpt_directory), "--data", str(data), "--device", "cpu", "--task", task, *more]
        arguments = parser.parse_args(["prompt-eval", *options])
        assert command._evaluation(arguments, str(gpt_directory), PRESETS[task]).max_new_tokens == expected
