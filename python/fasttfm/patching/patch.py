"""``patch`` and ``unpatch``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from fasttfm.models.families import FAMILIES, family_of_type
from fasttfm.nn.plain import activation_name, has_own_forward
from fasttfm.patching.register import load
from fasttfm.patching.report import PatchReport

_BEFORE = "_fasttfm_attention_before"  # a patched model's attribute: the attention that unpatch gives back


def patch(model: nn.Module, *, remove_padding: bool | None = None, logits_in_training: bool = False) -> PatchReport:
    """Replaces the forwards of a transformers model by fasttfm's ops, in place.

    Parameters, their names, hooks and the classes' names stay: optimizers, checkpoints, Trainer and Accelerate see the
    same model. ``unpatch`` restores it.

    Args:
        model: A BERT, RoBERTa, ALBERT, ELECTRA, DistilBERT or GPT-2 of transformers, with or without a head.
        remove_padding: Whether layers skip padding tokens: their rows are 0 after the layers, where transformers has
            meaningless numbers. By default yes, except in models for question answering, whose loss reads these rows.
            Not for GPT-2.
        logits_in_training: By default a model with a masked-LM or causal LM loss returns, in training and with labels,
            only the loss. With True it computes logits as transformers does.

    Returns:
        A report of what was changed and what was not, to be printed.

    Raises:
        TypeError: For a model that is none of these.
        ValueError: For a model that is patched already.
    """
    family = _family(model)
    if is_patched(model):
        name = type(model).__name__
        raise ValueError(f"patch: model: expected one that is not patched yet, got a patched {name} (unpatch it first)")
    if remove_padding is None:
        remove_padding = not type(model).__name__.endswith("ForQuestionAnswering")
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("fasttfm")  # type: ignore[operator]
    setattr(model, _BEFORE, before)
    table = _table(family, logits_in_training=logits_in_training)
    packed_layers = load("packing").PackedLayers
    report = PatchReport(type(model).__name__)
    for name, module in model.named_modules():
        ours = table.get(type(module))
        if ours is not None and has_own_forward(module):
            report.left[f"{type(module).__name__} {name}".strip()] = "something else has replaced its forward"
        elif ours is not None:
            module.__class__ = ours
            report.changed[ours.does] = report.changed.get(ours.does, 0) + 1
            if isinstance(module, packed_layers):
                module.keeps_padding = not remove_padding
    report.left |= _left(model, family, remove_padding=remove_padding, logits_in_training=logits_in_training)
    return report


def unpatch(model: nn.Module) -> None:
    """Takes ``patch`` back: every module has transformers' class again, and the model its attention implementation."""
    family = _family(model)
    if not is_patched(model):
        raise ValueError(f"unpatch: model: expected a patched model, got a {type(model).__name__} that is not patched")
    originals = {ours: theirs for theirs, ours in _table(family).items()}
    parts = load("parts")
    ours = [module for module in model.modules() if isinstance(module, parts.Patched)]
    wrapped = {type(module) for module in ours if type(module) not in originals or has_own_forward(module)}
    if wrapped:
        got = ", ".join(sorted(each.__name__ for each in wrapped))
        raise ValueError(f"unpatch: model: expected patched modules without wrappers around them, got {got}")
    packed_layers, forget = load("packing").PackedLayers, load("stack").forget
    for module in model.modules():
        if isinstance(module, packed_layers):
            del module.keeps_padding
            forget(module)
        module.__class__ = originals.get(type(module), type(module))
    model.set_attn_implementation(getattr(model, _BEFORE))  # type: ignore[operator]
    delattr(model, _BEFORE)


def is_patched(model: nn.Module) -> bool:
    """Whether a model, or anything in it, is patched."""
    patched = load("parts").Patched
    return any(isinstance(module, patched) for module in model.modules())


def _family(model: Any) -> ModuleType:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    known = family_of_type(kind)
    family = load(known.patching) if known is not None and known.patching is not None else None
    if family is None or not isinstance(model, family.MODEL):
        *titles, last = (each.title for each in FAMILIES.values() if each.patching is not None)
        got = f"{type(model).__module__}.{type(model).__qualname__}"
        raise TypeError(f"patch: model: expected a {', '.join(titles)} or {last} of transformers, got {got}")
    return family


def _table(family: ModuleType, *, logits_in_training: bool = False) -> dict[type, type[Any]]:
    """transformers' classes, and the ones that replace them."""
    parts, heads = load("parts"), load("heads")
    table: dict[type, type[Any]] = {nn.LayerNorm: parts.LayerNorm}
    for ours in family.CLASSES:
        if not (logits_in_training and issubclass(ours, heads.LossHead)):
            table[next(base for base in ours.__mro__ if not issubclass(base, parts.Patched))] = ours
    return table


def _left(model: Any, family: ModuleType, *, remove_padding: bool, logits_in_training: bool) -> dict[str, str]:
    """The parts of this model that are not patched, and why."""
    heads, packing = load("heads"), load("packing")
    left: dict[str, str] = dict(family.LEFT)
    activations = {
        type(child).__name__
        for module in model.modules()
        for name, child in module.named_children()
        if name in ("intermediate_act_fn", "transform_act_fn", "activation", "act") and activation_name(child) is None
    }
    for name in sorted(activations):
        left[f"activation {name}"] = "ops have no such activation; the linear layer before it is not fused either"
    if not remove_padding and any(issubclass(ours, packing.PackedLayers) for ours in family.CLASSES):
        left["padding"] = "its rows are computed, and attention is told the lengths"
    if getattr(model.config, "is_decoder", False) or getattr(model.config, "add_cross_attention", False):
        left["caches and cross-attention"] = "transformers' own code, around fasttfm's attention"
    vocabulary = model.get_output_embeddings() is not None
    if vocabulary and not isinstance(model, heads.LossHead):
        why = "requested" if logits_in_training else f"{type(model).__name__} computes it of its logits"
        left["language-modelling loss"] = why
    left["poolers and classifiers"] = "a row of each sequence or a few columns: nothing is to be gained"
    return left
