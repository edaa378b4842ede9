"""``ShardedOptimizer``: an optimizer whose state is divided over the ranks of DDP (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """torch's ``ZeroRedundancyOptimizer`` for optimizers that read ``grad_scale`` and ``found_inf``: every rank has the
    state of some parameters, updates these, and sends them to the others. Gradients are those of all ranks, on each.

    The class of the optimizer must update each parameter independently of the others.

    Args:
        params: The parameter groups, the same on all ranks.
        optimizer_class: The optimizer of a rank's parameters.
        options: Its arguments.
    """

    counts_changes = True  # for ops/core/counted_changes.py
    _step_supports_amp_scaling = True

    def __init__(self, params: Iterable[Any], optimizer_class: type[Optimizer], **options: Any) -> None:
        super().__init__(params, optimizer_class, **options)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        self._numbers = {parameter: number for number, parameter in enumerate(every)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        for name in ("grad_scale", "found_inf"):
            setattr(self.optim, name, getattr(self, name, None))
        result = super().step(closure, **options)
        increment_version(list(self._numbers))  # which neither fused steps nor ZeRO's broadcasts do
        return result

    @property
    def updated(self) -> set[Tensor]:
        """The parameters whose state this rank has."""
        return {parameter for group in self.optim.param_groups for parameter in group["params"]}

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's parameters, by their numbers among all parameters."""
        state = {self._numbers[parameter]: dict(entry) for parameter, entry in self.optim.state.items()}
        return {**Optimizer.state_dict(self), "state": state}

    def whole_state(self) -> dict[int, Any]:
        """The state of all parameters, as the optimizer of one process has it, in rank 0; an empty one in others. All
        ranks call this."""
        self.consolidate_state_dict(to=0)
        state: dict[int, Any] = super().state_dict()["state"] if self.rank == 0 else {}
        self._all_state_dicts: list[dict[str, Any]] = []  # a copy on the host
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this rank's parameters from a state of all or of only these."""
        updated, parameters = self.updated, list(self._numbers)
        for number, entry in state_dict["state"].items():
            if (parameter := parameters[number]) in updated:
                self.optim.state[parameter] = {name: value.to(parameter.device) for name, value in entry.items()}
        for groups in (self.param_groups, self.optim.param_groups):
            for group, loaded in zip(groups, state_dict["param_groups"], strict=True):
                group.update({name: value for name, value in loaded.items() if name != "params"})


def parameters_with_state(optimizer: Optimizer) -> dict[int, Tensor]:
    """The parameters whose state this rank has, by their numbers among all."""
    updated = optimizer.updated if isinstance(optimizer, ShardedOptimizer) else None
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: parameter for number, parameter in enumerate(every) if updated is None or parameter in updated}
