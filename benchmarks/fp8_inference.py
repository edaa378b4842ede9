"""Times inference in FP8 against bf16 in the same run: BERT-base over batches that are 56% full, unless they have one
sequence.

    python benchmarks/fp8_inference.py --out benchmarks/results/nvidia-h200-fp8_inference.csv

Contenders take turns; times are medians. "session" is a synchronous call of ``Session.encode`` from ids on the host to
vectors on the host, "graph" a CUDA graph from ids on the device to vectors on the device. ``cosine`` is the smallest
cosine of a vector to that of bf16. The weights are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from training_step import append_row, versions

from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.batches import pack
from fasttfm.inference.network import Inputs, Output
from fasttfm.models import BertConfig, BertModel

SHAPES = ((1, 128), (32, 128), (32, 512), (128, 512))
PRECISIONS = (None, "fp8")


def batch_of(size: int, sequence: int, vocabulary: int) -> list[Any]:
    """Ids of sequences whose lengths are spread evenly from an eighth of the maximum to the maximum."""
    generator = numpy.random.default_rng(0)
    shortest = sequence if size == 1 else sequence // 8
    lengths = numpy.linspace(shortest, sequence, size).astype(int)
    return [generator.integers(1000, vocabulary, length).tolist() for length in generator.permutation(lengths)]


def captured(session: Session, rows: list[Any]) -> Callable[[], None]:
    """Replays the network as a CUDA graph, and waits for it."""
    inputs = Inputs.of(pack(rows), session.device)
    for _ in range(3):
        session.network.run(Output.VECTORS, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        session.network.run(Output.VECTORS, inputs)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def milliseconds(call: Callable[[], object], count: int) -> list[float]:
    samples = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        samples.append(1e3 * (time.perf_counter() - begun))
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(f"{size}x{length}" for size, length in SHAPES))
    parser.add_argument("--rounds", type=int, default=5, help="turns of the contenders")
    parser.add_argument("--calls", type=int, default=10, help="calls in a turn")
    parser.add_argument("--out", type=Path, help="a CSV file to add rows to")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    config = BertConfig.named("base")
    model = BertModel(config).to(device).eval()
    settings = EmbedSettings(pooling="mean", normalize=True)
    texts = batch_of(32, 512, config.vocab_size)
    sessions = {
        precision or "bf16": Session(
            model, settings=settings, precision=precision, calibration=texts if precision == "fp8" else None
        )
        for precision in PRECISIONS
    }
    for shape in arguments.shapes.split(","):
        size, length = map(int, shape.split("x"))
        rows = batch_of(size, length, config.vocab_size)
        vectors = {name: session.encode(rows) for name, session in sessions.items()}
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for name, session in sessions.items():
            calls[name, "session"] = lambda session=session, rows=rows: session.encode(rows)
            calls[name, "graph"] = captured(session, rows)
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for round_number in range(arguments.rounds + 1):
            for key, call in calls.items():
                samples = milliseconds(call, arguments.calls)
                times[key] += samples if round_number else []  # the first round warms up
        for (name, kind), samples in times.items():
            row: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "model": "bert-base", "batch": shape}
            row |= {"tokens": sum(map(len, rows)), "contender": kind, "precision": name}
            low, middle, high = numpy.percentile(samples, (20, 50, 80))
            row |= {"ms_p20": round(low, 4), "ms_p50": round(middle, 4), "ms_p80": round(high, 4)}
            cosine = (vectors[name] * vectors["bf16"]).sum(-1).min()
            row |= {"cosine": round(float(cosine), 5), **versions()}
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
            if arguments.out is not None:
                append_row(arguments.out, row)


if __name__ == "__main__":
    main()
