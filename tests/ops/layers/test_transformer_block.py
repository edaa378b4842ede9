"""A whole layer as one autograd node, against the unfused layer in plain torch."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters, transformer_block
from fasttfm.testing import compare
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR


class Size(NamedTuple):
    width: int
    inner: int
    heads: int
    lengths: tuple[int, ...]

    @property
    def options(self) -> BlockOptions:
        longest = max(self.lengths)
        return BlockOptions(self.heads, longest, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-5, False, False, None)

    @property
    def parameters(self) -> list[tuple[int, ...]]:
        c, i = self.width, self.inner
        return [(3 * c, c), (3 * c,), (c, c), (c,), (c,), (c,), (i, c), (i,), (c, i), (c,), (c,), (c,)]

    def cu_seqlens(self, device: torch.device) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)

    def drawn(self, pre_norm: bool, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        """x, the parameters and, in a pre-LN model, the residual stream."""
        generator = torch.Generator().manual_seed(0)
        stream = (sum(self.lengths), self.width)
        shapes = [stream, *self.parameters, *([stream] * pre_norm)]
        return [(torch.randn(shape, generator=generator) * self.width**-0.5).to(device, dtype) for shape in shapes]


SMALL = Size(32, 64, 2, (9, 0, 1, 13))
WIDE = Size(256, 1024, 4, (130, 64, 1, 200))  # heads of 64
CAUSAL = (-1, 0)


def results(
    function: str, size: Size, options: BlockOptions, tensors: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """The outputs, and the gradients of all inputs and parameters."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    x, count = leaves[0], len(BlockParameters._fields)
    parameters, residual = BlockParameters(*leaves[1 : 1 + count]), leaves[-1] if len(leaves) > 1 + count else None
    if function == "reference":
        found = reference.transformer_block(x, residual, size.cu_seqlens(x.device), options, parameters)
    else:
        found = transformer_block(x, residual, size.cu_seqlens(x.device), None, options, parameters)
    outputs = [output for output in found if output is not None]
    weights = [torch.linspace(-1, 1, each.numel(), dtype=dtype, device=x.device).view_as(each) for each in outputs]
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def wrong(size: Size, options: BlockOptions, tensors: list[Tensor], *, pre_norm: bool) -> list[str]:
    """The results that violate the tolerance rule, compared with the unfused layer in fp64."""
    dtype = tensors[0].dtype
    found = results("block", size, options, tensors, dtype)
    naive = results("reference", size, options, tensors, dtype)
    exact = results("reference", size, options, tensors, torch.float64)
    names = ["y", *["z"] * pre_norm, "dx", *(f"d{name}" for name in BlockParameters._fields), *["dresidual"] * pre_norm]
    factors = [OUTPUT_FACTOR] * (1 + pre_norm) + [GRADIENT_FACTOR] * (len(names) - 1 - pre_norm)
    compared = [compare(*each) for each in zip(names, found, naive, exact, factors, strict=True)]
    return [str(each) for each in compared if not each.ok]


@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (2, 1)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_activation", [False, True], ids=["recomputed", "kept"])
def test_same_numbers_as_the_unfused_layer(
    dtype: torch.dtype, pre_norm: bool, window: tuple[int, int], keep_activation: bool
) -> None:
    left, right = window
    options = SMALL.options._replace(window_left=left, window_right=right, keep_activation=keep_activation)
    assert wrong(SMALL, options, SMALL.drawn(pre_norm, dtype), pre_norm=pre_norm) == []


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu", "silu"])
def test_every_activation(activation: str) -> None:
    options = SMALL.options._replace(activation=activation)
    assert wrong(SMALL, options, SMALL.drawn(False, torch.float32), pre_norm=False) == []


@pytest.mark.gpu
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_activation", [False, True], ids=["recomputed", "kept"])
def test_same_numbers_on_a_gpu(dtype: torch.dtype, pre_norm: bool, keep_activation: bool) -> None:
    left, right = CAUSAL if pre_norm else (-1, -1)
    options = WIDE.options._replace(window_left=left, window_right=right, keep_activation=keep_activation)
    assert wrong(WIDE, options, WIDE.drawn(pre_norm, dtype, "cuda"), pre_norm=pre_norm) == []
