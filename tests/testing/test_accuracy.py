"""How an op's outputs are compared: a single number in several draws of the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.testing.harness import accuracy
from fasttfm.testing.specs.distillation_loss import SPEC


@pytest.mark.parametrize(("name", "draws"), [("masked", 5), ("none", 1)])
def test_a_single_number_is_compared_in_several_draws(name: str, draws: int) -> None:
    case = next(case for case in SPEC.cases if case.name == name)
    seen: list[Tensor] = []

    def wrong_in_the_last_draw(**arguments: Any) -> Tensor:
        seen.append(arguments["student_hidden"].detach())
        return SPEC.reference(**arguments) * (1.001 if len(seen) == draws else 1.0)

    loss, *gradients = accuracy(SPEC, case, torch.float32, None, function=wrong_in_the_last_draw)
    assert len(seen) == len({found.sum().item() for found in seen}) == draws
    assert not loss.ok
    assert len(gradients) == 3
    assert all(gradient.ok for gradient in gradients) == (draws > 1)  # they are of the first draw
