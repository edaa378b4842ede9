"""Linear layers with packed weights on a CPU: in fp32, or inputs and weights rounded to bf16; sums are in fp32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fasttfm import _native, ops
from fasttfm.ops.packed_linear import pack_weight, packed_linear, supported_products

pytestmark = pytest.mark.skipif(_native.missing() is not None, reason=str(_native.missing()))
SHAPES = [(1, 1, 1), (3, 64, 32), (33, 100, 70), (70, 384, 48), (130, 65, 257)]


def inputs(rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inner)
    x = torch.randn(rows, inner, generator=generator)
    return x, torch.randn(columns, inner, generator=generator), torch.randn(columns, generator=generator)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula(shape: tuple[int, int, int]) -> None:
    x, weight, bias = inputs(*shape)
    packed = pack_weight(weight, bias)
    left, right = x.bfloat16().double(), weight.bfloat16().double()
    expected = left @ right.T + bias
    # Each addition of up to K terms, and the bias, rounds once; the instructions of AVX512-BF16 and AMX round to odd in
    # between and flush denormals.
    bound = 2 * (shape[1] + 1) * torch.finfo(torch.float32).eps * (left.abs() @ right.abs().T + bias.abs())
    for name in supported_products():
        y = packed_linear(x, packed, products=name)
        assert bool(((y - expected).abs() <= bound).all()), name
        for activation in ("gelu", "gelu_tanh", "relu", "silu"):
            applied = ops.bias_gelu(y, activation=activation, backend="cpu")
            assert torch.equal(packed_linear(x, packed, activation=activation, products=name), applied), activation
    assert torch.equal(packed_linear(x.view(1, *x.shape), packed)[0], packed_linear(x, packed))


@pytest.mark.parametrize("shape", [*SHAPES, (300, 384, 96), (16, 1536, 33), (129, 260, 64)], ids=str)
def test_the_formula_in_fp32(shape: tuple[int, int, int]) -> None:
    """With each of the CPU's instruction sets, and with rows that are no multiple of a tile."""
    x, weight, bias = inputs(*shape)
    packed = pack_weight(weight, bias, dtype=torch.float32)
    expected = x.double() @ weight.double().T + bias
    bound = (shape[1] + 1) * torch.finfo(torch.float32).eps * (x.abs() @ weight.abs().T + bias.abs())
    core = _native.core()
    widest = core.active_isa()
    try:
        for name in core.supported_isas():
            core.set_isa(name)
            y = packed_linear(x, packed)
            assert bool(((y - expected).abs() <= bound).all()), name
            for activation in ("gelu", "gelu_tanh", "relu", "silu"):
                applied = ops.bias_gelu(y, activation=activation, backend="cpu")
                assert torch.equal(packed_linear(x, packed, activation=activation), applied), activation
    finally:
        core.set_isa(widest)


def test_inputs_are_rounded_to_nearest() -> None:
    """Ties go to even: 1 + 2**-8 to 1, and 1 + 3 * 2**-8 to 1 + 2**-6."""
    x = torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8], [1 + 2**-8 + 2**-20]])
    for name in supported_products():
        found = packed_linear(x, pack_weight(torch.ones(1, 1)), products=name)
        assert found.flatten().tolist() == [1.0, 1 + 2**-6, 1 + 2**-7], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_others(threads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(70, 160, 64)
    packed = pack_weight(weight, bias, dtype=dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together = packed_linear(x, packed)
    for row in (0, 31, 69):
        assert torch.equal(packed_linear(x[row : row + 1], packed)[0], together[row])


def test_values_that_are_not_finite_affect_only_their_rows() -> None:
    """A K that is no multiple of 32: what is padded must not be multiplied by them."""
    x, weight, bias = inputs(5, 70, 33)
    for name in (*supported_products(), "fp32"):
        packed = pack_weight(weight, bias, dtype=torch.float32 if name == "fp32" else torch.bfloat16)
        expected = packed_linear(x, packed, products=name)
        wrong = x.clone()
        wrong[1, 69], wrong[3, 0] = math.nan, math.inf
        found = packed_linear(wrong, packed, products=name)
        assert found[1].isnan().all(), name
        assert not found[3].isfinite().any(), name
        assert torch.equal(found[[0, 2, 4]], expected[[0, 2, 4]]), name


def test_wrong_inputs_are_refused() -> None:
    packed = pack_weight(torch.ones(4, 8))
    assert packed_linear(torch.ones(0, 8), packed).shape == (0, 4)
    for given, message in (
        (torch.ones(2, 9), r"x: expected float32 \[\.\.\., 8\] on the CPU, got float32 \(2, 9\)"),
        (torch.ones(2, 8, dtype=torch.float64), "got float64"),
        (torch.tensor(1.0), r"x: expected float32 \[..., 8\] on the CPU, got float32 \(\) on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            packed_linear(given, packed)
    with pytest.raises(ValueError, match=r"activation: expected None or one of gelu, .*, got 'softmax'"):
        packed_linear(torch.ones(2, 8), packed, activation="softmax")
    with pytest.raises(ValueError, match=r"products: expected None or one of generic, avx512, amx, .*, got 'sve'"):
        packed_linear(torch.ones(2, 8), packed, products="sve")
    with pytest.raises(ValueError, match=r"products: expected one that this CPU has for bfloat16: .*, got 'fp32'"):
        packed_linear(torch.ones(2, 8), packed, products="fp32")
    with pytest.raises(ValueError, match=r"dtype: expected torch.float32 or torch.bfloat16, got torch.float16"):
        pack_weight(torch.ones(4, 8), dtype=torch.float16)
    for weight, bias, message in (
        (torch.ones(4, 8), torch.ones(3), r"bias: expected shape \(4,\), got shape \(3,\)"),
        (torch.ones(4), None, r"weight: expected shape \(N, K\), both from 1 on, got shape \(4,\)"),
        (torch.ones(4, 0), None, r"weight: expected shape \(N, K\), both from 1 on, got shape \(4, 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_weight(weight, bias)
