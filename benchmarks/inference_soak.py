"""Runs sessions at their full rate with random lengths and batch sizes, and checks every result.

    python benchmarks/inference_soak.py --minutes 30
    python benchmarks/inference_soak.py --device cpu --size tiny --minutes 20 --out benchmarks/results

Four threads call sessions of BERT at once, one in each precision of the device (bf16, fp16 and FP8 on a GPU, fp32 and
int8 on a CPU), and a generation session of GPT-2. A call is ``encode`` of 1 to 64 texts, ``submit`` of one text, or the
greedy continuation of a prompt. Texts have 1 to 512 ids.

Results are compared with those of the model without a session:

- a vector with the model's in fp64, with the tolerance of docs/numerics.md: twice the largest error of the model
  without a session in the same precision over all texts (of FP8 and int8: of the session's network, without batches and
  graphs), plus one rounding step;
- calls of ``encode`` that repeat have the same bits: with a CUDA graph and without one, so at most two results;
- tokens with those of a session without graphs, one prompt at a time; they may differ where two tokens' logits in fp64
  are closer than the errors of the model's logits.

A line is printed every ten seconds. The exit code is 1 if a call fails or a result differs, if memory grows by more
than 1% after the first third, or if in the last two thirds more than one in a hundred calls captures a graph. After
SIGTERM or SIGINT the calls in progress end, and the report is about what has run. ``--out`` writes a row for each kind
of call to the machine's CSV file, which replaces the rows of the same model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import resource
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm import __version__
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.generate import GenerationSession
from fasttfm.inference import Session
from fasttfm.inference.batches import pack
from fasttfm.inference.network import Inputs, Output
from fasttfm.models import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel
from fasttfm.ops import fp8
from fasttfm.testing.tolerance import OUTPUT_FACTOR, rounding_step

_THREADS = 4
_LINE_SECONDS = 10.0
_LEAST_SAMPLES = 60  # of shorter runs, neither memory nor captures are judged: both still grow
_CALLS = 64  # different calls of encode
_NEW_TOKENS = 24
_TIMEOUT = 120.0  # of a request, in seconds
# The sizes of GPT-2 next to BERT's; GPT-2 small next to the others.
_GPT2 = {"tiny": {"vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}}


class Mismatch(AssertionError):
    """A result is not the expected one."""


# ---- the expected results --------------------------------------------------------------------------------------------


@torch.no_grad()
def pooled(model: Any, ids: Sequence[int]) -> Tensor:
    """The mean of the hidden states of a text."""
    states: Tensor = model(torch.tensor([ids], device=next(model.parameters()).device)).last_hidden_state[0]
    return states.double().mean(0).cpu()


class Vectors:
    """The expected vectors of texts in one precision."""

    def __init__(self, session: Session, model: BertModel, texts: Sequence[Sequence[int]]) -> None:
        eager = copy.deepcopy(model).to(session.device, session.dtype)
        if session.network.base.encoder.fp8 is None and not session.network.is_packed:
            naive = torch.stack([pooled(eager, ids) for ids in texts])
        else:
            run, device = session.network.run, session.device
            rows = [run(Output.VECTORS, Inputs.of(pack([ids]), device))[0] for ids in texts]
            naive = torch.stack(rows).double().cpu()
        exact = torch.stack([pooled(eager.double(), ids) for ids in texts])
        self.exact = exact.numpy()
        self.bound = OUTPUT_FACTOR * (naive - exact).abs().max().item()
        self.bound += rounding_step(exact.abs().max().item(), session.dtype)

    def check(self, indices: Sequence[int], vectors: np.ndarray) -> None:
        error = float(np.abs(vectors - self.exact[list(indices)]).max())
        if not error <= self.bound:
            raise Mismatch(f"vectors of texts {list(indices)[:8]}: error {error:.3e}, bound {self.bound:.3e}")


class Continuations:
    """The expected continuations of prompts."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], longest: int) -> None:
        self.prompts = prompts
        session = GenerationSession(model, max_batch=1, max_length=longest, graphs=False, fused=False)
        options: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "eos_token_id": []}
        self.tokens = [session.submit(prompt, **options).result() for prompt in prompts]
        whole = [[*prompt, *tokens] for prompt, tokens in zip(prompts, self.tokens, strict=True)]
        naive = [self._logits(model, ids) for ids in whole]
        double = copy.deepcopy(model).double()
        self.exact = [self._logits(double, ids) for ids in whole]
        errors = [(one - other).abs().max().item() for one, other in zip(naive, self.exact, strict=True)]
        self.bound = 2 * OUTPUT_FACTOR * max(errors)  # of the difference of two logits

    @staticmethod
    @torch.no_grad()
    def _logits(model: Any, ids: Sequence[int]) -> Tensor:
        """fp64 [_NEW_TOKENS, V]: those that the new tokens are taken from."""
        logits: Tensor = model(torch.tensor([ids], device=next(model.parameters()).device)).logits[0]
        return logits[-_NEW_TOKENS - 1 : -1].double().cpu()

    def check(self, index: int, tokens: Sequence[int]) -> None:
        expected = self.tokens[index]
        if len(tokens) != len(expected):
            raise Mismatch(f"prompt {index}: {len(tokens)} tokens, expected {len(expected)}")
        for step, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)):
            if ours != theirs:  # what follows continues another text
                gap = abs((self.exact[index][step, theirs] - self.exact[index][step, ours]).item())
                if gap > self.bound:
                    words = f"token {step} is {ours}, expected {theirs}, whose logit is {gap:.3e} larger"
                    raise Mismatch(f"prompt {index}: {words} (bound {self.bound:.3e})")
                return


