"""``fasttfm bench``: times the ops and their peers, prints a table, and writes a CSV and a chart for each op.

  fasttfm bench --quick                                          one small case for each op
  fasttfm bench --ops layer_norm,attention --dtypes bfloat16
  fasttfm bench --ops attention --contenders fasttfm,sdpa.cudnn --output results

The row of a peer that is not installed says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fasttfm.cli.options import Formatter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_parser(subparsers: Any) -> None:
    """Adds the ``bench`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="time the ops and their peers", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--ops", type=_names, default=(), metavar="A,B", help="only these ops")
    parser.add_argument("--cases", type=_names, default=(), metavar="A,B", help="only the cases with these names")
    parser.add_argument(
        "--dtypes", type=_names, default=(), metavar="A,B", help=f"only these types, of {', '.join(_DTYPES)}"
    )
    parser.add_argument(
        "--contenders",
        type=_names,
        default=(),
        metavar="A,B",
        help="only these: fasttfm, fasttfm:BACKEND, or peers by their names in the table",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--quick", action="store_true", help="one small case for each op")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for CSV and charts (default: benchmarks/results for a full run in a clone, else fasttfm-bench)",
    )
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0 if every op of ours was measured."""
    from fasttfm.bench import measure, report
    from fasttfm.bench.timing import file_stem
    from fasttfm.testing.specs import all_specs

    specs = all_specs()
    for option, names, known in (("--ops", arguments.ops, specs), ("--dtypes", arguments.dtypes, _DTYPES)):
        if unknown := [name for name in names if name not in known]:
            arguments.refuse(f"{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        arguments.refuse("--device: expected a device that is here, got cuda, and torch sees none")
    device = torch.device(arguments.device) if arguments.device else measure.default_device()
    selection = measure.Selection(
        cases=arguments.cases,
        dtypes=tuple(_DTYPES[name] for name in arguments.dtypes),
        contenders=arguments.contenders,
        quick=arguments.quick,
    )
    output = arguments.output or _default_output(whole=not selection.partial)
    csv_path = output / f"{file_stem(device)}.csv"
    unfinished = csv_path.with_name(f"{csv_path.stem}-unfinished.csv")  # what a run that is killed leaves
    unfinished.unlink(missing_ok=True)
    rows = []
    for name in arguments.ops or specs:
        start = time.perf_counter()
        for measured in measure.bench_op(specs[name], device, selection):
            rows += measured
            report.write_csv(unfinished, rows)
            seconds, start = time.perf_counter() - start, time.perf_counter()
            print(f"{name} {measured[0].case} {measured[0].dtype}: {seconds:.1f} s", file=sys.stderr, flush=True)
    if not rows:
        arguments.refuse("the chosen ops have no such cases on this device")
    print(report.table(rows))

    report.write_csv(csv_path, rows)
    unfinished.unlink()
    print(f"\nrows:  {csv_path}")
    for name in dict.fromkeys(row.op for row in rows if row.ms_p50 is not None):
        chart_path = output / f"{file_stem(device)}-{name}.png"
        of_op = [row for row in rows if row.op == name]
        on_curves = {case for sizes in specs[name].curves.values() for case in sizes.values()}
        if any(row.case in on_curves and row.ms_p50 is not None for row in of_op):
            report.write_curves(chart_path, of_op, specs[name].curves)
        else:
            report.write_chart(chart_path, of_op)
        print(f"chart: {chart_path}")
    return 1 if any(row.ours and row.ms_p50 is None for row in rows) else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _default_output(whole: bool) -> Path:
    """Committed results are replaced by whole runs only."""
    results = Path("benchmarks/results")
    return results if whole and results.is_dir() else Path("fasttfm-bench")
