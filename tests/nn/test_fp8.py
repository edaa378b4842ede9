"""``Fp8Training``: models train in FP8, also after outliers and steps that are not finite."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fasttfm import models, optim
from fasttfm.nn import Fp8Training, PackedLayer
from fasttfm.ops import fp8

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32}


def model(kind: str = "bert") -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        return models.GPT2LMHeadModel(models.GPT2Config(**GPT))
    if kind == "albert":
        return models.AlbertForMaskedLM(models.AlbertConfig(**SMALL, embedding_size=16))
    return models.BertForMaskedLM(models.BertConfig(**SMALL))


def batch(seed: int = 0) -> Tensor:
    return torch.randint(5, 64, (2, 13), generator=torch.Generator().manual_seed(seed))


def loss_of(network: nn.Module, ids: Tensor, *, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = network(ids, labels=ids).loss
    return loss


def train(network: nn.Module, scaling: Fp8Training | None, steps: int) -> list[float]:
    """Losses of steps over one batch."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    found = []
    for step in range(steps):
        loss = loss_of(network.train(), batch(), seed=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scaling is not None:
            scaling.update()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["bert", "albert", "gpt2"])
def test_models_learn_as_in_bf16(kind: str) -> None:
    """The losses differ by much less than they decrease."""
    network = model(kind)
    other = copy.deepcopy(network)
    found, expected = train(network, Fp8Training(network), 12), train(other, None, 12)
    assert expected[0] - expected[-1] > 0.2
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.1 * (expected[0] - expected[-1])
    assert found != expected


@pytest.mark.parametrize("kind", ["bert", "gpt2"])  # ALBERT has no dropout
def test_dropout_has_the_seeds_of_bf16(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are functions of seeds, so that the losses of both precisions compare for one seed of torch's generator."""
    draw, drawn = torch.randint, list[Tensor]()

    def record(*given: Any, **options: Any) -> Tensor:
        drawn.append(draw(*given, **options))
        return drawn[-1]

    monkeypatch.setattr(torch, "randint", record)
    network, ids, found = model(kind).train(), batch(), []
    for scaling in (None, Fp8Training):
        if scaling is not None:
            scaling(network)
        drawn.clear()
        loss_of(network, ids, seed=3).backward()
        found.append([each.tolist() for each in drawn])
    assert found[0] == found[1]
    assert [len(each) for each in found[0]] == [1, 2]  # of the embeddings, and three for each layer
    assert len({number for layer in found[0][1] for number in layer}) == 6


def test_evaluation_is_that_of_the_model() -> None:
    network = model()
    expected = loss_of(network.eval(), batch())
    with torch.no_grad():
        without = loss_of(network.train(), batch())
    scaling = Fp8Training(network)
    assert torch.equal(loss_of(network.eval(), batch()), expected)
    with torch.no_grad():
        assert torch.equal(loss_of(network.train(), batch()), without)
    in_fp8 = loss_of(network.train(), batch())
    assert not torch.equal(in_fp8, without)
    scaling.remove()
    assert torch.equal(loss_of(network.train(), batch()), without)


def test_a_copy_of_a_model_has_no_fp8() -> None:
    network = model()
    Fp8Training(network)
    assert all(each.fp8 is None for each in copy.deepcopy(network).modules() if isinstance(each, PackedLayer))


def gradients(network: nn.Module, ids: Tensor) -> list[Tensor]:
    network.zero_grad()
    loss_of(network.train(), ids).backward()
    return [each.grad.clone() for each in network.parameters() if each.grad is not None]


def test_a_step_that_is_not_finite_keeps_the_scales() -> None:
    """Values that are not finite reach the gradients, where training loops detect them; the next step is not affected,
    except for one entry of the amax histories."""
    network = model()
    scaling = Fp8Training(network)
    for _ in range(2):
        expected = gradients(network, batch())
        scaling.update()
    scales = scaling.scales.scale.clone()
    kept = network.bert.embeddings.norm.weight.detach().clone()
    for bad in (math.nan, math.inf):
        with torch.no_grad():
            network.bert.embeddings.norm.weight.fill_(bad)
        assert not all(each.isfinite().all() for each in gradients(network, batch()))
        scaling.update()
        assert torch.equal(scaling.scales.scale, scales)
        with torch.no_grad():
            network.bert.embeddings.norm.weight.copy_(kept)
    assert all(torch.equal(a, b) for a, b in zip(gradients(network, batch()), expected, strict=True))


def first_layer(network: nn.Module) -> list[Tensor]:
    layer = network.bert.encoder.layers[0]
    return [each.weight for each in (layer.qkv, layer.out, layer.up, layer.down)]


def scaled_gradients(network: nn.Module, scaling: Fp8Training | None, factor: float = 1e-4) -> list[Tensor]:
    """The first layer's gradients of a loss that is so small that e5m2 with a scale of 1 rounds them to 0."""
    network.zero_grad()
    (factor * loss_of(network.train(), batch())).backward()
    if scaling is not None:
        scaling.update()
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in first_layer(network)]


