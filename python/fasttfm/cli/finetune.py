"""``fasttfm finetune``: trains a model for a task and reports its scores and those of the majority baseline.

  fasttfm finetune --task classify --model DIR                           the sample that is shipped
  fasttfm finetune --task pair --model DIR --data glue/RTE               a directory with train.tsv and dev.tsv
  fasttfm finetune --task qa --model DIR --data train-v2.0.json --dev dev-v2.0.json --max-length 384 --stride 128

tasks:
{tasks}

The output directory holds a checkpoint that transformers opens, the predictions for the dev set, metrics.json, log.csv
and curves.png. GPTs read a task as GPT-1 does: with start, delimiter and extract tokens and an auxiliary causal LM
loss.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from fasttfm.atomic_files import write_json, write_text
from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_run_options,
    add_training_options,
    check_output,
    device_of,
    draw_curves,
    exit_on_user_error,
    output_of,
    sentence,
    settings_of,
)
from fasttfm.tasks.registry import TASKS


def add_parser(subparsers: Any) -> None:
    """Adds the ``finetune`` command to a command line."""
    tasks = "\n".join(f"  {name:10} {task.about:31} {task.file_format}" for name, task in TASKS.items())
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "finetune",
        help="train a model for a task",
        description=str(__doc__).format(tasks=tasks),
        formatter_class=Formatter,
    )
    parser.add_argument("--task", required=True, choices=tuple(TASKS), help="the task, see above")
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the model's directory")
    group = parser.add_argument_group("data")
    group.add_argument("--data", type=Path, metavar="PATH", help="a file or a directory; by default the shipped sample")
    group.add_argument(
        "--dev", type=Path, metavar="FILE", help="dev set; by default the directory's, or a tenth of the examples"
    )
    group.add_argument(
        "--test", type=Path, metavar="FILE", help="also write predictions for this file, which may have no labels"
    )
    group.add_argument(
        "--max-length", type=int, metavar="N", help="max tokens per sequence; by default 128, for qa 384"
    )
    group.add_argument("--batch-size", type=int, default=32, metavar="N", help="examples per batch")
    group.add_argument(
        "--tokens-per-batch", type=int, metavar="N", help="instead of --batch-size: maximum tokens per packed batch"
    )
    group.add_argument("--values", action="store_true", help="classify, pair: regression, labels are numbers")
    training = add_training_options(
        parser, rate=None, about_rate="peak learning rate; by default 5e-5 for a width of 768, more for narrower models"
    )
    training.add_argument("--epochs", type=int, metavar="N", help="by default 3, and 10 on the shipped sample")
    training.add_argument("--head-rate", type=float, metavar="RATE", help="learning rate of the head")
    training.add_argument(
        "--layer-decay",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="factor of the learning rate from a layer to the one below",
    )
    training.add_argument(
        "--new-head", action="store_true", help="randomly initialize the head even if the model has one for the labels"
    )
    training.add_argument("--freeze-encoder", action="store_true", help="train the head only")
    training.add_argument(
        "--auxiliary",
        type=float,
        default=0.5,
        metavar="WEIGHT",
        help="GPTs: weight of the auxiliary causal LM loss (not classify and pair of gpt2)",
    )
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--stride", type=int, metavar="N", help="tokens between the starts of two windows; by default 128"
    )
    group.add_argument("--max-question", type=int, metavar="N", help="max tokens per question; by default 64")
    group.add_argument("--max-answer", type=int, default=30, metavar="N", help="max tokens per answer")
    add_run_options(parser)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        from fasttfm.tasks.finetuning import FineTuning
        from fasttfm.tasks.rates import default_rate, freeze
        from fasttfm.tasks.reading import read_examples
        from fasttfm.train.settings import random_seed

        check_output(arguments, model=arguments.model, tokenizer=arguments.tokenizer, data=arguments.data)
        device = device_of(arguments)
        random_seed(arguments.seed)
        examples = read_examples(arguments.task, arguments.data, arguments.dev, seed=arguments.seed)
        test = None if arguments.test is None else TASKS[arguments.task].read_file(arguments.test)
        model, task = _prepared(arguments, examples.train)
        task.check_labels(examples.dev, f"{examples.source}, dev set")
        task.check_labels(test or [], str(arguments.test))
        if arguments.freeze_encoder:
            freeze(model)
        epochs = 3 if arguments.data else 10
        settings = settings_of(
            arguments,
            device,
            default_rate(model) if arguments.learning_rate is None else arguments.learning_rate,
            rates={"head_rate": arguments.head_rate, "layer_decay": arguments.layer_decay},
            epochs=epochs if arguments.epochs is None else arguments.epochs,
            batch_size=arguments.batch_size,
            tokens_per_batch=arguments.tokens_per_batch,
        )
        work = FineTuning(model.to(device), task, examples.train, settings)
        report = Report(arguments, output_of(arguments, f"finetune-{arguments.task}"), work, examples)
        report.train()
        report.write(test)
    return 0


def _prepared(arguments: argparse.Namespace, train: list[Any]) -> Any:
    from fasttfm.tasks.finetuning import prepare

    options = {name: getattr(arguments, name) for name in TASKS[arguments.task].options}
    return prepare(
        arguments.task,
        arguments.model,
        train,
        tokenizer=arguments.tokenizer,
        max_length=arguments.max_length,
        values=arguments.values,
        auxiliary=arguments.auxiliary,
        new_head=arguments.new_head,
        **options,
    )


class Report:
    """Runs the training, prints how it goes, and writes what it leaves."""

    def __init__(self, arguments: argparse.Namespace, output: Path, work: Any, examples: Any) -> None:
        self.arguments, self.output, self.work, self.examples = arguments, output, work, examples
        self.model, self.task = work.model, work.task
        # Before the training, so that a missing scikit-learn is reported right away.
        self.majority = self.scores(examples.dev, self.task.majority(examples.train, examples.dev))

    def train(self) -> None:
        from fasttfm.train.logs import RunLog
        from fasttfm.train.progress import Progress

        examples = self.examples
        print(f"{len(examples.train)} training examples, {len(examples.dev)} in the dev set: {examples.source}")
        for name, said in (("training", self.work.truncation), ("dev", self.truncation(examples.dev))):
            if said is not None:
                warnings.warn(f"{name}: {said}; --max-length reads more", stacklevel=2)
        if self.work.steps == 0:
            return
        progress = None if self.arguments.quiet else Progress(self.work.steps)
        log = RunLog(self.output, (self.task.name,), steps=self.work.steps, progress=progress)

        def on_epoch(number: int) -> None:
            with log.paused():
                scores = self.scores(examples.dev, self.predicted(examples.dev, tune=True))
            if progress is not None:
                progress.note(f"epoch {number}/{self.work.settings.epochs}: {sentence(scores)}")

        try:
            self.work.run(log.add, on_epoch)
            log.write()
        finally:
            log.close()
            if progress is not None:
                progress.close()
        draw_curves(log.path, f"{self.arguments.task}, {self.arguments.model}")

    def truncation(self, examples: list[Any]) -> str | None:
        from fasttfm.tasks.inputs import truncation

        return truncation(self.task.features(examples), self.task.language.format.max_length)

    def predicted(self, examples: list[Any], *, tune: bool = False) -> list[Any]:
        from fasttfm.tasks.finetuning import predict

        settings = self.work.settings
        found = predict(
            self.model,
            self.task,
            examples,
            precision=settings.step.precision,
        )
        if tune and hasattr(self.task, "tune"):
            self.task.tune(examples, found)
        return found

    def scores(self, examples: list[Any], predictions: list[Any]) -> dict[str, float]:
        scores: dict[str, float] = self.task.scores(examples, predictions)
        return scores

    def write(self, test: list[Any] | None) -> None:
        """The checkpoint, the predictions and the metrics, and what they are in a few lines."""
        from fasttfm.tasks.finetuning import save

        train, dev = self.examples.train, self.examples.dev
        predictions = self.predicted(dev, tune=True)
        metrics: dict[str, Any] = {
            "task": self.arguments.task,
            "model": str(self.arguments.model),
            "data": self.examples.source,
            "examples": {"train": len(train), "dev": len(dev)},
            "steps": self.work.steps,
            "dev": self.scores(dev, predictions),
            "majority": self.majority,
        }
        if getattr(self.task, "threshold", None) is not None:
            metrics["no_answer_threshold"] = self.task.threshold
        save(self.model, self.task, self.output)
        files = self.task.files(dev, predictions)
        if test is not None:
            found = self.predicted(test)
            files |= {f"test_{name}": text for name, text in self.task.files(test, found).items()}
            if self.task.labelled(test):
                metrics["test"] = self.scores(test, found)
        for name, text in files.items():
            write_text(self.output / name, text)
        write_json(self.output / "metrics.json", metrics)
        print(f"dev        {sentence(metrics['dev'])}")
        print(f"majority   {sentence(metrics['majority'])}")
        if "test" in metrics:
            print(f"test       {sentence(metrics['test'])}")
        if "no_answer_threshold" in metrics:
            print(f"threshold  {metrics['no_answer_threshold']:.3f}, tuned on the dev set")
        print(f"output     {self.output} ({', '.join(sorted([*files, 'metrics.json']))} and the model)")
