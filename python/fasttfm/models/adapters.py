"""``read_adapter`` reads a LoRA adapter, as PEFT saves it; ``merge_adapter`` adds it to a model's weights.

    W + scale B A        A [r, inputs], B [outputs, r], scale = alpha / r

for each linear layer or table that the adapter is for. The merged model is as fast as one without an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.models.checkpoint_files import CheckpointError, read_json, read_tensors
from fasttfm.models.checkpoint_names import from_checkpoint
from fasttfm.models.hub import model_directory
from fasttfm.models.pretrained import PretrainedModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The supported values of fields that change what an adapter computes.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None,),
    "trainable_token_indices": (None,),
}
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(embedding_)?[AB](?:\.weight)?")


def adapter_directory(model: str | Path, adapter: str | Path) -> Path:
    """The directory of an adapter: a folder in the model's directory, a directory, or a hub id."""
    inside = Path(model) / adapter
    return inside if (inside / CONFIG).is_file() else model_directory(adapter)


class Factors(NamedTuple):
    """LoRA's matrices of a module, and the shape of its weight in a checkpoint."""

    a: Tensor  # [r, inputs]
    b: Tensor  # [outputs, r]
    is_table: bool  # whether the module is an embedding, whose weight is [inputs, outputs]


class AdapterFile(NamedTuple):
    """An adapter in PEFT's format. Its modules have transformers' names."""

    path: Path
    scale: float
    dropout: float
    transposed: bool  # whether weights are [inputs, outputs]
    pairs: dict[str, Factors]  # by the module's name
    heads: dict[str, Tensor]  # parameters of heads that are replaced, by their names

    def heads_of(self, model: PretrainedModel) -> list[tuple[Tensor, Tensor]]:
        """The parameters of the model's head that the adapter replaces, and their values. Raises CheckpointError if the
        model has others."""
        left = dict(self.heads)
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in model.named_parameters():
            theirs, _ = model.names.find(model._full(name)) if model._head(name) else ([], None)
            if not theirs or not left.keys() >= {*theirs}:
                continue
            value = from_checkpoint(model.names, model._full(name), left.__getitem__)
            if value.shape != parameter.shape:
                shapes = f"expected shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
                raise CheckpointError(f"{self.path}: {theirs[0]}: {shapes}")
            pairs.append((parameter, value))
            for key in theirs:
                del left[key]
        if left:
            expected = f"parameters of a head of {type(model).__name__}"
            raise CheckpointError(f"{self.path}: expected {expected}, got {', '.join([*left][:3])}")
        return pairs


def read_adapter(directory: str | Path) -> AdapterFile:
    """The adapter in ``directory``. Raises CheckpointError for one that is not LoRA."""
    path = Path(directory)
    config = read_json(path / CONFIG)
    for field, allowed in _REQUIRED.items():
        if field in config and config[field] not in allowed:
            raise CheckpointError(f"{path / CONFIG}: {field}: expected {allowed[0]!r}, got {config[field]!r}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{path / CONFIG}: expected numbers r and lora_alpha, got {rank!r} and {alpha!r}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    pairs, heads = _factors(path / WEIGHTS, config.get("modules_to_save") or ())
    dropout = float(config.get("lora_dropout") or 0.0)
    return AdapterFile(path / WEIGHTS, scale, dropout, bool(config.get("fan_in_fan_out")), pairs, heads)


@torch.no_grad()
def merge_adapter(model: PretrainedModel, directory: str | Path) -> None:
    """Adds the adapter in ``directory`` to the weights of ``model``, whose head it may replace. Raises CheckpointError,
    before any weight is changed, for an adapter that is not LoRA, or for modules that the model does not have."""
    adapter = read_adapter(directory)
    products = {
        module: (b @ a).t() if is_table or adapter.transposed else b @ a
        for module, (a, b, is_table) in adapter.pairs.items()
    }
    changes, heads = _changes(model, products, adapter.path), adapter.heads_of(model)
    for parameter, change in changes:
        parameter.add_((adapter.scale * change).to(parameter.device, parameter.dtype))
    for parameter, value in heads:
        parameter.copy_(value)
    replaced = {model._head(name) for name in _names_of(model, [parameter for parameter, _ in heads])}
    model.new_heads = tuple(head for head in model.new_heads if head not in replaced)


def _names_of(model: PretrainedModel, parameters: list[Tensor]) -> list[str]:
    ids = set(map(id, parameters))
    return [name for name, parameter in model.named_parameters() if id(parameter) in ids]


def _factors(path: Path, saved: Sequence[str]) -> tuple[dict[str, Factors], dict[str, Tensor]]:
    """The matrices of each module, by its name, and the tensors of ``saved`` modules."""
    tensors = read_tensors(path)
    factors: dict[str, Factors] = {}
    heads: dict[str, Tensor] = {}
    for key in tensors:
        match = _KEY.fullmatch(key)
        name = key.removeprefix("base_model.model.")
        if match is None and any(name.startswith(f"{module}.") or f".{module}." in name for module in saved):
            heads[name] = tensors[key]
            continue
        pair = [re.sub(r"(lora_(?:embedding_)?)[AB]", rf"\1{factor}", key) for factor in "AB"]
        if match is None or not tensors.keys() >= {*pair}:
            raise CheckpointError(f"{path}: {key}: expected a matrix of LoRA, and a second one for the same module")
        a, b = (tensors[key_of_factor].float() for key_of_factor in pair)
        if (a.dim(), b.dim(), a.shape[0]) != (2, 2, b.shape[-1]):
            raise CheckpointError(f"{path}: {key}: expected matrices [r, inputs] and [outputs, r]")
        module, table = match.groups()
        factors[module] = Factors(a, b, bool(table))
    return factors, heads


def _changes(model: PretrainedModel, products: Mapping[str, Tensor], path: Path) -> list[tuple[Tensor, Tensor]]:
    """The parameters that change, each with the product of its modules; zeros for modules without an adapter."""
    names = model.names.modules or model.names
    prefix = f"{names.prefix}."
    inside = any(module.startswith(prefix) for module in products)  # of a model with a head
    by_name = {f"{module if inside else prefix + module}.weight": product for module, product in products.items()}
    changes: list[tuple[Tensor, Tensor]] = []
    for name, parameter in model.named_parameters():
        if not name.endswith(".weight") or parameter.dim() != 2:
            continue
        ours = prefix + name if model.base else name
        theirs, rule = names.find(ours)
        if by_name.keys().isdisjoint(theirs):
            continue
        rows, columns = reversed(parameter.shape) if rule.transpose else parameter.shape
        parts = {}
        for key, count in zip(theirs, rule.rows(rows), strict=True):
            parts[key] = by_name.pop(key, torch.zeros(count, columns, dtype=torch.float32, device="cpu"))
            if parts[key].shape != (count, columns):
                expected, got = (count, columns), tuple(parts[key].shape)
                raise CheckpointError(f"{path}: {key}: expected a product of shape {expected}, got {got}")
        changes.append((parameter, from_checkpoint(names, ours, parts.__getitem__)))
    if by_name:
        raise CheckpointError(f"{path}: expected modules of {type(model).__name__}, got {', '.join([*by_name][:3])}")
    return changes
