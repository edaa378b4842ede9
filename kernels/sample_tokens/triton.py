"""Tokens drawn from logits in Triton; the rules are in reference.py.

Each row has one program, which reads it in chunks, several times from L2. The thresholds of top_k and top_p are found
by a radix search, two bits per pass in 16 passes each: the largest value for which a count (or a sum of probabilities)
over the row is large enough. This is exact and needs no sort. Rows without top_k and top_p skip these passes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.philox import philox

_COUNTER = tl.constexpr(0xFFFFFFFE)
_LINES, _COLUMNS = 32, 256  # the shape of a chunk
_NUM_WARPS = 16


@triton.jit
def _ordered(z):
    """Maps fp32 numbers to uint32 in the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _chunk(row, start, V, inverse, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The token ids of a chunk and its logits divided by the temperature, -inf after the end of the row."""
    tokens = start + tl.arange(0, LINES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return tokens, tl.load(row + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32) * inverse


@triton.jit
def _largest(row, V, inverse, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest logit divided by the temperature, and the first token that has it."""
    best = tl.full([LINES, COLUMNS], float("-inf"), tl.float32)
    words = tl.zeros([LINES, COLUMNS], tl.int32)
    for start in range(0, V, LINES * COLUMNS):
        tokens, z = _chunk(row, start, V, inverse, LINES, COLUMNS)
        words = tl.where(z > best, tokens, words)
        best = tl.maximum(best, z)
    largest = tl.max(best)
    return largest, tl.minimum(tl.min(tl.where(best == largest, words, V)), V - 1)


@triton.jit
def _higher(bound, step, part):
    """The bound with ``part`` (1 to 3) as its bits 31 - 2 * step and 30 - 2 * step."""
    return bound | (tl.full([], part, tl.uint32) << (30 - 2 * step)).to(tl.uint32)


@triton.jit
def _kth(row, V, inverse, k, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The k-th largest number, mapped by ``_ordered``."""
    bound = tl.full([], 0, tl.uint32)
    for step in range(16):
        first, second, third = _higher(bound, step, 1), _higher(bound, step, 2), _higher(bound, step, 3)
        ones = tl.zeros([LINES, COLUMNS], tl.int32)
        twos = tl.zeros([LINES, COLUMNS], tl.int32)
        threes = tl.zeros([LINES, COLUMNS], tl.int32)
        for start in range(0, V, LINES * COLUMNS):
            _, z = _chunk(row, start, V, inverse, LINES, COLUMNS)
            at = _ordered(z)
            ones += (at >= first).to(tl.int32)
            twos += (at >= second).to(tl.int32)
            threes += (at >= third).to(tl.int32)
        bound = tl.where(tl.sum(ones) >= k, first, bound)
        bound = tl.where(tl.sum(twos) >= k, second, bound)
        bound = tl.where(tl.sum(threes) >= k, third, bound)
    return bound


@triton.jit
def _weight(row, V, inverse, best, least, above, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of exp(z - best) over the numbers that are at least ``least`` and above ``above``."""
    total = 0.0
    for start in range(0, V, LINES * COLUMNS):
        _, z = _chunk(row, start, V, inverse, LINES, COLUMNS)
        at = _ordered(z)
        total += tl.sum(tl.sum(tl.where((at >= least) & (at > above), tl.exp(z - best), 0.0), axis=1), axis=0)
    return total


@triton.jit
def _nucleus(row, V, inverse, best, least, p, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest bound such that the numbers above it have at least the probability p; only these are kept."""
    above = tl.full([], 0, tl.uint32)
    enough = p * _weight(row, V, inverse, best, least, above, LINES, COLUMNS)
    for step in range(16):
        first, second, third = _higher(above, step, 1), _higher(above, step, 2), _higher(above, step, 3)
        ones = tl.zeros([LINES, COLUMNS], tl.float32)
        twos = tl.zeros([LINES, COLUMNS], tl.float32)
        threes = tl.zeros([LINES, COLUMNS], tl.float32)
        for start in range(0, V, LINES * COLUMNS):
            _, z = _chunk(row, start, V, inverse, LINES, COLUMNS)
            at = _ordered(z)
            weight = tl.where(at >= least, tl.exp(z - best), 0.0)
            ones += tl.where(at > first, weight, 0.0)
            twos += tl.where(at > second, weight, 0.0)
            threes += tl.where(at > third, weight, 0.0)
        above = tl.where(tl.sum(ones) >= enough, first, above)
        above = tl.where(tl.sum(twos) >= enough, second, above)
        above = tl.where(tl.sum(threes) >= enough, third, above)
    return above


@triton.jit
def _picked(weights, tokens, before, target):
    """The first token of a chunk at which the running sum, starting at ``before``, exceeds the target."""
    lines = tl.sum(weights, axis=1)
    numbers = tl.arange(0, weights.shape[0])
    running = before + tl.cumsum(lines, axis=0)
    line = tl.min(tl.where((running > target) & (lines > 0.0), numbers, weights.shape[0]), axis=0)
    line = tl.minimum(line, tl.max(tl.where(lines > 0.0, numbers, 0), axis=0))  # if, by rounding, no line exceeds it
    at_line = (numbers == line)[:, None]
    passed = before + tl.sum(tl.where(numbers < line, lines, 0.0), axis=0)
    values = tl.sum(tl.where(at_line, weights, 0.0), axis=0)
    words = tl.sum(tl.where(at_line, tokens, 0), axis=0)
    exceeds = (passed + tl.cumsum(values, axis=0) > target) & (values > 0.0)
    last = tl.max(tl.where(values > 0.0, words, 0), axis=0)
    return tl.minimum(tl.min(tl.where(exceeds, words, 2147483647), axis=0), last)


@launched_kernel
@triton.jit
def sample_tokens_kernel(
    logits,  # [B, V], rows stride apart
    seeds,  # int64 [B]
    positions,  # int32 or int64 [B]
    temperature,  # fp32 [B]
    top_k,  # int32 [B]
    top_p,  # fp32 [B]
    chosen,  # int64 [B]
    ids,  # int64 [B]; this and the next four pointers are unused if ENDS is 0
    active,  # bool [B]
    limits,  # int32 [B]
    ends,  # int64 [B, ENDS]
    history,  # int64 [B, room], rows history_stride apart
    V,
    stride,
    history_stride,
    ENDS: tl.constexpr,  # stop tokens per sequence; 0 without sequences
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * stride
    heat = tl.load(temperature + program)
    greedy = heat <= 0.0
    inverse = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, heat))
    best, word = _largest(row, V, inverse, LINES, COLUMNS)
    if greedy == 0:
        k = tl.load(top_k + program)
        p = tl.load(top_p + program)
        least = tl.full([], 0, tl.uint32)
        above = tl.full([], 0, tl.uint32)
        if (k > 0) & (k < V):
            least = _kth(row, V, inverse, k, LINES, COLUMNS)
        if p < 1.0:
            above = _nucleus(row, V, inverse, best, least, p, LINES, COLUMNS)
        total = _weight(row, V, inverse, best, least, above, LINES, COLUMNS)
        position = (tl.load(positions + program).to(tl.int64) & 0xFFFFFFFF).to(tl.uint32)
        zero = tl.zeros([1], tl.uint32)
        draw, _, _, _ = philox(tl.load(seeds + program), zero + position, zero, zero, zero + _COUNTER)
        u = tl.sum(((draw >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07, axis=0)
        target = u * total
        running = 0.0
        for start in range(0, V, LINES * COLUMNS):
            tokens, z = _chunk(row, start, V, inverse, LINES, COLUMNS)
            at = _ordered(z)
            weights = tl.where((at >= least) & (at > above), tl.exp(z - best), 0.0)
            after = running + tl.sum(tl.sum(weights, axis=1), axis=0)
            if (running <= target) & (target < after):
                word = _picked(weights, tokens, running, target)
            running = after
    word = word.to(tl.int64)
    tl.store(chosen + program, word)
    if ENDS > 0:
        position = tl.load(positions + program).to(tl.int64)
        going = tl.load(active + program) != 0
        last = tl.where(going, word, tl.load(ids + program))
        tl.store(ids + program, last)
        tl.store(history + program.to(tl.int64) * history_stride + position, last)
        ended = tl.max((tl.load(ends + program * ENDS + tl.arange(0, ENDS)) == last).to(tl.int32), axis=0) > 0
        going = going & (ended == 0) & (position + 1 < tl.load(limits + program))
        tl.store(active + program, going.to(tl.int1))


def sample_tokens_triton(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *sequences: Tensor | None,
) -> Tensor:
    """``sequences``: ids, active, limits, ends and history, or five Nones."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits) == 0:
        return chosen
    _, _, _, ends, history = sequences
    others = [tensor.contiguous() for tensor in (seeds, positions, temperature, top_k, top_p)]
    with on_device(logits):
        sample_tokens_kernel[(len(logits),)](
            logits,
            *others,
            chosen,
            *(chosen if tensor is None else tensor for tensor in sequences),
            logits.shape[1],
            logits.stride(0),
            0 if history is None else history.stride(0),
            ENDS=0 if ends is None else ends.shape[1],
            LINES=_LINES,
            COLUMNS=_COLUMNS,
            num_warps=_NUM_WARPS,
        )
    return chosen


def compile_signatures(element: str) -> list[dict[str, object]]:
    """The kernel as the launcher compiles it for logits of Triton type ``element``."""
    rows = {"seeds": "*i64", "positions": "*i32", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32"}
    sequences = {"ids": "*i64", "active": "*i1", "limits": "*i32", "ends": "*i64", "history": "*i64"}
    sizes = dict.fromkeys(("V", "stride", "history_stride"), "i32")
    return [
        {
            "kernel": sample_tokens_kernel,
            "signature": {"logits": f"*{element}", **rows, "chosen": "*i64", **sequences, **sizes},
            "num_warps": _NUM_WARPS,
            "constants": {"ENDS": 8, "LINES": _LINES, "COLUMNS": _COLUMNS},
        }
    ]
