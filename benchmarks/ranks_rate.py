"""Times pre-training on one and on two ranks with one thread each: tokens per second, and their ratios to one rank.

    python benchmarks/ranks_rate.py --out benchmarks/results
    python benchmarks/ranks_rate.py --cases "1 rank" "2 ranks, ddp" --steps 9 --runs 2    about three minutes

Every run is `fasttfm pretrain` under torchrun on the CPU with as many tokens and batches per step, which the ranks
divide; gloo adds up the gradients. A run has one core for each rank. "2 processes" are two runs of one rank at the same
time, each on a core of its own, which send each other nothing: what two cores of the machine give at most. Runs of all
cases alternate. The exit status is 1 if two ranks of DDP have less than 1.75 times the rate of one.

Ranks wait for each other in every step, so another process on the machine costs two ranks a third of their rate, and
one rank, next to which a core is free, nothing. Every run prints how many cores other processes have used meanwhile; a
ratio says something about the ranks only if that is close to 0. --out keeps the file's rows of other numbers of tokens.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm import __version__, data
from fasttfm.bench.timing import device_name, file_stem, percentiles
from fasttfm.train.logs import read_rows

LEAST_RATIO = 1.75


class Case(NamedTuple):
    ranks: int = 1
    launches: int = 1  # runs at the same time
    options: tuple[str, ...] = ()


CASES = {
    "1 rank": Case(),
    "2 processes": Case(launches=2),
    "2 ranks, ddp": Case(2),
    "2 ranks, ddp, sharded optimizer": Case(2, options=("--shard-optimizer",)),
    "2 ranks, fsdp": Case(2, options=("--parallel", "fsdp")),
}
COLUMNS = (
    *("case", "model", "tokens_per_step", "batches_per_step", "tokens_per_s_p20", "tokens_per_s_p50"),
    *("tokens_per_s_p80", "ratio", "runs", "steps", "device", "other_cores", "torch_version", "fasttfm_version"),
)


class Run(NamedTuple):
    tokens_per_s: float
    other_cores: float  # which processes of others have used meanwhile


def timed(case: Case, arguments: argparse.Namespace, folder: Path) -> Run:
    """A run, without its first steps; the rates of several at the same time are added up."""
    outputs = [folder / f"run-{number}" for number in range(case.launches)]
    commands = [command(case, arguments, folder, output) for output in outputs]
    cores = sorted(os.sched_getaffinity(0))
    launched, start, busy, own = [], time.perf_counter(), busy_seconds(cores), own_seconds()
    for number, call in enumerate(commands):
        first = number * case.ranks
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores[first : first + case.ranks]))]
        launched.append(subprocess.Popen([*pinned, *call], stdout=subprocess.DEVNULL))
    statuses = [process.wait() for process in launched]
    if any(statuses):
        raise SystemExit(f"{case}: expected runs that end with status 0, got {statuses}")
    others = (busy_seconds(cores) - busy) - (own_seconds() - own)
    return Run(sum(map(rate_of, outputs)), max(0.0, others) / (time.perf_counter() - start))


def busy_seconds(cores: list[int]) -> float:
    """The processor time of everything that has run on these cores, with that of other virtual machines."""
    lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
    names = {f"cpu{core}" for core in cores}
    ticks = sum(sum(map(int, [*line[1:4], *line[6:9]])) for line in lines if line[0] in names)  # not idle or iowait
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """The processor time of this process and of all that it has started and that have ended."""
    return sum(os.times()[:4])


def command(case: Case, arguments: argparse.Namespace, folder: Path, output: Path) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m", "fasttfm"]
    numbers = {
        "--steps": arguments.steps,
        "--tokens-per-step": arguments.tokens,
        "--batches-per-step": arguments.batches,
        "--max-length": 128,
        "--checkpoint-every": arguments.steps,
        "--evaluate-every": arguments.steps,
        "--evaluation-batches": 2,
        "--log-every": 1,
        "--tokenizer": folder / "tokenizer",
        "--prepared": folder / "shards",
        "--output": output,
    }
    model = ["pretrain", "bert", "--size", "tiny", "--set", *arguments.set, "--device", "cpu", "--no-compare"]
    options = [str(part) for pair in numbers.items() for part in pair]
    return [sys.executable, *launcher, *model, *options, *case.options, "--overwrite", "--quiet"]


def rate_of(output: Path) -> float:
    """From the rows of the log: the first third of the steps warms up."""
    rows = read_rows(output / "log.csv")
    first, last = rows[len(rows) // 3], rows[-1]
    tokens = int(last["tokens"]) - int(first["tokens"])
    return tokens / (float(last["seconds"]) - float(first["seconds"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="case", help=", ".join(CASES))
    sizes = ["hidden_size=256", "num_hidden_layers=4", "num_attention_heads=4", "intermediate_size=1024"]
    parser.add_argument("--set", nargs="+", default=sizes, help="fields of the model's configuration")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--batches", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    needed = max(CASES[case].ranks * CASES[case].launches for case in arguments.cases)
    if cores < needed:
        raise SystemExit(f"ranks_rate: expected {needed} cores, one for each rank, got {cores}")
    os.environ["OMP_NUM_THREADS"] = "1"
    runs: dict[str, list[Run]] = {case: [] for case in arguments.cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = data.train_tokenizer("wordpiece", data.read_documents(data.shipped_corpus()), 8192)
        tokenizer.save(folder / "tokenizer")
        data.prepare(
            data.shipped_corpus(), data.load_tokenizer(folder / "tokenizer"), folder / "shards", progress=False
        )
        for _ in range(arguments.runs):
            for case, measured in runs.items():
                measured.append(run := timed(CASES[case], arguments, folder))
                print(f"{case}: {run.tokens_per_s:,.0f} tokens/s; others: {run.other_cores:.2f} cores", flush=True)
    rows = rows_of(runs, arguments)
    print(f"{arguments.tokens:,} tokens in {arguments.batches} batches per step; {' '.join(arguments.set)}")
    for row in rows:
        print(f"{row['case']:32} {row['tokens_per_s_p50']:10,} tokens/s  {row['ratio']}")
    if arguments.out:
        write(arguments.out / f"{file_stem(torch.device('cpu'))}-ranks.csv", rows)
    ratios = {row["case"]: float(row["ratio"] or LEAST_RATIO) for row in rows}
    return int(ratios.get("2 ranks, ddp", LEAST_RATIO) < LEAST_RATIO)


def rows_of(runs: dict[str, list[Run]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rates = {case: [run.tokens_per_s for run in measured] for case, measured in runs.items()}
    one = statistics.median(rates["1 rank"]) if "1 rank" in rates else None
    model = f"bert {' '.join(arguments.set)}"
    rows = []
    for case, measured in rates.items():
        ratio = "" if one is None else f"{statistics.median(measured) / one:.3f}"
        others = f"{max(run.other_cores for run in runs[case]):.2f}"
        about = (arguments.runs, arguments.steps, device_name(torch.device("cpu")), others)
        what = (case, model, arguments.tokens, arguments.batches, *map(round, percentiles(measured)), ratio)
        rows.append(dict(zip(COLUMNS, (*what, *about, torch.__version__, __version__), strict=True)))
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, and keeps those of the file with other numbers of tokens."""
    before = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
    measured = {str(row["tokens_per_step"]) for row in rows}
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*(row for row in before if row["tokens_per_step"] not in measured), *rows])
    print(f"rows: {path}")


if __name__ == "__main__":
    raise SystemExit(main())
