"""Runs of fine-tuning: interrupted and resumed, stopped early, in several trials and several processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import train_runs
from small_models import save_bert

from fasttfm.cli.main import main
from fasttfm.data import Tokenizer
from fasttfm.data.task_files import TextExample
from fasttfm.tasks.finetune_run import FinetuneRun, RunOptions
from fasttfm.tasks.finetuning import FinetuneSettings, FineTuning, predict, prepare
from fasttfm.tasks.pictures import confusion_counts
from fasttfm.tasks.rates import Rates
from fasttfm.tasks.trials import best, plan, spread
from fasttfm.train import StepSettings, Trainer, checkpoints
from fasttfm.train.distributed import World, join
from fasttfm.train.logs import read_rows
from fasttfm.train.run_directory import RunError

pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")
WORDS = ["peace", "war", "army", "commerce", "nations", "states", "the", "of", "and", "union"]
TEXTS = [f"{WORDS[n % 10]} {WORDS[n * 7 % 10]} {WORDS[n * 3 % 10]}" for n in range(21)]
EXAMPLES = [TextExample(text, None, "war" if "army" in text or "war" in text else "peace") for text in TEXTS]


@pytest.fixture(scope="module")
def model_directory(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout, so that random numbers matter."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return save_bert(wordpiece, tmp_path_factory.mktemp("model"), **sizes, **dropout)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = "".join(f"{example.first}\t{example.label}\n" for example in EXAMPLES)
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + rows)
    return folder


def finetune(model: Path, data: Path, output: Path, *options: Any) -> int:
    call = ["finetune", "--task", "classify", "--model", model, "--data", data, "--output", output, "--quiet"]
    call += ["--device", "cpu", "--batch-size", 8, "--learning-rate", 3e-3, *options]
    return main([str(argument) for argument in call if argument is not None])


def left(output: Path) -> tuple[bytes, list[tuple[str, ...]], dict[str, Any]]:
    """The results of a run that another one must reproduce: parameters, the rows of the log with scores, metrics."""
    columns = ("step", "tokens", "learning_rate", "validation_accuracy", "validation_f1", "validation_matthews")
    rows = [tuple(row[name] for name in columns) for row in read_rows(output / "log.csv") if row["validation_f1"] != ""]
    metrics = json.loads((output / "metrics.json").read_text())
    del metrics["settings"]
    return (output / "model.safetensors").read_bytes(), rows, metrics


# ---- interrupted runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(model_directory: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 9 steps in 3 epochs without an interruption."""
    output = tmp_path_factory.mktemp("whole")
    assert finetune(model_directory, data, output) == 0
    return output


