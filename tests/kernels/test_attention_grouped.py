"""attention's Hopper backward where heads of q share those of k and v: how many of them a block processes together, and
the gradients, whatever that number is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.attention.problem import AttentionProblem
from fasttfm.ops import attention, attention_native, cu_seqlens_from_lengths
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)

# ---- the rule --------------------------------------------------------------------------------------------------------

SMS = 132  # of an H200


def together(lengths: list[int], heads: tuple[int, int, int], *, packed: bool = False, **options: Any) -> int:
    """How many query heads a block processes together. heads: of q, of k and v, and their dim."""
    of_q, of_k, head_dim = heads
    row = torch.empty(1, dtype=torch.bfloat16)
    leading = (sum(lengths),) if packed else (len(lengths), max(lengths))
    q, k = (row.expand(*leading, count, head_dim) for count in (of_q, of_k))
    if packed:
        options["cu_seqlens"] = options["cu_seqlens_k"] = cu_seqlens_from_lengths(lengths)
    problem = AttentionProblem(max_seqlen=max(lengths), max_seqlen_k=max(lengths), **options)
    return of_q // attention_native.gradient_heads(q, k, problem, SMS)


def spread(count: int, low: int, high: int) -> list[int]:
    return [round(low + (high - low) * i / (count - 1)) for i in range(count)]


CAUSAL = {"window_right": 0}
PACKED = {"packed": True}


# The fastest number of each case that was measured, or one within 1% of it.
@pytest.mark.parametrize(
    ("lengths", "heads", "options", "expected"),
    [
        ([1024] * 16, (16, 4, 64), {}, 4),
        ([1024] * 16, (16, 4, 64), CAUSAL, 4),
        ([1024] * 16, (8, 2, 128), {}, 4),
        ([1024] * 16, (8, 2, 128), CAUSAL, 4),
        ([4096] * 4, (32, 8, 64), {}, 1),
        ([4096] * 4, (32, 8, 64), CAUSAL, 1),
        ([4096] * 4, (16, 4, 128), {}, 4),
        ([4096] * 4, (16, 4, 128), CAUSAL, 1),
        ([16384], (16, 2, 128), CAUSAL, 1),
        ([2048] * 8, (16, 1, 64), CAUSAL, 2),
        ([2048] * 8, (14, 2, 64), CAUSAL, 7),
        ([2048], (16, 2, 64), CAUSAL, 1),
        ([2048], (16, 2, 128), CAUSAL, 1),
        ([4096], (32, 8, 128), CAUSAL, 1),
        ([512] * 32, (16, 4, 64), {}, 4),
        ([512] * 32, (16, 4, 64), CAUSAL, 4),
        ([256] * 64, (16, 4, 64), {}, 4),
        ([512] * 4, (16, 2, 64), {}, 2),
        (spread(64, 64, 512), (16, 4, 64), PACKED, 1),
        (spread(64, 64, 512), (16, 4, 64), PACKED | CAUSAL, 4),
        (spread(16, 128, 2048), (16, 4, 64), PACKED | CAUSAL, 1),
        ([512] * 32, (8, 2, 128), {}, 4),
        (spread(64, 64, 512), (8, 2, 128), PACKED | CAUSAL, 2),
        ([512] * 32, (16, 4, 96), {}, 4),
        ([512] * 32, (8, 2, 192), {}, 4),
        ([512] * 32, (8, 2, 192), CAUSAL, 4),
        ([512] * 32, (4, 1, 256), {}, 4),
        ([8192] * 2, (8, 2, 128), PACKED | {"window_left": 64, "window_right": 64}, 4),
    ],
)
def test_the_number_of_query_heads_is_the_fastest(
    lengths: list[int], heads: tuple[int, int, int], options: dict[str, Any], expected: int
) -> None:
    assert together(lengths, heads, **options) == expected


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((16, 16, 64), {}),
        ((16, 4, 32), {}),
        ((16, 4, 64), {"seed": torch.zeros(1, dtype=torch.int64), "p": 0.1}),
        ((16, 4, 128), {"seed": torch.zeros(1, dtype=torch.int64), "p": 0.1}),
        ((16, 4, 64), {"window_left": 64, "window_right": 64}),
    ],
)
def test_one_query_head_at_a_time(heads: tuple[int, int, int], options: dict[str, Any]) -> None:
    """Nothing is shared, the kernel accumulates dq in shared memory, or it has no instance for groups."""
    assert together([512] * 16, heads, **options) == 1


# ---- the kernels -----------------------------------------------------------------------------------------------------

LENGTHS = [1, 64, 65, 127, 128, 129, 333, 512, 700]
# Queries and keys of each sequence.
CASES: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "different lengths": (LENGTHS, LENGTHS, {}),
    "different lengths, causal": (LENGTHS, LENGTHS, {"causal": True}),
    "blocks that begin apart": ([1024] * 2, [1024] * 2, {}),
    "long, causal": ([2000], [2000], {"causal": True}),
    "more keys, causal": ([64, 130, 300], [200, 600, 310], {"causal": True}),
    "fewer keys, causal": ([300, 700], [100, 650], {"causal": True}),
    "no queries, no keys": ([0, 100, 5], [50, 0, 300], {}),
}
WINDOW_AND_DROPOUT: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "window": ([700, 300, 90], [700, 300, 90], {"window": (64, 64)}),
    "dropout": ([700, 300, 90], [700, 300, 90], {"dropout_p": 0.1, "causal": True}),
}
HEADS, KEY_HEADS = 12, 2


def gradients(function: Any, inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def grouped_call(case: str, head_dim: int, dtype: torch.dtype) -> tuple[Any, list[Tensor], Tensor]:
    lengths, lengths_k, options = {**CASES, **WINDOW_AND_DROPOUT}[case]
    torch.manual_seed(3)
    sizes = ((lengths, HEADS), (lengths_k, KEY_HEADS), (lengths_k, KEY_HEADS), (lengths, HEADS))
    q, k, v, dout = (torch.randn(sum(n), heads, head_dim, dtype=dtype, device="cuda") for n, heads in sizes)
    packed: dict[str, Any] = {
        "cu_seqlens": cu_seqlens_from_lengths(lengths, device="cuda"),
        "cu_seqlens_k": cu_seqlens_from_lengths(lengths_k, device="cuda"),
        "max_seqlen": max(lengths),
        "max_seqlen_k": max(lengths_k),
        "seed": torch.tensor([7], device="cuda"),
    }
    return partial(attention, **packed, **options), [q, k, v], dout


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("case", "head_dim"),
    [
        *((case, head_dim) for case in CASES for head_dim in (64, 80, 128, 192, 256)),
        *((case, head_dim) for case in WINDOW_AND_DROPOUT for head_dim in (64, 128)),
    ],
)
def test_gradients_whatever_a_block_processes_together(
    case: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, inputs, dout = grouped_call(case, head_dim, dtype)
    naive = gradients(partial(function, backend="reference"), inputs, dout)
    exact = gradients(partial(function, backend="reference"), [x.double() for x in inputs], dout.double())
    alone = case == "dropout" or (case == "window" and head_dim == 64)
    counts = (12,) if alone else (2, 4, 6, 12)
    for gradient_heads in counts:  # 6, 3, 2 and 1 query heads together
        monkeypatch.setattr(attention_native, "gradient_heads", lambda *_, count=gradient_heads: count)
        found = gradients(partial(function, backend="cuda"), inputs, dout)
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            factor = GRADIENT_FACTOR if index else OUTPUT_FACTOR
            comparison = compare(name, found[index], naive[index], exact[index], factor)
            assert comparison.ok, (gradient_heads, comparison)
        for _ in range(20):
            for own, first in zip(gradients(partial(function, backend="cuda"), inputs, dout), found, strict=True):
                assert same_bits(own, first), gradient_heads
