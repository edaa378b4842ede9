"""The seams can fail: each variant rejects an entry point that is broken on purpose, and accepts one that is not."""

from __future__ import annotations

import pytest
import torch

from fasttfm.testing.seams import EntryPoint, Seam, SeamError, seams, threads
from fasttfm.testing.seams.mutants import gpu_mutants, mutants, sound

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VARIANTS = {name: check for seam in seams().values() for name, check in seam.variants.items()}
# What every entry point of a GPU or a session is checked for, and no function of these tests has.
WITHOUT_MUTANT = {"reference", "out of memory", "model changed, session not", "max_seqlen"}


def check(variant: str, entry: EntryPoint, device: torch.device) -> None:
    Seam(variant, {variant: VARIANTS[variant]}).check(entry, device)


def cases(found: dict[str, list[EntryPoint]]) -> list[object]:
    return [pytest.param(name, entry, id=f"{name}-{entry}") for name, several in found.items() for entry in several]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what hangs on purpose."""
    monkeypatch.setattr(threads, "_SECONDS", 3.0)


@pytest.mark.parametrize(("variant", "entry"), cases(mutants()))
def test_a_broken_entry_point_is_rejected(variant: str, entry: EntryPoint) -> None:
    with pytest.raises(SeamError):
        check(variant, entry, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "entry"), cases(gpu_mutants()))
def test_a_broken_entry_point_is_rejected_gpu(variant: str, entry: EntryPoint) -> None:
    with pytest.raises(SeamError):
        check(variant, entry, GPU)


@pytest.mark.parametrize("variant", sorted(mutants()))
def test_a_sound_entry_point_is_accepted(variant: str) -> None:
    for entry in sound(variant):
        check(variant, entry, CPU)


def test_every_variant_has_a_mutant() -> None:
    broken = {name.removesuffix(", autocast") for name in VARIANTS} - set(mutants()) - set(gpu_mutants())
    assert broken == WITHOUT_MUTANT
