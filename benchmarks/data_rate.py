"""Times the data pipeline: tokens per second of packed batches, by objective, masking and number of workers.

    python benchmarks/data_rate.py --out benchmarks/results

The corpus is the shipped one, repeated indefinitely; the batches are read and discarded. Runs of all settings
alternate, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch

from fasttfm import __version__, data
from fasttfm.bench.timing import device_name, file_stem

CASES = {
    "nsp": (data.SequenceFormat("nsp", 128), data.Masking()),
    "nsp 512": (data.SequenceFormat("nsp", 512), data.Masking()),
    "sop, n-grams of words": (data.SequenceFormat("sop", 128), data.Masking(whole_word=True, ngram=3)),
    "single": (data.SequenceFormat("single", 128), data.Masking()),
    "single, whole words": (data.SequenceFormat("single", 128), data.Masking(whole_word=True)),
    "electra": (data.SequenceFormat("electra", 128), data.Masking(mask_share=1, random_share=0)),
    "causal": (data.SequenceFormat("causal", 128), None),
}
COLUMNS = (
    *("case", "max_length", "workers", "tokens_per_batch", "tokens_per_s_p20", "tokens_per_s_p50", "tokens_per_s_p80"),
    *("full", "runs", "seconds", "device", "load", "torch_version", "fasttfm_version"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="case", help=", ".join(CASES))
    parser.add_argument("--workers", nargs="*", type=int, default=[0, 4])
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=4, help="duration of a run, after one of warmup")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    settings = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # four workers on two cores are intended

    keys = [(case, workers) for case in settings.cases for workers in settings.workers]
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in keys}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = data.train_tokenizer("wordpiece", data.read_documents(data.shipped_corpus()), 8192)
        shards = data.prepare(data.shipped_corpus(), tokenizer, folder, progress=False)
        print(f"{shards.tokens:,} tokens, {shards.documents} documents; load before the runs {load:.2f}", flush=True)
        for _ in range(settings.runs):
            for key in keys:
                rates[key].append(measure(shards, key, settings.tokens_per_batch, settings.seconds))
    rows = []
    for (case, workers), measured in rates.items():
        p20, p50, p80 = quantiles([rate for rate, _ in measured])
        full = statistics.mean(share for _, share in measured)
        print(f"{case:24} {workers} workers: {p50 / 1e6:6.2f} million tokens/s, {full:.1%} full")
        what = (case, CASES[case][0].max_length, workers, settings.tokens_per_batch)
        how = (settings.runs, settings.seconds, device_name(torch.device("cpu")), round(load, 2))
        rates_found = (round(p20), round(p50), round(p80), round(full, 4))
        rows.append((*what, *rates_found, *how, torch.__version__, __version__))
    if settings.out:
        path = settings.out / f"{file_stem(torch.device('cpu'))}-data.csv"
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        print(f"rows: {path}")
    return 0


def measure(
    shards: data.TokenShards, key: tuple[str, int], tokens_per_batch: int, seconds: float
) -> tuple[float, float]:
    """Tokens per second, and the mean fill of the batches."""
    objective, masking = CASES[key[0]]
    stream = data.BatchStream(shards, objective, masking, tokens_per_batch=tokens_per_batch, seed=0, workers=key[1])
    batches = iter(stream)
    until = time.perf_counter() + 1
    while time.perf_counter() < until:
        next(batches)
    tokens = count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        tokens += next(batches).tokens
        count += 1
    return tokens / elapsed, tokens / count / tokens_per_batch


def quantiles(values: list[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    p20, p50, p80 = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.5, 0.8))
    return p20, p50, p80


if __name__ == "__main__":
    raise SystemExit(main())
