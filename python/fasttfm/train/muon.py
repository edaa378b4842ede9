"""``Muon``: torch's Muon for the matrices of layers and its AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from fasttfm.nn import PackedLayer


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for parameter groups with ``muon=True``, AdamW for the others.

        m <- b m + (1 - b) g        b is the momentum
        u  = orthogonalized((1 - b) g + b m)        five Newton-Schulz iterations in bf16
        p <- p - lr (decay p + 0.2 sqrt(max(rows, columns)) u)

    The factor of the update gives it the root mean square of AdamW's (Liu et al., 2025), so that both take one learning
    rate. A fused projection of queries, keys and values is one matrix. As in torch's fused optimizers, ``grad_scale``
    also divides the gradients themselves. A step with ``found_inf`` synchronizes with the GPU.

    Args:
        params: Parameter groups. Those of Muon have only matrices.
        lr: The learning rate of both.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: That of both.
        momentum: Muon's.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "muon": False})
        for group in self.param_groups:
            options = {"momentum": momentum} if group["muon"] else {"betas": betas, "eps": eps}
            group.update({name: group.get(name, value) for name, value in options.items()})
        self._connect()

    def _connect(self) -> None:
        """Makes torch's optimizers of the groups, with the same groups and state."""
        matrices = [group for group in self.param_groups if group["muon"]]
        others = [group for group in self.param_groups if not group["muon"]]
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._parts.append(AdamW(others, fused=True))
        for part in self._parts:
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._connect()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        scale, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        if found_inf is not None and bool(found_inf):
            return result
        gradients = [
            parameter.grad for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        if scale is not None and gradients:
            torch._foreach_div_(gradients, scale)
        for part in self._parts:
            part.step()
        return result


def muon_groups(module: nn.Module, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divides parameter groups: the matrices of layers, which are not embeddings, get a group for Muon."""
    layers = [layer for layer in module.modules() if isinstance(layer, PackedLayer)]
    inner = [part for layer in layers for part in layer.modules() if not isinstance(part, nn.Embedding)]
    chosen = {parameter for part in inner for parameter in part.parameters(recurse=False) if parameter.ndim == 2}
    divided = []
    for group in groups:
        for muon in (True, False):
            parameters = [parameter for parameter in group["params"] if (parameter in chosen) == muon]
            divided.append({**group, "params": parameters, "muon": muon})
    return [group for group in divided if group["params"]]
