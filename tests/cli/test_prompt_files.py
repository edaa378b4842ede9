"""``fasttfm prompt-eval`` on data sets as they are delivered, with scores that are computed by hand here."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.cli import prompt_eval
from fasttfm.cli.main import main
from fasttfm.data import load_tokenizer
from fasttfm.data.lines import DataError
from fasttfm.data.prompt_files import Question, read_prompts
from fasttfm.inference.opening import open_model
from fasttfm.models.family import Head
from fasttfm.tasks.prompt_eval import PRESETS, Evaluation
from fasttfm.tasks.prompts import Prompt

COQA = {
    "version": "1.0",
    "data": [
        {
            "source": "mctest",
            "id": "3dr23u6we5exclen4th8uq9rb42tel",
            "filename": "mc160.test.41",
            "story": "Ann has a white dog.",
            "questions": [{"input_text": "What colour is it?", "turn_id": 1}, {"input_text": "Why?", "turn_id": 2}],
            "answers": [
                {"span_start": 10, "span_end": 15, "span_text": "white", "input_text": "white", "turn_id": 1},
                {"span_start": -1, "span_end": -1, "span_text": "unknown", "input_text": "unknown", "turn_id": 2},
            ],
            "additional_answers": {
                "0": [
                    {"span_start": 8, "span_end": 19, "input_text": "a white dog", "turn_id": 1},
                    {"span_start": -1, "span_end": -1, "input_text": "unknown", "turn_id": 2},
                ]
            },
            "name": "mc160.test.41",
        }
    ],
}
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "War",
            "paragraphs": [
                {
                    "context": "The war began in the year 1812.",
                    "qas": [
                        {
                            "id": "a",
                            "question": "When did it begin?",
                            "is_impossible": False,
                            "answers": [
                                {"text": "1812", "answer_start": 26},
                                {"text": "the year 1812", "answer_start": 17},
                            ],
                        },
                        {
                            "id": "b",
                            "question": "When did it end?",
                            "is_impossible": True,
                            "answers": [],
                            "plausible_answers": [{"text": "1812", "answer_start": 26}],
                        },
                    ],
                }
            ],
        }
    ],
}
SST2 = "sentence\tlabel\nthe peace of the nation \t1\na war without end \t0\n"
WMT = [("The war is over .", "Der Krieg ist vorbei ."), ("We have peace & law .", "Wir haben Frieden & Recht .")]


def command(*options: Any) -> list[str]:
    return [str(argument) for argument in ("prompt-eval", "--device", "cpu", "--quiet", *options)]


def generates(monkeypatch: pytest.MonkeyPatch, answers: list[str]) -> list[str]:
    """Lets the model generate these answers; the returned list gets its prompts."""
    prompts: list[str] = []

    def generated(self: Evaluation, asked: Any) -> Iterator[str]:
        for (prompt, question), answer in zip(asked, answers, strict=True):
            prompts.append(self.tokenizer.decode(self._fitting(prompt, question, self._longest - 4)))
            yield answer

    monkeypatch.setattr(Evaluation, "_generated", generated)
    return prompts


def scores_of(folder: Path) -> dict[str, float]:
    (row,) = json.loads((folder / "metrics.json").read_text())["runs"]
    return {name: value for name, value in row.items() if name not in ("model", "k", "seed")}


@pytest.mark.parametrize(
    ("data", "answers", "question", "f1", "exact"),
    [
        # White scores 2/3 against the other person's "white dog" (without the article) and 1 against "white"; the mean
        # over both is 5/6. The second answer is wrong.
        (COQA, ["white", "yes"], "Q: What colour is it?\nA: white\nQ: Why?\nA:", (5 / 6 + 0) / 2, (1 / 2 + 0) / 2),
        # "in 1812" has one of two words of each answer: F1 2/3 with "1812" and 1/2 with "year 1812". The second
        # question has no answer, which "unknown" says.
        (SQUAD, ["in 1812", "Unknown."], "in the year 1812.\n\nQ: When did it end?\nA:", (2 / 3 + 1) / 2, 1 / 2),
    ],
)
def test_reading(
    data: Any,
    answers: list[str],
    question: str,
    f1: float,
    exact: float,
    gpt_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = generates(monkeypatch, answers)
    (tmp_path / "dev.json").write_text(json.dumps(data))
    options = ("--task", "reading", "--output", tmp_path / "run")
    assert main(command("--model", gpt_directory, "--data", tmp_path / "dev.json", *options)) == 0
    assert scores_of(tmp_path / "run") == pytest.approx({"exact_match": exact, "answer_f1": f1})
    assert prompts[1].endswith(question)


def test_sentiment(gpt_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text(SST2)
    options = ("--task", "sentiment", "--normalization", "none", "--output", tmp_path / "run")
    assert main(command("--model", gpt_directory, "--data", tmp_path / "dev.tsv", *options)) == 0
    right = 0
    for text, label in (("the peace of the nation", "positive"), ("a war without end", "negative")):
        prompt = f"Review: {text}\nSentiment:"
        values = {word: sum(_log_probabilities(gpt_directory, prompt, f" {word}")) for word in ("negative", "positive")}
        right += max(values, key=values.__getitem__) == label
    assert scores_of(tmp_path / "run")["accuracy"] == right / 2
    words = {"0": "bad", "1": "good"}
    (first, _) = read_prompts([tmp_path / "dev.tsv"], "classify", labels=words)
    assert first == Question("the peace of the nation", ["good"], ["bad", "good"])
    with pytest.raises(DataError, match="example 1: expected a label of 0, 2, got '1'"):
        read_prompts([tmp_path / "dev.tsv"], "classify", labels={"0": "bad", "2": "good"})
    (tmp_path / "own.jsonl").write_text(json.dumps({"input": "the peace of the nation", "output": "good"}))
    assert read_prompts([tmp_path / "own.jsonl"], "classify", labels=words) == [first]
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta text\n")
    with pytest.raises(DataError, match="example 1: expected a label, got none"):
        read_prompts([tmp_path / "test.tsv"], "classify")


def _log_probabilities(directory: Path, text: str, ending: str) -> list[float]:
    """Of the tokens of an ending, by the model's own forward."""
    model, encode = open_model(directory, Head.CAUSAL_LM).eval(), load_tokenizer(directory).encode
    first, last = encode(text), encode(ending)
    with torch.no_grad():
        logits = model(torch.tensor([[*first, *last]])).logits[0].double().log_softmax(-1)
    return [float(logits[len(first) - 1 + index, id]) for index, id in enumerate(last)]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_last_words(suffix: str, gpt_directory: Path, tmp_path: Path) -> None:
    model, tokenizer = open_model(gpt_directory, Head.CAUSAL_LM).eval(), load_tokenizer(gpt_directory)
    ids = tokenizer.encode("We have been at peace with all of the")
    with torch.no_grad():  # the word that the model finds most likely: its answer is right
        best = next(
            word
            for id in model(torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()
            if (word := tokenizer.decode([id])).startswith(" ") and word.strip().isalpha()
        )
    passages = [f"We have been at peace with all of the{best}", "The state of the commonwealth"]
    rows = passages if suffix == "txt" else [json.dumps({"text": passage}) for passage in passages]
    (tmp_path / f"lambada.{suffix}").write_text("\n".join(rows) + "\n")
    options = ("--task", "last-word", "--output", tmp_path / "run")
    assert main(command("--model", gpt_directory, "--data", tmp_path / f"lambada.{suffix}", *options)) == 0
    logs, right = [], 0
    for passage in passages:
        before, _, word = passage.rpartition(" ")
        logs.append(sum(_log_probabilities(gpt_directory, before, f" {word}")))
        generated = tokenizer.encode(before)
        for _ in tokenizer.encode(f" {word}"):
            with torch.no_grad():
                generated.append(int(model(torch.tensor([generated])).logits[0, -1].argmax()))
        right += tokenizer.decode(generated[len(tokenizer.encode(before)) :]).strip() == word
    scores = scores_of(tmp_path / "run")
    assert scores["accuracy"] == right / 2
    assert scores["perplexity"] == pytest.approx(math.exp(-sum(logs) / 2), rel=1e-3)
    answers = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").read_text().splitlines()]
    assert [row["output"] for row in answers] == [[best.strip()], ["commonwealth"]]


ARTICLE, HIGHLIGHTS = "Peace has come. (CNN)", "The war is over .\nPeace has come ."


def test_files_of_summaries(tmp_path: Path) -> None:
    _write_summaries(tmp_path / "test.csv")
    (tmp_path / "a.story").write_text(
        f"{ARTICLE}\n\n@highlight\n\nThe war is over .\n\n@highlight\n\nPeace has come .\n"
    )
    (tmp_path / "xsum.jsonl").write_text(json.dumps({"document": ARTICLE, "summary": HIGHLIGHTS, "id": "1"}) + "\n")
    for file in (".", "a.story", "xsum.jsonl", "test.csv"):
        assert read_prompts([tmp_path / file], "summary") == [Question(ARTICLE, [HIGHLIGHTS])]
    (tmp_path / "other.csv").write_text("a,b\nc,d\n")
    with pytest.raises(DataError, match=r"line 1: expected the columns 'article' and 'highlights' or .*, got 'a', 'b'"):
        read_prompts([tmp_path / "other.csv"], "summary")


def _write_summaries(path: Path) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "article", "highlights"), ("92c514c9", ARTICLE, HIGHLIGHTS)])


