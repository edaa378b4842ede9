"""Times whole training steps of BERT: forward, backward and fused AdamW, with dropout, in bf16 autocast on a GPU.

    python benchmarks/training_step.py --model large --batch 64x512 --out rows.csv
    python benchmarks/training_step.py --model mini --vocabulary 8000 --batch 8x128 --padded --device cpu

Contenders take their turns one after the other, for a model with its optimizer fills a good part of the memory. Each
gets the same ids, lengths and labels: 15% of the tokens are predicted. With --padded, lengths are spread evenly from
S/8 to S; every contender gets them as it takes them: lengths, or a mask.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from handmade_bert import HandmadeBert
from torch import Tensor

from fasttfm.models import BertConfig, BertForMaskedLM

CONTENDERS = ("fasttfm", "fasttfm-recompute", "handmade", "handmade-compile", "hf", "hf-compile")


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [B, S]
    lengths: list[int] | None
    mask: Tensor | None  # bool [B, S]
    labels: Tensor  # [B, S], -100 where nothing is predicted
    places: Tensor  # of the predicted tokens, in [B * S]
    packed_places: Tensor  # the same among the packed tokens


def make_batch(batch: int, sequence: int, vocabulary: int, padded: bool, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary, (batch, sequence), generator=generator)
    there = torch.ones(batch, sequence, dtype=torch.bool)
    lengths = None
    if padded:
        lengths = torch.linspace(sequence // 8, sequence, batch).round().int().tolist()
        there = torch.arange(sequence) < torch.tensor(lengths)[:, None]
    predicted = (torch.rand(batch, sequence, generator=generator) < 0.15) & there
    packed = torch.full((batch * sequence,), -1)
    packed[there.flatten()] = torch.arange(int(there.sum()))
    places = predicted.flatten().nonzero().squeeze(1)
    tensors = (ids, there, torch.where(predicted, ids, -100), places, packed[places])
    ids, there, labels, places, packed_places = (tensor.to(device) for tensor in tensors)
    return Batch(ids, lengths, there if padded else None, labels, places, packed_places)


def build(
    name: str, config: BertConfig, batch: Batch, device: torch.device
) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    """A contender's model, and what computes its loss."""
    torch.manual_seed(0)
    if name.startswith("fasttfm"):
        config.recompute = name.endswith("recompute")
        ours = BertForMaskedLM(config).to(device).train()
        labels = batch.labels.flatten()[batch.places]
        options: dict[str, Any] = {"labels": labels, "positions": batch.packed_places, "lengths": batch.lengths}
        return ours, lambda: ours(batch.ids, **options).loss
    if name.startswith("handmade"):
        model = HandmadeBert(config).to(device).train()
        labels = batch.labels.flatten()[batch.places]
        call: Any = torch.compile(model) if name.endswith("compile") else model
        return model, lambda: call(batch.ids, batch.mask, labels, batch.places)
    import transformers

    fields = {key: value for key, value in config.to_dict().items() if key not in ("recompute", "model_type")}
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**fields)).to(device).train()
    call = torch.compile(theirs) if name.endswith("compile") else theirs
    mask = None if batch.mask is None else batch.mask.long()
    return theirs, lambda: call(batch.ids, attention_mask=mask, labels=batch.labels).loss


def measure(name: str, config: BertConfig, batch: Batch, device: torch.device, steps: int) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    model, loss_of = build(name, config, batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses = []

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    for _ in range(5 if on_gpu else 2):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    p20, p50, p80 = numpy.percentile(times, [20, 50, 80])
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
    return {
        "contender": name,
        "ms_p20": round(p20, 2),
        "ms_p50": round(p50, 2),
        "ms_p80": round(p80, 2),
        "peak_gib": round(peak, 2),
        "first_loss": round(float(losses[0]), 4),
        "last_loss": round(float(losses[-1]), 4),
    }


def profile(config: BertConfig, batch: Batch, device: torch.device) -> str:
    """The kernels of one of our steps, by their time."""
    model, loss_of = build("fasttfm", config, batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base", help=f"a size: {', '.join(BertConfig.sizes)}")
    parser.add_argument("--batch", default="64x512", help="sequences x tokens")
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one of our steps")
    parser.add_argument("--out", type=Path, help="a CSV file to add rows to")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    size, sequence = (int(number) for number in arguments.batch.split("x"))
    config = BertConfig.named(arguments.model, vocab_size=arguments.vocabulary)
    batch = make_batch(size, sequence, arguments.vocabulary, arguments.padded, device)
    if arguments.profile:
        print(profile(config, batch, device))
        return
    for name in arguments.contenders.split(","):
        case = {"model": f"bert-{arguments.model}", "batch": arguments.batch, "padded": arguments.padded}
        row = {**case, **measure(name, config, batch, device, arguments.steps)}
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if arguments.out is not None:
            new = not arguments.out.exists()
            with arguments.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, row)
                if new:
                    writer.writeheader()
                writer.writerow(row)
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
