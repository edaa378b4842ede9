"""The features of examples, and packed batches of them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.inference.formats import Format, Tokens
from fasttfm.models.text_model import LAST_STATES

__all__ = [
    "Feature",
    "Format",
    "TaskBatch",
    "Tokens",
    "by_budget",
    "by_count",
    "checksum",
    "collate",
    "keep_arrays",
    "truncation",
]
LENGTH_STEP = 64  # max_seqlen is rounded up to a multiple of it, so that few different values occur


# ---- batches ---------------------------------------------------------------------------------------------------------


@dataclass
class Feature:
    """The unit of a model's input: one sequence, or one for each choice. The task defines ``target``."""

    example: int  # the index of its example
    sequences: list[Tokens]
    target: Any = None
    # int32 [tokens] each: ids and segments of all sequences (keep_arrays)
    arrays: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)

    @property
    def cut(self) -> int:
        """How many tokens of its texts were truncated."""
        return sum(sequence.cut for sequence in self.sequences)

    def content(self) -> Iterator[bytes]:
        """The bytes of all that a training reads of it, for checksums."""
        for sequence in self.sequences:
            yield np.asarray(sequence.ids, np.int32).tobytes()
            yield np.asarray(sequence.segments, np.int32).tobytes()
        yield repr(self.target).encode()


def checksum(features: Iterable[Any]) -> str:
    """A checksum of all that a training reads of the features, which have ``content``."""
    checksum = 0
    for content in (content for feature in features for content in feature.content()):
        checksum = zlib.crc32(content, checksum)
    return f"{checksum:08x}"


@dataclass
class TaskBatch:
    """Packed sequences, without padding."""

    features: list[Feature]
    input_ids: Tensor  # int64 [T]
    token_type_ids: Tensor | None  # int64 [T]
    cu_seqlens: Tensor  # int32 [sequences + 1]
    max_seqlen: int  # an upper bound of the sequences' lengths
    targets: dict[str, Tensor]  # the arguments with which the model computes its loss
    count: float = 0.0  # the number of terms of which that loss is the mean
    others: dict[str, Any] = field(default_factory=dict)  # more inputs of the model, which ``to`` moves too

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    def inputs(self) -> dict[str, Any]:
        """The model's arguments, without targets."""
        names = ("input_ids", "token_type_ids", "cu_seqlens", "max_seqlen")
        arguments = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**arguments, **LAST_STATES, **self.others}

    def to(self, device: torch.device | str, non_blocking: bool = True) -> TaskBatch:
        return self._apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TaskBatch:
        return self._apply(lambda tensor: tensor.pin_memory())

    def _apply(self, change: Callable[[Any], Any]) -> TaskBatch:
        return replace(
            self,
            input_ids=change(self.input_ids),
            token_type_ids=None if self.token_type_ids is None else change(self.token_type_ids),
            cu_seqlens=change(self.cu_seqlens),
            targets={name: change(target) for name, target in self.targets.items()},
            others={name: change(other) for name, other in self.others.items()},
        )


def collate(features: Sequence[Feature], segments: bool = True) -> TaskBatch:
    """A batch of these features, without targets."""
    lengths = [len(sequence.ids) for feature in features for sequence in feature.sequences]
    longest = max(lengths, default=0)
    return TaskBatch(
        list(features),
        _concatenated(features, _IDS),
        _concatenated(features, _SEGMENTS) if segments else None,
        torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
        -(-longest // LENGTH_STEP) * LENGTH_STEP,
        {},
    )


_IDS, _SEGMENTS = (Tokens._fields.index(name) for name in ("ids", "segments"))


def _concatenated(features: Sequence[Feature], part: int) -> Tensor:
    """int64 [T]: a part of all features' tokens. Arrays take a fraction of the time of lists."""
    arrays = [feature.arrays[part] for feature in features if feature.arrays is not None]
    if arrays and len(arrays) == len(features):
        return torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    lists: list[Any] = [sequence[part] for feature in features for sequence in feature.sequences]
    total = sum(map(len, lists))
    return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(lists), np.int64, total))


def keep_arrays(features: Sequence[Feature]) -> None:
    """Keeps the ids and segments of features as arrays too, for those of which batches are made many times."""
    ids, segments = (_concatenated(features, part).numpy().astype(np.int32) for part in (_IDS, _SEGMENTS))
    first = 0
    for feature in features:
        end = first + sum(len(sequence.ids) for sequence in feature.sequences)
        feature.arrays = ids[first:end], segments[first:end]
        first = end


def truncation(features: Sequence[Feature], max_length: int) -> str | None:
    """A message about how many examples were truncated; None if all fit."""
    cut = [feature for feature in features if feature.cut]
    if not cut:
        return None
    longest = max(len(sequence.ids) + sequence.cut for feature in cut for sequence in feature.sequences)
    some, all_of_them = (len({feature.example for feature in part}) for part in (cut, features))
    return (
        f"{some:,} of {all_of_them:,} examples have more than {max_length} tokens, the "
        f"longest {longest:,}, and are truncated: {sum(feature.cut for feature in cut):,} tokens are ignored"
    )


def by_count(features: Iterable[Feature], count: int) -> Iterator[list[Feature]]:
    """Groups of ``count`` consecutive features."""
    rest = iter(features)
    while group := list(itertools.islice(rest, count)):
        yield group


def by_budget(features: Iterable[Feature], tokens: int) -> Iterator[list[Feature]]:
    """Groups of consecutive features with at most ``tokens`` tokens each; a longer feature is a group by itself."""
    group: list[Feature] = []
    size = 0
    for feature in features:
        if group and size + feature.tokens > tokens:
            yield group
            group, size = [], 0
        group.append(feature)
        size += feature.tokens
    if group:
        yield group
