"""dropout_add_layer_norm with a cast: the same bits as the op and a cast after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.ops import fp8
from fasttfm.ops.dropout_add_layer_norm import forward_op
from fasttfm.ops.fp8 import Scales, Slot
from fasttfm.ops.fp8_norm import NormArguments, add_norm_cast, refuse

SHAPES = [(1, 16), (33, 64), (100, 272), (37, 768), (2049, 1024)]


def slot_of(device: str) -> Slot:
    (slot,) = Scales([fp8.E4M3], 2, torch.device(device)).slots
    slot.scales.amax.fill_(3.0)  # larger values saturate
    slot.scales.update()
    return slot


def inputs(shape: tuple[int, int], device: str, dtype: torch.dtype, p: float) -> tuple[Tensor, Tensor, NormArguments]:
    torch.manual_seed(0)
    rows, columns = shape
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight, bias, linear_bias = (torch.randn(columns, device=device) for _ in range(3))
    dropout = (None, None, 0.0)
    if p:
        ends = torch.tensor([0, rows // 3, rows // 3, rows], dtype=torch.int32, device=device)
        dropout = (ends, philox.draw_seed(x.device), p)
    return x, residual, NormArguments(weight, bias, linear_bias, *dropout, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("with_columns", [True, False], ids=["columns", "rows"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["fp32 parameters", "bf16 parameters", "fp32 residual", "no z"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_has_the_bits_of_a_cast(shape: tuple[int, int], kind: str, p: float, with_columns: bool) -> None:
    x, residual, norm = inputs(shape, "cuda", torch.bfloat16, p)
    if kind == "bf16 parameters":
        own = (None if each is None else each.bfloat16() for each in norm[:3])
        norm = NormArguments(*own, *norm[3:])  # type: ignore[arg-type]
    if kind == "fp32 residual":
        residual = residual.float()
    want_z = kind != "no z"
    slot, other = slot_of("cuda"), slot_of("cuda")
    assert refuse(x, residual, slot, None) is None
    y, z, statistics, y8 = add_norm_cast(x, residual, norm, slot, None, want_z=want_z, with_columns=with_columns)
    expected = forward_op(x, residual, *norm, want_z, "cuda")
    for found, known in zip((y, z, statistics), expected, strict=True):
        assert torch.equal(found, known)
    cast = fp8.cast(expected[0], other, with_columns=with_columns)
    assert torch.equal(y8.rows.view(torch.uint8), cast.rows.view(torch.uint8))
    assert torch.equal(y8.columns.view(torch.uint8), cast.columns.view(torch.uint8))
    assert slot.amax.item() == other.amax.item() > 0


@pytest.mark.gpu
def test_nan_and_infinity_reach_the_casts() -> None:
    x, residual, norm = inputs((40, 64), "cuda", torch.bfloat16, 0.0)
    x[3, 5] = float("nan")
    slot = slot_of("cuda")
    y8 = add_norm_cast(x, residual, norm, slot, None).y8
    assert y8.rows[3].float().isnan().all()
    assert y8.columns[:, 3].float().isnan().all()
    assert slot.amax.isfinite()


@pytest.mark.parametrize("with_columns", [True, False], ids=["columns", "rows"])
def test_without_the_kernel(with_columns: bool) -> None:
    x, residual, norm = inputs((37, 48), "cpu", torch.float32, 0.2)
    slot = slot_of("cpu")
    assert refuse(x, residual, slot, None) is not None
    y, z, statistics, y8 = add_norm_cast(x, residual, norm, slot, None, with_columns=with_columns)
    for found, known in zip((y, z, statistics), forward_op(x, residual, *norm, True, None), strict=True):
        assert torch.equal(found, known)
    assert torch.equal(y8.rows.float(), fp8.cast(y, slot).rows.float())
    assert y8.columns.shape == ((48, 48) if with_columns else (0,))


@pytest.mark.gpu
def test_what_the_kernel_refuses() -> None:
    slot = slot_of("cuda")
    x = torch.randn(8, 1040, device="cuda", dtype=torch.bfloat16)
    assert "up to 1024 columns, got 1040" in str(refuse(x, x, slot, None))
    assert "a multiple of 16 columns, got 520" in str(refuse(x[:, :520], x[:, :520], slot, None))
    assert "bfloat16" in str(refuse(x[:, :64].half(), x[:, :64].half(), slot, None))
    assert "another backend" in str(refuse(x[:, :64], x[:, :64], slot, "triton"))
    assert refuse(x[:, :64], x[:, :64], slot, "cuda") is None
