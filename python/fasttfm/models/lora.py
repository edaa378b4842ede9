"""LoRA adapters of models: trained by ``add_adapter`` or ``load_adapter``, saved in PEFT's format by ``save_adapter``.

    W + scale B A        A [r, inputs], B [outputs, r], scale = alpha / r

An adapter is for modules of a checkpoint, such as query, key and value; where one linear layer of ours computes
several of them, each has matrices of its own. ``adapters.py`` adds an adapter to weights instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from fasttfm._atomic_files import atomic_write, write_json
from fasttfm.models.adapters import CONFIG, WEIGHTS, AdapterFile, read_adapter
from fasttfm.models.checkpoint_files import CheckpointError
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn import PackedLayer
from fasttfm.nn.lora import AdaptedLinear, LoraLinear, Matrices
from fasttfm.ops.layers.lora import LINEARS

_A, _B = ".lora_a", ".lora_b"


class Target(NamedTuple):
    """A linear layer that may have an adapter."""

    name: str  # of the module
    parent: torch.nn.Module
    linear: str  # its name in the parent
    modules: Sequence[str]  # the names in checkpoints of what it computes
    blocks: tuple[tuple[int, int], ...]  # the outputs of each of them
    swapped: bool  # whether the checkpoint has the two halves of the outputs in the other order


def targets_of(model: PretrainedModel) -> Iterator[Target]:
    """The linear layers of a model: those of its transformer layers, poolers and heads."""
    names = model.names.modules or model.names
    prefix = f"{model.names.prefix}."
    tied = {name.removesuffix(".weight") for name in model.tied()}
    for name, parent in model.named_modules():
        for linear, module in parent.named_children():
            if not isinstance(module, (torch.nn.Linear, AdaptedLinear)) or f"{name}.{linear}" in tied:
                continue
            full = f"{name}.{linear}".removeprefix(".")
            theirs, rule = names.find(model._full(f"{full}.weight"))
            modules = [name_in_file.removesuffix(".weight") for name_in_file in theirs]
            if model.base:
                modules = [module.removeprefix(prefix) for module in modules]
            ends = [0]
            for count in rule.rows(module.out_features):
                ends.append(ends[-1] + count)
            yield Target(full, parent, linear, modules, (*pairwise(ends),), rule.swapped)


def add_adapter(
    model: PretrainedModel,
    rank: int = 16,
    *,
    alpha: float | None = None,
    targets: Sequence[str] = LINEARS,
    dropout: float = 0.0,
    rslora: bool = False,
) -> None:
    """Freezes all parameters of a model and adds a LoRA adapter, whose parameters are trained, to its layers.

    Args:
        model: The model. The results are the same at first, because B is 0.
        rank: r; each module of ``targets`` gets matrices [r, inputs] and [outputs, r] in fp32.
        alpha: The update is multiplied by ``alpha / r``; twice r by default.
        targets: Linear layers: ``qkv``, ``out``, ``up`` and ``down``, or modules of the checkpoint by the ends of their
            names, such as ``query`` and ``value``.
        dropout: Dropout probability of the updates' inputs. Layers with it are computed module by module in training.
        rslora: Whether the update is multiplied by ``alpha / sqrt(r)`` instead.
    """
    if rank < 1:
        raise ValueError(f"add_adapter: rank: expected at least 1, got {rank}")
    scale = (2 * rank if alpha is None else alpha) / (rank**0.5 if rslora else rank)
    chosen = _chosen(model, targets)
    model.requires_grad_(False)
    for target, blocks in chosen:
        linear: Any = target.parent._modules[target.linear]
        added = LoraLinear(linear, rank, scale=scale, blocks=blocks, dropout=dropout)
        setattr(target.parent, target.linear, added.train(model.training))


def _chosen(model: PretrainedModel, targets: Sequence[str]) -> list[tuple[Target, Any]]:
    """The linear layers that ``targets`` name, and the blocks of each that get an adapter."""
    unused, chosen = set(targets), []
    known: set[str] = set(LINEARS)
    for target in targets_of(model):
        _check_free(model, target)
        is_named = isinstance(target.parent, PackedLayer) and target.linear in targets
        named = [
            block
            for module, block in zip(target.modules, target.blocks, strict=True)
            if any(f".{module}".endswith(f".{suffix}") for suffix in targets)
        ]
        known |= {module.rpartition(".")[2] for module in target.modules}
        unused -= {target.linear} if is_named else set()
        unused -= {suffix for suffix in targets for module in target.modules if f".{module}".endswith(f".{suffix}")}
        blocks = target.blocks if is_named else tuple(named)
        if blocks:
            if target.swapped and len(blocks) != len(target.blocks):
                raise ValueError(f"add_adapter: targets: expected whole linear layers of {type(model).__name__}")
            chosen.append((target, blocks))
    if unused or not chosen:
        got = ", ".join(sorted(unused)) or "none"
        raise ValueError(f"add_adapter: targets: expected some of {', '.join(sorted(known))}, got {got}")
    return chosen


def _check_free(model: PretrainedModel, target: Target) -> None:
    if isinstance(target.parent._modules[target.linear], AdaptedLinear):
        expected = "a model without an adapter (merge it by models.merge_added_adapter)"
        raise ValueError(f"add_adapter: model: expected {expected}, got one in {target.name}")


def adapters_in(model: PretrainedModel) -> list[tuple[Target, LoraLinear]]:
    """The linear layers that have a trained adapter."""
    linears = ((target, target.parent._modules[target.linear]) for target in targets_of(model))
    return [(target, module) for target, module in linears if isinstance(module, LoraLinear)]


def merge_added_adapter(model: PretrainedModel) -> None:
    """Adds a trained adapter to the weights, and removes it: the model has its former modules again."""
    for target, module in adapters_in(model):
        module.merge()
        setattr(target.parent, target.linear, module.linear())


# ---- files -----------------------------------------------------------------------------------------------------------


def matrices_of(model: PretrainedModel, adapter: AdapterFile) -> dict[str, tuple[Target, Matrices]]:
    """The matrices that an adapter has for each linear layer, by its name. Raises CheckpointError for others."""
    pairs, matrices = dict(adapter.pairs), {}
    prefix = f"{model.names.prefix}."
    inside = any(module.startswith(prefix) for module in pairs)
    for target in targets_of(model):
        blocks, a, b = [], [], []
        for module, block in zip(target.modules, target.blocks, strict=True):
            name = module.removeprefix(prefix) if not inside else module if not model.base else prefix + module
            pair = pairs.pop(name, None)
            if pair is None:
                continue
            inputs: Any = target.parent._modules[target.linear]
            expected = ((len(pair.a), inputs.in_features), (block[1] - block[0], len(pair.a)))
            if (tuple(pair.a.shape), tuple(pair.b.shape)) != expected:
                got = f"{tuple(pair.a.shape)} and {tuple(pair.b.shape)}"
                raise CheckpointError(f"{adapter.path}: {module}: expected matrices {expected}, got {got}")
            blocks.append(block)
            a.append(pair.a)
            b.append(pair.b.roll(len(pair.b) // 2, 0) if target.swapped else pair.b)
        if blocks:
            matrices[target.name] = (target, Matrices(tuple(blocks), tuple(a), tuple(b), adapter.scale))
    if pairs:
        known = f"linear modules of {type(model).__name__}'s layers"
        raise CheckpointError(f"{adapter.path}: expected {known}, got {', '.join([*pairs][:3])}")
    return matrices


def load_adapter(model: PretrainedModel, directory: str | Path, *, dropout: float | None = None) -> None:
    """Adds the adapter in a folder of PEFT's format, whose training continues. All other parameters are frozen; those
    of a head that the folder has are loaded.

    Args:
        dropout: As ``add_adapter``'s; that of the folder by default.
    """
    adapter = read_adapter(directory)
    matrices_by_name = matrices_of(model, adapter)
    for target, _ in matrices_by_name.values():
        _check_free(model, target)
    heads = adapter.heads_of(model)
    model.requires_grad_(False)
    p = adapter.dropout if dropout is None else dropout
    for target, matrices in matrices_by_name.values():
        linear: Any = target.parent._modules[target.linear]
        rank = len(matrices.a[0])
        added = LoraLinear(linear, rank, scale=matrices.scale, blocks=matrices.blocks, dropout=p)
        added.load(matrices)
        setattr(target.parent, target.linear, added.train(model.training))
    with torch.no_grad():
        for parameter, value in heads:
            parameter.copy_(value)


def adapter_tensors(model: PretrainedModel) -> dict[str, Tensor]:
    """The tensors of a trained adapter by PEFT's names."""
    tensors = {}
    for target, module in adapters_in(model):
        blocks, a, b, _ = module.matrices()
        for block, of_a, of_b in zip(blocks, a, b, strict=True):
            of_b = of_b.roll(len(of_b) // 2, 0) if target.swapped else of_b
            name = f"base_model.model.{target.modules[target.blocks.index(block)]}"
            for factor, value in (("A", of_a), ("B", of_b)):
                tensors[f"{name}.lora_{factor}.weight"] = value.detach().cpu().clone()
    return tensors


def save_adapter(model: PretrainedModel, directory: str | Path, *, heads: Sequence[str] = ()) -> None:
    """Writes a trained adapter in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        heads: The names of the head's parameters that were trained, too.
    """
    adapters = adapters_in(model)
    if not adapters:
        raise ValueError(f"save_adapter: model: expected one with an adapter, got {type(model).__name__} without")
    tensors = adapter_tensors(model)
    modules = sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors})
    parameters = dict(model.named_parameters())
    of_head = model.checkpoint_tensors({name: parameters[name].detach().cpu().contiguous() for name in heads})
    tensors |= {f"base_model.model.{name}": value for name, value in of_head.items()}
    rank, scale = adapters[0][1].rank, adapters[0][1].scale
    config: Mapping[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": adapters[0][1].dropout,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": any(rule.transpose for rule in model.names.rules),
        "target_modules": modules,
        "modules_to_save": sorted({model._head(name) for name in heads}) or None,
    }
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with atomic_write(path / WEIGHTS) as partial:
        save_file(tensors, partial, metadata={"format": "pt"})
    write_json(path / CONFIG, config)
