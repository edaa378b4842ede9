"""fasttfm.nn.MultiheadAttention as a drop-in for torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm.testing.alterations import LowRank, alterations_of, check_altered
from fasttfm.testing.modules import check_modules, compare_modules

B, S, SK, C, H = 3, 7, 5, 24, 3


def pair(**options: Any) -> tuple[fasttfm.nn.MultiheadAttention, torch.nn.MultiheadAttention]:
    """Ours and torch's with the same random parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(C, H, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours = fasttfm.nn.MultiheadAttention(C, H, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def tokens(length: int, batch_first: bool, columns: int = C) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn((B, length, columns) if batch_first else (length, B, columns), generator=generator)


def padding_mask(length: int) -> Tensor:
    """Padding at the end, at the front and in the middle."""
    mask = torch.zeros(B, length, dtype=torch.bool)
    mask[0, -2:] = mask[1, 0] = mask[2, 1:3] = True
    return mask


def causal_mask(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attn_mask": causal_mask(S), "is_causal": True},
        {"key_padding_mask": padding_mask(S)},
        {"attn_mask": torch.randn(S, S)},
        {"attn_mask": causal_mask(S)},
    ],
    ids=["plain", "causal", "padded", "additive", "boolean"],
)
def test_self_attention(options: dict[str, Any], batch_first: bool) -> None:
    ours, theirs = pair(batch_first=batch_first)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, given = inputs["x"], dict(options)
        if "attn_mask" in given and given["attn_mask"].is_floating_point():
            given["attn_mask"] = given["attn_mask"].to(x.dtype)
        return {"y": module(x, x, x, need_weights=False, **given)[0]}

    check_modules(ours, theirs, call, {"x": tokens(S, batch_first)})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 6}], ids=str)
def test_cross_attention(options: dict[str, Any], batch_first: bool) -> None:
    ours, theirs = pair(batch_first=batch_first, **options)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(**inputs, need_weights=False, key_padding_mask=padding_mask(SK))[0]}

    inputs = {
        "query": tokens(S, batch_first),
        "key": tokens(SK, batch_first, options.get("kdim", C)),
        "value": tokens(SK, batch_first, options.get("vdim", C)),
    }
    check_modules(ours, theirs, call, inputs)


@pytest.mark.parametrize("own", [True, False], ids=["self", "cross"])
def test_causal_with_padding_agrees_where_there_are_tokens(own: bool) -> None:
    ours, theirs = pair(batch_first=True)
    mask = padding_mask(S)
    mask[1, 0], mask[1, -1] = False, True  # torch gives NaN for a token that attends to none

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        key = x if own else x.clone()
        masks = {"key_padding_mask": mask, "attn_mask": causal_mask(S), "is_causal": True}
        return {"y": module(x, key, key, need_weights=False, **masks)[0][~mask]}

    check_modules(ours, theirs, call, {"x": tokens(S, True)})


def test_without_a_batch() -> None:
    ours, theirs = pair()

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        return {"y": module(x, x, x, need_weights=False, key_padding_mask=padding_mask(S)[0])[0]}

    check_modules(ours, theirs, call, {"x": torch.randn(S, C)})


def test_attention_weights_are_computed_by_the_plain_path() -> None:
    ours, theirs = pair(batch_first=True)
    x = tokens(S, True)
    for options in ({}, {"average_attn_weights": False}, {"key_padding_mask": padding_mask(S)}):
        (y, weights), (expected, expected_weights) = ours(x, x, x, **options), theirs(x, x, x, **options)
        assert torch.equal(y, expected)
        assert torch.equal(weights, expected_weights)


def test_a_wrong_mask_is_detected() -> None:
    ours, theirs = pair(batch_first=True)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x, mask = inputs["x"], padding_mask(S)
        mask[0, -2] = module is not ours
        return {"y": module(x, x, x, need_weights=False, key_padding_mask=mask)[0]}

    comparisons = compare_modules(ours, theirs, call, {"x": tokens(S, True)})
    assert not all(comparison.ok for comparison in comparisons)


@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_may_exclude_every_key_of_a_query(boolean: bool) -> None:
    """As in torch: the projection of zeros, and finite gradients everywhere."""
    ours, theirs = (module.double() for module in pair(batch_first=True))
    mask = causal_mask(S)
    mask[2] = True
    mask = mask if boolean else torch.zeros(S, S, dtype=torch.float64).masked_fill(mask, -torch.inf)
    x = tokens(S, True).double()

    def results(module: Any) -> list[Tensor]:
        own = x.clone().requires_grad_()
        out, _ = module(own, own, own, need_weights=False, attn_mask=mask)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [own, *module.parameters()])]

    for found, expected in zip(results(ours), results(theirs), strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected)


