"""``GatedActivation`` and ``GatedMLP``: GeGLU, SwiGLU and ReGLU as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn.parts import known_activation, product


class GatedActivation(nn.Module):
    """``activation(gate) * up`` of the two halves of the last dimension: ``[..., 2 C]`` to ``[..., C]``.

    ``torch.nn.GLU`` with another activation: ``"gelu"`` makes it GeGLU, ``"silu"`` SwiGLU, ``"relu"`` ReGLU. The gate
    is the first half, as in transformers' ModernBERT and Phi-3; with ``gate_first=False`` it is the second, as in
    ``torch.nn.GLU`` and diffusers.
    """

    def __init__(self, activation: str = "gelu", *, gate_first: bool = True) -> None:
        super().__init__()
        self.activation = known_activation("GatedActivation", activation)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        return ops.gated_activation(x, activation=self.activation, gate_first=self.gate_first)

    def extra_repr(self) -> str:
        return f"{self.activation!r}, gate_first={self.gate_first}"


class GatedMLP(nn.Module):
    """The feed-forward block of ModernBERT and LLaMA: ``down_proj(activation(gate) * up)``, where one GEMM,
    ``gate_up_proj``, computes both gate and up.

    For LLaMA's weights set ``gate_up_proj.weight = torch.cat([gate_proj.weight, up_proj.weight])``; those of ModernBERT
    (``Wi``, ``Wo``) and Phi-3 have this layout.

    Args:
        width: Columns of the input and the output.
        intermediate: Columns of the gate, and of up.
        activation: A key of ``ops.ACTIVATIONS``: ``"silu"`` (SwiGLU), ``"gelu"`` (GeGLU), ``"relu"`` (ReGLU).
        bias: Whether both linear layers have a bias. The activation's kernel adds the first one.
        gate_first: Whether the gate is the first half of ``gate_up_proj``'s output or the second.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        width: int,
        intermediate: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        gate_first: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = known_activation("GatedMLP", activation)
        self.gate_first = gate_first
        self.gate_up_proj = nn.Linear(width, 2 * intermediate, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, width, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden, bias = product(self.gate_up_proj, x)
        hidden = ops.gated_activation(hidden, bias, activation=self.activation, gate_first=self.gate_first)
        y: Tensor = self.down_proj(hidden)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gate_first={self.gate_first}"
