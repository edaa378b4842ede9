"""A whole layer as one autograd node, against the unfused layer in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters, transformer_block
from fasttfm.testing import compare
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR

C, INNER, HEADS, TOKENS = 32, 64, 2, 23
CU_SEQLENS = torch.tensor([0, 9, 9, 10, TOKENS], dtype=torch.int32)
OPTIONS = BlockOptions(HEADS, 13, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-5, False, False, None)
SHAPES = BlockParameters(
    *((3 * C, C), (3 * C,), (C, C), (C,), (C,), (C,)), *((INNER, C), (INNER,), (C, INNER), (C,), (C,), (C,))
)


def drawn(pre_norm: bool, dtype: torch.dtype) -> list[Tensor]:
    """x, the parameters and, in a pre-LN model, the stream."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, C), *SHAPES, *([(TOKENS, C)] * pre_norm)]
    return [torch.randn(shape, generator=generator).mul(0.5).to(dtype) for shape in shapes]


def results(function: str, options: BlockOptions, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The outputs, and the gradients of all inputs and parameters."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    x, parameters = leaves[0], BlockParameters(*leaves[1 : 1 + len(SHAPES)])
    residual = leaves[-1] if len(leaves) > 1 + len(SHAPES) else None
    if function == "reference":
        found = reference.transformer_block(x, residual, CU_SEQLENS, options, parameters)
    else:
        found = transformer_block(x, residual, CU_SEQLENS, None, options, parameters)
    outputs = [output for output in found if output is not None]
    weights = [torch.linspace(-1, 1, output.numel(), dtype=dtype).view_as(output) for output in outputs]
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 1)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_activation", [False, True], ids=["recomputed", "kept"])
def test_same_numbers_as_the_unfused_layer(
    dtype: torch.dtype, pre_norm: bool, window: tuple[int, int], keep_activation: bool
) -> None:
    options = OPTIONS._replace(window_left=window[0], window_right=window[1], keep_activation=keep_activation)
    given = drawn(pre_norm, dtype)
    found = results("block", options, given, dtype)
    naive = results("reference", options, given, dtype)
    exact = results("reference", options, given, torch.float64)
    names = ["y", *["z"] * pre_norm, "dx", *(f"d{name}" for name in BlockParameters._fields), *["dresidual"] * pre_norm]
    factors = [OUTPUT_FACTOR] * (1 + pre_norm) + [GRADIENT_FACTOR] * (len(names) - 1 - pre_norm)
    compared = [compare(*each) for each in zip(names, found, naive, exact, factors, strict=True)]
    assert [str(each) for each in compared if not each.ok] == []


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu", "silu"])
def test_every_activation(activation: str) -> None:
    options = OPTIONS._replace(activation=activation)
    given = drawn(False, torch.float32)
    found, naive, exact = (
        results(function, options, given, dtype)[0]
        for function, dtype in (("block", torch.float32), ("reference", torch.float32), ("reference", torch.float64))
    )
    assert compare("y", found, naive, exact, OUTPUT_FACTOR).ok
