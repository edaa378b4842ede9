"""Vectors of texts from a trained model that is left as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.formats import Format, text_format
from fasttfm.models.pretrained import PretrainedModel

__all__ = ["EmbedSettings", "Embedder", "embed", "sequence_format"]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32}


class Embedder:
    """A model, where it is, with its tokenizer and settings, as an ``inference.Session``.

    Args:
        tokens_per_batch: At least one text is computed at a time.
        precision: ``"float32"``, ``"bfloat16"``, or on a CPU ``"int8"`` for 8-bit products. Vectors are fp32.
    """

    def __init__(
        self,
        model: PretrainedModel,
        tokenizer: Tokenizer,
        settings: EmbedSettings | None = None,
        *,
        tokens_per_batch: int | None = None,
        precision: str = "float32",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"embed: precision: expected {', '.join(PRECISIONS)}, got {precision!r}")
        self.session = Session(
            model,
            tokenizer,
            settings,
            dtype=PRECISIONS[precision],
            precision="int8" if precision == "int8" else None,
            max_tokens=tokens_per_batch,
        )

    @property
    def width(self) -> int:
        """The numbers of a vector."""
        return self.session.width

    def vectors(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """fp32 [width] for each text, in order; texts are read as they are needed."""
        return self.session.stream(texts)

    def token_vectors(self, texts: Iterable[str]) -> Iterator[tuple[list[int], np.ndarray]]:
        """The ids of each text's tokens, special ones included, and their vectors, fp32 [tokens, width of the layers];
        they are neither pooled nor normalized."""
        return self.session.stream_with_ids(texts, output="states")


def embed(
    model: PretrainedModel,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    settings: EmbedSettings | None = None,
    *,
    tokens_per_batch: int | None = None,
    precision: str = "float32",
    **changes: Any,
) -> Iterator[np.ndarray]:
    """A vector for each text, fp32, in order; texts are read as they are needed. A warning at the end says how many
    texts were truncated.

    Args:
        model: Where it is to run.
        settings: ``EmbedSettings()`` by default.
        tokens_per_batch, precision: As ``Embedder`` takes them.
        changes: Fields of the settings, such as ``pooling="first"``.
    """
    settings = replace(settings or EmbedSettings(), **changes)
    embedder = Embedder(model, tokenizer, settings, tokens_per_batch=tokens_per_batch, precision=precision)
    return embedder.vectors(texts)


def sequence_format(model: PretrainedModel, tokenizer: Tokenizer, max_length: int) -> Format:
    """How the model reads a text that is no task."""
    return text_format(model.config, tokenizer, max_length)
