"""LAMB against its formula, and which parameters have weight decay."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm import models
from fasttfm.optim import AdamW
from fasttfm.testing.tolerance import GRADIENT_FACTOR, compare
from fasttfm.train import Lamb, Schedule, ScheduleSettings, parameter_groups

LR, BETAS, EPS, DECAY = 0.02, (0.9, 0.99), 1e-6, 0.1


def formula(start: Tensor, gradients: list[Tensor], decay: float, scale: float) -> Tensor:
    """The formula of the paper for one parameter."""
    p, m, v = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    for t, g in enumerate((gradient / scale for gradient in gradients), start=1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        update = (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS) + decay * p
        ratio = p.norm() / update.norm() if decay and p.norm() > 0 and update.norm() > 0 else 1.0
        p = p - LR * ratio * update
    return p


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_lamb_matches_its_formula(decay: float, scale: float, device: str) -> None:
    torch.manual_seed(0)
    starts = [torch.randn(7, 5).to(device), torch.zeros(3, device=device), torch.randn(9, 4).to(device).t()]
    gradients = [[torch.randn_like(start) for _ in range(5)] for start in starts]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = Lamb(parameters, LR, BETAS, EPS, decay)
    optimizer.grad_scale = torch.tensor(scale, device=device)  # type: ignore[attr-defined]
    for step in range(5):
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own[step].clone()
        optimizer.found_inf = torch.tensor(0.0, device=device)  # type: ignore[attr-defined]
        optimizer.step()
        for parameter in parameters:  # between any two steps, one that is skipped
            parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.found_inf = torch.tensor(1.0, device=device)  # type: ignore[attr-defined]
        optimizer.step()
    for parameter, start, own in zip(parameters, starts, gradients, strict=True):
        naive = formula(start, own, decay, scale)
        exact = formula(start.double(), [each.double() for each in own], decay, scale)
        comparison = compare("parameter", parameter.detach(), naive, exact, GRADIENT_FACTOR)
        assert comparison.ok, comparison


def test_biases_and_norms_do_not_decay() -> None:
    config = models.BertConfig.named("tiny", vocab_size=50)
    model = models.BertForPreTraining(config)
    decaying, spared = parameter_groups(model, 0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decaying["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0
    for group, wanted in ((decaying, False), (spared, True)):
        for parameter in group["params"]:
            name = names.pop(id(parameter))
            assert (name.endswith("bias") or "norm" in name) == wanted, name
    assert not names
    model.requires_grad_(False)
    model.next_sentence.requires_grad_(True)
    assert [len(group["params"]) for group in parameter_groups(model, 0.3)] == [1, 1]


def test_lamb_counts_the_steps_of_each_parameter() -> None:
    """A parameter whose first gradient comes later has the bias correction of its own first step."""

    def trained(*, together: bool) -> list[Tensor]:
        torch.manual_seed(0)
        both = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
        lamb = Lamb(both if together else [{"params": [each]} for each in both], lr=0.1)
        for step in range(3):
            for each, first in zip(both, (0, 2), strict=True):
                each.grad = torch.randn(4, 4) if step >= first else None
            lamb.step()
        return [each.detach() for each in both]

    for found, expected in zip(trained(together=True), trained(together=False), strict=True):
        assert torch.equal(found, expected)


class Calls(TorchDispatchMode):
    """Counts the ops that run kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) != "aten.empty_like.default":
            self.counts[str(func)] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_lamb_calls_as_many_ops_for_many_parameters(decay: float) -> None:
    """Also if parameters have done different numbers of steps, and only the scaling has a tensor for each of them."""
    counts = []
    for number in (2, 20):
        parameters = [nn.Parameter(torch.randn(3, 2)) for _ in range(number)]
        optimizer = Lamb(parameters, LR, BETAS, EPS, decay)
        for given in (parameters[1:], parameters):
            for each in given:
                each.grad = torch.randn(3, 2)
            optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
            with Calls() as calls:
                optimizer.step()
        counts.append(calls.counts)
    assert counts[0] == counts[1]
    assert counts[0]["aten._fused_adamw_.default"] == 1
    lists = {name for name in counts[0] if name.endswith("_.List")}
    assert lists <= {"aten._foreach_mul_.List", "aten._foreach_add_.List", "aten._foreach_sub_.List"}


@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_a_loaded_lamb_continues_with_the_same_bits(decay: float) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    optimizer = Lamb(parameters, LR, BETAS, EPS, decay)
    gradients = [[torch.randn(4, 3) for _ in parameters] for _ in range(6)]
    for step in range(3):
        for each, gradient in zip(parameters, gradients[step], strict=True):
            each.grad = None if step == 0 and each is parameters[1] else gradient
        optimizer.step()
    others = copy.deepcopy(parameters)
    resumed = Lamb(others, LR, BETAS, EPS, decay)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [float(resumed.state[each]["step"]) for each in others] == [3, 2, 3]
    for step in range(3, 6):
        for which, some in ((optimizer, parameters), (resumed, others)):
            for each, gradient in zip(some, gradients[step], strict=True):
                each.grad = gradient.clone()
            which.step()
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_lamb_with_other_types_and_zero_sizes(dtype: torch.dtype) -> None:
    """In 16 bits the norms and the update are computed in fp32."""
    torch.manual_seed(0)
    start, gradient = torch.randn(300, 400).to(dtype), torch.randn(300, 400).to(dtype)
    parameters = [nn.Parameter(start.clone()), nn.Parameter(torch.randn(4)), nn.Parameter(torch.empty(0, 3))]
    for each, value in zip(parameters, (gradient, torch.randn(4), torch.empty(0, 3)), strict=True):
        each.grad = value
    Lamb(parameters, LR, BETAS, EPS, DECAY).step()
    exact = formula(start.double(), [gradient.double()], DECAY, 1.0)
    error = (parameters[0].detach().double() - exact).abs().max()
    assert error <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_lamb_refuses_sparse_and_complex_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    rotation = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    rotation.grad = torch.ones_like(rotation)
    for parameter in (table.weight, rotation):
        with pytest.raises(ValueError, match="Lamb: params: expected dense gradients of real numbers"):
            Lamb([parameter]).step()


def test_lamb_with_a_gradient_scaler() -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(4, 3), torch.randn(4, 3)
    found = []
    for scaled in (True, False):
        parameter = nn.Parameter(start.clone())
        optimizer = Lamb([parameter], LR, BETAS, EPS, DECAY)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        for factor in (1.0, float("inf"), -2.0):
            if factor == float("inf") and not scaled:
                continue
            optimizer.zero_grad()
            scaler.scale((parameter * gradient * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[parameter]["step"] == 2
        found.append(parameter.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
@pytest.mark.parametrize("rate", [0.5, 1, torch.tensor(0.25)])
def test_a_schedule_continues_during_warmup(kind: Any, rate: Any) -> None:
    """Whether it is made before or after the optimizer's state is loaded."""
    settings = ScheduleSettings(steps=10, warmup=4)

    def made() -> Any:
        one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
        return kind([{"params": [one], "lr": 2.0}, {"params": [other]}], lr=copy.deepcopy(rate))

    whole = made()
    schedule = Schedule(whole, settings)
    expected = [(schedule.set(step), [float(group["lr"]) for group in whole.param_groups]) for step in range(10)]
    for before in (True, False):
        first, second = made(), made()
        Schedule(first, settings).set(1)
        schedule = Schedule(second, settings)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        if not before:
            schedule = Schedule(second, settings)
        for step in range(2, 10):
            assert (schedule.set(step), [float(group["lr"]) for group in second.param_groups]) == expected[step]
