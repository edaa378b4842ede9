"""Counter-based random numbers and dropout, in plain torch: the specification that every backend follows bit for bit.

Dropout is a function of a seed and of an element's position, without any state: forward and backward agree without a
stored mask, and a batch gives the same result packed or padded, on every backend. One 128-bit draw of Philox 4x32 with
7 rounds decides 16 neighbouring features, a byte each:

    draw(sequence, token, f // 16) = philox(key=seed, counter=(f // 16, token, sequence, 0))
    kept(sequence, token, f) = byte f % 16 of that draw >= threshold        threshold = p * 256, rounded
    dropout(x) = kept * x * 256 / (256 - threshold)
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ROUNDS = 7
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


@functools.cache
def threshold(p: float) -> int:
    """The byte value below which an element is dropped: p in steps of 1/256, at least one step when p is not zero."""
    return 0 if p == 0 else max(1, min(256, round(p * 256)))


def probability(threshold: int) -> float:
    """The probability with which the threshold drops an element."""
    return threshold / 256


def scale(threshold: int) -> float:
    """The factor of kept elements: one over the probability with which the threshold keeps them."""
    return 256 / (256 - threshold) if threshold < 256 else 0.0


def draw_seed(device: torch.device) -> Tensor:
    """A seed of the device's torch generator: [1] int64. ``torch.manual_seed`` reproduces it; each replay of a CUDA
    graph draws a new one."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter, as int64 tensors of the counters' broadcast shape. Products wrap modulo 2**64."""
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((product1 >> 32) & _MASK) ^ c1 ^ key0, ((product0 >> 32) & _MASK) ^ c3 ^ key1
        c1, c3 = product1 & _MASK, product0 & _MASK
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def row_positions(shape: torch.Size, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and token index of every row of a ``[..., S, C]`` or packed ``[T, C]`` tensor, as int64 [rows]."""
    rows = torch.arange(shape[:-1].numel(), device=device)
    if cu_seqlens is None:
        tokens = max(1, shape[-2]) if len(shape) > 1 else 1
        return rows // tokens, rows % tokens
    return packed_positions(rows, cu_seqlens)


def packed_positions(rows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence and token index of rows of a packed tensor, int64."""
    sequences = torch.searchsorted(cu_seqlens[1:-1].contiguous(), rows.int(), right=True)
    return sequences, rows - cu_seqlens[sequences]


def kept(seed: Tensor, sequences: Tensor, tokens: Tensor, columns: int, threshold: int) -> Tensor:
    """Which activations dropout keeps: bool [rows, columns]."""
    blocks = torch.arange((columns + 15) // 16, device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = torch.stack(philox(seed, blocks[None, :], tokens[:, None], sequences[:, None], zero), dim=-1)
    shifts = torch.arange(0, 32, 8, device=seed.device)
    draws = (words[..., None] >> shifts) & 0xFF  # [rows, blocks, 4 words, 4 bytes]
    return draws.flatten(1)[:, :columns] >= threshold


def kept_weights(seed: Tensor, sequences: Tensor, heads: Tensor, queries: Tensor, keys: int, threshold: int) -> Tensor:
    """Which attention weights dropout keeps: bool [..., keys] for positions of one broadcast shape (int64).

    Of 64 neighbouring keys, draw d (0 to 3) decides the pairs d, d + 4, d + 8, ...: a row of an mma accumulator is
    distributed over threads in this way, so that each thread draws for the elements that it holds.

        draw = philox(key=seed, counter=(key // 64 * 4 + key // 2 % 4, query, sequence, 1 + head))
        kept = byte 2 * (key // 8 % 8) + key % 2 of that draw >= threshold
    """
    groups = torch.arange((keys + 63) // 64 * 4, device=seed.device)
    c1, c2, c3 = (index[..., None] for index in torch.broadcast_tensors(queries, sequences, 1 + heads))
    words = torch.stack(philox(seed, groups, c1, c2, c3), dim=-1)  # [..., groups, 4 words]
    shifts = torch.arange(0, 32, 8, device=seed.device)
    draws = ((words[..., None] >> shifts) & 0xFF).unflatten(-3, (-1, 4)).flatten(-2)  # [..., blocks, 4, 16 bytes]
    in_order = draws.unflatten(-1, (8, 2)).transpose(-3, -2)  # [..., blocks, 8, 4, 2]
    return in_order.flatten(-4)[..., :keys] >= threshold
