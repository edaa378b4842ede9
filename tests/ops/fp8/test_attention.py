"""Attention's backward with a cast to FP8: the gradients in fp32, rounded once, with their column sums."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.attention import reference as attention_reference
from fasttfm.kernels.attention.problem import AttentionProblem, window_bounds
from fasttfm.kernels.common import philox
from fasttfm.kernels.fp8 import reference
from fasttfm.ops import attention_native, fp8
from fasttfm.ops.attention import forward_op, qkv_backward_op
from fasttfm.ops.fp8 import Scales, Slot
from fasttfm.ops.fp8.attention import backward_cast, refuse
from fasttfm.testing.harness import same_bits

HEADS = 3
# Lengths of sequences, and the number of tokens after the last one.
LAYOUTS: dict[str, tuple[tuple[int, ...], int]] = {
    "aligned": ((512, 512, 16, 0, 256, 48), 0),
    "not aligned": ((5, 0, 37, 130, 512, 64, 1, 300), 0),
    "last not aligned": ((128, 512, 37), 0),
    "tokens after": ((128, 512, 48), 32),
    "odd tokens after": ((128, 512, 48), 5),
    "one key tile": ((100, 128, 0, 127), 0),
    "long": ((1024, 1024), 0),
    "long, not aligned": ((700, 64, 0, 1500, 3), 9),
}
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)


def slot_of(device: str, dtype: torch.dtype = fp8.E5M2, amax: float = 1.0) -> Slot:
    (slot,) = Scales([dtype], 2, torch.device(device)).slots
    slot.scales.set_magnitudes(amax)
    return slot


class Call:
    """The backward of one call on random inputs; tokens after the last sequence are NaN."""

    def __init__(self, layout: str, *, causal: bool = False, p: float = 0.0) -> None:
        torch.manual_seed(1)
        lengths, after = LAYOUTS[layout]
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
        self.tokens, longest = sum(lengths) + after, max(lengths)
        self.qkv = torch.randn(self.tokens, 3, HEADS, 64, device="cuda").bfloat16()
        self.dout = torch.randn(self.tokens, HEADS, 64, device="cuda").bfloat16()
        if after:
            self.qkv[-after:] = self.dout[-after:] = torch.nan
        problem = AttentionProblem(cu_seqlens=bounds, scale=0.125, window_right=window_bounds(causal, None)[1], p=p)
        seed = philox.draw_seed(self.qkv.device) if p else None
        self.problem = problem._replace(seed=seed, max_seqlen=longest, max_seqlen_k=longest)
        self.options = (*self.problem, "cuda")
        self.saved = forward_op(self.qkv, None, None, *self.options)

    def cast(self, slot: Slot, sums_dtype: torch.dtype | None = torch.float32) -> tuple[Tensor, Tensor, Any]:
        found = backward_cast(self.dout, self.qkv, self.saved, self.options, slot, sums_dtype)
        assert found is not None
        (rows, columns, _), sums = found
        return rows, columns, sums

    def rounded(self) -> tuple[Tensor, Tensor]:
        """The gradient in bf16 and its column sums."""
        dqkv, sums = qkv_backward_op(self.dout, self.qkv, *self.saved, torch.float32, *self.options)
        return dqkv.flatten(1), sums

    def exact(self) -> Tensor:
        """The gradient by the reference in float64, of the tokens that belong to sequences."""
        used = int(self.problem.cu_seqlens[-1])
        qkv = self.qkv[:used].double().requires_grad_()
        out, _ = attention_reference.attention_forward(*qkv.unbind(1), self.problem)
        (dqkv,) = torch.autograd.grad(out, qkv, self.dout[:used].double())
        result: Tensor = dqkv.flatten(1)
        return result


def numbers(x: Tensor, slot: Slot) -> Tensor:
    return x.double() * slot.inverse.double()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [fp8.E5M2, fp8.E4M3], ids=["e5m2", "e4m3"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_rounds_the_gradient(
    layout: str, p: float, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cast of the bf16 gradient, but for values that two roundings move to another number: at most one step away,
    and no further from the exact value than half a step of FP8 plus that of bf16."""
    monkeypatch.setattr(attention_native, "sums_columns", lambda *_: True)
    call = Call(layout, causal=causal, p=p)
    slot, other = slot_of("cuda", dtype), slot_of("cuda", dtype)
    rows, columns, sums = call.cast(slot)
    narrow, expected_sums = call.rounded()
    expected = fp8.cast(narrow, other)
    assert same_bits(columns, reference.transposed(rows))
    assert same_bits(sums, expected_sums)
    steps = (bits(rows).int() - bits(expected.rows).int()).abs()
    assert steps.max() <= 1
    # Of 2^4 adjacent bf16 numbers, one is in the middle of two numbers of e4m3; about half of these round differently.
    assert (steps > 0).double().mean() < 2.0**-4
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * unit * slot.inverse.double()
    error = (numbers(rows, slot) - narrow.double()).abs()
    saturated = numbers(rows, slot).abs() == torch.finfo(dtype).max * slot.inverse.double()
    limit = narrow.double().abs() * (unit + 2.0**-8) + smallest
    assert ((error <= limit) | saturated).all()
    assert (slot.amax.double() - other.amax.double()).abs() <= other.amax.double() * 2.0**-8
    for _ in range(5):
        again = call.cast(slot_of("cuda", dtype))
        assert all(same_bits(a, b) for a, b in zip(again, (rows, columns, sums), strict=True))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["aligned", "not aligned", "long"])
