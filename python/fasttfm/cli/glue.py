"""``fasttfm glue``: fine-tunes a model on all tasks of GLUE, and writes its scores and the files for the leaderboard.

  fasttfm glue --model bert-base --data glue_data/                        all tasks in glue_data
  fasttfm glue --model bert-base --data glue_data/ --tasks RTE MRPC --epochs 5
  fasttfm glue --model bert-base --data glue_data/ --search 5e-5,4e-5,3e-5,2e-5     the best on each dev set, as BERT
  fasttfm glue --model bert-base --data glue_data/ --tasks RTE MRPC --restarts 5
  fasttfm glue --model bert-base --data glue_data/ --output run --resume  only the missing tasks

--data contains one folder per task, as downloaded: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, QNLI, RTE, WNLI, and diagnostic
or AX. The output directory contains glue.json, glue.csv, glue.png, a log for each task and, in submission/, the
predictions for the test sets (CoLA.tsv, MNLI-m.tsv, AX.tsv, ...); upload them to the leaderboard as a zip file.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
from pathlib import Path
from typing import Any

from fasttfm._atomic_files import atomic_write, write_json, write_text
from fasttfm.cli.options import (
    MODEL_HELP,
    Formatter,
    add_run_options,
    add_training_options,
    add_trial_options,
    check_epochs,
    check_output,
    check_trials,
    device_of,
    exit_on_user_error,
    output_of,
    sentence,
    settings_of,
)

_RESULTS = "glue.json"


def add_parser(subparsers: Any) -> None:
    """Adds the ``glue`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "glue", help="fine-tune a model on all tasks of GLUE", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="directory with one folder per task")
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="NAME", help="only these tasks (default: all that --data contains)"
    )
    parser.add_argument("--max-length", type=int, metavar="N", help="max tokens per sequence (default: 128)")
    training = add_training_options(
        parser,
        rate=None,
        about_rate="peak learning rate (default: 5e-5 for a width of 768, higher for narrower models)",
    )
    training.add_argument("--epochs", type=int, default=3, metavar="N", help="epochs of each task")
    training.add_argument("--batch-size", type=int, default=32, metavar="N", help="examples per batch")
    add_trial_options(parser.add_argument_group("several runs", "of each task, whose best one on the dev set is kept"))
    parser.add_argument("--save-models", action="store_true", help="save the model of each task")
    parser.add_argument("--resume", action="store_true", help="train only the tasks without scores in --output")
    add_run_options(parser)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        from fasttfm.tasks.glue import GLUE, find_tasks
        from fasttfm.tasks.trials import plan
        from fasttfm.train.settings import random_seed

        check_epochs(arguments.epochs)
        check_trials(arguments)
        plan(arguments.search or [0.0], arguments.seed, arguments.restarts)  # raises for a wrong number
        random_seed(arguments.seed)
        folders = find_tasks(arguments.data, arguments.tasks)
        results = _earlier(arguments)
        if not results:
            check_output(arguments, model=arguments.model, data=arguments.data)
        output = output_of(arguments, "glue")
        left = [task for task in GLUE if task.name in folders and task.name not in results]
        print(f"{len(folders)} of GLUE's {len(GLUE)} tasks in {arguments.data}: {', '.join(folders)}")
        for task in left:
            results[task.name] = _train(arguments, task, folders[task.name], output)
            write_json(output / _RESULTS, {"model": str(arguments.model), "tasks": results})
            print(f"{task.name}: {sentence(_flat(results[task.name]))}, {results[task.name]['seconds']:.0f} s")
            _print_trials(results[task.name].get("trials", []))
        ordered = {task.name: results[task.name] for task in GLUE if task.name in results}
        _write(output, arguments, ordered)
    return 0


def _earlier(arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of a run that is resumed, by task."""
    if not arguments.resume:
        return {}
    if arguments.output is None:
        raise ValueError("--resume: expected --output, the directory of the run to resume")
    path = arguments.output / _RESULTS
    if not path.is_file():
        raise ValueError(f"--resume: expected a run in {arguments.output}, got no {_RESULTS} there")
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        tasks = dict(earlier["tasks"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected what fasttfm glue wrote, got {error}") from None
    if earlier["model"] != str(arguments.model):
        raise ValueError(f"--model: expected that of the run, {earlier['model']}, got {arguments.model}")
    return tasks


def _train(arguments: argparse.Namespace, glue_task: Any, folder: Path, output: Path) -> dict[str, Any]:
    from fasttfm.tasks.glue import train_task
    from fasttfm.tasks.rates import default_rate
    from fasttfm.tasks.trials import Trial, plan
    from fasttfm.train.logs import RunLog
    from fasttfm.train.progress import Progress

    device = device_of(arguments)

    def settings(model: Any) -> list[Any]:
        rate = default_rate(model) if arguments.learning_rate is None else arguments.learning_rate
        sizes = {"epochs": arguments.epochs, "batch_size": arguments.batch_size}
        planned = plan(arguments.search or [rate], arguments.seed, arguments.restarts)
        return [settings_of(arguments, device, trial.rate, seed=trial.seed, **sizes) for trial in planned]

    logs: list[RunLog] = []
    several = arguments.restarts > 1 or len(arguments.search or ()) > 1

    def watch(work: Any) -> Any:
        trial = Trial(work.settings.rates.rate, work.settings.seed)
        directory = output / glue_task.name / trial.name if several else output / glue_task.name
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{glue_task.name} {trial.name}" if several else glue_task.name
        progress = None if arguments.quiet else Progress(work.steps)
        if progress is not None:
            progress.note(f"{name}: {work.steps} steps" + (f"; {work.truncation}" if work.truncation else ""))
        for log in logs:
            log.close()
        logs[:] = [RunLog(directory, (glue_task.task,), steps=work.steps, progress=progress)]
        return logs[0].add

    begun = time.perf_counter()
    try:
        result = train_task(
            glue_task,
            folder,
            arguments.model,
            settings,
            seed=arguments.seed,
            device=device,
            max_length=arguments.max_length,
            output=output / glue_task.name if arguments.save_models else None,
            watch=watch,
        )
    finally:
        for log in logs:
            log.close()
    for name, text in result.submission.items():
        (output / "submission").mkdir(exist_ok=True)
        write_text(output / "submission" / name, text)
    seconds = round(time.perf_counter() - begun, 1)
    trials = {"trials": result.trials} if several else {}
    return {"score": result.score, "dev": result.dev, "examples": result.examples, "seconds": seconds, **trials}


def _print_trials(trials: list[dict[str, float]]) -> None:
    """The score of each training of a task; * marks the one that is kept."""
    from fasttfm.tasks.trials import best

    kept = best([trial["score"] for trial in trials]) if trials else None
    for number, trial in enumerate(trials):
        mark = "*" if number == kept else " "
        print(f"  {mark} learning rate {trial['learning_rate']:g}, seed {trial['seed']}: score {trial['score']:.3f}")


def _flat(result: dict[str, Any]) -> dict[str, float]:
    """The measures of a task on one level; MNLI has two dev sets."""
    several = len(result["dev"]) > 1
    return {
        f"{name} {measure}" if several else measure: value
        for name, scores in result["dev"].items()
        for measure, value in scores.items()
    }


def _write(output: Path, arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """The table, the picture and a few lines about them."""
    from fasttfm.tasks.glue import GLUE, mean

    rows = [
        (name, measure, f"{value:.4f}", result["examples"], result["seconds"])
        for name, result in results.items()
        for measure, value in _flat(result).items()
    ]
    average = mean([result["score"] for result in results.values()])
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("task", "measure", "score", "training_examples", "seconds"))
    writer.writerows([*rows, ("average", "score", f"{average:.4f}", "", "")])
    write_text(output / "glue.csv", table.getvalue())
    write_json(output / _RESULTS, {"model": str(arguments.model), "tasks": results, "average": average})
    width = max(len(name) for name in (*results, "average"))
    print("\ntask".ljust(width + 3) + "score  measures")
    for name, result in results.items():
        measures = ", ".join(f"{measure} {100 * value:.1f}" for measure, value in _flat(result).items())
        print(f"{name.ljust(width)}  {100 * result['score']:5.1f}  {measures}")
    missing = [task.name for task in GLUE if task.name not in results]
    note = f", without {', '.join(missing)}" if missing else ""
    print(f"{'average'.ljust(width)}  {100 * average:5.1f}  of {len(results)} tasks{note}")
    _draw(output / "glue.png", {**{name: result["score"] for name, result in results.items()}, "average": average})
    print(f"output     {output}")


def _draw(path: Path, scores: dict[str, float]) -> None:
    """Bars of the tasks' scores; without matplotlib a note."""
    import sys

    try:
        import matplotlib
    except ImportError:
        print("note: glue.png needs matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 0.4 * len(scores) + 1.2))
    names, values = list(scores), [100 * value for value in scores.values()]
    colors = ["tab:gray" if name == "average" else "tab:blue" for name in names]
    bars = panel.barh(names, values, color=colors)
    panel.bar_label(bars, fmt="%.1f", padding=3)
    panel.invert_yaxis()
    panel.set_xlim(min(0.0, *values), 105)
    panel.set_xlabel("score on the dev set")
    panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    pyplot.close(figure)
