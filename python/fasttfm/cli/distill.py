"""``fasttfm distill``: trains a small model (the student) to imitate a large one (the teacher).

  fasttfm distill --recipe distilbert --teacher DIR --data 'books/*.txt' --steps 20000
  fasttfm distill --recipe tinybert --teacher DIR --layers 4 --width 312 --intermediate 1200 --output general
  fasttfm distill --recipe tinybert --task classify --teacher FINE_TUNED --student general

distilbert  The student starts from every second layer of its teacher. Its loss adds up the teacher's soft targets, the
            masked LM loss (the causal one for GPTs), and the cosine between both models' last hidden states.
tinybert    A student of the teacher's family and of any size learns its embeddings, attention maps and hidden states
            on a corpus. A second stage (--task) repeats this with a fine-tuned teacher, then learns its predictions.

Without --data, the shipped corpus or the shipped sample of the task is used. The output directory contains the student
as a transformers checkpoint, metrics.json, log.csv, curves.png and, for a task, the student's predictions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import write_json, write_text
from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_run_options,
    add_training_options,
    check_resumed_output,
    device_of,
    draw_curves,
    exit_on_user_error,
    facts_of,
    output_of,
    sentence,
    settings_of,
)
from fasttfm.tasks.registry import TASKS


def add_parser(subparsers: Any) -> None:
    """Adds the ``distill`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "distill", help="distill a model into a smaller one", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--recipe", required=True, choices=("distilbert", "tinybert"), help="one of the recipes above")
    parser.add_argument("--teacher", required=True, metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data", nargs="+", metavar="PATH", help="text files; with --task, a file or directory of examples"
    )
    group.add_argument("--prepared", type=Path, metavar="DIR", help="folder of token shards, reused by other runs")
    group.add_argument("--max-length", type=int, default=128, metavar="N", help="max tokens per sequence")
    group.add_argument(
        "--tokens-per-batch", type=int, metavar="N", help="max tokens per packed batch (default: 4096 on a corpus)"
    )
    group.add_argument("--batch-size", type=int, default=32, metavar="N", help="with --task: examples per batch")
    group.add_argument(
        "--masking", type=float, default=0.15, metavar="FRACTION", help="fraction of tokens that are masked"
    )
    group.add_argument(
        "--held-out", type=float, default=0.02, metavar="FRACTION", help="fraction of documents in the validation set"
    )
    _add_student(parser)
    training = add_training_options(parser, rate=5e-4, about_rate="peak learning rate")
    training.add_argument("--steps", type=int, default=1000, metavar="N", help="optimizer steps on a corpus")
    group = parser.add_argument_group("task")
    tasks = tuple(name for name, task in TASKS.items() if task.distills)
    group.add_argument("--task", choices=tasks, help="run tinybert's second stage on this task")
    group.add_argument(
        "--dev", type=Path, metavar="FILE", help="dev set (default: the directory's, or a tenth of the examples)"
    )
    group.add_argument(
        "--epochs", type=int, default=10, metavar="N", help="epochs on embeddings, attention maps and hidden states"
    )
    group.add_argument("--prediction-epochs", type=int, default=3, metavar="N", help="epochs on predictions")
    group.add_argument(
        "--augment",
        metavar="MODEL",
        help=f"classify, pair: also train on copies with words that this masked LM proposes: {MODEL_HELP}",
    )
    group.add_argument("--copies", type=int, default=20, metavar="N", help="copies of each example with --augment")
    add_run_options(parser).add_argument(
        "--resume", action="store_true", help="continue the interrupted run in --output"
    )
    parser.set_defaults(refuse=parser.error)


def _add_student(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("student")
    group.add_argument("--layers", type=int, metavar="N", help="layers of the student (default: half of the teacher's)")
    group.add_argument("--width", type=int, metavar="N", help="tinybert: hidden size (default: half of the teacher's)")
    group.add_argument(
        "--intermediate", type=int, metavar="N", help="tinybert: intermediate size (default: four times the width)"
    )
    group.add_argument("--student", metavar="MODEL", help="tinybert with --task: output directory of the first stage")
    group = parser.add_argument_group("loss")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="softmax temperature (default: 2; 1 for a task's predictions)"
    )
    group.add_argument(
        "--weights",
        type=float,
        nargs=3,
        default=(5.0, 2.0, 1.0),
        metavar="W",
        help="distilbert: weights of soft targets, masked LM and cosine",
    )
    group.add_argument(
        "--soft-targets",
        choices=("all", "masked"),
        default="all",
        help="distilbert: soft targets for all tokens or only for masked ones",
    )
    group.add_argument(
        "--layer-map", type=_numbers, metavar="A,B", help="tinybert: the teacher's layer for each layer of the student"
    )
    group.add_argument(
        "--attention",
        choices=("scores", "weights"),
        default="scores",
        help="tinybert: attention before or after the softmax",
    )
    group.add_argument(
        "--joint",
        action="store_true",
        help="tinybert: one loss of layers and predictions (on a corpus: soft targets of the vocabulary); default: the "
        "layers only, and with --task the predictions after them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from fasttfm.train.settings import random_seed

    with exit_on_user_error(arguments):
        sources = {"teacher": arguments.teacher, "student": arguments.student, "prepared": arguments.prepared}
        check_resumed_output(arguments, **sources)
        random_seed(arguments.seed)
        if arguments.joint and arguments.recipe != "tinybert":
            raise ValueError("--joint: expected with --recipe tinybert; distilbert's loss always has the predictions")
        if arguments.task is None:
            if arguments.student is not None:
                raise ValueError("--student: expected with --task; the first stage makes its own")
            _on_corpus(arguments)
        elif arguments.recipe != "tinybert":
            raise ValueError("--task: expected with --recipe tinybert; a DistilBERT is fine-tuned: fasttfm finetune")
        elif arguments.student is None:
            raise ValueError("--student: expected with --task: the directory that the first stage wrote")
        else:
            _on_task(arguments)
    return 0


# ---- on a corpus -----------------------------------------------------------------------------------------------------


def _on_corpus(arguments: argparse.Namespace) -> None:
    from fasttfm import data
    from fasttfm.inference.opening import family_of
    from fasttfm.tasks.distillation_runs import CorpusRun, save_student
    from fasttfm.train.step_checkpoints import StepCheckpoints

    device = device_of(arguments)
    tokenizer = data.load_tokenizer(arguments.teacher)
    recipe = _recipe(arguments).to(device)
    recipe.teacher.to(device)
    tokens = 4096 if arguments.tokens_per_batch is None else arguments.tokens_per_batch
    settings = settings_of(arguments, device, arguments.learning_rate, tokens_per_batch=tokens)
    output = output_of(arguments, arguments.recipe)
    source: Any = arguments.data or data.shipped_corpus()
    causal = family_of(arguments.teacher).causal
    shards = data.prepare(source, tokenizer, arguments.prepared or output / "shards", progress=not arguments.quiet)
    streams = [
        data.BatchStream(
            part,
            data.SequenceFormat("causal" if causal else "single", arguments.max_length),
            None if causal else data.Masking(arguments.masking),
            tokens_per_batch=tokens,
            seed=arguments.seed,
        )
        for part in shards.split(arguments.held_out)
    ]
    held_out = list(islice(streams[1], 4))
    work = CorpusRun(recipe, streams[0], settings, arguments.steps)
    before = work.evaluate(held_out)

    def save_checkpoint(directory: Path) -> None:
        log.write()  # so that a resumed run has all rows up to here
        save_student(recipe, tokenizer, directory)

    facts = {**facts_of(arguments), "tokenizer": tokenizer.fingerprint, "corpus": shards.fingerprint}
    checkpoints = StepCheckpoints(output, facts, save_checkpoint, resume=arguments.resume)
    with _logged(arguments, output, recipe, work.steps, start=checkpoints.start) as log:
        work.run(log.add, checkpoints)
        after = work.evaluate(held_out)
        log.write(held_out=after)
    save_student(recipe, tokenizer, output)
    metrics = {"recipe": arguments.recipe, "teacher": str(arguments.teacher), "steps": work.steps}
    metrics["weights"] = dict(zip(recipe.terms, recipe.weights, strict=True))
    write_json(output / "metrics.json", {**metrics, "held_out_before": before, "held_out": after})
    checkpoints.remove()
    print(f"validation {sentence(after)}")
    print(f"before     {sentence(before)}")
    print(f"output     {output}")


def _recipe(arguments: argparse.Namespace) -> Any:
    from fasttfm.inference.opening import family_of, open_model
    from fasttfm.models.family import Head
    from fasttfm.tasks.distillation_recipes import DistilBertRecipe, TinyBertRecipe
    from fasttfm.tasks.distillation_runs import distilbert_student, tinybert_student

    head = Head.CAUSAL_LM if family_of(arguments.teacher).causal else Head.MASKED_LM
    if arguments.recipe == "distilbert":
        teacher = open_model(arguments.teacher, head, trained=True)
        return DistilBertRecipe(
            distilbert_student(teacher, arguments.layers),
            teacher,
            temperature=2.0 if arguments.temperature is None else arguments.temperature,
            weights=tuple(arguments.weights),
            all_tokens=arguments.soft_targets == "all",
        )
    joint = arguments.joint
    teacher = open_model(arguments.teacher, head, trained=True) if joint else open_model(arguments.teacher, Head.NONE)
    student = tinybert_student(teacher, arguments.layers, arguments.width, arguments.intermediate, head=joint)
    layers, attention = arguments.layer_map, arguments.attention
    return TinyBertRecipe(student, teacher, layers=layers, attention=attention, predictions=joint)


@contextmanager
def _logged(
    arguments: argparse.Namespace, output: Path, recipe: Any, steps: int, name: str = "", *, start: int = 0
) -> Iterator[Any]:
    """The log and progress bar of a part of a run; afterwards its curves are plotted."""
    from fasttfm.train.logs import RunLog
    from fasttfm.train.progress import Progress

    (output / name).mkdir(exist_ok=True)
    progress = None if arguments.quiet else Progress(steps, start=start)
    log = RunLog(output / name, recipe.terms, weights=recipe.weights, steps=steps, start=start, progress=progress)
    try:
        yield log
        log.write()
    finally:
        log.close()
        if progress is not None:
            progress.close()
    print(f"{name or 'training'} loss {log.loss_sum}")
    draw_curves(log.path, f"{arguments.recipe} {name}, teacher {arguments.teacher}")


# ---- on a task -------------------------------------------------------------------------------------------------------


def _on_task(arguments: argparse.Namespace) -> None:
    from fasttfm.tasks.distillation_recipes import TinyBertRecipe
    from fasttfm.tasks.distillation_runs import TaskRun, prepare_task, save_student
    from fasttfm.tasks.finetuning import predict
    from fasttfm.tasks.reading import read_examples
    from fasttfm.train.checkpoints import Checkpoints

    if arguments.data is not None and len(arguments.data) > 1:
        raise ValueError("--data: expected one file or directory with --task, and --dev for another")
    device = device_of(arguments)
    data = None if arguments.data is None else Path(arguments.data[0])
    examples = read_examples(arguments.task, data, arguments.dev, seed=arguments.seed)
    teacher, student, task, projections = prepare_task(
        arguments.task, arguments.teacher, arguments.student, examples.train, max_length=arguments.max_length
    )
    task.check_labels(examples.dev, f"{examples.source}, dev set")
    train = examples.train if arguments.augment is None else _augmented(arguments, examples.train, device)
    recipe = TinyBertRecipe(
        student, teacher, layers=arguments.layer_map, attention=arguments.attention, projections=projections
    ).to(device)
    teacher.to(device)
    settings = settings_of(
        arguments,
        device,
        arguments.learning_rate,
        batch_size=arguments.batch_size,
        tokens_per_batch=arguments.tokens_per_batch,
        epochs=arguments.epochs,
    )
    output = output_of(arguments, f"tinybert-{arguments.task}")
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    work = TaskRun(
        recipe,
        task,
        train,
        settings,
        prediction_epochs=arguments.prediction_epochs,
        temperature=temperature,
        joint=arguments.joint,
    )
    tokenizer = task.language.tokenizer

    def save_checkpoint(directory: Path) -> None:
        log.write()  # so that a resumed run has all rows up to here
        save_student(recipe, tokenizer, directory)

    facts = {**facts_of(arguments), "tokenizer": tokenizer.fingerprint}
    parts = work.checkpoints(output, facts, save_checkpoint, resume=arguments.resume)
    for part, checkpoints in parts:
        with _logged(arguments, output, part.recipe, part.steps, part.name, start=checkpoints.start) as log:
            part.run(log.add, checkpoints)
    scores = {}
    for name, model in (("student", student), ("teacher", teacher)):
        predictions = predict(model, task, examples.dev, precision=settings.step.precision)
        if hasattr(task, "tune"):
            task.tune(examples.dev, predictions)
        scores[name] = task.scores(examples.dev, predictions)
        if name == "student":
            files = task.files(examples.dev, predictions)
            task.adjust(student)
    scores["majority"] = task.scores(examples.dev, task.majority(examples.train, examples.dev))
    save_student(recipe, tokenizer, output)
    for name, text in files.items():
        write_text(output / name, text)
    write_json(output / "metrics.json", {"recipe": "tinybert", "task": arguments.task, **scores})
    for part in work.parts:
        Checkpoints(output / part.name).remove()
    for name, values in scores.items():
        print(f"{name:10} {sentence(values)}")
    print(f"output     {output}")


def _augmented(arguments: argparse.Namespace, examples: list[Any], device: Any) -> list[Any]:
    """The examples and their copies with other words."""
    from functools import partial

    from fasttfm.data.tokenizer_files import load_tokenizer
    from fasttfm.inference.opening import open_model
    from fasttfm.models.family import Head
    from fasttfm.tasks.augmentation import Augmenter
    from fasttfm.train.progress import tracked

    model = open_model(arguments.augment, Head.MASKED_LM).to(device)
    augmenter = Augmenter(model, load_tokenizer(arguments.augment), copies=arguments.copies, seed=arguments.seed)
    watch = iter if arguments.quiet else partial(tracked, unit="examples", total=len(examples))
    augmented = augmenter.augmented(examples, watch)
    print(f"{len(examples)} training examples, {len(augmented)} with their copies")
    return augmented


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between them, got {text!r}") from None
