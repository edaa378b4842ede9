"""``tasks.load``: a saved model makes the predictions of the one in memory, for every task and every form of examples;
what a checkpoint does not state is inferred, with a warning."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import save_small

from fasttfm import models, tasks
from fasttfm.data import DataError, Tokenizer, load_tokenizer
from fasttfm.data.task_files import Answer, ChoiceExample, QuestionExample, TagExample, TextExample
from fasttfm.inference.opening import checkpoint_of
from fasttfm.models import CheckpointError
from fasttfm.tasks import loading
from fasttfm.tasks.finetuning import predict, prepare, save
from fasttfm.tasks.results import AnswerResult, ChoiceResult, LabelResult, TagResult, ValueResult
from fasttfm.tasks.running import FeatureRunner
from fasttfm.tasks.task import TASK_KEY

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")
TEXTS = ["peace and commerce", "war", "the peace of nations and an army", "an army in war with all of them", "a"]
EXAMPLES: dict[str, list[Any]] = {
    "classify": [TextExample(text, None, "war" if "war" in text else "peace") for text in TEXTS],
    "pair": [TextExample(text, TEXTS[index - 2], "abc"[index % 3]) for index, text in enumerate(TEXTS)],
    "values": [TextExample(text, TEXTS[index - 2], str(index)) for index, text in enumerate(TEXTS)],
    "tag": [TagExample(text.split(), ["O", "B-X", "I-X"][index % 3 :][:1] * len(text.split()))
            for index, text in enumerate(TEXTS)],
    "qa": [QuestionExample(f"q{index}", "which army?", text, [Answer(text[:1], 0)], False)
           for index, text in enumerate(TEXTS)],
    "choice": [ChoiceExample(text, "then", ["yes", "no", "perhaps so"], index % 3) for index, text in enumerate(TEXTS)],
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, Any]]:
    """A directory for every task, with the model and the task that it was saved from."""
    folders = {}
    for name, examples in EXAMPLES.items():
        torch.manual_seed(2)
        kind, options = ("pair", {"values": True}) if name == "values" else (name, {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, task = prepare(kind, bert_directory, examples, max_length=40, **options)
        folder = tmp_path_factory.mktemp(name)
        save(model, task, folder)
        folders[name] = (folder, model, task)
    return folders


GIVEN: dict[str, Any] = {
    "classify": TEXTS,
    "pair": [(text, TEXTS[index - 2]) for index, text in enumerate(TEXTS)],
    "values": [{"text": text, "text_pair": TEXTS[index - 2]} for index, text in enumerate(TEXTS)],
    "tag": [text if index % 2 else text.split() for index, text in enumerate(TEXTS)],
    "qa": [("which army?", text) for text in TEXTS],
    "choice": [{"context": text, "start": "then", "endings": ["yes", "no", "perhaps so"]} for text in TEXTS],
}
RESULTS = {
    "classify": LabelResult,
    "pair": LabelResult,
    "values": ValueResult,
    "tag": TagResult,
    "qa": AnswerResult,
    "choice": ChoiceResult,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_saved_model_makes_the_same_predictions(
    name: str, saved: dict[str, tuple[Path, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, task = saved[name]
    monkeypatch.setattr(loading, "_WINDOW", 2)  # several windows
    predictor = tasks.load(folder, device="cpu", tokens_per_batch=16)
    assert (predictor.max_length, predictor.task.labels) == (40, task.labels)
    expected = predict(model, task, EXAMPLES[name])
    for examples in (GIVEN[name], iter(EXAMPLES[name])):
        results = predictor(examples)
        assert {type(result) for result in results} == {RESULTS[name]}
        predictions = [task.prediction(result) for result in results]
        if name == "values":
            assert predictions == pytest.approx(expected, abs=1e-5)
        elif name == "qa":
            assert [answer.text for answer in predictions] == [answer.text for answer in expected]
            assert [answer.no_answer for answer in predictions] == pytest.approx(
                [answer.no_answer for answer in expected], abs=1e-4
            )
        else:
            assert predictions == expected
    first = GIVEN[name][0] if name != "tag" else " ".join(GIVEN[name][0])
    assert type(predictor(first)) is RESULTS[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_session_gives_the_logits_of_the_model(
    name: str, saved: dict[str, tuple[Path, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, task = saved[name]
    features = task.features(EXAMPLES[name])
    runner = FeatureRunner(model, task, tokens=24)
    assert (runner._session is not None) == (name != "choice")
    logits = runner.read(features)
    monkeypatch.setattr(type(task), "on_session", False)
    expected = FeatureRunner(model, task, tokens=100_000).read(features)
    for one, other in zip(logits, expected, strict=True):
        if name == "tag":
            assert [number for number, _ in one.values()] == [number for number, _ in other.values()]
        elif name == "qa":
            assert one.span[:2] == other.span[:2]
            assert (one.span.score, one.none) == pytest.approx((other.span.score, other.none), abs=1e-4)
        else:
            rows, others = np.atleast_1d(one), np.atleast_1d(other)
            assert np.allclose(rows, others, atol=1e-5)


def test_probabilities(saved: dict[str, tuple[Path, Any, Any]]) -> None:
    folder, model, task = saved["pair"]
    with torch.no_grad():
        expected = task.logits(model.eval(), task.batch(task.features(EXAMPLES["pair"]))).softmax(-1)
    for result, row in zip(tasks.load(folder, device="cpu")(GIVEN["pair"]), expected, strict=True):
        assert list(result.probabilities.values()) == pytest.approx(row.tolist(), abs=1e-6)
        assert result.probability == max(result.probabilities.values()) == result.probabilities[result.label]


def test_answers_have_offsets_in_the_context(saved: dict[str, tuple[Path, Any, Any]]) -> None:
    predictor = tasks.load(saved["qa"][0], device="cpu")
    context = "  The army,  in 1812, and peace.  " * 8
    result = predictor(("which army?", context))
    assert result.answer == context[result.start : result.end] != ""
    none = tasks.load(saved["qa"][0], device="cpu", threshold=-1e9)(("which army?", context))
    assert (none.answer, none.start, none.end, none.no_answer) == ("", None, None, result.no_answer)


def test_any_number_of_endings(saved: dict[str, tuple[Path, Any, Any]]) -> None:
    predictor = tasks.load(saved["choice"][0], device="cpu")
    several = predictor([("war", ["yes", "no"]), ("peace", "yes", "no", "perhaps", "never")])
    assert [len(result.probabilities) for result in several] == [2, 4]
    alone = [predictor(("war", ["yes", "no"])), predictor(("peace", ["yes", "no", "perhaps", "never"]))]
    for one, other in zip(several, alone, strict=True):
        assert one.choice == other.choice
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


def test_truncated_and_empty_inputs_are_reported(saved: dict[str, tuple[Path, Any, Any]]) -> None:
    predictor = tasks.load(saved["classify"][0], device="cpu")
    with pytest.warns(UserWarning, match=r"1 of 3 examples do not fit into 40 tokens and are truncated: 62 tokens"):
        predictor(["war", "war " * 100, "peace"])
    with pytest.warns(UserWarning, match="2 of 3 examples have no tokens"):
        assert len(predictor(["", " ", "war"])) == 3
    tagger = tasks.load(saved["tag"][0], device="cpu")
    words = ["war", "\u200b", *["army"] * 90]
    with pytest.warns(UserWarning, match="^1 words have no tokens and get the most frequent tag$"):
        result = tagger([words])[0]
    assert len(result.tags) == len(result.probabilities) == 92
    assert [index for index, probability in enumerate(result.probabilities) if probability is None] == [1]


def test_invalid_examples_are_refused(saved: dict[str, tuple[Path, Any, Any]]) -> None:
    for name, examples, sentence in (
        ("classify", 3, "classify: expected a text or two texts, got 3"),
        ("classify", {"body": "a"}, "got an object with 'body'"),
        ("classify", {"text": None}, "got an object with 'text', where 'text' is null"),
        ("pair", ("a", "b", "c"), "pair: expected a text or two texts"),
        ("tag", {"words": ["a"], "tags": ["O", "O"]}, "tags: expected one for each of 1 words, got 2"),
        ("tag", [3], "tag: expected a sentence or a list of its words"),
        ("qa", "why?", "qa: expected a question and its context, got 'why"),
        ("qa", {"question": "a", "context": "b", "answers": [3]}, "answers: expected texts"),
        ("choice", ("a", "b"), "choice: expected a context and two endings or more"),
        ("choice", {"context": "a", "endings": ["b", "c"], "label": 2}, "label: expected the number of an ending"),
    ):
        with pytest.raises(DataError, match=sentence):
            tasks.load(saved[name][0], device="cpu")([examples])


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def without_task(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config.pop(TASK_KEY)
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("pair", "BertForSequenceClassification is taken for classify with the labels a, b, c"),
        ("values", "BertForSequenceClassification is taken for classify with numbers"),
        ("tag", "BertForTokenClassification is taken for tag with the labels B-X, I-X, O"),
        ("qa", "BertForQuestionAnswering is taken for qa$"),
        ("choice", "BertForMultipleChoice is taken for choice$"),
    ],
)
def test_the_task_of_other_checkpoints_is_inferred(
    name: str, sentence: str, saved: dict[str, tuple[Path, Any, Any]], tmp_path: Path
) -> None:
    folder = without_task(saved[name][0], tmp_path / name)
    with pytest.warns(UserWarning, match=f"does not state its task: {sentence}"):
        results = tasks.load(folder, device="cpu")(GIVEN[name])
    expected = tasks.load(saved[name][0], device="cpu")(GIVEN[name])
    assert len(results) == len(expected)
    if name in ("pair", "tag"):
        assert results == expected


def test_a_transformers_gpt_reads_texts_as_they_are(bpe: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_small("gpt2", bpe, tmp_path)
    config = models.GPT2Config.from_pretrained(tmp_path)
    config.pad_token_id = bpe.special.pad
    torch.manual_seed(3)
    models.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="is taken for classify with the labels LABEL_0, LABEL_1"):
        predictor = tasks.load(tmp_path, device="cpu")
    pipeline = transformers.pipeline("text-classification", str(tmp_path), device="cpu")
    for result, theirs in zip(predictor(TEXTS), pipeline(TEXTS), strict=True):
        assert (result.label, result.probability) == (theirs["label"], pytest.approx(theirs["score"], abs=1e-5))
    with pytest.raises(DataError, match="example 2: expected a text with tokens, got none"):
        predictor(["a", ""])


@pytest.mark.filterwarnings("ignore:.*does not state its task")
def test_directories_without_a_task_model_are_refused(
    bert_directory: Path, saved: dict[str, tuple[Path, Any, Any]], tmp_path: Path
) -> None:
    several = without_task(saved["pair"][0], tmp_path / "several", problem_type="multi_label_classification")
    other = without_task(saved["pair"][0], tmp_path / "other", **{TASK_KEY: {"task": "sing"}})
    headless = without_task(saved["tag"][0], tmp_path / "headless", architectures=["BertForQuestionAnswering"])
    for folder, sentence in (
        (bert_directory, r"expected a model that was trained for a task \(fasttfm finetune\), got BertForMaskedLM"),
        (several, "problem_type: expected one label for each text, got several"),
        (other, f"{TASK_KEY}: expected an object with a task of classify, pair"),
        (headless, "expected a model with a trained head"),
        (tmp_path / "nothing", "expected a directory with a model, there is none"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            tasks.load(folder, device="cpu")
    for options, sentence in (
        ({"threshold": 1.0}, "threshold: expected an option of the task classify"),
        ({"max_length": 999}, "max_length: expected 5 to the model's 128 positions, got 999"),
        ({"tokens_per_batch": 0}, "tokens_per_batch"),
        ({"precision": "int8"}, "precision: expected float32 or bfloat16, got 'int8'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            tasks.load(saved["classify"][0], device="cpu", **options)


def test_the_newest_checkpoint_of_a_run_is_found(wordpiece: Tokenizer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        save_small("bert", wordpiece, run / f"checkpoint-00000{step}")
    (run / "latest").symlink_to("checkpoint-000002")
    assert checkpoint_of(run) == run / "latest"
    assert prepare("classify", run, EXAMPLES["classify"])[0].config.model_type == "bert"
    electra = tmp_path / "electra" / "latest"
    for part, head in (("discriminator", "ForPreTraining"), ("generator", "ForMaskedLM")):
        save_small("electra", wordpiece, electra / part, head=head)
    assert checkpoint_of(tmp_path / "electra").name == "discriminator"
    model, task = prepare("classify", tmp_path / "electra", EXAMPLES["classify"])
    assert isinstance(model, models.ElectraForSequenceClassification)
    assert task.language.tokenizer.fingerprint == wordpiece.fingerprint
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (electra / "discriminator" / name).rename(electra / name)  # where earlier versions wrote it
    assert load_tokenizer(tmp_path / "electra").fingerprint == wordpiece.fingerprint
