"""Fine-tunes a checkpoint on the shipped samples in FP8 and in bf16, and compares the scores.

    fasttfm pretrain bert --size small --objective mlm --steps 3000 --tokens-per-step 8192 --cuda-graph --output run
    python benchmarks/fp8_scores.py --model run/latest --tasks classify pair tag qa similarity --out benchmarks/results

Every score is that of one `fasttfm finetune` on the dev set of a shipped sample. The samples are small, so the seeds of
one precision differ: FP8 is as good as bf16 if the means differ by no more than the seeds do. Writes one row per run.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from fasttfm.bench.timing import file_stem

PRECISIONS = ("bfloat16", "fp8")
FIELDS = ("task", "precision", "seed", "score", "value", "majority", "dev_examples")


class Run(NamedTuple):
    task: str
    precision: str
    seed: int


def score(run: Run, arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Fine-tunes in a process of its own and returns the row of the task's first score."""
    output = folder / "-".join(map(str, run))
    command = [sys.executable, "-m", "fasttfm", "finetune", "--task", run.task, "--model", str(arguments.model)]
    command += ["--precision", run.precision, "--seed", str(run.seed), "--epochs", str(arguments.epochs)]
    finished = subprocess.run([*command, "--output", str(output), "--quiet"], capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {finished.returncode}: {finished.stderr[-2000:]}")
    metrics = json.loads((output / "metrics.json").read_text())
    name, value = next(iter(metrics["dev"].items()))
    majority = round(metrics["majority"][name], 4) if "majority" in metrics else ""
    return dict(zip(FIELDS, (*run, name, round(value, 4), majority, metrics["examples"]["dev"]), strict=True))


def report(rows: list[dict[str, object]]) -> None:
    for task in dict.fromkeys(row["task"] for row in rows):
        for precision in PRECISIONS:
            matching = [row for row in rows if (row["task"], row["precision"]) == (task, precision)]
            values = [float(str(row["value"])) for row in matching]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            listed = " ".join(f"{value:.3f}" for value in values)
            print(f"{task:10s} {precision:8s} {matching[0]['score']}: mean {statistics.mean(values):.3f}, ", end="")
            print(f"standard deviation {spread:.3f} ({listed}), majority {matching[0]['majority']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--tasks", nargs="+", required=True, help="of `fasttfm finetune`, with a shipped sample")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=8, help="runs at the same time")
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    arguments = parser.parse_args()
    runs = [
        Run(task, precision, seed) for task in arguments.tasks for precision in PRECISIONS for seed in arguments.seeds
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(lambda run: score(run, arguments, Path(folder)), runs))
    report(rows)
    if arguments.out is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with (arguments.out / f"{file_stem(device)}-fp8_scores.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