def test_the_kernel_is_as_accurate_as_a_cast(layout: str, causal: bool) -> None:
    call = Call(layout, causal=causal)
    slot = slot_of("cuda", fp8.E4M3, amax=8.0)
    rows, _, _ = call.cast(slot)
    exact = call.exact()
    twice = fp8.cast(call.rounded()[0], slot_of("cuda", fp8.E4M3, amax=8.0)).rows
    own, naive = ((numbers(each[: len(exact)], slot) - exact).square().mean().sqrt() for each in (rows, twice))
    assert own <= naive * 1.001


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [fp8.E5M2, fp8.E4M3], ids=["e5m2", "e4m3"])
def test_specials(dtype: torch.dtype) -> None:
    """Saturation, zeros and NaN, in sequences of one key each: there dv is dout, and dq and dk are 0."""
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    tokens = 32
    qkv = torch.zeros(tokens, 3, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    dout = values.bfloat16().cuda().repeat(tokens * HEADS * 64 // len(values) + 1)[: tokens * HEADS * 64]
    dout = dout.view(tokens, HEADS, 64).contiguous()
    dout[16:] = dout[16:].nan_to_num(0.0, 0.0, 0.0)
    bounds = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
    problem = AttentionProblem(cu_seqlens=bounds, scale=0.125, max_seqlen=1, max_seqlen_k=1)
    options = (*problem, "cuda")
    saved = forward_op(qkv, None, None, *options)
    slot, other = slot_of("cuda", dtype), slot_of("cuda", dtype)
    found = backward_cast(dout, qkv, saved, options, slot, None)
    assert found is not None
    dqkv = qkv_backward_op(dout, qkv, *saved, torch.float32, *options)[0].flatten(1)
    expected = fp8.cast(dqkv, other)
    rows, columns = (each.float().nan_to_num(12345.0) for each in found[0][:2])
    assert same_bits(rows, expected.rows.float().nan_to_num(12345.0))
    assert same_bits(columns, expected.columns.float().nan_to_num(12345.0))
    assert same_bits(slot.amax, other.amax)


@pytest.mark.gpu
@on_hopper
def test_what_the_kernel_refuses() -> None:
    call = Call("aligned")
    slot = slot_of("cuda")
    assert refuse(call.qkv, call.problem, slot, "cuda") is None
    assert "window" in str(refuse(call.qkv, call.problem._replace(window_left=5), slot, None))
    assert "window" in str(refuse(call.qkv, call.problem._replace(cu_seqlens=None), slot, None))
    assert "bfloat16" in str(refuse(call.qkv.half(), call.problem, slot, None))
    assert "head dim" in str(refuse(call.qkv[..., :32].contiguous(), call.problem, slot, None))
    assert "triton" in str(refuse(call.qkv, call.problem, slot, "triton"))
    assert "scale" in str(refuse(call.qkv, call.problem, Scales([fp8.E5M2], 2, call.qkv.device).slots[0], None))


def test_the_cpu_casts_in_a_pass_of_its_own() -> None:
    qkv = torch.randn(4, 3, 1, 64)
    problem = AttentionProblem(cu_seqlens=torch.tensor([0, 4], dtype=torch.int32), max_seqlen=4, max_seqlen_k=4)
    empty = torch.empty(0)
    found = backward_cast(qkv[:, 0], qkv, (empty, empty), (*problem, None), slot_of("cpu"), None)
    assert found is None
