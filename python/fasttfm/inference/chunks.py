"""Vectors of the chunks of long texts, each computed by itself or of tokens that have read what surrounds them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fasttfm.inference.pooling import Layers
from fasttfm.inference.session import Session

_TEXTS = 256  # which are computed together


def chunk_vectors(session: Session, texts: Iterable[str], size: int, *, late: bool = False) -> Iterator[np.ndarray]:
    """Yields the vectors [chunks, width] of each text's chunks of ``size`` tokens, special tokens and prompt not
    counted; the last chunk may be shorter. Nothing is truncated.

    Args:
        late: Late chunking (Günther et al., 2024): the model reads a whole text, and the states of a chunk's tokens are
            averaged. Texts longer than the model reads are split into windows of as many chunks as it reads. By default
            the model reads each chunk by itself.
    """
    reader = session.reader
    if reader.tokenizer is None or reader.form is None:
        raise ValueError("chunk_vectors: session: expected one with a tokenizer, got one without")
    before = [*reader.form.first, *reader.tokenizer.encode(reader.with_prompt(""))]
    after = list(reader.form.last)
    room = session.max_length - len(before) - len(after)
    if not isinstance(size, int) or not 1 <= size <= room:
        raise ValueError(f"chunk_vectors: size: expected a whole number from 1 to {room} tokens, got {size!r}")
    if late and (session.network.pooling != ("mean",) or session.network.layers != Layers()):
        got = f"{session.settings.pooling!r} of layers {session.settings.layers!r}"
        raise ValueError(f"chunk_vectors: late: expected pooling='mean' of the last layer, got {got}")
    window = room // size * size if late else size
    source = iter(texts)
    while group := list(itertools.islice(source, _TEXTS)):
        ids = reader.tokenizer.encode_batch([reader.with_prompt(text) for text in group])
        ids = [tokens[len(before) - len(reader.form.first) :] for tokens in ids]  # without the prompt
        pieces = [[tokens[start : start + window] for start in range(0, len(tokens) or 1, window)] for tokens in ids]
        sequences = [[*before, *piece, *after] for chunks in pieces for piece in chunks]
        results = iter(session.encode(sequences, output="states" if late else "vectors"))
        for chunks in pieces:
            rows = [next(results) for _ in chunks]
            yield _late(session, rows, chunks, len(before), size) if late else np.stack(rows)


def _late(
    session: Session, states: Sequence[np.ndarray], pieces: Sequence[Sequence[int]], skipped: int, size: int
) -> np.ndarray:
    """The vectors of the chunks of one text's windows."""
    means = []
    for rows, piece in zip(states, pieces, strict=True):
        if not piece:  # a text without tokens: what the model reads around it
            means.append(rows.mean(0))
        tokens = rows[skipped : skipped + len(piece)]
        means += [tokens[start : start + size].mean(0) for start in range(0, len(piece), size)]
    return session.finished(np.stack(means))
