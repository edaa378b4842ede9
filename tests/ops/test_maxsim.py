"""maxsim: the harness, and tests of this op only: documents without tokens, ties, memory."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from fasttfm.ops import cu_seqlens_from_lengths, maxsim
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.maxsim import SPEC

TestMaxsim = op_tests(SPEC)

OP = importlib.import_module("fasttfm.ops.maxsim")

BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_document_without_tokens_scores_minus_infinity(backend: str) -> None:
    queries, documents = drawn(5, 8), drawn(6, 8)
    bounds = cu_seqlens_from_lengths([3, 0, 2]), cu_seqlens_from_lengths([4, 0, 2])
    mask = torch.tensor([True] * 4 + [False] * 2)
    scores = maxsim(
        queries,
        documents,
        query_cu_seqlens=bounds[0],
        document_cu_seqlens=bounds[1],
        document_mask=mask,
        backend=backend,
    )
    assert scores[[0, 2], 1:].eq(-torch.inf).all()  # no tokens, and only masked ones
    assert scores[1].tolist() == [0.0] * 3  # a query without tokens
    gradients = torch.autograd.grad(scores.masked_fill(scores.isinf(), 0.0).sum(), (queries, documents))
    expected = torch.autograd.grad((queries @ documents[:4].t()).max(1).values.sum(), (queries, documents))
    for found, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_of_equal_tokens_has_the_gradient(backend: str) -> None:
    queries, documents = drawn(2, 3, 8), drawn(1, 40, 8).detach()
    documents[0, 1::2] = documents[0, ::2]  # each token twice, the second right after the first
    documents.requires_grad_()
    maxsim(queries, documents, backend=backend).sum().backward()
    assert documents.grad is not None
    assert documents.grad[0, 1::2].count_nonzero() == 0
    assert documents.grad[0, ::2].count_nonzero() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_on_both_sides(backend: str) -> None:
    """A training batch scored against itself: the gradients of both roles are summed."""
    tokens, copy = drawn(2, 5, 8), drawn(2, 5, 8)
    maxsim(tokens, tokens, backend=backend)[0, 1].backward()
    (copy[0] @ copy[1].t()).max(1).values.sum().backward()
    torch.testing.assert_close(tokens.grad, copy.grad)


def test_rows_after_the_last_sequence_do_not_count() -> None:
    """CUDA graphs need a fixed number of rows."""
    queries, documents = drawn(7, 8), drawn(9, 8)
    bounds = {
        "query_cu_seqlens": cu_seqlens_from_lengths([3, 2]),
        "document_cu_seqlens": cu_seqlens_from_lengths([4, 3]),
    }
    whole = maxsim(queries, documents, **bounds)
    assert same_bits(whole, maxsim(queries[:5], documents[:7], **bounds))
    whole.sum().backward()
    assert queries.grad is not None
    assert queries.grad[5:].count_nonzero() == 0


def test_the_similarity_matrix_is_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are computed in blocks, and one int32 for each query token and document is saved for the backward."""
    queries, documents, largest = drawn(6, 10, 8), drawn(4, 12, 8), []
    product = OP.linear.matmul

    def watched(a: Tensor, b: Tensor) -> Tensor:
        largest.append((len(a), b.shape[1]))
        return product(a, b)

    monkeypatch.setattr(OP.linear, "matmul", watched)
    expected = maxsim(queries, documents)
    assert largest == [(60, 48)]  # documents of one length at once
    largest.clear()
    monkeypatch.setattr(OP, "_BLOCK_BYTES", 4 * 128 * 24)
    torch.testing.assert_close(maxsim(queries, documents), expected)
    assert set(largest) == {(60, 24)}
    largest.clear()
    monkeypatch.setattr(OP, "_BLOCK_BYTES", 16 * 12 * 4)
    torch.testing.assert_close(maxsim(queries, documents), expected)
    assert max(largest) == (16, 12)
    index, owners = 4 * 60 * 4, 60 * 4
    assert saved_bytes(lambda: maxsim(queries, documents)) == queries.nbytes + documents.nbytes + index + owners
