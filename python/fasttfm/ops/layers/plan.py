"""The steps of a stack of layers, forward and backward, and where their tensors lie in memory.

All tensors are proportional to the number of tokens, so that a plan counts bytes per token and serves any batch. A
tensor that the backward reads is kept; another one is in scratch memory, from the step that writes it to the last one
that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fasttfm.ops.layers import steps
from fasttfm.ops.layers.backward import Backward
from fasttfm.ops.layers.dead_steps import without_dead_steps
from fasttfm.ops.layers.encoding import EncodedSteps, encode, in_buffer
from fasttfm.ops.layers.forward import Forward
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.spec import Specs


class Plan(NamedTuple):
    """The steps of both directions, and their encoding for the core."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]  # empty without training
    words: EncodedSteps
    backward_parts: tuple[EncodedSteps | steps.OtherAttentionBackward, ...]  # in order
    places: Mapping[str, int]  # the words of the tensors that steps of these parts name
    kept: int  # bytes per token, like the following
    scratch: int
    backward_scratch: int
    owner: str | None  # the rule whose steps read what a session keeps (few_tokens.py)


@functools.lru_cache(maxsize=256)
def plan(specs: Specs, situation: Situation) -> Plan:
    """The plan for layers in a situation."""
    forward = Forward(specs, situation)
    backward = without_dead_steps(Backward(forward).steps, situation.frozen) if situation.training else []
    read_later = {name for step in backward for name in steps.names_in(step)}
    written = {name for step in forward.steps for name in steps.written_by(step)}
    sizes = forward.sizes
    kept = [name for name in sizes if name in read_later and name in written]
    places, kept_bytes = _in_order(kept, sizes), sum(map(sizes.__getitem__, kept))
    scratch, scratch_bytes = placed(forward.steps, sizes, {*kept})
    words = encode(forward.steps, {**in_buffer("kept", places), **in_buffer("scratch", scratch)})
    later, later_bytes = placed(backward, sizes, {*kept})
    every = {**in_buffer("kept", places), **in_buffer("scratch", later)}
    parts = _parts(backward, every)
    others = [name for part in parts if not isinstance(part, EncodedSteps) for name in steps.names_in(part)]
    named = {name: every[name] for name in others if name in every}
    ends = (kept_bytes, scratch_bytes, later_bytes, forward.owner)
    return Plan(tuple(forward.steps), tuple(backward), words, parts, named, *ends)


def _parts(backward: list[Any], places: Mapping[str, int]) -> tuple[EncodedSteps | steps.OtherAttentionBackward, ...]:
    """Encodes the steps between those that the core does not run."""
    parts: list[EncodedSteps | steps.OtherAttentionBackward] = []
    first = 0
    for number, step in enumerate(backward):
        if isinstance(step, steps.OtherAttentionBackward):
            parts += [encode(backward[first:number], places), step]
            first = number + 1
    return (*parts, encode(backward[first:], places))


def _in_order(names: Iterable[str], sizes: dict[str, int]) -> dict[str, int]:
    """Offsets of tensors one after the other."""
    places, end = {}, 0
    for name in names:
        places[name] = end
        end += sizes[name]
    return places


def placed(sequence: Sequence[Any], sizes: dict[str, int], others: set[str]) -> tuple[dict[str, int], int]:
    """Offsets of the tensors of the steps that are not among the ``others``, and the end of the last one: the largest
    first, each at the lowest offset at which it overlaps none that is in use at the same time."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(sequence):
        for name in steps.names_in(step):
            if name in sizes and name not in others:
                first.setdefault(name, number)
                last[name] = number
    places: dict[str, int] = {}
    end = 0
    for name in sorted(first, key=lambda name: (-sizes[name], first[name])):
        meeting = sorted(
            (places[other], places[other] + sizes[other])
            for other in places
            if first[other] <= last[name] and first[name] <= last[other]
        )
        offset = 0
        for start, stop in meeting:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, stop)
        places[name] = offset
        end = max(end, offset + sizes[name])
    return places, end
