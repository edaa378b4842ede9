"""The first lines of ``fasttfm info``: whether the fast backends are available on this machine, and what to install."""

from __future__ import annotations

import pytest

from fasttfm import _native
from fasttfm.cli import info
from fasttfm.cli.readiness import INSTALL, Machine, readiness, this_machine


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (Machine(gpu="H200"), [("fast", "CUDA kernels and Triton kernels on H200")]),
        (
            Machine(gpu="H200", no_cuda="the GPU driver is old"),
            [("partly fast", "Triton kernels on H200"), ("to do", "no CUDA kernels: the GPU driver is old")],
        ),
        (
            Machine(gpu="H200", no_core="it did not load", no_cuda="it did not load", no_triton="not installed"),
            [
                ("slow", "every op runs in plain torch"),
                ("to do", f"{INSTALL}: it did not load"),
                ("to do", "pip install triton, or a build of torch with CUDA, which brings it: not installed"),
            ],
        ),
        (
            Machine(instructions="avx512", threads=8, cores=8),
            [("fast", "kernels with avx512 instructions on the CPU")],
        ),
        (
            Machine(instructions="avx2", threads=1, cores=8),
            [
                ("partly fast", "kernels with avx2 instructions on the CPU"),
                ("to do", "torch uses 1 of 8 cores: OMP_NUM_THREADS=8 uses all"),
            ],
        ),
        (
            Machine(no_core="it did not load"),
            [("slow", "every op runs in plain torch"), ("to do", f"{INSTALL}: it did not load")],
        ),
    ],
)
def test_answers(machine: Machine, expected: list[tuple[str, str]]) -> None:
    assert readiness(machine) == expected


@pytest.mark.parametrize(("torch_cuda", "said"), [(None, "torch is a CPU build"), ("13.0", "torch sees no GPU")])
def test_a_gpu_that_torch_does_not_see(torch_cuda: str | None, said: str) -> None:
    (answer, _), (_, to_do) = readiness(Machine(driver=True, torch_cuda=torch_cuda))
    assert answer == "partly fast"
    assert said in to_do


def test_info_begins_with_the_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = info.report().splitlines()
    assert lines[2] == "this machine"
    assert lines[3].split("  ")[1] == readiness(this_machine())[0][0]
    monkeypatch.setattr(_native, "missing", lambda: "it did not load")
    assert this_machine().no_core == "it did not load"
