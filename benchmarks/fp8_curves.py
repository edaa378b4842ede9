"""Pre-trains a model in FP8 and in bf16 from the same seeds on text, and compares the losses.

    python benchmarks/fp8_curves.py bert base --data texts/ --steps 1000 --out curves
    python benchmarks/fp8_curves.py gpt2 small --data texts/ --steps 300 --tokens 32768 --max-length 1024 --out curves
    python benchmarks/fp8_curves.py bert base --objective mlm --warm-start-steps 9000 --warm-start-layers 3 \
        --data texts/ --out curves

Every run is `fasttfm pretrain` of --tokens tokens per step; the runs of a seed have the same parameters, batches and
dropout seeds. Writes <out>/<model>-<size>.csv with the training losses, averaged over 20 steps, and the validation loss
at the end of each run, and a plot of the averages, after each run. FP8 is as good as bf16 if its final losses are
within the spread of the seeds.

Masked language models predict only word frequencies for the first thousands of steps, whatever their precision. With
--warm-start-steps all runs start from the parameters of one more run, in bf16 and without dropout, which takes many
small steps. With --warm-start-layers its model has that number of layers, which learn to read their context in fewer
steps, and all runs start with repetitions of these layers. Its log is <out>/<model>-<size>-warm-start/log.csv; a second
call with the same --out uses its result.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fasttfm.models.families import FAMILIES
from fasttfm.train.logs import read_rows
from fasttfm.train.pretrain import Summary, pretrain
from fasttfm.train.settings import OptimizerSettings, PretrainSettings, RunSettings, ScheduleSettings, StepSettings

_MEAN = 20  # steps
_DROPOUT = 0.1  # of runs after a warm start, which has none
_WARM_UP = 500  # steps of the warm start whose learning rate increases


def settings_of(arguments: argparse.Namespace, precision: str, seed: int) -> PretrainSettings:
    on_gpu = torch.cuda.is_available()
    return PretrainSettings(
        arguments.model,
        arguments.size,
        ScheduleSettings(arguments.steps, arguments.steps // 10),
        OptimizerSettings(learning_rate=arguments.learning_rate),
        StepSettings(precision=precision, cuda_graph=on_gpu),
        objective=arguments.objective,
        data=tuple(map(str, arguments.data)),
        vocabulary=arguments.vocabulary,
        tokens_per_step=arguments.tokens,
        max_length=arguments.max_length,
        seed=seed,
    )


def warm_start(arguments: argparse.Namespace) -> Path | None:
    """The checkpoint from which all runs start."""
    steps = arguments.warm_start_steps
    if not steps:
        return None
    output = arguments.out / f"{arguments.model}-{arguments.size}-warm-start"
    if (output / f"checkpoint-{steps:06}").is_dir():
        return repeat_layers(arguments, output / f"checkpoint-{steps:06}")
    settings = dataclasses.replace(
        settings_of(arguments, "bfloat16", 0),
        schedule=ScheduleSettings(steps, min(steps // 10, _WARM_UP), "constant"),
        optimizer=OptimizerSettings(learning_rate=arguments.warm_start_learning_rate, betas=(0.9, 0.98)),
        tokens_per_step=arguments.warm_start_tokens,
        dropout=0.0,
        changes={"num_hidden_layers": arguments.warm_start_layers} if arguments.warm_start_layers else {},
    )
    summary = run(arguments, settings, output, evaluate_every=max(1, steps // 16))
    loss, limit = summary.held_out["loss"], arguments.warm_start_loss
    print(f"warm start: {steps} steps, validation {loss:.4f}", flush=True)
    if limit is not None and loss >= limit:
        raise SystemExit(f"--warm-start-loss: expected a validation loss below {limit}, got {loss:.4f}")
    return repeat_layers(arguments, summary.checkpoint)


def repeat_layers(arguments: argparse.Namespace, checkpoint: Path) -> Path:
    """A copy of a checkpoint of --warm-start-layers layers that repeats them up to the depth of the size (progressive
    stacking); without that option, the checkpoint itself."""
    layers = arguments.warm_start_layers
    if layers is None:
        return checkpoint
    repeated = checkpoint.with_name("repeated")
    shutil.copytree(checkpoint, repeated, dirs_exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    depth = FAMILIES[arguments.model].config.named(arguments.size).num_hidden_layers
    (repeated / "config.json").write_text(json.dumps(config | {"num_hidden_layers": depth}))
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if match := re.fullmatch(r"(.*\.layer\.)(\d+)(\..*)", name):
            before, index, after = match.groups()
            tensors |= {f"{before}{copy}{after}": tensor.clone() for copy in range(int(index) + layers, depth, layers)}
    save_file(tensors, repeated / "model.safetensors", metadata={"format": "pt"})
    return repeated


def run(arguments: argparse.Namespace, settings: PretrainSettings, output: Path, evaluate_every: int) -> Summary:
    tokenizer = arguments.out / "tokenizer" / arguments.model
    if tokenizer.is_dir():  # that of the first run
        settings = dataclasses.replace(settings, tokenizer=str(tokenizer))
    options = RunSettings(
        output,
        prepared=arguments.out / "shards" / arguments.model,
        overwrite=True,
        log_every=1,
        checkpoint_every=settings.schedule.steps,
        evaluate_every=evaluate_every,
        evaluation_batches=16,
        progress=False,
    )
    summary = pretrain(settings, options)
    assert summary is not None
    if not tokenizer.is_dir():
        tokenizer.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(output / "tokenizer", tokenizer)
    return summary


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
    parser.add_argument("--objective", help="the family's own by default")
    parser.add_argument("--warm-start-steps", type=int, default=0, help="of a run before the others")
    parser.add_argument("--warm-start-tokens", type=int, default=8192, help="of each of its steps")
    parser.add_argument("--warm-start-learning-rate", type=float, default=1e-4, help="constant after the warmup")
    parser.add_argument("--warm-start-layers", type=int, help="of its model; those of the size by default")
    parser.add_argument("--warm-start-loss", type=float, help="stop if its validation loss is not below this")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.steps < _MEAN:
        parser.error(f"--steps: expected at least {_MEAN}, got {arguments.steps}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"{arguments.model}-{arguments.size}"
    curves: dict[tuple[str, int], list[float]] = {}
    title = f"{name}, {arguments.tokens:,} tokens per step"
    start = warm_start(arguments)
    with (arguments.out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "precision", "seed", "step", "loss", "held_out_loss"])
        for seed in arguments.seeds:
            for precision in ("bfloat16", "fp8"):
                settings = settings_of(arguments, precision, seed)
                if start is not None:
                    settings = dataclasses.replace(settings, size="", init=str(start), dropout=_DROPOUT)
                output = arguments.out / f"{name}-{precision}-{seed}"
                held_out = run(arguments, settings, output, arguments.steps).held_out["loss"]
                losses = [float(row["loss"]) for row in read_rows(output / "log.csv")]
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
                write_plot(arguments.out / f"{name}.png", title, curves)


if __name__ == "__main__":
    main()
