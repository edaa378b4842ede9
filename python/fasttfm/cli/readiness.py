"""Whether fasttfm runs fast on this machine, and what to do if it does not."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import torch

from fasttfm import _native
from fasttfm.ops.core.backends import triton_absent

TO_DO = "to do"  # the name of a line of ``readiness`` that says what to do
INSTALL = "pip install --force-reinstall --no-deps fasttfm, or pip install . in a clone, brings the native core"


@dataclass(frozen=True)
class Machine:
    """What the answer depends on. Each ``no_*`` is a reason, None where there is none."""

    gpu: str | None = None  # the name of the first GPU that torch sees
    no_core: str | None = None
    no_cuda: str | None = None  # kernels
    no_triton: str | None = None
    driver: bool = False  # whether there is an NVIDIA driver
    torch_cuda: str | None = None  # the version that torch was built with
    instructions: str = "baseline"
    threads: int = 1
    cores: int = 1


def this_machine() -> Machine:
    sees_gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_properties(0).name if sees_gpu else None,
        no_core=_native.missing(),
        no_cuda=(_native.missing_cuda() or _native.missing_on(0)) if sees_gpu else None,
        no_triton=triton_absent() if sees_gpu else None,
        driver=os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None,
        torch_cuda=torch.version.cuda,
        instructions="" if _native.missing() else _native.core().active_isa(),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)),
    )


def readiness(machine: Machine) -> list[tuple[str, str]]:
    """One line with the answer, ``fast``, ``partly fast`` or ``slow``; then what to do, a line for each lack."""
    lacks = _gpu_lacks(machine) if machine.gpu else _cpu_lacks(machine)
    kernels = _kernels(machine)
    if not kernels:
        answer = ("slow", "every op runs in plain torch")
    else:
        answer = ("partly fast" if lacks else "fast", f"{' and '.join(kernels)} on {machine.gpu or 'the CPU'}")
    return [answer, *((TO_DO, lack) for lack in lacks)]


def _kernels(machine: Machine) -> list[str]:
    if not machine.gpu:
        return [] if machine.no_core else [f"kernels with {machine.instructions} instructions"]
    absent = {"CUDA kernels": machine.no_cuda, "Triton kernels": machine.no_triton}
    return [name for name, reason in absent.items() if reason is None]


def _gpu_lacks(machine: Machine) -> list[str]:
    lacks = []
    if machine.no_core:
        lacks.append(f"{INSTALL}: {machine.no_core}")
    elif machine.no_cuda:
        lacks.append(f"no CUDA kernels: {machine.no_cuda}")
    if machine.no_triton:
        lacks.append(f"pip install triton, or a build of torch with CUDA, which brings it: {machine.no_triton}")
    return lacks


def _cpu_lacks(machine: Machine) -> list[str]:
    lacks = []
    if machine.no_core:
        lacks.append(f"{INSTALL}: {machine.no_core}")
    if machine.driver and machine.torch_cuda is None:
        lacks.append("there is an NVIDIA driver, and torch is a CPU build: see https://pytorch.org/get-started/locally")
    elif machine.driver:
        lacks.append("there is an NVIDIA driver, and torch sees no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    if 2 * machine.threads < machine.cores:  # by default torch leaves out the second thread of each core
        lacks.append(f"torch uses {machine.threads} of {machine.cores} cores: OMP_NUM_THREADS={machine.cores} uses all")
    return lacks
