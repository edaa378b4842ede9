"""16-bit copies of fp32 parameters, which an optimizer writes in the pass that changes the parameters: forwards under
autocast then read them and need not cast.

An optimizer enrolls its parameters and owns the entries; copies are freed with it. A forward that requests a copy
records the dtype, and gets the copy if it is up to date: the parameter's version counter and address must be those at
which the copy was written. Otherwise the forward casts, as it does for parameters that are not enrolled. Steps of all
optimizers advance the version counters of enrolled parameters (counted_changes.py). Other changes that they do not see,
through ``parameter.data`` or by other libraries' kernels, have to be reported (``refresh``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from fasttfm.ops.core import counted_changes


class _Changes:
    """Counts the changes of entries, except that steps note the versions of what they have written."""

    count = 0


class Entry:
    """One parameter's copy, and the parameter's version and address when the copy was written."""

    def __init__(self, parameter: Tensor) -> None:
        self.reference = weakref.ref(parameter)
        self.requested: torch.dtype | None = None
        self.copy: Tensor | None = None
        self.version = self.address = -1
        self.barred = False  # whether the parameter must not have a copy

    def is_fresh(self, parameter: Tensor) -> bool:
        return self.version == parameter._version and self.address == parameter.data_ptr()

    def note(self, parameter: Tensor) -> None:
        self.version, self.address = parameter._version, parameter.data_ptr()

    def to_write(self, parameter: Tensor, *, captured: bool = False) -> Tensor | None:
        """The copy that a step has to write, up to date before the step; None if no forward has requested one.

        A step that is ``captured`` in a CUDA graph always writes the same copies. Its replays change parameters without
        changing their version counters, so parameters whose copies it does not write must not have a copy.
        """
        if self.requested is None and not captured:
            return None
        ready = self.copy is not None and self.copy.dtype == self.requested and self.is_fresh(parameter)
        if captured and not ready:
            self.barred, self.copy = True, None
            _Changes.count += 1
        elif self.requested is not None and not ready:
            _write(self, parameter)
        return self.copy


_entries: dict[int, weakref.ref[Entry]] = {}  # by the parameter's id


def _entry(parameter: Tensor) -> Entry | None:
    """The parameter's entry, if there is to be a copy."""
    held = _entries.get(id(parameter))
    if held is None:
        return None
    entry = held()
    return None if entry is None or entry.barred or entry.reference() is not parameter else entry


# ---- for optimizers --------------------------------------------------------------------------------------------------


def enroll(parameters: Iterable[Tensor]) -> list[Entry]:
    """Lets forwards request copies of these parameters for as long as the entries are referenced."""
    entries = []
    for parameter in parameters:
        if not parameter.is_inference():  # inference tensors have no version counter
            counted_changes.watch([parameter])
            key = id(parameter)
            held = _entries.get(key)
            entry = None if held is None else held()
            if entry is None or entry.reference() is not parameter:
                entry = Entry(parameter)
                _entries[key] = weakref.ref(entry, functools.partial(_gone, key))
                _Changes.count += 1
            entries.append(entry)
    return entries


def _gone(key: int, held: weakref.ref[Entry]) -> None:
    """The entry was released, and its slot may be reused."""
    if _entries.get(key) is held:
        del _entries[key]
        _Changes.count += 1


def entries_of(parameters: Iterable[Tensor], *, unrequested: bool = True) -> list[Entry | None]:
    """The entries of those that are enrolled, for steps.

    Args:
        unrequested: Whether to include those of which no forward has requested a copy.
    """
    entries = [_entry(parameter) for parameter in parameters]
    if unrequested:
        return entries
    return [None if entry is None or entry.requested is None else entry for entry in entries]


class StepCopies:
    """The copies that the steps over some parameters write. While no entry and no version has changed since the step
    before, they are the same and up to date, and nothing is looked up.

    Args:
        enrolled: Whether the optimizer has enrolled the parameters. Otherwise nothing is kept between steps.
    """

    def __init__(self, parameters: list[Tensor], *, enrolled: bool) -> None:
        self._parameters, self._enrolled = parameters, enrolled
        self._copied: list[tuple[Entry, Tensor]] = []  # the entries with a copy, and their parameters
        self._counted: list[Tensor] = []  # the parameters and the copies
        self._known: tuple[int, list[int]] | None = None  # changes and versions after the step before

    def find(self, *, captured: bool, moved: bool) -> list[Tensor | None] | None:
        """The copy of each parameter, up to date, or None; None instead of all if they are those of the step before.

        Args:
            captured: Whether a CUDA graph will hold the step.
            moved: Whether a parameter may be at another address than in the step before.
        """
        if not (captured or moved) and self._known is not None and self._known == self._state():
            return None
        entries = entries_of(self._parameters, unrequested=captured)
        copies = [
            None if entry is None else entry.to_write(parameter, captured=captured)
            for entry, parameter in zip(entries, self._parameters, strict=True)
        ]
        triples = zip(entries, self._parameters, copies, strict=True)
        copied = ((entry, parameter) for entry, parameter, copy in triples if entry is not None and copy is not None)
        self._copied = list(copied)
        self._counted = [*self._parameters, *(copy for copy in copies if copy is not None)]
        return copies

    def written(self) -> None:
        """A step has changed the parameters, and written the copies."""
        torch.autograd.graph.increment_version(self._counted)
        changes, versions = self._state()
        for (entry, _), version in zip(self._copied, versions, strict=True):
            entry.version = version
        self._known = (changes, versions) if self._enrolled else None
        if not self._enrolled:
            self._copied, self._counted = [], []

    def _state(self) -> tuple[int, list[int]]:
        return _Changes.count, [parameter._version for _, parameter in self._copied]


def refresh(entries: Iterable[Entry], *, everything: bool = False) -> None:
    """Updates copies whose parameters have changed, or all of them."""
    for entry in entries:
        parameter = None if entry.copy is None else entry.reference()
        if parameter is not None and (everything or not entry.is_fresh(parameter)):
            _write(entry, parameter)


@torch.inference_mode(False)  # steps and forwards outside of it use the copy
@torch.no_grad()
def _write(entry: Entry, parameter: Tensor) -> None:
    """Writes a copy, into the same memory if possible, because a CUDA graph may read it."""
    dtype, copy = entry.requested, entry.copy
    if copy is None or copy.dtype != dtype or copy.device != parameter.device or copy.shape != parameter.shape:
        entry.copy = parameter.detach().to(dtype)
    else:
        copy.copy_(parameter)
    entry.note(parameter)
    _Changes.count += 1


# ---- for forwards ----------------------------------------------------------------------------------------------------


def copies_of(parameters: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor | None]:
    """The parameters' copies of that dtype; None where there is none that is up to date."""
    copies: list[Tensor | None] = []
    for parameter in parameters:  # a loop without calls of functions: it runs before every forward
        held = _entries.get(id(parameter))
        entry = None if held is None else held()
        if entry is None or entry.barred or entry.reference() is not parameter:
            copies.append(None)
            continue
        if entry.requested != dtype:
            entry.requested = dtype
            _Changes.count += 1
        copy = entry.copy
        fresh = entry.version == parameter._version and entry.address == parameter.data_ptr()
        copies.append(copy if copy is not None and fresh and copy.dtype == dtype else None)
    return copies
