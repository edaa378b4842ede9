"""Lists loads from shared memory that are still in flight when a thread arrives at a barrier.

    nvcc -arch=sm_90a -cubin ... && nvdisasm -c KERNEL.cubin > KERNEL.sass
    python benchmarks/lab/late_loads.py KERNEL.sass ...

An arrival does not wait for earlier loads: if it releases a buffer, TMA may overwrite what has not been read yet. So
some instruction must have used the loaded value. The script only analyzes straight-line code, and its list has to be
reviewed: loads from memory that is not overwritten are harmless.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REACH = 250  # instructions before an arrival that are analyzed
WIDTHS = {"128": 4, "64": 2}  # registers of a load


def registers(first: str, count: int) -> set[str]:
    return {f"R{int(first[1:]) + i}" for i in range(count)}


def used_by(instruction: str) -> set[str]:
    """The registers that an instruction reads, possibly with a few more."""
    body = re.sub(r"^@!?U?P\d+\s+", "", instruction)
    name, _, operands = body.partition(" ")
    if name.startswith("HGMMA"):
        return set().union(*(registers(operand, 64) for operand in re.findall(r"\bR\d+\b", operands)))
    if not re.match(r"ST|RED|SYNCS|BAR", name):
        operands = operands.partition(",")[2]  # the first one is written
    count = 4 if re.match(r"STSM|STS\.128|STG.*128", name) else 1
    return set().union(*(registers(operand, count) for operand in re.findall(r"\bR\d+\b", operands)))


def late_loads(code: list[str], arrival: int) -> list[int]:
    late: list[int] = []
    used: set[str] = set()
    for index in range(arrival - 1, max(arrival - REACH, 0), -1):
        if re.match(r"(BRA|EXIT)\b", code[index]):
            break
        load = re.search(r"\bLDSM?(\S*) (R\d+),", code[index])
        if load:
            count = 4 if "M88.4" in load[1] else next((n for text, n in WIDTHS.items() if text in load[1]), 1)
            loaded = registers(load[2], count)
            if not loaded & used:
                late.append(index)
            used -= loaded
        used |= used_by(code[index])
    return late[::-1]


def main() -> None:
    for name in sys.argv[1:]:
        code = [re.sub(r"/\*[0-9a-f]+\*/", "", line).strip() for line in Path(name).read_text().splitlines()]
        print(name)
        for index, instruction in enumerate(code):
            if instruction.startswith(".text."):
                print(f"  {instruction}")
            if "SYNCS.ARRIVE" not in instruction:
                continue
            for load in late_loads(code, index):
                print(f"    line {index + 1}, {instruction}: line {load + 1}, {code[load]}")


if __name__ == "__main__":
    main()