def test_summaries(gpt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rouge_score", reason="it computes ROUGE")
    _write_summaries(tmp_path / "test.csv")
    prompts = generates(monkeypatch, ["The war has come"])
    options = ("--task", "tldr", "--output", tmp_path / "run")
    assert main(command("--model", gpt_directory, "--data", tmp_path / "test.csv", *options)) == 0
    # All four words of the answer are among the seven of the highlights, and two of its three pairs of words (the war,
    # has come) among their six; the longest common subsequence is the whole answer.
    expected = {"rouge1": 2 * 4 / (4 + 7), "rouge2": 2 * 2 / (3 + 6), "rougeL": 2 * 4 / (4 + 7)}
    assert scores_of(tmp_path / "run") == pytest.approx(expected)
    assert prompts == [f"{ARTICLE}\nTL;DR:"]


def test_files_of_translations(tmp_path: Path) -> None:
    _write_parallel(tmp_path)
    for side, language in enumerate(("en", "de")):
        segments = "".join(
            f'<seg id="{number}">{pair[side].replace("&", "&amp;")}</seg>\n' for number, pair in enumerate(WMT, 1)
        )
        (tmp_path / f"newstest.{language}.sgm").write_text(f'<refset>\n<doc docid="a">\n{segments}</doc>\n</refset>\n')
    rows = [json.dumps({"translation": {"en": first, "de": second}}) for first, second in WMT]
    (tmp_path / "hub.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "pairs.tsv").write_text("".join(f"{first}\t{second}\n" for first, second in WMT))
    expected = [Question(first, [second]) for first, second in WMT]
    for files in (["newstest.en", "newstest.de"], ["newstest.en.sgm", "newstest.de.sgm"], ["hub.jsonl"], ["pairs.tsv"]):
        assert read_prompts([tmp_path / file for file in files], "translate") == expected
    reverse = [Question(second, [first]) for first, second in WMT]
    assert read_prompts([tmp_path / "hub.jsonl"], "translate", direction="de-en") == reverse
    with pytest.raises(DataError, match="line 1: expected an object 'translation' with the texts of de-fr"):
        read_prompts([tmp_path / "hub.jsonl"], "translate", direction="de-fr")
    (tmp_path / "short.de").write_text("Der Krieg ist vorbei .\n")
    with pytest.raises(DataError, match=r"short\.de: expected 2 sentences, as newstest\.en has, got 1"):
        read_prompts([tmp_path / "newstest.en", tmp_path / "short.de"], "translate")


def _write_parallel(folder: Path) -> None:
    for side, language in enumerate(("en", "de")):
        (folder / f"newstest.{language}").write_text("".join(f"{pair[side]}\n" for pair in WMT))


def test_translations(gpt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sacrebleu", reason="it computes BLEU")
    _write_parallel(tmp_path)
    prompts = generates(monkeypatch, ["Der Krieg ist vorbei .", "Wir haben Frieden & Recht"])
    files = [tmp_path / "newstest.en", tmp_path / "newstest.de"]
    options = ("--task", "translate", "--output", tmp_path / "run")
    assert main(command("--model", gpt_directory, "--data", *files, *options)) == 0
    # All n-grams of the answers are right. They have 10 of 11 tokens: the brevity penalty is exp(1 - 11 / 10).
    assert scores_of(tmp_path / "run") == pytest.approx({"bleu": 100 * math.exp(1 - 11 / 10)})
    assert prompts[0] == "The war is over . ="


def test_choices(tmp_path: Path) -> None:
    (tmp_path / "hellaswag.jsonl").write_text(
        json.dumps({"ind": 0, "ctx": "A man is", "endings": ["sitting.", "a."], "label": 0})
    )
    assert read_prompts([tmp_path / "hellaswag.jsonl"], "choice") == [
        Question("A man is", ["sitting."], ["sitting.", "a."])
    ]


@pytest.mark.parametrize(("task", "kept"), [("tldr", "start"), ("reading", "end")])
def test_questions_that_do_not_fit_are_truncated(task: str, kept: str, gpt_directory: Path) -> None:
    """An article loses its end, a text its start: its question stays."""
    preset = PRESETS[task]
    model, tokenizer = open_model(gpt_directory, Head.CAUSAL_LM), load_tokenizer(gpt_directory)
    evaluation = Evaluation(model, tokenizer, Prompt(template=preset.template), truncated=preset.truncated)
    text = "The war began. " + "There was no peace. " * 100 + "It ended."
    ids = evaluation._fitting(evaluation.prompt, Question(text, ["-"]), 40)
    truncated = tokenizer.decode(ids)
    assert 35 < len(ids) <= 40
    assert evaluation.cut == 1
    assert truncated.startswith("The war began.") == (kept == "start")
    assert ("It ended." in truncated) == (kept == "end")
    assert truncated.endswith("\nTL;DR:" if task == "tldr" else "\nA:")
    with pytest.raises(ValueError, match="expected room for a question in 2 tokens"):
        evaluation._fitting(evaluation.prompt, Question(text, ["-"]), 2)


def test_a_table_and_a_curve_for_each_model(
    gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="it draws")
    shutil.copytree(gpt_directory, tmp_path / "other")
    (tmp_path / "dev.tsv").write_text(SST2)
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"text {n}\t{n % 2}\n" for n in range(6)))
    drawn: list[Any] = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    models = (gpt_directory, tmp_path / "other")
    data = ("--data", tmp_path / "dev.tsv", "--shots", tmp_path / "train.tsv", "--task", "sentiment")
    options = ("--k", "0,1,4", "--seeds", 2, "--output", tmp_path / "run")
    assert main(command("--model", *models, *data, *options)) == 0
    with (tmp_path / "run" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [gpt_directory.name, "other"]
    assert [(row["model"], row["k"]) for row in rows] == [(name, k) for name in names for k in "014"]
    runs = json.loads((tmp_path / "run" / "metrics.json").read_text())["runs"]
    accuracies = [row["accuracy"] for row in runs if (row["model"], row["k"]) == ("other", 4)]
    assert float(rows[-1]["accuracy"]) == pytest.approx(sum(accuracies) / 2)
    assert len((tmp_path / "run" / "answers.jsonl").read_text().splitlines()) == 2 * 2 * (1 + 2 + 2)
    assert f"| other | 4 | {float(rows[-1]['accuracy']):.3f} |" in capsys.readouterr().out
    panels = [panel for panel in drawn[0].axes if panel.get_visible()]
    assert [panel.get_title() for panel in panels] == ["accuracy", "f1"]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == names
    assert [label.get_text() for label in panels[0].get_xticklabels()] == ["0", "1", "4"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--labels", "0"], "--labels: expected pairs such as 0=negative,1=positive, got '0'"),
        (["--task", "tldr", "--metrics", "accuracy", "--labels", "0=a"], "labels: expected with classify, got summary"),
        (["--direction", "en-de"], "direction: expected with translate, got classify"),
        (["--metrics", "perplexity"], "metrics: expected --answer last-word for the perplexity"),
    ],
)
def test_wrong_options(
    options: list[str], expected: str, gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dev.tsv").write_text(SST2)
    call = command("--model", gpt_directory, "--data", tmp_path / "dev.tsv", "--output", tmp_path / "run", *options)
    with pytest.raises(SystemExit):
        main(call)
    assert expected in capsys.readouterr().err


def test_all_models_are_checked_before_the_first_answers(
    gpt_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dev.tsv").write_text(SST2)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    options = ("--data", tmp_path / "dev.tsv", "--output", tmp_path / "run")
    with pytest.raises(SystemExit):
        main(command("--model", gpt_directory, tmp_path / "bert", *options))
    assert "next tokens: expected a model of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_files_only_translate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="files: expected one, or two to translate, got 2"):
        read_prompts([tmp_path / "a", tmp_path / "b"], "reading")
    assert prompt_eval._names(["a/run", "b/run"]) == ["a/run", "b/run"]
