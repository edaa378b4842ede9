"""fasttfm.nn.Embeddings against torch's tables and LayerNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm
from fasttfm.testing.modules import check_modules

V, C, POSITIONS, SEGMENTS = 23, 20, 9, 2


class Plain(nn.Module):
    def __init__(self, source: fasttfm.nn.Embeddings, options: dict[str, Any]) -> None:
        super().__init__()
        self.word = nn.Embedding(V, C, padding_idx=options.get("padding_idx"))
        self.position = nn.Embedding(POSITIONS, C) if options.get("positions") else None
        self.segment = nn.Embedding(SEGMENTS, C) if options.get("segments") else None
        self.norm = nn.LayerNorm(C, eps=1e-12) if options.get("norm", True) else None
        self.load_state_dict(source.state_dict())

    def forward(self, ids: Tensor, position_ids: Tensor, segment_ids: Tensor | None) -> Tensor:
        x = self.word(ids)
        if self.position is not None:
            x = x + self.position(position_ids)
        if self.segment is not None and segment_ids is not None:
            x = x + self.segment(segment_ids)
        return x if self.norm is None else self.norm(x)


@pytest.mark.parametrize(
    "options",
    [
        {"positions": POSITIONS, "segments": SEGMENTS, "padding_idx": 0},
        {"positions": POSITIONS, "norm": False},
        {},
    ],
    ids=["bert", "gpt", "words"],
)
def test_same_numbers_as_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.Embeddings(V, C, **options, dropout=0.0)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs = Plain(ours, options)
    ids = torch.tensor([0, 3, 3, 22, 1, 0, 7])
    cu_seqlens = torch.tensor([0, 4, 7], dtype=torch.int32)
    segments = torch.tensor([0, 0, 1, 1, 0, 1, 1]) if "segments" in options else None

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            return {"y": module(ids, cu_seqlens, segment_ids=segments)}
        return {"y": module(ids, torch.tensor([0, 1, 2, 3, 0, 1, 2]), segments)}

    check_modules(ours, theirs, call, {})


def test_autocast_and_dropout() -> None:
    module = fasttfm.nn.Embeddings(V, C, dropout=0.5)
    ids = torch.randint(V, (4, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(ids)
    assert y.dtype == torch.bfloat16
    assert 0.3 < (y == 0).float().mean() < 0.7
    assert not (module.eval()(ids) == 0).any()
