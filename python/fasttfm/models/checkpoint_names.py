"""The names of parameters in checkpoints that differ from ours, and tensors that are concatenated or transposed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """A module or parameter of ours and its names in a checkpoint. ``*`` is a placeholder for a number.

    If there are several names, our rows are divided between them, as those of ``qkv`` between query, key and value:
    equally, or in proportion to ``shares``. ``transpose`` is for checkpoints with matrices [inputs, outputs],
    ``swapped`` for those with the two halves of our rows in the other order. With ``heads``, a checkpoint has the
    columns of its matrices by head: [rows, heads, columns of a head].
    """

    ours: str
    theirs: Sequence[str]
    transpose: bool = False
    shares: Sequence[int] = ()
    swapped: bool = False
    heads: int = 0

    def rows(self, total: int) -> list[int]:
        """The number of rows of each name, of ours."""
        shares = self.shares or [1] * len(self.theirs)
        return [total * share // sum(shares) for share in shares]

    def names(self, ours: str) -> list[str] | None:
        """The checkpoint's names of a parameter of this rule's module; None if it belongs to another module."""
        match = re.fullmatch(re.escape(self.ours).replace(r"\*", r"(\d+)") + r"((?:\..*)?)", ours)
        if match is None:
            return None
        *numbers, rest = match.groups()
        names = []
        for name in self.theirs:
            for number in numbers:
                name = name.replace("*", number, 1)
            names.append(name + rest)
        return names

    def pattern(self) -> str:
        """A regular expression for all checkpoint names of this rule."""
        patterns = (re.escape(name).replace(r"\*", r"\d+") for name in self.theirs)
        return rf"(?:{'|'.join(patterns)})(?:\..*)?"


def rule(ours: str, *theirs: str, **options: Any) -> Rule:
    return Rule(ours, theirs, **options)


@dataclass(frozen=True)
class Names:
    """The names of a family's parameters. Rules of the base model leave out its prefix."""

    prefix: str  # of the base model inside models with a head, here and in checkpoints
    base: Sequence[Rule]
    heads: Sequence[Rule] = ()
    ignored: Sequence[str] = ()  # regular expressions of names of buffers that are not read
    former_prefix: str = ""  # the prefix in older checkpoints
    modules: Names | None = None  # the names of transformers' modules, if they are not those of checkpoints
    optional: Sequence[str] = ("pooler",)  # parts of the base model that not every model with a head has

    @cached_property
    def rules(self) -> list[Rule]:
        """All rules, for names of models with a head."""

        def inside(name: str) -> str:
            return f"{self.prefix}.{name}"

        base = [
            replace(rule, ours=inside(rule.ours), theirs=[inside(name) for name in rule.theirs]) for rule in self.base
        ]
        return [*base, *self.heads]

    def find(self, ours: str) -> tuple[list[str], Rule]:
        for candidate in self.rules:
            names = candidate.names(ours)
            if names is not None:
                return names, candidate
        raise KeyError(f"no rule names {ours}")

    def known(self, theirs: str) -> bool:
        """Whether some model of the family has a parameter of this name."""
        return any(re.fullmatch(candidate.pattern(), theirs) for candidate in self.rules)

    def is_ignored(self, theirs: str) -> bool:
        return any(re.fullmatch(pattern, theirs) for pattern in self.ignored)


def untied(names: Names, unused: str) -> Names:
    """The names where the decoder is not tied to the word table: it has a bias of its own, and that of the head, which
    matches ``unused``, is not read."""
    heads = [head for head in names.heads if head.ours != "lm_head.decoder.bias"]
    return replace(names, heads=heads, ignored=(*names.ignored, unused))


def to_checkpoint(names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors with our names (of a model with a head), such as parameters or gradients, to the
    checkpoint's."""
    converted: dict[str, Tensor] = {}
    for ours, tensor in tensors.items():
        theirs, matching = names.find(ours)
        whole = tensor.roll(len(tensor) // 2, 0) if matching.swapped else tensor
        pieces = whole.split(matching.rows(len(whole))) if len(theirs) > 1 else (whole,)
        pieces = [piece.t() if matching.transpose and piece.dim() == 2 else piece for piece in pieces]
        pieces = [piece.unflatten(1, (matching.heads, -1)) if matching.heads else piece for piece in pieces]
        converted.update(zip(theirs, pieces, strict=True))
    return converted


def from_checkpoint(names: Names, ours: str, read: Callable[[str], Tensor]) -> Tensor:
    """Our tensor, from the checkpoint's tensors."""
    theirs, matching = names.find(ours)
    pieces = [read(name).flatten(1) if matching.heads else read(name) for name in theirs]
    pieces = [piece.t().contiguous() if matching.transpose and piece.dim() == 2 else piece for piece in pieces]
    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return whole.roll(len(whole) // 2, 0) if matching.swapped else whole


def checkpoint_shapes(names: Names, ours: str, shape: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """The shape that each of a parameter's tensors in the checkpoint must have."""
    theirs, matching = names.find(ours)
    rows, *columns = shape
    sizes = [(of_one, *columns) for of_one in matching.rows(rows)]
    sizes = [size[::-1] if matching.transpose and len(size) == 2 else size for size in sizes]
    sizes = [(size[0], matching.heads, size[1] // matching.heads) if matching.heads else size for size in sizes]
    return dict(zip(theirs, sizes, strict=True))
