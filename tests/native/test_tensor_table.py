"""Addresses of many tensors in one call, and whether all periods of the table have the same types and shapes."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor, nn

from fasttfm import _native

MIXED, UNREAD = -1, -2
A, B = torch.zeros(2, 3), torch.zeros(4)


def table(tensors: list[Tensor | None], period: int) -> tuple[int, list[int]]:
    addresses = array("q", bytes(8 * len(tensors)))
    return _native.core().tensor_table(tensors, addresses.buffer_info()[0], period), addresses.tolist()


def readable() -> bool:
    """From version 2.10 on torch has the DLPack C exchange API."""
    return hasattr(Tensor, "__dlpack_c_exchange_api__")


@pytest.mark.skipif(not readable(), reason="requires the DLPack C exchange API of torch 2.10")
@pytest.mark.parametrize(
    ("tensors", "period", "code"),
    [
        ([A, B, None, A, B, None], 3, _native.DTYPE_CODES[torch.float32]),
        ([nn.Parameter(A.bfloat16())], 1, _native.DTYPE_CODES[torch.bfloat16]),
        ([A, B, B, A], 2, MIXED),
        ([A, B.bfloat16()], 2, MIXED),
        ([A, None, A, B], 2, MIXED),
        ([torch.zeros(3, 2).t()], 1, MIXED),
        ([None], 1, MIXED),
        ([torch.empty(0)], 1, UNREAD),
        ([torch.zeros(2, device="meta")], 1, UNREAD),
        ([A.to_sparse()], 1, UNREAD),
    ],
)
def test_tables_of_tensors(tensors: list[Tensor | None], period: int, code: int) -> None:
    found, addresses = table(tensors, period)
    assert found == code
    if code != UNREAD:
        assert addresses == [0 if each is None else each.data_ptr() for each in tensors]
