"""Entry points of the modules of ``fasttfm.nn``, with small sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn as torch_nn

from fasttfm import nn
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, as_leaves, tensors_of, with_gradients

# Public names of fasttfm.nn that have no entry point.
EXCEPTIONS = {
    "nn.AlignedEntities": "a description of inputs: nn.KnowledgeLayer's entry point makes one",
    "nn.GraphBatch": "a description of inputs: nn.GraphReasoner's entry point makes one",
    "nn.PackedBatch": "a description of inputs: every model's entry point makes one",
}

WIDTH, HEADS, INTERMEDIATE, VOCABULARY = 32, 2, 48, 40
LENGTHS = (5, 0, 1, 6)
_NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}

Make = Callable[[], torch_nn.Module]
Call = Callable[[Any, Inputs], Any]


def seeded(make: Make, device: torch.device) -> Any:
    """The module with the same random parameters each time, large enough to matter."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        module = make()
        for parameter in module.parameters():
            torch_nn.init.normal_(parameter, mean=0.05, std=0.2)
    return module.to(device).train()


def run_module(call: Call, module: torch_nn.Module, inputs: Inputs) -> Tensors:
    """Outputs and gradients of a call, and the outputs of one without gradients."""
    leaves = as_leaves(inputs)
    parameters = dict(module.named_parameters())
    results = with_gradients(tensors_of(call(module, leaves)), {**_tensors(leaves), **parameters})
    with torch.no_grad():
        results |= {f"{name} without gradients": value for name, value in tensors_of(call(module, inputs)).items()}
    return results


def _tensors(inputs: Inputs) -> Tensors:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


# ---- inputs ----------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + seed)


def rows(seed: int, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 7, WIDTH)), generator=_generator(seed)).to(device)


def _x(*shape: int) -> Callable[[int, torch.device], Inputs]:
    return lambda seed, device: {"x": rows(seed, device, *shape)}


def bounds_of(device: torch.device) -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)


def _packed(seed: int, device: torch.device) -> Inputs:
    return {"x": rows(seed, device, sum(LENGTHS), WIDTH), "cu_seqlens": bounds_of(device), "max_seqlen": max(LENGTHS)}


def _ids(seed: int, device: torch.device) -> Inputs:
    ids = torch.randint(1, VOCABULARY, (sum(LENGTHS),), generator=_generator(seed))
    return {"ids": ids.to(device), "cu_seqlens": bounds_of(device)}


def _labelled(seed: int, device: torch.device) -> Inputs:
    return {"x": _packed(seed, device)["x"], "labels": _ids(seed, device)["ids"]}


def _labelled_sequences(seed: int, device: torch.device) -> Inputs:
    return {**_labelled(seed, device), "cu_seqlens": bounds_of(device)}


def _entities(seed: int, device: torch.device) -> Inputs:
    inputs = _packed(seed, device)
    return {**inputs, "entities": rows(seed, device, 5, 16)}


def _aligned(device: torch.device) -> nn.AlignedEntities:
    ids = torch.full((sum(LENGTHS),), -1)
    ids[[2, 7]] = torch.tensor([3, 1])  # the first token of each of the three sequences has one, too
    bounds = bounds_of(torch.device("cpu"))
    return nn.AlignedEntities.of(ids, bounds, max(LENGTHS)).to(device, non_blocking=False)


def _graphs() -> nn.GraphBatch:
    """Two graphs: one with two pairs and three paths, one with one pair and one path."""
    edges = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (3, 4), (4, 3)]
    pairs = [(0, 0, 1), (0, 0, 2), (1, 3, 4)]
    triples = [(0, 1, 2), (0, 0, 1), (0, 2, 2), (3, 1, 4), (2, 0, 1)]
    batch: nn.GraphBatch = nn.GraphBatch.of([4, 1, 3, 0, 2], edges, pairs, [0, 0, 1, 2], triples, (4, 1), 2)
    return batch


# ---- calls -----------------------------------------------------------------------------------------------------------


def _plain(module: Any, inputs: Inputs) -> Any:
    return module(inputs["x"])


def _layer(module: Any, inputs: Inputs) -> Any:
    return module(inputs["x"], inputs["cu_seqlens"], inputs["max_seqlen"])


def _attention(module: Any, inputs: Inputs) -> Any:
    x = inputs["x"]
    return module(x, x, x, need_weights=False)[0]


def _masked_lm(module: Any, inputs: Inputs) -> Any:
    return {"logits": module(inputs["x"]), "loss": module.loss(inputs["x"], inputs["labels"], max_predictions=12)}


def _causal_lm(module: Any, inputs: Inputs) -> Any:
    return {
        "logits": module(inputs["x"]),
        "loss": module.loss(inputs["x"], inputs["labels"], inputs["cu_seqlens"]),
    }


