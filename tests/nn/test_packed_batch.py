"""fasttfm.nn.PackedBatch: from padded to packed and back, with masks, lengths and cu_seqlens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.nn import PackedBatch
from fasttfm.ops.pack import layout_of_mask

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 0), (7, 31), (40, 512), (2500, 33)])
def test_layout_of_a_mask_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    lengths = torch.randint(0, shape[1] + 1, shape[:1], generator=torch.Generator().manual_seed(0))
    mask = torch.arange(shape[1]) < lengths[:, None]
    found = layout_of_mask((mask * 3 if dtype != torch.bool else mask).to("cuda", dtype))
    assert found is not None
    assert (found[0].tolist(), *found[1:]) == ([0, *lengths.cumsum(0).tolist()], int(lengths.sum()), True)
    if shape[1] > 1:
        mask[shape[0] // 2 : shape[0] // 2 + 1] = torch.arange(shape[1]) % 2 == 1  # padding first
        found = layout_of_mask(mask.to("cuda", dtype))
        assert found is not None
        assert (found[0].tolist(), *found[1:]) == ([0, *mask.sum(1).cumsum(0).tolist()], int(mask.sum()), shape[0] == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "mask"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_gpu_has_the_same_layout(options: dict[str, Any], mask: Tensor) -> None:
    there = {name: each.cuda() if name == "attention_mask" else each for name, each in options.items()}
    batch, expected = PackedBatch.of(IDS.cuda(), **there), PackedBatch.of(IDS, **options)
    assert (batch.tokens, batch.max_seqlen, batch.shape) == (expected.tokens, expected.max_seqlen, expected.shape)
    assert batch.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
    assert torch.equal(batch.pack(IDS.cuda()).cpu(), IDS[mask.bool()])
