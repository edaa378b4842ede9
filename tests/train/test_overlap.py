"""Native layers under DDP and FSDP2: when gradients are sent, the memory of a step, and optimizers that change how
gradients arrive."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from fasttfm import optim
from fasttfm.models import BertConfig, BertModel
from fasttfm.train.distributed import join, share_out, whole

LAYERS = 4
WARM_UP, STEPS = 4, 4


class Encoder(torch.nn.Module):
    """A model whose layers have parameters for a bucket of DDP each, and the sum of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "vocab_size": 50}
        torch.manual_seed(0)
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model = BertModel(BertConfig(num_hidden_layers=LAYERS, **sizes, **dropout), add_pooling_layer=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).last_hidden_state.float().square().mean()


def batch(rank: int) -> Tensor:
    return torch.randint(50, (8, 64), generator=torch.Generator().manual_seed(rank))


def in_ranks(work: Any, *arguments: Any) -> None:
    for process in train_runs.start_ranks(2, work, *arguments):
        process.join()
        assert process.exitcode == 0


# ---- when gradients are sent -----------------------------------------------------------------------------------------


def times(parallel: str, folder: Path) -> None:
    """Saves begin and end of a step's backward nodes of layers, and of its collectives."""
    world = join("cpu", parallel)
    module = share_out(Encoder(), world)
    ids = batch(world.rank)
    for _ in range(2):  # DDP builds its buckets in the first
        module(ids).backward()
    loss = module(ids)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    events = profiler.events()
    assert events is not None
    layers = [each.time_range for each in events if each.name == "_StackBackward"]
    sent = [each.time_range for each in events if "gloo:" in each.name]
    torch.save([[(each.start, each.end) for each in times] for times in (layers, sent)], folder / f"{world.rank}.pt")
    world.leave()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_are_sent_while_earlier_layers_compute_theirs(parallel: str, tmp_path: Path) -> None:
    in_ranks(times, parallel, tmp_path)
    for rank in range(2):
        layers, sent = torch.load(tmp_path / f"{rank}.pt")
        assert len(layers) == LAYERS  # a node for each layer
        begun = min(start for start, _ in sent)
        # The last layer's gradients are on their way before the second layer's exist.
        assert begun < sorted(layers)[-2][1]


# ---- memory ----------------------------------------------------------------------------------------------------------


def new_pages(folder: Path) -> None:
    """Saves how many pages the system has given to this process per step."""
    world = join("cpu", "ddp")
    module = share_out(Encoder(), world)
    ids = batch(world.rank).repeat(8, 1)
    before = 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        module.zero_grad()
        module(ids).backward()
    pages = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / STEPS
    torch.save(pages, folder / f"{world.rank}.pt")
    world.leave()


def test_a_ranks_step_uses_the_memory_of_the_step_before(tmp_path: Path) -> None:
    """New pages for what the layers compute in would be several hundred million bytes for each step."""
    in_ranks(new_pages, tmp_path)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") * mmap.PAGESIZE < 50e6


# ---- gradients in 16 bits --------------------------------------------------------------------------------------------


def sent(parallel: str, gradient_dtype: str, folder: Path) -> None:
    """Saves the gradients of a batch."""
    world = join("cpu", parallel)
    encoder = Encoder()
    module = share_out(encoder, world, gradient_dtype=gradient_dtype)
    module(batch(world.rank)).backward()
    found = {name: whole(each.grad) for name, each in encoder.named_parameters() if each.grad is not None}
    torch.save(found, folder / f"{world.rank}.pt")
    world.leave()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_travel_in_bf16(parallel: str, tmp_path: Path) -> None:
    """Sums of two numbers that are rounded to bf16, and then rounded: within 1/128 of the sum of magnitudes."""
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        in_ranks(sent, parallel, dtype, tmp_path / dtype)
    exact, found, other = (torch.load(tmp_path / name) for name in ("float32/0.pt", "bfloat16/0.pt", "bfloat16/1.pt"))
    for name, value in exact.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], other[name])
        assert torch.equal(found[name], found[name].bfloat16().float())
        assert (found[name] - value).abs().max() <= value.abs().max() / 64
    assert any(not torch.equal(found[name], value) for name, value in exact.items())


# ---- gradients and copies that an optimizer asks for -----------------------------------------------------------------


def steps(module: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor], bf16: bool) -> None:
    for ids in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = module(ids)
        loss.backward()
        optimizer.step()


def trained(parallel: str, bf16: bool, options: dict[str, bool], folder: Path) -> None:
    world = join("cpu", parallel)
    encoder = Encoder()
    module = share_out(encoder, world)
    optimizer = optim.AdamW(module.parameters(), lr=1e-3, max_norm=1.0, **options)
    steps(module, optimizer, [batch(10 * step + world.rank) for step in range(3)], bf16)
    gradients = {name: whole(each.grad) for name, each in encoder.named_parameters() if each.grad is not None}
    assert all(isinstance(each, DTensor) == (parallel == "fsdp") for each in encoder.parameters())
    found = {name: whole(each.detach()) for name, each in encoder.named_parameters()}
    torch.save((found, gradients, whole(optimizer.last_norm)), folder / f"{world.rank}.pt")
    world.leave()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("bf16", [False, True])
def test_direct_gradients_and_copies_change_nothing(parallel: str, bf16: bool, tmp_path: Path) -> None:
    for name, given in (("plain", False), ("direct", True)):
        (tmp_path / name).mkdir()
        options = {"direct_gradients": given, "weight_copies": given}
        in_ranks(trained, parallel, bf16, options, tmp_path / name)
    found = {name: [torch.load(tmp_path / name / f"{rank}.pt") for rank in range(2)] for name in ("plain", "direct")}
    torch.testing.assert_close(found["direct"], found["plain"], rtol=0, atol=0)
    torch.testing.assert_close(found["direct"][0], found["direct"][1], rtol=0, atol=0)
    if bf16:
        return
    # One process with the rows of both ranks, whose mean is the mean of the ranks' means.
    alone = Encoder()
    optimizer = optim.AdamW(alone.parameters(), lr=1e-3, max_norm=1.0, direct_gradients=True, weight_copies=True)
    steps(alone, optimizer, [torch.cat([batch(10 * step), batch(10 * step + 1)]) for step in range(3)], bf16)
    expected = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    torch.testing.assert_close(found["direct"][0][1], expected, rtol=1e-4, atol=1e-7)
