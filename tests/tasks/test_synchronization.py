"""Steps of fine-tuning do not wait for the device: nothing reads a tensor's values but the metrics, once they have
arrived."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import save_bert
from torch import Tensor

import fasttfm
from fasttfm.data import Tokenizer
from fasttfm.data.task_files import ChoiceExample, TagExample, TextExample
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, prepare
from fasttfm.tasks.task import Task
from fasttfm.train import StepSettings

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")
TEXTS = ["peace and commerce", "war and the army", "the peace of nations", "an army in war", "a union"] * 4
LABELLED = [TextExample(text, None, "peace" if "peace" in text else "war") for text in TEXTS]
EXAMPLES: dict[str, list[Any]] = {
    "classify": LABELLED,
    "tag": [TagExample(text.split(), ["O" for _ in text.split()]) for text in TEXTS],
    "choice": [ChoiceExample(text, "", ["of war", "of peace"], index % 2) for index, text in enumerate(TEXTS)],
}
# Methods of a tensor that copy its values to the host.
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
# What trains; the ops check indices on a CPU only.
WATCHED = ("tasks", "train", "models", "nn", "inference")


@pytest.fixture(scope="module")
def model_directory(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(wordpiece, tmp_path_factory.mktemp("model"), hidden_size=64, num_attention_heads=1)


@contextmanager
def reads_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The reads of tensors by the watched packages: file and function of each."""
    reads: Counter[str] = Counter()
    package = Path(fasttfm.__file__).parent

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            path = Path(caller.f_code.co_filename)
            if path.parent.name in WATCHED and package in path.parents:
                reads[f"{path.parent.name}/{path.name}, {caller.f_code.co_name}"] += 1
            return original(self, *args, **options)

        return read

    with monkeypatch.context() as patched:
        for name in READS:
            patched.setattr(Tensor, name, counted(getattr(Tensor, name)))
        yield reads


def training(name: str, directory: Path, device: str, **step: Any) -> FineTuning:
    model, task = prepare(name, directory, EXAMPLES[name])
    settings = FinetuneSettings(epochs=1, batch_size=2, step=StepSettings(**step))
    return FineTuning(model.to(device), task, EXAMPLES[name], settings)


@pytest.mark.parametrize("name", EXAMPLES)
def test_only_metrics_are_read(name: str, model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = training(name, model_directory, "cpu")
    with reads_counted(monkeypatch) as reads:
        work.run(lambda _: None)
    assert reads.pop("train/loop.py, take") == work.steps == 10  # a row of numbers for each step
    # The targets of tokens and their number, while the batch is made on the host.
    assert set(reads) <= {"tasks/labels.py, targets", "tasks/labels.py, count"}


def test_a_read_within_a_step_is_counted(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = training("classify", model_directory, "cpu")
    losses = type(work.task).losses

    def waits(task: Task, model: Any, batch: Any) -> tuple[Tensor, ...]:
        step_losses = losses(task, model, batch)
        return step_losses if bool(step_losses[0].isfinite()) else (step_losses[0] * 0,)

    # As if it were a part of the package.
    monkeypatch.setattr(type(work.task), "losses", waits)
    monkeypatch.setattr(fasttfm, "__file__", str(Path(__file__).parents[1] / "__init__.py"))
    with reads_counted(monkeypatch) as reads:
        work.run(lambda _: None)
    assert reads["tasks/test_synchronization.py, waits"] == work.steps


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_step_synchronizes(name: str, model_directory: Path) -> None:
    work = training(name, model_directory, "cuda", precision="bfloat16")

    def watch() -> None:
        if work.trainer.completed == 3:  # kernels are compiled and tuned
            torch.cuda.set_sync_debug_mode("error")

    try:
        work.run(lambda _: None, lambda _: torch.cuda.set_sync_debug_mode("default"), watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert work.trainer.completed == work.steps
