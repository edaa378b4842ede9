"""FP8 training with FSDP2 on two ranks: the weights that travel in FP8, and the curve of one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from torch import Tensor, nn
from train_runs import run_of, settings_of

from fasttfm.kernels.fp8 import reference
from fasttfm.models import BertConfig, BertModel
from fasttfm.nn import Fp8Training, PackedLayer
from fasttfm.nn.fp8 import linears_of
from fasttfm.train.distributed import join, share_out, whole
from fasttfm.train.fp8_all_gather import GatheredInFp8, ShardedFp8Training, gather_in_fp8, sharded_rows
from fasttfm.train.settings import StepSettings

STEPS = 4
RANKS = 2


class Encoder(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": width, "num_attention_heads": 2, "intermediate_size": 96, "vocab_size": 50}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model = BertModel(BertConfig(num_hidden_layers=2, **sizes, **dropout), add_pooling_layer=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).last_hidden_state.float().square().mean()


def linears(module: nn.Module) -> list[Any]:
    return [linear for layer in module.modules() if isinstance(layer, PackedLayer) for linear in linears_of(layer)]


def train(module: nn.Module, scaling: Any, ids: list[Tensor], *, reduce: bool) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for each in ids:
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(each)
        loss.backward()
        optimizer.step()
        scaling.update(reduce=reduce)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def batches(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(50, (2 * RANKS, 16), generator=draw)[rank::RANKS] for _ in range(STEPS)]


def in_ranks(work: Any, *arguments: Any, ranks: int = RANKS) -> None:
    for process in train_runs.start_ranks(ranks, work, *arguments):
        process.join()
        assert process.exitcode == 0


# ---- what travels ----------------------------------------------------------------------------------------------------


def gathered(width: int, folder: Path) -> None:
    """Saves the weights, the FP8 weights of the layers while FSDP has gathered them, and what was sent."""
    world = join("cpu", "fsdp")
    encoder = Encoder(width)
    original = [each.weight.detach().clone() for each in linears(encoder)]
    module = share_out(encoder, world, fp8=True)
    scaling = ShardedFp8Training(encoder)
    sent = []
    send = GatheredInFp8.fsdp_pre_all_gather

    @functools.wraps(send)
    def recorded(self: GatheredInFp8, *call: Any) -> Any:
        found = send(self, *call)
        sent.append([(each.dtype, each.numel()) for each in found[0]])
        return found

    GatheredInFp8.fsdp_pre_all_gather = recorded  # type: ignore[method-assign]
    found = []
    for layer in (each for each in encoder.modules() if isinstance(each, PackedLayer)):
        layer.unshard()  # type: ignore[operator]
        for linear, own in zip(linears_of(layer), layer.fp8.linears, strict=True):
            parts = own.rows.clone(), own.columns.clone(), own.weight.scale.clone(), linear.weight.detach().clone()
            found.append(parts)
        layer.reshard()  # type: ignore[operator]
    del scaling, module
    torch.save((original, found, sent), folder / f"{world.rank}.pt")
    world.leave()


@pytest.mark.parametrize(("ranks", "width"), [(2, 48), (3, 32)])  # with 3, ranks have different numbers of rows
def test_weights_travel_in_fp8_with_the_scale_of_all_ranks(ranks: int, width: int, tmp_path: Path) -> None:
    in_ranks(gathered, width, tmp_path, ranks=ranks)
    for rank in range(ranks):
        original, found, sent = torch.load(tmp_path / f"{rank}.pt")
        bytes_of_ranks = [-(-len(weight) // ranks) * weight.shape[1] for weight in original]
        assert [each for (each,) in sent] == [(torch.uint8, count) for count in bytes_of_ranks]
        for weight, (rows, columns, scale, rounded) in zip(original, found, strict=True):
            largest = reference.LIMITS[torch.float8_e4m3fn] / weight.abs().max()
            assert scale == 2 ** largest.log2().floor()
            expected = (weight * scale).to(torch.float8_e4m3fn)
            assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(columns.view(torch.uint8), expected.view(torch.uint8).t())
            assert torch.equal(rounded, expected.float() / scale)
            assert not torch.equal(rounded, weight)


# ---- curves ----------------------------------------------------------------------------------------------------------


def sharded(folder: Path) -> None:
    world = join("cpu", "fsdp")
    encoder = Encoder()
    module = share_out(encoder, world, fp8=True)
    losses = train(module, ShardedFp8Training(encoder), batches(world.rank), reduce=True)
    weights = {name: whole(each.detach()) for name, each in encoder.named_parameters()}
    torch.save((losses, weights), folder / f"{world.rank}.pt")
    world.leave()


def copied(folder: Path) -> None:
    """The same by DDP, whose ranks have whole weights."""
    world = join("cpu", "ddp")
    encoder = Encoder()
    module = share_out(encoder, world)
    losses = train(module, Fp8Training(encoder), batches(world.rank), reduce=True)
    weights = {name: each.detach() for name, each in encoder.named_parameters()}
    torch.save((losses, weights), folder / f"{world.rank}.pt")
    world.leave()


def test_the_curve_is_that_of_whole_weights(tmp_path: Path) -> None:
    for work in (sharded, copied):
        (tmp_path / work.__name__).mkdir()
        in_ranks(work, tmp_path / work.__name__)
    for rank in range(RANKS):
        losses, weights = torch.load(tmp_path / "sharded" / f"{rank}.pt")
        expected, of_copies = torch.load(tmp_path / "copied" / f"{rank}.pt")
        assert losses == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(weights, of_copies, rtol=1e-5, atol=1e-6)


def test_a_run_with_fsdp_learns_in_fp8(corpus: dict[str, Path], tmp_path: Path) -> None:
    """By the curve of DDP."""
    settings = settings_of(corpus, steps=6, batches_per_step=2, step=StepSettings(precision="fp8"))
    options: dict[str, Any] = {"checkpoint_every": 3, "evaluate_every": 6}
    for name, given in (("fsdp", {"parallel": "fsdp"}), ("ddp", {})):
        for process in train_runs.start_ranks(
            RANKS, train_runs.train, settings, run_of(tmp_path / name, **given, **options)
        ):
            process.join()
            assert process.exitcode == 0
    rows = {name: train_runs.read_rows(tmp_path / name / "log.csv") for name in ("fsdp", "ddp")}
    losses = {name: [float(row["loss"]) for row in found] for name, found in rows.items()}
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-4)
    assert losses["fsdp"][-1] < losses["fsdp"][0]


def test_weights_that_are_not_sharded_are_refused() -> None:
    model = Encoder()
    with pytest.raises(ValueError, match="model: expected one with PackedLayers to compute in FP8, got Encoder with 0"):
        ShardedFp8Training(model)
    gather_in_fp8(model)
    with pytest.raises(TypeError, match="prepared and FSDP shards, got a weight of type GatheredInFp8"):
        sharded_rows(linears(model)[0])
