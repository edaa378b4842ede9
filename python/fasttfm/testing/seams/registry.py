"""All entry points and all seams. A new op, family or optimizer gets its entry points from its registry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fasttfm.testing.seams import allocations, boundaries, captures, contexts, threads, weights
from fasttfm.testing.seams.entry import EntryPoint, SeamError, chain, check_close
from fasttfm.testing.seams.model_entries import model_entries, patched_entries
from fasttfm.testing.seams.module_entries import module_entries
from fasttfm.testing.seams.op_entries import op_entries
from fasttfm.testing.seams.session_entries import generation_entries, session_entries
from fasttfm.testing.seams.training_entries import all_training_entries

Check = Callable[[EntryPoint, torch.device], None]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Seam:
    """What happens around a call, in one or several variants.

    Args:
        name: The name that tests show.
        variants: Checks by name; each raises SeamError where an entry point breaks.
        devices: Where it applies: ``cpu``, ``cuda``.
        applies: Whether it applies to an entry point.
    """

    name: str
    variants: Mapping[str, Check]
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[EntryPoint], bool] = lambda entry: True

    def __str__(self) -> str:
        return self.name

    def variants_of(self, entry: EntryPoint) -> dict[str, Check]:
        """What is not left out. A reason for a variant also holds for the one under autocast."""
        if self.name in entry.left_out:
            return {}
        left = {name for name in self.variants if name.removesuffix(", autocast") in entry.left_out}
        return {name: check for name, check in self.variants.items() if name not in left}

    def check(self, entry: EntryPoint, device: torch.device) -> None:
        """Runs all variants, and raises one error with the failures of all."""
        failures = []
        for name, check in self.variants_of(entry).items():
            try:
                check(entry, device)
            except Exception as error:
                if name not in entry.refuses or entry.refuses[name] not in chain(error):
                    failures.append((name, error))
        if failures:
            lines = [f"{name}: {type(error).__name__}: {error}" for name, error in failures]
            raise SeamError("\n".join(lines)) from failures[0][1]


# ---- seams -----------------------------------------------------------------------------------------------------------


def check_reference(entry: EntryPoint, device: torch.device) -> None:
    """With nothing around it, a call agrees with other code that computes the same."""
    if entry.reference is not None:
        reference = entry.reference(entry.make(device), entry.inputs(0, device))
        check_close(entry.expected(0, device), reference, f"{entry}")


def _weights_variants() -> dict[str, Check]:
    checks: dict[str, Check] = {
        name: functools.partial(weights.check_changed_weights, change=name) for name in weights.CHANGES
    }
    # Forwards under autocast may keep copies of the weights in 16 bits.
    for name in ("parameter.data changed in place", "copied to under no_grad", "new parameters"):
        check = functools.partial(weights.check_changed_weights, change=name, autocast=True)
        checks[f"{name}, autocast"] = check
    return {**checks, "separate copies": weights.check_copy_is_separate}


def _one(name: str, check: Check, *devices: str) -> Seam:
    return Seam(name, {name: check}, devices or ("cpu", "cuda"))


def seams() -> dict[str, Seam]:
    lies: dict[str, Check] = {
        name: functools.partial(boundaries.check_lying_boundaries, lie=name) for name in boundaries.LIES
    }
    settings: dict[str, Check] = {
        name: functools.partial(contexts.check_setting, setting=name) for name in contexts.SETTINGS
    }
    modes: dict[str, Check] = {
        "inference mode first": contexts.check_inference_first,
        "fake tensors first": contexts.check_fake_tensors_first,
        "alternating autocast": contexts.check_alternating_autocast,
    }
    unaffected: dict[str, Check] = {"model changed, session not": weights.check_unaffected}
    bound: dict[str, Check] = {"max_seqlen": boundaries.check_lying_bound}
    listed = [
        _one("reference", check_reference),
        _one("threads of one object", threads.check_threads_of_one_object),
        _one("threads of objects", threads.check_threads_of_objects),
        _one("streams", threads.check_streams, "cuda"),
        _one("garbage collection", threads.check_garbage_collection),
        _one("fork", threads.check_fork, "cpu"),
        _one("capture", captures.check_capture, "cuda"),
        _one("failed allocations", allocations.check_failed_allocations),
        _one("out of memory", allocations.check_out_of_memory, "cuda"),
        _one("other instruction sets", contexts.check_other_instruction_sets, "cpu"),
        _one("other GPUs", contexts.check_other_gpus, "cuda"),
        Seam("settings of torch", settings),
        Seam("modes of torch", modes),
        Seam("changed weights", _weights_variants(), applies=_has_weights),
        Seam("model changed, session not", unaffected, applies=_is_session),
        Seam("boundaries", lies, applies=_has_boundaries),
        Seam("max_seqlen", bound, applies=_has_bound),
    ]
    return {seam.name: seam for seam in listed}


# A process of its own runs it (``python -m fasttfm.testing.seams``).
FIRST_CAPTURE = _one("first use in a capture", functools.partial(captures.check_capture, first_use=True), "cuda")


def _has_weights(entry: EntryPoint) -> bool:
    return entry.module is not None


def _is_session(entry: EntryPoint) -> bool:
    return "inference.Session" in entry.covers


def _has_boundaries(entry: EntryPoint) -> bool:
    return bool(boundaries.boundaries_of(entry.inputs(0, _CPU)))


def _has_bound(entry: EntryPoint) -> bool:
    return boundaries.BOUND in entry.inputs(0, _CPU)


# ---- entry points ----------------------------------------------------------------------------------------------------


@functools.cache
def entry_points(device: str) -> dict[str, EntryPoint]:
    """All entry points by name, for calls on ``cpu`` or ``cuda``."""
    entries = [
        *op_entries(device),
        *module_entries(),
        *model_entries(),
        *patched_entries(),
        *session_entries(device),
        *generation_entries(),
        *all_training_entries(),
    ]
    return {entry.name: entry for entry in entries}


def plan(device: str) -> list[tuple[Seam, EntryPoint]]:
    """Every seam with every entry point that it applies to."""
    return [
        (seam, entry)
        for seam in seams().values()
        if device in seam.devices
        for entry in entry_points(device).values()
        if seam.variants_of(entry) and seam.applies(entry)
    ]


def run(device: str, select: Callable[[str, str], bool] = lambda seam, entry: True) -> list[str]:
    """Runs the pairs of names of a seam and of an entry point that ``select`` selects. Returns the failures."""
    failures: list[str] = []
    for seam in (*seams().values(), FIRST_CAPTURE):
        for entry in entry_points(device).values() if device in seam.devices else ():
            if select(seam.name, entry.name) and seam.variants_of(entry) and seam.applies(entry):
                try:
                    seam.check(entry, torch.device(device))
                except SeamError as error:
                    failures.append(f"{seam}: {error}")
    return failures
