"""Attention inside native layers on Hopper: the kernel for sequences of up to 128 tokens (kernels/few_rows), and the
forward of kernels/attention, which starts before the previous kernel ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fasttfm import _native, nn
from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.layers import few_rows, rules
from fasttfm.ops.layers.transformer_block import BlockOptions
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}"),
]
TYPES = [torch.bfloat16, torch.float16]
WINDOWS = [(-1, -1), (-1, 0), (5, 3), (3, -1), (0, 0), (2**40, 2**40)]
LONGEST = 128
# The boundaries of sequences of 64, 0, 1, 128, 33, 96, 127, 2, 16, 31 and 65 tokens.
PLACES = [0, 64, 64, 65, 193, 226, 322, 449, 451, 467, 498, 563]
HEADS = 3
AFTER = 70  # tokens after the last sequence


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def attend(qkv: Tensor, places: list[int], window: tuple[int, int] = (-1, -1), *, longest: int = LONGEST) -> Tensor:
    tokens, _, heads, head_dim = qkv.shape
    out = torch.full((tokens, heads, head_dim), torch.nan, dtype=qkv.dtype, device="cuda")
    cu_seqlens = torch.tensor(places, dtype=torch.int32, device="cuda")
    _native.core().few_rows_attention_cuda(qkv, out, cu_seqlens, longest, *window, head_dim**-0.5, 0, 0)
    return out


def expected(qkv: Tensor, places: list[int], window: tuple[int, int]) -> Tensor:
    options = BlockOptions(HEADS, LONGEST, *window, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-5, False, False, None)
    each = [reference._attention(qkv[first:end], options) for first, end in pairwise(places)]
    return torch.cat(each).view(-1, *qkv.shape[2:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_short_sequences(window: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Tokens after the last sequence are not read, and get 0; every run has the same bits."""
    torch.manual_seed(0)
    used = PLACES[-1]
    qkv = draw(used + AFTER, 3, HEADS, head_dim, dtype=dtype)
    qkv[used:] = torch.nan
    out = attend(qkv, PLACES, window)
    exact, naive = expected(qkv[:used].double(), PLACES, window), expected(qkv[:used], PLACES, window)
    comparison = compare("out", out[:used], naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, comparison
    assert torch.equal(out[used:], torch.zeros_like(out[used:]))
    assert same_bits(attend(qkv, PLACES, window), out)


@pytest.mark.parametrize("places", [[0, 0], [0, 1], [0, 0, 128], [0, 128, 128]], ids=str)
def test_one_sequence(places: list[int]) -> None:
    """Also without any token, and as the last but one."""
    torch.manual_seed(0)
    qkv = draw(places[-1] + AFTER, 3, HEADS, 64, dtype=torch.bfloat16)
    out = attend(qkv, places)
    if places[-1] > 0:
        given = qkv[: places[-1]]
        exact, naive = (expected(each, places, (-1, -1)) for each in (given.double(), given))
        comparison = compare("out", out[: places[-1]], naive, exact, OUTPUT_FACTOR)
        assert comparison.ok, comparison
    assert torch.equal(out[places[-1] :], torch.zeros_like(out[places[-1] :]))


@pytest.mark.parametrize("head_dim", [32, 64])
def test_many_sequences(head_dim: int) -> None:
    """More blocks than run at once: each sequence has the bits that it has alone."""
    torch.manual_seed(0)
    places = list(range(0, 128 * 100 + 1, 128))
    qkv = draw(places[-1], 3, HEADS, head_dim, dtype=torch.bfloat16)
    out = attend(qkv, places)
    for index in (0, 1, 57, 99):
        own = slice(places[index], places[index + 1])
        assert same_bits(attend(qkv[own].contiguous(), [0, 128]), out[own])


def test_a_nan_stays_in_its_sequence() -> None:
    torch.manual_seed(0)
    qkv = draw(PLACES[-1], 3, HEADS, 64, dtype=torch.bfloat16)
    clean = attend(qkv, PLACES)
    first, end = PLACES[3], PLACES[4]
    qkv[first:end] = torch.nan
    out = attend(qkv, PLACES)
    assert out[first:end].isnan().all()
    others = torch.ones(len(qkv), dtype=torch.bool, device="cuda")
    others[first:end] = False
    assert same_bits(out[others], clean[others])


def test_a_dependent_launch_waits() -> None:
    """The previous kernel, which writes q, k and v, has ended when attention reads them: two inputs take turns in the
    same memory."""
    torch.manual_seed(0)
    x = [draw(256, 768, dtype=torch.bfloat16) for _ in range(2)]
    weight = draw(2304, 768, dtype=torch.bfloat16) * 0.05
    places = [0, 128, 256]
    cu_seqlens = torch.tensor(places, dtype=torch.int32, device="cuda")
    ordinary = [attend(few_rows.product(each, weight).view(256, 3, 12, 64), places) for each in x]
    for _ in range(50):
        for each, result in zip(x, ordinary, strict=True):
            out = torch.empty_like(result)
            qkv = few_rows.product(each, weight).view(256, 3, 12, 64)
            _native.core().few_rows_attention_cuda(qkv, out, cu_seqlens, LONGEST, -1, -1, 64**-0.5, 0, 1)
            assert same_bits(out, result)


@pytest.mark.parametrize(
    ("head_dim", "longest", "short"),
    [(32, 128, True), (64, 128, True), (64, 1, True), (32, 129, False), (64, 129, False), (128, 64, False)],
)
def test_which_calls_have_the_kernel_for_short_sequences(head_dim: int, longest: int, short: bool) -> None:
    qkv = draw(longest, 3, HEADS, head_dim, dtype=torch.bfloat16)
    attend(qkv, [0, longest], longest=longest)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(qkv, [0, longest], longest=longest)
        torch.cuda.synchronize()
    assert any("short_attention_kernel" in event.name for event in profile.events()) == short


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [700, 3000])
def test_attention_of_long_sequences_waits(tokens: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts before the kernel that writes q, k and v ends: cuBLASLt's GEMM, or qkv_projection's from 2,048 tokens
    on. Two inputs in turn, whose tensors are in the same memory, always have the same results."""
    monkeypatch.setattr(rules, "MOST_FEW_ROWS", 0)
    rules._rules_for.cache_clear()
    torch.manual_seed(0)
    lengths = (300, 0, 1, tokens - 301)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    layers = [nn.PackedLayer(4 * head_dim, 4, 512, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    module = nn.PackedTransformer(layers).eval()
    inputs = [draw(tokens, 4 * head_dim, dtype=torch.bfloat16) for _ in range(2)]
    with torch.inference_mode():
        found = module.explain(inputs[0], max(lengths))
        assert found.chosen == "core"
        assert "FewRowsGemm" not in found.forward
        results = [module(x, cu_seqlens, max(lengths)).clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = module(inputs[0], cu_seqlens, max(lengths))
        for _ in range(20):
            graph.replay()
            assert same_bits(captured, results[0])
            for x, result in zip(inputs, results, strict=True):
                assert same_bits(module(x, cu_seqlens, max(lengths)), result)
    rules._rules_for.cache_clear()
