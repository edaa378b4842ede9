"""Times pre-training on one and on two ranks with one thread each: tokens per second, and their ratios to one rank.

    python benchmarks/ranks_rate.py --out benchmarks/results
    python benchmarks/ranks_rate.py --cases "1 rank" "2 ranks, ddp" --steps 9 --runs 2    about three minutes

Every run is `fasttfm pretrain` under torchrun on the CPU with as many tokens and batches per step, which the ranks
divide; gloo adds up the gradients. A run has one core for each rank. "2 processes" are two runs of one rank at the same
time, each on a core of its own, which send each other nothing: what two cores of the machine give at most. Runs of all
cases alternate, so that other load on the machine affects all of them. The exit status is 1 if two ranks of DDP have
less than 1.75 times the rate of one.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

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
    *("tokens_per_s_p80", "ratio", "runs", "steps", "device", "load", "torch_version", "fasttfm_version"),
)


def rate(case: Case, arguments: argparse.Namespace, folder: Path) -> float:
    """Tokens per second of a run, without its first steps; of several at the same time their sum."""
    outputs = [folder / f"run-{number}" for number in range(case.launches)]
    commands = [command(case, arguments, folder, output) for output in outputs]
    cores = sorted(os.sched_getaffinity(0))
    launched = []
    for number, call in enumerate(commands):
        first = number * case.ranks
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores[first : first + case.ranks]))]
        launched.append(subprocess.Popen([*pinned, *call], stdout=subprocess.DEVNULL))
    statuses = [process.wait() for process in launched]
    if any(statuses):
        raise SystemExit(f"{case}: expected runs that end with status 0, got {statuses}")
    return sum(map(rate_of, outputs))


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
    load = os.getloadavg()[0]
    rates: dict[str, list[float]] = {case: [] for case in arguments.cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = data.train_tokenizer("wordpiece", data.read_documents(data.shipped_corpus()), 8192)
        tokenizer.save(folder / "tokenizer")
        data.prepare(
            data.shipped_corpus(), data.load_tokenizer(folder / "tokenizer"), folder / "shards", progress=False
        )
        for _ in range(arguments.runs):
            for case, measured in rates.items():
                measured.append(rate(CASES[case], arguments, folder))
                print(f"{case}: {measured[-1]:,.0f} tokens/s", flush=True)
    one = statistics.median(rates["1 rank"]) if "1 rank" in rates else None
    cpu, rows, ratios = torch.device("cpu"), [], {}
    print(f"{arguments.tokens:,} tokens in {arguments.batches} batches per step; {' '.join(arguments.set)}")
    for case, measured in rates.items():
        if one is not None:
            ratios[case] = statistics.median(measured) / one
        ratio = f"{ratios[case]:.3f}" if case in ratios else ""
        print(f"{case:32} {statistics.median(measured):10,.0f} tokens/s  {ratio}")
        about = (arguments.runs, arguments.steps, device_name(cpu), round(load, 2), torch.__version__, __version__)
        what = (case, f"bert {' '.join(arguments.set)}", arguments.tokens, arguments.batches)
        rows.append((*what, *map(round, percentiles(measured)), ratio, *about))
    if arguments.out:
        path = arguments.out / f"{file_stem(cpu)}-ranks.csv"
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        print(f"rows: {path}")
    return int(ratios.get("2 ranks, ddp", LEAST_RATIO) < LEAST_RATIO)


if __name__ == "__main__":
    raise SystemExit(main())
