"""Sequences that are divided over ranks: torch's context_parallel and the attention op, and gathered keys."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from train_runs import join, start_ranks

from fasttfm import ops
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare
from fasttfm.train.distributed import gathered_rows
from fasttfm.train.distributed import join as join_ranks

ROWS, HEADS, HEAD_DIM = 48, 2, 16


def inputs() -> list[Tensor]:
    """Queries, keys and values of one sequence, and the gradient of the result."""
    torch.manual_seed(0)
    return [torch.randn(ROWS, HEADS, HEAD_DIM) for _ in range(4)]


def boundaries(*rows: int) -> Tensor:
    return torch.tensor([0, *rows], dtype=torch.int32)


def whole(dtype: torch.dtype, causal: bool) -> list[Tensor]:
    """The result and the gradients in one process."""
    *qkv, gradient = [each.to(dtype) for each in inputs()]
    leaves = [each.requires_grad_() for each in qkv]
    backend = "reference" if dtype == torch.float64 else None
    out = ops.attention(*leaves, causal=causal, cu_seqlens=boundaries(ROWS), backend=backend)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def gathered(causal: bool) -> None:
    """A rank's queries with the keys and values of all ranks; a causal one needs only those up to its own last row."""
    world = join_ranks("cpu", "ddp")
    count = ROWS // world.size
    own = slice(world.rank * count, (world.rank + 1) * count)
    q, k, v = (each[own].clone().requires_grad_() for each in inputs()[:3])
    keys, values = gathered_rows(k)[0], gathered_rows(v)[0]
    last = own.stop if causal else ROWS
    out = ops.attention(
        q, keys[:last], values[:last], causal=causal, cu_seqlens=boundaries(count), cu_seqlens_k=boundaries(last)
    )
    assert isinstance(out, Tensor)
    found = [out.detach(), *torch.autograd.grad(out, [q, k, v], inputs()[3][own])]
    factors = (OUTPUT_FACTOR, *(GRADIENT_FACTOR,) * 3)
    pairs = zip(found, whole(torch.float32, causal), whole(torch.float64, causal), factors, strict=True)
    for tensor, naive, exact, factor in pairs:
        comparison = compare("rows of this rank", tensor, naive[own], exact[own], factor)
        assert comparison.ok, comparison
    world.leave()


@pytest.mark.parametrize("causal", [False, True])
def test_keys_and_values_of_all_ranks_give_the_whole_attention(causal: bool) -> None:
    join(start_ranks(2, gathered, causal))


def intercepted() -> None:
    world = join_ranks("cpu", "ddp")
    mesh = dist.init_device_mesh("cpu", (world.size,))
    q, k, v, _ = inputs()
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[0, 0, 0]):
        rows = len(q)
        out = ops.attention(q, k, v, cu_seqlens=boundaries(rows))
        alone = ops.attention(q, k, v, cu_seqlens=boundaries(rows), backend="reference")
    assert rows == ROWS // world.size  # a part of the sequence,
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, alone)  # of which each rank has the attention to its own keys
    world.leave()


def test_context_parallel_of_torch_does_not_reach_the_op() -> None:
    """The documentation says so: when this fails, it is out of date."""
    join(start_ranks(2, intercepted))
