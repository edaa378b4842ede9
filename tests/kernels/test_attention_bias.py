"""Attention's bias in Triton with whole tiles and aligned rows, whose loads are vectors, and with others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.ops import attention
from fasttfm.testing import compare
from fasttfm.testing.pytest_ops import interpreted
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR

NAMES = ("out", "dq", "dk", "dv", "dbias")
DEVICES = [pytest.param("cpu", 16, marks=interpreted), pytest.param("cuda", 64, marks=pytest.mark.gpu)]
# Queries, keys, and the shape of the bias.
CASES = {
    "whole tiles": (64, 64, (2, 64, 64)),
    "of each sequence": (64, 128, (2, 1, 64, 128)),
    "whole tiles of a wider bias": (64, 64, (2, 72, 80)),
    "aligned rows, parts of tiles": (40, 70, (2, 48, 72)),
    "rows that are not aligned": (64, 64, (2, 65, 67)),
}


def results(tensors: list[Tensor], dtype: torch.dtype, backend: str, causal: bool) -> list[Tensor]:
    q, k, v, bias, upstream = (each.to(dtype) for each in tensors)
    leaves = [each.requires_grad_() for each in (q, k, v, bias)]
    out = attention(*leaves[:3], bias=leaves[3], causal=causal, backend=backend)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("device", "head_dim"), DEVICES)
def test_results_and_gradients(device: str, head_dim: int, case: str, causal: bool) -> None:
    queries, keys, shape = CASES[case]
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, queries, 2, head_dim), *[(2, keys, 2, head_dim)] * 2, shape, (2, queries, 2, head_dim)]
    tensors = [torch.randn(each, generator=generator).to(device) for each in shapes]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tensors = [each.to(dtype).float() for each in tensors]
    found = results(tensors, dtype, "triton", causal)
    naive, exact = results(tensors, dtype, "reference", causal), results(tensors, torch.float64, "reference", causal)
    factors = (OUTPUT_FACTOR, *[GRADIENT_FACTOR] * 4)
    for comparison in (compare(*each) for each in zip(NAMES, found, naive, exact, factors, strict=True)):
        assert comparison.ok, str(comparison)
