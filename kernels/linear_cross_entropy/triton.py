"""Cross entropy of a block of logits in Triton, its gradient written over them; the formulas are in
kernels/vocabulary/cross_entropy.py.

A program takes one row and makes two passes over its V logits: one for the softmax's denominator and everything that
does not need it, and one for the gradient; a sample is drawn in between, up to the tile that contains it. The rows in
flight fit into L2, so global memory is read once and written once. Rows are P >= V columns apart, P a multiple of 64.
Tiles below V need no mask. In the last tile, loads and stores extend to P, because a mask that ends at V would split
them into single elements. Columns from V on are read as minus infinity and written as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, next_power_of_2, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.common.triton.philox import philox
from fasttfm.kernels.vocabulary.cross_entropy import SAMPLING_COUNTER, Loss
from fasttfm.kernels.vocabulary.triton_softmax import LOWEST, added, exponential, total

_LABELS = 0  # index in (labels, positions), the arguments whose errors are recorded


@triton.jit
def _logits_at(line, bias, columns, V, P, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, HINT: tl.constexpr):
    """fp32 logits of a row at these columns; minus infinity from V on. WHOLE: all columns are below V."""
    if WHOLE:
        x = tl.load(line + columns, eviction_policy=HINT).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + columns).to(tl.float32)
    else:
        x = tl.load(line + columns, mask=columns < P, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + columns, mask=columns < P, other=0.0).to(tl.float32)
        x = tl.where(columns < V, x, float("-inf"))
    return x


@triton.jit
def _seen(
    sums,  # [groups], as all of the state
    largest,
    tempered,
    tempered_largest,
    totals,  # sums of logits
    beaten,  # whether a logit comes before the label's, or there is a NaN
    x,  # [groups, group]
    columns,
    label,
    at_label,
    inverse_temperature,
    V,
    SMOOTHED: tl.constexpr,
    COUNT: tl.constexpr,
    TEMPERED: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """Updates the state of the first pass with logits x at these columns."""
    sums, largest = added(sums, largest, x, PRECISE)
    if TEMPERED:
        tempered, tempered_largest = added(tempered, tempered_largest, x * inverse_temperature, PRECISE)
    if SMOOTHED:
        totals += tl.sum(tl.where(columns < V, x, 0.0), axis=1)
    if COUNT:
        loses = (x < at_label) | ((x == at_label) & (columns >= label))  # a NaN does not
        beaten = beaten | tl.max((loses == 0).to(tl.int32), axis=1)
    return sums, largest, tempered, tempered_largest, totals, beaten


@triton.jit
def _uniform(seed, row, COUNTER: tl.constexpr):
    """cross_entropy.uniform() of one row (int64): one element [1]."""
    low = (row + tl.arange(0, 1)) & 0xFFFFFFFF
    c0, c1 = low.to(tl.uint32), ((row + tl.arange(0, 1)) >> 32).to(tl.uint32)
    c2 = tl.zeros([1], tl.uint32)
    word, _, _, _ = philox(seed, c0, c1, c2, c2 + COUNTER)
    return tl.sum(((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0), axis=0)


@triton.jit
def _draw(
    sample,
    line,
    bias,
    target,
    top,
    inverse_temperature,
    V,
    P,
    HAS_BIAS: tl.constexpr,
    APART: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Stores the first token at which the running sum of exponentials exceeds ``target``."""
    word = V - 1
    before = 0.0
    for start in range(0, P, BLOCK_V):
        if before <= target:
            x = _logits_at(line, bias, start + tl.arange(0, BLOCK_V), V, P, HAS_BIAS, False, "")
            if APART:
                x *= inverse_temperature
            share = exponential(x - top, PRECISE)
            after = before + tl.sum(share, axis=0)
            if target < after:
                passed = before + tl.cumsum(share, axis=0) <= target
                word = tl.minimum(start + tl.sum(passed.to(tl.int32), axis=0), V - 1)
            before = after
    tl.store(sample, word)


