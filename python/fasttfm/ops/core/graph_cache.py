"""``GraphCache``: which CUDA graphs are captured, kept and evicted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
_DECAY_INTERVAL = 4096  # after this many lookups all counts are halved
_FIRST_DELAY = 64  # lookups after a value could not be made


@dataclass
class GraphCounts:
    """What a cache has done so far."""

    replayed: int = 0
    captured: int = 0
    evicted: int = 0


class Entry(Generic[Value]):
    """A key that was looked up in a cache, and its value, if it has one."""

    __slots__ = ("last", "lookups", "value")

    def __init__(self) -> None:
        self.value: Value | None = None
        self.lookups = 0  # in the recent past
        self.last = 0  # the number of the cache's last lookup of it


class GraphCache(Generic[Value]):
    """A bounded cache whose values are made when their key has been looked up ``lookups`` times.

    A full cache evicts the least recently used value, but only for a key that was looked up more often in the recent
    past. Otherwise keys that take turns, more than fit, would evict each other on every lookup.

    After a value could not be made, none is made during the next lookups: ``_FIRST_DELAY`` of them, and four times as
    many after each further failure in a row.
    """

    def __init__(self, limit: int, lookups: int = 2) -> None:
        self._limit, self._min_lookups = limit, lookups
        self._seen: dict[Hashable, Entry[Value]] = {}
        self._kept: dict[Hashable, Entry[Value]] = {}  # those with a value
        self._lookups = 0
        self._resume_at, self._delay = 0, _FIRST_DELAY  # lookups
        self.counts = GraphCounts()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[Any], Value]) -> Value | None:
        """The value of a key; None if the key is not in the cache and not admitted yet. What ``make`` raises is
        raised."""
        entry = self._seen.get(key)
        if entry is None:
            entry = self._seen[key] = Entry()
        if self.use(entry) is None and self._admits(entry):
            self._resume_at = self._lookups + self._delay
            self._delay *= 4
            entry.value = make(key)
            self._resume_at, self._delay = 0, _FIRST_DELAY
            self._kept[key] = entry
            self.counts.captured += 1
            self.counts.replayed += 1
        return entry.value

    def kept(self, key: Hashable) -> Entry[Value] | None:
        """The entry of a key that has a value, for ``use``. This does not count as a lookup."""
        return self._kept.get(key)

    def use(self, entry: Entry[Value]) -> Value | None:
        """Looks up the value of an entry, which may have been evicted since."""
        self._lookups += 1
        if self._lookups % _DECAY_INTERVAL == 0:
            self._decay()
        entry.lookups += 1
        entry.last = self._lookups
        if entry.value is not None:
            self.counts.replayed += 1
        return entry.value

    def clear(self) -> None:
        for key in list(self._kept):
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        self._kept.pop(key).value = None

    def _decay(self) -> None:
        for entry in self._seen.values():
            entry.lookups //= 2
        self._seen = {key: entry for key, entry in self._seen.items() if entry.lookups > 0} | self._kept

    def _admits(self, candidate: Entry[Value]) -> bool:
        """Whether the cache has, or makes, room for the value of an entry."""
        if self._limit < 1 or candidate.lookups < self._min_lookups or self._lookups < self._resume_at:
            return False
        if len(self._kept) >= self._limit:
            oldest = min(self._kept, key=lambda key: self._kept[key].last)
            if candidate.lookups <= self._kept[oldest].lookups:
                return False
            self._drop(oldest)
            self.counts.evicted += 1
        return True
