"""Shared by the ops with linear layers: casts by one launch, and GEMMs that keep the types of their operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm.ops import linear


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns)).to(dtype)


def test_tensors_are_cast_together_unless_they_have_the_type() -> None:
    weight, bias, narrow = matrix(3, 5), matrix(1, 5)[0], matrix(2, 2, torch.bfloat16)
    given = [weight, None, narrow, torch.nn.Parameter(bias)]
    with torch.no_grad(), torch.profiler.profile() as profile:
        found = linear.in_type(given, torch.bfloat16)
    assert torch.equal(found[0], weight.bfloat16())
    assert found[1] is None
    assert found[2] is narrow
    assert torch.equal(found[3], bias.bfloat16())
    outermost = [event.name for event in profile.events() if event.cpu_parent is None]
    assert outermost.count("aten::_foreach_copy_") == 1
    assert "aten::to" not in outermost
    assert linear.in_type([narrow], torch.bfloat16) == [narrow]


def test_a_dispatch_mode_sees_every_cast() -> None:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    given = [matrix(3, 5), matrix(2, 2)]
    with Mode():
        found = linear.in_type(given, torch.float16)
    assert [cast.dtype for cast in found] == [torch.float16, torch.float16]
    assert seen == ["aten._to_copy.default"] * 2


@pytest.mark.parametrize("shape", [None, (2, 2, 3)], ids=["matrix", "shaped"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_autocast_does_not_change_the_types_of_products(shape: tuple[int, ...] | None, biased: bool) -> None:
    a, b, bias = matrix(4, 8), matrix(8, 3), matrix(1, 3)[0] if biased else None
    expected = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(a, b).dtype == torch.bfloat16  # the effect of autocast
        found = linear.matmul(a, b, bias, shape=shape)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.view(found.shape))
    assert found._base is None  # no view: autograd lets users change it in place


def test_products_in_autocasts_own_type() -> None:
    a, b = matrix(4, 8, torch.bfloat16), matrix(8, 3, torch.bfloat16)
    outside = linear.matmul(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear.matmul(a, b)
    assert inside.dtype == torch.bfloat16
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("rows", [2, 17, 40])
@pytest.mark.parametrize("columns", [3, 15, 16, 42, 80, 96])
def test_gemms_read_nothing_past_a_row(rows: int, columns: int) -> None:
    """torch's bf16 GEMM on CPUs with AMX does, unless the number of columns is a multiple of 32."""
    wide = torch.full((rows, columns + 3), torch.nan, dtype=torch.bfloat16)
    wide[:, :columns] = matrix(rows, columns)
    weight, total = matrix(columns, 45, torch.bfloat16), torch.zeros(rows, 45, dtype=torch.bfloat16)
    a = wide[:, :columns]
    expected = (a.double() @ weight.double()).bfloat16()
    for found in (linear.matmul(a, weight), linear.matmul(a, weight, shape=total.shape)):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(linear.add_matmul(total, a, weight), expected)
    contiguous = a.contiguous()
    contiguous[1] = torch.nan  # no other row has it
    found = linear.matmul(contiguous, weight)
    assert found[1].isnan().all()
    assert not found[torch.arange(rows) != 1].isnan().any()
