"""``EmbedSettings``: how a text becomes a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fasttfm.inference.late_interaction import LateInteraction
from fasttfm.inference.quantization import WITH_RANGES, check_precision, check_ranges, quantize_vectors, stored_width
from fasttfm.inference.sentence_folder import Normalize, SentenceFolder, read_sentence_folder


@dataclass(frozen=True)
class EmbedSettings:
    """How a text becomes a vector. ``EmbedSettings.of_folder`` reads the settings of a sentence-transformers folder.

    Args:
        pooling: ``"mean"`` over a text's tokens, special tokens included, ``"first"`` ([CLS]), ``"last"``, ``"max"``,
            ``"mean-sqrt"`` (the sum divided by the square root of the length), ``"weighted"`` (a mean with the weights
            1, 2, 3, ...), or several of them, whose vectors are concatenated; or ``"splade"``, of a model with a
            masked-LM head: log(1 + relu(logit)) of each word of the vocabulary, the largest over the tokens.
        layers: As ``Layers.of`` reads it: ``"last"``, ``"second-to-last"``, ``"embeddings"``, ``"sum:4"``,
            ``"mean:4"``, ``"concat:4"`` or ``"weights:0.1,0.3,0.6"``. A number N concatenates the last N layers;
            ``"sum:all"`` sums the embeddings and all layers.
        normalize: Whether vectors are divided by their L2 norm.
        prompt: A text that is put in front of each text.
        pool_prompt: Whether the prompt's tokens are pooled too.
        max_length: The maximum number of tokens; longer texts are truncated. By default the model's positions.
        lowercase: Whether texts are lowercased first, whatever the tokenizer does.
        after: Modules that are applied to the pooled vectors, before ``dimensions`` and ``normalize``.
        dimensions: How many of their first elements vectors keep, of a model that was trained for it (Matryoshka
            embeddings); all by default. Vectors that a sentence-transformers folder normalizes are normalized again.
        precision: The type of the vectors: ``"float32"``, ``"float16"``, ``"int8"``, ``"uint8"``, or ``"binary"`` or
            ``"ubinary"`` for their signs, eight to a byte (``inference.quantization.quantize_vectors``).
        ranges: [2, width], the smallest and the largest value of each element, which int8 and uint8 need:
            ``inference.quantization.vector_ranges`` of the vectors of some texts.
        token_weights: Of the output ``"sparse"``: a layer that gives each token's state its weight, bge-m3's
            ``sparse_linear``. By default the output has SPLADE's weights, of a model with a masked-LM head.
        late_interaction: Of the outputs ``"multi"`` and ``"multi-query"``: how texts become vectors of their tokens.
    """

    pooling: str | Sequence[str] = "mean"
    layers: Any = "last"
    normalize: bool = False
    prompt: str = ""
    pool_prompt: bool = True
    max_length: int | None = None
    lowercase: bool = False
    after: tuple[nn.Module, ...] = ()
    dimensions: int | None = None
    precision: str = "float32"
    ranges: np.ndarray | None = field(default=None, compare=False)
    token_weights: nn.Module | None = None
    late_interaction: LateInteraction | None = None

    def __post_init__(self) -> None:
        check_precision("EmbedSettings: precision", self.precision)

    @classmethod
    def of_folder(cls, folder: SentenceFolder | str | Path, *, prompt_name: str | None = None) -> EmbedSettings:
        """The settings of a sentence-transformers folder, with which vectors are those of
        ``SentenceTransformer.encode``; the defaults for any other folder."""
        read = folder if isinstance(folder, SentenceFolder) else read_sentence_folder(folder)
        return cls(
            pooling=read.pooling,
            prompt=read.prompt(prompt_name),
            pool_prompt=read.pool_prompt,
            max_length=read.max_length,
            lowercase=read.lowercase,
            token_weights=read.token_weights,
            late_interaction=read.late_interaction,
            after=read.after,
        )

    def check_width(self, width: int) -> None:
        """Raises ValueError if vectors of this width cannot have the precision."""
        if self.precision in WITH_RANGES:
            check_ranges(f"EmbedSettings: {self.precision}", self.ranges, width)

    def stored_width(self, width: int) -> int:
        """How many numbers a vector of ``width`` elements has in the precision."""
        return stored_width(self.precision, width)

    def in_precision(self, vectors: np.ndarray) -> np.ndarray:
        """fp32 vectors in the precision."""
        return vectors if self.precision == "float32" else quantize_vectors(vectors, self.precision, self.ranges)


class FirstElements(nn.Module):
    """The first ``count`` elements of vectors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        if not isinstance(self.count, int) or not 1 <= self.count <= width:
            raise ValueError(f"EmbedSettings: dimensions: expected a whole number from 1 to {width}, got {self.count}")
        return x[..., : self.count].contiguous()


def modules_after_pooling(settings: EmbedSettings) -> nn.Sequential:
    """What turns pooled states into vectors."""
    modules, normalize = [*settings.after], settings.normalize
    if settings.dimensions is not None:
        normalize = normalize or any(isinstance(each, Normalize) for each in modules)
        modules.append(FirstElements(settings.dimensions))
    return nn.Sequential(*modules, *([Normalize()] if normalize else []))


def check_limits(**limits: Any) -> None:
    """Raises ValueError if one of a session's limits is no number, or too small."""
    for name, value in limits.items():
        least = 0 if name == "max_graphs" else 1
        if not isinstance(value, int) or value < least:
            raise ValueError(f"Session: {name}: expected a number from {least} on, got {value!r}")


def check_types(device: torch.device, stated: torch.dtype | None, dtype: torch.dtype, precision: str | None) -> None:
    """Raises ValueError if the device has no GEMMs for a session's dtype and precision. ``dtype`` is the ``stated`` one
    or a default."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"Session: dtype: expected a floating-point type such as torch.float32, got {dtype!r}")
    if precision not in (None, "auto", "int8", "fp8"):
        raise ValueError(f"Session: precision: expected None, 'auto', 'int8' or 'fp8', got {precision!r}")
    if precision == "auto" and stated is not None:
        raise ValueError(f"Session: dtype: expected None with precision='auto', which chooses it, got {name}")
    if precision == "int8" and (device.type != "cpu" or dtype != torch.float32):
        raise ValueError(f"Session: precision: expected float32 on a CPU with 'int8', got {name} on {device}")
    if device.type == "cpu" and dtype == torch.float16:
        expected = "expected float32 or bfloat16 on a CPU, or precision='int8'"
        raise ValueError(f"Session: dtype: {expected}, got float16, whose GEMMs are many times slower there")
