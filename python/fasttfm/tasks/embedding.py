"""Vectors of texts from a trained model that is left as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.texts import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.models.families import family_of_type
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import Encoded
from fasttfm.tasks.distillation_recipes import encode
from fasttfm.tasks.families import base_of, longest_input
from fasttfm.tasks.finetuning import format_of
from fasttfm.tasks.inputs import Feature, Format, by_budget, collate

POOLING = ("mean", "first", "last")


def embed(
    model: PretrainedModel,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    pooling: str = "mean",
    layers: int = 1,
    max_length: int | None = None,
    tokens_per_batch: int = 16384,
) -> Iterator[np.ndarray]:
    """A vector for each text, fp32, in order; texts are read as they are needed.

    Args:
        model: Where it is to run.
        pooling: The mean of a text's tokens, special ones included, or its first ([CLS]) or last token.
        layers: Number of last layers whose hidden states are concatenated: a vector is that many times as wide as the
            model.
        max_length: Tokens; the rest of a text is left out. By default as many as the model has positions for.
    """
    if pooling not in POOLING:
        raise ValueError(f"embed: pooling: expected one of {', '.join(POOLING)}, got {pooling!r}")
    depth, longest = len(base_of(model).encoder.order), longest_input(model.config)
    if not 1 <= layers <= depth:
        raise ValueError(f"embed: layers: expected 1 to the model's {depth}, got {layers}")
    if max_length is not None and not 3 <= max_length <= longest:
        raise ValueError(f"embed: max_length: expected 3 to the model's {longest} positions, got {max_length}")
    if tokens_per_batch < 1:
        raise ValueError(f"embed: tokens_per_batch: expected a number from 1 on, got {tokens_per_batch}")
    form = _format(model, tokenizer, max_length or longest)
    groups = by_budget(_features(texts, tokenizer, form), tokens_per_batch)
    return _vectors(model.eval(), groups, form, pooling, layers)


def _vectors(
    model: PretrainedModel, groups: Iterable[list[Feature]], form: Format, pooling: str, layers: int
) -> Iterator[np.ndarray]:
    device = next(model.parameters()).device
    for group in groups:
        with torch.inference_mode():
            encoded = encode(model, collate(group, segments=form.segments).to(device), hidden_states=True)
            yield from _pooled(encoded, pooling, layers).float().cpu().numpy()


def _pooled(encoded: Encoded, pooling: str, layers: int) -> Tensor:
    """[sequences, layers * C]"""
    assert encoded.hidden_states is not None
    x = torch.cat(encoded.hidden_states[-layers:], -1)
    boundaries = encoded.batch.cu_seqlens.long()
    if pooling == "mean":
        mean: Tensor = torch.segment_reduce(x.float(), "mean", offsets=boundaries)
        return mean
    return x.index_select(0, boundaries[:-1] if pooling == "first" else boundaries[1:] - 1)


def _features(texts: Iterable[str], tokenizer: Tokenizer, form: Format) -> Iterator[Feature]:
    for index, text in enumerate(texts):
        feature = Feature(index, [form.one(tokenizer.encode(text))])
        if feature.tokens == 0:
            raise DataError(f"embed: texts: expected tokens in every text, got none in text {index + 1}")
        yield feature


def _format(model: PretrainedModel, tokenizer: Tokenizer, max_length: int) -> Format:
    family = family_of_type(model.config.model_type)
    assert family is not None
    if family.causal:
        return Format([], [], [], max_length, segments=False)
    return format_of(family, model.config, tokenizer, max_length)
