"""fasttfm.nn's language-model heads against torch's layers and cross entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fasttfm
from fasttfm.testing.alterations import alterations_of, check_altered, low_rank
from fasttfm.testing.modules import check_modules

C, E, V, T = 24, 16, 37, 11
LABELS = torch.tensor([-100, 3, -100, 36, -100, -100, 0, -100, 9, -100, -100])
ACTIVATIONS = {"gelu": functional.gelu, "relu": functional.relu}


class Plain(nn.Module):
    def __init__(self, source: fasttfm.nn.MaskedLMHead, activation: str) -> None:
        super().__init__()
        self.dense, self.norm, self.decoder = nn.Linear(C, E), nn.LayerNorm(E, eps=1e-12), nn.Linear(E, V)
        self.activation = ACTIVATIONS[activation]
        self.load_state_dict(source.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(x))))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self(x), labels)


def heads(activation: str = "gelu") -> tuple[fasttfm.nn.MaskedLMHead, Plain]:
    torch.manual_seed(0)
    ours = fasttfm.nn.MaskedLMHead(C, V, embedding_width=E, activation=activation)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    return ours, Plain(ours, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_logits(activation: str) -> None:
    ours, theirs = heads(activation)
    check_modules(ours, theirs, lambda module, inputs: {"logits": module(inputs["x"])}, {"x": torch.randn(2, 5, C)})


@pytest.mark.parametrize("given", ["labels", "positions", "max_predictions"])
def test_masked_loss(given: str) -> None:
    ours, theirs = heads()

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is not ours or given == "labels":
            return {"loss": module.loss(inputs["x"], LABELS)}
        if given == "max_predictions":
            return {"loss": module.loss(inputs["x"], LABELS, max_predictions=7)}
        positions = torch.tensor([8, 1, 6, 3, 3, 0])  # in any order, with fillers
        labels = LABELS[positions].index_fill(0, torch.tensor([4]), -100)
        return {"loss": module.loss(inputs["x"], labels, positions=positions)}

    check_modules(ours, theirs, call, {"x": torch.randn(T, C)})


def test_no_predictions() -> None:
    ours, _ = heads()
    x = torch.randn(T, C, requires_grad=True)
    for options in ({}, {"max_predictions": 3}):
        loss = ours.loss(x, torch.full((T,), -100), **options)
        assert loss.item() == 0
        for gradient in torch.autograd.grad(loss, [x, *ours.parameters()]):
            assert not gradient.any()


def test_more_predictions_than_the_limit_give_nan() -> None:
    ours, _ = heads()
    assert ours.loss(torch.randn(T, C), LABELS, max_predictions=3).isnan()


def test_causal_loss() -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.CausalLMHead(C, V)
    theirs = nn.Linear(C, V, bias=False)
    theirs.load_state_dict({"weight": ours.decoder.weight})
    cu_seqlens = torch.tensor([0, 4, 5, T], dtype=torch.int32)
    labels = torch.randint(V, (T,))

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            return {"loss": module.loss(inputs["x"], labels, cu_seqlens), "logits": module(inputs["x"])}
        logits = module(inputs["x"])
        rows = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9])  # the last token of a sequence predicts nothing
        return {"loss": functional.cross_entropy(logits[rows], labels[rows + 1]), "logits": logits}

    inputs = {"x": torch.randn(T, C)}
    check_modules(ours, theirs, call, inputs, translate=lambda found: {"decoder.weight": found.pop("weight"), **found})


ALTERATIONS = alterations_of(fasttfm.nn.MaskedLMHead(C, V, embedding_width=E), ("dense", "norm", "decoder"))
PREDICTED = (LABELS != -100).nonzero().squeeze(1)


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str) -> None:
    ours, theirs = heads()

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = inputs["x"][PREDICTED]
        loss = module.loss(inputs["x"], LABELS) if module is ours else module.loss(rows, LABELS[PREDICTED])
        return {"loss": loss, "logits": module(inputs["x"])}

    check_altered(ours, theirs, call, {"x": torch.randn(T, C)}, ALTERATIONS[name])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_replaced_decoder_has_the_loss_of_its_logits(reduction: str) -> None:
    """The fused loss of a decoder with the merged weight, with empty sequences too."""
    torch.manual_seed(0)
    ours, merged = (fasttfm.nn.CausalLMHead(C, V).double() for _ in range(2))
    low_rank(ours, "decoder")
    with torch.no_grad():
        merged.decoder.weight.copy_(ours.decoder.weight + ours.decoder.b @ ours.decoder.a)
    x, labels = torch.randn(T, C, dtype=torch.float64), torch.randint(V, (T,))
    labels[6] = -100
    for boundaries in ([0, 4, 5, T], [0, 0, 3, 3, T]):
        cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
        found, expected = (each.loss(x, labels, cu_seqlens, reduction=reduction) for each in (ours, merged))
        torch.testing.assert_close(found, expected)


def test_sampling_with_a_replaced_decoder_is_refused() -> None:
    ours, _ = heads()
    low_rank(ours, "decoder")
    with pytest.raises(ValueError, match=r"MaskedLMHead.sample: decoder: expected a head and a decoder without hooks"):
        ours.sample(torch.randn(T, C), LABELS)
