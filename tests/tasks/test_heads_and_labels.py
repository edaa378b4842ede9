"""Checkpoints with a head, without one, or with one for another task; labels missing from training; long texts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.data import DataError
from fasttfm.data.task_files import TagExample, TextExample
from fasttfm.inference.opening import open_model
from fasttfm.models import CheckpointError
from fasttfm.models.family import Head
from fasttfm.tasks.distillation_runs import prepare_task
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, prepare, save, shuffled_steps
from fasttfm.tasks.inputs import truncation

TEXTS = ["peace and commerce", "war and the army", "the peace of nations", "an army in war"]


def labelled(*labels: str) -> list[TextExample]:
    return [TextExample(text, None, labels[index % len(labels)]) for index, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def tuned(bert_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of peace and war."""
    directory = tmp_path_factory.mktemp("tuned")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, task = prepare("classify", bert_directory, labelled("peace", "war"), max_length=20)
    save(model, task, directory)
    return directory


# ---- heads -----------------------------------------------------------------------------------------------------------


def classifier(directory: Path, *labels: str, task: str = "classify", **options: Any) -> torch.Tensor:
    model, _ = prepare(task, directory, labelled(*labels), **options)
    return model.classifier.weight.detach()  # type: ignore[union-attr, return-value, operator]


def test_a_head_for_the_same_labels_is_kept(tuned: Path, recwarn: pytest.WarningsRecorder) -> None:
    first = classifier(tuned, "peace", "war")
    assert torch.equal(first, classifier(tuned, "war", "peace"))
    assert not [warning for warning in recwarn if "randomly" in str(warning.message)]


@pytest.mark.parametrize(
    ("labels", "options", "said"),
    [
        (("a", "b"), {}, "the labels of its head are peace, war, those of the task a, b"),
        (("a", "b", "c"), {}, "its head has 2 labels, the task 3"),
        (("1", "2.5"), {"values": True}, "its head has 2 labels, the task 1"),
        (("peace", "war"), {"new_head": True}, "a new head is requested"),
    ],
)
def test_a_new_head_is_initialized_with_a_warning(
    labels: tuple[str, ...], options: dict[str, Any], said: str, tuned: Path
) -> None:
    kept = classifier(tuned, "peace", "war")
    with pytest.warns(UserWarning, match=f"{said}: the head is randomly initialized, to be trained"):
        drawn = classifier(tuned, *labels, **options)
    assert drawn.shape != kept.shape or not torch.equal(drawn, kept)


def test_a_head_of_another_task_is_not_used(tuned: Path) -> None:
    examples = [TagExample(text.split(), ["war", "peace", "peace", "war"][: len(text.split())]) for text in TEXTS]
    with pytest.warns(UserWarning, match="its head is that of BertForSequenceClassification"):
        prepare("tag", tuned, examples)


def test_a_head_without_label_names(tuned: Path, tmp_path: Path) -> None:
    for path in tuned.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tuned / "config.json").read_text())
    for name in ("id2label", "label2id"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(classifier(tmp_path, "0", "1"), classifier(tuned, "peace", "war"))
    with pytest.warns(UserWarning, match="the labels of its head are the numbers 0 to 1, those of the task no, yes"):
        classifier(tmp_path, "no", "yes")


def test_a_teacher_has_a_trained_head(bert_directory: Path, tuned: Path) -> None:
    with pytest.raises(
        CheckpointError, match="expected a model with a trained head, got one without a head for masked"
    ):
        open_model(tuned, Head.MASKED_LM, trained=True)
    for teacher, labels in ((bert_directory, ("peace", "war")), (tuned, ("a", "b"))):
        with pytest.raises(
            CheckpointError, match="expected a model with a trained head, got one without a head for cla"
        ):
            prepare_task("classify", teacher, bert_directory, labelled(*labels))
    with pytest.warns(UserWarning, match="has no trained head"):  # the student's
        assert prepare_task("classify", tuned, bert_directory, labelled("peace", "war"))[2].labels == ["peace", "war"]


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_labels_missing_from_the_training_set(tuned: Path) -> None:
    _, task = prepare("classify", tuned, labelled("peace", "war"))
    task.check_labels([*labelled("peace", "war"), TextExample("a", None, None)], "dev.tsv")
    expected = r"dev.tsv: expected labels of the training examples \(peace, war\), got 'War' and 1 more in 3 of 4 exam"
    with pytest.raises(DataError, match=expected):
        task.check_labels(labelled("War", "war", "none", "none"), "dev.tsv")


@pytest.mark.filterwarnings("ignore:.*randomly initialized")
def test_tags_missing_from_the_training_set_are_reported(bert_directory: Path) -> None:
    _, task = prepare("tag", bert_directory, [TagExample(["a", "b"], ["O", "B-X"])])
    with pytest.warns(UserWarning, match=r"dev: 1 of 2 words have tags that the training examples lack \(B-Y\)"):
        task.check_labels([TagExample(["a", "b"], ["O", "B-Y"])], "dev")


def test_numbers_are_not_classes(bert_directory: Path) -> None:
    with pytest.raises(DataError, match=r"expected names of classes, got 4 numbers such as '0.25'; --values"):
        prepare("classify", bert_directory, labelled("1", "3.5", "0.25", "5.0"))
    with pytest.warns(UserWarning, match="has no trained head"):
        assert prepare("classify", bert_directory, labelled("0.0", "1.0"))[1].labels == ["0.0", "1.0"]


# ---- lengths and batches ---------------------------------------------------------------------------------------------


def test_truncation_is_counted(tuned: Path) -> None:
    examples = [*labelled("peace", "war"), TextExample("war " * 30, None, "war"), TextExample("a", "an " * 40, "war")]
    model, task = prepare("classify", tuned, examples, max_length=16)
    expected = "2 of 6 examples have more than 16 tokens, the longest 44, and are truncated: 44 tokens are ignored"
    assert FineTuning(model, task, examples, FinetuneSettings()).truncation == expected
    assert truncation(task.features(examples[:4]), 16) is None


def test_a_checkpoint_names_its_task(tuned: Path) -> None:
    config = json.loads((tuned / "config.json").read_text())
    assert config["fasttfm_task"] == {"task": "classify", "max_length": 20, "values": False, "threshold": None}
    assert json.loads((tuned / "tokenizer_config.json").read_text())["model_max_length"] == 128


def test_batches_are_counted_in_examples(tuned: Path) -> None:
    examples = labelled("peace", "war") * 10
    _, task = prepare("classify", tuned, examples)
    features = task.features(examples)
    sizes = [[len(batch) for batch in step] for step in shuffled_steps(features, FinetuneSettings(), 0)]
    assert sizes == [[32], [8]]
    changed = FinetuneSettings(batch_size=15, accumulation=2)
    assert [[len(batch) for batch in step] for step in shuffled_steps(features, changed, 0)] == [[15, 15], [10]]
    tokens = FinetuneSettings(tokens_per_batch=20)
    assert all(sum(feature.tokens for feature in group) <= 20 for (group,) in shuffled_steps(features, tokens, 0))


def test_the_command_stops_before_training(
    bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\npeace\tyes\nwar\tno\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\npeace\tYes\n")
    call = ["finetune", "--task", "classify", "--model", str(bert_directory), "--data", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        main([*call, "--output", str(tmp_path / "out"), "--device", "cpu"])
    assert stopped.value.code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("expected labels of the training examples (no, yes), got 'Yes' in 1 of 1 examples")
    assert not (tmp_path / "out").exists()
