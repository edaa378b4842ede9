"""Reads SentencePiece's ``.model`` files: a protocol buffer (sentencepiece_model.proto) of pieces and rules.

Only the fields that determine how a text is split are read, so no protocol buffer library is needed:

    1   pieces (repeated)         1 piece, string    2 score, float    3 type: 1 normal, 2 unknown, 3 control, ...
    2   trainer specification     3 model type: 1 unigram, 2 BPE, 3 word, 4 char    35 byte fallback
    3   normalizer specification  2 compiled character map    3 add a space in front    4 remove extra spaces
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.data.lines import data_error

_KINDS = {1: "unigram", 2: "bpe"}
_UNKNOWN = 2


@dataclass(frozen=True)
class SentencePieceModel:
    kind: str  # "unigram" or "bpe"
    pieces: list[tuple[str, float]]  # by id, with their scores
    unknown: int  # the id of the unknown piece
    byte_fallback: bool  # whether characters without a piece become bytes
    character_map: bytes  # the normalizer's compiled rules
    dummy_prefix: bool  # whether a space is added before a text
    single_spaces: bool  # whether leading, trailing and repeated spaces are removed


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The model of a file."""
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        trainer = dict(_fields(next((value for number, value in fields if number == 2), b"")))
        rules = dict(_fields(next((value for number, value in fields if number == 3), b"")))
        named = [(piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]) for piece in pieces]
    except OSError as error:
        raise data_error(path, "a readable file", error.strerror or str(error)) from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error):
        raise data_error(path, "a SentencePiece model", "another file") from None
    unknown = [id for id, piece in enumerate(pieces) if piece.get(3, 1) == _UNKNOWN]
    kind = trainer.get(3, 1)
    if kind not in _KINDS:
        raise data_error(
            path, "a unigram or BPE model of SentencePiece", {3: "words", 4: "letters"}.get(kind, str(kind))
        )
    if len(unknown) != 1:
        raise data_error(
            path, "a SentencePiece model with one unknown piece", f"{len(unknown)} of {len(pieces)} pieces"
        )
    return SentencePieceModel(
        _KINDS[kind],
        named,
        unknown[0],
        bool(trainer.get(35, 0)),
        rules.get(2, b""),
        bool(rules.get(3, 1)),
        bool(rules.get(4, 1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a message: a number, and an int or bytes. A truncated message raises IndexError or
    ValueError."""
    offset = 0
    while offset < len(data):
        key, offset = _varint(data, offset)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, offset = _varint(data, offset)
            yield number, value
            continue
        if wire == 2:
            size, offset = _varint(data, offset)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if number == 0 or offset + size > len(data):
            raise ValueError("no such field")
        yield number, data[offset : offset + size]
        offset += size


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
