"""The settings of folders of ColBERT, PyLate, sentence-transformers' ``MultiVectorEncoder`` and bge-m3."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fasttfm.inference.late_interaction import LateInteraction, Side
from fasttfm.models.checkpoint_files import CONFIG, CheckpointError, CheckpointReader, read_json, read_tensors
from fasttfm.models.pretrained import COLBERT, COLBERT_PROJECTION

_METADATA = "artifact.metadata"
_MASK = "MultiVectorMask"
_EXPANDED = 32  # tokens, where a folder does not say
_PYLATE = ("query_prefix", "document_prefix", "query_length", "document_length", "do_query_expansion", "skiplist_words")


def optional_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def dense_layer(path: Path) -> nn.Linear:
    """The dense layer of a file with a weight and perhaps a bias."""
    return _linear(read_tensors(path), path)


def _linear(tensors: dict[str, Any], path: Path) -> nn.Linear:
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "nothing"
        raise CheckpointError(f"{path}: expected the weight of a dense layer, and perhaps its bias, got {got}")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    linear.load_state_dict({name: tensors[name] for name in ("weight", "bias") if name in tensors}, assign=True)
    return linear.requires_grad_(False).float()


def layer_file(folder: Path, name: str) -> nn.Linear | None:
    """bge-m3's layer of that name, if the folder has its file."""
    paths = [folder / f"{name}.{kind}" for kind in ("safetensors", "pt")]
    return next((dense_layer(path) for path in paths if path.is_file()), None)


def of_plain_folder(folder: Path) -> LateInteraction | None:
    """The settings of a folder that is not of sentence-transformers; None if it is no model of late interaction."""
    projection = layer_file(folder, "colbert_linear")
    if projection is not None:  # bge-m3: all tokens but the first
        return LateInteraction((projection,), dropped=1)
    if COLBERT not in (optional_json(folder / CONFIG).get("architectures") or ()):
        return None
    reader = CheckpointReader(folder)
    if COLBERT_PROJECTION not in reader.files:
        raise CheckpointError(f"{folder}: expected {COLBERT_PROJECTION}, the projection of ColBERT, got none")
    tensors = {"weight": reader.tensor(COLBERT_PROJECTION)}
    stated = optional_json(folder / _METADATA)
    return LateInteraction(
        (_linear(tensors, reader.files[COLBERT_PROJECTION]),),
        Side(stated.get("query_token_id") or "[unused0]"),
        Side(stated.get("doc_token_id") or "[unused1]", length=stated.get("doc_maxlen")),
        expansion=stated.get("query_maxlen") or _EXPANDED,
        attends=bool(stated.get("attend_to_mask_tokens")),
        skipped=tuple(string.punctuation) if stated.get("mask_punctuation", True) else (),
    )


def of_modules(
    kinds: Sequence[str],
    paths: Sequence[Path],
    settings: dict[str, Any],
    module: Callable[[str, Path], nn.Module],
) -> LateInteraction:
    """The settings of a folder of modules without Pooling.

    Args:
        kinds, paths: Of its modules, the Transformer first.
        settings: ``config_sentence_transformers.json``.
        module: Reads a module.
    """
    stated = {**optional_json(paths[0] / "sentence_bert_config.json")}
    for name in ("query_length", "document_length", "query_expansion"):
        if settings.get(name) is not None:
            stated.setdefault(name, settings[name])
    is_pylate = any(name in settings for name in _PYLATE)
    expansion = stated.get("query_expansion")
    if expansion is None and is_pylate and settings.get("do_query_expansion") is not False:
        attends = settings.get("attend_to_expansion_tokens")
        expansion = {"attend": bool(attends), "length": settings.get("query_length") or _EXPANDED}
    expansion = expansion or {}
    if expansion.get("strategy", "fixed") != "fixed":
        where = paths[0] / "sentence_bert_config.json"
        raise CheckpointError(f"{where}: query_expansion: strategy: expected fixed, got {expansion['strategy']!r}")
    prompts = settings.get("prompts") or {}
    sides = []
    for name in ("query", "document"):
        marker = settings.get(f"{name}_prefix") or ""
        prompt = (prompts.get(name) or "").removeprefix(marker)
        sides.append(Side(marker, prompt, stated.get(f"{name}_length")))
    masks = [read_json(path / "config.json") for kind, path in zip(kinds, paths, strict=True) if kind == _MASK]
    skipped = masks[0].get("skiplist_words") if masks else settings.get("skiplist_words")
    is_version3 = settings.get("model_type") == "ColBERT"  # masks and normalization are not in the list
    if skipped is None and is_version3:
        skipped = list(string.punctuation)
    return LateInteraction(
        tuple(module(kind, path) for kind, path in zip(kinds, paths, strict=True) if kind == "Dense"),
        query=sides[0],
        document=sides[1],
        expansion=expansion.get("length"),
        fill=expansion.get("token"),
        attends=bool(expansion.get("attend")),
        skipped=tuple(skipped or ()),
        normalize=is_version3 or "Normalize" in kinds,
    )


def is_of_tokens(kinds: Sequence[str]) -> bool:
    """Whether modules compute a vector for each token."""
    return kinds[:1] == ["Transformer"] and len(kinds) > 1 and {*kinds[1:]} <= {"Dense", "Normalize", "Dropout", _MASK}
