"""FlashAttention's functions against its documented behaviour, written out in fp64."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm import flash_attn as flash


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32)


def documented(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: tuple[int, int] = (-1, -1), slopes: Any = None
) -> tuple[Tensor, Tensor]:
    """One sequence, [S, H, D], in fp64: query i is at position i + Sk - Sq among the keys."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    distance = torch.arange(k.shape[0]) - (torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    seen = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1)


def close(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)  # sums of tens of fp32 products


CASES = [
    {},
    {"causal": True},
    {"window": (3, 2)},
    {"causal": True, "window": (2, -1)},
    {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
]


@pytest.mark.parametrize("options", CASES)
def test_dense(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = drawn(2, 5, 4, 8), drawn(2, 9, 2, 8), drawn(2, 9, 2, 8)
    given = {"causal": options.get("causal", False), "window_size": options.get("window", (-1, -1))}
    out, lse, weights = flash.flash_attn_func(
        q, k, v, 0.0, None, **given, alibi_slopes=options.get("slopes"), return_attn_probs=True
    )
    assert weights is None
    for sequence in range(2):
        expected, expected_lse = documented(q[sequence], k[sequence], v[sequence], **options)
        close(out[sequence], expected)
        close(lse[sequence], expected_lse)


@pytest.mark.parametrize("options", CASES)
def test_packed(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, kv = drawn(7, 4, 8).requires_grad_(), drawn(12, 2, 2, 8)
    boundaries = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    given = {"causal": options.get("causal", False), "window_size": options.get("window", (-1, -1))}
    out = flash.flash_attn_varlen_kvpacked_func(q, kv, *boundaries, 4, 7, **given, alibi_slopes=options.get("slopes"))
    copy = q.detach().double().requires_grad_()
    parts = [
        documented(copy[a:b], kv[c:d, 0], kv[c:d, 1], **options)[0] for a, b, c, d in ((0, 3, 0, 5), (3, 7, 5, 12))
    ]
    close(out, torch.cat(parts))
    gradient = torch.randn_like(out)
    out.backward(gradient)
    torch.cat(parts).backward(gradient.double())
    close(q.grad, copy.grad)


def test_packed_projections_match_the_separate_ones() -> None:
    qkv = drawn(2, 6, 3, 4, 8)
    plain = flash.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash.flash_attn_qkvpacked_func(qkv, causal=True), plain)
    assert torch.equal(flash.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), plain)
    boundaries = torch.tensor([0, 6, 12], dtype=torch.int32)
    packed = flash.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), boundaries, 6, causal=True)
    close(packed, plain.flatten(0, 1).double())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: flash.flash_attn_qkvpacked_func(x), r"qkv \[B, S, 3, H, D\].*got shape \(2, 6, 4, 4, 8\)"),
        (lambda x: flash.flash_attn_kvpacked_func(x[:, :, 0], x), r"kv: expected \[B, Sk, 2, Hk, D\], got shape"),
        (
            lambda x: flash.flash_attn_varlen_kvpacked_func(x[0, :, 0], x[0]),
            r"kv: expected \[Tk, 2, Hk, D\], got shape",
        ),
    ],
)
def test_a_wrong_packed_projection_is_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(drawn(2, 6, 4, 4, 8))


# ---- the cache -------------------------------------------------------------------------------------------------------


def decode(
    paged: bool, interleaved: bool | None, new: int, **options: Any
) -> tuple[Any, list[tuple[Tensor, Tensor, Tensor]]]:
    """A call that appends ``new`` tokens to 3 and 6, and what each sequence attends with after it."""
    torch.manual_seed(0)
    q, k, v = drawn(2, new, 4, 8), drawn(2, new, 2, 8), drawn(2, new, 2, 8)
    held = torch.tensor([3, 6], dtype=torch.int32)
    full = drawn(2, 2, 12, 2, 8)  # of k and v: two sequences of up to 12 tokens
    table = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32) if paged else None
    rows = None if paged else torch.tensor([2, 0])
    caches = []
    for content in full:
        cache = drawn(6, 4, 2, 8) if paged else drawn(4, 12, 2, 8)
        if table is not None:
            cache[table.long()] = content.unflatten(1, (3, 4))
        else:
            cache[rows] = content
        caches.append(cache)
    cos = sin = None
    if interleaved is not None:
        angles = torch.arange(12)[:, None] * torch.tensor([1.0, 0.1, 0.01])
        cos, sin = angles.cos(), angles.sin()
        options["rotary_interleaved"] = interleaved
    found = flash.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, held, rows, block_table=table, causal=True, **options
    )
    expected = []
    for sequence, count in enumerate(held.tolist()):
        now, queries = k[sequence], q[sequence]
        if interleaved is not None:
            now, queries = (by_hand(each, count, interleaved) for each in (now, queries))
        expected.append(
            (
                queries,
                torch.cat([full[0, sequence, :count], now]),
                torch.cat([full[1, sequence, :count], v[sequence]]),
            )
        )
        stored = caches[0][table[sequence].long()].flatten(0, 1) if table is not None else caches[0][rows[sequence]]
        torch.testing.assert_close(stored[: count + new], expected[-1][1].to(stored.dtype))
        assert torch.equal(stored[count + new :], full[0, sequence, count + new :])
    return found, expected


