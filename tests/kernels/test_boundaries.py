"""Boundaries of packed sequences that are not valid (docs/ops/attention.md): no kernel on a GPU accesses memory outside
of its tensors. tests/test_kernel_rules.py checks that all kernels read them by way of the functions tested here;
attention and pack have tests of their own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm import _native, nn, ops
from fasttfm.kernels.common.triton.packed import packed_first, packed_span, row_position
from fasttfm.models import BertConfig, BertModel
from fasttfm.ops.layers import few_tokens
from fasttfm.testing.pytest_ops import interpreted

HOPPER = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
LEAST, MOST = -(2**31), 2**31 - 1
# Of two sequences in 30 tokens.
WRONG = [(0, 10**6, 30), (-(10**6), 5, 30), (20, 10, 30), (0, 31, MOST), (0, 10**6, 10**6 + 20), (7, LEAST, 30)]


def int32(values: tuple[int, ...], device: str = "cuda") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture(autouse=True)
def reported_errors() -> Iterator[None]:
    """Positions that follow from wrong boundaries may be outside of a table: the op records them for a later call."""
    yield
    with contextlib.suppress(ValueError):
        ops.check_errors()


# ---- the functions ---------------------------------------------------------------------------------------------------


@triton.jit
def _spans_kernel(cu_seqlens, found, sequences, size, longest):
    sequence = tl.program_id(0)
    first, length = packed_span(cu_seqlens, sequence, size, longest)
    tl.store(found + 3 * sequence, first)
    tl.store(found + 3 * sequence + 1, length)
    tl.store(found + 3 * sequence + 2, packed_first(cu_seqlens, sequences, size))


@triton.jit
def _positions_kernel(cu_seqlens, found, sequences):
    rows = tl.arange(0, 32).to(tl.int64)
    sequence, _ = row_position(rows, cu_seqlens, sequences, 1, True)
    tl.store(found + rows, sequence.to(tl.int32))


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("longest", [4, 30])
def test_spans_are_inside_of_the_tensor(longest: int, device: str) -> None:
    size = 30
    for values in [(0, 12, 30), (0, 0, 30), *WRONG]:
        found = torch.full((2, 3), -1, dtype=torch.int32, device=device)
        _spans_kernel[(2,)](int32(values, device), found, 2, size, longest)
        clamped = [min(max(value, 0), size) for value in values]
        lengths = [min(max(end - first, 0), longest) for first, end in itertools.pairwise(clamped)]
        expected = [[first, length, clamped[-1]] for first, length in zip(clamped, lengths, strict=False)]
        assert found.tolist() == expected, values
        sequences = torch.full((32,), -1, dtype=torch.int32, device=device)
        _positions_kernel[(1,)](int32(values, device), sequences, 2)
        assert {0, 1} >= set(sequences.tolist()), values


# ---- kernels for few rows --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize(("head_dim", "longest"), [(32, 64), (64, 64), (64, 150), (128, 64)])
def test_few_rows_attention(head_dim: int, longest: int, split: int) -> None:
    """Rows before and after the tensors are neither written nor read: they are NaN."""
    tokens, around, heads = 30, 4096, 2
    room = tokens + 2 * around
    qkv = torch.full((room, 3, heads, head_dim), torch.nan, device="cuda", dtype=torch.bfloat16)
    qkv[around : around + tokens].normal_()
    for values in [(0, 12, 30), *WRONG, (0, 16, 200), (0, 1000, 1100), (-3000, -1000, 20)]:
        memory = torch.full((room, heads, head_dim), 7.0, device="cuda", dtype=torch.bfloat16)
        inside = slice(around, around + tokens)
        options = (longest, -1, -1, head_dim**-0.5, split, 0)
        _native.core().few_rows_attention_cuda(qkv[inside], memory[inside], int32(values), *options)
        assert bool((memory[:around] == 7).all()), values
        assert bool((memory[around + tokens :] == 7).all()), values
        assert bool(memory[inside].isfinite().all()), values


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("values", WRONG)
def test_a_model_over_few_tokens(values: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    model = BertModel(BertConfig(vocab_size=1000, **sizes)).cuda().bfloat16().eval()
    ids = torch.randint(0, 1000, (30,), device="cuda")
    with torch.no_grad():
        model(ids, cu_seqlens=int32(values), max_seqlen=30)
    torch.cuda.synchronize()


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("values", WRONG)
def test_all_layers_in_one_kernel(values: tuple[int, ...]) -> None:
    layers = [nn.PackedLayer(384, 12, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    module = nn.PackedTransformer(layers).eval()
    with torch.inference_mode(), few_tokens.using(few_tokens.FewTokens()):
        module(torch.randn(30, 384, device="cuda").bfloat16(), int32(values), 30)
    torch.cuda.synchronize()


# ---- rows with positions ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("values", WRONG)
def test_rows_with_dropout(values: tuple[int, ...], backend: str) -> None:
    x, residual = (torch.randn(30, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight, bias = (torch.ones(256, device="cuda", requires_grad=True) for _ in range(2))
    seed = torch.tensor([7], device="cuda")
    out = ops.dropout_add_layer_norm(
        x, residual, weight, bias, p=0.1, cu_seqlens=int32(values), seed=seed, backend=backend
    )
    out.float().square().sum().backward()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("values", WRONG)
def test_embedding(values: tuple[int, ...], backend: str) -> None:
    """A token's index in its sequence may be outside of the table of positions: that is recorded as a wrong index."""
    word, position, segment = (torch.randn(rows, 64, device="cuda", requires_grad=True) for rows in (100, 40, 2))
    ids = torch.randint(0, 100, (30,), device="cuda")
    out = ops.embedding(
        ids, word, position_table=position, segment_table=segment, cu_seqlens=int32(values), backend=backend
    )
    out.nan_to_num().square().sum().backward()
    with contextlib.suppress(ValueError):  # of a position outside of the table
        ops.check_errors()
    torch.cuda.synchronize()
