"""``patch`` and ``unpatch``."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn

from fasttfm.models.families import FAMILIES, family_of_type
from fasttfm.nn.plain import activation_name, has_own_forward
from fasttfm.patching.register import load
from fasttfm.patching.report import PatchReport

_CACHES = "_fasttfm_"  # the prefix of all attributes that patched modules have in addition
_BEFORE = "_fasttfm_attention_before"  # a patched model's attribute: the attention implementation that unpatch restores


def patch(model: nn.Module, *, remove_padding: bool | None = None, logits_in_training: bool = False) -> PatchReport:
    """Replaces the forwards of a transformers model by fasttfm's ops, in place.

    Parameters, their names, hooks and the classes' names stay: optimizers, checkpoints, Trainer and Accelerate see the
    same model. ``unpatch`` restores it.

    Args:
        model: A BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ALBERT, ELECTRA, DistilBERT, ModernBERT, EuroBERT,
            NomicBERT, MPNet or GPT-2 of transformers, with or without a head; or a module that contains such models,
            like a SentenceTransformer, a CrossEncoder of sentence-transformers, or a PEFT model.
        remove_padding: Whether layers skip padding tokens; their rows are then 0 after the layers, while in
            transformers they are undefined. True by default, except for question answering models, whose loss reads
            these rows, and for GPT-2 and MPNet, which do not support it.
        logits_in_training: By default, in training and with labels, a model with a masked LM or causal LM loss returns
            only the loss. With True it also computes logits, as transformers does.

    Returns:
        A printable report of what was changed and what was not.

    Raises:
        TypeError: For any other model.
        ValueError: For a model that is already patched.
    """
    found = _models(model)
    name = type(model).__name__
    if is_patched(model):
        raise ValueError(f"patch: model: expected one that is not patched yet, got a patched {name} (unpatch it first)")
    report = PatchReport(name)
    for inner in _transformers_models(model):
        if inner not in found:
            report.left[type(inner).__name__] = "fasttfm.patch does not know the family"
    for inner, family in found.items():
        _patch(inner, family, report, remove_padding=remove_padding, logits_in_training=logits_in_training)
    return report


def _patch(
    model: Any, family: ModuleType, report: PatchReport, *, remove_padding: bool | None, logits_in_training: bool
) -> None:
    if remove_padding is None:
        remove_padding = not type(model).__name__.endswith("ForQuestionAnswering")
    before = model.config._attn_implementation
    setattr(model, _BEFORE, before)
    if not _keeps_attention(family) and before != load("flash").NAME:  # which is fasttfm's too
        model.set_attn_implementation("fasttfm")
    table = _table(family, logits_in_training=logits_in_training)
    packed_layers = load("packing").PackedLayers
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


def unpatch(model: nn.Module) -> None:
    """Undoes ``patch``: restores transformers' class of every module, and the model's attention implementation."""
    found = _models(model)
    if not is_patched(model):
        raise ValueError(f"unpatch: model: expected a patched model, got a {type(model).__name__} that is not patched")
    originals = {ours: theirs for family in found.values() for theirs, ours in _table(family).items()}
    parts = load("parts")
    ours = [module for module in model.modules() if isinstance(module, parts.Patched)]
    wrapped = {type(module) for module in ours if type(module) not in originals or has_own_forward(module)}
    if wrapped:
        got = ", ".join(sorted(each.__name__ for each in wrapped))
        raise ValueError(f"unpatch: model: expected patched modules without wrappers around them, got {got}")
    packed_layers = load("packing").PackedLayers
    for inner, family in found.items():
        for module in inner.modules():
            if isinstance(module, packed_layers):
                del module.keeps_padding
            for name in [name for name in module.__dict__ if name.startswith(_CACHES) and name != _BEFORE]:
                del module.__dict__[name]
            module.__class__ = originals.get(type(module), type(module))
        if not _keeps_attention(family):
            inner.set_attn_implementation(getattr(inner, _BEFORE))
        delattr(inner, _BEFORE)


def is_patched(model: nn.Module) -> bool:
    """Whether a model, or anything in it, is patched."""
    patched = load("parts").Patched
    return any(isinstance(module, patched) for module in model.modules())


def _models(model: Any) -> dict[Any, ModuleType]:
    """The transformers models of known families that ``model`` is or contains, with their families."""
    load("attention")  # says what to install if transformers is missing
    found = {inner: _family(inner) for inner in _transformers_models(model)}
    known = {inner: family for inner, family in found.items() if family is not None}
    if not known:
        titles = [each.title for each in FAMILIES.values() if each.patching is not None]
        *titles, last = titles
        got = f"{type(model).__module__}.{type(model).__qualname__}"
        expected = f"a {', '.join(titles)} or {last} of transformers, or a module that holds one"
        raise TypeError(f"patch: model: expected {expected}, got {got}{_attention_hint(found)}")
    return known


def _attention_hint(models: Iterable[Any]) -> str:
    """What ``register_attention`` can do for models of other families."""
    for model in models:
        name = type(model).__name__
        if model._can_set_attn_implementation():
            call = 'fasttfm.register_attention(); model.set_attn_implementation("fasttfm")'
            return f". Its attention can run on fasttfm's kernels: {call}"
        return f". register_attention has no effect on it either: {name} does not use transformers' attention interface"
    return ""


def _transformers_models(model: Any) -> list[Any]:
    """The outermost models of transformers in a module, which may be one itself."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    children = model.children() if isinstance(model, nn.Module) else ()
    return list(dict.fromkeys(inner for child in children for inner in _transformers_models(child)))


def _family(model: Any) -> ModuleType | None:
    own = family_of_type(getattr(getattr(model, "config", None), "model_type", None))
    family = None if own is None or own.patching is None else load(own.patching)
    return family if family is not None and isinstance(model, family.MODEL) else None


def _keeps_attention(family: ModuleType) -> bool:
    """Whether transformers' models of the family do not use the attention interface."""
    return getattr(family, "KEEPS_ATTENTION", False)


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
        if not type(module).__name__.endswith("Pooler")  # which is left as a whole
        for name, child in module.named_children()
        if name in ("intermediate_act_fn", "transform_act_fn", "activation", "act") and activation_name(child) is None
    }
    for name in sorted(activations):
        left[f"activation {name}"] = "ops have no such activation; the linear layer before it is not fused either"
    adapters = sum(isinstance(getattr(module, "base_layer", None), nn.Module) for module in model.modules())
    if adapters:
        why = f"they run PEFT's code, {adapters} of them here, and the layers around them run module by module"
        left["linear layers with adapters"] = why
    if not remove_padding and any(issubclass(ours, packing.PackedLayers) for ours in family.CLASSES):
        left["padding"] = "its rows are computed, and attention gets the lengths"
    if getattr(model.config, "is_decoder", False) or getattr(model.config, "add_cross_attention", False):
        left["caches and cross-attention"] = "transformers' own code, around fasttfm's attention"
    vocabulary = model.get_output_embeddings() is not None
    if vocabulary and not isinstance(model, heads.LossHead):
        why = "requested" if logits_in_training else f"{type(model).__name__} computes it of its logits"
        left["language-modelling loss"] = why
    left["poolers and classifiers"] = "a row of each sequence or a few columns: nothing is to be gained"
    return left
