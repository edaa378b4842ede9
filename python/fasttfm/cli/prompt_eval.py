"""``fasttfm prompt-eval``: scores a causal language model on zero-, one- and few-shot prompts, without training it.

  fasttfm prompt-eval --model DIR --data dev.jsonl --shots train.jsonl --k 0,1,8 --seeds 3
  fasttfm prompt-eval --model DIR --data articles.jsonl --task tldr --max-new-tokens 100
  fasttfm prompt-eval --model DIR --data pairs.jsonl --shots more.jsonl --task translate --k 0,4,16

A line of a file is an example: {"input": "a text", "output": "its answer"}; "output" may be a list of right answers,
and "choices" the list of those to choose from (by default all answers of the shots). The prompt has K examples, drawn
for each question by the seed, and then the question, all in the form of --template. The answer is the most likely
choice, or what the model generates up to --stop. Scores for each K, their mean and deviation over seeds, the answers
and a plot are written to --output.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from fasttfm.cli.generate import unescaped
from fasttfm.cli.options import (
    GPT_HELP,
    Formatter,
    add_device_option,
    check_output,
    device_of,
    exit_on_user_error,
    output_of,
    sentence,
)

_TASKS = ("classify", "choice", "tldr", "translate", "reading")


def add_parser(subparsers: Any) -> None:
    """Adds the ``prompt-eval`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prompt-eval", help="score a GPT on zero- and few-shot prompts", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help=GPT_HELP)
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help="examples to answer (.jsonl)")
    parser.add_argument("--shots", type=Path, metavar="FILE", help="examples to draw the shots from (.jsonl)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    group = parser.add_argument_group("the prompt")
    group.add_argument(
        "--task",
        choices=_TASKS,
        default="classify",
        help="sets template, separator, kind of answer and metrics: classify and choice by likelihood; tldr, translate "
        "and reading by generation",
    )
    group.add_argument("--k", default="0", metavar="K,K,...", help="numbers of examples (shots) in the prompt")
    group.add_argument("--description", default="", metavar="TEXT", help="instruction at the beginning of the prompt")
    group.add_argument(
        "--template",
        metavar="TEXT",
        help=r"format of an example, such as 'Q: {input}\nA: {output}' (default: the task's)",
    )
    group.add_argument("--separator", metavar="TEXT", help="text between examples (default: the task's)")
    group = parser.add_argument_group("the answer")
    group.add_argument(
        "--answer", choices=("likelihood", "generate"), help="choose by likelihood or generate (default: the task's)"
    )
    group.add_argument(
        "--normalization",
        choices=("none", "tokens", "bytes", "unconditional"),
        default="tokens",
        help="how the log-likelihoods of choices are compared: as sums, means over tokens or bytes, or, as in GPT-3, "
        "minus the choice's log-likelihood without the question",
    )
    group.add_argument("--max-new-tokens", type=int, default=50, metavar="N", help="max tokens of a generated answer")
    group.add_argument("--stop", metavar="TEXT", help="text that ends a generated answer (default: the separator)")
    group.add_argument(
        "--metrics", metavar="NAME,...", help="accuracy, f1, exact_match, answer_f1, bleu, rouge (default: the task's)"
    )
    group = parser.add_argument_group("run")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of the drawn examples")
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with this many seeds, from --seed on")
    group.add_argument("--limit", type=int, metavar="N", help="only the first N examples of --data")
    group.add_argument("--tokens-per-batch", type=int, default=16384, metavar="N", help="tokens per batch")
    group.add_argument(
        "--output", type=Path, metavar="DIR", help="output directory (default: a new one under fasttfm-runs)"
    )
    group.add_argument("--overwrite", action="store_true", help="write to --output even if it has files")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    add_device_option(group)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        numbers = _numbers(arguments)
        check_output(arguments, model=arguments.model)
        from fasttfm.tasks.prompt_eval import PRESETS, check_metrics, read_questions

        preset = PRESETS[arguments.task]
        metrics = tuple(arguments.metrics.split(",")) if arguments.metrics else preset.metrics
        check_metrics(metrics)
        questions = read_questions(arguments.data)[: arguments.limit]
        shots = [] if arguments.shots is None else read_questions(arguments.shots)
        evaluation = _evaluation(arguments, preset)
        folder = output_of(arguments, "prompt-eval")
        rows = []
        with (folder / "answers.jsonl").open("w", encoding="utf-8") as file:
            for k in numbers:
                for seed in range(arguments.seed, arguments.seed + (arguments.seeds if k else 1)):
                    rows.append(_evaluate(arguments, evaluation, metrics, questions, shots, (k, seed), file))
        _report(arguments, folder, rows, list(questions), evaluation.left_out)
    return 0


def _numbers(arguments: argparse.Namespace) -> list[int]:
    try:
        numbers = [int(part) for part in arguments.k.split(",")]
    except ValueError:
        numbers = [-1]
    if min(numbers) < 0:
        raise ValueError(f"--k: expected numbers from 0 on such as 0,1,8, got {arguments.k!r}")
    if max(numbers) and arguments.shots is None:
        raise ValueError("--shots: expected examples for prompts with --k above 0, got none")
    for name in ("seeds", "limit", "max_new_tokens", "tokens_per_batch"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number from 1 on, got {value}")
    return numbers


def _evaluation(arguments: argparse.Namespace, preset: Any) -> Any:
    from fasttfm.data.tokenizer_files import load_tokenizer
    from fasttfm.inference.opening import open_model
    from fasttfm.models.family import Head
    from fasttfm.tasks.prompt_eval import Evaluation
    from fasttfm.tasks.prompts import TEMPLATE, Prompt

    separator = preset.separator if arguments.separator is None else unescaped(arguments.separator)
    template = (preset.template or TEMPLATE) if arguments.template is None else unescaped(arguments.template)
    return Evaluation(
        open_model(arguments.model, Head.CAUSAL_LM).to(device_of(arguments)),
        load_tokenizer(arguments.tokenizer or arguments.model),
        Prompt(unescaped(arguments.description), (), template, separator),
        arguments.answer or preset.answer,
        arguments.normalization,
        arguments.max_new_tokens,
        separator if arguments.stop is None else unescaped(arguments.stop),
        arguments.tokens_per_batch,
    )


def _evaluate(
    arguments: argparse.Namespace,
    evaluation: Any,
    metrics: tuple[str, ...],
    questions: list[Any],
    shots: list[Any],
    drawn: tuple[int, int],
    file: Any,
) -> dict[str, Any]:
    """The scores with K examples of a seed; answers go to the file."""
    from fasttfm.tasks.prompt_eval import lines_of, prompt_scores
    from fasttfm.train.progress import tracked

    k, seed = drawn
    found = evaluation.answers(questions, shots, k, seed)
    answers = list(found if arguments.quiet else tracked(found, f"answers (k={k})", total=len(questions)))
    file.writelines(lines_of(questions, answers, k=k, seed=seed))
    scores = prompt_scores(metrics, questions, answers)
    print(f"k={k}, seed {seed}: {sentence(scores)}")
    return {"k": k, "seed": seed, **scores}


def _report(
    arguments: argparse.Namespace, folder: Path, rows: list[dict[str, Any]], questions: list[Any], left_out: int
) -> None:
    """metrics.json and the curve."""
    from fasttfm._atomic_files import write_json

    names = [name for name in rows[0] if name not in ("k", "seed")]
    curve = []
    for k in dict.fromkeys(row["k"] for row in rows):
        mean: dict[str, Any] = {"k": k}
        for name in names:
            values = [row[name] for row in rows if row["k"] == k]
            mean[name] = statistics.fmean(values)
            mean[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else 0.0
        curve.append(mean)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("refuse", "command")}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    write_json(
        folder / "metrics.json", {"curve": curve, "runs": rows, "examples": len(questions), "settings": settings}
    )
    if left_out:
        print(f"note: {left_out:,} examples did not fit into prompts and were left out", file=sys.stderr)
    if len(curve) > 1:
        try:
            _draw(folder / "curve.png", curve, names, f"{Path(arguments.model).name}, {arguments.task}")
        except ImportError as error:
            print(f"note: {error}", file=sys.stderr)
    print(f"metrics.json, answers.jsonl: {folder}")


def _draw(path: Path, curve: list[dict[str, Any]], names: list[str], title: str) -> None:
    """A panel for each score over the number of examples, with its deviation over seeds."""
    from fasttfm import _extras
    from fasttfm._atomic_files import atomic_write

    try:
        import matplotlib
    except ImportError:
        raise _extras.missing("the picture of the curve", "matplotlib", "train") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (4.2 * columns, 3.4 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    points = [row["k"] for row in curve]
    for panel, name in zip(grid.flat, names, strict=False):
        means = [row[name] for row in curve]
        panel.errorbar(points, means, [row[f"{name}_deviation"] for row in curve], marker="o", capsize=3)
        panel.set_title(name.replace("_", " "))
        panel.set_xlabel("examples in the prompt (k)")
        panel.set_xscale("symlog", base=2, linthresh=1)
        panel.set_xticks(points, [str(point) for point in points])
        panel.minorticks_off()
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    for panel in list(grid.flat)[len(names) :]:
        panel.set_visible(False)
    figure.suptitle(title)
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
