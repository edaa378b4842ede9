"""The limits of GPUs by compute capability (90 for 9.0), and the resources that compiled kernels use; both are known
without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

# Bytes of shared memory that a block may have (CUDA C++ programming guide, technical specifications).
BLOCK_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}

# The static shared memory that a kernel may declare, and the registers of a block; the same on all these GPUs.
STATIC_MEMORY = 48 * 1024
BLOCK_REGISTERS = 65536


class Usage(NamedTuple):
    """The resources of one kernel, as ptxas compiled it."""

    machine: str  # "sm_80"; empty if the file does not state it
    kernel: str  # mangled
    registers: int  # for a thread
    stack: int  # bytes of local memory: spills, and arrays that did not fit into registers
    shared: int  # static bytes of the kernel; dynamic shared memory is added at launch

    def block_registers(self, threads: int) -> int:
        """The registers of a block; the hardware allocates them in units of 8 per thread."""
        return -(-self.registers // 8) * 8 * threads


def resource_usage(file: Path) -> list[Usage]:
    """The resources of every kernel in a cubin or a library, by cuobjdump, which is part of Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    command = [str(tool), "--dump-resource-usage", str(file)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    machine, kernel, usages = "", "", []
    for line in report.splitlines():
        if line.startswith("arch = "):
            machine = line.removeprefix("arch = ").strip()
        elif line.lstrip().startswith("Function "):
            kernel = line.strip().removeprefix("Function ").removesuffix(":")
        elif numbers := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            usages.append(Usage(machine, kernel, *(int(number) for number in numbers.groups())))
    return usages
