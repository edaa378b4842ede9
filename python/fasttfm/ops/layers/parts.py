"""How inference on a CPU is divided over threads: into parts of whole sequences, each of which one thread runs through
all layers (kernels/layers/op.h). No thread waits between steps, and a part's activations stay in its core's caches."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# Threads fetch parts one by one, so several parts per thread even out their sizes. More rows make the GEMMs of a part
# more efficient, up to about this number.
_PARTS_PER_THREAD = 4
_LEAST_ROWS, _MOST_ROWS = 64, 512
# The longest thread may have this many times the mean of all threads. Beyond it, all threads share each step.
_MOST_IMBALANCE = 1.25


class Parts(NamedTuple):
    first_sequences: tuple[int, ...]  # of each part, and the number of sequences
    rows: int  # of the part with the most tokens
    sequences: int  # of the part with the most sequences

    def table(self, token_bytes: Sequence[int], sizes: Sequence[int]) -> array[int]:
        """For the core: ``token_bytes`` between the tokens of each buffer, and the ``sizes`` of a thread's memory."""
        count = len(self.first_sequences) - 1
        return array("q", (count, self.rows, len(token_bytes), *sizes, *token_bytes, *self.first_sequences))


def divided(boundaries: Sequence[int], threads: int) -> Parts | None:
    """The parts of packed sequences with these boundaries; None if all threads are to share each step."""
    tokens = boundaries[-1]
    if threads < 2 or boundaries[0] != 0 or tokens == 0 or len(boundaries) <= threads:
        return None
    least = min(max(-(-tokens // (threads * _PARTS_PER_THREAD)), _LEAST_ROWS), _MOST_ROWS, -(-tokens // threads))
    first_sequences = [0]
    sizes = []
    start = 0
    for sequence, end in enumerate(boundaries[1:], 1):
        if end - start >= least:
            sizes.append(end - start)
            first_sequences.append(sequence)
            start = end
    if start < tokens:
        sizes.append(tokens - start)
        first_sequences.append(len(boundaries) - 1)
    if _longest(sizes, threads) * threads > _MOST_IMBALANCE * tokens:
        return None
    first_sequences[-1] = len(boundaries) - 1  # sequences without tokens at the end
    most_sequences = max(last - first for first, last in pairwise(first_sequences))
    return Parts(tuple(first_sequences), max(sizes), most_sequences)


def _longest(sizes: Sequence[int], threads: int) -> int:
    """The tokens of the thread with the most of them, if each thread fetches the next part when it is done."""
    loads = [0] * threads
    for size in sizes:
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)