def by_hand(x: Tensor, start: int, interleaved: bool) -> Tensor:
    """Rotates 3 pairs among the first 6 of 8 columns, one number at a time."""
    out = x.clone()
    for token in range(x.shape[0]):
        for pair, rate in enumerate((1.0, 0.1, 0.01)):
            one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 3)
            c, s = math.cos((start + token) * rate), math.sin((start + token) * rate)
            out[token, :, one] = x[token, :, one] * c - x[token, :, other] * s
            out[token, :, other] = x[token, :, one] * s + x[token, :, other] * c
    return out


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("interleaved", [None, True, False])
@pytest.mark.parametrize("new", [1, 3])
def test_decoding_appends_and_attends(paged: bool, interleaved: bool | None, new: int) -> None:
    (out, lse), expected = decode(paged, interleaved, new, return_softmax_lse=True)
    for sequence, tensors in enumerate(expected):
        attended, its_lse = documented(*tensors, causal=True)
        close(out[sequence], attended)
        close(lse[sequence], its_lse)


def test_a_cache_without_new_keys_is_read_whole() -> None:
    q, k, v = drawn(2, 1, 4, 8), drawn(2, 7, 4, 8), drawn(2, 7, 4, 8)
    assert torch.equal(flash.flash_attn_with_kvcache(q, k, v), flash.flash_attn_func(q, k, v))
    half = flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=4)
    close(half, flash.flash_attn_func(q, k[:, :4], v[:, :4]).double())


# ---- the interface ---------------------------------------------------------------------------------------------------

# The arguments of flash-attn 2.8, in their order.
COMMON = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
ARGUMENTS = {
    "flash_attn_func": f"q k v {COMMON}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON} block_table",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
    " block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits"
    " return_softmax_lse",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_have_the_names_and_the_order_of_the_package(name: str) -> None:
    assert list(inspect.signature(getattr(flash, name)).parameters) == ARGUMENTS[name].split()
    assert getattr(fasttfm, name) is getattr(flash, name)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"softcap": 30.0}, r"flash_attn_func: softcap: expected nothing \(it is not supported\), got 30.0"),
        ({"alibi_slopes": torch.ones(2, 4)}, r"alibi_slopes: expected \[heads\] .* got shape \(2, 4\)"),
        ({"window_size": (1,)}, "window"),
    ],
)
def test_what_is_not_supported_is_refused(options: dict[str, Any], sentence: str) -> None:
    q = drawn(2, 3, 4, 8)
    with pytest.raises((ValueError, TypeError), match=sentence):
        flash.flash_attn_func(q, q, q, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cache_leftpad": torch.zeros(2)}, "cache_leftpad: expected nothing"),
        ({"v": None}, "v: expected both k and v"),
        ({"cache_seqlens": 6}, "cache_seqlens: expected room for at most 6 tokens, got 6 held and 1 new"),
        ({"cache_seqlens": -1}, "cache_seqlens: expected room for at most 6 tokens, got -1 held and 1 new"),
        ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens"),
        ({"k": torch.ones(2, 1, 1, 8)}, r"k: expected shape \(2, 1, 4, 8\), got shape \(2, 1, 1, 8\)"),
        ({"v": torch.ones(2, 1, 4, 1)}, r"v: expected shape \(2, 1, 4, 8\), got shape \(2, 1, 4, 1\)"),
        ({"v": torch.ones(2, 2, 4, 8)}, r"v: expected shape \(2, 1, 4, 8\), got shape \(2, 2, 4, 8\)"),
        ({"k": torch.ones(2, 1, 4, 8).half()}, "k: expected the cache's float32, got float16"),
        ({"cache_batch_idx": torch.tensor([0, -1])}, "cache_batch_idx: expected numbers from 0 to 1, .*got -1 to 0"),
        ({"cache_batch_idx": torch.tensor([0, 2])}, "cache_batch_idx: expected numbers from 0 to 1, .*got 0 to 2"),
        ({"block_table": torch.tensor([[0], [-1]])}, "block_table: expected numbers from 0 to 1, .*got -1 to 0"),
        ({"rotary_cos": torch.ones(9, 2)}, "rotary_cos: expected rotary_cos, rotary_sin, k and v together"),
        ({"rotary_sin": torch.ones(9, 2)}, "rotary_cos: expected rotary_cos, rotary_sin, k and v together"),
        (
            {"cache_seqlens": torch.tensor([2.7, 1.0])},
            "cache_seqlens: expected a tensor of int64 or int32, got float32",
        ),
        ({"cache_seqlens": 2.5}, "cache_seqlens: expected an integer, a tensor or None, got float"),
        ({"v_cache": torch.ones(2, 2, 4, 8)}, r"v_cache: expected shape \(2, 6, 4, 8\), got shape \(2, 2, 4, 8\)"),
        ({"v_cache": torch.ones(2, 6, 4, 8).half()}, "v_cache: expected k_cache's float32, got float16"),
        ({"q": torch.ones(1, 4, 8)}, r"q: expected 4 dimensions, got shape \(1, 4, 8\)"),
        ({"block_table": torch.zeros(3, 1)}, "block_table: expected 2 rows"),
    ],
)
def test_a_wrong_cache_is_refused(options: dict[str, Any], sentence: str) -> None:
    q, cache = drawn(2, 1, 4, 8), drawn(2, 6, 4, 8)
    before = cache.clone()
    given = {"q": q, "k_cache": cache, "v_cache": cache, "k": q, "v": q, "cache_seqlens": 2, **options}
    with pytest.raises((ValueError, TypeError), match=sentence):
        flash.flash_attn_with_kvcache(**given)
    assert torch.equal(cache, before)


