"""Times small batches, whose time is the host's: fine-tuning steps, inference and single calls, in wall-clock time.

    python benchmarks/small_batches.py --out benchmarks/results
    python benchmarks/small_batches.py --quick --parts training new-tokens --peers eager
    OMP_NUM_THREADS=2 python benchmarks/small_batches.py --device cpu --out benchmarks/results

On a GPU the model is BERT-base: fp32 weights under bf16 autocast in training, bf16 weights in inference ("autocast":
fp32 weights). On a CPU it is a BERT of 4 layers of 256 columns in fp32. Batches are 56% full. Contenders of a case take
turns. The script synchronizes with the GPU after each round of training steps, and after each call of inference. Times
are wall-clock medians. Parts:

    training    a fine-tuning step, with torch's fused AdamW (transformers) or fasttfm.optim's
    inference   a call of the encoder
    grid        transformers' encoder, patched and not, for many shapes
    new-tokens  steps with token counts that have not occurred before, against the median of repeated ones
    command     ``fasttfm finetune``: tokens per second against those of the bare step. Its time is that of an epoch and
                the evaluation after it, on a dev set of a tenth of the examples: a command with more epochs minus one
                with a single epoch, so that imports, reading, compiling and writing the results do not count
    ops         single calls, with and without gradients, against torch's op or chain of ops
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gc
import io
import itertools
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_batch_contenders import (
    INFERENCE,
    TRAINING,
    Batch,
    Model,
    encoder,
    inference_call,
    op_pairs,
    our_optimizer,
    step_of,
    training_step,
)

from fasttfm import __version__
from fasttfm.bench.timing import device_name, file_stem, percentiles

PARTS = ("training", "inference", "grid", "new-tokens", "command", "ops")
PEERS = ("eager", "compile", "reduce-overhead")
COLUMNS = (
    *("part", "case", "contender", "ms_p20", "ms_p50", "ms_p80", "note"),
    *("model", "device", "torch_version", "transformers_version", "fasttfm_version"),
)
Call = Callable[[], object]


class Bench:
    """The settings of a run, its clock and its rows."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.device = torch.device(settings.device)
        self.on_gpu = self.device.type == "cuda"
        self.quick: bool = settings.quick
        self.peers: list[str] = settings.peers
        self.model = Model("base", self.device) if self.on_gpu else Model("mini", self.device, vocabulary=8192)
        self.rows: list[dict[str, Any]] = []

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def selected(self, names: tuple[str, ...]) -> list[str]:
        """Contenders, without the peers that were not requested and, on a CPU, those that are only for GPUs."""
        left_out = [peer for peer in PEERS if peer not in self.peers]
        if not self.on_gpu:
            left_out += ["autocast", "compile", "reduce-overhead"]
        return [name for name in names if not name.endswith(tuple(left_out))]

    def in_turns(
        self, calls: Mapping[str, Call], *, rounds: int, calls_a_round: int, warmup: int = 3, wait: bool = False
    ) -> dict[str, Any]:
        """Seconds per call in each round, by contender. With ``wait`` it synchronizes after each call, unless the
        result is an array on the host, for which the call itself has waited."""
        for call in calls.values():
            for _ in range(warmup):
                call()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        gc.collect()
        gc.disable()
        try:
            for _ in range(rounds):
                for name, call in calls.items():
                    self.synchronize()
                    start = time.perf_counter()
                    for _ in range(calls_a_round):
                        result = call()
                        if wait and not isinstance(result, np.ndarray):
                            self.synchronize()
                    self.synchronize()
                    seconds[name].append((time.perf_counter() - start) / calls_a_round)
        finally:
            gc.enable()
        return seconds

    def add(self, part: str, case: str, seconds: Mapping[str, list[float]], note: str = "") -> None:
        for name, samples in seconds.items():
            p20, p50, p80 = (f"{1e3 * seconds:.4f}" for seconds in percentiles(samples))
            row = {"part": part, "case": case, "contender": name, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
            self.rows.append(row | {"note": note, "model": f"bert-{self.model.size}"})
        medians = (f"{name} {1e3 * statistics.median(samples):.3f}" for name, samples in seconds.items())
        print(f"{part}, {case}: {' | '.join(medians)} ms{f' ({note})' if note else ''}", flush=True)

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if self.on_gpu:
            torch.cuda.empty_cache()


# ---- models ----------------------------------------------------------------------------------------------------------


def training(bench: Bench) -> None:
    size, sequence = (32, 128) if bench.on_gpu else (8, 64)
    batch = Batch.of(size, sequence, bench.model.vocabulary, bench.device)
    steps = {name: training_step(name, bench.model, batch) for name in bench.selected(TRAINING)}
    rounds = 4 if bench.quick else 12
    bench.add("training", f"{size}x{sequence}", bench.in_turns(steps, rounds=rounds, calls_a_round=10, warmup=5))


def inference(bench: Bench) -> None:
    shapes = [(1, 128), (32, 128), (32, 512)] if bench.on_gpu else [(1, 32), (8, 64)]
    names = bench.selected(INFERENCE)
    encoders = {name: encoder(name, bench.model) for name in names}
    for size, sequence in shapes:
        batch = Batch.of(size, sequence, bench.model.vocabulary, bench.device)
        calls = {name: inference_call(name, call, bench.model, batch) for name, call in encoders.items()}
        times = bench.in_turns(calls, rounds=8 if bench.quick else 20, calls_a_round=10, wait=True)
        bench.add("inference", f"B{size} S{sequence}", times)


def grid(bench: Bench) -> None:
    """Patched and unpatched, padded and full."""
    sizes, sequences = ((1, 4, 8, 32, 128), (16, 64, 128, 256, 512)) if bench.on_gpu else ((1, 2, 8), (16, 32, 64))
    if bench.quick:
        sizes, sequences = sizes[::2], sequences[::2]
    encoders = {name: encoder(name, bench.model) for name in ("hf patched", "hf eager")}
    worst: list[tuple[float, str]] = []
    for padded, size, sequence in itertools.product((True, False), sizes, sequences):
        if padded and size == 1:
            continue
        batch = Batch.of(size, sequence, bench.model.vocabulary, bench.device, padded=padded)
        calls = {name: inference_call(name, call, bench.model, batch) for name, call in encoders.items()}
        times = bench.in_turns(calls, rounds=4 if bench.quick else 10, calls_a_round=8, wait=True)
        patched, eager = (statistics.median(times[name]) for name in calls)
        case = f"B{size} S{sequence}{', padded' if padded else ''}"
        worst.append((eager / patched, case))
        bench.add("grid", case, times, f"{eager / patched:.2f}x")
    print("grid, worst: " + ", ".join(f"{case} {ratio:.2f}x" for ratio, case in sorted(worst)[:4]), flush=True)


def new_tokens(bench: Bench) -> None:
    """One step for each of several packed batches whose token counts have not occurred before."""
    size, sequence = (32, 128) if bench.on_gpu else (8, 64)
    known = Batch.of(size, sequence, bench.model.vocabulary, bench.device)
    module = bench.model.ours("BertForSequenceClassification").train()
    optimizer = our_optimizer(module, bench.device)

    def step(batch: Batch) -> Call:
        return step_of(module, optimizer, batch.arguments("packed") | {"labels": batch.labels}, bench.model)

    seconds = bench.in_turns({"known": step(known)}, rounds=20, calls_a_round=1, warmup=5)
    seconds["new"] = []
    total = sum(known.lengths)
    for count in range(8 if bench.quick else 30):
        lengths = [max(1, length - (5 * count + position) % 13) for position, length in enumerate(known.lengths)]
        assert sum(lengths) != total, "a token count that has occurred before"
        total = sum(lengths)
        mask = (torch.arange(sequence) < torch.tensor(lengths)[:, None]).long().to(bench.device)
        fresh = step(Batch(known.ids, mask, lengths, known.labels))
        bench.synchronize()
        start = time.perf_counter()
        fresh()
        bench.synchronize()
        seconds["new"].append(time.perf_counter() - start)
    ratio = max(seconds["new"]) / statistics.median(seconds["known"])
    bench.add("new-tokens", f"{size}x{sequence}", seconds, f"the slowest new one {ratio:.2f}x of the known median")


# ---- the command -----------------------------------------------------------------------------------------------------


def command(bench: Bench) -> None:
    """Further epochs of ``fasttfm finetune``, with the evaluation after each, and the bare step over as many tokens."""
    size, sequence = (32, 128) if bench.on_gpu else (8, 64)
    steps, more = (128, 2 if bench.quick else 6) if bench.on_gpu else (16, 2)
    batch = Batch.of(size, sequence, bench.model.vocabulary, bench.device)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_task(root, bench.model, batch.lengths, steps)
        finetune(root, bench.device, size, 1)  # compiles and tunes kernels
        one, several = (finetune(root, bench.device, size, epochs) for epochs in (1, 1 + more))
    whole = (several - one) / (more * steps)
    module = bench.model.ours("BertForSequenceClassification").train()
    optimizer = our_optimizer(module, bench.device, max_norm=1.0)
    bare = step_of(module, optimizer, batch.arguments("packed") | {"labels": batch.labels}, bench.model)
    times = bench.in_turns({"bare step": bare}, rounds=10, calls_a_round=5, warmup=5)
    ratio = statistics.median(times["bare step"]) / whole
    bench.add(
        "command",
        f"finetune, {size}x{sequence}",
        {"fasttfm finetune": [whole], **times},
        f"{ratio:.0%} of the bare step's tokens per second; a command of one epoch takes {one:.1f} s",
    )


def write_task(root: Path, model: Model, lengths: list[int], steps: int) -> None:
    """Writes a model, its tokenizer and a task: as many examples of each length as there are steps, a tenth as many in
    the dev set, with random words of one token and random labels."""
    from fasttfm import data

    tokenizer = data.train_tokenizer("wordpiece", list(data.read_documents(data.shipped_corpus())), 4096)
    model.ours("BertModel").save_pretrained(root)
    tokenizer.save(root, model_max_length=max(lengths))
    words = [word for word in map(tokenizer.token, range(tokenizer.vocab_size)) if word.isalpha()]
    rng = random.Random(0)
    for name, count in (("train", steps), ("dev", -(-steps // 10))):
        rows = [f"{' '.join(rng.choices(words, k=length - 2))}\t{rng.randrange(2)}\n" for length in lengths * count]
        (root / f"{name}.tsv").write_text("".join(["sentence\tlabel\n", *rows]))


def finetune(root: Path, device: torch.device, size: int, epochs: int) -> float:
    """The seconds of the command with batches of ``size`` examples."""
    from fasttfm.cli.main import main as fasttfm_main

    settings = {
        "task": "classify",
        "model": root,
        "data": root / "train.tsv",
        "dev": root / "dev.tsv",
        "epochs": epochs,
    }
    settings |= {"output": root / "run", "device": device.type, "batch-size": size}
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        options = itertools.chain(*((f"--{name}", str(value)) for name, value in settings.items()))
        code = fasttfm_main(["finetune", "--quiet", "--overwrite", *options])
    assert code == 0, f"fasttfm finetune: exit code {code}"
    return time.perf_counter() - start


# ---- single calls ----------------------------------------------------------------------------------------------------


def single_ops(bench: Bench) -> None:
    """Calls with 128 rows, whose time is the host's."""
    for with_gradient in (False, True):
        for op, pair in op_pairs(bench.device, with_gradient=with_gradient).items():
            times = bench.in_turns(pair, rounds=10 if bench.quick else 40, calls_a_round=100, warmup=20)
            ratio = statistics.median(times["fasttfm"]) / statistics.median(times["torch"])
            case = f"{op}, {'with' if with_gradient else 'no'} gradient"
            bench.add("ops", case, times, f"{ratio:.2f}x of torch's time")


# ---- main ------------------------------------------------------------------------------------------------------------

RUN = dict(zip(PARTS, (training, inference, grid, new_tokens, command, single_ops), strict=True))


def write(folder: Path, bench: Bench, name: str = "small_batches") -> Path:
    from importlib.metadata import version

    same = {
        "device": device_name(bench.device) + ("" if bench.on_gpu else f", {torch.get_num_threads()} threads"),
        "torch_version": torch.__version__,
        "transformers_version": version("transformers"),
        "fasttfm_version": __version__,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file_stem(bench.device)}-{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | same for row in bench.rows)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="ways to run transformers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and shapes")
    parser.add_argument("--out", type=Path, help="folder for the CSV")
    bench = Bench(settings := parser.parse_args())
    for part in settings.parts:
        start = time.perf_counter()
        RUN[part](bench)
        print(f"  ({part} took {time.perf_counter() - start:.0f} s)", flush=True)
        bench.free()
    if settings.out is not None:
        print(write(settings.out, bench))


if __name__ == "__main__":
    main()
