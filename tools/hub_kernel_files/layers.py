"""Layers for ``kernels.kernelize``: they read the attributes of the module whose ``forward`` they replace."""

from torch import Tensor, nn

from . import ops


class LayerNorm(nn.Module):
    """Replaces modules with the attributes of ``torch.nn.LayerNorm`` over the last dimension."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return ops.layer_norm(input, self.weight, self.bias, eps=self.eps)


class RMSNorm(nn.Module):
    """Replaces the RMSNorm modules of Llama and similar models."""

    has_backward = True
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class GeLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.bias_gelu(input, activation="gelu")


class GeluTanh(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.bias_gelu(input, activation="gelu_pytorch_tanh")


class NewGELU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.bias_gelu(input, activation="gelu_new")


class SiLU(nn.Module):
    has_backward = True
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        return ops.bias_gelu(input, activation="silu")


__all__ = ["GeLU", "GeluTanh", "LayerNorm", "NewGELU", "RMSNorm", "SiLU"]
