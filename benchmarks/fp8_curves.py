"""Pre-trains a model in FP8 and in bf16 from the same seeds on text, and compares the losses.

    python benchmarks/fp8_curves.py bert base --data texts/ --steps 1000 --out curves
    python benchmarks/fp8_curves.py gpt2 small --data texts/ --steps 300 --tokens 32768 --max-length 1024 --out curves

Every run is `fasttfm pretrain` of --tokens tokens per step; the runs of a seed have the same parameters, batches and
dropout seeds. Writes <out>/<model>-<size>.csv with the training losses, averaged over 20 steps, and the validation loss
at the end of each run, and a plot of the averages. FP8 is as good as bf16 if its final losses are within the spread of
the seeds.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
from pathlib import Path

import torch

from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import pretrain
from fasttfm.train.settings import OptimizerSettings, PretrainSettings, RunSettings, ScheduleSettings, StepSettings

_MEAN = 20  # steps


def settings_of(arguments: argparse.Namespace, precision: str, seed: int) -> PretrainSettings:
    on_gpu = torch.cuda.is_available()
    return PretrainSettings(
        arguments.model,
        arguments.size,
        ScheduleSettings(arguments.steps, arguments.steps // 10),
        OptimizerSettings(learning_rate=arguments.learning_rate),
        StepSettings(precision=precision, cuda_graph=on_gpu),
        data=tuple(map(str, arguments.data)),
        vocabulary=arguments.vocabulary,
        tokens_per_step=arguments.tokens,
        max_length=arguments.max_length,
        seed=seed,
    )


def run(arguments: argparse.Namespace, precision: str, seed: int) -> tuple[list[float], float]:
    """The training losses and the last validation loss."""
    output = arguments.out / f"{arguments.model}-{arguments.size}-{precision}-{seed}"
    settings = settings_of(arguments, precision, seed)
    tokenizer = arguments.out / "tokenizer" / arguments.model
    if tokenizer.is_dir():  # that of the first run
        settings = dataclasses.replace(settings, tokenizer=str(tokenizer))
    end = arguments.steps
    options = RunSettings(
        output,
        prepared=arguments.out / "shards" / arguments.model,
        overwrite=True,
        log_every=1,
        checkpoint_every=end,
        evaluate_every=end,
        evaluation_batches=16,
        progress=False,
    )
    summary = pretrain(settings, options)
    assert summary is not None
    if not tokenizer.is_dir():
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        (output / "tokenizer").rename(tokenizer)
    rows = read_rows(output / "log.csv")
    return [float(row["loss"]) for row in rows], summary.held_out["loss"]


def mean_before(losses: list[float], end: int) -> float:
    return sum(losses[end - _MEAN : end]) / _MEAN


def write_plot(path: Path, title: str, curves: dict[tuple[str, int], list[float]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    colors, styles = ("#1b6ca8", "#c2571a", "#4b8b3b", "#7a5195"), {"bfloat16": "-", "fp8": "--"}
    seeds = sorted({seed for _, seed in curves})
    for (precision, seed), losses in curves.items():
        color, line = colors[seeds.index(seed) % len(colors)], styles[precision]
        means = [mean_before(losses, end) for end in range(_MEAN, len(losses) + 1)]
        panel.plot(range(_MEAN, len(losses) + 1), means, color=color, linestyle=line, label=f"{precision}, seed {seed}")
    panel.set_xlabel("step")
    panel.set_ylabel(f"training loss, mean of {_MEAN} steps")
    panel.set_title(title, loc="left", fontsize=10)
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a family, for example bert or gpt2")
    parser.add_argument("size", help="a size of the family")
    parser.add_argument("--data", nargs="+", required=True, type=Path, help="files or folders of text")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=32768, help="of a step")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.steps < _MEAN:
        parser.error(f"--steps: expected at least {_MEAN}, got {arguments.steps}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"{arguments.model}-{arguments.size}"
    curves: dict[tuple[str, int], list[float]] = {}
    with (arguments.out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "precision", "seed", "step", "loss", "held_out_loss"])
        for seed in arguments.seeds:
            for precision in ("bfloat16", "fp8"):
                losses, held_out = run(arguments, precision, seed)
                curves[precision, seed] = losses
                last = mean_before(losses, len(losses))
                print(
                    f"{name} {precision} seed {seed}: last {_MEAN} steps {last:.4f}, validation {held_out:.4f}",
                    flush=True,
                )
                ends = range(_MEAN, len(losses) + 1, _MEAN)
                rows = [[name, precision, seed, end, f"{mean_before(losses, end):.5f}", ""] for end in ends]
                rows[-1][-1] = f"{held_out:.5f}"
                writer.writerows(rows)
                file.flush()
    title = f"{name}, {arguments.tokens:,} tokens per step"
    write_plot(arguments.out / f"{name}.png", title, curves)


if __name__ == "__main__":
    main()
