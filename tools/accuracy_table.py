"""Prints the measured accuracy of every op as rows for docs/numerics.md: ``python tools/accuracy_table.py [op ...]``.

A cell is max|out - exact| / max|naive - exact| of outputs and of gradients, the median over the op's cases and, in
brackets, the largest: 1.0 means as far from the fp64 result as the same formula in plain torch and in the same type.
Cases where plain torch is exact give no ratio. Measures the GPU backends if there is a GPU, the native core otherwise,
and the ops of backend torch (cuBLAS or MKL GEMMs) on either.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterable

import torch

from fasttfm.ops.core.backends import BackendRefused, dtype_name, tables
from fasttfm.testing.harness import accuracy
from fasttfm.testing.spec import FLOAT_DTYPES, OpSpec
from fasttfm.testing.specs import all_specs
from fasttfm.testing.tolerance import Comparison


def main(arguments: list[str] | None = None) -> int:
    specs = all_specs()
    parser = argparse.ArgumentParser(description="Prints the measured accuracy of ops as rows for docs/numerics.md.")
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(specs)}; default: all")
    names = parser.parse_args(arguments).ops
    unknown = [name for name in names if name not in specs]
    if unknown:
        parser.error(f"op: expected some of {', '.join(specs)}, got {', '.join(unknown)}")
    types = " | ".join(dtype_name(dtype) for dtype in FLOAT_DTYPES)
    print(f"| op | backend | {types} |\n| --- | --- |{' --- |' * len(FLOAT_DTYPES)}")
    for name in names or specs:
        for row in rows(specs[name]):
            print(f"| {' | '.join(row)} |", flush=True)
    return 0


def rows(spec: OpSpec) -> list[list[str]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = ("cuda", "triton", "torch") if device == "cuda" else ("cpu", "torch")
    present = [b.name for b in tables()[spec.name].backends if b.name in backends and b.absent() is None]
    gradients = {f"d{name}" for name in spec.differentiable}
    table = []
    for backend in present:
        row = [spec.name, backend]
        for dtype in FLOAT_DTYPES:
            cases = [case for case in spec.cases if dtype in case.dtypes]
            comparisons = []
            for case in cases:
                with contextlib.suppress(BackendRefused):  # a backend may leave rare options to others
                    comparisons += accuracy(spec, case, dtype, backend, device)
            outputs = ratios(item for item in comparisons if item.name not in gradients)
            backward = ratios(item for item in comparisons if item.name in gradients)
            row.append(outputs if outputs == backward else f"{outputs}; {backward}")
        table.append(row)
    return table


def ratios(comparisons: Iterable[Comparison]) -> str:
    """The median ratio and the largest."""
    ratios = [comparison.ratio for comparison in comparisons if comparison.naive_error > 0]
    return f"{statistics.median(ratios):.2f} ({max(ratios):.2f})" if ratios else "exact"


if __name__ == "__main__":
    raise SystemExit(main())
