"""ZeRO-1: an optimizer whose state is divided over ranks has the steps of one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_runs import back_to, close, join, run_of, settings_of, start_ranks, train, trained

from fasttfm import optim
from fasttfm.train import Lamb, Muon, OptimizerSettings
from fasttfm.train import checkpoints as files
from fasttfm.train.distributed import join as join_ranks
from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import pretrain
from fasttfm.train.settings import PretrainSettings
from fasttfm.train.sharded_optimizer import ShardedOptimizer, parameters_with_state

STEPS = 6


def settings(corpus: dict[str, Path], optimizer: str = "adamw") -> PretrainSettings:
    rate = OptimizerSettings(optimizer, learning_rate=3e-3)
    return settings_of(corpus, steps=STEPS, batches_per_step=2, tokens_per_step=256, optimizer=rate)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch": (torch.optim.AdamW, {"fused": True}),
    "adamw": (optim.AdamW, {}),
    "lamb": (Lamb, {}),
    "muon": (Muon, {}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4), nn.LayerNorm(4))


def made(module: nn.Module, kind: str, *, sharded: bool) -> Any:
    optimizer_class, options = KINDS[kind]
    matrices = [each for each in module.parameters() if each.ndim > 1]
    vectors = [each for each in module.parameters() if each.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "lr": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if kind == "muon":
        groups[0]["muon"] = True
    made_by: Any = (lambda given, **named: ShardedOptimizer(given, optimizer_class, **named)) if sharded else None
    return (made_by or optimizer_class)(groups, lr=0.05, weight_decay=0.1, **options)


def stepped(module: nn.Module, optimizer: Any, steps: range) -> None:
    """Steps with gradients, a scale of them and a step that is skipped."""
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for each in module.parameters():
            each.grad = torch.randn(each.shape, generator=draw)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(step == 1))
        optimizer.step()


def compared(kind: str) -> None:
    """Each rank's parameters and states, against an optimizer that is not sharded."""
    world = join_ranks("cpu", "ddp")
    one, several = model(), model()
    whole, sharded = made(one, kind, sharded=False), made(several, kind, sharded=True)
    versions = [each._version for each in several.parameters()]
    stepped(one, whole, range(3))
    stepped(several, sharded, range(3))
    for mine, expected in zip(several.parameters(), one.parameters(), strict=True):
        assert torch.equal(mine, expected)
    assert all(each._version > before for each, before in zip(several.parameters(), versions, strict=True))
    parts = len(parameters_with_state(sharded))
    assert sum(world.gather(parts)) in (0, 6)  # only rank 0 gathers
    assert 0 < parts < 6
    assert sharded.state_dict()["state"].keys() == parameters_with_state(sharded).keys()
    state = files.optimizer_state(sharded)
    if world.main:
        torch.testing.assert_close(state, files.optimizer_state(whole), rtol=0, atol=0)
    # From one that is not sharded, with other learning rates.
    other, again = model(), made(model(), kind, sharded=False)
    resumed = made(other, kind, sharded=True)
    other.load_state_dict(one.state_dict())
    files.load_optimizer_state(resumed, files.optimizer_state(whole))
    stepped(one, whole, range(3, 5))
    stepped(other, resumed, range(3, 5))
    for mine, expected in zip(other.parameters(), one.parameters(), strict=True):
        assert torch.equal(mine, expected)
    resumed.load_state_dict({"state": {}, "param_groups": again.state_dict()["param_groups"][::-1]})
    assert [group["lr"] for group in resumed.optim.param_groups] == [0.05, 0.1]
    world.leave()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_optimizer_has_the_same_steps(kind: str) -> None:
    join(start_ranks(2, compared, kind))


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("lamb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoints", ["whole", "sharded"])
def test_a_run_has_the_same_curve_and_goes_on_without_it(
    checkpoints: str, optimizer: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    """Two ranks with a sharded optimizer, then one, then two again."""
    options: dict[str, Any] = {"checkpoints": checkpoints, "checkpoint_every": 2}
    trained(2, settings(corpus, optimizer), tmp_path / "unsharded", **options)
    run = tmp_path / "run"
    trained(2, settings(corpus, optimizer), run, shard_optimizer=True, **options)
    names = ("loss", "gradient_norm", "validation_loss")
    rows = [read_rows(each / "log.csv") for each in (run, tmp_path / "unsharded")]
    sharded, unsharded = ([[row[name] for name in names] for row in each] for each in rows)
    assert sharded == unsharded  # all digits
    back_to(run, 2)
    trained(1, settings(corpus, optimizer), run, resume=True, **options)
    back_to(run, 4)
    trained(2, settings(corpus, optimizer), run, resume=True, shard_optimizer=True, **options)
    close(run, tmp_path / "unsharded")


def refused(given: PretrainSettings, output: Path) -> None:
    with pytest.raises(
        ValueError, match="shard_optimizer: expected several processes with ddp, got fsdp, which shards"
    ):
        pretrain(given, run_of(output, parallel="fsdp", shard_optimizer=True))


def test_only_ddp_shards_an_optimizer(corpus: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard_optimizer: expected several processes with ddp, got one process"):
        train(settings(corpus), run_of(tmp_path / "run", shard_optimizer=True))
    join(start_ranks(2, refused, settings(corpus), tmp_path / "run"))