# ---- the calls -------------------------------------------------------------------------------------------------------


@dataclass
class Contender:
    """A session, its expected vectors, and the bits of repeated calls."""

    name: str
    session: Session
    expected: Vectors
    results: dict[int, set[int]] = field(default_factory=dict)  # hashes

    def check_bits(self, number: int, vectors: np.ndarray) -> None:
        bits = self.results.setdefault(number, set())
        bits.add(hash(vectors.tobytes()))
        if len(bits) > (1 if self.session.device.type == "cpu" else 2):
            raise Mismatch(f"{self.name}: call {number} has {len(bits)} different results")


class Soak:
    """The calls, their latencies and errors."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        texts: Sequence[Sequence[int]],
        generation: GenerationSession,
        continuations: Continuations,
    ) -> None:
        self.contenders, self.texts = contenders, texts
        self.generation, self.continuations = generation, continuations
        generator = np.random.default_rng(0)
        sizes = generator.integers(1, 65, _CALLS)
        self.calls = [generator.integers(0, len(texts), size).tolist() for size in sizes]
        kinds = [f"{kind}, {contender.name}" for contender in contenders for kind in ("encode", "submit")]
        self.latencies: dict[str, list[float]] = {kind: [] for kind in (*kinds, "generate")}
        self.errors: list[BaseException] = []
        self.stopped = threading.Event()

    def work(self, seed: int) -> None:
        """Calls of one thread, in random order, until the soak stops."""
        generator = np.random.default_rng(seed)
        kinds = list(self.latencies)
        try:
            while not self.stopped.is_set():
                self._call(kinds[generator.integers(len(kinds))], generator)
        except BaseException as error:
            self.errors.append(error)
            self.stopped.set()

    def _call(self, kind: str, generator: np.random.Generator) -> None:
        begun = time.perf_counter()
        if kind == "generate":
            index = int(generator.integers(len(self.continuations.prompts)))
            options: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "eos_token_id": []}
            tokens = self.generation.submit(self.continuations.prompts[index], **options).result()
            self.latencies[kind].append(time.perf_counter() - begun)
            self.continuations.check(index, tokens)
            return
        call, _, name = kind.partition(", ")
        contender = next(candidate for candidate in self.contenders if candidate.name == name)
        number = int(generator.integers(_CALLS))
        indices = self.calls[number] if call == "encode" else self.calls[number][:1]
        if call == "encode":
            vectors = contender.session.encode([self.texts[index] for index in indices])
        else:
            vectors = contender.session.submit(self.texts[indices[0]]).result(_TIMEOUT)[None]
        self.latencies[kind].append(time.perf_counter() - begun)
        contender.expected.check(indices, vectors)
        if call == "encode":
            contender.check_bits(number, vectors)

    def bytes(self) -> int:
        if self.generation.device.type == "cuda":
            return int(torch.cuda.memory_reserved())
        return resident()

    def captures(self) -> int:
        return sum(contender.session.graph_counts.captured for contender in self.contenders)

    def line(self, since: dict[str, int], seconds: float) -> str:
        parts = [f"{self.bytes() / 2**20:,.0f} MiB", f"{self.captures()} captures"]
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


@contextlib.contextmanager
def stopped_by_signals(stopped: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT end the soak as its time does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(soak: Soak, seconds: float, interval: float = 1.0) -> list[tuple[float, int, int, int]]:
    """Samples of (second, bytes, captures, calls), one in each ``interval`` of seconds."""
    workers = [threading.Thread(target=soak.work, args=(seed,), daemon=True) for seed in range(1, _THREADS + 1)]
    begun = said = time.perf_counter()
    samples: list[tuple[float, int, int, int]] = []
    since = dict.fromkeys(soak.latencies, 0)
    with stopped_by_signals(soak.stopped):
        for worker in workers:
            worker.start()
        while not soak.stopped.wait(interval):
            now = time.perf_counter()
            calls = sum(map(len, soak.latencies.values()))
            samples.append((now - begun, soak.bytes(), soak.captures(), calls))
            if now - said >= _LINE_SECONDS:
                print(f"{now - begun:5.0f} s: {soak.line(since, now - said)}", flush=True)
                since, said = {kind: len(latencies) for kind, latencies in soak.latencies.items()}, now
            if now - begun >= seconds:
                soak.stopped.set()
        for worker in workers:
            worker.join(_TIMEOUT)
            if worker.is_alive():
                soak.errors.append(TimeoutError(f"a call has not ended after {_TIMEOUT:.0f} s"))
    return samples


# ---- the report ------------------------------------------------------------------------------------------------------


def report(soak: Soak, samples: list[tuple[float, int, int, int]]) -> tuple[bool, list[dict[str, Any]]]:
    """Prints the result. Returns whether the run passed, and its rows."""
    for error in soak.errors:
        print(f"failed: {type(error).__name__}: {error}")
    if soak.errors or not samples:
        return not soak.errors, []
    rows = []
    for kind, latencies in soak.latencies.items():
        if latencies:
            p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
            print(f"{kind}: {len(latencies):,} calls, p50 {p50:.3f} ms, p99 {p99:.3f} ms, p99 / p50 {p99 / p50:.1f}")
            rows.append({"kind": kind, "calls": len(latencies), "ms_p50": round(p50, 3), "ms_p99": round(p99, 3)})
    tokens = sum(contender.session.counts.tokens for contender in soak.contenders)
    print(f"{tokens:,} tokens in vectors, every result checked")
    for contender in soak.contenders:
        graphs = contender.session.graph_counts
        print(f"{contender.name}: {graphs.captured} captures, {graphs.evicted} evicted, {graphs.replayed:,} replays")
    third = max(1, len(samples) // 3)
    before = statistics.median(sample[1] for sample in samples[third : 2 * third] or samples)
    after = statistics.median(sample[1] for sample in samples[2 * third :] or samples)
    growth = after / before - 1
    captures = samples[-1][2] - samples[third - 1][2]
    calls = samples[-1][3] - samples[third - 1][3]
    print(f"memory {before / 2**20:,.0f} MiB, then {after / 2**20:,.0f} MiB ({growth:+.2%})")
    print(f"captures after the first third: {captures} in {calls:,} calls")
    memory = {"mib_second_third": round(before / 2**20, 1), "mib_last_third": round(after / 2**20, 1)}
    shared = {**memory, "captures": soak.captures(), "tokens": tokens, "minutes": round(samples[-1][0] / 60, 1)}
    good = len(samples) < _LEAST_SAMPLES or (growth <= 0.01 and captures <= max(1, calls // 100))
    print("passed" if good else "failed: memory grows, or graphs are captured all the time")
    return good, [{**row, **shared} for row in rows]


def write(rows: list[dict[str, Any]], device: torch.device, model: str, folder: Path) -> None:
    """Replaces the rows of the same model in the machine's file."""
    path = folder / f"{file_stem(device)}-soak.csv"
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
    fixed = {
        "model": model,
        "device": device_name(device) + threads,
        "torch_version": torch.__version__,
        "fasttfm_version": __version__,
    }
    rows = [{**row, **fixed} for row in rows]
    if path.is_file():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["model"] != model] + rows
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[-1], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")


