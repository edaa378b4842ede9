"""fasttfm.nn.PackedBatch: from padded to packed and back, with masks, lengths and cu_seqlens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.nn import PackedBatch

B, S = 3, 6
IDS = torch.arange(B * S).view(B, S)
RIGHT_PADDED = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
ANYWHERE = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0]])

LAYOUTS: dict[str, tuple[dict[str, Any], Tensor]] = {
    "all": ({}, torch.ones(B, S)),
    "full mask": ({"attention_mask": torch.ones(B, S)}, torch.ones(B, S)),
    "mask": ({"attention_mask": RIGHT_PADDED}, RIGHT_PADDED),
    "boolean mask": ({"attention_mask": RIGHT_PADDED.bool()}, RIGHT_PADDED),
    "gaps": ({"attention_mask": ANYWHERE}, ANYWHERE),
    "lengths": ({"lengths": [4, 1, 6]}, RIGHT_PADDED),
    "lengths tensor": ({"lengths": torch.tensor([4, 1, 6])}, RIGHT_PADDED),
}


@pytest.mark.parametrize(("options", "mask"), LAYOUTS.values(), ids=LAYOUTS)
def test_round_trip(options: dict[str, Any], mask: Tensor) -> None:
    batch = PackedBatch.of(IDS, **options)
    there = mask.bool()
    assert batch.tokens == int(there.sum())
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.diff().tolist() == there.sum(1).tolist()
    assert batch.max_seqlen >= int(there.sum(1).max())
    packed = batch.pack(IDS)
    assert torch.equal(packed, IDS[there])
    assert torch.equal(batch.unpack(packed), IDS * there)
    states = torch.randn(batch.tokens, 4, requires_grad=True)
    padded = batch.unpack(states)
    assert torch.equal(padded[there], states)
    assert not padded[~there].any()
    assert torch.equal(torch.autograd.grad(padded.square().sum(), states)[0], 2 * states)
    firsts = [int(row[keep][0]) for row, keep in zip(IDS, there, strict=True)]
    assert batch.first_tokens(packed).tolist() == firsts
    columns = batch.columns()
    expected = torch.arange(S).expand(B, S)[there]
    own = torch.cat([torch.arange(int(length)) for length in there.sum(1)])
    assert torch.equal(own if columns is None else columns, expected)


def test_packed_stays_packed() -> None:
    ids, cu_seqlens = torch.arange(5), torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    batch = PackedBatch.of(ids, cu_seqlens=cu_seqlens, max_seqlen=3)
    assert (batch.tokens, batch.max_seqlen) == (5, 3)
    assert batch.pack(ids) is ids
    assert batch.unpack(ids) is ids


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS[0], {}, r"input_ids: expected shape \[B, S\] without cu_seqlens"),
        (IDS, {"cu_seqlens": torch.tensor([0, 18], dtype=torch.int32)}, r"input_ids: expected shape \[T\]"),
        (IDS, {"max_seqlen": 3}, "max_seqlen: expected None without cu_seqlens, got 3"),
        (IDS, {"lengths": [1, 2]}, r"lengths: expected 3 numbers in \[0, 6\], got \[1, 2\]"),
        (IDS, {"lengths": [1, 2, 7]}, r"lengths: expected 3 numbers in \[0, 6\]"),
        (
            IDS,
            {"lengths": [1, 2, 3], "attention_mask": RIGHT_PADDED},
            "attention_mask: expected None together with lengths",
        ),
        (IDS, {"attention_mask": RIGHT_PADDED[:2]}, r"attention_mask: expected shape \(3, 6\), got shape \(2, 6\)"),
    ],
)
def test_contradictory_arguments_are_reported(ids: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"PackedBatch: {message}"):
        PackedBatch.of(ids, **options)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 2], [2, 0]])
def test_sequences_without_tokens_do_not_raise(lengths: list[int]) -> None:
    batch = PackedBatch.of(IDS[:2], lengths=lengths)
    x = torch.arange(1.0, 1 + batch.tokens)[:, None]
    there = torch.tensor(lengths) > 0
    last = batch.last_tokens(x)
    chosen = batch.last_tokens(x, torch.arange(batch.tokens) == 0)
    for found, expected in ((batch.first_tokens(x), 1.0), (last, 2.0), (chosen, 1.0)):
        assert found.shape == (2, 1)
        assert found[there].flatten().tolist() == [expected] * int(there.sum())
        assert bool(there.any()) or not found.any()
