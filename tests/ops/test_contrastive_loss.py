"""contrastive_loss: the harness, and tests of this op only: blocks, ranks, counts, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from fasttfm.kernels.contrastive_loss import reference
from fasttfm.ops import contrastive_loss, vocabulary
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.contrastive_loss import SPEC

TestContrastiveLoss = op_tests(SPEC)

B, D = 12, 16
BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def drawn(rows: int = B) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, rows, D, generator=torch.Generator().manual_seed(3))
    queries, keys = torch.nn.functional.normalize(x, dim=-1).unbind()
    return queries.requires_grad_(), keys.requires_grad_()


def gradients(loss: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hard_negatives_are_further_keys(backend: str) -> None:
    queries, keys = drawn()
    negatives = keys.detach().flip(0).reshape(3, 4, D).requires_grad_()
    found = contrastive_loss(queries, keys, negatives, backend=backend)
    joined = torch.cat([keys, negatives.flatten(0, 1)]).detach().requires_grad_()
    expected = contrastive_loss(queries, joined, backend=backend)
    assert same_bits(found, expected)
    (by_row,) = gradients(expected, joined)
    own, others = gradients(found, keys, negatives)
    assert same_bits(torch.cat([own, others.flatten(0, 1)]), by_row)


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts(backend: str) -> None:
    queries, keys = drawn()
    scores = queries @ keys.t()
    result = contrastive_loss(queries, keys, counts=True, backend=backend)
    assert result.predictions == B
    assert result.correct == (scores.argmax(1) == torch.arange(B)).sum()
    labels = torch.where(torch.arange(B) % 2 == 0, 3, -100)
    result = contrastive_loss(queries, keys, labels=labels, counts=True, backend=backend)
    assert result.predictions == B // 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_label_of_a_negative_is_refused(dtype: torch.dtype) -> None:
    queries, keys = drawn()
    labels = torch.arange(B, dtype=dtype).flip(0)
    contrastive_loss(queries, keys, keys, labels=labels)
    labels[2] = B
    with pytest.raises(ValueError, match=rf"labels: expected indices in \[0, {B}\) or -100, got {B} at 2"):
        contrastive_loss(queries, keys, keys, labels=labels)
    with pytest.raises(ValueError, match=f"labels: expected .*, got {2 * B} at 2"):  # found by the op, as on a GPU
        torch.compile(contrastive_loss, backend="eager")(queries, keys, keys, labels=labels)


def test_the_score_matrix_is_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have as many rows as their bytes allow, and nothing of the size of the scores is saved for the
    backward."""
    rows = 700
    queries, keys = drawn(rows)
    step, largest = vocabulary.rows_of_block, []

    def limited(count: int, row_bytes: int, limit: int) -> int:
        assert limit == 256 * 2**20
        largest.append(step(count, row_bytes, row_bytes * 128))
        return largest[-1]

    monkeypatch.setattr(vocabulary, "rows_of_block", limited)
    loss = contrastive_loss(queries, keys)
    assert largest == [128]
    torch.testing.assert_close(loss, reference.contrastive_loss(queries, keys))
    assert saved_bytes(lambda: contrastive_loss(queries, keys)) == 2 * queries.nbytes + 8 * rows


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _rank(rank: int, folder: str, symmetric: bool) -> None:
    store = f"file://{folder}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    queries, keys = (x.detach()[rank::2].contiguous().requires_grad_() for x in drawn())
    negatives = keys.detach()[:2].neg().requires_grad_()
    group = torch.distributed.group.WORLD
    loss = contrastive_loss(queries, keys, negatives, symmetric=symmetric, group=group)
    torch.save((loss.detach(), *gradients(loss, queries, keys, negatives)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_form_one_batch(tmp_path: Path) -> None:
    """Two ranks, whose gradients DistributedDataParallel would average, against one process with all rows."""
    run_ranks(_rank, str(tmp_path), True)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    whole = [torch.cat([x.detach()[rank::2] for rank in range(2)]).requires_grad_() for x in drawn()]
    negatives = torch.cat([part[:2] for part in whole[1].detach().chunk(2)]).neg().requires_grad_()
    loss = contrastive_loss(*whole, negatives, symmetric=True)
    parts: list[Any] = list(zip(*ranks, strict=True))
    torch.testing.assert_close(sum(parts[0]) / 2, loss.detach())
    for found, expected in zip(parts[1:], gradients(loss, *whole, negatives), strict=True):
        torch.testing.assert_close(torch.cat(found) / 2, expected)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.large_memory
def test_memory_on_the_gpu() -> None:
    """Forward and backward take at most 5% of the memory that plain torch takes in addition to the vectors."""
    queries, keys = (torch.randn(2, 32768, 768, device="cuda", dtype=torch.bfloat16) * 768**-0.5).unbind()
    queries, keys = queries.requires_grad_(), keys.requires_grad_()
    labels = torch.arange(len(queries), device="cuda")

    def peak(loss: Any) -> int:
        queries.grad = keys.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss().backward()
        return torch.cuda.max_memory_allocated() - before

    ours = peak(lambda: contrastive_loss(queries, keys))
    plain = peak(lambda: torch.nn.functional.cross_entropy((queries @ keys.t() / 0.05).float(), labels))
    assert ours <= 0.05 * plain, f"{ours / 2**20:.0f} MiB of {plain / 2**20:.0f} MiB"
