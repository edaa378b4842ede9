"""``fasttfm experiment``: reproduces an ablation of a paper with small models on the shipped data, in minutes on a CPU.

  fasttfm experiment sentence-pairs
  fasttfm experiment sharing --output runs/sharing --seed 1

experiments:
{experiments}

The output directory contains the table (NAME.csv), a plot (NAME.png), and a page (NAME.md) that says what the paper
found and what to expect of models this small. They are written after each row, so that an interrupted run keeps what it
has found.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from fasttfm.cli.options import Formatter, check_output, check_writable, exit_on_user_error, output_of


def add_parser(subparsers: Any) -> None:
    """Adds the ``experiment`` command to a command line."""
    from fasttfm.tasks.experiments.registry import EXPERIMENTS

    listed = "\n".join(f"  {name:16} {experiment.title}" for name, experiment in EXPERIMENTS.items())
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "experiment",
        help="reproduce an ablation of a paper with small models",
        description=str(__doc__).format(experiments=listed),
        formatter_class=Formatter,
    )
    parser.add_argument("name", choices=tuple(EXPERIMENTS), metavar="NAME", help="one of the experiments above")
    parser.add_argument("--quick", action="store_true", help="only a few steps of the smallest models, as a smoke test")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="output directory (default: a new one under fasttfm-runs)"
    )
    parser.add_argument("--overwrite", action="store_true", help="write to --output even if it has files")
    parser.add_argument("--quiet", action="store_true", help="print the table only at the end")
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        import warnings

        from fasttfm.tasks.experiments.lab import Lab, table
        from fasttfm.tasks.experiments.registry import EXPERIMENTS
        from fasttfm.train.progress import tracked
        from fasttfm.train.settings import random_seed

        check_output(arguments)
        random_seed(arguments.seed)
        experiment = EXPERIMENTS[arguments.name]
        output = output_of(arguments, f"experiment-{arguments.name}")
        check_writable(output)
        print(" ".join(experiment.expect.split()), flush=True)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # each row's model gets a new head, as it should
            lab = Lab(Path(folder), quick=arguments.quick, seed=arguments.seed)
            rows = []
            for row in experiment.run(lab) if arguments.quiet else tracked(experiment.run(lab), "rows"):
                rows.append(row)
                paths = experiment.write(rows, output)  # an interrupted run keeps its rows
                if not arguments.quiet:
                    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        print(f"\n{table(rows)}\n")
        print(f"output     {output} ({', '.join(path.name for path in paths)})")
    return 0
