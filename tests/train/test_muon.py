"""Muon against torch's Muon and AdamW, which parameters get it, and runs over ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_runs import back_to, close, settings_of, trained

from fasttfm import models
from fasttfm.train import Muon, OptimizerSettings, Schedule, ScheduleSettings, make_optimizer
from fasttfm.train.settings import PretrainSettings

RATE, DECAY = 0.02, 0.1


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (3, 8), (5,), (7, 2))]


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:2], "muon": True}, {"params": of[2:], "weight_decay": 0.0}]


def give_gradients(to: list[nn.Parameter], step: int, factor: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for each in to:
        each.grad = torch.randn(each.shape, generator=draw) * factor


def test_a_step_is_torchs() -> None:
    """With gradients that are scaled by a power of two, and steps that are skipped in between."""
    mine, theirs = parameters(), parameters()
    optimizer: Any = Muon(groups(mine), RATE, weight_decay=DECAY)
    matching: Any = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    expected = [
        torch.optim.Muon(theirs[:2], **matching),
        torch.optim.AdamW(theirs[2:], RATE, eps=1e-6, weight_decay=0.0, fused=True),
    ]
    for step in range(4):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        give_gradients(mine, step, 4.0)
        optimizer.step()
        give_gradients(mine, step, float("nan"))
        optimizer.found_inf = torch.tensor(1.0)
        optimizer.step()
        give_gradients(theirs, step)
        for each in expected:
            each.step()
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("copied", [True, False])
def test_a_loaded_optimizer_continues_with_the_same_bits(copied: bool) -> None:
    first = parameters()
    optimizer = Muon(groups(first), RATE, weight_decay=DECAY)
    schedules = [Schedule(optimizer, ScheduleSettings(10, warmup=6))]
    for step in range(3):
        schedules[0].set(step)
        give_gradients(first, step)
        optimizer.step()
    if copied:
        first_and_optimizer = copy.deepcopy((first, optimizer))
        second, resumed = first_and_optimizer
    else:
        second = copy.deepcopy(first)
        resumed = Muon(groups(second), RATE, weight_decay=DECAY)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    schedules.append(Schedule(resumed, ScheduleSettings(10, warmup=6)))
    for step in range(3, 6):
        for schedule, some, which in zip(schedules, (first, second), (optimizer, resumed), strict=True):
            schedule.set(step)
            give_gradients(some, step)
            which.step()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], parameters()[0])


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert"])
def test_matrices_of_layers_get_muon(family: str) -> None:
    made: dict[str, Any] = {
        "bert": lambda: models.BertForPreTraining(models.BertConfig.named("tiny", vocab_size=50)),
        "gpt2": lambda: models.GPT2LMHeadModel(models.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50)),
        "modernbert": lambda: models.ModernBertForMaskedLM(
            models.ModernBertConfig(
                vocab_size=50,
                pad_token_id=0,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
            )
        ),
    }
    model = made[family]()
    optimizer = make_optimizer(model, OptimizerSettings("muon", weight_decay=DECAY))
    kinds = {
        each: (group["muon"], group["weight_decay"]) for group in optimizer.param_groups for each in group["params"]
    }
    names = {name: kinds.pop(each) for name, each in model.named_parameters()}
    assert not kinds
    with_muon = {name for name, (muon, _) in names.items() if muon}
    assert len(with_muon) >= 4 * 2
    for name, parameter in model.named_parameters():
        assert (name in with_muon) == (parameter.ndim == 2 and ".layers." in name), name
        assert names[name][1] == (DECAY if name in with_muon or parameter.ndim == 2 else 0.0), name


def settings(corpus: dict[str, Path]) -> PretrainSettings:
    rate = OptimizerSettings("muon", learning_rate=3e-3)
    return settings_of(corpus, steps=6, batches_per_step=2, tokens_per_step=256, optimizer=rate)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"parallel": "fsdp"}, {"shard_optimizer": True}],
    ids=["ddp", "fsdp", "zero"],
)
def test_a_run_on_two_ranks_goes_on_with_one(options: dict[str, Any], corpus: dict[str, Path], tmp_path: Path) -> None:
    trained(1, settings(corpus), tmp_path / "one")
    trained(2, settings(corpus), tmp_path / "run", **options)
    back_to(tmp_path / "run", 3)
    trained(1, settings(corpus), tmp_path / "run", resume=True)
    close(tmp_path / "run", tmp_path / "one")
