"""embedding: the harness, and tests of this op only: dropout by position, repeated and wrong ids, saved tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import explain, ops
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.ops.core.backends import Backend, _no_backward
from fasttfm.ops.embedding import OP
from fasttfm.testing.harness import same_bits
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.specs.embedding import SPEC

TestEmbedding = op_tests(SPEC)

V, C = 40, 48
SEED = torch.tensor([77])
BACKENDS = ["cpu", "reference", pytest.param("triton", marks=interpreted)]


def tables(*, requires_grad: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"word_table": (V, C), "position_table": (16, C), "segment_table": (2, C), "weight": (C,), "bias": (C,)}
    drawn = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.requires_grad_(requires_grad) for name, tensor in drawn.items()}


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_padded_bit_for_bit(backend: str) -> None:
    lengths, longest = [5, 0, 9, 1], 9
    present = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, V, (len(lengths), longest)) * present
    segments = (torch.arange(longest) > 3).long().expand_as(ids).contiguous()
    call = dict(tables(), p=0.3, seed=SEED, backend=backend)
    padded = ops.embedding(ids, **call, segment_ids=segments)
    cu_seqlens = ops.cu_seqlens_from_lengths(lengths)
    packed = ops.embedding(
        ops.pack(ids, cu_seqlens), **call, segment_ids=ops.pack(segments, cu_seqlens), cu_seqlens=cu_seqlens
    )
    assert same_bits(packed, ops.pack(padded, cu_seqlens))


def mask_of(backend: str, seed: Tensor, **call: Any) -> Tensor:
    """The output for a table of ones, which is the dropout mask times its scale."""
    return ops.embedding(torch.zeros(5, 7, dtype=torch.int64), torch.ones(1, 100), seed=seed, backend=backend, **call)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 1.0])
def test_every_backend_draws_the_same_mask(backend: str, p: float) -> None:
    mask = mask_of(backend, SEED, p=p)
    assert same_bits(mask, mask_of("reference", SEED, p=p))
    share = (mask == 0).float().mean().item()
    threshold = max(1, round(p * 256)) / 256
    assert abs(share - threshold) <= 5 * (threshold * (1 - threshold) / mask.numel()) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_determines_the_result(backend: str) -> None:
    assert not torch.equal(mask_of(backend, SEED, p=0.5), mask_of(backend, SEED + 1, p=0.5))
    torch.manual_seed(5)
    first = mask_of(backend, None, p=0.5)
    second = mask_of(backend, None, p=0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert same_bits(first, mask_of(backend, None, p=0.5))


# ---- ids -------------------------------------------------------------------------------------------------------------


def word_gradient(ids: Tensor, backend: str, **call: Any) -> Tensor:
    given = tables(requires_grad=True)
    y = ops.embedding(ids, given["word_table"], backend=backend, **call)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(y, given["word_table"], dy)[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [31, 32, 33, 200, 700])
def test_one_id_many_times(backend: str, count: int) -> None:
    """Several runs of sorted tokens in Triton, one long list in C++: the same bits in every call, and close to fp64."""
    ids = torch.full((count,), V - 1)
    ids[count // 2 :] = 0
    first = word_gradient(ids, backend)
    assert same_bits(first, word_gradient(ids, backend))
    dy = torch.randn(count, C, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(V, C, dtype=torch.float64).index_add_(0, ids, dy.double())
    bound = count * torch.finfo(torch.float32).eps * dy.abs().sum(0).max()  # of any order of additions
    assert (first - expected).abs().max() <= bound
    assert first[1:-1].count_nonzero() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_of_all_lengths(backend: str) -> None:
    """Ids that end at, before and after the boundaries of runs, in random order, some of them padding."""
    lengths = [1, 31, 32, 33, 64, 2, 95, 1, 1, 60]
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(2))]
    found = word_gradient(ids, backend, padding_idx=4)
    dy = torch.randn(len(ids), C, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(V, C, dtype=torch.float64).index_add_(0, ids, dy.double())
    expected[4] = 0
    assert (found - expected).abs().max() <= len(ids) * torch.finfo(torch.float32).eps * dy.abs().sum(0).max()
    assert found[4].count_nonzero() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_and_last_row(backend: str) -> None:
    given = tables()
    y = ops.embedding(torch.tensor([[0, V - 1]]), given["word_table"], backend=backend)
    assert same_bits(y[0], given["word_table"][[0, V - 1]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("at", "bad"), [((0, 0), -1), ((1, 2), V), ((0, 1), 2**40), ((1, 0), -(2**62))])
def test_a_wrong_id_raises_on_the_cpu(backend: str, at: tuple[int, int], bad: int) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    ids[at] = bad
    with pytest.raises(
        ValueError, match=rf"embedding: ids: expected indices in \[0, {V}\), got {bad} at \[{at[0]}, {at[1]}\]"
    ):
        ops.embedding(ids, tables()["word_table"], backend=backend)


# ---- wrong ids on a GPU ----------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("bad", [-1, V, 2**40, -(2**40)])
def test_a_kernel_records_a_wrong_id_and_continues(bad: int) -> None:
    from fasttfm.kernels.embedding import triton as kernels

    given = tables()
    errors = IndexErrors("embedding", ("ids", "position_ids", "segment_ids"))
    ids = torch.tensor([[3, 1, 2], [0, bad, bad]])
    triple, indices = (given["word_table"], given["position_table"], None), (ids, None, None)
    words = errors.words(ids.device)
    y, statistics = kernels.embedding_forward_triton(
        triple, indices, None, None, None, None, True, 1e-5, 0.0, torch.float32, words
    )
    assert y[1, 1:].isnan().all()
    assert not y[0].isnan().any()
    limit = 2**31
    shown = str(bad) if abs(bad) < limit else f"{max(-limit, min(limit - 1, bad))} or beyond"
    with pytest.raises(ValueError, match=rf"^embedding: ids: expected indices in \[0, {V}\), got {shown} at token 4"):
        errors.raise_if_any()
    errors.raise_if_any()  # reported once

    wanted = [True, False, False, False, False]
    dword, *_ = kernels.embedding_backward_triton(
        torch.ones_like(y), triple, indices, None, None, None, statistics, None, True, 0.0, None, wanted
    )
    assert not dword.isnan().any()
    assert dword[4:].count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_wrong_id_leaves_the_gpu_usable(backend: str) -> None:
    given = {name: tensor.cuda() for name, tensor in tables().items()}
    ids = torch.tensor([[3, V, 2]], device="cuda")
    y = ops.embedding(ids, **given, backend=backend)
    assert y[0, 1].isnan().all()
    assert not y[0, [0, 2]].isnan().any()
    if backend == "triton":
        with pytest.raises(ValueError, match=rf"got {V} at token 1"):
            ops.check_errors()
        ops.embedding(ids, **given, backend=backend)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="in an earlier call"):
            ops.embedding(ids.clamp(max=3), **given, backend=backend)
    ops.embedding(ids.clamp(max=3), **given, backend=backend)
    ops.check_errors()


@pytest.mark.gpu
def test_nothing_synchronizes_with_the_gpu() -> None:
    given = {name: tensor.cuda().requires_grad_() for name, tensor in tables().items()}
    ids = torch.randint(0, V, (30,)).cuda()
    cu_seqlens = ops.cu_seqlens_from_lengths([10, 16, 4], device="cuda")

    def step() -> None:
        ops.embedding(ids, **given, p=0.1, cu_seqlens=cu_seqlens).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_backend_that_refuses_the_backward_leaves_it_to_the_next() -> None:
    def change(backend: Backend) -> Backend:
        if backend.name != "cpu":
            return backend
        return replace(backend, refuse_backward=lambda *_: "takes forwards only", backward=_no_backward)

    ids, dy = torch.randint(0, V, (3, 7)), torch.randn(3, 7, C)
    found = []
    given = tables(requires_grad=True)
    kept = OP.table.backends
    for backends in (tuple(map(change, kept)), kept):
        object.__setattr__(OP.table, "backends", backends)
        try:
            y = ops.embedding(ids, **given)
            found.append(torch.autograd.grad(y, list(given.values()), dy))
        finally:
            object.__setattr__(OP.table, "backends", kept)
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.gpu
def test_the_backward_of_many_tokens_is_another_backend_s() -> None:
    """The CUDA backward takes up to 8,192 tokens, the forward any number."""
    count = 8200
    ids = torch.randint(0, V, (count,), generator=torch.Generator().manual_seed(1)).cuda()
    cu_seqlens = ops.cu_seqlens_from_lengths([16] * (count // 16) + [count % 16], device="cuda")
    found = []
    for backend in (None, "triton"):
        given = {name: tensor.detach().cuda().requires_grad_() for name, tensor in tables().items()}
        y = ops.embedding(ids, **given, p=0.1, seed=SEED.cuda(), cu_seqlens=cu_seqlens, backend=backend)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).cuda()
        found.append((y, *torch.autograd.grad(y, list(given.values()), dy)))
    explained = explain("embedding", ids, given["word_table"])
    assert (explained.chosen, explained.backward) == ("cuda", "triton")
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4 * float(other.abs().max()))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer_norm", [True, False])
def test_what_is_saved(layer_norm: bool) -> None:
    given = tables(requires_grad=True)
    if not layer_norm:
        del given["weight"], given["bias"]
    ids, segment_ids = torch.randint(0, V, (3, 5)), torch.randint(0, 2, (3, 5))
    inputs = {tensor.data_ptr() for tensor in (ids, segment_ids, SEED, *given.values())}
    saved: list[Tensor] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        ops.embedding(ids, **given, segment_ids=segment_ids, p=0.1, seed=SEED)
    new = [tensor for tensor in saved if tensor.data_ptr() not in inputs]
    copied = ids.nbytes + segment_ids.nbytes  # NumPy may overwrite them before the backward
    assert sum(tensor.nbytes for tensor in new) == copied + (2 * ids.numel() * 4 if layer_norm else 0)
