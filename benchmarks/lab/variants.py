"""Builds, checks and times variants of a CUDA kernel: ``python benchmarks/lab/variants.py --help`` on a GPU.

    python benchmarks/lab/variants.py --op attention --cases 4x4096x16x64 base= without_turns=-DLAB_WITHOUT_TURNS

A variant is a name and the macros that its build defines; write the change as ``#ifdef LAB_...`` in the kernel. Every
variant is a build of the whole package in a folder of its own, compiled as the wheel is. The op's GPU tests run on each
build in a process with a time limit, for kernels that hang. ``fasttfm bench`` times those that pass, in turns, so that
they run at the same clock rates. The table has the median over the rounds of each call's device time.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Call = tuple[str, str, str]  # case, dtype and direction
Times = Mapping[Call, float]  # device times, ms


def variant(text: str) -> tuple[str, str]:
    """The name and the macros of NAME=-DMACRO."""
    name, sign, macros = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=MACROS, as in base= or faster=-DLAB_FASTER, got {text!r}")
    return name, macros


def build(folder: Path, macros: str) -> str:
    """Builds the package under ``folder``; returns the compiler's output if that failed, else an empty string."""
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", folder, "--build-lib", folder / "lib"]
    environment = {**os.environ, "CUDAFLAGS": macros, "FASTTFM_CUDA": "ON", "FASTTFM_CUDA_ARCHS": "90a"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return "" if result.returncode == 0 else (result.stdout + result.stderr)[-3000:]


def on(folder: Path, arguments: list[str], seconds: float) -> tuple[bool, str]:
    """Runs Python with the build of ``folder``; whether it succeeded within the time limit, and its output."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "lib")}
    command = [sys.executable, *arguments]
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False, f"no answer in {seconds:.0f} s"
    return result.returncode == 0, result.stdout + result.stderr


def check(folder: Path, op: str, select: str, seconds: float) -> str:
    """The output of the op's tests if they failed, else an empty string."""
    tests = ["-m", "pytest", "-q", "-x", "-m", "gpu", f"tests/ops/test_{op}.py", *(["-k", select] if select else [])]
    good, printed = on(folder, tests, seconds)
    return "" if good else printed[-2000:]


def time_once(folder: Path, op: str, cases: str, seconds: float) -> Times:
    with tempfile.TemporaryDirectory() as output:
        options = ["--ops", op, "--contenders", "fasttfm", "--output", output, *(["--cases", cases] if cases else [])]
        good, printed = on(folder, ["-m", "fasttfm", "bench", *options], seconds)
        if not good:
            sys.exit(printed[-2000:])
        (table,) = Path(output).glob("*.csv")
        return times_of(table.read_text().splitlines())


def times_of(lines: Iterable[str]) -> Times:
    """The device times in the lines of a CSV file of ``fasttfm bench``."""
    rows = [row for row in csv.DictReader(lines) if row["gpu_ms"]]
    return {(row["case"], row["dtype"], row["direction"]): float(row["gpu_ms"]) for row in rows}


def table(rounds: Mapping[str, list[Times]]) -> str:
    """Median times of every call, a column for each variant, and the ratio of the first variant to the others."""
    names = list(rounds)
    lines = [" | ".join(["call", *names])]
    for call in rounds[names[0]][0]:
        medians = [statistics.median(times[call] for times in rounds[name]) for name in names]
        cells = [f"{ms:.4f} ms ({medians[0] / ms:.3f}x)" for ms in medians]
        lines.append(" | ".join([" ".join(call), *cells]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=variant, metavar="NAME=MACROS", help="the first is compared with")
    parser.add_argument("--op", required=True)
    parser.add_argument("--cases", default="", help="of the op's benchmark, by name; default: all")
    parser.add_argument("--tests", default="", help="pytest's -k; default: all GPU tests of the op")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a process")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "lab")
    arguments = parser.parse_args()

    right = []
    for name, macros in arguments.variants:
        folder = arguments.work / name
        wrong = build(folder, macros) or check(folder, arguments.op, arguments.tests, arguments.seconds)
        print(f"{name}: {wrong or 'right'}", flush=True)
        if not wrong:
            right.append(name)
    if not right:
        sys.exit("no variant is right")
    rounds: dict[str, list[Times]] = {name: [] for name in right}
    for _ in range(arguments.rounds):
        for name in right:
            rounds[name].append(time_once(arguments.work / name, arguments.op, arguments.cases, arguments.seconds))
    print(table(rounds))


if __name__ == "__main__":
    main()
