"""``fasttfm finetune``: fine-tunes a model for a task and reports its scores next to those of the majority baseline.

  fasttfm finetune --task classify --model DIR                           on the shipped sample
  fasttfm finetune --task pair --model DIR --data glue/RTE               a directory with train.tsv and dev.tsv
  fasttfm finetune --task qa --model DIR --data train-v2.0.json --dev dev-v2.0.json --max-length 384 --stride 128
  fasttfm finetune --task pair --model DIR --data glue/RTE --search 5e-5,4e-5,3e-5,2e-5 --restarts 3
  fasttfm finetune --task image --model DIR --data pictures               a folder of images for each label

tasks:
{tasks}

The dev set is scored after each epoch, and the model of the best epoch is kept. The output directory contains a
checkpoint that transformers opens, the predictions for the dev set, metrics.json with every setting, log.csv,
curves.png and, for labels, confusion.png. --resume continues an interrupted run. On several GPUs:
torchrun --nproc-per-node N -m fasttfm finetune ...

GPTs are fine-tuned as in GPT-1: with start, delimiter and extract tokens and an auxiliary causal LM loss.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import write_json, write_text
from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_column_options,
    add_run_options,
    add_training_options,
    add_trial_options,
    check_epochs,
    check_output,
    check_trials,
    columns_of,
    domain_table,
    draw_curves,
    exit_on_user_error,
    output_of,
    sentence,
    settings_of,
)
from fasttfm.cli.similarity_options import add_similarity_options
from fasttfm.models.family import Head
from fasttfm.tasks.registry import TASKS

METRICS = "metrics.json"


def add_parser(subparsers: Any) -> None:
    """Adds the ``finetune`` command to a command line."""
    tasks = "\n".join(f"  {name:14} {task.about:38} {task.file_format}" for name, task in TASKS.items())
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "finetune",
        help="fine-tune a model for a task",
        description=str(__doc__).format(tasks=tasks),
        formatter_class=Formatter,
    )
    parser.add_argument("--task", required=True, choices=tuple(TASKS), metavar="TASK", help="one of the tasks above")
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    _add_data(parser.add_argument_group("data"))
    training = add_training_options(
        parser,
        rate=None,
        about_rate="peak learning rate (default, for a width of 768: 5e-5; choice: 2e-5; GPTs: 6.25e-5; higher for "
        "narrower models)",
    )
    _add_training(training)
    add_trial_options(parser.add_argument_group("several runs"))
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--stride", type=int, metavar="N", help="tokens between the starts of two windows (default: 128)"
    )
    group.add_argument("--max-question", type=int, metavar="N", help="max tokens per question (default: 64)")
    group.add_argument("--max-answer", type=int, default=30, metavar="N", help="max tokens per answer")
    group.add_argument(
        "--answer-score",
        choices=("squad", "korquad"),
        help="F1 over words or over characters (default: characters, as KorQuAD, if most questions are Korean)",
    )
    _add_graph(parser.add_argument_group("commonsense"))
    add_similarity_options(parser.add_argument_group("similarity"))
    _add_run(add_run_options(parser))
    parser.set_defaults(refuse=parser.error, default_of=parser.get_default)


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data", type=Path, metavar="PATH", help="file or directory of training examples (default: the shipped sample)"
    )
    group.add_argument(
        "--language",
        metavar="LANGUAGE",
        help="without --data: the language of the shipped sample, english or, for commonsense and qa, korean",
    )
    group.add_argument(
        "--dev", type=Path, metavar="FILE", help="dev set (default: the directory's, or a tenth of the examples)"
    )
    group.add_argument(
        "--test", type=Path, metavar="FILE", help="also write predictions for this file, which may have no labels"
    )
    group.add_argument("--max-length", type=int, metavar="N", help="max tokens per sequence (default: 128, for qa 384)")
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="examples per batch, summed over all processes (default: by the paper's recipe: 32; choice: 16; qa with "
        "unanswerable questions: 48)",
    )
    group.add_argument(
        "--tokens-per-batch", type=int, metavar="N", help="max tokens per packed batch, instead of --batch-size"
    )
    add_column_options(group)
    group.add_argument("--values", action="store_true", help="classify, pair: regression; labels are numbers")


def _add_training(group: Any) -> None:
    group.add_argument(
        "--epochs",
        type=int,
        metavar="N",
        help="epochs (default: 3; qa with unanswerable questions: 2; on the shipped sample: 10)",
    )
    group.add_argument(
        "--keep", choices=("best", "last"), default="best", help="keep the model of the best or of the last epoch"
    )
    group.add_argument("--patience", type=int, metavar="N", help="stop after N epochs without a better dev score")
    group.add_argument(
        "--head-rate", type=float, metavar="RATE", help="learning rate of the head (default: that of the other layers)"
    )
    group.add_argument(
        "--layer-decay",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="each layer's learning rate is that of the layer above times this factor",
    )
    group.add_argument(
        "--new-head", action="store_true", help="randomly initialize the head even if the checkpoint has one that fits"
    )
    group.add_argument("--freeze-encoder", action="store_true", help="train the head only")
    group.add_argument("--freeze-layers", type=int, metavar="N", help="freeze the embeddings and the N lowest layers")
    group.add_argument("--lora", type=int, metavar="RANK", help="train low-rank adapters of this rank and the head")
    group.add_argument(
        "--lora-alpha", type=float, metavar="X", help="updates of --lora are multiplied by X / RANK (default: 2 RANK)"
    )
    group.add_argument(
        "--lora-targets",
        nargs="+",
        metavar="NAME",
        help="linear layers of --lora: qkv, out, up, down, or modules of the checkpoint such as query and value "
        "(default: all)",
    )
    group.add_argument("--lora-dropout", type=float, default=0.0, metavar="P", help="dropout of --lora's inputs")
    group.add_argument(
        "--class-weights",
        metavar="WEIGHTS",
        help="balanced (rare labels count more), or a JSON file with a weight for each label",
    )
    group.add_argument(
        "--auxiliary",
        type=float,
        metavar="WEIGHT",
        help="GPT-1, and GPTs with choice: weight of the auxiliary causal LM loss (default: 0.5)",
    )
    group.add_argument(
        "--both-orders",
        action="store_true",
        help="GPTs: read each pair in both orders and add the states, for symmetric tasks",
    )


def _add_graph(group: Any) -> None:
    group.add_argument("--graph", metavar="FILE", help="edges: relation, head, tail, weight (default: the shipped one)")
    group.add_argument(
        "--graph-vectors",
        metavar="DIR",
        help="TransE vectors of the graph, of fasttfm transe (default: random vectors, trained with the model)",
    )
    group.add_argument(
        "--path-score",
        type=float,
        metavar="P",
        help="with --graph-vectors: minimum TransE score of a path (default: 0.15; without vectors, no path is pruned)",
    )
    group.add_argument("--path-length", type=int, default=3, metavar="N", help="max edges of a path, up to 3")
    group.add_argument("--max-paths", type=int, default=50, metavar="N", help="max paths per pair of concepts")


def _add_run(group: Any) -> None:
    group.add_argument("--resume", action="store_true", help="continue the interrupted run in --output")
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="checkpoint interval (default: after each epoch, at most once a minute); interrupted runs write one too",
    )
    group.add_argument(
        "--report",
        action="append",
        default=[],
        choices=("tensorboard", "wandb"),
        help="also report to TensorBoard (always, if installed) or Weights & Biases",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        from fasttfm.train.distributed import join
        from fasttfm.train.reports import check_reports
        from fasttfm.train.settings import random_seed

        _check(arguments)
        check_reports(arguments.report)
        random_seed(arguments.seed)
        world = join(arguments.device)
        Finetuning(arguments, world).run()
        world.leave()
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that do not fit together."""
    check_epochs(arguments.epochs)
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume: expected --output, the directory of the run to resume")
    if arguments.resume and arguments.overwrite:
        raise ValueError("--resume: expected without --overwrite, which starts a new run")
    if arguments.output is None and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--output: expected under torchrun")
    check_trials(arguments)
    for task in TASKS.values():
        for name in set(task.options) - set(TASKS[arguments.task].options):
            if getattr(arguments, name) != arguments.default_of(name):
                takers = [other for other, kind in TASKS.items() if name in kind.options]
                raise ValueError(f"--{name.replace('_', '-')}: expected with --task {' or '.join(takers)}")
    if arguments.path_score is not None and arguments.graph_vectors is None:
        raise ValueError("--path-score: expected with --graph-vectors, by which paths are scored")
    ways = {"--freeze-encoder": arguments.freeze_encoder, "--freeze-layers": arguments.freeze_layers is not None}
    used_ways = [name for name, used in {**ways, "--lora": arguments.lora is not None}.items() if used]
    if len(used_ways) > 1:
        raise ValueError(f"{used_ways[1]}: expected without {used_ways[0]}")
    for name in ("lora_alpha", "lora_targets", "lora_dropout"):
        if arguments.lora is None and getattr(arguments, name):
            raise ValueError(f"--{name.replace('_', '-')}: expected with --lora")
    if not arguments.resume and int(os.environ.get("RANK", 0)) == 0:
        check_output(arguments, model=arguments.model, tokenizer=arguments.tokenizer, data=arguments.data)


