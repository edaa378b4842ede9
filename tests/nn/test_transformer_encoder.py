"""fasttfm.nn.TransformerEncoder as a drop-in for torch.nn.TransformerEncoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fasttfm
from fasttfm.testing.alterations import alterations_of, check_altered, compiled
from fasttfm.testing.modules import check_modules

B, S, C, H, I, LAYERS = 3, 7, 32, 2, 40, 3


def pair(norm_first: bool) -> tuple[fasttfm.nn.TransformerEncoder, torch.nn.TransformerEncoder]:
    """Ours and torch's with the same random parameters, dropout off."""
    torch.manual_seed(0)
    options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": norm_first}
    theirs = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(C, H, I, **options),
        LAYERS,
        torch.nn.LayerNorm(C) if norm_first else None,
        enable_nested_tensor=False,
    )
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = fasttfm.nn.TransformerEncoder(
        fasttfm.nn.TransformerEncoderLayer(C, H, I, **options),
        LAYERS,
        fasttfm.nn.LayerNorm(C) if norm_first else None,
    )
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def padding_mask() -> Tensor:
    """Padding at the end, at the front and in the middle."""
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, -2:] = mask[1, 0] = mask[2, 1:3] = True
    return mask


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"src_key_padding_mask": padding_mask()},
        {"mask": torch.nn.Transformer.generate_square_subsequent_mask(S), "is_causal": True},
    ],
    ids=["plain", "padded", "causal"],
)
def test_same_numbers_as_torch(masks: dict[str, Any], norm_first: bool) -> None:
    ours, theirs = pair(norm_first)
    x = torch.randn(B, S, C)
    check_modules(ours, theirs, lambda module, inputs: {"y": module(inputs["x"], **masks)}, {"x": x})


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_causal_with_padding_agrees_where_there_are_tokens(norm_first: bool) -> None:
    ours, theirs = pair(norm_first)
    x, ignored = torch.randn(B, S, C), padding_mask()
    ignored[1, 0], ignored[1, -1] = False, True  # torch gives NaN for a token that attends to none
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        y = module(inputs["x"], mask=causal, src_key_padding_mask=ignored, is_causal=True)
        return {"y": y[~ignored]}

    check_modules(ours, theirs, call, {"x": x})


def test_other_layers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a fasttfm\.nn\.TransformerEncoderLayer, got torch\.nn\."):
        fasttfm.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(C, H, I), 2)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    ours, _ = pair(norm_first=False)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(B, S, C)
    with torch.no_grad():
        assert torch.equal(
            compiled(x, src_key_padding_mask=padding_mask()), ours(x, src_key_padding_mask=padding_mask())
        )


# ---- altered encoders ------------------------------------------------------------------------------------------------

PATHS = ("", "layers.0", "layers.1", "layers.1.linear1", "layers.2.self_attn", "layers.2.norm2", "norm")
ALTERATIONS = alterations_of(pair(norm_first=True)[1], PATHS)
X = {"x": torch.randn(B, S, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def run(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"], src_key_padding_mask=padding_mask())}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str) -> None:
    norm_first = "norm" in name.partition(":")[0] or "self_attn" in name
    check_altered(*pair(norm_first=norm_first or name.startswith("norm")), run, X, ALTERATIONS[name])


def test_a_compiled_layer_is_called() -> None:
    torch._dynamo.reset()
    check_altered(*pair(norm_first=False), run, X, (compiled, "layers.1"))


@pytest.mark.parametrize("causal", [False, True])
def test_layers_of_another_kind_are_called(causal: bool) -> None:
    """A layer of torch and one with another number of heads, among ours."""
    ours, theirs = pair(norm_first=False)
    other = torch.nn.TransformerEncoderLayer(C, 4, I, dropout=0.0, batch_first=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S, dtype=torch.float64) if causal else None
    heads = fasttfm.nn.TransformerEncoderLayer(C, 4, I, dropout=0.0, batch_first=True)
    heads.load_state_dict(other.state_dict())
    theirs.layers[1] = other

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(inputs["x"], mask=mask, is_causal=causal)}

    for layer in (heads, other):
        ours.layers[1] = layer
        check_altered(ours, theirs, call, X)


def test_a_wrapped_layer_is_taken_by_the_constructor() -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(C, H, I, dropout=0.0, batch_first=True).double()
    wrapped = fasttfm.nn.TransformerEncoder(checkpoint_wrapper(layer), 2)
    plain = fasttfm.nn.TransformerEncoder(layer, 2)
    torch.testing.assert_close(wrapped(X["x"]), plain(X["x"]))
