"""Times streams of shards: tokens per second of packed batches, by the kind of file and the number of workers, next to
a training step of this machine.

    python benchmarks/streamed_rate.py --out benchmarks/results

The files have the shipped corpus, repeated; batches are read and discarded. With --address the files are written to and
read from there, for example s3://bucket/folder. The training step is BERT's of the given size on batches of the stream,
which are made before: a pipeline with a higher rate does not slow it down.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import itertools
import json
import os
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch

from fasttfm import __version__, data
from fasttfm.bench.timing import device_name, file_stem, percentiles
from fasttfm.models import BertConfig, BertForMaskedLM
from fasttfm.models.objectives import MaskedLM
from fasttfm.train import (
    Objective,
    OptimizerSettings,
    Schedule,
    ScheduleSettings,
    StepSettings,
    Trainer,
    make_optimizer,
)

SUFFIXES = (".parquet", ".jsonl.gz", ".tar", ".npy")
COLUMNS = (
    *("case", "workers", "tokens_per_batch", "tokens_per_s_p20", "tokens_per_s_p50", "tokens_per_s_p80"),
    *("runs", "seconds", "device", "load", "torch_version", "fasttfm_version"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=list(SUFFIXES), choices=SUFFIXES)
    parser.add_argument("--workers", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--seconds", type=float, default=5, help="duration of a run, after the first window")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=32, help="of text in the files")
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=1 << 19)
    parser.add_argument("--address", help="an empty folder for the files (default: a temporary one)")
    parser.add_argument("--size", default="tiny", help="of the BERT whose step is timed (default: tiny)")
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    settings = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load = os.getloadavg()[0]
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        address = settings.address or folder
        tokenizer = data.train_tokenizer("wordpiece", data.read_documents(data.shipped_corpus()), 8192)
        write_files(address, tokenizer, settings)
        for _ in range(settings.runs):  # runs of all settings alternate
            for kind, workers in itertools.product(settings.kinds, settings.workers):
                shards = data.StreamedShards.open(f"{address}/*{kind}", tokenizer)
                rates.setdefault((kind, workers), []).append(measure(shards, workers, settings))
        step = [step_rate(f"{address}/*{settings.kinds[0]}", tokenizer, device, settings) for _ in range(settings.runs)]
    rates[f"training step of bert {settings.size}", 0] = step
    rows = []
    for (case, workers), measured in rates.items():
        p20, p50, p80 = percentiles(measured)
        print(f"{case:32} {workers} workers: {p50 / 1e6:8.3f} million tokens/s")
        where = device_name(device if case.startswith("training") else torch.device("cpu"))
        how = (settings.runs, settings.seconds, where, round(load, 2), torch.__version__, __version__)
        rows.append((case, workers, settings.tokens_per_batch, round(p20), round(p50), round(p80), *how))
    if settings.out:
        path = settings.out / f"{file_stem(device)}-streamed.csv"
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        print(f"rows: {path}")
    return 0


def write_files(address: str, tokenizer: data.Tokenizer, settings: argparse.Namespace) -> None:
    documents = list(data.read_documents(data.shipped_corpus()))
    times = max(1, round(settings.megabytes * 1e6 / sum(map(len, documents))))
    documents = [document for _ in range(times) for document in documents]
    for number in range(settings.files):
        chosen = documents[number :: settings.files]
        for kind in settings.kinds:
            with fsspec.open(f"{address}/part-{number:03d}{kind}", "wb") as file:
                file.write(contents(kind, chosen, tokenizer))


def contents(kind: str, documents: list[str], tokenizer: data.Tokenizer) -> bytes:
    out = io.BytesIO()
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), out, row_group_size=1000, compression="zstd")
    elif kind == ".jsonl.gz":
        return gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in documents).encode(), 6)
    elif kind == ".tar":
        with tarfile.open(fileobj=out, mode="w") as archive:
            for number, text in enumerate(documents):
                member = tarfile.TarInfo(f"{number:08d}.txt")
                member.size = len(content := text.encode())
                archive.addfile(member, io.BytesIO(content))
    else:
        end = [tokenizer.special.sep]
        ids = [np.array(ids + end, np.uint16) for ids in tokenizer.encode_batch(documents)]
        np.save(out, np.concatenate(ids))
    return out.getvalue()


def stream(shards: data.StreamedShards, workers: int, settings: argparse.Namespace) -> data.ShardStream:
    options: dict[str, Any] = {"tokens_per_batch": settings.tokens_per_batch, "window_tokens": settings.window_tokens}
    return data.ShardStream(shards, data.SequenceFormat("single", 128), seed=0, workers=workers, **options)


def measure(shards: data.StreamedShards, workers: int, settings: argparse.Namespace) -> float:
    """Tokens per second after the windows that are made before the first batch is read have been used."""
    position = stream(shards, workers, settings)
    batches = iter(position)
    while position.state_dict()["lanes"].get(0, [0] * 4)[3] < 2 + 2 * workers:
        next(batches)
    tokens, start, window = 0, time.perf_counter(), position.state_dict()["lanes"][0][3]
    # Whole windows, because the first batch of a window waits for all of it.
    while time.perf_counter() - start < settings.seconds or position.state_dict()["lanes"][0][3] == window:
        window = position.state_dict()["lanes"][0][3]
        tokens += next(batches).tokens
    seconds = time.perf_counter() - start
    batches.close()  # type: ignore[attr-defined]
    return tokens / seconds


def step_rate(address: str, tokenizer: data.Tokenizer, device: torch.device, settings: argparse.Namespace) -> float:
    """Tokens per second of optimizer steps whose batches are in memory."""
    batches = list(itertools.islice(stream(data.StreamedShards.open(address, tokenizer), 0, settings), 4))
    objective = MaskedLM(BertForMaskedLM(BertConfig.named(settings.size, vocab_size=tokenizer.vocab_size)).to(device))
    optimizer = make_optimizer(objective, OptimizerSettings())
    schedule = Schedule(optimizer, ScheduleSettings(steps=1 << 20))
    precision = "bfloat16" if device.type == "cuda" else "float32"
    trainer = Trainer(objective, Objective.of(objective), optimizer, schedule, StepSettings(precision=precision))
    for batch in batches:
        trainer.step([batch])
    trainer.flush()
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < settings.seconds:
        for batch in batches:
            trainer.step([batch])
            tokens += batch.tokens
        trainer.flush()
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    raise SystemExit(main())
