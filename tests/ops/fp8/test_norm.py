"""dropout_add_layer_norm with casts, forward and backward: the same bits as the op and a cast after it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.fp8 import reference
from fasttfm.ops import fp8
from fasttfm.ops.dropout_add_layer_norm import backward_op, forward_op
from fasttfm.ops.fp8 import Scales, Slot
from fasttfm.ops.fp8.norm import NormArguments, add_norm_backward_cast, add_norm_cast, refuse, refuse_backward

SHAPES = [(1, 16), (33, 64), (100, 272), (37, 768), (2049, 1024)]


def slot_of(device: str, dtype: torch.dtype = fp8.E4M3) -> Slot:
    (slot,) = Scales([dtype], 2, torch.device(device)).slots
    slot.scales.set_magnitudes(3.0)  # larger values saturate
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
@pytest.mark.parametrize("kind", ["fp32 parameters", "bf16 parameters", "fp32 residual", "no z", "no y"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_has_the_bits_of_a_cast(shape: tuple[int, int], kind: str, p: float, with_columns: bool) -> None:
    x, residual, norm = inputs(shape, "cuda", torch.bfloat16, p)
    if kind == "bf16 parameters":
        own = (None if each is None else each.bfloat16() for each in norm[:3])
        norm = NormArguments(*own, *norm[3:])  # type: ignore[arg-type]
    if kind == "fp32 residual":
        residual = residual.float()
    want_y, want_z = kind != "no y", kind != "no z"
    slot, other = slot_of("cuda"), slot_of("cuda")
    assert refuse(x, residual, slot, None) is None
    wanted = {"want_y": want_y, "want_z": want_z, "with_columns": with_columns}
    y, z, statistics, y8 = add_norm_cast(x, residual, norm, slot, None, **wanted)
    expected = forward_op(x, residual, *norm, want_z, "cuda")
    assert torch.equal(y, expected[0]) if want_y else y.numel() == 0
    assert torch.equal(z, expected[1])
    assert torch.equal(statistics, expected[2])
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
    unread = add_norm_cast(x, residual, norm, slot, None, want_y=False, with_columns=with_columns)
    assert torch.equal(unread.y8.rows.float(), y8.rows.float())


@pytest.mark.gpu
def test_what_the_kernel_refuses() -> None:
    slot = slot_of("cuda")
    x = torch.randn(8, 1040, device="cuda", dtype=torch.bfloat16)
    assert "up to 1024 columns, got 1040" in str(refuse(x, x, slot, None))
    assert "a multiple of 16 columns, got 520" in str(refuse(x[:, :520], x[:, :520], slot, None))
    assert "bfloat16" in str(refuse(x[:, :64].half(), x[:, :64].half(), slot, None))
    assert "another backend" in str(refuse(x[:, :64], x[:, :64], slot, "triton"))
    assert refuse(x[:, :64], x[:, :64], slot, "cuda") is None
    assert "e4m3" in str(refuse(x[:, :64], x[:, :64], slot_of("cuda", fp8.E5M2), None))


# ---- backward --------------------------------------------------------------------------------------------------------


def dropped(x: Tensor, norm: NormArguments) -> Tensor:
    """Dropout of x, in fp32."""
    if norm.seed is None:
        return x.float()
    threshold = philox.threshold(norm.p)
    positions = philox.row_positions(x.shape, norm.cu_seqlens, x.device)
    kept = philox.kept(norm.seed, *positions, x.shape[1], threshold)
    return torch.where(kept, x.float() * philox.scale(threshold), 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["post-LN", "pre-LN", "fp32 residual", "no parameters"])
@pytest.mark.parametrize("shape", [*SHAPES, (4250, 1024), (9000, 768)], ids=str)
def test_the_backward_has_the_bits_of_a_cast_after_dropout(
    shape: tuple[int, int], kind: str, p: float, dtype: torch.dtype
) -> None:
    x, residual, norm = inputs(shape, "cuda", torch.bfloat16, p)
    residual = residual.float() if kind == "fp32 residual" else residual
    _, z, statistics = forward_op(x, residual, *norm, True, "cuda")
    dy, dz = torch.randn_like(x), None if kind == "post-LN" else torch.randn_like(z)
    wanted = [kind != "no parameters"] * 3
    slot = slot_of("cuda", dtype)
    assert refuse_backward(dy, z, slot, None) is None
    found = add_norm_backward_cast((dy, dz), z, statistics, norm, wanted, slot, None)
    assert found is not None
    expected = backward_op(dy, dz, z, statistics, *norm[:-1], wanted, "cuda")
    assert torch.equal(found.dresidual, expected[0])
    dx = dropped(found.dresidual, norm)
    rows = reference.quantize(dx, slot.scale, dtype)
    assert torch.equal(found.dx8.rows.view(torch.uint8), rows.view(torch.uint8))
    assert torch.equal(found.dx8.columns.view(torch.uint8), reference.transposed(rows).view(torch.uint8))
    assert slot.amax == dx.abs().max()
    if kind == "no parameters":
        assert not any(each.numel() for each in found[2:])
        return
    for own, known in zip(found[2:4], expected[2:4], strict=True):  # sums in another order
        torch.testing.assert_close(own, known, rtol=1e-5, atol=1e-6 * shape[0])
    torch.testing.assert_close(found.dlinear_bias.double(), dx.double().sum(0), rtol=1e-5, atol=1e-6 * shape[0])


@pytest.mark.gpu
def test_nan_and_infinity_reach_the_casts_of_the_backward() -> None:
    x, residual, norm = inputs((40, 64), "cuda", torch.bfloat16, 0.0)
    _, z, statistics = forward_op(x, residual, *norm, True, "cuda")
    dz = torch.zeros_like(z)
    dz[3, 5], dz[4, 6] = float("nan"), float("inf")
    slot = slot_of("cuda", fp8.E5M2)
    found = add_norm_backward_cast((torch.ones_like(x), dz), z, statistics, norm, [True] * 3, slot, None)
    assert found is not None
    assert found.dx8.rows.float().isnan().nonzero().tolist() == [[3, 5], [4, 6]]
    assert found.dx8.columns.float().isnan().nonzero().tolist() == [[5, 3], [6, 4]]
    assert slot.amax.isinf()


@pytest.mark.gpu
def test_more_columns_are_cast_by_another_kernel() -> None:
    x, residual, norm = inputs((70, 1040), "cuda", torch.bfloat16, 0.3)
    _, z, statistics = forward_op(x, residual, *norm, True, "cuda")
    slot = slot_of("cuda", fp8.E5M2)
    assert refuse_backward(x, z, slot, None) is not None
    found = add_norm_backward_cast((torch.randn_like(x), None), z, statistics, norm, [True] * 3, slot, None)
    assert found is not None
    rows = reference.quantize(dropped(found.dresidual, norm), slot.scale, fp8.E5M2)
    assert torch.equal(found.dx8.rows.view(torch.uint8), rows.view(torch.uint8))


def test_without_the_backwards_kernel() -> None:
    x, residual, norm = inputs((37, 48), "cpu", torch.float32, 0.2)
    _, z, statistics = forward_op(x, residual, *norm, True, None)
    assert add_norm_backward_cast((x, None), z, statistics, norm, [True] * 3, slot_of("cpu"), None) is None
