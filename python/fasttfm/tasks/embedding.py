"""Vectors of texts from a trained model that is left as it is."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.models.families import family_of_type
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.distillation_recipes import encode
from fasttfm.tasks.families import base_of, longest_input
from fasttfm.tasks.finetuning import format_of
from fasttfm.tasks.inputs import Feature, Format, by_budget, collate
from fasttfm.tasks.pooling import POOLING, Layers, Tokens, pooling_names
from fasttfm.tasks.sentence_folder import Normalize, SentenceFolder, read_sentence_folder

_CHUNK = 256  # texts that are tokenized at a time
PRECISIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class EmbedSettings:
    """How a text becomes a vector. ``EmbedSettings.of_folder`` has those of a sentence-transformers folder.

    Args:
        pooling: ``"mean"`` of a text's tokens, special ones included, ``"first"`` ([CLS]), ``"last"``, ``"max"``,
            ``"mean-sqrt"`` (the sum over the root of the number), ``"weighted"`` (a mean with the weights 1, 2, 3,
            ...), or several, whose vectors are concatenated.
        layers: As ``Layers.of`` reads it: ``"last"``, ``"second-to-last"``, ``"sum:4"``, ``"mean:4"``, ``"concat:4"``
            or ``"weights:0.1,0.3,0.6"``. A number N concatenates the last N layers.
        normalize: Whether vectors get length 1.
        prompt: Put in front of each text.
        pool_prompt: Whether the prompt's tokens are pooled too.
        max_length: Tokens; the rest of a text is left out. By default as many as the model has positions for.
        lowercase: Whether texts are lowercased first, whatever the tokenizer does.
        after: Modules that are applied to the pooled vectors, before ``normalize``.
    """

    pooling: str | Sequence[str] = "mean"
    layers: Any = "last"
    normalize: bool = False
    prompt: str = ""
    pool_prompt: bool = True
    max_length: int | None = None
    lowercase: bool = False
    after: tuple[nn.Module, ...] = ()

    @classmethod
    def of_folder(cls, folder: SentenceFolder | str | Path, *, prompt_name: str | None = None) -> EmbedSettings:
        """Those of a sentence-transformers folder: vectors are then those of ``SentenceTransformer.encode``. For any
        other folder, the defaults."""
        found = folder if isinstance(folder, SentenceFolder) else read_sentence_folder(folder)
        return cls(
            pooling=found.pooling,
            prompt=found.prompt(prompt_name),
            pool_prompt=found.pool_prompt,
            max_length=found.max_length,
            lowercase=found.lowercase,
            after=found.after,
        )

    @property
    def is_normalized(self) -> bool:
        """Whether every vector has length 1."""
        return self.normalize or bool(self.after and isinstance(self.after[-1], Normalize))


@dataclass
class TextCounts:
    """What has been read so far."""

    texts: int = 0
    empty: int = 0  # texts without a token, whose vector is 0
    truncated: int = 0
    left_out: int = 0  # tokens of truncated texts

    def note(self, max_length: int) -> str:
        """What a reader of the vectors has to know; empty if every text is there as a whole."""
        parts = []
        if self.truncated:
            texts = f"{self.truncated:,} of {self.texts:,} texts have more than {max_length} tokens and are truncated"
            parts.append(f"{texts} ({self.left_out:,} tokens are left out)")
        if self.empty:
            parts.append(f"{self.empty:,} of {self.texts:,} texts have no token, and a vector of zeros")
        return "; ".join(parts)


class Embedder:
    """A model, where it is, with its tokenizer and settings. ``counts`` says what it has read.

    Args:
        tokens_per_batch: At least one text is computed at a time.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast. Vectors are fp32.
    """

    def __init__(
        self,
        model: PretrainedModel,
        tokenizer: Tokenizer,
        settings: EmbedSettings | None = None,
        *,
        tokens_per_batch: int = 16384,
        precision: str = "float32",
    ) -> None:
        settings = settings or EmbedSettings()
        self.settings = replace(settings, pooling=pooling_names(settings.pooling), layers=Layers.of(settings.layers))
        base, longest = base_of(model), longest_input(model.config)
        self.settings.layers.check(len(base.encoder.order))
        if tokens_per_batch < 1:
            raise ValueError(f"embed: tokens_per_batch: expected a number from 1 on, got {tokens_per_batch}")
        if precision not in PRECISIONS:
            raise ValueError(f"embed: precision: expected {' or '.join(PRECISIONS)}, got {precision!r}")
        self.max_length = longest if settings.max_length is None else settings.max_length
        if not 3 <= self.max_length <= longest:
            got = self.max_length
            raise ValueError(f"embed: max_length: expected 3 to the model's {longest} positions, got {got}")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.form = sequence_format(model, tokenizer, self.max_length)
        self.tokens_per_batch, self.precision = tokens_per_batch, precision
        self.counts = TextCounts()
        self._device = next(model.parameters()).device
        self._after = nn.Sequential(*settings.after, *([Normalize()] if settings.normalize else [])).to(self._device)
        prompt = tokenizer.encode(self._written(""))
        self._skipped = 0 if settings.pool_prompt or not prompt else len(self.form.first) + len(prompt)
        self._state_width = self.settings.layers.widths * base.encoder.in_order()[0].width

    @property
    def width(self) -> int:
        """The numbers of a vector."""
        with torch.inference_mode():
            pooled = torch.zeros(1, self._state_width * len(self.settings.pooling), device=self._device)
            return int(self._after(pooled).shape[-1])

    def vectors(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """fp32 [width] for each text, in order; texts are read as they are needed."""
        for group, states, cu_seqlens in self._states(texts):
            with torch.inference_mode():
                found = iter(())
                if states is not None:
                    tokens = Tokens(states, cu_seqlens, self._skipped)
                    pooled = torch.cat([POOLING[name](tokens) for name in self.settings.pooling], -1)
                    found = iter(self._after(pooled).cpu().numpy())
            yield from (next(found) if feature.tokens else np.zeros(self.width, np.float32) for feature in group)

    def token_vectors(self, texts: Iterable[str]) -> Iterator[tuple[list[int], np.ndarray]]:
        """The ids of each text's tokens, special ones included, and their vectors, fp32 [tokens, width of the layers];
        they are neither pooled nor normalized."""
        for group, states, cu_seqlens in self._states(texts):
            found: Iterator[np.ndarray] = iter(())
            if states is not None:
                found = (piece.cpu().numpy() for piece in states.tensor_split(cu_seqlens[1:-1].cpu()))
            for feature in group:
                none = np.zeros((0, self._state_width), np.float32)
                yield feature.sequences[0].ids, next(found) if feature.tokens else none

    def _states(self, texts: Iterable[str]) -> Iterator[tuple[list[Feature], Tensor | None, Any]]:
        """Batches of texts with the joined states [T, ...] of those that have tokens, and their boundaries."""
        for group in by_budget(self._features(texts), self.tokens_per_batch):
            filled = [feature for feature in group if feature.tokens]
            if not filled:
                yield group, None, None
                continue
            batch = collate(filled, segments=self.form.segments).to(self._device)
            enabled = self.precision == "bfloat16"
            with torch.inference_mode(), torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=enabled):
                encoded = encode(self.model, batch, hidden_states=True)
                assert encoded.hidden_states is not None
                states = self.settings.layers.join(encoded.hidden_states)
            yield group, states, encoded.batch.cu_seqlens.long()
        if note := self.counts.note(self.max_length):
            warnings.warn(note, stacklevel=2)

    def _features(self, texts: Iterable[str]) -> Iterator[Feature]:
        source = iter(texts)
        while chunk := [self._written(text) for text in itertools.islice(source, _CHUNK)]:
            for ids in self.tokenizer.encode_batch(chunk):
                feature = Feature(self.counts.texts, [self.form.one(ids)])
                self.counts.texts += 1
                self.counts.empty += not feature.tokens
                self.counts.truncated += feature.cut > 0
                self.counts.left_out += feature.cut
                yield feature

    def _written(self, text: str) -> str:
        text = self.settings.prompt + text
        return text.lower() if self.settings.lowercase else text


def embed(
    model: PretrainedModel,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    settings: EmbedSettings | None = None,
    *,
    tokens_per_batch: int = 16384,
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
    """How the model reads a text that is no task: a causal model's has no additional tokens."""
    family = family_of_type(model.config.model_type)
    assert family is not None
    if family.causal:
        return Format([], [], [], max_length, segments=False)
    return format_of(family, model.config, tokenizer, max_length)
