"""``fasttfm explain``: answers questions with a fine-tuned KagNet and shows the graph paths that support each answer.

  fasttfm explain --model DIR --question "Where would you find a kettle?" --choices kitchen harbour steel
  fasttfm explain --model DIR --data dev.jsonl --number 5 --output explanations

DIR is an output directory of fasttfm finetune --task commonsense. For each question, the choices are printed with their
probabilities and, for the chosen one (*), the graph paths with the highest attention. --output also draws them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasttfm.cli.options import MODEL_HELP, Formatter, add_device_option, device_of, exit_on_user_error


def add_parser(subparsers: Any) -> None:
    """Adds the ``explain`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="show the graph paths that support a KagNet's answers",
        description=__doc__,
        formatter_class=Formatter,
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help=f"fine-tuned KagNet: {MODEL_HELP}")
    parser.add_argument("--data", type=Path, metavar="FILE", help="questions in CommonsenseQA's format")
    parser.add_argument("--number", type=int, default=5, metavar="N", help="answer the first N questions of --data")
    parser.add_argument("--question", metavar="TEXT", help="a single question, instead of --data")
    parser.add_argument("--choices", nargs="+", metavar="TEXT", help="the answers to --question")
    parser.add_argument(
        "--graph", type=Path, metavar="FILE", help="graph (default: the one that the model was trained with)"
    )
    parser.add_argument("--paths", type=int, default=5, metavar="N", help="paths per answer")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write an image of each answer's paths into this directory"
    )
    parser.add_argument("--overwrite", action="store_true", help="write to --output even if it has files")
    add_device_option(parser)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from fasttfm.cli.options import check_output

    with exit_on_user_error(arguments):
        check_output(arguments, model=arguments.model)
        for name in ("number", "paths"):
            if getattr(arguments, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(arguments, name)}")
        examples = _examples(arguments)
        from fasttfm.tasks.explanations import draw_explanation, explanation
        from fasttfm.tasks.finetuning import predict

        model, task = _opened(arguments, examples)
        model.to(device_of(arguments))
        for number, (example, prediction) in enumerate(zip(examples, predict(model, task, examples), strict=True), 1):
            print(explanation(task, example, prediction, paths=arguments.paths))
            if arguments.output is not None:
                arguments.output.mkdir(parents=True, exist_ok=True)
                path = arguments.output / f"{number:03d}.png"
                draw_explanation(task.graph, example, prediction, path, paths=arguments.paths)
                print(f"      {path}")
            print()
    return 0


def _examples(arguments: argparse.Namespace) -> list[Any]:
    from fasttfm.data.commonsense import CommonsenseExample, read_commonsense

    if (arguments.data is None) == (arguments.question is None):
        raise ValueError("expected either --data or --question with --choices")
    if arguments.data is not None:
        return list(read_commonsense(arguments.data)[: arguments.number])
    if len(arguments.choices or ()) < 2:
        raise ValueError("--choices: expected two answers or more to --question")
    keys = tuple(map(str, range(1, len(arguments.choices) + 1)))
    return [CommonsenseExample(arguments.question, "", list(arguments.choices), None, "", keys)]


def _opened(arguments: argparse.Namespace, examples: list[Any]) -> tuple[Any, Any]:
    """The model, and its task with the graph and the options that it was trained with."""
    from fasttfm.inference.opening import checkpoint_of
    from fasttfm.models.checkpoint_files import CONFIG, CheckpointError, read_json
    from fasttfm.tasks.commonsense import CommonsenseTask
    from fasttfm.tasks.finetuning import prepare
    from fasttfm.tasks.task import TASK_KEY

    described = read_json(checkpoint_of(arguments.model) / CONFIG).get(TASK_KEY) or {}
    if described.get("task") != CommonsenseTask.name:
        expected = "a model of fasttfm finetune --task commonsense"
        raise CheckpointError(f"{arguments.model}: expected {expected}, got one that knows no graph")
    options: dict[str, Any] = {name: described.get(name) for name in ("max_length", *CommonsenseTask.options)}
    if arguments.graph is not None:
        options["graph"] = arguments.graph
    return prepare("commonsense", arguments.model, examples, **options)