def _knowledge(module: Any, inputs: Inputs) -> Any:
    aligned = _ALIGNED[inputs["x"].device]
    packed = (inputs["x"], inputs["cu_seqlens"], inputs["max_seqlen"])
    return module(*packed, entities=inputs["entities"], aligned=aligned)


def _reason(module: Any, inputs: Inputs) -> Any:
    return module(_GRAPH_BATCHES[inputs["x"].device], inputs["x"])


class _PerDevice(dict[torch.device, Any]):
    """Made once for each device, so that a call inside of a capture copies nothing from the host."""

    def __init__(self, make: Callable[[torch.device], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, device: torch.device) -> Any:
        with torch.inference_mode(False), torch.device("cpu"):
            self[device] = self._make(device)
        return self[device]


_ALIGNED = _PerDevice(_aligned)
_GRAPH_BATCHES = _PerDevice(lambda device: _graphs().to(device))


# ---- modules ---------------------------------------------------------------------------------------------------------


def _packed_layer() -> nn.PackedLayer:
    return nn.PackedLayer(WIDTH, HEADS, INTERMEDIATE, **_NO_DROPOUT)


def _rotary_layer(first: bool = False) -> nn.RotaryLayer:
    return nn.RotaryLayer(WIDTH, HEADS, INTERMEDIATE, window=(3, 3), first=first)


def _rotary_transformer() -> nn.RotaryTransformer:
    layers = [_rotary_layer(first=True), _rotary_layer()]
    return nn.RotaryTransformer(layers, torch_nn.LayerNorm(WIDTH), positions=4)


def _knowledge_layer(**options: Any) -> nn.KnowledgeLayer:
    sizes: dict[str, Any] = {"entity_width": 16, "entity_heads": 2}
    return nn.KnowledgeLayer(WIDTH, HEADS, INTERMEDIATE, **sizes, **_NO_DROPOUT, **options)


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, INTERMEDIATE, dropout=0.0, batch_first=True)


_Inputs = Callable[[int, torch.device], Inputs]
MODULES: dict[str, tuple[Make, _Inputs, Call]] = {
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), _x(), _plain),
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), _x(), _plain),
    "OffsetRMSNorm": (lambda: nn.OffsetRMSNorm(WIDTH), _x(), _plain),
    "GatedActivation": (lambda: nn.GatedActivation(), _x(), _plain),
    "GatedMLP": (lambda: nn.GatedMLP(WIDTH, INTERMEDIATE, bias=True), _x(), _plain),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), _x(), _attention),
    "TransformerEncoderLayer": (_encoder_layer, _x(), _plain),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(_encoder_layer(), 2), _x(), _plain),
    "PatchEmbeddings": (lambda: nn.PatchEmbeddings(WIDTH, (8, 8), (4, 4)), _x(2, 3, 8, 8), _plain),
    "Embeddings": (
        lambda: nn.Embeddings(VOCABULARY, WIDTH, 16, 2, dropout=0.0),
        _ids,
        lambda module, inputs: module(inputs["ids"], inputs["cu_seqlens"]),
    ),
    "PackedLayer": (_packed_layer, _packed, lambda module, inputs: _layer(module, inputs)[0]),
    "PackedTransformer": (lambda: nn.PackedTransformer([_packed_layer(), _packed_layer()]), _packed, _layer),
    "RotaryLayer": (
        lambda: nn.RotaryTransformer([_rotary_layer()], torch_nn.LayerNorm(WIDTH), positions=16),
        _packed,
        _layer,
    ),
    "RotaryTransformer": (_rotary_transformer, _packed, _layer),
    "KnowledgeLayer": (_knowledge_layer, _entities, _knowledge),
    "KnowledgeTransformer": (
        lambda: nn.KnowledgeTransformer([_packed_layer(), _knowledge_layer(), _knowledge_layer(last=True)]),
        _entities,
        _knowledge,
    ),
    "MaskedLMHead": (lambda: nn.MaskedLMHead(WIDTH, VOCABULARY), _labelled, _masked_lm),
    "CausalLMHead": (lambda: nn.CausalLMHead(WIDTH, VOCABULARY), _labelled_sequences, _causal_lm),
    "GraphReasoner": (
        lambda: nn.GraphReasoner(6, 4, 6, 10, layers=2, path_size=8, pair_size=5, dropout=0.0),
        _x(2, 10),
        _reason,
    ),
}


def _has_parameters(make: Make) -> bool:
    with torch.device("meta"):
        return any(True for _ in make().parameters())


def module_entries() -> list[EntryPoint]:
    return [
        EntryPoint(
            name=f"nn.{name}",
            covers=(f"nn.{name}",),
            make=functools.partial(seeded, make),
            inputs=inputs,
            call=functools.partial(run_module, call),
            module=(lambda module: module) if _has_parameters(make) else None,
        )
        for name, (make, inputs, call) in MODULES.items()
    ]
