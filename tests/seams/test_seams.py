"""Every seam with every public entry point (fasttfm.testing.seams): what happens around a call does not change what it
computes. The pairs of the CPU run everywhere, those of a GPU where there is one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fasttfm.testing.seams import EntryPoint, Seam, entry_points, plan
from fasttfm.testing.seams.registry import FIRST_CAPTURE

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def pairs(device: str) -> list[object]:
    return [pytest.param(seam, entry, id=f"{seam}-{entry}".replace(" ", "_")) for seam, entry in plan(device)]


@pytest.mark.parametrize(("seam", "entry"), pairs("cpu"))
def test_seam(seam: Seam, entry: EntryPoint) -> None:
    seam.check(entry, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("seam", "entry"), pairs("cuda"))
def test_seam_gpu(seam: Seam, entry: EntryPoint) -> None:
    seam.check(entry, GPU)


FIRST = [name for name, entry in entry_points("cuda").items() if FIRST_CAPTURE.variants_of(entry)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FIRST)
def test_first_use_in_a_capture(name: str) -> None:
    """In a process of its own, in which nothing has run."""
    command = [sys.executable, "-m", "fasttfm.testing.seams", FIRST_CAPTURE.name, name, "--device", "cuda"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr[-3000:]}"
