"""``fasttfm doctor``: what ``info`` and ``selftest`` say about this machine, and what to do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from fasttfm import selftest
from fasttfm.cli.info import report
from fasttfm.cli.options import Formatter
from fasttfm.cli.readiness import TO_DO, readiness, this_machine


def add_parser(commands: Any) -> None:
    commands.add_parser(
        "doctor",
        help="check the installation: versions, devices, every kernel's results; says what to do",
        description="Lists versions, devices and backends (as fasttfm info), compares every kernel of this machine's\n"
        "device with the reference (as python -m fasttfm.selftest), and ends with what to do. The exit status is 1 if\n"
        "a result is wrong.\n\n  fasttfm doctor",
        formatter_class=Formatter,
    )


def run(arguments: argparse.Namespace) -> int:
    print(report(), end="\n\n", flush=True)
    status = selftest.main([])
    print(f"\n{advice(readiness(this_machine()), passed=status == 0)}")
    return status


def advice(verdict: Sequence[tuple[str, str]], *, passed: bool) -> str:
    """What to do: the lacks that ``readiness`` has found, and wrong results."""
    lines = [text for name, text in verdict if name == TO_DO]
    if not passed:
        again = "pip install --force-reinstall --no-deps fasttfm"
        lines.append(f"a kernel's results are wrong: reinstall ({again}), and report the lines with WRONG if they stay")
    if not lines:
        return "what to do: nothing, everything is installed and every kernel's results are right"
    return "\n".join(["what to do", *(f"  {line}" for line in lines)])