@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 2), (signal.SIGTERM, 6)])
def test_a_stopped_run_continues_with_the_same_bits(
    number: int,
    step: int,
    model_directory: Path,
    data: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of an epoch, and at the end of one."""
    original = Trainer.step

    def interrupted(self: Trainer, batches: Any) -> Any:
        result = original(self, batches)
        if self.completed == step:
            signal.raise_signal(number)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", interrupted)
        with pytest.raises(SystemExit) as stopped:
            finetune(model_directory, data, tmp_path)
    assert stopped.value.code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"after step {step} of 9; {tmp_path}/checkpoint-00000{step} was written; --resume continues")
    assert not (tmp_path / "metrics.json").exists()
    with pytest.raises(SystemExit):
        finetune(model_directory, data, tmp_path, "--resume", "--layer-decay", 0.5)
    assert "other settings: rates layer decay was 1.0, is 0.5" in capsys.readouterr().err
    torch.manual_seed(99)
    assert finetune(model_directory, data, tmp_path, "--resume") == 0
    assert left(tmp_path) == left(whole)
    assert len(left(whole)[1]) == 3
    assert not list(tmp_path.glob("checkpoint-*"))
    assert finetune(model_directory, data, tmp_path, "--resume") == 0
    assert "this run is finished" in capsys.readouterr().out


def test_steps_go_on_while_a_checkpoint_is_written(
    model_directory: Path, data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 2 is written after step 5, when the process dies, and has the state of step 2."""
    died = threading.Event()
    step, write = Trainer.step, checkpoints.write_state

    def dies(self: Trainer, batches: Any) -> Any:
        result = step(self, batches)
        if self.completed == 5:
            died.set()
            raise MemoryError
        return result

    def late(*arguments: Any) -> None:
        assert died.wait(60)
        write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", dies)
        patched.setattr(checkpoints, "write_state", late)
        patched.setattr(FinetuneRun, "_is_due", lambda run, **_: run.work.trainer.completed == 2)
        with pytest.raises(MemoryError):
            finetune(model_directory, data, tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]
    assert finetune(model_directory, data, tmp_path, "--resume") == 0
    assert left(tmp_path) == left(whole)


@pytest.mark.parametrize("step", [2, 8])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(
    step: int,
    model_directory: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also if no other one follows."""

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_state", fails)
    monkeypatch.setattr(FinetuneRun, "_is_due", lambda run, **_: run.work.trainer.completed == step)
    with pytest.raises(SystemExit) as stopped:
        finetune(model_directory, data, tmp_path)
    assert stopped.value.code == 1
    expected = f"checkpoint-00000{step}: this checkpoint could not be written: [Errno 28] No space left on device"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "metrics.json").exists()


def test_runs_that_cannot_be_resumed(
    model_directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, status, expected in (
        (("--resume",), 1, "expected a checkpoint to resume from, got none"),
        (("--resume", "--overwrite"), 2, "--resume: expected without --overwrite"),
        (("--lora", 2, "--freeze-layers", 1), 2, "--lora: expected without --freeze-layers"),
        (("--freeze-layers", 3), 2, "freeze_layers: expected 0 to the model's 2 layers, got 3"),
        (("--search", "1e-3,1e-4"), 2, "--search: expected without --learning-rate"),
        (("--mini-batch", 8), 2, "--mini-batch: expected with --task similarity"),
        (("--stride", 8), 2, "--stride: expected with --task qa"),
        (("--patience", 0), 2, "patience: expected a number from 1 on, got 0"),
        (("--restarts", 0), 2, "restarts: expected a number from 1 on, got 0"),
        (("--class-weights", tmp_path / "none.json"), 1, "none.json: No such file or directory"),
    ):
        with pytest.raises(SystemExit) as stopped:
            finetune(model_directory, data, tmp_path / "out", *options)
        assert expected in capsys.readouterr().err.splitlines()[-1]
        assert stopped.value.code == status


# ---- epochs ----------------------------------------------------------------------------------------------------------


def run_with_scores(
    directory: Path, output: Path, scores: list[float], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[FinetuneRun, list[dict[str, Any]]]:
    """A run whose epochs have these scores, and the parameters after each epoch."""
    torch.manual_seed(0)
    model, task = prepare("classify", directory, EXAMPLES)
    settings = FinetuneSettings(rates=Rates(3e-3), epochs=len(scores), batch_size=8)
    run = FinetuneRun(
        FineTuning(model, task, EXAMPLES, settings), EXAMPLES, RunOptions(output, progress=False, **options)
    )
    states: list[dict[str, Any]] = []

    def score(*_: Any) -> dict[str, float]:
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return {"accuracy": scores[len(states) - 1]}

    monkeypatch.setattr(task, "scores", score)
    run.train(["accuracy"])
    return run, states


@pytest.mark.parametrize(
    ("options", "epochs", "kept"),
    [({}, 4, 2), ({"keep": "last"}, 4, 4), ({"patience": 1}, 3, 2), ({"patience": 2}, 4, 2)],
)
def test_the_best_epoch_is_kept(
    options: dict[str, Any],
    epochs: int,
    kept: int,
    model_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, states = run_with_scores(model_directory, tmp_path, [0.3, 0.9, 0.9, float("nan")], monkeypatch, **options)
    assert len(states) == len(run.epochs) == epochs
    assert run.kept is not None
    assert run.kept.epoch.number == kept
    assert all(torch.equal(value, states[kept - 1][name]) for name, value in run.model.state_dict().items())
    rows = [row for row in read_rows(tmp_path / "log.csv") if row["validation_accuracy"] != ""]
    assert [(int(row["step"]), row["validation_accuracy"]) for row in rows[:2]] == [(3, "0.3"), (6, "0.9")]


def test_evaluations_follow_the_model(model_directory: Path, tmp_path: Path) -> None:
    """A run keeps what it evaluates with; its predictions are those of the model at that time."""
    torch.manual_seed(0)
    model, task = prepare("classify", model_directory, EXAMPLES)
    work = FineTuning(model, task, EXAMPLES, FinetuneSettings(epochs=1, batch_size=8))
    run = FinetuneRun(work, EXAMPLES, RunOptions(tmp_path, progress=False))
    said = []
    for sign in (1, -1, 1):
        with torch.no_grad():
            model.classifier.bias.copy_(sign * torch.tensor([1e3, -1e3]))
        said.append(run.predict(EXAMPLES))
        assert said[-1] == predict(model, task, EXAMPLES)
    assert said[0] == said[2] != said[1]
    model.classifier = torch.nn.Sequential(model.classifier)  # as when adapters are merged: other modules
    assert run.predict(EXAMPLES) == said[0]


def test_a_run_without_a_valid_checkpoint_is_not_resumed(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint-000003").mkdir()
    with pytest.raises(Exception, match=r"no checkpoint of a training run: there is no manifest\.json"):
        run_with_scores(model_directory, tmp_path, [0.5], monkeypatch, resume=True)
    with pytest.raises(RunError, match="expected a checkpoint to resume from, got none"):
        run_with_scores(model_directory, tmp_path / "none", [0.5], monkeypatch, resume=True)


# ---- several trials --------------------------------------------------------------------------------------------------


def test_the_best_of_a_grid_is_kept(
    model_directory: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("draw_curves", "draw_confusions"):  # which take longer than the trainings
        monkeypatch.setattr(f"fasttfm.cli.finetune.{name}", lambda *_: None)
    call = ["finetune", "--task", "classify", "--model", model_directory, "--data", data, "--output", tmp_path]
    call += ["--quiet", "--device", "cpu", "--epochs", 1, "--search", "1e-6,3e-2", "--restarts", 2, "--seed", 5]
    assert main([str(argument) for argument in call]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    trials = metrics["trials"]
    assert [(trial["learning_rate"], trial["seed"]) for trial in trials] == [(1e-6, 5), (1e-6, 6), (3e-2, 5), (3e-2, 6)]
    scores = [trial["dev"]["accuracy"] for trial in trials]
    assert metrics["dev"]["accuracy"] == max(scores) == metrics["spread"]["max"]
    assert metrics["spread"]["mean"] == pytest.approx(sum(scores) / 4)
    assert set(metrics["spread"]["by_learning_rate"]) == {"1e-06", "0.03"}
    chosen = trials[scores.index(max(scores))]
    assert metrics["settings"]["seed"] == chosen["seed"]
    assert (tmp_path / "model.safetensors").is_file()
    assert not list((tmp_path / "trials").rglob("*.safetensors"))
    assert len(list((tmp_path / "trials").glob("*/log.csv"))) == 4
    out = capsys.readouterr().out
    assert f"learning rate {chosen['learning_rate']:g}, seed {chosen['seed']} is kept" in out
    (tmp_path / "metrics.json").unlink()  # as if it had been interrupted at the end
    assert main([*(str(argument) for argument in call), "--resume"]) == 0
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert again["trials"] == trials


def test_plans_and_spreads() -> None:
    assert [(trial.rate, trial.seed) for trial in plan([1e-5], 3, 2)] == [(1e-5, 3), (1e-5, 4)]
    with pytest.raises(ValueError, match=r"expected different learning rates, got 0\.1, 0\.1"):
        plan([0.1, 0.1], 0)
    assert best([0.5, float("nan"), 0.7, 0.7]) == 2
    statistics = spread([1.0, 2.0, 3.0])
    assert statistics == {"mean": 2.0, "standard_deviation": 1.0, "min": 1.0, "max": 3.0}


# ---- several processes -----------------------------------------------------------------------------------------------


def curve(directory: Path, world: World, weights: str | None = None) -> list[float]:
    """Losses and gradient norms of a run with batches of 4 and a partial last batch."""
    torch.manual_seed(0)
    model, task = prepare("classify", directory, EXAMPLES)
    for module in model.modules():
        for name in ("dropout", "feed_forward_dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    settings = FinetuneSettings(rates=Rates(1e-3), epochs=2, batch_size=4, step=StepSettings(clip=0.5))
    values: list[float] = []
    FineTuning(model, task, EXAMPLES, settings, class_weights=weights, world=world).run(
        lambda results: values.extend(value for result in results for value in (result.loss, result.gradient_norm))
    )
    return values


def ranked_curve(directory: Path, output: Path) -> None:
    import warnings

    warnings.simplefilter("ignore")
    world = join("cpu")
    torch.save([curve(directory, world), curve(directory, world, "balanced")], output / f"{world.rank}.pt")
    world.leave()


def test_two_processes_match_one(model_directory: Path, tmp_path: Path) -> None:
    processes = train_runs.start_ranks(2, ranked_curve, model_directory, tmp_path)
    one = World(torch.device("cpu"))
    expected = [curve(model_directory, one), curve(model_directory, one, "balanced")]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    runs = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert runs[0] == runs[1]
    assert len(expected[0]) == 2 * 2 * 6
    for ours, theirs in zip(runs[0], expected, strict=True):
        # Sums of the same fp32 numbers in another order, over 12 steps.
        assert ours == pytest.approx(theirs, rel=1e-4)


def ranked_finetune(model: Path, data: Path, output: Path, stop_after: int | None, *options: Any) -> None:
    """The command in one of torchrun's processes, all of which get SIGTERM from torchrun after a step."""
    import warnings

    warnings.simplefilter("ignore")
    original = Trainer.step

    def interrupted(self: Trainer, batches: Any) -> Any:
        result = original(self, batches)
        if self.completed == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return result

    Trainer.step = interrupted  # type: ignore[method-assign]
    with (output.parent / f"said-{os.environ['RANK']}").open("w") as said, contextlib.redirect_stderr(said):
        finetune(model, data, output, "--checkpoint-every", 2, *options)


def test_processes_stop_and_resume_with_the_same_bits(
    model_directory: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process has its own random numbers. A signal reaches them after different steps, so that only scheduled
    checkpoints are written, and the run continues after the last of them."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def run(output: Path, stop_after: int | None, *options: Any) -> list[int | None]:
        processes = train_runs.start_ranks(2, ranked_finetune, model_directory, data, output, stop_after, *options)
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]

    assert run(whole, None) == [0, 0]
    assert run(parts, 5) == [1, 1]
    said = (tmp_path / "said-0").read_text().splitlines()[-1]
    assert said.endswith(f"after step 5 of 9; {parts}/checkpoint-000004 was written; --resume continues")
    with pytest.raises(SystemExit):
        finetune(model_directory, data, parts, "--checkpoint-every", 2, "--resume")
    assert "other settings: processes was 2, is 1" in capsys.readouterr().err
    assert run(parts, None, "--resume") == [0, 0]
    assert left(parts) == left(whole)


# ---- reports and plots -----------------------------------------------------------------------------------------------


def test_metrics_are_reported(
    model_directory: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    ended: list[bool] = []
    begun: list[dict[str, Any]] = []
    service = SimpleNamespace(log=lambda values, step: logged.append((values, step)), finish=lambda: ended.append(True))
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        SimpleNamespace(init=lambda **options: begun.append(options) or service),  # type: ignore[func-returns-value]
    )
    assert finetune(model_directory, data, tmp_path / "out", "--epochs", 1, "--report", "wandb") == 0
    assert ended == [True]
    assert begun[0]["config"]["learning_rate"] == 3e-3
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert ({"validation/accuracy": metrics["dev"]["accuracy"]}, 3) in logged
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SystemExit):
        finetune(model_directory, data, tmp_path / "other", "--report", "wandb")
    assert "needs wandb: pip install wandb" in capsys.readouterr().err


def test_confusions_are_counted(whole: Path) -> None:
    assert confusion_counts(list("aabc"), list("abbb"), ["a", "b", "c"]) == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]
    assert (whole / "confusion.png").read_bytes().startswith(b"\x89PNG")
