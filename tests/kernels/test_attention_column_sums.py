"""The column sums of dqkv in attention's backward from one qkv tensor, by the kernel or by a separate reduction."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.attention.problem import AttentionProblem, window_bounds
from fasttfm.nn import PackedLayer
from fasttfm.ops import attention_native
from fasttfm.ops.attention import backward_op, forward_op, qkv_backward_op
from fasttfm.ops.layers import transformer_block
from fasttfm.testing.harness import same_bits

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)

# Lengths of packed sequences, or (batch, tokens) and optionally the lengths of dense ones.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"dense": (5, 512)},
    "dense, odd": {"dense": (3, 333)},
    "lengths": {"dense": (5, 330), "lengths": (5, 0, 37, 330, 192)},
    "packed": {"packed": (5, 0, 37, 130, 512, 64, 1, 300)},
    "packed, one key tile": {"packed": (100, 128, 0, 127)},
    "1024": {"dense": (2, 1024)},
    "2000": {"dense": (1, 2000)},
    "long lengths": {"dense": (3, 1100), "lengths": (1100, 0, 70)},
    "long packed": {"packed": (700, 64, 0, 1500, 3)},
}
HEADS = 3


class Call:
    """The backward of one call on random inputs; tokens that belong to no sequence are NaN."""

    def __init__(
        self,
        layout: str,
        *,
        causal: bool = False,
        p: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        backend: str | None = "cuda",
        head_dim: int = 64,
    ) -> None:
        torch.manual_seed(1)
        case = LAYOUTS[layout]
        self.packed = "packed" in case
        problem = AttentionProblem(scale=head_dim**-0.5, window_right=window_bounds(causal, None)[1], p=p)
        if self.packed:
            leading, longest = (sum(case["packed"]),), max(case["packed"])
            bounds = torch.tensor([0, *itertools.accumulate(case["packed"])], dtype=torch.int32, device=device)
            problem = problem._replace(cu_seqlens=bounds)
        else:
            leading, longest = case["dense"], case["dense"][1]
        self.qkv = torch.randn(*leading, 3, HEADS, head_dim, device=device).to(dtype)
        self.dout = torch.randn(*leading, HEADS, head_dim, device=device).to(dtype)
        if "lengths" in case:
            lengths = torch.tensor(case["lengths"], dtype=torch.int32, device=device)
            problem = problem._replace(lengths=lengths)
            absent = torch.arange(longest, device=device) >= lengths[:, None]
            self.qkv[absent] = self.dout[absent] = torch.nan
        seed = torch.tensor([7], device=device) if p else None
        self.options = (*problem._replace(seed=seed, max_seqlen=longest, max_seqlen_k=longest), backend)
        self.saved = forward_op(self.qkv, None, None, *self.options)

    def with_sums(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dqkv, sums = qkv_backward_op(self.dout, self.qkv, *self.saved, dtype, *self.options)
        return dqkv, sums

    def alone(self) -> Tensor:
        dqkv: Tensor = backward_op(self.dout, self.qkv, None, None, *self.saved, *self.options)[0]
        return dqkv


def bound_of(dqkv: Tensor, sums: Tensor) -> Tensor:
    """A bound of the distance of ``sums`` from the exact sums of the rounded ``dqkv``.

    The sums may be those of the unrounded gradients. The error of a rounding is at most eps / 2 of its number, and
    these errors are independent: by Hoeffding's inequality their sum exceeds 8 times the root of the sum of their
    squared limits once in 10^13 cases. A term goes through fewer than 256 fp32 additions, and the sum is rounded once.
    """
    rows = dqkv.double().reshape(-1, sums.numel())
    information = torch.finfo(dqkv.dtype)
    limits = rows.abs().clamp(min=information.tiny) * (information.eps / 2)
    roundings = 8 * limits.square().sum(0).sqrt()
    additions = 256 * torch.finfo(torch.float32).eps / 2 * rows.abs().sum(0)
    return roundings + additions + rows.sum(0).abs() * torch.finfo(sums.dtype).eps


def check_sums(dqkv: Tensor, sums: Tensor) -> None:
    exact = dqkv.double().reshape(-1, sums.numel()).sum(0)
    excess = (sums.double() - exact).abs() / bound_of(dqkv, sums)
    assert excess.max() <= 1, [part.max().item() for part in excess.chunk(3)]


# ---- by a separate reduction -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["lengths", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_on_the_cpu(layout: str, dtype: torch.dtype) -> None:
    call = Call(layout, dtype=dtype, device="cpu", backend=None, head_dim=16)
    dqkv, sums = call.with_sums(torch.float32)
    assert sums.shape == (3 * HEADS * 16,)
    assert sums.dtype == torch.float32
    assert same_bits(dqkv, call.alone())
    check_sums(dqkv, sums)


def test_a_missing_row_is_detected() -> None:
    dqkv, sums = Call("packed", dtype=torch.bfloat16, device="cpu", backend=None, head_dim=16).with_sums(torch.float32)
    row = dqkv.flatten(1)[600].float()
    with pytest.raises(AssertionError):
        check_sums(dqkv, sums - row)


@pytest.mark.parametrize(
    ("head_dim", "tokens", "sequences", "expected"),
    [(64, 32768, 64, True), (64, 32768, 512, True), (64, 32768, 513, False), (128, 32768, 64, False)],
)
def test_when_the_kernel_computes_column_sums(head_dim: int, tokens: int, sequences: int, expected: bool) -> None:
    bounds = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    problem = AttentionProblem(cu_seqlens=bounds, max_seqlen=512, max_seqlen_k=512)
    q = torch.empty(tokens, 16, head_dim, device="meta")
    assert attention_native.sums_columns(q, problem) is expected
    dense = torch.empty(sequences, tokens // sequences, 16, head_dim, device="meta")
    assert attention_native.sums_columns(dense, problem._replace(cu_seqlens=None)) is expected


def test_the_packed_layer_requests_column_sums_for_a_trained_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*arguments: Any) -> tuple[Tensor, Tensor]:
        asked.append(arguments[4])
        dqkv, sums = qkv_backward_op.implementation(*arguments)
        return dqkv, sums

    monkeypatch.setattr(transformer_block, "bypass_dispatcher", lambda _, *ops: [
        spy if op is qkv_backward_op else op.implementation for op in ops
    ])  # fmt: skip
    layer = PackedLayer(32, 4, 64)  # a head dim that the native layer does not support
    for learns in (True, False):
        layer.qkv.bias.requires_grad_(learns)
        y, _ = layer(torch.randn(12, 32), torch.tensor([0, 5, 12], dtype=torch.int32), 7)
        y.square().sum().backward()
    assert asked == [torch.float32]


# ---- Hopper's kernel -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_of_the_same_gradients(layout: str, p: float, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_native, "sums_columns", lambda *_: True)
    call = Call(layout, causal=causal, p=p)
    dqkv, sums = call.with_sums(torch.float32)
    assert same_bits(dqkv, call.alone())
    check_sums(dqkv, sums)
    for _ in range(20):
        again, sums_again = call.with_sums(torch.float32)
        assert same_bits(again, dqkv)
        assert same_bits(sums_again, sums)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sums_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_types(dtype: torch.dtype, sums_dtype: torch.dtype, head_dim: int) -> None:
    dqkv, sums = Call("dense", dtype=dtype, p=0.1, head_dim=head_dim).with_sums(sums_dtype)
    assert sums.dtype == sums_dtype
    check_sums(dqkv, sums)


@pytest.mark.gpu
@on_hopper
def test_no_tokens() -> None:
    options = (torch.tensor([0, 0], dtype=torch.int32, device="cuda"), *[None] * 6, 0, 0, -1, -1, 0.125, 0.0, "cuda")
    qkv = torch.empty(0, 3, HEADS, 64, dtype=torch.bfloat16, device="cuda")
    out, lse = forward_op(qkv, None, None, *options)
    _, sums = qkv_backward_op(out, qkv, out, lse, torch.float32, *options)
    assert torch.equal(sums, torch.zeros(3 * HEADS * 64, device="cuda"))