class Finetuning:
    """Everything that the trainings of one command share: the data, the plan, and what is written and printed."""

    def __init__(self, arguments: argparse.Namespace, world: Any) -> None:
        from fasttfm.tasks.finetuning_recipes import recipe_of
        from fasttfm.tasks.rates import default_rate
        from fasttfm.tasks.reading import read_examples, read_files
        from fasttfm.tasks.trials import plan

        self.arguments, self.world = arguments, world
        columns, seed = columns_of(arguments), arguments.seed
        form = {"columns": columns, "language": arguments.language}
        self.examples = read_examples(arguments.task, arguments.data, arguments.dev, seed=seed, **form)
        self.test = None if arguments.test is None else read_files(arguments.task, [arguments.test], columns)
        model, task = self._first = self._prepare(arguments.seed)
        task.check_labels(self.examples.dev, f"{self.examples.source}, dev set")
        task.check_labels(self.test or [], str(arguments.test))
        self.recipe = recipe_of(task.language.family, task, self.examples.train)
        rate = default_rate(model, self.recipe.rate) if arguments.learning_rate is None else arguments.learning_rate
        self.trials = plan(arguments.search or [rate], arguments.seed, arguments.restarts)
        for trial in self.trials:
            self._settings(trial)  # raises for numbers outside their range
        self.majority: dict[str, float] = {}
        self.main_score = task.main_score

    def run(self) -> None:
        from fasttfm.train.run_directory import run_lock

        examples = self.examples
        if self.arguments.resume:
            self._check_resumable(self.arguments.output)
        output = output_of(self.arguments, f"finetune-{self.arguments.task}")
        _, task = self._first
        # Before the training, so that a missing scikit-learn is reported right away.
        self.majority = task.scores(examples.dev, task.majority(examples.train, examples.dev))
        self._say(f"{len(examples.train)} training examples, {len(examples.dev)} in the dev set: {examples.source}")
        self._say(self._numbers())
        if self.arguments.resume and self._finished(output):
            self._say(f"{output}: this run is finished")
            return
        if self.world.main:
            with run_lock(output):
                self._train_all(output)
        else:
            self._train_all(output)

    def _numbers(self) -> str:
        """The numbers of the training, next to those of the paper where they differ."""
        settings, recipe = self._settings(self.trials[0]), self.recipe
        rates = " or ".join(f"{rate:g}" for rate in dict.fromkeys(trial.rate for trial in self.trials))
        tokens = settings.tokens_per_batch
        rows = (
            (f"{settings.epochs} epochs", settings.epochs, recipe.epochs),
            (f"{settings.batch_size} examples per batch", settings.batch_size, recipe.batch_size)
            if tokens is None
            else (f"{tokens:,} tokens per batch", None, f"{recipe.batch_size} examples"),
            (f"learning rate {rates}", rates, f"{recipe.rate:g}"),
        )
        if not recipe.paper:
            return ", ".join(text for text, *_ in rows)
        parts = [text if here == paper else f"{text} (paper: {paper})" for text, here, paper in rows]
        return f"recipe of {recipe.paper}: {', '.join(parts)}"

    def _train_all(self, output: Path) -> None:
        if len(self.trials) == 1:
            metrics = self._train(self.trials[0], output, resume=self.arguments.resume)
        else:
            metrics = self._search(output)
        if self.world.main:
            self._report(output, metrics)

    def _check_resumable(self, directory: Path) -> None:
        from fasttfm.train.checkpoints import Checkpoints
        from fasttfm.train.run_directory import RunError

        begun = (directory / METRICS).is_file() or (directory / "trials").is_dir()
        if not begun and not Checkpoints(directory).steps():
            raise RunError(f"{directory}: expected a checkpoint to resume from, got none")

    def _finished(self, directory: Path) -> bool:
        from fasttfm.train.checkpoints import Checkpoints

        return (directory / METRICS).is_file() and not Checkpoints(directory).steps()

    # ---- one training ------------------------------------------------------------------------------------------------

    def _prepare(self, seed: int) -> Any:
        import torch

        from fasttfm.data.texts import shipped_graph
        from fasttfm.tasks.finetuning import prepare

        arguments = self.arguments
        options = {name: getattr(arguments, name) for name in TASKS[arguments.task].options}
        if arguments.language is not None and options.get("graph", "") is None:
            options["graph"] = shipped_graph(arguments.language)
        torch.manual_seed(seed)  # of the head
        return prepare(
            arguments.task,
            arguments.model,
            self.examples.train,
            tokenizer=arguments.tokenizer,
            max_length=arguments.max_length,
            values=arguments.values,
            auxiliary=arguments.auxiliary,
            new_head=arguments.new_head,
            **options,
        )

    def _settings(self, trial: Any) -> Any:
        arguments = self.arguments
        epochs, batch_size = self.recipe.epochs if arguments.data else 10, self.recipe.batch_size
        return settings_of(
            arguments,
            self.world.device,
            trial.rate,
            seed=trial.seed,
            rates={"head_rate": arguments.head_rate, "layer_decay": arguments.layer_decay},
            epochs=epochs if arguments.epochs is None else arguments.epochs,
            batch_size=batch_size if arguments.batch_size is None else arguments.batch_size,
            tokens_per_batch=arguments.tokens_per_batch,
        )

    def _train(self, trial: Any, directory: Path, *, resume: bool) -> dict[str, Any]:
        """Trains and writes what a training leaves. Returns its metrics, in the main process."""
        from fasttfm.tasks.finetune_run import FinetuneRun, RunOptions
        from fasttfm.tasks.finetuning import FineTuning
        from fasttfm.tasks.lora import Lora
        from fasttfm.tasks.rates import freeze
        from fasttfm.train.reports import open_reports

        arguments, examples, world = self.arguments, self.examples, self.world
        model, task = self._first if trial == self.trials[0] else self._prepare(trial.seed)
        self._first = (None, None)
        if world.main and not resume:
            (directory / METRICS).unlink(missing_ok=True)
        if arguments.freeze_encoder or arguments.freeze_layers is not None:
            freeze(model, arguments.freeze_layers)
        adapted = {"targets": arguments.lora_targets, "dropout": arguments.lora_dropout}
        lora = None if arguments.lora is None else Lora(model, arguments.lora, arguments.lora_alpha, **adapted)
        settings = self._settings(trial)
        weights = self._class_weights(task)
        work = FineTuning(model.to(world.device), task, examples.train, settings, class_weights=weights, world=world)
        options = self._options(work)
        run = FinetuneRun(
            work,
            examples.dev,
            RunOptions(
                directory,
                keep=arguments.keep,
                patience=arguments.patience,
                checkpoint_every=arguments.checkpoint_every,
                resume=resume,
                progress=not arguments.quiet,
                reports=open_reports(arguments.report, directory, options) if world.main else (),
            ),
            {name: options[name] for name in ("model", "lora", "freeze_layers", "freeze_encoder", "auxiliary")},
        )
        for name, said in (("training", work.truncation), ("dev", run.truncation)):
            if said is not None and world.main and trial == self.trials[0]:
                warnings.warn(f"{name}: {said}; --max-length reads more", stacklevel=2)
        if world.main and trial == self.trials[0]:
            for name, features in (("training", work.features), ("dev", run.dev_features)):
                if (remark := task.remark(features)) is not None:
                    self._say(f"{name}: {remark}")
        untrained = {}
        if world.main and not resume and task.head is Head.NONE:  # without a new head, the model has a score already
            untrained = {"untrained": task.scores(examples.dev, run.predict(examples.dev, run.dev_features))}
        run.train(list(self.majority))
        if run.loss_sum:
            self._say(f"training loss {run.loss_sum}")
        if not world.main:
            return {}
        return self._write(run, directory, options, lora, untrained)

    def _class_weights(self, task: Any) -> Any:
        from fasttfm.tasks.class_weights import read_weights

        weights = self.arguments.class_weights
        return weights if weights in (None, "balanced") else read_weights(task, Path(weights))

    def _options(self, work: Any) -> dict[str, Any]:
        """Every setting of a training, with the values that were chosen by default."""
        left_out = {"command", "refuse", "default_of", "resume", "overwrite", "quiet", "search", "restarts"}
        options = {name: value for name, value in vars(self.arguments).items() if name not in left_out}
        settings = work.settings
        options |= {"learning_rate": settings.rates.rate, "seed": settings.seed, "epochs": settings.epochs}
        options |= {"batch_size": settings.batch_size, "recipe": self.recipe.paper}
        options |= {"max_length": work.task.language.format.max_length, "precision": settings.step.precision}
        options |= {"device": str(self.world.device), "processes": self.world.size, "class_weights": work.class_weights}
        options |= {"optimizer": settings.optimizer.name, "betas": list(settings.optimizer.betas)}
        options |= {"epsilon": settings.optimizer.epsilon}
        options |= {"auxiliary": work.task.auxiliary if work.task.has_auxiliary else None}
        return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}

    def _write(
        self, run: Any, directory: Path, options: dict[str, Any], lora: Any, more: dict[str, Any]
    ) -> dict[str, Any]:
        """The checkpoint, the predictions, the pictures and the metrics, with ``more`` of them."""
        from dataclasses import asdict

        from fasttfm.tasks.finetuning import save
        from fasttfm.train.logs import CSV

        task, dev = run.task, self.examples.dev
        if lora is not None:
            lora.save(directory)
            lora.merge()
        predictions = run.dev_predictions()
        metrics: dict[str, Any] = {
            "task": self.arguments.task,
            "model": str(self.arguments.model),
            "data": self.examples.source,
            "examples": {"train": len(self.examples.train), "dev": len(dev)},
            "steps": run.work.steps,
            "dev": task.scores(dev, predictions),
            "majority": self.majority,
            **more,
            "best_epoch": None if run.kept is None else run.kept.epoch.number,
            "epochs": [asdict(epoch) for epoch in run.epochs],
            "settings": options,
        }
        if getattr(task, "threshold", None) is not None:
            metrics["no_answer_threshold"] = task.threshold
        metrics |= _domains("dev", task, dev, predictions)
        save(run.model, task, directory)
        files = task.files(dev, predictions)
        if self.test is not None:
            test_predictions = run.predict(self.test)
            files |= {f"test_{name}": text for name, text in task.files(self.test, test_predictions).items()}
            if task.labelled(self.test):
                metrics["test"] = task.scores(self.test, test_predictions)
                metrics |= _domains("test", task, self.test, test_predictions)
        for name, text in files.items():
            write_text(directory / name, text)
        if (directory / CSV).is_file():
            draw_curves(directory / CSV, f"{self.arguments.task}, {self.arguments.model}")
        draw_confusions(directory, task, dev, predictions)
        write_json(directory / METRICS, metrics)
        run.checkpoints.remove()
        return metrics

    # ---- several trainings -------------------------------------------------------------------------------------------

    def _search(self, output: Path) -> dict[str, Any]:
        """Every trial in a directory of its own; what the best one has left becomes the command's."""
        from fasttfm.tasks.trials import best, spread
        from fasttfm.train.checkpoints import Checkpoints

        results = []
        for trial in self.trials:
            directory = output / "trials" / trial.name
            if self.arguments.resume and self._finished(directory):
                metrics = json.loads((directory / METRICS).read_text(encoding="utf-8"))
            else:
                directory.mkdir(parents=True, exist_ok=True)
                begun = self.arguments.resume and bool(Checkpoints(directory).steps())
                metrics = self._train(trial, directory, resume=begun)
            results.append(metrics)
            if self.world.main:
                self._say(f"{trial.name:24} {sentence(metrics['dev'])}")
        if not self.world.main:
            return {}
        score = self.main_score
        scores = [metrics["dev"].get(score, next(iter(metrics["dev"].values()))) for metrics in results]
        chosen = best(scores)
        metrics = results[chosen]
        metrics["trials"] = [
            {"learning_rate": trial.rate, "seed": trial.seed, "best_epoch": result["best_epoch"], "dev": result["dev"]}
            for trial, result in zip(self.trials, results, strict=True)
        ]
        by_rate = {
            f"{rate:g}": spread([value for trial, value in zip(self.trials, scores, strict=True) if trial.rate == rate])
            for rate in sorted({trial.rate for trial in self.trials})
        }
        metrics["spread"] = {"score": score, **spread(scores), "by_learning_rate": by_rate}
        shutil.copytree(output / "trials" / self.trials[chosen].name, output, dirs_exist_ok=True)
        for path in (output / "trials").rglob("*.safetensors"):
            path.unlink()
        write_json(output / METRICS, metrics)
        return metrics

    # ---- what is printed ---------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self.world.main:
            print(line, flush=True)

    def _report(self, output: Path, metrics: dict[str, Any]) -> None:
        print(f"dev        {sentence(metrics['dev'])}")
        print(f"majority   {sentence(metrics['majority'])}")
        if "untrained" in metrics:
            print(f"untrained  {sentence(metrics['untrained'])}")
        if "test" in metrics:
            print(f"test       {sentence(metrics['test'])}")
        for part in ("dev", "test"):
            if f"{part}_domains" in metrics:
                print(domain_table(part, metrics[f"{part}_domains"]))
        if "no_answer_threshold" in metrics:
            print(f"threshold  {metrics['no_answer_threshold']:.3f}, tuned on the dev set")
        if metrics["best_epoch"] is not None:
            print(f"epoch      {metrics['best_epoch']} of {len(metrics['epochs'])} is kept")
        if "spread" in metrics:
            spread, settings = metrics["spread"], metrics["settings"]
            print(f"trial      learning rate {settings['learning_rate']:g}, seed {settings['seed']} is kept")
            for rate, statistics in spread["by_learning_rate"].items():
                middle = f"{statistics['mean']:.3f} +- {statistics['standard_deviation']:.3f}"
                print(
                    f"spread     learning rate {rate}: {spread['score']} {middle}"
                    f" ({statistics['min']:.3f}-{statistics['max']:.3f})"
                )
        kinds = (".tsv", ".csv", ".conll", ".png")
        files = sorted(
            path.name
            for path in output.iterdir()
            if path.suffix in kinds or path.name.endswith(("predictions.json", "predictions.jsonl"))
        )
        print(f"output     {output} ({', '.join([*files, METRICS])} and the model)")


def _domains(part: str, task: Any, examples: list[Any], predictions: list[Any]) -> dict[str, Any]:
    """The metrics of a set of examples by domain, where its file tells several."""
    scores = task.domain_scores(examples, predictions)
    return {f"{part}_domains": scores} if scores else {}


def draw_confusions(directory: Path, task: Any, examples: list[Any], predictions: list[Any]) -> None:
    """Draws the confusions between a task's labels. Without matplotlib it prints a note."""
    from fasttfm.tasks.pictures import CONFUSION, confusion_counts, write_confusion

    if not task.labels or "multi_label" in str(task.configuration().get("problem_type")):
        return
    gold = [tag for example in examples for tag in getattr(example, "tags", None) or [getattr(example, "label", None)]]
    predicted = [
        tag for prediction in predictions for tag in (prediction if isinstance(prediction, list) else [prediction])
    ]
    counts = confusion_counts(gold, predicted, task.labels)
    try:
        write_confusion(directory / CONFUSION, counts, task.labels, f"{task.name}: {len(gold):,} labels of the dev set")
    except ImportError as error:
        warnings.warn(str(error), stacklevel=2)
