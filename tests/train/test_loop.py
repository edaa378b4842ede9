"""The training loop: means over microbatches, clipping, skipped steps, asynchronous metrics."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttfm import optim
from fasttfm.testing.tolerance import GRADIENT_FACTOR, compare
from fasttfm.train import (
    NonFiniteError,
    Objective,
    OptimizerSettings,
    Schedule,
    ScheduleSettings,
    StepSettings,
    Trainer,
    make_optimizer,
)
from fasttfm.train.muon import Muon
from fasttfm.train.optimizers import Lamb
from fasttfm.train.schedule import factor

# As in BERT: a loss over some rows, and another one with a count of its own.
OBJECTIVE = Objective(
    ("squares", "distances"),
    lambda batch: (len(batch.x), len(batch.marks)),
    lambda module, batch: (
        (module(batch.x)[:, 0] - batch.y).square().sum(),
        module(batch.x[batch.marks])[:, 1].abs().sum(),
    ),
)


@dataclass
class Part:
    x: Tensor
    y: Tensor
    marks: Tensor
    tokens: int = 7

    def to(self, device: torch.device, non_blocking: bool = True) -> Part:
        return self

    def double(self) -> Part:
        return Part(self.x.double(), self.y.double(), self.marks)


def part(rows: int, marks: int, seed: int) -> Part:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator)
    return Part(x, x[:, 0] - x[:, 1], torch.arange(marks))


def test_terms_have_weights() -> None:
    """The loss and the gradient have the weights; the terms of results do not."""
    given, weights = part(12, 5, 0), (1.0, 50.0)
    found = {}
    for objective in (dataclasses.replace(OBJECTIVE, weights=weights), OBJECTIVE):
        torch.manual_seed(0)
        module = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0, fused=True)
        settings = StepSettings(clip=None)
        trainer = Trainer(module, objective, optimizer, Schedule(optimizer, ScheduleSettings(9)), settings)
        terms = [total / count for total, count in zip(OBJECTIVE.sums(module, given), (12, 5), strict=True)]
        loss = sum(weight * term for weight, term in zip(objective.term_weights, terms, strict=True))
        gradients = torch.autograd.grad(loss, [*module.parameters()])
        norm = torch.cat([each.flatten() for each in gradients]).norm()
        (result,) = [*trainer.step([given]), *trainer.finish()]
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
        assert trainer.evaluate([given])["loss"] == pytest.approx(loss.item(), rel=1e-5)
        found[objective.term_weights] = result.terms
    assert len({str(terms) for terms in found.values()}) == 1


def test_a_model_in_evaluation_mode_is_trained_in_training_mode() -> None:
    """``from_pretrained`` returns such models; the module around them is in training mode."""
    inner = module().eval()
    outer = nn.Sequential(inner)
    assert outer.training
    optimizer = make_optimizer(outer, OptimizerSettings())
    Trainer(outer, OBJECTIVE, optimizer, Schedule(optimizer, ScheduleSettings(3))).step([part(5, 2, seed=0)])
    assert inner.training


def test_an_optimizer_that_ignores_clipping_is_refused() -> None:
    model = module()
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters(), foreach=True)):
        with pytest.raises(ValueError, match="Trainer: optimizer: expected one that reads grad_scale and found_inf"):
            Trainer(model, OBJECTIVE, optimizer, Schedule(optimizer, ScheduleSettings(3)), StepSettings(clip=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    before = [each.detach().clone() for each in model.parameters()]
    Trainer(model, OBJECTIVE, optimizer, Schedule(optimizer, ScheduleSettings(3)), StepSettings(clip=0.1)).step(
        [part(5, 2, seed=0)]
    )
    moved = torch.stack([(old - new).square().sum() for old, new in zip(before, model.parameters(), strict=True)]).sum()
    assert moved.sqrt().item() == pytest.approx(0.1, rel=1e-4)


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))


def trainer(model: nn.Module, objective: Objective = OBJECTIVE, steps: int = 10, **settings: Any) -> Trainer:
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=0.01))
    return Trainer(model, objective, optimizer, Schedule(optimizer, ScheduleSettings(steps)), StepSettings(**settings))


def gradients(model: nn.Module, parts: Sequence[Part], objective: Objective = OBJECTIVE) -> list[Tensor]:
    """The gradients that the optimizer gets."""
    found: list[Tensor] = []
    made = trainer(model, objective, clip=None)
    step = made.optimizer.step

    def noted(*arguments: Any) -> Any:
        found.extend(each.grad.clone() for each in model.parameters() if each.grad is not None)
        return step(*arguments)

    made.optimizer.step = noted  # type: ignore[method-assign]
    made.step(parts)
    return found


def test_the_mean_over_microbatches_of_different_counts() -> None:
    parts = [part(5, 4, 0), part(40, 1, 1), part(11, 11, 2)]
    model = module()
    exact_model = copy.deepcopy(model).double()
    x = torch.cat([each.x for each in parts])
    starts = [0, 5, 45]
    marks = torch.cat([each.marks + start for each, start in zip(parts, starts, strict=True)])
    whole = Part(x, torch.cat([each.y for each in parts]), marks)
    found = gradients(copy.deepcopy(model), parts)
    naive = gradients(copy.deepcopy(model), [whole])
    outputs = exact_model(x.double())
    loss = (outputs[:, 0] - whole.y.double()).square().mean() + outputs[marks, 1].abs().mean()
    exact = torch.autograd.grad(loss, list(exact_model.parameters()))

    def accepted(candidate: Sequence[Tensor]) -> bool:
        pairs = zip(candidate, naive, exact, strict=True)
        return all(compare("gradient", *three, GRADIENT_FACTOR).ok for three in pairs)

    assert accepted(found)
    mean_of_means = Objective(
        OBJECTIVE.terms,
        lambda _: (1, 1),
        lambda m, b: [each / count for each, count in zip(OBJECTIVE.sums(m, b), OBJECTIVE.counts(b), strict=True)],
    )
    assert not accepted(gradients(copy.deepcopy(model), parts, mean_of_means))
    result = trainer(model).step(parts)[0]
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert result.tokens == 21


def test_clipping_is_that_of_torch() -> None:
    ours, theirs = module(), module()
    made = trainer(ours, clip=0.1)
    optimizer = make_optimizer(theirs, OptimizerSettings(learning_rate=0.01))
    schedule = Schedule(optimizer, ScheduleSettings(10))
    for step in range(3):
        batch = part(20, 5, step)
        (result,) = made.step([batch])
        schedule.set(step)
        sums, counts = OBJECTIVE.sums(theirs, batch), OBJECTIVE.counts(batch)
        sum(each / count for each, count in zip(sums, counts, strict=True)).backward()  # type: ignore[union-attr]
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        assert norm > 0.1
        assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = module()
    made = trainer(model, bad_steps=3)
    made.step([part(8, 2, 0)])
    before = copy.deepcopy((model.state_dict(), made.optimizer.state_dict()["state"]))
    broken = part(8, 2, 1)
    broken.x[3, 2] = bad
    (result,) = made.step([part(8, 2, 2), broken])
    assert result.skipped
    assert made.skipped == 1
    after = (model.state_dict(), made.optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    made.step([broken])
    assert not made.step([part(8, 2, 3)])[0].skipped  # the row is interrupted
    made.step([broken])
    made.step([broken])
    with pytest.raises(NonFiniteError, match=r"in 3 steps in a row, the last of them step 7 .*loss (nan|inf)"):
        made.step([broken])


def test_a_term_with_a_count_of_zero_adds_nothing() -> None:
    (result,) = trainer(module()).step([part(6, 0, 0)])
    assert not result.skipped
    assert result.terms["distances"] == 0


def test_parameters_outside_the_optimizer_and_without_a_gradient_stay() -> None:
    model = module()
    model[0].requires_grad_(False)
    model.append(nn.Linear(2, 2))  # never called
    frozen = model[0].weight.clone()
    objective = Objective(("loss",), lambda batch: (len(batch.x),), lambda m, batch: (m[:4](batch.x).sum(),))
    made = trainer(model, objective)
    made.step([part(4, 1, 0)])
    assert torch.equal(model[0].weight, frozen)


def test_evaluation_changes_no_state() -> None:
    model = module().append(nn.Dropout(0.5))
    made = trainer(model)
    made.step([part(9, 3, 0)])
    state = torch.get_rng_state()
    batches = [part(9, 3, 1), part(2, 1, 2)]
    first = made.evaluate(batches)
    assert first == made.evaluate(batches)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert first["loss"] == first["squares"] + first["distances"]


def test_group_rates_follow_the_schedule() -> None:
    model = module()
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[3].parameters(), "lr": 0.5}]
    optimizer = make_optimizer([{**group, "params": list(group["params"])} for group in groups], OptimizerSettings())
    schedule = Schedule(optimizer, ScheduleSettings(10, warmup=4, kind="cosine", final=0.2))
    assert schedule.set(0) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    assert schedule.set(3) == schedule.set(4) == 1.0
    assert schedule.set(7) == pytest.approx(0.6)  # half way
    assert schedule.set(10) == pytest.approx(0.2)
    # A CUDA graph reads the same rates from fp32 tensors.
    made = [make_optimizer(module(), OptimizerSettings(learning_rate=1e-3), capturable=each) for each in (False, True)]
    plain, held = (Schedule(each, ScheduleSettings(40, warmup=3)) for each in made)
    for step in range(40):
        assert plain.set(step) == held.set(step)
        assert made[0].param_groups[0]["lr"] == float(made[1].param_groups[0]["lr"])
    linear = Schedule(make_optimizer(model, OptimizerSettings(learning_rate=1.0)), ScheduleSettings(10, warmup=0))
    assert [linear.set(step) for step in (0, 5, 10, 12)] == [1.0, 0.5, 0.0, 0.0]
    constant = ScheduleSettings(20, 4, "wsd", final=0.5)
    assert [factor(constant, step) for step in (0, 3, 4, 15, 16, 18, 20)] == [0.25, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5]
    rates = [factor(ScheduleSettings(10, 2, "wsd", decay=decay), step) for decay in (0, 8) for step in (2, 6, 9)]
    assert rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.125]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ScheduleSettings(0), "steps: expected a number from 1 on, got 0"),
        (lambda: ScheduleSettings(5, warmup=9), "warmup: expected a number of steps from 0 to all 5, got 9"),
        (
            lambda: ScheduleSettings(5, kind="wave"),
            "schedule: expected one of linear, cosine, constant, wsd, got 'wave'",
        ),
        (lambda: ScheduleSettings(9, decay=2), "decay: expected with the schedule wsd, got linear"),
        (lambda: ScheduleSettings(9, 4, "wsd", decay=6), "decay: expected a number of steps from 0 to the 5 after"),
        (lambda: make_optimizer([{}], OptimizerSettings("muon")), "expected a module for muon, got parameter groups"),
        (lambda: OptimizerSettings("sgd"), "optimizer: expected one of adamw, lamb, muon, got 'sgd'"),
        (lambda: OptimizerSettings(learning_rate=-1.0), "learning_rate: expected a number from 0 on, got -1.0"),
        (lambda: StepSettings(clip=0.0), "clip: expected a max gradient norm above 0 or None, got 0.0"),
        (lambda: StepSettings(precision="int8"), "precision: expected one of float32, bfloat16, fp8, got 'int8'"),
        (lambda: make_optimizer([], OptimizerSettings()), "expected some that are trained, got none"),
    ],
)
def test_wrong_settings_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="expected") as raised:
        make()
    assert sentence in str(raised.value)


@pytest.mark.parametrize("factor", [1.0, float("nan")], ids=["clipped", "skipped"])
@pytest.mark.parametrize("name", ["torch", "fasttfm", "lamb", "muon"])
def test_an_optimizer_is_left_as_it_was(name: str, factor: float) -> None:
    """Its caller may step with it: without the clipping, and without skipping steps."""
    model = module()
    made: dict[str, Any] = {
        "torch": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "fasttfm": lambda: optim.AdamW(model.parameters(), max_norm=7.0),
        "lamb": lambda: Lamb(model.parameters()),
        "muon": lambda: Muon(model.parameters()),
    }
    optimizer = made[name]()
    before = {name: value for name, value in vars(optimizer).items() if isinstance(value, (float, Tensor))}
    trainer = Trainer(model, OBJECTIVE, optimizer, Schedule(optimizer, ScheduleSettings(3)), StepSettings(clip=1e-3))
    batch = part(5, 2, seed=0)
    results = trainer.step([dataclasses.replace(batch, x=batch.x * factor)]) + trainer.flush()
    assert [result.skipped for result in results] == [factor != 1.0]
    after = {name: value for name, value in vars(optimizer).items() if isinstance(value, (float, Tensor))}
    after.pop("last_norm", None)
    assert after == before
