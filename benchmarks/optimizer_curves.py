"""Pre-trains a small model with several optimizers and schedules on as many tokens, and compares the validation losses.

    python benchmarks/optimizer_curves.py --out benchmarks/results

Every run is `fasttfm pretrain gpt2` with the same parameters, batches and validation set, on the CPU and the text that
ships with the package. Each optimizer has several learning rates with the linear schedule; the best one, by the final
validation loss, also runs with the schedule wsd. Writes <out>/<device>-optimizer_curves.csv with the validation losses
of all runs, and a plot of the best.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm import __version__
from fasttfm.bench.timing import device_name, file_stem
from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import pretrain
from fasttfm.train.settings import OptimizerSettings, PretrainSettings, RunSettings, ScheduleSettings

SIZE = {"n_embd": 128, "n_layer": 3, "n_head": 4}
COLUMNS = ("optimizer", "schedule", "learning_rate", "step", "tokens", "validation_loss")
ABOUT = ("model", "seed", "threads", "device", "torch_version", "fasttfm_version")


class Case(NamedTuple):
    optimizer: str
    schedule: str
    rate: float

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.schedule}, {self.rate:g}"


def settings_of(case: Case, arguments: argparse.Namespace) -> PretrainSettings:
    return PretrainSettings(
        "gpt2",
        "small",
        ScheduleSettings(arguments.steps, arguments.steps // 10, case.schedule),
        OptimizerSettings(case.optimizer, case.rate, weight_decay=arguments.weight_decay),
        vocabulary=4000,
        tokens_per_step=arguments.tokens,
        max_length=128,
        dropout=0.0,
        changes=SIZE,
        seed=arguments.seed,
    )


def curve_of(case: Case, arguments: argparse.Namespace, folder: Path) -> list[tuple[Any, ...]]:
    """Step, tokens and validation loss of each evaluation."""
    output = folder / "run"
    every = max(1, arguments.steps // 10)
    options: dict[str, Any] = {"evaluate_every": every, "evaluation_batches": 8, "log_every": every, "progress": False}
    run = RunSettings(output, folder / "shards", "cpu", overwrite=True, checkpoint_every=arguments.steps, **options)
    pretrain(settings_of(case, arguments), run)
    rows = [row for row in read_rows(output / "log.csv") if row["validation_loss"] != ""]
    curve = [(row["step"], row["tokens"], f"{float(row['validation_loss']):.4f}") for row in rows]
    print(f"{case}: validation loss {curve[-1][2]}", flush=True)
    return curve


def write_plot(path: Path, title: str, curves: dict[Case, list[tuple[Any, ...]]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    colors, styles = {"adamw": "#1b6ca8", "muon": "#c2571a", "lamb": "#4b8b3b"}, {"linear": "-", "wsd": "--"}
    for case, rows in curves.items():
        tokens, losses = [int(row[1]) / 1e6 for row in rows], [float(row[2]) for row in rows]
        look = {"color": colors[case.optimizer], "linestyle": styles[case.schedule]}
        panel.plot(tokens, losses, label=str(case), **look)
    panel.set_xlabel("million tokens")
    panel.set_ylabel("validation loss")
    panel.set_title(title, loc="left", fontsize=10)
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the CSV and the plot")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    curves: dict[Case, list[tuple[Any, ...]]] = {}
    best: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in arguments.optimizers:
            cases = [Case(optimizer, "linear", rate) for rate in arguments.learning_rates]
            curves.update((case, curve_of(case, arguments, Path(folder))) for case in cases)
            linear = min(cases, key=lambda case: float(curves[case][-1][2]))
            stable = linear._replace(schedule="wsd")
            curves[stable] = curve_of(stable, arguments, Path(folder))
            best += [linear, stable]
    if arguments.out:
        cpu = torch.device("cpu")
        model = "gpt2 " + " ".join(f"{name}={value}" for name, value in SIZE.items())
        about = (model, arguments.seed, torch.get_num_threads(), device_name(cpu), torch.__version__, __version__)
        path = arguments.out / f"{file_stem(cpu)}-optimizer_curves.csv"
        with path.open("w", newline="") as file:
            rows = [(*case, *row, *about) for case, curve in curves.items() for row in curve]
            csv.writer(file, lineterminator="\n").writerows([(*COLUMNS, *ABOUT), *rows])
        write_plot(
            path.with_suffix(".png"), f"{model}, {arguments.tokens:,} tokens per step", {c: curves[c] for c in best}
        )
        print(f"rows: {path}")


if __name__ == "__main__":
    main()
