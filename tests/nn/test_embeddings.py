"""fasttfm.nn.Embeddings against torch's tables and LayerNorm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm
from fasttfm.testing.alterations import HOOKS, alterations_of, check_altered
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


OPTIONS = {"positions": POSITIONS, "segments": SEGMENTS, "padding_idx": 0}
PATHS = ("word", "position", "segment", "norm")
# Hooks that scale inputs do not apply to ids.
ALTERATIONS = {
    name: alteration
    for name, alteration in alterations_of(fasttfm.nn.Embeddings(V, C, **OPTIONS), PATHS).items()
    if "norm" in name or ("pre-hook" not in name and "backward" not in name)
}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str) -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.Embeddings(V, C, **OPTIONS, dropout=0.0)
    ids, segments = torch.tensor([0, 3, 3, 22, 1, 0, 7]), torch.tensor([0, 0, 1, 1, 0, 1, 1])

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            return {"y": module(ids, torch.tensor([0, 4, 7], dtype=torch.int32), segment_ids=segments)}
        return {"y": module(ids, torch.tensor([0, 1, 2, 3, 0, 1, 2]), segments)}

    check_altered(ours, Plain(ours, OPTIONS), call, {}, ALTERATIONS[name])


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_altered_embedding_tables_are_called(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.Embeddings(V, C, dropout=0.0)
    theirs = Plain(ours, {})
    ids = torch.tensor([3, 3, 5])
    for module in (ours, theirs):
        for name, value in options.items():
            setattr(module.word, name, value)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(ids) if module is ours else module(ids, ids, None)}

    check_altered(ours, theirs, call, {})


def test_a_hook_changes_nothing_about_dropout() -> None:
    module = fasttfm.nn.Embeddings(V, C, positions=POSITIONS, dropout=0.5)
    ids, cu_seqlens = torch.randint(V, (7,)), torch.tensor([0, 4, 7], dtype=torch.int32)

    def run() -> Tensor:
        torch.manual_seed(2)
        return module(ids, cu_seqlens)

    fused = run()
    HOOKS["full backward hook"](module, "norm")
    torch.testing.assert_close(run(), fused)
    assert 0.3 < (fused == 0).float().mean() < 0.7


def test_a_norm_without_parameters_normalises() -> None:
    module = fasttfm.nn.Embeddings(7, 8, dropout=0.0)
    module.norm = nn.LayerNorm(8, elementwise_affine=False)
    ids = torch.arange(6).view(2, 3)
    torch.testing.assert_close(module(ids), module.norm(module.word(ids)))
