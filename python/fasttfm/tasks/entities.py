"""Entities of texts by GLiNER: opens a model with its tokenizer, and yields a record for each text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.models.directories import checkpoint_directory
from fasttfm.models.gliner import GLiNER
from fasttfm.models.gliner_config import GLiNERConfig
from fasttfm.models.hub import GLINER_CONFIG
from fasttfm.train.distributed import device_named

_WINDOW = 1024  # how many texts are sorted by length together


def is_gliner(name: str | Path) -> bool:
    """Whether a directory has a model of GLiNER."""
    return (Path(name) / GLINER_CONFIG).is_file()


def load_gliner(
    name: str | Path, *, tokenizer: str | Path | None = None, device: str | None = None, precision: str | None = None
) -> GLiNER:
    """Opens a directory or hub model. Its tokenizer is that of its directory, otherwise that of the encoder which its
    configuration names.

    Args:
        tokenizer: The directory or file of another tokenizer.
        precision: By default ``"bfloat16"`` on a GPU and ``"float32"`` on a CPU.
    """
    where = device_named(device)
    path = checkpoint_directory(name)
    source: Any = tokenizer
    if source is None and not (path / "tokenizer.json").is_file():
        source = path if any(path.glob("*.model")) else GLiNERConfig.from_pretrained(path).model_name
    read = None if source is None else load_tokenizer(source)
    dtype = getattr(torch, precision or ("bfloat16" if where.type == "cuda" else "float32"))
    return GLiNER.from_pretrained(path, tokenizer=read, dtype=dtype, device=where)


def records(model: GLiNER, source: Iterable[Any], labels: Sequence[str], **options: Any) -> Iterator[dict[str, Any]]:
    """A record for each text, with its entities. Texts, or objects with a field ``text``, are read lazily."""
    texts = (_text(number, value) for number, value in enumerate(source, 1))
    while window := list(itertools.islice(texts, _WINDOW)):
        found = model.predict_entities(window, labels, **options)
        yield from ({"text": text, "entities": entities} for text, entities in zip(window, found, strict=True))


def _text(number: int, value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError(f"text {number}: expected a text or an object with a field text, got {value!r:.60}")
    return text
