"""Modules that are replaced by plain modules of another kind: they are called, as in torch and transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm

WIDTH = 16
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "Identity": nn.Identity,
    "Linear": lambda: nn.Linear(WIDTH, WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "ReLU": nn.ReLU,
}
LEAVES = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity)
SIZES = {"vocab_size": 61, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {f"{name}_token_id": number for number, name in enumerate(("pad", "cls", "sep", "bos", "eos"))}
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": {**SIZES, "intermediate_size": WIDTH},
    "DistilBert": {"vocab_size": 61, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": WIDTH},
    "ModernBert": {**SIZES, "intermediate_size": WIDTH, **SPECIAL},
    "EuroBert": {**SIZES, "intermediate_size": WIDTH, "mask_token_id": 5, **SPECIAL},
    "NomicBert": {**SIZES, "intermediate_size": WIDTH, **SPECIAL},
    "GPT2": {"vocab_size": 61, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 20},
}


def replaced(model: nn.Module, path: str, other: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, copy.deepcopy(other))
    return model


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_in_an_encoder_layer(norm_first: bool, kind: str) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    ours = fasttfm.nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, **options)
    theirs = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, **options)
    theirs.load_state_dict(ours.state_dict())
    x, other = torch.randn(2, 5, WIDTH), OTHERS[kind]()
    for path in ("linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2"):
        found, expected = (replaced(each, path, other)(x) for each in (ours, theirs))
        torch.testing.assert_close(found, expected, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize("kind", OTHERS)
def test_in_packed_layers(kind: str) -> None:
    """The same as a module that calls the other one, which is not plain."""
    torch.manual_seed(0)
    layers = [fasttfm.nn.PackedLayer(WIDTH, 2, WIDTH, dropout=0.0, attention_dropout=0.0) for _ in range(2)]
    model, other = fasttfm.nn.PackedTransformer(layers), OTHERS[kind]()
    x, cu_seqlens = torch.randn(5, WIDTH), torch.tensor([0, 2, 5], dtype=torch.int32)
    for path in ("out", "up", "down", "norm1", "norm2"):
        found, expected = (
            replaced(model, f"layers.0.{path}", each)(x, cu_seqlens, 3) for each in (other, nn.Sequential(other))
        )
        torch.testing.assert_close(found, expected, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("family", CONFIGS)
def test_in_a_patched_model(family: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    model = getattr(transformers, f"{family}Model")(config).eval()
    ids, mask = torch.randint(5, 60, (2, 7)), torch.arange(7) < torch.tensor([[7], [4]])
    other, compared = OTHERS[kind](), 0
    paths = [path for path, each in model.named_modules() if isinstance(each, LEAVES)]

    def called(module: Any) -> Tensor:
        with torch.no_grad():
            states: Tensor = module(ids, attention_mask=mask.long()).last_hidden_state
        return states[mask]

    for path in paths:
        theirs = replaced(model, path, other)
        try:
            expected = called(theirs)
        except (RuntimeError, AttributeError):  # of another width, or an attribute is read
            continue
        fasttfm.patch(theirs)
        torch.testing.assert_close(
            called(theirs), expected, atol=1e-4, rtol=1e-4, msg=lambda text, p=path: f"{p}: {text}"
        )
        compared += 1
    assert compared > 3
