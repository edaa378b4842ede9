"""fasttfm.nn's gated activations against transformers' and torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fasttfm
from fasttfm.testing.alterations import alterations_of, check_altered
from fasttfm.testing.modules import check_modules

ACTIVATIONS = {"gelu": functional.gelu, "silu": functional.silu, "relu": functional.relu}
C, INTERMEDIATE = 24, 40


class Plain(nn.Module):
    """The block as transformers writes it for ModernBERT and Phi-3."""

    def __init__(self, activation: str, bias: bool, gate_first: bool) -> None:
        super().__init__()
        self.activation, self.gate_first = ACTIVATIONS[activation], gate_first
        self.gate_up_proj = nn.Linear(C, 2 * INTERMEDIATE, bias=bias)
        self.down_proj = nn.Linear(INTERMEDIATE, C, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.gate_up_proj(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down_proj(self.activation(gate) * up)


def blocks(activation: str = "silu", bias: bool = False, gate_first: bool = True) -> tuple[fasttfm.nn.GatedMLP, Plain]:
    torch.manual_seed(0)
    theirs = Plain(activation, bias, gate_first)
    ours = fasttfm.nn.GatedMLP(C, INTERMEDIATE, activation=activation, bias=bias, gate_first=gate_first)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"])}


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp(activation: str, bias: bool, gate_first: bool) -> None:
    check_modules(*blocks(activation, bias, gate_first), call, {"x": torch.randn(3, 5, C)})


def test_mlp_takes_the_weights_of_modernbert() -> None:
    modernbert = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    config = modernbert.ModernBertConfig(hidden_size=C, intermediate_size=INTERMEDIATE, num_attention_heads=2)
    torch.manual_seed(0)
    theirs = modernbert.ModernBertMLP(config).double()
    ours = fasttfm.nn.GatedMLP(C, INTERMEDIATE, activation=config.hidden_activation, bias=config.mlp_bias).double()
    ours.load_state_dict({"gate_up_proj.weight": theirs.Wi.weight, "down_proj.weight": theirs.Wo.weight})
    x = torch.randn(3, 5, C, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_mlp_takes_the_weights_of_llama() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=C, intermediate_size=INTERMEDIATE, num_attention_heads=2)
    torch.manual_seed(0)
    theirs = llama.LlamaMLP(config).double()
    ours = fasttfm.nn.GatedMLP(C, INTERMEDIATE, activation=config.hidden_act).double()
    fused = torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight])
    ours.load_state_dict({"gate_up_proj.weight": fused, "down_proj.weight": theirs.down_proj.weight})
    x = torch.randn(3, 5, C, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation: str) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    first, second = x.chunk(2, dim=-1)
    module = fasttfm.nn.GatedActivation(activation)
    torch.testing.assert_close(module(x), ACTIVATIONS[activation](first) * second)
    module = fasttfm.nn.GatedActivation(activation, gate_first=False)
    torch.testing.assert_close(module(x), ACTIVATIONS[activation](second) * first)
    assert repr(module) == f"GatedActivation({activation!r}, gate_first=False)"


@pytest.mark.parametrize(
    "module", [fasttfm.nn.GatedActivation, lambda name: fasttfm.nn.GatedMLP(8, 8, activation=name)]
)
def test_an_unknown_activation_lists_the_known_ones(module: Any) -> None:
    with pytest.raises(ValueError, match=r"Gated\w+: activation: expected one of gelu.*silu.*, got 'mish'"):
        module("mish")


ALTERATIONS = alterations_of(Plain("silu", True, True), ("gate_up_proj", "down_proj"))


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str) -> None:
    check_altered(*blocks(bias=True), call, {"x": torch.randn(3, 5, C)}, ALTERATIONS[name])
