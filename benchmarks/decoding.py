"""Times the decoding of GPT-2 small: wall-clock milliseconds for a token of every sequence.

    python benchmarks/decoding.py --out benchmarks/results
    python benchmarks/decoding.py --quick --batches 1 16 --peers eager
    OMP_NUM_THREADS=2 python benchmarks/decoding.py --device cpu --batches 1 8 --out benchmarks/results

Weights are random, in bf16 on a GPU and fp32 on a CPU. All sequences have prompts of 128 tokens and no stop token. A
token's time is the difference between a call for many new tokens and one for a single token, over the number of steps
between them. Times are wall-clock medians of synchronized calls. Contenders:

    session               a ``GenerationSession``: on a GPU CUDA graphs with sampling inside
    session temperature   the same with a temperature of 0.8
    session top-k         the same with temperature, top_k 50 and top_p 0.9
    graph replay, fused   the CUDA graph of the session's greedy step, replayed STEPS times in a row; up to 16 sequences
                          with the kernels of ops.decode_linear, beyond with torch's GEMMs
    graph replay, few rows  the same with the GEMMs for few rows, on Hopper
    graph replay, one kernel  the same with one kernel for all layers (up to 16 sequences), on Hopper
    transformers          ``generate`` of transformers
    transformers static   the same with a static cache, which transformers compiles on a GPU

Rows are appended to the file: graph replays have no first token.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fasttfm import __version__, models
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.generate import GenerationSession, decoder
from fasttfm.ops.layers import decode_layers

PROMPT = 128
COLUMNS = (
    *("model", "batch", "prompt", "steps", "contender", "ms_per_token", "ms_first_token"),
    *("device", "torch_version", "transformers_version", "fasttfm_version", "note"),
)
SAMPLING: dict[str, dict[str, Any]] = {
    "session": {},
    "session temperature": {"do_sample": True, "temperature": 0.8, "seed": 1},
    "session top-k": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 1},
}
# decoder.FEW_ROWS_FROM, decode_layers.MOST_ROWS
REPLAYS: dict[str, tuple[int | None, int]] = {
    "graph replay, fused": (None, 0),
    "graph replay, few rows": (1, 0),
    "graph replay, one kernel": (1, decode_layers.MOST_ROWS),
}
Call = Callable[[int], object]  # of a number of new tokens


def session_call(model: Any, prompts: torch.Tensor, steps: int, **options: Any) -> Call:
    session = GenerationSession(model, max_batch=len(prompts), max_length=PROMPT + steps + 1)
    rows = prompts.tolist()

    def run(new: int) -> list[list[int]]:
        submitted = [session.submit(row, max_new_tokens=new, eos_token_id=[], **options) for row in rows]
        return [sequence.result() for sequence in submitted]

    return run


def transformers_call(directory: str, prompts: torch.Tensor, dtype: torch.dtype, static: bool) -> Call:
    import transformers

    model = transformers.GPT2LMHeadModel.from_pretrained(directory, dtype=dtype).to(prompts.device).eval()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if static:
        options["cache_implementation"] = "static"
    mask = torch.ones_like(prompts)

    def run(new: int) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(
            prompts, attention_mask=mask, min_new_tokens=new, max_new_tokens=new, **options
        )
        return tokens

    return run


def replay_ms(model: Any, prompts: torch.Tensor, steps: int, rounds: int, kernels: tuple[int | None, int]) -> float:
    """Milliseconds of a replay of the CUDA graph of a step."""
    chosen = decoder.FEW_ROWS_FROM, decode_layers.MOST_ROWS
    decoder.FEW_ROWS_FROM, decode_layers.MOST_ROWS = kernels
    try:
        session = GenerationSession(model, max_batch=len(prompts), max_length=PROMPT + 8, graphs=True)
        submitted = [session.submit(row, max_new_tokens=4, eos_token_id=[]) for row in prompts.tolist()]
        for sequence in submitted:
            sequence.result()
    finally:
        decoder.FEW_ROWS_FROM, decode_layers.MOST_ROWS = chosen
    assert session._graphs is not None
    graph = session._graphs.captured(session._bucket(len(prompts)))
    assert graph is not None
    seconds = []
    for _ in range(rounds + 1):  # the first is a warm-up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:]) / steps


def measured(call: Call, steps: int, rounds: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds for a token of every sequence, and for the first one."""
    seconds: dict[int, list[float]] = {1: [], steps + 1: []}
    for new in seconds:
        call(new)
    for _ in range(rounds):
        for new, samples in seconds.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            call(new)
            if device.type == "cuda":
                torch.cuda.synchronize()
            samples.append(time.perf_counter() - start)
    first, whole = (statistics.median(samples) for samples in seconds.values())
    return 1e3 * (whole - first) / steps, 1e3 * first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--peers", nargs="*", choices=("eager", "static"), default=["eager", "static"])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, help="directory of the .csv file")
    settings = parser.parse_args()
    device = torch.device(settings.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    model: Any = models.GPT2LMHeadModel(models.GPT2Config()).to(device, dtype).eval()
    rounds = 2 if settings.quick else 6
    replays = REPLAYS if device.type == "cuda" else {}
    for batch in settings.batches:
        prompts = torch.randint(0, 50000, (batch, PROMPT), device=device)
        contenders: dict[str, Callable[[], Call]] = {
            name: partial(session_call, model, prompts, settings.steps, **options) for name, options in SAMPLING.items()
        }
        for name, static in (("transformers", False), ("transformers static", True)):
            if ("static" if static else "eager") in settings.peers:
                contenders[name] = partial(peer, model, prompts, dtype, static)
        figures: dict[str, tuple[float, float | None]] = {}
        for name, make in contenders.items():
            figures[name] = measured(make(), settings.steps, rounds, device)
            gc.collect()
        for name, kernels in replays.items():
            figures[name] = replay_ms(model, prompts, settings.steps, rounds, kernels), None
            gc.collect()
        for name, (token, first) in figures.items():
            ending = "" if first is None else f", {first:.2f} ms to the first"
            print(f"B{batch} {name}: {token:.3f} ms a token{ending}", flush=True)
        if settings.out is not None:
            write(settings.out, rows_of(batch, settings.steps, figures, device), device)


def rows_of(
    batch: int, steps: int, figures: dict[str, tuple[float, float | None]], device: torch.device
) -> list[dict[str, Any]]:
    """Rows of the CSV file for the milliseconds of a token and of the first one."""
    try:
        from transformers import __version__ as transformers_version
    except ImportError:
        transformers_version = ""
    case = {"model": "gpt2-small", "batch": batch, "prompt": PROMPT, "steps": steps}
    versions = {
        "device": device_name(device),
        "torch_version": torch.__version__,
        "transformers_version": transformers_version,
        "fasttfm_version": __version__,
        "note": "",
    }
    return [
        {
            **case,
            "contender": name,
            "ms_per_token": f"{token:.4f}",
            "ms_first_token": "" if first is None else f"{first:.3f}",
            **versions,
        }
        for name, (token, first) in figures.items()
    ]


def peer(model: Any, prompts: torch.Tensor, dtype: torch.dtype, static: bool) -> Call:
    """transformers' model with the same weights."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return transformers_call(directory, prompts, dtype, static)


def write(directory: Path, rows: list[dict[str, Any]], device: torch.device) -> Path:
    """Appends rows to the device's file."""
    path = directory / f"{file_stem(device)}-decoding.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")
    return path


if __name__ == "__main__":
    main()
