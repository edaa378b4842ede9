"""Cross entropy of a block of logits in Triton, its gradient written over them; the formulas are in
kernels/common/cross_entropy.py.

A program takes one row and sweeps over its V logits twice: for the softmax's denominator (online, relative to the
largest logit so far) and all that needs no denominator, and for the gradient. Rows that are on their way at one time
fit into the second-level cache: main memory is read once and written once. Rows are P >= V columns apart, P a multiple
of 64, and loads and stores reach to P: a mask that ended at any V would break them up into single elements. Columns
from V on are read as minus infinity and written as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.cross_entropy import SAMPLING_COUNTER, Loss
from fasttfm.kernels.common.launch import on_device
from fasttfm.kernels.common.philox_triton import philox

_LABELS = 0  # of the arguments (labels, positions) that errors are noted for


@triton.jit
def _logits_at(line, bias, columns, V, P, HAS_BIAS: tl.constexpr):
    """fp32 logits of a row at these columns; minus infinity from V on."""
    x = tl.load(line + columns, mask=columns < P, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=columns < P, other=0.0).to(tl.float32)
    return tl.where(columns < V, x, float("-inf"))


@triton.jit
def _uniform(seed, row, COUNTER: tl.constexpr):
    """cross_entropy.uniform() of one row (int64): one element [1]."""
    low = (row + tl.arange(0, 1)) & 0xFFFFFFFF
    c0, c1 = low.to(tl.uint32), ((row + tl.arange(0, 1)) >> 32).to(tl.uint32)
    c2 = tl.zeros([1], tl.uint32)
    word, _, _, _ = philox(seed, c0, c1, c2, c2 + COUNTER)
    return tl.sum(((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0), axis=0)


@triton.jit
def _loss_kernel(
    logits,  # [n, P]; the gradient after the call, where it is wanted
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
):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * P
    row += first_row
    label = tl.load(labels + row).to(tl.int64)
    block = tl.arange(0, BLOCK_V)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if COUNT:
            tl.store(correct + row, False)
        if SAMPLE:
            tl.store(samples + row, ignore_index)
        if GRADIENT:
            for start in range(0, P, BLOCK_V):
                columns = start + block
                tl.store(line + columns, tl.zeros([BLOCK_V], logits.dtype.element_ty), mask=columns < P)
    else:
        bad = (label < 0) | (label >= V)
        if bad:
            saturated = tl.minimum(tl.maximum(label, -2147483648), 2147483647)
            tl.atomic_min(errors + ARGUMENT, (row << 32) | (saturated & 0xFFFFFFFF))
            tl.store(errors + 2 + ARGUMENT, V)
        label = tl.where(bad, 0, label)
        at_label = tl.load(line + label).to(tl.float32)
        if HAS_BIAS:
            at_label += tl.load(bias + label).to(tl.float32)

        largest = float("-inf")
        sums = tl.zeros([BLOCK_V], tl.float32)
        tempered = 0.0
        total = 0.0
        beaten = tl.zeros([BLOCK_V], tl.int1)
        for start in range(0, P, BLOCK_V):
            columns = start + block
            x = _logits_at(line, bias, columns, V, P, HAS_BIAS)
            largest_now = tl.maximum(largest, tl.max(x, axis=0))
            shift = tl.where(largest_now == float("-inf"), 0.0, largest_now)
            sums = sums * tl.exp(largest - shift) + tl.exp(x - shift)
            if SAMPLE and TEMPERED:
                shares = tl.sum(tl.exp((x - shift) / temperature), axis=0)
                tempered = tempered * tl.exp((largest - shift) / temperature) + shares
            if SMOOTHED:
                total += tl.sum(tl.where(columns < V, x, 0.0), axis=0)
            if COUNT:
                beaten = beaten | (x > at_label) | ((x == at_label) & (columns < label))
            largest = largest_now
        denominator = tl.sum(sums, axis=0)
        log_denominator = tl.log(denominator)
        lse = largest + log_denominator
        loss = (largest - at_label) + log_denominator + z_loss * lse * lse
        if SMOOTHED:
            loss += label_smoothing * (at_label - total / V)
        tl.store(losses + row, tl.where(bad, float("nan"), loss))
        if COUNT:
            tl.store(correct + row, (tl.max(beaten.to(tl.int32), axis=0) == 0) & (bad == 0))

        if GRADIENT or SAMPLE:
            factor = tl.where(bad, 0.0, 1.0)
            if HAS_COEFFICIENTS:
                factor *= tl.load(coefficients + row).to(tl.float32)
            slope = factor * (1.0 + 2.0 * z_loss * lse) / denominator
            spread = factor * label_smoothing / V
            hit = factor * (1.0 - label_smoothing)
            word = V - 1
            before = 0.0
            target = float("inf")
            if SAMPLE:
                target = _uniform(tl.load(seed), row, COUNTER)
                if TEMPERED:
                    target *= tempered
                else:
                    target *= denominator
            for start in range(0, P, BLOCK_V):
                columns = start + block
                x = _logits_at(line, bias, columns, V, P, HAS_BIAS)
                share = tl.exp(x - largest)
                if GRADIENT:
                    g = share * slope - spread - tl.where(columns == label, hit, 0.0)
                    g = tl.where(columns < V, g, 0.0).to(logits.dtype.element_ty)
                    tl.store(line + columns, g, mask=columns < P)
                if SAMPLE:
                    if TEMPERED:
                        share = tl.exp((x - largest) / temperature)
                    after = before + tl.sum(share, axis=0)
                    if (before <= target) & (target < after):
                        passed = before + tl.cumsum(share, axis=0) <= target
                        word = tl.minimum(start + tl.sum(passed.to(tl.int32), axis=0), V - 1)
                    before = after
            if SAMPLE:
                tl.store(samples + row, word)


def _tile(columns: int) -> dict[str, int]:
    """16 to 32 elements for each thread; several rows' programs on a multiprocessor."""
    block_v = min(4096, triton.next_power_of_2(columns))
    return {"BLOCK_V": block_v, "num_warps": max(1, block_v // 512)}


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
            **_tile(logits.stride(0)),
        )


def compile_signatures(columns: int, element: str, *, everything: bool) -> list[dict[str, object]]:
    """The kernel as it is compiled for rows of ``columns`` logits: with all its options, or as training runs it."""
    tile = _tile(columns)
    e, i, f = f"*{element}", "*i64", "*fp32"
    pointers = {"logits": e, "bias": e, "labels": i, "coefficients": f, "seed": i, "losses": f, "correct": "*i1"}
    numbers = dict.fromkeys(("first_row", "V", "P", "ignore_index"), "i32")
    reals = dict.fromkeys(("label_smoothing", "z_loss", "temperature"), "fp32")
    options = ("HAS_COEFFICIENTS", "SMOOTHED", "COUNT", "SAMPLE", "TEMPERED")
    return [
        {
            "kernel": _loss_kernel,
            "signature": {**pointers, "samples": i, "errors": i, **numbers, **reals},
            "num_warps": tile.pop("num_warps"),
            "constants": {
                "HAS_BIAS": True,
                **dict.fromkeys(options, everything),
                "GRADIENT": True,
                "ARGUMENT": _LABELS,
                "COUNTER": SAMPLING_COUNTER,
                **tile,
            },
        }
    ]
