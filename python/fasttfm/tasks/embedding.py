"""Vectors of texts from a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.formats import Format, text_format
from fasttfm.inference.sparse import SparseVector
from fasttfm.models.pretrained import PretrainedModel

__all__ = ["EmbedSettings", "Embedder", "embed", "sequence_format"]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.float32, "auto": None}


class Embedder:
    """An ``inference.Session`` of a model, on the model's device.

    Args:
        tokens_per_batch: The maximum number of tokens in a batch; a longer text is a batch by itself.
        precision: ``"float32"``, ``"bfloat16"``, on a CPU ``"int8"`` for int8 GEMMs, or ``"auto"`` (``Session``).
            Vectors are fp32.
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
            precision=precision if precision in ("int8", "auto") else None,
            max_tokens=tokens_per_batch,
        )

    @property
    def width(self) -> int:
        """The number of elements of a vector."""
        return self.session.width

    def vectors(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """Yields fp32 [width] for each text, in order; texts are read lazily."""
        return self.session.stream(texts)

    def sparse_vectors(self, texts: Iterable[str]) -> Iterator[SparseVector]:
        """Yields the weights of words for each text, in order."""
        return self.session.stream(texts, output="sparse")

    def token_vectors(self, texts: Iterable[str]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Yields the ids of each text's tokens, special tokens included, and their vectors, fp32 [tokens, width of the
        layers], which are neither pooled nor normalized."""
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
    """Yields an fp32 vector for each text, in order; texts are read lazily. A warning at the end says how many texts
    were truncated.

    Args:
        model: The model, on the device where it is to run.
        settings: ``EmbedSettings()`` by default.
        tokens_per_batch, precision: As ``Embedder`` takes them.
        changes: Fields of the settings, such as ``pooling="first"``.
    """
    settings = replace(settings or EmbedSettings(), **changes)
    embedder = Embedder(model, tokenizer, settings, tokens_per_batch=tokens_per_batch, precision=precision)
    return embedder.vectors(texts)


def sequence_format(model: PretrainedModel, tokenizer: Tokenizer, max_length: int) -> Format:
    """The model's format of plain text."""
    return text_format(model.config, tokenizer, max_length)
