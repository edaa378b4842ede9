"""``Tokenization``: reads the texts of requests that arrive at the same time by one call of the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, NamedTuple

from fasttfm.inference.formats import Tokens
from fasttfm.serve.texts import TextReader

_SHORT = 2048  # characters
_MOST = 65536  # characters of one call of the tokenizer


Done = Callable[[list[Tokens] | Exception], None]  # gets the sequences, or the error, in the event loop


class _Reading(NamedTuple):
    """The inputs of a request."""

    items: Sequence[Any]
    texts: list[str]
    truncate: bool
    left: bool
    done: Done


class Tokenization:
    """Texts of requests on their way to a tokenizer, which releases the GIL and reads several texts on several cores.

    Short requests that reach the event loop in one pass of it are read together, in a thread of their own, so that they
    do not wait for longer ones in the pool. A single short text is read in the loop: the tokenizer reads one text in
    the thread that calls it, but several in threads that all its calls share. Only the event loop calls the methods.
    """

    def __init__(self, pool: Executor) -> None:
        self._long, self._short = pool, ThreadPoolExecutor(1, thread_name_prefix="fasttfm-tokenize-short")
        self._waiting: dict[TextReader, list[_Reading]] = {}

    def close(self) -> None:
        self._short.shutdown(wait=False)

    def add(
        self,
        reader: TextReader,
        items: Sequence[Any],
        done: Done,
        *,
        prompt: str = "",
        truncate: bool = True,
        left: bool = False,
        only: bool = False,
    ) -> None:
        """Reads the sequences of inputs (``TextReader.read``), and calls ``done`` with them.

        Args:
            only: Whether no other request is in flight, which would have to wait.
        """
        reading = _Reading(items, reader.texts(items, prompt), truncate, left, done)
        if sum(map(len, reading.texts)) > _SHORT:
            self._read_in(self._long, reader, [reading])
        elif only:
            self._read_short(reader, [reading])
        else:
            if not self._waiting:
                asyncio.get_running_loop().call_soon(self._read_waiting)
            self._waiting.setdefault(reader, []).append(reading)

    def _read_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for reader, group in waiting.items():
            self._read_short(reader, group)

    def _read_short(self, reader: TextReader, group: list[_Reading]) -> None:
        if len(group) == 1 and len(group[0].texts) <= 1:
            _deliver(group, _read(reader, group))
        else:
            self._read_in(self._short, reader, group)

    def _read_in(self, pool: Executor, reader: TextReader, group: list[_Reading]) -> None:
        reading = asyncio.get_running_loop().run_in_executor(pool, _read, reader, group)
        reading.add_done_callback(lambda reading: None if reading.cancelled() else _deliver(group, reading.result()))


def characters_of(items: Sequence[Any]) -> int:
    """The characters of texts and pairs; ids count one each."""
    return sum(sum(map(len, item)) if isinstance(item, tuple) else len(item) for item in items)


def _read(reader: TextReader, group: list[_Reading]) -> list[list[Tokens] | Exception]:
    """The sequences of each request, or its error."""
    try:
        encoded = iter(_encode(reader, [text for reading in group for text in reading.texts]))
    except Exception as error:
        # Of one text: its request gets the error, and the others their sequences.
        return [error] if len(group) == 1 else [_read(reader, [reading])[0] for reading in group]
    results: list[list[Tokens] | Exception] = []
    for items, texts, truncate, left, _ in group:
        ids = [next(encoded) for _ in texts]
        try:
            results.append(reader.sequences(items, ids, truncate=truncate, left=left))
        except Exception as error:
            results.append(error)
    return results


def _encode(reader: TextReader, texts: list[str]) -> list[list[int]]:
    """The ids of texts, by calls of a bounded size, because calls in other threads wait for the same cores. A longer
    text is a call by itself, which leaves these cores to them."""
    encoded: list[list[int]] = []
    first = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters > _MOST and index > first:
            encoded += reader.encode(texts[first:index])
            first, characters = index, len(text)
    return encoded + reader.encode(texts[first:])


def _deliver(group: list[_Reading], results: list[list[Tokens] | Exception]) -> None:
    for reading, result in zip(group, results, strict=True):
        reading.done(result)
