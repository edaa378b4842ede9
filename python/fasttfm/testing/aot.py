"""Compiles every Triton kernel ahead of time, without a GPU: ``python -m fasttfm.testing.aot [op ...]``.

A compile error, a register spill or more shared memory than the chip has then shows on any machine. Must run in a
process of its own, without TRITON_INTERPRET: Triton decides at import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.testing.spec import TritonKernel
from fasttfm.testing.specs import all_specs

# Compute capability -> shared memory that one block may use.
TARGETS = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True)
class Compiled:
    """What ptxas made of one kernel for one target."""

    name: str
    target: int
    registers: int
    stack_bytes: int  # local memory: spills and arrays that did not fit into registers
    shared_bytes: int
    problem: str

    def __str__(self) -> str:
        status = self.problem or "ok"
        return (
            f"sm_{self.target} {self.name}: {self.registers} registers, {self.stack_bytes} B stack, "
            f"{self.shared_bytes} B shared: {status}"
        )


def compile_kernel(description: TritonKernel, target: int) -> Compiled:
    """Compiles one kernel to machine code and reads its resources from it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(description.constants)
    name = f"{description.kernel.fn.__name__}({_short(description)})"
    signature = {
        argument: "constexpr" if argument in constants else description.signature[argument]
        for argument in description.kernel.arg_names
    }
    options = {"num_warps": description.num_warps, "num_stages": description.num_stages}
    try:
        source = ASTSource(description.kernel, signature, constants, _alignment(description))
        binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:  # Triton and ptxas raise many kinds; any of them is the finding
        return Compiled(name, target, 0, 0, 0, f"does not compile: {error}")
    registers, stack = _resources(binary.asm["cubin"])
    shared = binary.metadata.shared
    problem = ""
    if stack and not description.allow_spills:
        problem = f"spills {stack} bytes"
    if shared > TARGETS[target]:
        problem = f"needs {shared} bytes of shared memory, the chip has {TARGETS[target]}"
    return Compiled(name, target, registers, stack, shared, problem)


def _alignment(description: TritonKernel) -> dict[tuple[int], list[list[Any]]]:
    """Pointers and sizes as multiples of 16, as the launcher specialises for usual shapes: loads are 16 bytes wide."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(description.kernel.arg_names)
        if description.signature.get(argument, "").startswith(("*", "i"))
    }


def _short(description: TritonKernel) -> str:
    constants = [f"{key}={value}" for key, value in description.constants.items()]
    return ", ".join([*sorted(set(description.signature.values())), *constants, f"warps={description.num_warps}"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of stack, as cuobjdump (which Triton's wheel carries) reports them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, f"cuobjdump printed no resource usage:\n{report}"
    return int(found[1]), int(found[2])


def compile_all(names: list[str]) -> Iterator[Compiled]:
    specs: dict[str, Any] = all_specs()
    unknown = sorted(set(names) - set(specs))
    if unknown:
        raise SystemExit(f"aot: op: expected one of {', '.join(specs)}, got {', '.join(unknown)}")
    for name in names or specs:
        for description in specs[name].triton_kernels() if specs[name].triton_kernels else []:
            for target in [description.target] if description.target else TARGETS:
                yield compile_kernel(description, target)


def main(arguments: list[str]) -> int:
    failures = 0
    for result in compile_all(arguments):
        print(result, flush=True)
        failures += bool(result.problem)
    print(f"{failures} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
