"""attention: cases, costs, peers, bad inputs, broken copies."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fasttfm.bench.peers import Inputs, Peer
from fasttfm.kernels.attention import reference
from fasttfm.kernels.attention.problem import window_bounds
from fasttfm.kernels.common import philox
from fasttfm.ops import attention
from fasttfm.testing.attention_peers import fa4, sdpa_cpu, sdpa_forced, sdpa_widened, varlen
from fasttfm.testing.attention_random import random_arguments, without_delta
from fasttfm.testing.chips import BLOCK_MEMORY
from fasttfm.testing.spec import BadCall, Cost, OpCase, OpSpec, Registered, TritonKernel, draw, spoil

SEED = 0x123456789ABCDEF
Lengths = tuple[int, ...]

# ---- cases -----------------------------------------------------------------------------------------------------------


def _case(
    name: str,
    lengths: Lengths,
    heads: int,
    head_dim: int,
    *,
    lengths_k: Lengths | None = None,
    kv_heads: int | None = None,
    layout: str = "dense",
    magnitude: float = 1.0,
    bias: str = "",
    interpret: bool = True,
    **options: Any,
) -> OpCase:
    """``lengths`` of the queries of each sequence, ``lengths_k`` of the keys where they are others.

    layout: "dense" (no padding: sequences of one length), "padded", "packed"; then, each in its own way not contiguous:
    "transposed" (dense, [B, H, S, D] seen as [B, S, H, D]), "sliced" (packed slices of one qkv), and "fused" or
    "fused packed", one qkv. ``magnitude`` multiplies q and k. ``bias``: one of _BIASES, "alibi" or none.
    """
    sizes = {
        "lengths": lengths,
        "lengths_k": lengths if lengths_k is None else lengths_k,
        "heads": heads,
        "kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "layout": layout,
        "magnitude": magnitude,
        "bias": bias,
    }
    return OpCase(name, sizes, options, interpret=interpret)


# Whether each sequence has a bias of its own (None: it has three dimensions), and whether each head has one.
_BIASES: dict[str, tuple[bool | None, bool]] = {
    "full": (None, True),
    "of all": (False, False),
    "of sequences": (True, False),
    "of each": (True, True),
}

CASES = (
    _case("typical", (33, 33), 2, 64, dropout_p=0.1),
    _case("causal", (37, 37), 2, 16, causal=True, return_lse=True),
    _case("packed", (5, 0, 1, 20), 2, 24, layout="packed", dropout_p=0.1),
    _case("packed_causal", (19, 1, 0, 7), 2, 16, layout="packed", causal=True, max_seqlen=19),
    _case("padded", (7, 0, 1, 12), 2, 32, layout="padded", dropout_p=0.2),
    _case("several_tiles", (150, 70), 1, 16, layout="packed", max_seqlen=160, dropout_p=0.1, return_lse=True),
    _case("several_tiles_causal", (139,), 1, 16, causal=True, dropout_p=0.1),
    _case("window", (40, 40), 1, 16, window=(5, 3)),
    _case("window_one_sided", (13, 25), 1, 16, layout="packed", window=(None, 4), dropout_p=0.1),
    _case("window_causal", (13, 30), 2, 16, layout="padded", window=(6, -1), causal=True),
    _case("cross_causal", (9, 9), 2, 16, lengths_k=(21, 21), causal=True),
    _case("cross_packed", (3, 5, 0, 4), 2, 16, lengths_k=(7, 0, 6, 9), layout="packed", causal=True),
    _case("cross_padded", (13, 21), 2, 16, lengths_k=(27, 9), layout="padded", causal=True, dropout_p=0.1),
    _case("nothing_to_attend", (21,), 2, 16, lengths_k=(9,), causal=True),
    _case("decoding", (1,) * 9, 4, 64, lengths_k=(19, 3, 40) * 3, kv_heads=2, layout="padded", causal=True),
    # Not for Triton's interpreter: with one key the gradient of a score is the difference of two equal sums, and numpy
    # adds them up in different orders, with an error that depends on the CPU.
    _case("decoding_one_key", (1,) * 8, 4, 64, lengths_k=(1, 19) * 4, layout="padded", causal=True, interpret=False),
    _case("grouped_heads", (11, 6), 6, 16, kv_heads=2, layout="packed", dropout_p=0.1),
    _case("one_kv_head", (10, 10), 4, 24, kv_heads=1, causal=True),
    _case("one_token", (1,) * 8, 6, 16, lengths_k=(1, 9) * 4, layout="padded", return_lse=True),
    _case("no_tokens", (0, 0), 2, 16, layout="packed"),
    _case("no_sequences", (), 2, 16),
    _case("no_keys", (4,), 2, 16, lengths_k=(0,)),
    _case("bias", (17, 17), 2, 16, bias="full", scale=0.7, return_lse=True),
    _case("bias_packed", (9, 14), 2, 16, bias="full", layout="packed", max_seqlen=16, causal=True, dropout_p=0.1),
    _case("bias_of_all", (9, 14), 4, 16, kv_heads=2, bias="of all", layout="padded", window=(6, 4)),
    _case("bias_of_each", (7, 7), 2, 16, lengths_k=(12, 12), bias="of each", causal=True),
    _case("alibi", (9,), 4, 16, lengths_k=(15,), kv_heads=2, bias="alibi"),
    _case("head_dim_72", (20, 20), 1, 72, dropout_p=0.1),
    _case("head_dim_128", (18, 18), 1, 128, causal=True),
    _case("head_dim_256", (21, 21), 2, 256, dropout_p=0.1),
    _case("transposed", (9, 9), 2, 16, layout="transposed", causal=True),
    _case("sliced", (9, 4), 2, 16, layout="sliced", dropout_p=0.1),
    _case("fused", (9, 9), 2, 16, layout="fused", causal=True, dropout_p=0.1),
    _case("fused_packed", (9, 0, 14), 2, 40, layout="fused packed", dropout_p=0.1),
    # Not for Triton's interpreter: it rounds the product in `score * scale - lse`, which a GPU does not.
    _case("large_logits", (24, 24), 2, 32, magnitude=4.0, causal=True, interpret=False),
    _case("all_dropped", (6, 6), 1, 16, dropout_p=1.0),
    # Head dims and lengths for Hopper's kernels: several tiles of 128 or 192 queries and of 128 keys.
    _case("long_packed", (150, 0, 1, 270), 1, 64, layout="fused packed", max_seqlen=272, interpret=False),
    _case("long_causal", (300, 7), 1, 64, layout="packed", causal=True, return_lse=True, interpret=False),
    _case(
        "long_cross",
        (129, 200),
        2,
        64,
        lengths_k=(333, 20),
        kv_heads=1,
        layout="padded",
        dropout_p=0.7,
        interpret=False,
    ),
    _case("long_128", (140,), 1, 128, layout="transposed", causal=True, dropout_p=0.1, interpret=False),
    _case("long_128_packed", (3, 0, 260), 1, 128, layout="sliced", interpret=False),
    _case("long_192", (250,), 2, 192, kv_heads=1, layout="transposed", causal=True, return_lse=True, interpret=False),
    _case("long_192_packed", (3, 0, 260), 1, 192, layout="sliced", interpret=False),
    _case("long_256", (250,), 2, 256, kv_heads=1, layout="transposed", return_lse=True, interpret=False),
    _case("long_256_cross", (129, 200), 2, 256, lengths_k=(333, 20), layout="padded", causal=True, interpret=False),
)


def _random_case(source: random.Random) -> OpCase:
    return _case("random", **random_arguments(source))


def _inputs(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    sizes = case.sizes
    lengths, lengths_k, layout = sizes["lengths"], sizes["lengths_k"], sizes["layout"]
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]

    def tensor(*shape: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *shape, dtype=dtype, device=device, scale=scale)

    def rows(lengths: Lengths) -> tuple[int, ...]:
        packed = layout in ("packed", "sliced", "fused packed")
        return (sum(lengths),) if packed else (len(lengths), max(lengths, default=5))

    inputs: Inputs
    if layout in ("sliced", "fused", "fused packed"):
        qkv = tensor(*rows(lengths), 3, heads, head_dim, scale=sizes["magnitude"])
        inputs = {"q": qkv} if layout != "sliced" else dict(zip("qkv", qkv.unbind(-3), strict=True))
    else:
        inputs = {
            "q": tensor(*rows(lengths), heads, head_dim, scale=sizes["magnitude"]),
            "k": tensor(*rows(lengths_k), kv_heads, head_dim, scale=sizes["magnitude"]),
            "v": tensor(*rows(lengths_k), kv_heads, head_dim),
        }
    if layout == "transposed":
        inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    inputs |= _boundaries(layout, lengths, lengths_k, device)
    if sizes["bias"] in _BIASES:
        every, per_head = _BIASES[sizes["bias"]]
        leading = (() if every is None else (len(lengths) if every else 1,)) + (heads if per_head else 1,)
        inputs["bias"] = tensor(*leading, max(lengths) + 3, max(lengths_k) + 5)
    elif sizes["bias"] == "alibi":
        slopes = 2.0 ** -torch.arange(1, heads + 1, dtype=torch.float32)
        inputs["alibi_slopes"] = slopes.to(device, torch.promote_types(dtype, torch.float32))
    inputs["seed"] = torch.tensor([SEED], device=device)
    return inputs


def _boundaries(layout: str, lengths: Lengths, lengths_k: Lengths, device: torch.device) -> Inputs:
    if layout == "padded":
        boundaries = {"lengths": torch.tensor(lengths), "lengths_k": torch.tensor(lengths_k)}
    elif layout in ("packed", "sliced", "fused packed"):
        boundaries = {name: torch.tensor([0, *x]).cumsum(0) for name, x in (("", lengths), ("_k", lengths_k))}
        boundaries = {f"cu_seqlens{suffix}": starts for suffix, starts in boundaries.items()}
    else:
        return {}
    if lengths == lengths_k:
        boundaries = dict(itertools.islice(boundaries.items(), 1))
    return {name: values.to(device, torch.int32) for name, values in boundaries.items()}


# ---- costs -----------------------------------------------------------------------------------------------------------


def _pairs(case: OpCase) -> float:
    """Pairs of a query and a key that it attends to, of all sequences."""
    left, right = window_bounds(case.options.get("causal", False), case.options.get("window"))
    total = 0
    for queries, keys in zip(case.sizes["lengths"], case.sizes["lengths_k"], strict=True):
        if (left, right) == (-1, -1):
            total += queries * keys
            continue
        position = torch.arange(queries) + keys - queries
        first = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
        last = torch.full_like(position, keys - 1) if right < 0 else (position + right).clamp(max=keys - 1)
        total += int((last - first + 1).clamp(min=0).sum())
    return float(total)


def _sides(case: OpCase, dtype: torch.dtype) -> tuple[float, float, float]:
    """Bytes of q, of k (or v), and of lse."""
    queries, keys = sum(case.sizes["lengths"]), sum(case.sizes["lengths_k"])
    heads, row = case.sizes["heads"], case.sizes["head_dim"] * dtype.itemsize
    return queries * heads * row, keys * case.sizes["kv_heads"] * row, queries * heads * 4


def _forward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """Reads q, k and v, writes out and lse. Two products of D multiplications and additions for each pair."""
    query, key, lse = _sides(case, dtype)
    flops = 4 * case.sizes["head_dim"] * case.sizes["heads"] * _pairs(case)
    return Cost(bytes=2 * query + 2 * key + lse, flops=flops)


def _backward_cost(case: OpCase, dtype: torch.dtype) -> Cost:
    """Reads q, k, v, out, dout and lse, writes dq, dk and dv. Five products, one of which recomputes the scores."""
    query, key, lse = _sides(case, dtype)
    return Cost(bytes=4 * query + 4 * key + lse, flops=2.5 * _forward_cost(case, dtype).flops)


# ---- benchmarks ------------------------------------------------------------------------------------------------------

BENCH_TOKENS = 16384
# Panels of the chart: sequence lengths, and p and causal of what was measured, for heads x D.
_SWEEPS: tuple[tuple[int, int, float, bool, tuple[int, ...]], ...] = (
    (16, 64, 0.0, False, (128, 256, 512, 1024, 2048, 4096, 16384)),
    (16, 64, 0.1, False, (128, 256, 512, 1024)),
    (16, 64, 0.0, True, (128, 512, 1024, 2048, 4096, 16384)),
    (16, 64, 0.1, True, (512, 1024)),
    (8, 128, 0.0, False, (128, 256, 512, 1024, 2048, 4096, 16384)),
    (8, 128, 0.1, False, (128, 256, 512, 1024)),
    (8, 128, 0.0, True, (512, 2048, 16384)),
)


def _bench_case(heads: int, head_dim: int, p: float, causal: bool, length: int) -> OpCase:
    name = f"{BENCH_TOKENS // length}x{heads}x{length}x{head_dim}{f'_p{p}' if p else ''}{'_causal' if causal else ''}"
    return _case(name, (length,) * (BENCH_TOKENS // length), heads, head_dim, causal=causal, dropout_p=p)


def _spread(sequences: int, least: int, most: int) -> Lengths:
    """Lengths spread evenly, in an order that is not sorted."""
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(0))
    steps = torch.linspace(least, most, sequences).round().int()
    return tuple(steps[order].tolist())


def _packed_bench_case(name: str, heads: int = 16, head_dim: int = 64, **options: Any) -> OpCase:
    return _case(name, _spread(64, 64, 512), heads, head_dim, layout="packed", max_seqlen=512, **options)


BENCH_CASES = (
    *(_bench_case(*sweep[:4], length) for sweep in _SWEEPS for length in sweep[4]),
    _packed_bench_case("packed_64to512", dropout_p=0.0),
    _packed_bench_case("packed_64to512_p0.1", dropout_p=0.1),
    _packed_bench_case("packed_64to512_causal", dropout_p=0.0, causal=True),
    _packed_bench_case("packed_64to512_kv4", dropout_p=0.0, kv_heads=4),
    # The heads of MiniLM, ModernBERT-base (its windows) and ViT-H/14.
    _packed_bench_case("packed_64to512_d32", 12, 32, dropout_p=0.0),
    _case("packed_8192_window128", (8192,) * 2, 12, 64, layout="packed", max_seqlen=8192, window=(64, 64)),
    _case("64x16x257x80", (257,) * 64, 16, 80),
    _case("32x16x512x96", (512,) * 32, 16, 96),
    _case("32x8x512x192", (512,) * 32, 8, 192),
    _case("32x4x512x256", (512,) * 32, 4, 256),
    _case("16x16x1024x64_kv4", (1024,) * 16, 16, 64, kv_heads=4),
    _case("16x8x1024x128_kv2_causal", (1024,) * 16, 8, 128, kv_heads=2, causal=True),
)
CURVES = {
    f"{heads} heads of {head_dim}{', causal' if causal else ''}{f', dropout {p}' if p else ''}": {
        length: _bench_case(heads, head_dim, p, causal, length).name for length in lengths
    }
    for heads, head_dim, p, causal, lengths in _SWEEPS
}
# Nine sixteenths of the tokens are real.
BENCH_CASES_CPU = (
    _case("16x12x128x64_56%", _spread(16, 16, 128), 12, 64, layout="padded"),
    _case("4x12x512x64_56%", _spread(4, 64, 512), 12, 64, layout="padded"),
)


# ---- bad calls -------------------------------------------------------------------------------------------------------


def _add(**values: Any) -> Callable[[Inputs, dict[str, Any]], None]:
    def change(inputs: Inputs, options: dict[str, Any]) -> None:
        inputs.update(values)

    return change


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _packed(**values: Any) -> Callable[[Inputs, dict[str, Any]], None]:
    """The typical call as two packed sequences, then spoiled."""

    def change(inputs: Inputs, options: dict[str, Any]) -> None:
        inputs.update({name: inputs[name].flatten(0, 1) for name in "qkv"})
        inputs.update({"cu_seqlens": _ints(0, 33, 66), **values})

    return change


BAD_CALLS = (
    BadCall("q is no tensor", "q", TypeError, spoil("q", [1.0])),
    BadCall("q is of integers", "q", TypeError, spoil("q", torch.ones(2, 33, 2, 64, dtype=torch.int64))),
    BadCall("q of three dimensions", "q", ValueError, spoil("q", torch.ones(33, 2, 64))),
    BadCall("q without heads", "q", ValueError, spoil("q", torch.ones(2, 33, 0, 64))),
    BadCall("qkv of two", "q", ValueError, _add(q=torch.ones(2, 33, 2, 2, 64), k=None, v=None)),
    BadCall("only q", "q", ValueError, _add(k=None, v=None)),
    BadCall("v left out", "v", TypeError, spoil("v", None)),
    BadCall("k elsewhere", "k", ValueError, spoil("k", torch.ones(2, 33, 2, 64, device="meta"))),
    BadCall("k of another type", "k", TypeError, spoil("k", torch.ones(2, 33, 2, 64).bfloat16())),
    BadCall("k of another batch", "k", ValueError, spoil("k", torch.ones(3, 33, 2, 64))),
    BadCall("k of another head dim", "k", ValueError, spoil("k", torch.ones(2, 33, 2, 32))),
    BadCall("k with more heads", "k", ValueError, spoil("k", torch.ones(2, 33, 3, 64))),
    BadCall("v of another shape", "v", ValueError, spoil("v", torch.ones(2, 32, 2, 64))),
    BadCall("causal is a number", "causal", TypeError, _add(causal=1)),
    BadCall("window is a number", "window", TypeError, _add(window=3)),
    BadCall("window of three", "window", TypeError, _add(window=(1, 2, 3))),
    BadCall("window of floats", "window", TypeError, _add(window=(1.0, 2))),
    BadCall("window negative", "window", ValueError, _add(window=(-2, 0))),
    BadCall("scale is text", "scale", TypeError, _add(scale="1")),
    BadCall("scale is not a number", "scale", ValueError, _add(scale=float("nan"))),
    BadCall("dropout_p above one", "dropout_p", ValueError, spoil("dropout_p", 1.5)),
    BadCall("dropout_p is text", "dropout_p", TypeError, spoil("dropout_p", "half")),
    BadCall("seed is a number", "seed", TypeError, spoil("seed", 1)),
    BadCall("two seeds", "seed", ValueError, spoil("seed", torch.ones(2, dtype=torch.int64))),
    BadCall("cu_seqlens next to [B, S, H, D]", "q", ValueError, _add(cu_seqlens=_ints(0, 33, 66))),
    BadCall("only cu_seqlens_k", "cu_seqlens", ValueError, _packed(cu_seqlens=None, cu_seqlens_k=_ints(0, 33, 66))),
    BadCall("cu_seqlens of int64", "cu_seqlens", TypeError, _packed(cu_seqlens=_ints(0, 33, 66).long())),
    BadCall("cu_seqlens of no sequence", "cu_seqlens", ValueError, _packed(cu_seqlens=_ints(0))),
    BadCall("cu_seqlens too far", "cu_seqlens", ValueError, _packed(cu_seqlens=_ints(0, 33, 67))),
    BadCall("cu_seqlens not far enough", "cu_seqlens", ValueError, _packed(cu_seqlens=_ints(0, 33, 65))),
    BadCall("cu_seqlens falls", "cu_seqlens", ValueError, _packed(cu_seqlens=_ints(0, 40, 33, 66))),
    BadCall("cu_seqlens from below", "cu_seqlens", ValueError, _packed(cu_seqlens=_ints(-9, 33, 66))),
    BadCall("cu_seqlens past max_seqlen", "cu_seqlens", ValueError, _packed(max_seqlen=32)),
    BadCall("cu_seqlens_k of more", "cu_seqlens_k", ValueError, _packed(cu_seqlens_k=_ints(0, 20, 33, 66))),
    BadCall("cu_seqlens_k too far", "cu_seqlens_k", ValueError, _packed(cu_seqlens_k=_ints(0, 99, 99))),
    BadCall("k of other tokens", "k", ValueError, _packed(k=torch.ones(65, 2, 64), v=torch.ones(65, 2, 64))),
    BadCall("max_seqlen is a float", "max_seqlen", TypeError, _packed(max_seqlen=33.0)),
    BadCall("max_seqlen negative", "max_seqlen", ValueError, _packed(max_seqlen=-1)),
    BadCall("max_seqlen without cu_seqlens", "max_seqlen", ValueError, _add(max_seqlen=33)),
    BadCall("lengths next to cu_seqlens", "lengths", ValueError, _packed(lengths=_ints(33, 33))),
    BadCall("lengths of int64", "lengths", TypeError, _add(lengths=torch.tensor([3, 4]))),
    BadCall("lengths in a list", "lengths", TypeError, _add(lengths=[3, 4])),
    BadCall("lengths of three", "lengths", ValueError, _add(lengths=_ints(3, 4, 5))),
    BadCall("lengths too long", "lengths", ValueError, _add(lengths=_ints(3, 34))),
    BadCall("lengths_k negative", "lengths_k", ValueError, _add(lengths_k=_ints(3, -1))),
    BadCall("bias too small", "bias", ValueError, _add(bias=torch.ones(2, 33, 32))),
    BadCall("bias of other heads", "bias", ValueError, _add(bias=torch.ones(3, 33, 33))),
    BadCall("bias of other sequences", "bias", ValueError, _add(bias=torch.ones(3, 2, 33, 33))),
    BadCall("bias of two dimensions", "bias", ValueError, _add(bias=torch.ones(33, 33))),
    BadCall("slopes that learn", "alibi_slopes", ValueError, _add(alibi_slopes=torch.ones(2, requires_grad=True))),
    BadCall("double bias, single q", "q", TypeError, _add(bias=torch.ones(2, 33, 33, dtype=torch.float64))),
    BadCall("alibi_slopes in a list", "alibi_slopes", TypeError, _add(alibi_slopes=[0.5, 0.25])),
    BadCall("alibi_slopes of bf16", "alibi_slopes", TypeError, _add(alibi_slopes=torch.ones(2).bfloat16())),
    BadCall("alibi_slopes of three", "alibi_slopes", ValueError, _add(alibi_slopes=torch.ones(3))),
)


# ---- broken copies ---------------------------------------------------------------------------------------------------


def _looks_ahead(q: Tensor, *others: Tensor, causal: bool = False, window: Any = None, **options: Any) -> Any:
    """A causal mask that is off by one."""
    if causal:
        window = (window[0] if window else None, 1)
    return reference.attention(q, *others, window=window, **options)


def _without_scale(*args: Tensor, scale: float | None = None, **options: Any) -> Any:
    return reference.attention(*args, scale=scale or 1.0, **options)


def _aligned_to_the_start(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, causal: bool = False, **options: Any
) -> Any:
    """Causal attention that aligns query 0 with key 0 instead of the last with the last; of dense tensors."""
    if not causal or k is None or q.dim() != 4 or options.get("window") or options.get("bias") is not None:
        return reference.attention(q, k, v, causal=causal, **options)
    ahead = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    bias = torch.zeros_like(ahead, dtype=q.dtype).masked_fill(ahead, -torch.inf)
    return reference.attention(q, k, v, bias=bias.expand(q.shape[2], -1, -1), **options)


def _other_mask(*args: Tensor, seed: Tensor, **options: Any) -> Any:
    return reference.attention(*args, seed=seed + 1, **options)


def _unscaled(
    q: Tensor, k: Tensor | None = None, v: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Any:
    """Keeps the right weights, without 1 / (1 - p)."""
    if k is None:
        q, k, v = q.unbind(-3)
    fraction = 1 - philox.threshold(dropout_p) / 256
    return reference.attention(q, k, v * fraction, dropout_p=dropout_p, **options)


def _attends_to_padding(*args: Tensor, lengths: Any = None, lengths_k: Any = None, **options: Any) -> Any:
    return reference.attention(*args, lengths=lengths, **options)


def _one_sequence(*args: Tensor, cu_seqlens: Any = None, cu_seqlens_k: Any = None, **options: Any) -> Any:
    """Takes packed sequences for one."""
    if cu_seqlens is not None:
        cu_seqlens, options["max_seqlen"] = cu_seqlens[[0, -1]], None
        cu_seqlens_k = None if cu_seqlens_k is None else cu_seqlens_k[[0, -1]]
    return reference.attention(*args, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, **options)


def _other_kv_head(q: Tensor, k: Tensor | None = None, v: Tensor | None = None, **options: Any) -> Any:
    """Query head h reads key/value head h % Hk."""
    if k is not None and v is not None:
        heads = torch.arange(q.shape[-2], device=q.device) % k.shape[-2]
        k, v = k[..., heads, :], v[..., heads, :]
    return reference.attention(q, k, v, **options)


# ---- registration ----------------------------------------------------------------------------------------------------


def _triton_kernels() -> list[TritonKernel]:
    from fasttfm.kernels.attention.triton_signatures import compile_signatures

    signatures: list[dict[str, Any]] = []
    for chip in (86, 90):
        for head_dim, element in ((16, "bf16"), (64, "bf16"), (128, "fp16"), (256, "bf16"), (64, "fp32")):
            for dropout in (False, True):
                signatures += compile_signatures(head_dim, element, chip == 90, dropout, BLOCK_MEMORY[chip])
    # Wide heads' tiles depend on the memory.
    signatures += compile_signatures(256, "bf16", False, True, BLOCK_MEMORY[80])
    signatures += compile_signatures(128, "fp32", False, True, BLOCK_MEMORY[86])
    return [TritonKernel(**description) for description in signatures]


def _qkv_backward(calls: Sequence[Registered]) -> list[Registered]:
    """The backward of one qkv, which layers call."""
    operator, further = torch.ops.fasttfm.attention_qkv_backward.default, []
    for function, arguments in calls:
        if function is torch.ops.fasttfm.attention_backward.default and arguments[2] is None:
            dout, q, _, _, out, lse, *rest = arguments
            further.append((operator, (dout, q, out, lse, torch.float32, *rest)))
    return further


SPEC = OpSpec(
    name="attention",
    further_calls=_qkv_backward,
    function=attention,
    reference=reference.attention,
    inputs=_inputs,
    differentiable=("q", "k", "v", "bias"),
    cases=CASES,
    random_case=_random_case,
    property_cases=("packed", "causal", "fused"),
    terms=without_delta,
    infinity_masks=("q", "k", "bias"),  # a score of -inf is that of a masked key
    bench_cases=BENCH_CASES,
    bench_cases_cpu=BENCH_CASES_CPU,
    forward_cost=_forward_cost,
    backward_cost=_backward_cost,
    peers=(
        Peer("sdpa", sdpa_cpu),
        Peer("sdpa.float32", sdpa_widened),
        Peer("sdpa.cudnn", sdpa_forced(SDPBackend.CUDNN_ATTENTION)),
        Peer("sdpa.flash", sdpa_forced(SDPBackend.FLASH_ATTENTION)),
        Peer("sdpa.efficient", sdpa_forced(SDPBackend.EFFICIENT_ATTENTION)),
        Peer("torch.varlen_attn", varlen),
        Peer("fa4", fa4),
        Peer("fa4 deterministic", functools.partial(fa4, deterministic=True), backward_only=True),
    ),
    curves=CURVES,
    bad_calls=BAD_CALLS,
    mutants={
        "causal mask off by one": _looks_ahead,
        "without the scale": _without_scale,
        "aligned to the start": _aligned_to_the_start,
        "another dropout mask": _other_mask,
        "dropout without its scale": _unscaled,
        "attends to padding": _attends_to_padding,
        "packed sequences as one": _one_sequence,
        "another key head": _other_kv_head,
    },
    triton_kernels=_triton_kernels,
)
