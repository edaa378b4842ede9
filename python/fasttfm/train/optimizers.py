"""AdamW, LAMB and Muon, and which parameters decay.

AdamW is ``fasttfm.optim.AdamW`` if its kernel supports the parameters, with 16-bit copies of those that forwards cast,
and gradients that backward passes write themselves; on a CPU, and with FSDP, it is torch's fused AdamW.

All read two attributes that the caller of ``step`` sets (the convention of torch's gradient scaler): ``grad_scale``,
by which gradients are divided, and ``found_inf``; if it is 1 the step changes nothing. So clipping needs no pass over
the gradients, and skipping a step no synchronization with the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from fasttfm import optim
from fasttfm.train.muon import Muon, muon_groups
from fasttfm.train.settings import OptimizerSettings
from fasttfm.train.sharded_optimizer import ShardedOptimizer


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices decay; biases and LayerNorms do not."""
    norms = [part for part in module.modules() if isinstance(part, nn.LayerNorm)]
    spared = {parameter for norm in norms for parameter in norm.parameters()}
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    spared |= {parameter for name, parameter in trained if name.rpartition(".")[2] == "bias"}
    groups = [
        {"params": [parameter for _, parameter in trained if parameter not in spared], "weight_decay": weight_decay},
        {"params": [parameter for _, parameter in trained if parameter in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    parameters: nn.Module | Iterable[dict[str, Any]],
    settings: OptimizerSettings,
    *,
    capturable: bool = False,
    sharded: bool = False,
) -> Optimizer:
    """The optimizer of a module's parameters, or of given parameter groups.

    Args:
        capturable: Whether a CUDA graph will capture the step; learning rates are then tensors on the device.
        sharded: Whether its state is divided over the ranks (ZeRO-1); all of them call this.
    """
    if isinstance(parameters, nn.Module):
        groups = parameter_groups(parameters, settings.weight_decay)
        if settings.name == "muon":
            groups = muon_groups(parameters, groups)
    elif settings.name == "muon":
        raise ValueError("make_optimizer: parameters: expected a module for muon, got parameter groups")
    else:
        groups = list(parameters)
    if capturable and settings.name == "muon":
        raise ValueError(
            "make_optimizer: capturable: expected adamw or lamb, got muon, which reads found_inf on the host"
        )
    if not groups:
        raise ValueError("make_optimizer: parameters: expected some that are trained, got none")
    if capturable:
        for group in groups:
            rate = group.get("lr", settings.learning_rate)
            group["lr"] = torch.tensor(float(rate), device=group["params"][0].device, dtype=torch.float32)
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    if settings.name in ("lamb", "muon"):
        kind = Lamb if settings.name == "lamb" else Muon
        return ShardedOptimizer(groups, kind, **options) if sharded else kind(groups, **options)
    if optim.refusal(parameter for group in groups for parameter in group["params"]) is None:
        if sharded:  # a rank has no copies of weights that another one updates
            return ShardedOptimizer(groups, optim.AdamW, **options)
        return optim.AdamW(groups, **options, weight_copies=True, direct_gradients=True, capturable=capturable)
    if sharded:
        return ShardedOptimizer(groups, AdamW, **options, fused=True)
    return AdamW(groups, **options, fused=True, capturable=capturable)


class Lamb(Optimizer):
    """LAMB (You et al., 2020): Adam's update of each parameter, scaled to the norm of the parameter.

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        u  = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay p
        p <- p - lr (|p| / |u|) u       |p| / |u| is 1 where either is 0, and for parameters that do not decay

    It runs on the device: the moments and Adam's update in one pass of torch's fused AdamW, the rest in foreach
    operations, of which only the scaling by ``lr |p| / |u|`` is one kernel per parameter. As in torch's fused
    optimizers, ``grad_scale`` also divides the gradients themselves.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in alike.values():
                self._update(group, parameters)
        return result

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        updates, keep = self._adam_updates(group, parameters)
        rate, decay = group["lr"] * keep, group["weight_decay"]
        if decay != 0:
            torch._foreach_add_(updates, parameters, alpha=decay)
            of_parameters, of_updates = _norms(parameters), _norms(updates)
            known = (of_parameters > 0) & (of_updates > 0)
            rates = rate * torch.where(known, of_parameters / of_updates, 1.0)
            torch._foreach_mul_(updates, list(rates.unbind()))
        else:
            torch._foreach_mul_(updates, rate)
        torch._foreach_sub_(parameters, updates)

    def _adam_updates(self, group: dict[str, Any], parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Adam's update of each parameter, without decay, after a step of the moments; and a factor: 0 if the step is
        skipped, else 1. torch's AdamW adds the updates to zeros if its learning rate is -1."""
        gradients = [parameter.grad.to(parameter.dtype) for parameter in parameters if parameter.grad is not None]
        optim.check_gradients("Lamb", gradients)
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(  # at once: an allocation that fails leaves no half of a state
                    exp_avg=torch.zeros_like(parameter),
                    exp_avg_sq=torch.zeros_like(parameter),
                    step=torch.zeros((), device=parameter.device, dtype=torch.float32),
                )
        first, second, steps = (
            [self.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        updates = [torch.empty_like(parameter, memory_format=torch.contiguous_format) for parameter in parameters]
        torch._foreach_zero_(updates)
        columns, copied = optim.in_one_layout(updates, gradients, first, second)
        scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        optim.adamw_step(
            optim.Columns(columns[0], columns[1], columns[2], columns[3], steps),
            group,
            lr=-1.0,
            weight_decay=0.0,
            grad_scale=scale,
            found_inf=found_inf,
        )
        for tensor, copy in copied:
            tensor.copy_(copy)
        keep = torch.ones((), device=parameters[0].device, dtype=_wide(parameters[0].dtype))
        return updates, keep if found_inf is None else keep - found_inf.to(keep.device, non_blocking=True)


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor, at least in fp32."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=_wide(tensors[0].dtype)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
