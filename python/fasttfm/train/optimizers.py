"""AdamW and LAMB, and which parameters decay.

AdamW is ``fasttfm.optim.AdamW`` if its kernel supports the parameters, with 16-bit copies of those that forwards cast;
on a CPU, and with FSDP, it is torch's fused AdamW.

Both read two attributes that the caller of ``step`` sets (the convention of torch's gradient scaler): ``grad_scale``,
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
from fasttfm.train.settings import OptimizerSettings


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: matrices decay; biases and LayerNorms do not."""
    norms = [each for each in module.modules() if isinstance(each, nn.LayerNorm)]
    spared = {parameter for norm in norms for parameter in norm.parameters()}
    trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
    spared |= {each for name, each in trained if name.rpartition(".")[2] == "bias"}
    groups = [
        {"params": [each for _, each in trained if each not in spared], "weight_decay": weight_decay},
        {"params": [each for _, each in trained if each in spared], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(
    parameters: nn.Module | Iterable[dict[str, Any]], settings: OptimizerSettings, *, capturable: bool = False
) -> Optimizer:
    """The optimizer of a module's parameters, or of given parameter groups.

    Args:
        capturable: Whether a CUDA graph will capture the step; learning rates are then tensors on the device.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameter_groups(parameters, settings.weight_decay)
    groups = list(parameters)
    if not groups:
        raise ValueError("make_optimizer: parameters: expected some that are trained, got none")
    if capturable:
        for group in groups:
            rate = group.get("lr", settings.learning_rate)
            group["lr"] = torch.tensor(float(rate), device=group["params"][0].device)
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "lamb":
        return Lamb(groups, **options)
    if optim.refusal(each for group in groups for each in group["params"]) is None:
        return optim.AdamW(groups, **options, weight_copies=True, capturable=capturable)
    return AdamW(groups, **options, fused=True, capturable=capturable)


class Lamb(Optimizer):
    """LAMB (You et al., 2020): Adam's update of each parameter, scaled to the norm of the parameter.

        m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        u  = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay p
        p <- p - lr (|p| / |u|) u       |p| / |u| is 1 where either is 0, and for parameters that do not decay

    It runs on the device, with foreach operations over each group.
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
            parameters = [each for each in group["params"] if each.grad is not None]
            if parameters:
                self._update(group, parameters)
        return result

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for each in parameters:
            if not self.state[each]:
                self.state[each]["exp_avg"] = torch.zeros_like(each)
                self.state[each]["exp_avg_sq"] = torch.zeros_like(each)
                self.state[each]["step"] = torch.zeros((), device=each.device)
        states = [self.state[each] for each in parameters]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = group["betas"]
        gradients, keep = self._gradients(parameters)
        # In a skipped step gradients are 0, moments do not decay and the rate is 0.
        torch._foreach_mul_(first, torch.where(keep > 0, beta1, 1.0))
        torch._foreach_add_(first, torch._foreach_mul(gradients, 1 - beta1))
        torch._foreach_mul_(second, torch.where(keep > 0, beta2, 1.0))
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        torch._foreach_add_([state["step"] for state in states], keep)

        # Parameters whose first gradient came later have done fewer steps.
        counts = torch.stack([state["step"] for state in states]).double().clamp(min=1)
        denominator = torch._foreach_sqrt(second)
        torch._foreach_div_(denominator, list((1 - beta2**counts).sqrt().float().unbind()))
        torch._foreach_add_(denominator, group["eps"])
        update = torch._foreach_div(first, denominator)
        torch._foreach_div_(update, list((1 - beta1**counts).float().unbind()))
        rates: list[Tensor] = [group["lr"] * keep] * len(parameters)
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, parameters, alpha=group["weight_decay"])
            sizes = zip(torch._foreach_norm(parameters), torch._foreach_norm(update), strict=True)
            rates = [rate * _trust(*norms) for rate, norms in zip(rates, sizes, strict=True)]
        torch._foreach_sub_(parameters, [change * rate for change, rate in zip(update, rates, strict=True)])

    def _gradients(self, parameters: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The gradients to use, and a factor: 0 if the step is skipped, else 1."""
        gradients = [each.grad for each in parameters if each.grad is not None]
        keep = torch.ones((), device=parameters[0].device)
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            keep = 1 - found_inf
            gradients = [torch.where(keep > 0, each, 0.0) for each in gradients]
        if (grad_scale := getattr(self, "grad_scale", None)) is not None:
            gradients = list(torch._foreach_mul(gradients, torch.where(keep > 0, 1 / grad_scale, 1.0)))
        return gradients, keep


def _trust(parameter: Tensor, update: Tensor) -> Tensor:
    return torch.where((parameter > 0) & (update > 0), parameter / update, 1.0)