@launched_kernel
@triton.jit
def _loss_kernel(
    logits,  # [n, P]; overwritten by the gradient
    bias,  # [P] or unused
    labels,  # [N]
    coefficients,  # [N] or unused
    seed,  # [1] int64 or unused
    losses,  # [N] fp32
    correct,  # [N] bool or unused
    samples,  # [N] int64 or unused
    errors,  # int64 [2, 2]
    first_row,  # of the n rows among the N
    V,
    P,
    ignore_index,
    label_smoothing,
    z_loss,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    COUNT: tl.constexpr,
    SAMPLE: tl.constexpr,
    TEMPERED: tl.constexpr,
    GRADIENT: tl.constexpr,
    ARGUMENT: tl.constexpr,
    COUNTER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * P
    row += first_row
    raw_label = tl.load(labels + row).to(tl.int64)
    GROUPS: tl.constexpr = BLOCK_V // GROUP
    PRECISE: tl.constexpr = logits.dtype.element_ty == tl.float32
    APART: tl.constexpr = SAMPLE and TEMPERED
    block = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if raw_label == ignore_index:
        tl.store(losses + row, 0.0)
        if COUNT:
            tl.store(correct + row, False)
        if SAMPLE:
            tl.store(samples + row, ignore_index)
        if GRADIENT:
            for start in range(0, P, BLOCK_V):
                columns = start + block
                tl.store(line + columns, tl.zeros([GROUPS, GROUP], logits.dtype.element_ty), mask=columns < P)
    else:
        bad = (raw_label < 0) | (raw_label >= V)
        if bad:
            saturated = tl.minimum(tl.maximum(raw_label, -2147483648), 2147483647)
            tl.atomic_min(errors + ARGUMENT, (row << 32) | (saturated & 0xFFFFFFFF))
            tl.store(errors + 2 + ARGUMENT, V)
        label = tl.where(bad, 0, raw_label).to(tl.int32)
        at_label = tl.load(line + label).to(tl.float32)
        if HAS_BIAS:
            at_label += tl.load(bias + label).to(tl.float32)
        inverse = 1.0 / temperature
        whole = V // BLOCK_V * BLOCK_V  # tiles before this column are full; at most one comes after

        zeros = tl.zeros([GROUPS], tl.float32)
        sums, maxima, tempered, tempered_maxima, totals = zeros, zeros + LOWEST, zeros, zeros + LOWEST, zeros
        beaten = tl.zeros([GROUPS], tl.int32)
        for start in range(0, whole, BLOCK_V):
            columns = start + block
            x = _logits_at(line, bias, columns, V, P, HAS_BIAS, True, "evict_last")
            sums, maxima, tempered, tempered_maxima, totals, beaten = _seen(
                sums, maxima, tempered, tempered_maxima, totals, beaten,
                x, columns, label, at_label, inverse, V, SMOOTHED, COUNT, APART, PRECISE,
            )  # fmt: skip
        if whole < P:
            columns = whole + block
            x = _logits_at(line, bias, columns, V, P, HAS_BIAS, False, "")
            sums, maxima, tempered, tempered_maxima, totals, beaten = _seen(
                sums, maxima, tempered, tempered_maxima, totals, beaten,
                x, columns, label, at_label, inverse, V, SMOOTHED, COUNT, APART, PRECISE,
            )  # fmt: skip
        denominator, largest = total(sums, maxima, PRECISE)
        log_denominator = tl.log(denominator)
        lse = largest + log_denominator
        loss = (largest - at_label) + log_denominator + z_loss * lse * lse
        if SMOOTHED:
            loss += label_smoothing * (at_label - tl.sum(totals, axis=0) / V)
        tl.store(losses + row, tl.where(bad, float("nan"), loss))
        if COUNT:
            tl.store(correct + row, (tl.max(beaten, axis=0) == 0) & (bad == 0))

        if GRADIENT:
            factor = tl.where(bad, 0.0, 1.0)
            if HAS_COEFFICIENTS:
                factor *= tl.load(coefficients + row).to(tl.float32)
            slope = factor * (1.0 + 2.0 * z_loss * lse) / denominator
            spread = factor * label_smoothing / V
        if SAMPLE:
            end = denominator
            top = largest
            if APART:
                end, top = total(tempered, tempered_maxima, PRECISE)
            target = _uniform(tl.load(seed), row, COUNTER) * end
            _draw(samples + row, line, bias, target, top, inverse, V, P, HAS_BIAS, APART, PRECISE, BLOCK_V)
        if GRADIENT:
            for start in range(0, whole, BLOCK_V):
                columns = start + block
                x = _logits_at(line, bias, columns, V, P, HAS_BIAS, True, "evict_first")
                g = exponential(x - largest, PRECISE) * slope - spread
                tl.store(line + columns, g.to(logits.dtype.element_ty))
            if whole < P:
                columns = whole + block
                x = _logits_at(line, bias, columns, V, P, HAS_BIAS, False, "")
                g = exponential(x - largest, PRECISE) * slope - spread
                g = tl.where(columns < V, g, 0.0).to(logits.dtype.element_ty)
                tl.store(line + columns, g, mask=columns < P)
            tl.debug_barrier()  # the label's column is stored last, over what its thread has stored
            g = exponential(at_label - largest, PRECISE) * slope - spread - factor * (1.0 - label_smoothing)
            tl.store(line + label, g.to(logits.dtype.element_ty))


def _tile(columns: int, element_bytes: int, *, more: bool) -> dict[str, int]:
    """16 bytes per thread and load, two loads per tile; one with counts, samples or smoothing, which take registers."""
    group = 16 // element_bytes
    block_v = min((512 if more else 1024) * group, next_power_of_2(columns))
    threads = min(512, block_v // group)
    return {"BLOCK_V": block_v, "GROUP": group, "num_warps": max(1, threads // 32)}


def linear_cross_entropy_triton(
    logits: Tensor,
    vocabulary: int,
    bias: Tensor | None,
    labels: Tensor,
    coefficients: Tensor | None,
    seed: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    first: int,
    loss: Loss,
    gradient: bool,
    errors: Tensor,
) -> None:
    """One block of rows: logits [n, P] of rows ``first`` and on; ``outputs`` are losses, correct and samples of all."""
    losses, correct, samples = outputs
    more = loss.count_correct or seed is not None or loss.label_smoothing != 0
    with on_device(logits):
        _loss_kernel[(len(logits),)](
            logits,
            logits if bias is None else bias,
            labels,
            losses if coefficients is None else coefficients,
            labels if seed is None else seed,
            losses,
            correct,
            samples,
            errors,
            first,
            vocabulary,
            logits.stride(0),
            loss.ignore_index,
            loss.label_smoothing,
            loss.z_loss,
            loss.temperature,
            HAS_BIAS=bias is not None,
            HAS_COEFFICIENTS=coefficients is not None,
            SMOOTHED=loss.label_smoothing != 0,
            COUNT=loss.count_correct,
            SAMPLE=seed is not None,
            TEMPERED=loss.temperature != 1,
            GRADIENT=gradient,
            ARGUMENT=_LABELS,
            COUNTER=SAMPLING_COUNTER,
            **_tile(logits.stride(0), logits.element_size(), more=more),
        )


def compile_signatures(columns: int, element: str, *, everything: bool) -> list[dict[str, object]]:
    """The kernel as it is compiled for rows of ``columns`` logits: with all its options, or as training runs it."""
    tile = _tile(columns, 4 if element == "fp32" else 2, more=everything)
    e, i, f = f"*{element}", "*i64", "*fp32"
    pointers = {"logits": e, "bias": e, "labels": i, "coefficients": f, "seed": i, "losses": f, "correct": "*i1"}
    numbers = dict.fromkeys(("first_row", "V", "P", "ignore_index"), "i32")
    reals = dict.fromkeys(("label_smoothing", "z_loss", "temperature"), "fp32")
    signature = {**pointers, "samples": i, "errors": i, **numbers, **reals}
    constants = dict.fromkeys(("HAS_COEFFICIENTS", "SMOOTHED", "COUNT", "SAMPLE", "TEMPERED"), everything)
    always = {"HAS_BIAS": True, "GRADIENT": True, "ARGUMENT": _LABELS, "COUNTER": SAMPLING_COUNTER}
    return [ahead_of_time(_loss_kernel, signature, tile, **constants, **always)]
