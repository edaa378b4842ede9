"""Second derivatives and forward mode through every module: correct, or refused by an error that names an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn import (
    test_embeddings,
    test_layer_norm,
    test_lm_heads,
    test_multihead_attention,
    test_packed_transformer,
    test_transformer_encoder,
    test_transformer_encoder_layer,
)
from torch import Tensor, nn

import fasttfm
from fasttfm.testing.modules import Call, check_other_derivatives

Case = tuple[nn.Module, nn.Module, Call, dict[str, Tensor]]


def plain_call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"])}


def layer_norm() -> Case:
    return *test_layer_norm.pair(24), plain_call, {"x": torch.randn(5, 24)}


def multihead_attention() -> Case:
    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        return {"y": module(x, x, x, need_weights=False)[0]}

    ours, theirs = test_multihead_attention.pair(batch_first=True)
    return ours, theirs, call, {"x": test_multihead_attention.tokens(5, batch_first=True)}


def transformer_encoder_layer() -> Case:
    ours, theirs = test_transformer_encoder_layer.pair(batch_first=True, activation="gelu")
    return ours, theirs, plain_call, {"x": test_transformer_encoder_layer.tokens(batch_first=True)}


def transformer_encoder() -> Case:
    ours, theirs = test_transformer_encoder.pair(norm_first=True)
    return ours, theirs, plain_call, {"x": torch.randn(2, 5, test_transformer_encoder.C)}


def encoder() -> Case:
    tested = test_packed_transformer
    ours = tested.encoder(norm_first=False)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(inputs["x"], tested.CU_SEQLENS, max(tested.LENGTHS))}

    theirs = tested.Plain(ours, norm_first=False, causal=False)
    return ours, theirs, call, {"x": torch.randn(tested.T, tested.C)}


def embeddings() -> Case:
    tested = test_embeddings
    ours = fasttfm.nn.Embeddings(tested.V, tested.C, **tested.OPTIONS, dropout=0.0)
    ids, segments = torch.tensor([0, 3, 3, 22, 1]), torch.tensor([0, 0, 1, 0, 1])

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(module, fasttfm.nn.Embeddings):
            return {"y": module(ids, torch.tensor([0, 3, 5], dtype=torch.int32), segment_ids=segments)}
        return {"y": module(ids, torch.tensor([0, 1, 2, 0, 1]), segments)}

    return ours, tested.Plain(ours, tested.OPTIONS), call, {}


def masked_lm_head() -> Case:
    return *test_lm_heads.heads(), plain_call, {"x": torch.randn(5, test_lm_heads.C)}


def masked_lm_loss() -> Case:
    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": module.loss(inputs["x"], test_lm_heads.LABELS)}

    return *test_lm_heads.heads(), call, {"x": torch.randn(test_lm_heads.T, test_lm_heads.C)}


CASES: tuple[Callable[[], Case], ...] = (
    layer_norm,
    multihead_attention,
    transformer_encoder_layer,
    transformer_encoder,
    encoder,
    embeddings,
    masked_lm_head,
    masked_lm_loss,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_right_or_refused(case: Callable[[], Case]) -> None:
    torch.manual_seed(0)
    check_other_derivatives(*case())
