"""``SessionReader``: the inputs of a session's calls as sequences, in windows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fasttfm.inference.batches import SortedIds, checked_ids, prefetch
from fasttfm.inference.formats import Tokens
from fasttfm.inference.input_reader import InputReader, readers_of_sides
from fasttfm.inference.network import Output
from fasttfm.inference.windows import windows


class SessionReader:
    """Reads inputs for each of a session's outputs.

    Args:
        reader: Of outputs that have no reader of their own.
    """

    def __init__(self, reader: InputReader) -> None:
        self._reader, self._of_sides = reader, readers_of_sides(reader)
        self._warned = False  # of truncated texts

    @property
    def fill(self) -> int | None:
        """The id of tokens at the end of queries that no token attends to; None without them."""
        return self._of_sides[Output.MULTI_QUERY].fill

    def read(self, inputs: Sequence[Any], output: Output) -> list[Tokens]:
        """The sequences of inputs."""
        return self._of_sides.get(output, self._reader).read(inputs)

    def read_ahead(self, inputs: Any, output: Output) -> Iterator[list[Tokens]]:
        """The sequences of inputs by windows: while one is computed, the next one is tokenized."""
        return prefetch(windows(inputs), lambda window: self.read(window, output))

    def sorted_ids(self, inputs: Sequence[Any]) -> SortedIds | None:
        """The sorted ids of inputs that are lists of ids; None for others. An object for each sequence would take
        longer than the rest."""
        return checked_ids(inputs, self._reader.max_positions, self._reader.vocabulary)

    def warn_truncated(self, sequences: Sequence[Tokens]) -> None:
        """Warns of the first truncated text; the session's ``counts`` has the number of all."""
        if self._warned:
            return
        for tokens in sequences:
            if tokens.cut:
                self._warned = True
                note = f"a text of {len(tokens.ids) + tokens.cut} tokens is truncated to {len(tokens.ids)}"
                warnings.warn(f"Session: {note}; session.counts.truncated counts further ones", stacklevel=3)
                return
