"""LAMB against its formula, and which parameters have weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fasttfm import models
from fasttfm.testing.tolerance import GRADIENT_FACTOR, compare
from fasttfm.train import Lamb, parameter_groups

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


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_lamb_matches_its_formula(decay: float, scale: float) -> None:
    torch.manual_seed(0)
    starts = [torch.randn(7, 5), torch.zeros(3)]
    gradients = [[torch.randn_like(start) for _ in range(5)] for start in starts]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = Lamb(parameters, LR, BETAS, EPS, decay)
    optimizer.grad_scale = torch.tensor(scale)  # type: ignore[attr-defined]
    for step in range(5):
        for parameter, own in zip(parameters, gradients, strict=True):
            parameter.grad = own[step].clone()
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        optimizer.step()
        for parameter in parameters:  # between any two steps, one that is skipped
            parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
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
