"""The names of parameters in checkpoints that differ from ours, and tensors that are concatenated or transposed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """A module or parameter of ours and its names in a checkpoint. ``*`` is a placeholder for a number.

    If there are several names, our rows are divided between them, as those of ``qkv`` between query, key and value:
    equally, or in proportion to ``shares``. ``transpose`` is for checkpoints with matrices [inputs, outputs],
    ``swapped`` for those with the two halves of our rows in the other order.
    """

    ours: str
    theirs: Sequence[str]
    transpose: bool = False
    shares: Sequence[int] = ()
    swapped: bool = False

    def rows(self, total: int) -> list[int]:
        """The number of rows of each name, of ours."""
        shares = self.shares or [1] * len(self.theirs)
        return [total * share // sum(shares) for share in shares]

    def names(self, ours: str) -> list[str] | None:
        """The checkpoint's names of a parameter of this rule's module; None if it belongs to another module."""
        found = re.fullmatch(re.escape(self.ours).replace(r"\*", r"(\d+)") + r"((?:\..*)?)", ours)
        if found is None:
            return None
        *numbers, rest = found.groups()
        names = []
        for name in self.theirs:
            for number in numbers:
                name = name.replace("*", number, 1)
            names.append(name + rest)
        return names

    def pattern(self) -> str:
        """A regular expression for all checkpoint names of this rule."""
        each = (re.escape(name).replace(r"\*", r"\d+") for name in self.theirs)
        return rf"(?:{'|'.join(each)})(?:\..*)?"


def rule(ours: str, *theirs: str, transpose: bool = False, shares: Sequence[int] = (), swapped: bool = False) -> Rule:
    return Rule(ours, theirs, transpose, shares, swapped)


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
            replace(each, ours=inside(each.ours), theirs=[inside(name) for name in each.theirs]) for each in self.base
        ]
        return [*base, *self.heads]

    def find(self, ours: str) -> tuple[list[str], Rule]:
        for each in self.rules:
            names = each.names(ours)
            if names is not None:
                return names, each
        raise KeyError(f"no rule names {ours}")

    def known(self, theirs: str) -> bool:
        """Whether some model of the family has a parameter of this name."""
        return any(re.fullmatch(each.pattern(), theirs) for each in self.rules)

    def is_ignored(self, theirs: str) -> bool:
        return any(re.fullmatch(pattern, theirs) for pattern in self.ignored)


def untied(names: Names, unused: str) -> Names:
    """The names where the decoder is not tied to the word table: it has a bias of its own, and that of the head, which
    matches ``unused``, is not read."""
    heads = [each for each in names.heads if each.ours != "lm_head.decoder.bias"]
    return replace(names, heads=heads, ignored=(*names.ignored, unused))


def to_checkpoint(names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors with our names (of a model with a head), such as parameters or gradients, to the
    checkpoint's."""
    found: dict[str, Tensor] = {}
    for ours, tensor in tensors.items():
        theirs, each = names.find(ours)
        whole = tensor.t() if each.transpose and tensor.dim() == 2 else tensor
        whole = whole.roll(len(whole) // 2, 0) if each.swapped else whole
        pieces = whole.split(each.rows(len(whole))) if len(theirs) > 1 else (whole,)
        found.update(zip(theirs, pieces, strict=True))
    return found


def from_checkpoint(names: Names, ours: str, read: Callable[[str], Tensor]) -> Tensor:
    """Our tensor, from the checkpoint's tensors."""
    theirs, each = names.find(ours)
    pieces = [read(name) for name in theirs]
    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    whole = whole.roll(len(whole) // 2, 0) if each.swapped else whole
    return whole.t().contiguous() if each.transpose and whole.dim() == 2 else whole


def checkpoint_shapes(names: Names, ours: str, shape: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """The shape that each of a parameter's tensors in the checkpoint must have."""
    theirs, each = names.find(ours)
    size = tuple(shape)
    if each.transpose and len(size) == 2:
        size = (size[1], size[0])
    return {name: (rows, *size[1:]) for name, rows in zip(theirs, each.rows(size[0]), strict=True)}