def test_a_window_of_none_rotates_as_one_without_limit() -> None:
    q, new, cache = drawn(2, 3, 4, 8), drawn(2, 3, 4, 8), drawn(2, 6, 4, 8)
    tables = {"rotary_cos": drawn(9, 4), "rotary_sin": drawn(9, 4), "cache_seqlens": 2}
    first, second = (
        flash.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), new, new, window_size=window, **tables)
        for window in ((-1, -1), (None, None))
    )
    assert torch.equal(first, second)


def test_entries_of_unused_blocks_may_be_anything() -> None:
    q, blocks = drawn(1, 1, 4, 8), drawn(3, 2, 4, 8)
    given = {"cache_seqlens": torch.tensor([3], dtype=torch.int32)}
    tables = [torch.tensor([[2, 0, unused]], dtype=torch.int32) for unused in (1, -1, 99)]
    outs = [flash.flash_attn_with_kvcache(q, blocks, blocks, block_table=table, **given) for table in tables]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


# ---- FlashAttention-4 itself, where it is installed on a GPU machine -------------------------------------------------


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(out, inputs, torch.randn_like(out)))


FA4_CASES = [
    {"causal": False, "window": (-1, -1), "kv_heads": 4},
    {"causal": True, "window": (-1, -1), "kv_heads": 2},
    {"causal": False, "window": (64, 64), "kv_heads": 4},
]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("case", FA4_CASES, ids=["full", "causal", "window"])
def test_flash_attention_4_gives_the_same(case: dict[str, Any], packed: bool) -> None:
    """Both against fp32 attention of the same bf16 numbers: ours is no further from it than 1.5 times theirs, as by the
    rule of docs/numerics.md, and a bf16 step of the largest number."""
    theirs = pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed")
    torch.manual_seed(0)
    lengths = (300, 17, 195)
    shape = (sum(lengths),) if packed else (2, 256)
    heads = {"q": 4, "k": case["kv_heads"], "v": case["kv_heads"]}
    drawn = [torch.randn(*shape, count, 64, device="cuda").bfloat16().requires_grad_() for count in heads.values()]
    left, right = case["window"]
    options = {"causal": case["causal"]}
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    named = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 300, "max_seqlen_k": 300}
    named = named if packed else {}
    ours = flash.flash_attn_varlen_func if packed else flash.flash_attn_func
    other = theirs.flash_attn_varlen_func if packed else theirs.flash_attn_func
    out = ours(*drawn, **named, **options, window_size=(left, right))
    window = (None, None) if left < 0 else (left, right)
    expected, _ = other(*drawn, **named, **options, window_size=window)
    wide = [tensor.detach().float().requires_grad_() for tensor in drawn]
    exact = ours(*wide, **named, **options, window_size=(left, right))
    for mine, peer, truth in zip(
        [out, *gradients(out, *drawn)],
        [expected, *gradients(expected, *drawn)],
        [exact, *gradients(exact.bfloat16(), *wide)],
        strict=True,
    ):
        own, other_error = ((each.float() - truth.float()).abs().max() for each in (mine, peer))
        assert own <= 1.5 * other_error + 2**-8 * truth.abs().max()
