"""fasttfm.nn.TransformerEncoderLayer as a drop-in for torch.nn.TransformerEncoderLayer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm.nn.transformer_encoder_layer import is_fusable
from fasttfm.testing.alterations import (
    LowRank,
    alterations_of,
    check_altered,
    check_copies,
    check_equal,
    compiled,
    global_forward_hook,
)
from fasttfm.testing.modules import check_modules, run_module

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
    """Padding at the end, at the front and in the middle."""
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
    ids=["gelu", "tanh", "silu", "relu", "no bias", "pre-LN"],
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


def test_an_unknown_name_of_an_activation_is_refused() -> None:
    with pytest.raises(ValueError, match='TransformerEncoderLayer: activation: expected "relu", "gelu" or a callable'):
        fasttfm.nn.TransformerEncoderLayer(C, H, I, activation="tanh")


def test_masks_of_numbers_are_refused_by_name() -> None:
    ours, _ = pair(batch_first=True)
    with pytest.raises(TypeError, match="TransformerEncoderLayer: src_key_padding_mask: expected a boolean mask"):
        ours(tokens(True), src_key_padding_mask=torch.zeros(B, S))


# ---- altered layers --------------------------------------------------------------------------------------------------

PATHS = ("", "self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2")
ALTERATIONS = alterations_of(torch.nn.TransformerEncoderLayer(C, H, I), PATHS)
X = {"x": torch.randn(B, S, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def run(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"], src_key_padding_mask=padding_mask())}


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str, norm_first: bool) -> None:
    ours, theirs = pair(batch_first=True, norm_first=norm_first, activation="gelu")
    check_altered(ours, theirs, run, X, ALTERATIONS[name])


def test_hooks_see_tokens_in_torchs_layout() -> None:
    """In the caller's order of dimensions and tokens, not in the internal one."""
    seen: list[Tensor] = []
    ours, theirs = pair()
    for module in (ours, theirs):
        module.linear1.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    x = {"x": X["x"].transpose(0, 1)}
    check_altered(ours, theirs, run, x)
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_a_hook_of_all_modules(norm_first: bool) -> None:
    ours, theirs = (module.double() for module in pair(batch_first=True, norm_first=norm_first))
    found = []
    for module in (ours, theirs):
        with global_forward_hook() as events:
            found.append((run_module(module, run, X), events))
    check_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert is_fusable(ours)


def test_a_compiled_module_is_called() -> None:
    torch._dynamo.reset()
    check_altered(*pair(batch_first=True), run, X, (compiled, "linear1"))


@pytest.mark.parametrize("activation", [torch.tanh, torch.nn.Mish(), torch.nn.GELU("tanh"), torch.nn.functional.silu])
def test_another_activation(activation: Any) -> None:
    given, assigned = (pair(batch_first=True, **options) for options in ({"activation": activation}, {}))
    for module in assigned:
        module.activation = activation
    check_altered(*given, run, X)
    check_altered(*assigned, run, X)


def test_hooks_of_an_activation_module() -> None:
    ours, theirs = pair(batch_first=True, activation=torch.nn.ReLU())
    seen = []
    for module in (ours, theirs):
        module.activation = torch.nn.ReLU()
        module.activation.register_forward_hook(lambda *_: seen.append("called"))
    check_altered(ours, theirs, run, X)
    assert seen == ["called", "called"]


@pytest.mark.parametrize("block", ["_sa_block", "_ff_block"])
def test_a_subclass_with_a_block_of_its_own(block: str) -> None:
    def own(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return 1.5 * getattr(super(type(self), self), block)(*args, **kwargs)

    ours, theirs = pair(batch_first=True)
    for module in (ours, theirs):
        module.__class__ = type("Own", (type(module),), {block: own})
    check_altered(ours, theirs, run, X)


def test_another_attention_gets_the_masks_that_torch_gives() -> None:
    class Mean(torch.nn.Module):
        batch_first = True

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, **options: Any) -> tuple[Tensor, None]:
            padding = options["key_padding_mask"]
            return (attn_mask + padding[:, None]).softmax(-1) @ v, None

    ours, theirs = pair(batch_first=True)
    for module in (ours, theirs):
        module.self_attn = Mean()
    mask = torch.ones(S, S, dtype=torch.bool).triu(2)

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(inputs["x"], src_mask=mask, src_key_padding_mask=padding_mask())}

    check_altered(ours, theirs, call, X)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("part", ["dropout", "dropout1", "dropout2"])
def test_dropout_modules_have_their_own_training_mode(part: str, norm_first: bool) -> None:
    """As in Monte Carlo dropout. With a probability of 1 the test is deterministic."""
    ours, theirs = pair(batch_first=True, norm_first=norm_first)
    for module in (ours, theirs):
        module.eval()
        dropout = getattr(module, part)
        dropout.p = 1.0
        dropout.train()
    check_altered(ours, theirs, run, X)
    for module in (ours, theirs):
        module.train()
        getattr(module, part).eval()
    check_altered(ours, theirs, run, X)
    assert is_fusable(ours)


def test_other_parameters_by_functional_call() -> None:
    ours, theirs = (module.double() for module in pair(batch_first=True))
    for names in (("linear1.weight",), tuple(dict(ours.named_parameters()))):
        given = {name: 1.5 * value for name, value in theirs.named_parameters() if name in names}
        found, expected = (torch.func.functional_call(module, given, (X["x"],)) for module in (ours, theirs))
        torch.testing.assert_close(found, expected)
        gradients = (torch.autograd.grad(y.sum(), list(given.values()), retain_graph=True) for y in (found, expected))
        torch.testing.assert_close(*gradients)


def test_training_after_inference_mode() -> None:
    ours, theirs = (module.double() for module in pair(batch_first=True))
    with torch.inference_mode():
        ours(X["x"])
    check_equal(run_module(ours, run, X), run_module(theirs, run, X))


def test_copies_with_a_replaced_module() -> None:
    ours, _ = pair(batch_first=True)
    ours.linear1 = LowRank(ours.linear1)
    check_copies(ours.double(), run, X)


def test_a_sequence_without_tokens_does_not_affect_others() -> None:
    ours, theirs = (module.double() for module in pair(batch_first=True))
    mask = padding_mask()
    mask[1] = True
    found, expected = (module(X["x"], src_key_padding_mask=mask) for module in (ours, theirs))
    assert found.isfinite().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])
    ours.linear1.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(ours(X["x"], src_key_padding_mask=mask), found)


def test_hooks_of_state_dicts() -> None:
    ours, theirs = pair()
    seen = []
    ours.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    ours.register_load_state_dict_pre_hook(lambda *_: seen.append("loads"))
    ours.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert seen == ["saved", "loads", "loaded"]


def test_a_plain_layer_is_fused() -> None:
    for options in ({}, {"norm_first": True, "bias": False}, {"activation": torch.nn.GELU("tanh")}):
        ours, _ = pair(**options)
        assert is_fusable(ours)
        ours.linear1.requires_grad_(False)
        ours.dropout = torch.nn.Identity()
        assert is_fusable(ours)
