"""fasttfm.nn.TransformerEncoderLayer as a drop-in for torch.nn.TransformerEncoderLayer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm.testing.modules import check_modules

B, S, C, H, I = 3, 7, 24, 3, 40


def pair(**options: Any) -> tuple[fasttfm.nn.TransformerEncoderLayer, torch.nn.TransformerEncoderLayer]:
    """Ours and torch's with the same random parameters, dropout off."""
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(C, H, I, **{"dropout": 0.0, **options})
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = fasttfm.nn.TransformerEncoderLayer(C, H, I, **{"dropout": 0.0, **options})
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tokens(batch_first: bool) -> Tensor:
    return torch.randn((B, S, C) if batch_first else (S, B, C), generator=torch.Generator().manual_seed(1))


def padding_mask() -> Tensor:
    """Padding behind, in front and in the middle."""
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, -2:] = mask[1, 0] = mask[2, 1:3] = True
    return mask


def causal_mask() -> Tensor:
    return torch.nn.Transformer.generate_square_subsequent_mask(S)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "sequence_first"])
@pytest.mark.parametrize(
    "masks",
    [{}, {"src_key_padding_mask": padding_mask()}, {"src_mask": causal_mask(), "is_causal": True}],
    ids=["plain", "padded", "causal"],
)
def test_same_numbers_as_torch(masks: dict[str, Any], batch_first: bool, norm_first: bool) -> None:
    ours, theirs = pair(batch_first=batch_first, norm_first=norm_first)
    check_modules(ours, theirs, lambda module, inputs: {"y": module(inputs["x"], **masks)}, {"x": tokens(batch_first)})


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "gelu"},
        {"activation": torch.nn.GELU(approximate="tanh")},
        {"activation": torch.nn.functional.silu},
        {"activation": torch.nn.ReLU()},
        {"bias": False},
        {"layer_norm_eps": 1e-2, "norm_first": True},
    ],
    ids=str,
)
def test_constructor_arguments(options: dict[str, Any]) -> None:
    ours, theirs = pair(batch_first=True, **options)
    check_modules(ours, theirs, lambda module, inputs: {"y": module(inputs["x"])}, {"x": tokens(True)})


def test_without_a_batch() -> None:
    ours, theirs = pair()
    mask = padding_mask()[0]

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(inputs["x"], src_key_padding_mask=mask)}

    check_modules(ours, theirs, call, {"x": torch.randn(S, C)})


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_dropout_is_applied_in_training_at_its_rate(norm_first: bool) -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.TransformerEncoderLayer(C, H, I, dropout=0.5, batch_first=True, norm_first=norm_first)
    theirs = torch.nn.TransformerEncoderLayer(C, H, I, dropout=0.5, batch_first=True, norm_first=norm_first)
    theirs.load_state_dict(ours.state_dict())
    x = tokens(True)[:1].expand(1024, S, C)
    with torch.no_grad():
        a, b = ours(x), theirs(x)
        assert not torch.equal(a[0], a[1])
        spread = (a.var(0) + b.var(0)).sqrt() / 1024**0.5  # of the difference of two means
        assert ((a.mean(0) - b.mean(0)).abs() / spread).mean() < 1.2  # 0.8 is expected
        ratio = a.var(0).mean() / b.var(0).mean()
        assert 0.9 < ratio < 1.1
        ours.eval()
        assert torch.equal(ours(x)[0], ours(x)[1])


def test_same_state_dict_start_and_description() -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.TransformerEncoderLayer(C, H, I)
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(C, H, I)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(ours.state_dict()[name], value) for name, value in theirs.state_dict().items())
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.TransformerEncoderLayer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal(duplicate: Any) -> None:
    ours, _ = pair(batch_first=True)
    assert torch.equal(duplicate(ours)(tokens(True)), ours(tokens(True)))


def test_autocast() -> None:
    ours, _ = pair(batch_first=True)
    x = tokens(True).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="TransformerEncoderLayer: activation: expected relu, gelu or silu"):
        fasttfm.nn.TransformerEncoderLayer(C, H, I, activation=torch.tanh)


def test_masks_of_numbers_are_refused_by_name() -> None:
    ours, _ = pair(batch_first=True)
    with pytest.raises(TypeError, match="TransformerEncoderLayer: src_key_padding_mask: expected a boolean mask"):
        ours(tokens(True), src_key_padding_mask=torch.zeros(B, S))
