"""``merge_adapter``: adds a LoRA adapter, as PEFT saves it, to a model's weights.

    W + scale B A        A [r, inputs], B [outputs, r], scale = alpha / r

for each linear layer or table that the adapter is for. The merged model is as fast as one without an adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    "modules_to_save": (None, []),
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


@torch.no_grad()
def merge_adapter(model: PretrainedModel, directory: str | Path) -> None:
    """Adds the adapter in ``directory`` to the weights of ``model``. Its modules have transformers' names. Raises
    CheckpointError, before any weight is changed, for an adapter that is not LoRA, or for modules that the model does
    not have."""
    path = Path(directory)
    config = read_json(path / CONFIG)
    for field, allowed in _REQUIRED.items():
        if field in config and config[field] not in allowed:
            raise CheckpointError(f"{path / CONFIG}: {field}: expected {allowed[0]!r}, got {config[field]!r}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise CheckpointError(f"{path / CONFIG}: expected numbers r and lora_alpha, got {rank!r} and {alpha!r}")
    products = _products(path / WEIGHTS, transposed=bool(config.get("fan_in_fan_out")))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    for parameter, change in _changes(model, products, path):
        parameter.add_((scale * change).to(parameter.device, parameter.dtype))


def _products(path: Path, *, transposed: bool) -> dict[str, Tensor]:
    """B A of each module, in the shape of its weight in a checkpoint, by the module's name."""
    tensors = read_tensors(path)
    products: dict[str, Tensor] = {}
    for key in tensors:
        found = _KEY.fullmatch(key)
        pair = [re.sub(r"(lora_(?:embedding_)?)[AB]", rf"\1{factor}", key) for factor in "AB"]
        if found is None or not tensors.keys() >= {*pair}:
            raise CheckpointError(f"{path}: {key}: expected a matrix of LoRA, and a second one for the same module")
        a, b = (tensors[each].float() for each in pair)
        if (a.dim(), b.dim(), a.shape[0]) != (2, 2, b.shape[-1]):
            raise CheckpointError(f"{path}: {key}: expected matrices [r, inputs] and [outputs, r]")
        module, table = found.groups()
        products[module] = (b @ a).t() if table or transposed else b @ a
    return products


def _changes(model: PretrainedModel, products: Mapping[str, Tensor], path: Path) -> list[tuple[Tensor, Tensor]]:
    """The parameters that change, each with the product of its modules; zeros for modules without an adapter."""
    names = model.names.modules or model.names
    prefix = f"{names.prefix}."
    inside = any(module.startswith(prefix) for module in products)  # of a model with a head
    wanted = {f"{module if inside else prefix + module}.weight": product for module, product in products.items()}
    changes: list[tuple[Tensor, Tensor]] = []
    for name, parameter in model.named_parameters():
        if not name.endswith(".weight") or parameter.dim() != 2:
            continue
        ours = prefix + name if model.base else name
        theirs, rule = names.find(ours)
        if wanted.keys().isdisjoint(theirs):
            continue
        rows, columns = reversed(parameter.shape) if rule.transpose else parameter.shape
        parts = {}
        for each, count in zip(theirs, rule.rows(rows), strict=True):
            parts[each] = wanted.pop(each, torch.zeros(count, columns, dtype=torch.float32, device="cpu"))
            if parts[each].shape != (count, columns):
                expected, got = (count, columns), tuple(parts[each].shape)
                raise CheckpointError(f"{path}: {each}: expected a product of shape {expected}, got {got}")
        changes.append((parameter, from_checkpoint(names, ours, parts.__getitem__)))
    if wanted:
        raise CheckpointError(f"{path}: expected modules of {type(model).__name__}, got {', '.join([*wanted][:3])}")
    return changes
