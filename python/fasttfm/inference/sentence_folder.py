"""The settings of a sentence-transformers folder: pooling, prompts, lengths and the modules after pooling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fasttfm.inference.colbert_folder import is_of_tokens, layer_file, of_modules, of_plain_folder, optional_json
from fasttfm.inference.late_interaction import LateInteraction
from fasttfm.inference.pooling import SENTENCE_POOLING, SPLADE
from fasttfm.models.checkpoint_files import CheckpointError, CheckpointReader, read_json
from fasttfm.models.directories import MODULES, module_path, read_modules
from fasttfm.models.hub import model_directory

_LEGACY = {  # older folders have one flag per pooling mode; in the order in which vectors are concatenated
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
_MAX_LENGTH = 1_000_000  # a larger model_max_length means that the tokenizer has no limit


@dataclass(frozen=True)
class SentenceFolder:
    """What a sentence-transformers folder says about its vectors; for any other folder, the defaults.

    Args:
        model: The folder of the transformer.
        pooling: Keys of ``POOLING``, whose vectors are concatenated.
        pool_prompt: Whether the tokens of a prompt are pooled too.
        after: The modules that are applied to the pooled vectors, in this order: dense layers and ``Normalize``.
        prompts: Texts that are put in front of each text, by name.
        default_prompt: The name of the prompt that is used by default.
        max_length: The maximum number of tokens of a text; None for as many as the model has positions.
        lowercase: Whether texts are lowercased first.
        token_weights: A dense layer from a token's state to its lexical weight, of bge-m3.
        late_interaction: How texts become vectors of their tokens, of ColBERT's kind.
    """

    model: Path
    pooling: tuple[str, ...] = ("mean",)
    pool_prompt: bool = True
    after: tuple[nn.Module, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    lowercase: bool = False
    token_weights: nn.Module | None = None
    late_interaction: LateInteraction | None = None

    def prompt(self, name: str | None = None) -> str:
        """The text of a prompt; without a name, the default prompt or ``""``."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ValueError(f"prompt_name: expected one of the model's prompts ({known}), got {name!r}")
        return self.prompts[name]


class Normalize(nn.Module):
    """Divides vectors by their L2 norm; a vector of zeros stays zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x, dim=-1)


def read_sentence_folder(directory: str | Path) -> SentenceFolder:
    """The settings of a directory or hub model; the defaults if it is not of sentence-transformers."""
    folder = model_directory(directory)
    listed = folder / MODULES
    if not listed.is_file():
        weights, tokens = layer_file(folder, "sparse_linear"), of_plain_folder(folder)
        return SentenceFolder(folder, token_weights=weights, late_interaction=tokens)
    modules = read_modules(listed)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if kinds[:1] == ["MLMTransformer"]:  # what a Transformer with a head was called
        kinds[0] = "Transformer"
    of_tokens = is_of_tokens(kinds)
    known = of_tokens or (kinds[:1] == ["Transformer"] and kinds[1:2] in ([], ["Pooling"], ["SpladePooling"]))
    if not known:  # a CrossEncoder has no Pooling
        expected = "expected a Transformer and then Pooling or SpladePooling"
        raise CheckpointError(f"{listed}: {expected}, got {', '.join(kinds) or 'nothing'}")
    paths = [folder / module_path(module, listed) for module in modules]
    settings = optional_json(folder / "config_sentence_transformers.json")
    if of_tokens:
        tokens = of_modules(kinds, paths, settings, lambda kind, path: _module_after(kind, path, listed))
        stated = optional_json(paths[0] / "sentence_bert_config.json").get("max_seq_length")
        return SentenceFolder(paths[0], max_length=_max_length(paths[0], stated), late_interaction=tokens)
    pooling = read_json(paths[1] / "config.json") if len(paths) > 1 else {}
    after = tuple(_module_after(kind, path, listed) for kind, path in zip(kinds[2:], paths[2:], strict=True))
    names = _pooling(pooling, paths[-1] / "config.json")
    if kinds[1:2] == ["SpladePooling"]:
        names, after = (SPLADE,), (*_activation_after(pooling, paths[1] / "config.json"), *after)
    transformer = optional_json(paths[0] / "sentence_bert_config.json")
    return SentenceFolder(
        paths[0],
        names,
        bool(pooling.get("include_prompt", True)),
        after,
        {name: text for name, text in (settings.get("prompts") or {}).items() if isinstance(text, str)},
        settings.get("default_prompt_name"),
        _max_length(paths[0], transformer.get("max_seq_length")),
        bool(transformer.get("do_lower_case", False)),
        layer_file(folder, "sparse_linear"),
        of_plain_folder(folder),
    )


class Log1p(nn.Module):
    """log(1 + x)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log1p()


def _activation_after(config: dict[str, Any], path: Path) -> tuple[nn.Module, ...]:
    """What follows on log(1 + relu(logit)), which grows with the logit, so that the maximum may be taken before."""
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy != "max":
        raise CheckpointError(f"{path}: pooling_strategy: expected max, got {strategy!r}")
    if activation not in ("relu", "log1p_relu"):
        raise CheckpointError(f"{path}: activation_function: expected relu or log1p_relu, got {activation!r}")
    return (Log1p(),) if activation == "log1p_relu" else ()


def _max_length(folder: Path, stated: int | None) -> int | None:
    """The stated length, or else the tokenizer's where that is below the model's positions."""
    if stated is not None and stated < _MAX_LENGTH:
        return int(stated)
    length = optional_json(folder / "tokenizer_config.json").get("model_max_length")
    positions = optional_json(folder / "config.json").get("max_position_embeddings") or _MAX_LENGTH
    return int(length) if length is not None and length < min(positions, _MAX_LENGTH) else None


def _pooling(config: dict[str, Any], path: Path) -> tuple[str, ...]:
    stated = config.get("pooling_mode")
    if stated is None:
        stated = [mode for key, mode in _LEGACY.items() if config.get(key)] or "mean"
    names = (stated,) if isinstance(stated, str) else tuple(stated)
    for name in names:
        if name not in SENTENCE_POOLING:
            raise CheckpointError(f"{path}: pooling_mode: expected {', '.join(SENTENCE_POOLING)}, got {name!r}")
    return tuple(SENTENCE_POOLING[name] for name in names)


def _module_after(kind: str, path: Path, listed: Path) -> nn.Module:
    if kind == "Normalize":
        return Normalize()
    if kind == "Dropout":
        return nn.Identity()
    if kind != "Dense":
        raise CheckpointError(f"{listed}: after Pooling: expected Dense, Dropout or Normalize, got {kind}")
    config = read_json(path / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        expected = f"expected {', '.join(_ACTIVATIONS)}, got {activation!r}"
        raise CheckpointError(f"{path / 'config.json'}: activation_function: {expected}")
    if config.get("use_residual"):
        raise CheckpointError(f"{path / 'config.json'}: use_residual: expected false, got true")
    reader = CheckpointReader(path)
    weights = {name: reader.tensor(name) for name in reader.files}
    try:
        linear = nn.Linear(int(config["in_features"]), int(config["out_features"]), bool(config.get("bias", True)))
        linear.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected the weights of a dense layer, got {error}") from None
    return nn.Sequential(linear, getattr(nn, activation)()).requires_grad_(False)