def test_a_sequence_without_a_key_gives_the_projection_of_nothing() -> None:
    ours, _ = pair(batch_first=True)
    x, mask = tokens(S, True).requires_grad_(), padding_mask(S)
    mask[1] = True
    y, _ = ours(x, x, x, need_weights=False, key_padding_mask=mask)
    assert torch.equal(y[1], ours.out_proj.bias.expand(S, C))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx[1], torch.zeros(S, C))
    assert dx.isfinite().all()


def test_dropout_only_in_training() -> None:
    ours, _ = pair(batch_first=True, dropout=0.5)
    x = tokens(S, True)
    assert not torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


def test_same_state_dict_and_start() -> None:
    torch.manual_seed(0)
    ours = fasttfm.nn.MultiheadAttention(C, H).state_dict()
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(C, H).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal(duplicate: Any) -> None:
    ours, _ = pair(batch_first=True)
    x = tokens(S, True)
    assert torch.equal(duplicate(ours)(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_unsupported_options_are_named(option: str) -> None:
    with pytest.raises(ValueError, match=f"MultiheadAttention: {option}: expected False .*not supported"):
        fasttfm.nn.MultiheadAttention(C, H, **{option: True})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"key_padding_mask": torch.zeros(B, S)}, TypeError, "key_padding_mask: expected a boolean mask"),
        (
            {"key_padding_mask": torch.zeros(B, 2, dtype=torch.bool)},
            ValueError,
            r"expected shape \(3, 7\), got \(3, 2\)",
        ),
        ({"attn_mask": torch.zeros(B * H, S, S)}, ValueError, "attn_mask: expected shape .*not supported"),
        (
            {"attn_mask": causal_mask(S), "key_padding_mask": padding_mask(S)},
            ValueError,
            "attn_mask: expected None together with key_padding_mask",
        ),
    ],
)
def test_unsupported_masks_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    ours, _ = pair(batch_first=True)
    x = tokens(S, True)
    with pytest.raises(error, match=f"MultiheadAttention: .*{message}"):
        ours(x, x, x, need_weights=False, **options)


def test_causal_cross_attention_of_other_length_is_refused() -> None:
    ours, _ = pair(batch_first=True)
    with pytest.raises(ValueError, match="is_causal: expected as many queries as keys, got 7 and 5"):
        ours(tokens(S, True), tokens(SK, True), tokens(SK, True), need_weights=False, is_causal=True)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    ours, _ = pair(batch_first=True)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    x = tokens(S, True).requires_grad_()
    options = {"need_weights": False, "key_padding_mask": padding_mask(S)}
    eager, traced = ours(x, x, x, **options)[0], compiled(x, x, x, **options)[0]
    assert torch.equal(eager, traced)
    assert torch.equal(torch.autograd.grad(eager.sum(), x)[0], torch.autograd.grad(traced.sum(), x)[0])


# ---- altered modules -------------------------------------------------------------------------------------------------

ALTERATIONS = alterations_of(torch.nn.MultiheadAttention(C, H), ("",))


@pytest.mark.parametrize("own", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str, own: bool) -> None:
    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        key = x if own else x.flip(1)
        return {"y": module(x, key, key, need_weights=False)[0]}

    check_altered(*pair(batch_first=True), call, {"x": tokens(S, True)}, ALTERATIONS[name])


def test_parametrized_projections() -> None:
    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        return {"y": module(x, x, x, need_weights=False)[0]}

    ours, theirs = pair(batch_first=True)
    for module in (ours, theirs):
        torch.nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
        torch.nn.utils.parametrizations.weight_norm(module.out_proj)
    check_altered(ours, theirs, call, {"x": tokens(S, True)})


def test_an_output_projection_that_is_more_than_a_linear_layer_is_called() -> None:
    """torch reads its weight without calling it."""
    ours, _ = pair(batch_first=True)
    ours, x = ours.double(), tokens(S, True).double()
    context = torch.linalg.solve(ours.out_proj.weight, (ours(x, x, x, need_weights=False)[0] - ours.out_proj.bias).mT)
    ours.out_proj = LowRank(ours.out_proj)
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], ours.out_proj(context.mT))
    seen: list[str] = []
    ours.out_proj.register_forward_hook(lambda *_: seen.append("called"))
    ours(x, x, x, need_weights=False)
    assert seen == ["called"]