def make(device: torch.device, size: str, count: int) -> Soak:
    """The sessions and their expected results for ``count`` texts."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    config = BertConfig.named(size)
    lengths = np.exp(generator.uniform(0, np.log(config.max_position_embeddings), count)).astype(int)
    texts = [generator.integers(1, config.vocab_size, length).tolist() for length in lengths]
    model = BertModel(config).eval().to(device)
    options: dict[str, dict[str, Any]] = {"float32": {}, "int8": {"precision": "int8"}}
    if device.type == "cuda":
        model = model.bfloat16()
        options = {"bfloat16": {}, "float16": {"dtype": torch.float16}}
        if (reason := fp8.missing(device)) is None:
            options["fp8"] = {"precision": "fp8", "calibration": texts[:32]}
        else:
            options["bfloat16, few graphs"] = {"max_graphs": 4}
            print(f"without fp8: {reason}")
    sessions = {name: Session(model, **session_options) for name, session_options in options.items()}
    contenders = [Contender(name, session, Vectors(session, model, texts)) for name, session in sessions.items()]
    gpt = GPT2LMHeadModel(GPT2Config(**_GPT2.get(size, {}))).eval().to(device, next(model.parameters()).dtype)
    lengths = generator.integers(1, 200, 16)
    prompts = [generator.integers(0, gpt.config.vocab_size, length).tolist() for length in lengths]
    longest = 200 + _NEW_TOKENS
    session = GenerationSession(gpt, max_batch=_THREADS, max_length=longest)
    return Soak(contenders, texts, session, Continuations(gpt, prompts, longest))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", default="base", choices=sorted(BertConfig.sizes), help="of BERT")
    parser.add_argument("--texts", type=int, default=256, help="different texts")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples of the memory")
    parser.add_argument("--out", type=Path, help="a folder for the CSV file")
    settings = parser.parse_args(arguments)
    device = torch.device(settings.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    begun = time.perf_counter()
    soak = make(device, settings.size, settings.texts)
    print(f"expected results of {settings.texts} texts after {time.perf_counter() - begun:.0f} s", flush=True)
    good, rows = report(soak, run(soak, 60 * settings.minutes, settings.interval))
    for contender in soak.contenders:
        contender.session.close()
    if rows and settings.out is not None:
        write(rows, device, f"bert-{settings.size}", settings.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
