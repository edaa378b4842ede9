"""Runs a session at its full rate with random lengths and batch sizes, and monitors memory, captures and latencies.

    python benchmarks/inference_soak.py --minutes 3
    python benchmarks/inference_soak.py --device cpu --size tiny --minutes 20 --out benchmarks/results

Half of the calls are ``encode`` with 1 to 64 sequences of 1 to 512 ids, half are single requests of ``submit`` from
several threads. A line is printed every ten seconds. The run fails (exit code 1) if memory grows by more than 1% after
the first third, or if in the last two thirds more than one in a hundred calls captures a graph. ``--out`` writes a row
for each kind of call to the machine's CSV file, which replaces the rows of the same model.
"""

from __future__ import annotations

import argparse
import csv
import resource
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fasttfm import __version__
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.inference import Session
from fasttfm.models import BertConfig, BertModel

_THREADS = 4
_LINE_SECONDS = 10.0


class Soak:
    """The calls, their latencies and errors."""

    def __init__(self, session: Session, vocabulary: int, longest: int) -> None:
        self.session, self.vocabulary, self.longest = session, vocabulary, longest
        self.latencies: dict[str, list[float]] = {"encode": [], "submit": []}
        self.errors: list[BaseException] = []
        self.stopped = threading.Event()

    def ids(self, generator: np.random.Generator) -> list[int]:
        length = int(np.exp(generator.uniform(0, np.log(self.longest))))
        return generator.integers(1, self.vocabulary, max(1, length)).tolist()

    def encode(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._repeat(
            "encode", lambda: self.session.encode([self.ids(generator) for _ in range(generator.integers(1, 65))])
        )

    def submit(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._repeat("submit", lambda: self.session.submit(self.ids(generator)).result(60))

    def _repeat(self, kind: str, call: Any) -> None:
        try:
            while not self.stopped.is_set():
                begun = time.perf_counter()
                if not np.isfinite(call()).all():
                    raise FloatingPointError(f"{kind}: a result is not finite")
                self.latencies[kind].append(time.perf_counter() - begun)
        except BaseException as error:
            self.errors.append(error)
            self.stopped.set()

    def bytes(self) -> int:
        if self.session.device.type == "cuda":
            return int(torch.cuda.memory_reserved())
        return resident()

    def line(self, since: dict[str, int], seconds: float) -> str:
        parts = [f"{self.bytes() / 2**20:,.0f} MiB", f"{self.session.graph_counts.captured} captures"]
        for kind, latencies in self.latencies.items():
            new = latencies[since[kind] :]
            if new:
                p50, p99 = np.percentile(new, [50, 99]) * 1e3
                parts.append(f"{kind} {len(new) / seconds:,.0f}/s p50 {p50:.2f} p99 {p99:.2f} ms")
        return ", ".join(parts)


def resident() -> int:
    """Resident memory of this process, in bytes."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # without /proc: the peak so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(soak: Soak, seconds: float) -> list[tuple[float, int, int, int]]:
    """Samples of (second, bytes, captures, calls)."""
    workers = [threading.Thread(target=soak.submit, args=(number,)) for number in range(1, _THREADS + 1)]
    workers.append(threading.Thread(target=soak.encode, args=(0,)))
    begun = said = time.perf_counter()
    for worker in workers:
        worker.start()
    samples: list[tuple[float, int, int, int]] = []
    since = {"encode": 0, "submit": 0}
    while not soak.stopped.wait(1.0):
        now = time.perf_counter()
        calls = sum(map(len, soak.latencies.values()))
        samples.append((now - begun, soak.bytes(), soak.session.graph_counts.captured, calls))
        if now - said >= _LINE_SECONDS:
            print(f"{now - begun:5.0f} s: {soak.line(since, now - said)}", flush=True)
            since, said = {kind: len(each) for kind, each in soak.latencies.items()}, now
        if now - begun >= seconds:
            soak.stopped.set()
    for worker in workers:
        worker.join()
    return samples


def report(soak: Soak, samples: list[tuple[float, int, int, int]]) -> tuple[bool, list[dict[str, Any]]]:
    """Prints the result. Returns whether the run passed, and its rows."""
    if soak.errors:
        print(f"failed: {soak.errors[0]!r}")
        return False, []
    rows = []
    for kind, latencies in soak.latencies.items():
        p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
        print(f"{kind}: {len(latencies):,} calls, p50 {p50:.3f} ms, p99 {p99:.3f} ms, p99 / p50 {p99 / p50:.1f}")
        rows.append({"kind": kind, "calls": len(latencies), "ms_p50": round(p50, 3), "ms_p99": round(p99, 3)})
    counts, graphs = soak.session.counts, soak.session.graph_counts
    print(f"{counts.tokens:,} tokens in {counts.batches:,} batches")
    print(f"{graphs.captured} captures, {graphs.evicted} evicted, {graphs.replayed:,} replays")
    third = max(1, len(samples) // 3)
    before = statistics.median(each[1] for each in samples[third : 2 * third] or samples)
    after = statistics.median(each[1] for each in samples[2 * third :] or samples)
    growth = after / before - 1
    captures = samples[-1][2] - samples[third - 1][2]
    calls = samples[-1][3] - samples[third - 1][3]
    print(f"memory {before / 2**20:,.0f} MiB, then {after / 2**20:,.0f} MiB ({growth:+.2%})")
    print(f"captures after the first third: {captures} in {calls:,} calls")
    memory = {"mib_second_third": round(before / 2**20, 1), "mib_last_third": round(after / 2**20, 1)}
    shared = {**memory, "captures": graphs.captured, "tokens": counts.tokens, "minutes": round(samples[-1][0] / 60, 1)}
    return growth <= 0.01 and captures <= max(1, calls // 100), [{**row, **shared} for row in rows]


def write(rows: list[dict[str, Any]], session: Session, model: str, folder: Path) -> None:
    """Replaces the rows of the same model in the machine's file."""
    path = folder / f"{file_stem(session.device)}-soak.csv"
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if session.device.type == "cpu" else ""
    fixed = {
        "model": model,
        "device": device_name(session.device) + threads,
        "torch_version": torch.__version__,
        "fasttfm_version": __version__,
    }
    rows = [{**row, **fixed} for row in rows]
    if path.is_file():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] != model] + rows
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="base", choices=sorted(BertConfig.sizes), help="of BERT")
    parser.add_argument("--out", type=Path, help="a folder for the CSV file")
    settings = parser.parse_args()
    config = BertConfig.named(settings.size)
    torch.manual_seed(0)
    with Session(BertModel(config), device=settings.device) as session:
        soak = Soak(session, config.vocab_size, config.max_position_embeddings)
        good, rows = report(soak, run(soak, 60 * settings.minutes))
        if rows and settings.out is not None:
            write(rows, session, f"bert-{settings.size}", settings.out)
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
