"""A training step and the same one in plain torch: a short measurement for people who have just trained a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import models
from fasttfm.bench.handmade_bert import HandmadeBert
from fasttfm.bench.handmade_gpt import HandmadeGPT
from fasttfm.data import Batch
from fasttfm.ops import unpack
from fasttfm.train.optimizers import make_optimizer
from fasttfm.train.settings import OptimizerSettings

_SECONDS = 4.0  # for both together
_ROUNDS = 12  # at least


@dataclass(frozen=True)
class StepTimes:
    """Medians, in seconds, of a step: forward, backward and optimizer, on the same batch."""

    ours: float
    torch: float

    def __str__(self) -> str:
        ratio = self.torch / self.ours
        return (
            f"a training step of this model: fasttfm {1e3 * self.ours:.1f} ms, plain torch {1e3 * self.torch:.1f} ms, "
            f"{ratio:.2f} times as long"
        )


def compare_steps(config: models.BertConfig | models.GPT2Config, batch: Batch, device: torch.device) -> StepTimes:
    """Times both, step by step in turn, for some seconds. Neither compiles anything: plain torch is the model as an
    expert writes it, with padded sequences, SDPA and torch's fused AdamW. Of BERT only masked tokens are predicted."""
    batch = batch.to(device)
    steps = [_ours(config, batch, device), _theirs(config, batch, device)]
    for step in steps:  # what the first steps allocate and choose
        step()
        step()
    times: list[list[float]] = [[], []]
    begun = time.perf_counter()
    while time.perf_counter() - begun < _SECONDS or len(times[0]) < _ROUNDS:
        for step, taken in zip(steps, times, strict=True):
            taken.append(_seconds(step, device))
    return StepTimes(*map(statistics.median, times))


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    begun = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - begun


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ours(config: Any, batch: Batch, device: torch.device) -> Callable[[], None]:
    options: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
    if isinstance(config, models.GPT2Config):
        model: Any = models.GPT2LMHeadModel(config).to(device).train()
        options["labels"] = batch.input_ids
    else:
        model = models.BertForMaskedLM(config).to(device).train()
        options |= {"labels": batch.labels, "positions": batch.positions}
    return _step(model, lambda: model(batch.input_ids, **options).loss, device)


def _theirs(config: Any, batch: Batch, device: torch.device) -> Callable[[], None]:
    lengths = batch.cu_seqlens.diff().long()
    longest = int(lengths.max())
    ids = unpack(batch.input_ids, batch.cu_seqlens, longest)
    there = torch.arange(longest, device=device) < lengths[:, None]
    if isinstance(config, models.GPT2Config):
        gpt, labels = HandmadeGPT(config).to(device).train(), torch.where(there, ids, -100)
        return _step(gpt, lambda: gpt(ids, labels), device)
    bert = HandmadeBert(config).to(device).train()
    positions = there.flatten().nonzero().squeeze(1)[batch.positions]
    mask = None if bool(there.all()) else there
    return _step(bert, lambda: bert(ids, mask, batch.labels, positions), device)


def _step(model: nn.Module, loss: Callable[[], Tensor], device: torch.device) -> Callable[[], None]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(model, (HandmadeBert, HandmadeGPT)):
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        optimizer = make_optimizer(model, OptimizerSettings())

    def step() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
