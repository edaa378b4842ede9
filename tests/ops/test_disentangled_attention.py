"""disentangled_attention: the harness, and tests of this op only: rows of distances, absent tokens, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.ops import attention, disentangled_attention, log_distance_rows
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.disentangled_attention import SPEC

TestDisentangledAttention = op_tests(SPEC)

BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def test_rows_of_distances() -> None:
    assert log_distance_rows(4, 2).tolist() == [0, 0, 1, 2, 3, 3, 3]
    near = log_distance_rows(600, 256, 512)
    middle = 599
    assert near[middle - 128 : middle + 129].tolist() == list(range(128, 385))
    assert (near.diff() >= 0).all()
    assert (near.min(), near.max()) == (0, 511)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_tables_it_is_attention(backend: str) -> None:
    q, k, v = (drawn(2, 9, 2, 16).detach() + offset for offset in (0.0, 1.0, 2.0))
    out = disentangled_attention(q, k, v, log_distance_rows(9, 4), backend=backend)
    torch.testing.assert_close(out, attention(q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_are_not_there_have_no_effect(backend: str) -> None:
    """Not even a NaN: out and gradients are 0 there, and the others' are those of a shorter batch."""
    mask = torch.tensor([[True] * 5 + [False] * 3, [False] * 8])
    qkv, table = drawn(2, 8, 3, 2, 16), drawn(9, 2, 16)[:8]
    spoiled = qkv.detach().masked_fill(~mask[..., None, None, None], torch.nan).requires_grad_()
    rows = log_distance_rows(8, 4)
    tables = {"position_keys": table, "position_queries": table}
    out = disentangled_attention(*spoiled.unbind(2), rows, mask=mask, **tables, backend=backend)
    short = qkv[:1, :5]
    expected = disentangled_attention(*short.unbind(2), rows, **tables)
    torch.testing.assert_close(out[:1, :5], expected)
    assert out[~mask].count_nonzero() == 0
    (gradient,) = torch.autograd.grad(out.sum(), spoiled)
    (right,) = torch.autograd.grad(expected.sum(), qkv)
    torch.testing.assert_close(gradient, right)


def test_no_matrix_of_scores_is_saved() -> None:
    q, k, v = (drawn(64, 2, 16) for _ in range(3))
    rows, table = log_distance_rows(64, 8), drawn(16, 2, 16)
    bounds = torch.tensor([0, 30, 64], dtype=torch.int32)

    def call() -> Tensor:
        return disentangled_attention(q, k, v, rows, position_keys=table, cu_seqlens=bounds)

    tokens, lse = 4 * q.nbytes, 2 * 64 * 4
    assert saved_bytes(call) == tokens + lse + table.nbytes + rows.nbytes + bounds.nbytes