def assert_similar(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.95
        assert 0.9 < a.norm() / b.norm() < 1.1


def test_layers_that_are_unfrozen_later_have_gradients_at_once() -> None:
    network = model()
    expected = scaled_gradients(network, None)
    scaling = Fp8Training(network)
    frozen = [each for name, each in network.named_parameters() if "embeddings" in name or "layers.0" in name]
    for each in frozen:
        each.requires_grad_(False)
    for _ in range(3):
        scaled_gradients(network, scaling)
    for each in frozen:
        each.requires_grad_(True)
    for _ in range(3):
        assert_similar(scaled_gradients(network, scaling), expected)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_first_steps_that_are_not_finite_do_not_spoil_the_next(bad: float) -> None:
    network = model()
    expected = scaled_gradients(network, None)
    scaling = Fp8Training(network)
    for _ in range(3):
        scaled_gradients(network, scaling, bad)
    assert scaling.scales.history.isfinite().all()
    for _ in range(3):
        assert_similar(scaled_gradients(network, scaling), expected)


def test_tensors_are_measured_until_they_have_a_history() -> None:
    network = model()
    scaling = Fp8Training(network)
    linear = network.bert.encoder.layers[0].fp8.linears.qkv
    slots = {"input": linear.input, "gradient": linear.gradient}
    found = []
    for factor in (math.inf, 1.0, 1.0, 1.0):
        found.append([name for name, slot in slots.items() if slot.measuring])
        scaled_gradients(network, scaling, factor)
    # The host reads at the second update that the first step wrote a history of the input, but none of the gradient.
    assert found == [["input", "gradient"], ["input", "gradient"], ["gradient"], []]


def test_an_old_state_measures_only_what_has_no_history() -> None:
    network = model()
    scaling = Fp8Training(network)
    scaled_gradients(network, scaling, math.inf)
    state = {**scaling.state_dict(), "measuring": False}
    del state["reading"]
    other = Fp8Training(network)
    other.load_state_dict(state)
    linear = network.bert.encoder.layers[0].fp8.linears.qkv
    assert (linear.input.measuring, linear.gradient.measuring) == (False, True)


OPTIMIZERS: dict[str, Any] = {
    "fasttfm": optim.AdamW,
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "foreach": functools.partial(torch.optim.AdamW, foreach=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("updates", ["before the step", "never"])
def test_a_step_that_no_update_follows_is_noticed(kind: str, updates: str) -> None:
    network = model()
    scaling = Fp8Training(network)
    optimizer = OPTIMIZERS[kind](network.parameters(), lr=0.5)
    loss_of(network.train(), batch()).backward()
    if updates != "never":
        scaling.update()
    optimizer.step()
    loss_of(network, batch())
    for linear in network.bert.encoder.layers[0].fp8.linears:
        rounded = linear.rows.float() * linear.weight.inverse
        assert (rounded - linear.parameter).norm() < 0.05 * linear.parameter.norm()


def test_an_outlier_saturates_and_is_followed() -> None:
    network = model()
    scaling = Fp8Training(network, history=3)
    gradients(network, batch())
    scaling.update()
    slot = network.bert.encoder.layers[0].fp8.linears.qkv.input
    before = slot.scale.item()
    weight = network.bert.embeddings.norm.weight
    with torch.no_grad():
        weight.mul_(1000)
    assert all(each.isfinite().all() for each in gradients(network, batch()))
    scaling.update()
    assert before / 2048 <= slot.scale.item() <= before / 512
    with torch.no_grad():
        weight.mul_(1e-3)
    for _ in range(3):
        assert slot.scale.item() < before
        gradients(network, batch())
        scaling.update()
    assert slot.scale.item() == before


def test_weights_that_are_loaded_are_cast_again() -> None:
    network, other = model(), model()
    scaling = Fp8Training(network)
    gradients(network, batch())
    scaling.update()
    with torch.no_grad():
        for each in other.parameters():
            each.mul_(64)
    network.load_state_dict(other.state_dict())
    linear = network.bert.encoder.layers[1].fp8.linears.up
    gradients(network, batch())
    rounded = linear.rows.float() * linear.weight.inverse
    assert (rounded - linear.parameter).norm() < 0.05 * linear.parameter.norm()
    assert torch.equal(linear.rows.float(), linear.columns.float().t())


def test_replaced_parameters_are_reported() -> None:
    network = model()
    Fp8Training(network)
    network.load_state_dict(model().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="replaced by another parameter; create Fp8Training again"):
        gradients(network, batch())


@pytest.mark.parametrize("steps", [1, 2, 3])  # measured, measured while the host reads, with a history
def test_state_resumes_with_the_same_bits(steps: int) -> None:
    network = model()
    scaling = Fp8Training(network)
    train(network, scaling, steps)
    other = copy.deepcopy(network)
    restored = Fp8Training(other)
    restored.load_state_dict(scaling.state_dict())
    assert train(network, scaling, 3) == train(other, restored, 3)
    assert torch.equal(scaling.scales.history, restored.scales.history)
    assert [each.measuring for each in scaling.scales.slots] == [each.measuring for each in restored.scales.slots]


def test_layers_can_be_excluded() -> None:
    network = model()
    Fp8Training(network, skip_first=1)
    first, second = network.bert.encoder.layers
    assert first.fp8 is None
    assert second.fp8 is not None


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    network = model()
    scaling = Fp8Training(network)
    gradients(network, batch())
    scaling.update()
    expected = gradients(network, batch())
    network.bert.encoder.checkpointing = True
    assert all(torch.equal(a, b) for a, b in zip(gradients(network, batch()), expected, strict=True))


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Fp8Training: gradients: expected one of e4m3, e5m2, got 'int8'"):
        Fp8Training(model(), gradients="int8")
    with pytest.raises(
        ValueError, match="Fp8Training: model: expected one with PackedLayers to compute in FP8, got Lin"
    ):
        Fp8Training(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="with 2 of them, skip_first=1, skip_last=1"):
        Fp8Training(model(), skip_first=1, skip_last=1)
    with pytest.raises(ValueError, match=r"sizes are multiples of 16, got shape \(72, 24\)"):
        Fp8Training(PackedLayer(24, 2, 48))
    hooked = model()
    hooked.bert.encoder.layers[0].up.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="layers of plain modules, got one with hooks"):
        Fp8Training(hooked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "compute capability 8.9 or later, got 8.0" in str(fp8.missing(torch.device("cuda", 0)))
