"""Compiles every Triton kernel ahead of time, without a GPU: ``python -m fasttfm.testing.aot [op ...] [--target N]``.

It finds compile errors, register spills and kernels that need more shared memory than a GPU has. It must run in its own
process, without TRITON_INTERPRET: Triton decides at import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.testing.chips import BLOCK_MEMORY, Usage, resource_usage
from fasttfm.testing.spec import TritonKernel
from fasttfm.testing.specs import all_specs

# The targets of every kernel, each with the GPUs that run such code: for 8.6, 8.9 and 12.0 Triton lowers as for 8.0.
TARGETS = {80: (80, 86, 89, 120), 90: (90,)}
# Additional targets for one kernel of each op: the one with the most shared memory, of those that do not spill if there
# are some.
MORE_TARGETS = (100, 120)


@dataclass(frozen=True)
class Compiled:
    """The result of compiling one kernel for one target."""

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
    except Exception as error:  # Triton and ptxas raise errors of many types
        return Compiled(name, target, 0, 0, 0, f"does not compile: {error}")
    usage = _usage(binary.asm["cubin"])
    registers, stack = usage.registers, usage.stack
    shared, limit = binary.metadata.shared, _limit(description, target)
    problem = ""
    if stack and not description.allow_spills:
        problem = f"spills {stack} bytes"
    if shared > limit:
        problem = f"needs {shared} bytes of shared memory, the chip has {limit}"
    return Compiled(name, target, registers, stack, shared, problem)


def _limit(description: TritonKernel, target: int) -> int:
    """The bytes of shared memory that a block may use on every GPU for which the kernel is chosen."""
    chips = [BLOCK_MEMORY[chip] for chip in TARGETS.get(target, (target,))]
    return min(memory for memory in chips if memory >= description.least_memory)


def _alignment(description: TritonKernel) -> dict[tuple[int], list[list[Any]]]:
    """Declares pointers and sizes as multiples of 16, as the launcher does for common shapes: loads are 16 bytes
    wide."""
    return {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(description.kernel.arg_names)
        if description.signature.get(argument, "").startswith(("*", "i"))
    }


def _short(description: TritonKernel) -> str:
    constants = [f"{key}={value}" for key, value in description.constants.items()]
    return ", ".join([*sorted(set(description.signature.values())), *constants, f"warps={description.num_warps}"])


def _usage(cubin: bytes) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        (usage,) = resource_usage(Path(file.name))
    return usage


def compile_all(names: list[str], targets: Iterable[int] = tuple(TARGETS)) -> Iterator[Compiled]:
    """The results for these ops; for all ops if ``names`` is empty."""
    specs: dict[str, Any] = all_specs()
    unknown = sorted(set(names) - set(specs))
    if unknown:
        raise SystemExit(f"aot: op: expected one of {', '.join(specs)}, got {', '.join(unknown)}")
    for name in names or specs:
        kernels = specs[name].triton_kernels() if specs[name].triton_kernels else []
        for target in targets:
            results = [
                (compile_kernel(kernel, target), kernel) for kernel in kernels if kernel.target in (None, target)
            ]
            yield from (result for result, _ in results)
            if target == 80:
                _, largest = max([pair for pair in results if not pair[1].allow_spills] or results, key=_shared_bytes)
                yield from (compile_kernel(largest, more) for more in MORE_TARGETS)


def _shared_bytes(result: tuple[Compiled, TritonKernel]) -> int:
    return result[0].shared_bytes


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fasttfm.testing.aot", description=str(__doc__).partition("\n")[0])
    parser.add_argument("ops", nargs="*", metavar="op", help="the op whose kernels are compiled; by default every op")
    parser.add_argument("--target", type=int, choices=tuple(TARGETS), help="the compute capability; by default each")
    parsed = parser.parse_args(arguments)
    failures = 0
    for result in compile_all(parsed.ops, TARGETS if parsed.target is None else (parsed.target,)):
        print(result, flush=True)
        failures += bool(result.problem)
    print(f"{failures} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
