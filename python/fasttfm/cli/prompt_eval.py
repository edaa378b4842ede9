"""``fasttfm prompt-eval``: scores a causal language model on zero-, one- and few-shot prompts, without training it.

  fasttfm prompt-eval --model DIR --data SST-2/dev.tsv --shots SST-2/train.tsv --task sentiment --k 0,1,8 --seeds 3
  fasttfm prompt-eval --model DIR --data coqa-dev-v1.0.json --task reading
  fasttfm prompt-eval --model DIR --data lambada_test.jsonl --task last-word
  fasttfm prompt-eval --model DIR --data newstest2014.en newstest2014.fr --task translate
  fasttfm prompt-eval --model SMALL LARGE --data dev.jsonl --shots train.jsonl --k 0,1,2,4,8,16

Files are read as they are delivered:

  classify, sentiment   a table with texts and labels (GLUE), a known .csv, .tsv, .jsonl or .parquet
  choice                SWAG, HellaSwag, StoryCloze, RACE and the like
  last-word             LAMBADA: .txt with a passage in each line, or rows with a text
  tldr                  rows with article and highlights, document and summary (CNN/DailyMail, XSum); .story files
  translate             two files whose lines are translations, .tsv with two columns, rows with a translation (WMT)
  reading               SQuAD, CoQA, TriviaQA and the like

or for any task as lines {"input": "a text", "output": "its answer"}; "output" may be a list of right answers, and
"choices" the list of those to choose from (by default all answers of the shots). The prompt has K examples, drawn for
each question by the seed, and then the question, all in the form of --template. The answer is the most likely choice,
or what the model generates up to --stop. A table of the scores for each K, with their mean and deviation over seeds
(table.csv), the answers and a plot with a curve for each model are written to --output.
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
    domain_table,
    exit_on_user_error,
    output_of,
    sentence,
)

_TASKS = ("classify", "sentiment", "choice", "last-word", "tldr", "translate", "reading")


def add_parser(subparsers: Any) -> None:
    """Adds the ``prompt-eval`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prompt-eval", help="score a GPT on zero- and few-shot prompts", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--model", required=True, nargs="+", metavar="MODEL", help=GPT_HELP)
    parser.add_argument(
        "--data", required=True, nargs="+", type=Path, metavar="FILE", help="examples to answer; translate: one or two"
    )
    parser.add_argument("--shots", nargs="+", type=Path, metavar="FILE", help="examples to draw the shots from")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    parser.add_argument(
        "--labels",
        metavar="LABEL=WORD,...",
        help="classify: words for the labels of the files, such as 0=negative,1=positive (default: the task's)",
    )
    parser.add_argument(
        "--direction",
        metavar="FROM-TO",
        help="translate: fields of a translation, such as en-fr (default: their order in the file)",
    )
    group = parser.add_argument_group("the prompt")
    group.add_argument(
        "--task",
        choices=_TASKS,
        default="classify",
        help="sets template, separator, kind of answer and metrics: classify, sentiment and choice by likelihood; "
        "tldr, translate and reading by generation",
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
        "--answer",
        choices=("likelihood", "generate", "last-word"),
        help="choose by likelihood, generate, or predict each token of the right answer (default: the task's)",
    )
    group.add_argument(
        "--normalization",
        choices=("none", "tokens", "bytes", "unconditional"),
        default="tokens",
        help="how the log-likelihoods of choices are compared: as sums, means over tokens or bytes, or, as in GPT-3, "
        "minus the choice's log-likelihood without the question",
    )
    group.add_argument(
        "--max-new-tokens", type=int, metavar="N", help="max tokens of a generated answer (default: 50; tldr: 100)"
    )
    group.add_argument("--stop", metavar="TEXT", help="text that ends a generated answer (default: the task's)")
    group.add_argument(
        "--metrics",
        metavar="NAME,...",
        help="accuracy, f1, exact_match, answer_f1, bleu, rouge, perplexity (default: the task's)",
    )
    _add_run_options(parser)
    parser.set_defaults(refuse=parser.error)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        numbers = _numbers(arguments)
        for model in arguments.model:
            check_output(arguments, model=model)
        from fasttfm.data.prompt_files import read_prompts
        from fasttfm.inference.opening import family_of, model_class
        from fasttfm.models.family import Head
        from fasttfm.tasks.prompt_eval import PRESETS, check_metrics

        preset = PRESETS[arguments.task]
        metrics = tuple(arguments.metrics.split(",")) if arguments.metrics else preset.metrics
        check_metrics(metrics)
        about = {"labels": _labels(arguments, preset), "direction": arguments.direction}
        questions = read_prompts(arguments.data, preset.files, **about)[: arguments.limit]
        shots = [] if arguments.shots is None else read_prompts(arguments.shots, preset.files, **about)
        for model in arguments.model:  # before any of them answers
            model_class(family_of(model), Head.CAUSAL_LM)
        folder: Path | None = None
        rows: list[dict[str, Any]] = []
        for model, name in zip(arguments.model, _names(arguments.model), strict=True):
            evaluation = _evaluation(arguments, model, preset)
            folder = folder or output_of(arguments, "prompt-eval")
            with (folder / "answers.jsonl").open("a" if rows else "w", encoding="utf-8") as file:
                for k in numbers:
                    for seed in range(arguments.seed, arguments.seed + (arguments.seeds if k else 1)):
                        drawn = {"model": name, "k": k, "seed": seed}
                        rows.append(_evaluate(arguments, evaluation, metrics, questions, shots, drawn, file))
            _notes(evaluation, name)
        assert folder is not None
        _report(arguments, folder, rows, len(questions))
    return 0


def _names(models: list[str]) -> list[str]:
    """The names of the models: the last parts of their paths, or the paths if these are not different."""
    names = [Path(model).name or model for model in models]
    return names if len({*names}) == len(names) else list(models)


def _labels(arguments: argparse.Namespace, preset: Any) -> dict[str, str] | None:
    """The words for labels, of ``--labels`` or of the task."""
    if arguments.labels is None:
        return None if preset.labels is None else dict(preset.labels)
    pairs = [part.partition("=") for part in arguments.labels.split(",")]
    if not all(label and word for label, _, word in pairs):
        raise ValueError(f"--labels: expected pairs such as 0=negative,1=positive, got {arguments.labels!r}")
    return {label: word for label, _, word in pairs}


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


def _evaluation(arguments: argparse.Namespace, model: str, preset: Any) -> Any:
    from fasttfm.data.tokenizer_files import load_tokenizer
    from fasttfm.inference.opening import open_model
    from fasttfm.models.family import Head
    from fasttfm.tasks.prompt_eval import Evaluation
    from fasttfm.tasks.prompts import TEMPLATE, Prompt

    separator = preset.separator if arguments.separator is None else unescaped(arguments.separator)
    template = (preset.template or TEMPLATE) if arguments.template is None else unescaped(arguments.template)
    stop = separator if preset.stop is None else preset.stop
    return Evaluation(
        open_model(model, Head.CAUSAL_LM).to(device_of(arguments)),
        load_tokenizer(arguments.tokenizer or model),
        Prompt(unescaped(arguments.description), (), template, separator),
        arguments.answer or preset.answer,
        arguments.normalization,
        preset.max_new_tokens if arguments.max_new_tokens is None else arguments.max_new_tokens,
        stop if arguments.stop is None else unescaped(arguments.stop),
        arguments.tokens_per_batch,
        preset.truncated,
    )


def _evaluate(
    arguments: argparse.Namespace,
    evaluation: Any,
    metrics: tuple[str, ...],
    questions: list[Any],
    shots: list[Any],
    drawn: dict[str, Any],
    file: Any,
) -> dict[str, Any]:
    """The scores with K examples of a seed; answers go to the file."""
    from fasttfm.tasks.prompt_eval import domain_scores, lines_of, prompt_scores
    from fasttfm.train.progress import tracked

    k, seed = drawn["k"], drawn["seed"]
    stream = evaluation.answers(questions, shots, k, seed)
    answers = list(stream if arguments.quiet else tracked(stream, f"answers (k={k})", total=len(questions)))
    file.writelines(lines_of(questions, answers, **drawn))
    scores = prompt_scores(metrics, questions, answers, evaluation.likelihoods)
    prefix = f"{drawn['model']}, " if len(arguments.model) > 1 else ""
    print(f"{prefix}k={k}, seed {seed}: {sentence(scores)}")
    domains = domain_scores(metrics, questions, answers)
    if domains:
        print(domain_table("scores", domains))
    return {**drawn, **scores, **({"domains": domains} if domains else {})}


def _notes(evaluation: Any, name: str) -> None:
    """What did not fit into the model."""
    if evaluation.left_out:
        what = f"{evaluation.left_out:,} examples did not fit into prompts and were left out"
        print(f"note: {name}: {what}", file=sys.stderr)
    if evaluation.cut:
        what = f"{evaluation.cut:,} questions did not fit and were truncated at their {evaluation.truncated}"
        print(f"note: {name}: {what}", file=sys.stderr)


def _report(arguments: argparse.Namespace, folder: Path, rows: list[dict[str, Any]], examples: int) -> None:
    """metrics.json, the table and the curves."""
    from fasttfm._atomic_files import write_json, write_text
    from fasttfm.tasks.experiments.lab import csv_text, table

    names = [name for name in rows[0] if name not in ("model", "k", "seed", "domains")]
    curve = [
        _mean([row for row in rows if (row["model"], row["k"]) == key], names)
        for key in dict.fromkeys((row["model"], row["k"]) for row in rows)
    ]
    settings = {key: value for key, value in vars(arguments).items() if key not in ("refuse", "command")}
    settings = {key: _plain(value) for key, value in settings.items()}
    write_json(folder / "metrics.json", {"curve": curve, "runs": rows, "examples": examples, "settings": settings})
    write_text(folder / "table.csv", csv_text(curve))
    several = any(row[f"{name}_deviation"] for row in curve for name in names)
    shown = [{key: value for key, value in row.items() if several or not key.endswith("_deviation")} for row in curve]
    print(f"\n{table(shown)}\n")
    files = ["metrics.json", "table.csv", "answers.jsonl"]
    if len(curve) > 1:
        try:
            draw_shots(folder / "curve.png", curve, names, f"{arguments.task}: {arguments.data[0].name}")
            files.append("curve.png")
        except ImportError as error:
            print(f"note: {error}", file=sys.stderr)
    print(f"{', '.join(files)}: {folder}")


def _mean(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The mean and the deviation of each score over the seeds of a model's K."""
    mean = {name: rows[0][name] for name in ("model", "k")}
    for name in names:
        values = [row[name] for row in rows]
        mean[name] = statistics.fmean(values)
        mean[f"{name}_deviation"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return mean


def _plain(value: Any) -> Any:
    """A value of an option as JSON has it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def draw_shots(path: Path, curve: list[dict[str, Any]], names: list[str], title: str) -> None:
    """A panel for each score over the number of examples: a curve for each model, with its deviation over seeds."""
    from fasttfm import _extras
    from fasttfm._fonts import fonts_for

    try:
        import matplotlib
    except ImportError:
        raise _extras.missing("the picture of the curve", "matplotlib", "train") from None
    matplotlib.use("Agg")
    with fonts_for((title, *names, *(str(row["model"]) for row in curve))):
        _draw_shots(path, curve, names, title)


def _draw_shots(path: Path, curve: list[dict[str, Any]], names: list[str], title: str) -> None:
    from matplotlib import pyplot

    from fasttfm._atomic_files import atomic_write

    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    size = (4.2 * columns, 3.4 * rows)
    figure, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    points = sorted({row["k"] for row in curve})
    models = list(dict.fromkeys(row["model"] for row in curve))
    for panel, name in zip(grid.flat, names, strict=False):
        for model in models:
            of_model = [row for row in curve if row["model"] == model]
            deviations = [row[f"{name}_deviation"] for row in of_model]
            panel.errorbar(
                [row["k"] for row in of_model],
                [row[name] for row in of_model],
                deviations,
                marker="o",
                capsize=3,
                label=model,
            )
        panel.set_title(name.replace("_", " "))
        panel.set_xlabel("examples in the prompt (k)")
        panel.set_xscale("symlog", base=2, linthresh=1)
        panel.set_xticks(points, [str(point) for point in points])
        panel.minorticks_off()
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    for panel in list(grid.flat)[len(names) :]:
        panel.set_visible(False)
    if len(models) > 1:
        grid.flat[0].legend(frameon=False)
    figure.suptitle(title if len(models) > 1 else f"{models[0]}, {title}")
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
