"""philox.py for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # inline assembly works only on GPUs


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Four uint32 words per counter (uint32 tensors of one shape); ``seed`` is an int64 scalar."""
    key0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(7):
        high0 = tl.umulhi(c0, tl.full(c0.shape, 0xD2511F53, tl.uint32))
        high1 = tl.umulhi(c2, tl.full(c2.shape, 0xCD9E8D57, tl.uint32))
        low0 = c0 * tl.full(c0.shape, 0xD2511F53, tl.uint32)
        low1 = c2 * tl.full(c2.shape, 0xCD9E8D57, tl.uint32)
        c0 = high1 ^ c1 ^ key0
        c2 = high0 ^ c3 ^ key1
        c1 = low1
        c3 = low0
        key0 += tl.full(key0.shape, 0x9E3779B9, tl.uint32)
        key1 += tl.full(key1.shape, 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def kept(seed, sequence, token, threshold, first_column, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """Which activations dropout keeps: bool [BLOCK_N, BLOCK_C], for rows at the given positions (uint32 [BLOCK_N]) and
    the columns from ``first_column`` on (both multiples of 16). One draw has a byte for each of
    16 columns."""
    blocks = (first_column // 16 + tl.arange(0, BLOCK_C // 16)).to(tl.uint32)
    c0 = tl.broadcast_to(blocks[None, :], (BLOCK_N, BLOCK_C // 16))
    c1 = tl.broadcast_to(token[:, None], (BLOCK_N, BLOCK_C // 16))
    c2 = tl.broadcast_to(sequence[:, None], (BLOCK_N, BLOCK_C // 16))
    w0, w1, w2, w3 = philox(seed, c0, c1, c2, tl.zeros_like(c0))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(BLOCK_N, BLOCK_C // 4, 1)
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    draws = (words >> shifts[None, None, :]) & 0xFF
    return draws.reshape(BLOCK_N, BLOCK_C) >= threshold


@triton.jit
def _kept_words(seed, sequence, head, queries, first_key, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns, for each weight of a tile, the word that holds its byte, and the index of the byte: uint32 [BLOCK_M,
    BLOCK_N]. The byte's high bit says whether the weight is kept.

    Four bytes are compared at once: the high bit of a byte of ``z`` says whether its low seven bits reach those of the
    threshold, which decides together with the high bits of the byte and of the threshold.
    """
    draws: tl.constexpr = BLOCK_N // 16
    c0 = tl.broadcast_to((first_key // 16 + tl.arange(0, draws)).to(tl.uint32)[None, :], (BLOCK_M, draws))
    c1 = tl.broadcast_to(queries.to(tl.uint32)[:, None], (BLOCK_M, draws))
    c2 = tl.full((BLOCK_M, draws), 0, tl.uint32) + sequence.to(tl.uint32)
    c3 = tl.full((BLOCK_M, draws), 1, tl.uint32) + head.to(tl.uint32)
    w0, w1, w2, w3 = philox(seed, c0, c1, c2, c3)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    low = (128 - (threshold & 127)).to(tl.uint32) * 0x01010101
    either = tl.where(threshold < 128, 0xFFFFFFFF, 0).to(tl.uint32)
    z = (words & 0x7F7F7F7F) + low
    keep = (words & z) | (either & (words | z))
    keep = keep.reshape(BLOCK_M, BLOCK_N // 64, 4, 4, 1)  # ..., draw, word, byte
    byte = tl.arange(0, 4).to(tl.uint32)[None, None, None, None, :]
    keep, byte = tl.broadcast(keep, byte)
    return _along_keys(keep, BLOCK_M, BLOCK_N), _along_keys(byte, BLOCK_M, BLOCK_N)


@triton.jit
def _along_keys(values, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N] from the order of draws [BLOCK_M, BLOCK_N // 64, draw, word, byte]."""
    values = values.reshape(BLOCK_M, BLOCK_N // 64, 4, 8, 2)
    return tl.permute(values, (0, 1, 3, 2, 4)).reshape(BLOCK_M, BLOCK_N)


@triton.jit
def dropped_weights(
    weights,  # fp32 [BLOCK_M, BLOCK_N]
    seed,
    sequence,
    head,
    queries,  # int32 [BLOCK_M]
    first_key,
    threshold,
):
    """Attention weights of the given queries and the keys from ``first_key`` on (a multiple of 64, as is BLOCK_N), with
    zeros for those that are dropped. In the layout of an mma accumulator, each thread draws for the weights it holds.
    """
    keep, byte = _kept_words(seed, sequence, head, queries, first_key, threshold, weights.shape[0], weights.shape[1])
    if INTERPRETED:
        mask = ((keep << (24 - 8 * byte)).to(tl.int32, bitcast=True) >> 31).to(tl.int32)
    else:  # one instruction: the sign of a byte in every bit
        mask = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [keep, 0x8888 + 0x1111 * byte], tl.int32, is_pure=True, pack=1
        )
    return (weights.to(tl.int32, bitcast=True) & mask).to(tl.float32, bitcast=True)


@triton.jit
def dropped_rounded(weights, seed, sequence, head, queries, first_key, threshold, DTYPE: tl.constexpr):
    """dropped_weights in another type. Weights of 16 bits are masked in pairs."""
    shape: tl.constexpr = weights.shape
    if INTERPRETED or tl.float32 == DTYPE:
        rounded = dropped_weights(weights, seed, sequence, head, queries, first_key, threshold).to(DTYPE)
    else:
        keep, byte = _kept_words(seed, sequence, head, queries, first_key, threshold, shape[0], shape[1])
        selector = 0x9988 + 0x1111 * byte  # the sign of a byte in both bytes of a number, of the next one in the other
        if tl.bfloat16 == DTYPE:
            rounded = tl.inline_asm_elementwise(
                "{ .reg .b32 p, m; cvt.rn.bf16x2.f32 p, $2, $1; prmt.b32 m, $3, 0, $5; and.b32 $0, p, m; }",
                "=r,r,r,r,r,r,r",
                [weights, keep, selector],
                tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            rounded = tl.inline_asm_elementwise(
                "{ .reg .b32 p, m; cvt.rn.f16x2.f32 p, $2, $1; prmt.b32 m, $3, 0, $5; and.b32 $0, p, m; }",
                "=r,r,r,r,r,r,r",
                [weights, keep, selector],
                tl.float16,
                is_pure=True,
                pack=2,
            )
    return rounded
