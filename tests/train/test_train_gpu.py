"""On a GPU: steps do not synchronize, CUDA graphs give the same results, runs resume from checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from train_runs import run_of, settings_of

from fasttfm import data, models, optim
from fasttfm.models.objectives import NextSentence
from fasttfm.train import (
    Objective,
    OptimizerSettings,
    Schedule,
    ScheduleSettings,
    StepSettings,
    Trainer,
    make_optimizer,
)
from fasttfm.train.fixed_shapes import FixedBatch, Shape, filled
from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import pretrain

pytestmark = pytest.mark.gpu
_HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
PRECISIONS = [
    "bfloat16",
    pytest.param("fp8", marks=pytest.mark.skipif(not _HAS_FP8, reason="needs FP8 tensor cores")),
]


@pytest.fixture(scope="module")
def shards(corpus: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> data.TokenShards:
    folder = tmp_path_factory.mktemp("shards")
    return data.prepare(corpus["data"], data.load_tokenizer(corpus["wordpiece"]), folder, progress=False)


def trainer(**settings: Any) -> Trainer:
    torch.manual_seed(0)
    config = models.BertConfig(**{**train_runs.SIZES["bert"], "hidden_size": 128}, vocab_size=300)
    module = NextSentence(models.BertForPreTraining(config)).cuda()
    optimizer = make_optimizer(module, OptimizerSettings(), capturable=settings.get("cuda_graph", False))
    schedule = Schedule(optimizer, ScheduleSettings(40, 4))
    torch.manual_seed(1)
    step = StepSettings(**{"precision": "bfloat16", **settings})
    return Trainer(module, Objective.of(module), optimizer, schedule, step)


def batches(shards: data.TokenShards, *, fixed: bool) -> Iterator[data.Batch]:
    stream = data.BatchStream(shards, data.SequenceFormat("nsp", 64), tokens_per_batch=512, seed=0)
    shape = Shape(512, 24, stream.max_predictions or 0, 0)
    return (filled(batch, shape) if fixed else batch for batch in stream)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_does_not_synchronize(precision: str, shards: data.TokenShards) -> None:
    made, source = trainer(precision=precision), batches(shards, fixed=False)
    assert isinstance(made.optimizer, optim.AdamW)
    for _ in range(3):
        made.step([next(source), next(source)])
    given = [next(source) for _ in range(12)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pair in zip(given[::2], given[1::2], strict=True):
            made.step(pair)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made.flush()
    assert made.skipped == 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_cuda_graph_gives_the_same_numbers(precision: str, shards: data.TokenShards) -> None:
    """Including dropout, for which each replay draws new random numbers. A batch of another shape runs without the
    graph."""
    given = list(itertools.islice(batches(shards, fixed=True), 16))
    assert all(isinstance(batch, FixedBatch) for batch in given)
    given[9] = next(batches(shards, fixed=False))
    losses = []
    for graph in (False, True):
        made = trainer(cuda_graph=graph, precision=precision)
        found = [result for batch in given for result in made.step([batch])] + made.flush()
        losses.append([(result.loss, result.gradient_norm) for result in found])
        if graph:
            assert made._graphs is not None
            assert made._graphs.replayed == len(given) - 3 - 1
    assert losses[0] == losses[1]


@pytest.mark.skipif(not _HAS_FP8, reason="needs FP8 tensor cores")
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_an_fp8_graph_is_right_after_first_steps_that_are_not_finite(
    bad: int, shards: data.TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 0 the host knows at the capture that nothing is to be measured. With 2 gradients have a history of which the
    host does not know yet, with 5 they have none: the graph measures, where later steps without a graph do not."""
    given = list(itertools.islice(batches(shards, fixed=True), 12))
    terms, losses = Trainer._terms, []

    def spoilt(self: Trainer, batch: Any) -> Any:
        return [each * factor for each in terms(self, batch)]

    monkeypatch.setattr(Trainer, "_terms", spoilt)
    for graph in (False, True):
        made = trainer(cuda_graph=graph, precision="fp8", bad_steps=10)
        factor = torch.ones((), device="cuda")
        results = []
        for index, batch in enumerate(given):
            factor.fill_(float("inf") if index < bad else 1.0)
            results += made.step([batch])
        results += made.flush()
        assert [result.skipped for result in results] == [index < bad for index in range(len(given))]
        losses.append([result.loss for result in results[bad:]])
        assert made.fp8 is not None
        assert made.fp8.scales.history.isfinite().all()
        gradients = [slot for slot in made.fp8.scales.slots if slot.dtype == torch.float8_e5m2]
        assert all(slot.scale.item() > 1 for slot in gradients)
    if bad == 0:  # while tensors are measured, other kernels round the gradient of qkv once more
        assert losses[0] == losses[1]
    else:
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_graph_skips_steps_that_are_not_finite(precision: str, shards: data.TokenShards) -> None:
    made, source = trainer(cuda_graph=True, precision=precision), batches(shards, fixed=True)
    for _ in range(6):
        made.step([next(source)])
    parameter = next(made.module.parameters())
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter[7] = float("nan")
    made.step([next(source)])
    assert [result.skipped for result in made.flush()][-1]
    assert torch.equal(parameter[8:], kept[8:])


def test_compiled_steps_learn(shards: data.TokenShards) -> None:
    made, source = trainer(compile=True), batches(shards, fixed=False)
    found = [result for _ in range(12) for result in made.step([next(source)])] + made.flush()
    assert not any(result.skipped for result in found)
    assert found[-1].loss < found[0].loss


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_run_resumes_from_a_checkpoint(
    cuda_graph: bool, precision: str, corpus: dict[str, Path], tmp_path: Path
) -> None:
    settings = settings_of(
        corpus, steps=12, step=StepSettings(precision=precision, cuda_graph=cuda_graph), tokens_per_step=512
    )
    options: dict[str, Any] = {"device": "cuda", "checkpoint_every": 6, "workers": 1}
    pretrain(settings, run_of(tmp_path / "whole", **options))
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / "whole" / "checkpoint-000006").rename(parts / "checkpoint-000006")
    pretrain(settings, run_of(parts, resume=True, **options))
    expected = {row["step"]: row["loss"] for row in read_rows(tmp_path / "whole" / "log.csv")}
    found = {row["step"]: row["loss"] for row in read_rows(parts / "log.csv")}
    assert found == {step: loss for step, loss in expected.items() if int(step) > 6}
