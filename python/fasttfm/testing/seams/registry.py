"""All entry points and all seams. A new op, family or optimizer gets its entry points from its registry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass


import torch

from fasttfm.testing.seams import allocations, boundaries, captures, contexts, threads, weights
from fasttfm.testing.seams.entry import EntryPoint
from fasttfm.testing.seams.model_entries import model_entries, patched_entries
from fasttfm.testing.seams.module_entries import module_entries
from fasttfm.testing.seams.op_entries import op_entries
from fasttfm.testing.seams.session_entries import generation_entries, session_entries
from fasttfm.testing.seams.training_entries import all_training_entries

Check = Callable[[EntryPoint, torch.device], None]


@dataclass(frozen=True)
class Seam:
    """A check of entry points.

    Args:
        name: What happens around a call.
        check: Raises SeamError where an entry point breaks.
        devices: Where it applies: ``cpu``, ``cuda``.
        applies: Whether it applies to an entry point on a device.
    """

    name: str
    check: Check
    devices: tuple[str, ...] = ("cpu", "cuda")
    applies: Callable[[EntryPoint, torch.device], bool] = lambda entry, device: True

    def __str__(self) -> str:
        return self.name


def _has_weights(entry: EntryPoint, device: torch.device) -> bool:
    if entry.module is None:
        return False
    # On the CPU, so that tests can be collected without a GPU.
    return any(True for _ in entry.module(entry.make(torch.device("cpu"))).parameters())


def _has_boundaries(entry: EntryPoint, device: torch.device) -> bool:
    return bool(boundaries.boundaries_of(entry.inputs(0, torch.device("cpu"))))


def _has_bound(entry: EntryPoint, device: torch.device) -> bool:
    return boundaries.BOUND in entry.inputs(0, torch.device("cpu"))


def _weights_seams() -> list[Seam]:
    found = [
        Seam(name, functools.partial(weights.check_changed_weights, change=name), applies=_has_weights)
        for name in weights.CHANGES
    ]
    # What forwards under autocast keep: copies of the weights in 16 bits.
    for name in ("parameter.data changed in place", "copied to under no_grad", "new parameters", "moved"):
        check = functools.partial(weights.check_changed_weights, change=name, autocast=True)
        found.append(Seam(f"{name}, autocast", check, applies=_has_weights))
    found.append(Seam("separate copies", weights.check_copy_is_separate, applies=_has_weights))
    found.append(Seam("model changed, session not", weights.check_unaffected, applies=_is_session))
    return found


def _is_session(entry: EntryPoint, device: torch.device) -> bool:
    return entry.name.startswith("inference.Session")


def _boundary_seams() -> list[Seam]:
    found = [
        Seam(
            f"boundaries: {name}",
            functools.partial(boundaries.check_lying_boundaries, lie=name),
            applies=_has_boundaries,
        )
        for name in boundaries.LIES
    ]
    return [*found, Seam("boundaries: max_seqlen", boundaries.check_lying_bound, applies=_has_bound)]


def seams() -> dict[str, Seam]:
    found = [
        Seam("threads of one object", threads.check_threads_of_one_object),
        Seam("threads of objects", threads.check_threads_of_objects),
        Seam("streams", threads.check_streams, ("cuda",)),
        Seam("garbage collection", threads.check_garbage_collection),
        Seam("fork", threads.check_fork, ("cpu",)),
        Seam("capture", captures.check_capture, ("cuda",)),
        Seam("first use in a capture", functools.partial(captures.check_capture, first_use=True), ("cuda",)),
        Seam("failed allocations", allocations.check_failed_allocations),
        Seam("out of memory", allocations.check_out_of_memory, ("cuda",)),
        Seam("other instruction sets", contexts.check_other_instruction_sets, ("cpu",)),
        Seam("other GPUs", contexts.check_other_gpus, ("cuda",)),
        Seam("inference mode first", contexts.check_inference_first),
        Seam("fake tensors first", contexts.check_fake_tensors_first),
        Seam("alternating autocast", contexts.check_alternating_autocast),
        *(Seam(name, functools.partial(contexts.check_setting, setting=name)) for name in contexts.SETTINGS),
        *_weights_seams(),
        *_boundary_seams(),
        Seam("agrees with the reference", check_reference),
    ]
    return {seam.name: seam for seam in found}


def check_reference(entry: EntryPoint, device: torch.device) -> None:
    """Without any seam, a call agrees with other code that computes the same."""
    from fasttfm.testing.seams.entry import check_close

    if entry.reference is not None:
        subject, inputs = entry.make(device), entry.inputs(0, device)
        check_close(entry.call(subject, inputs), entry.reference(subject, inputs), f"{entry}")


@functools.cache
def entry_points(device: str) -> dict[str, EntryPoint]:
    """All entry points by name, for calls on ``cpu`` or ``cuda``."""
    found = [
        *op_entries(device),
        *module_entries(),
        *model_entries(),
        *patched_entries(),
        *session_entries(device),
        *generation_entries(),
        *all_training_entries(),
    ]
    return {entry.name: entry for entry in found}


def plan(device: str) -> list[tuple[Seam, EntryPoint]]:
    """Every seam with every entry point that it applies to."""
    where = torch.device(device)
    return [
        (seam, entry)
        for seam in seams().values()
        if device in seam.devices
        for entry in entry_points(device).values()
        if not is_left_out(seam, entry) and seam.applies(entry, where)
    ]


def is_left_out(seam: Seam, entry: EntryPoint) -> bool:
    """A reason for a seam holds for its variants: ``moved`` for ``moved, autocast``, ``capture`` for the first one."""
    name = seam.name.removesuffix(", autocast").removeprefix("first use in a ")
    return name in entry.left_out


def run(device: str, names: Callable[[str, str], bool] = lambda seam, entry: True) -> list[str]:
    """Runs what ``names(seam, entry point)`` selects. Returns the failures."""
    failures: list[str] = []
    for seam, entry in plan(device):
        if names(seam.name, entry.name):
            try:
                seam.check(entry, torch.device(device))
            except Exception as error:
                failures.append(f"{seam}: {entry}: {type(error).__name__}: {error}")
    return failures


