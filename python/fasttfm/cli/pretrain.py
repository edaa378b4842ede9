"""``fasttfm pretrain``: trains a model on text files, from the tokenizer to a checkpoint that transformers opens."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from fasttfm.cli.options import exit_on_user_error, new_directory
from fasttfm.models.families import FAMILIES, trained_on_text

_COMPARED = ("bert", "gpt2")  # whose training step is timed against plain torch
_DEFAULT_RATES = {"tiny": 1e-3, "mini": 1e-3, "small": 5e-4, "medium": 5e-4}  # the others': 1e-4

_EXAMPLES = """
examples:
  fasttfm pretrain                                        a small BERT on the text that ships with the package
  fasttfm pretrain gpt2 --data 'books/*.txt' --size small --tokens-per-step 65536 --steps 20000
  fasttfm pretrain bert --output run --resume             resume an interrupted run
  torchrun --nproc-per-node 8 -m fasttfm pretrain bert --size large --parallel fsdp --data corpus/ --output run
"""


def add_parser(commands: Any) -> None:
    """Adds the ``pretrain`` command to a command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "pretrain",
        help="train a model on text files",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", default="bert", choices=tuple(trained_on_text()), help="the family; default: bert"
    )
    parser.add_argument("--size", help="a named size of the family, for example base; default: a small one")
    parser.add_argument(
        "--set", nargs="+", default=[], type=_field, metavar="FIELD=VALUE", help="override config fields"
    )
    _add_data(parser.add_argument_group("data"))
    _add_training(parser.add_argument_group("training"))
    _add_run(parser.add_argument_group("run"))
    parser.set_defaults(refuse=parser.error)


def _add_data(group: Any) -> None:
    group.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help=".txt, .jsonl or .parquet files, folders or patterns; default: the text that ships with the package",
    )
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, vocab.txt or a folder; default: trained")
    group.add_argument("--vocabulary", type=int, default=4000, help="vocabulary size of a trained tokenizer (4000)")
    group.add_argument("--prepared", type=Path, metavar="FOLDER", help="folder of token shards, reused by other runs")
    group.add_argument(
        "--held-out", type=float, default=0.02, help="fraction of the documents in the validation set (0.02)"
    )
    group.add_argument("--max-length", type=int, default=128, help="max tokens per sequence (128)")
    group.add_argument("--masking", type=float, default=0.15, help="fraction of tokens that are masked (0.15)")
    group.add_argument("--whole-word", action="store_true", help="mask whole words")
    group.add_argument("--ngram", type=int, default=1, help="mask n-grams of up to this length (1)")
    group.add_argument("--workers", type=int, help="data loading processes; default: 2 with a GPU, else 0")


def _add_training(group: Any) -> None:
    group.add_argument("--steps", type=int, default=400, help="optimizer steps (400)")
    group.add_argument("--tokens-per-step", type=int, default=2048, help="summed over all processes (2048)")
    group.add_argument("--accumulation", type=int, default=1, help="gradient accumulation steps per process (1)")
    group.add_argument("--optimizer", default="adamw", help="adamw (default) or lamb")
    group.add_argument("--learning-rate", type=float, help="peak learning rate; default by size: 0.001 to 0.0001")
    group.add_argument(
        "--weight-decay", type=float, default=0.01, help="weight decay, except for biases and LayerNorms (0.01)"
    )
    group.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999), metavar="B", help="Adam betas (0.9 0.999)")
    group.add_argument("--schedule", default="linear", help="linear (default), cosine or constant")
    group.add_argument("--warmup", type=int, help="warmup steps; default: a tenth of all steps")
    group.add_argument("--clip", type=float, default=1.0, help="max gradient norm; 0 disables clipping (1.0)")
    group.add_argument("--dropout", type=float, help="dropout probability; default: that of the size")
    group.add_argument("--precision", help="bfloat16 (default on a GPU) or float32 (default on a CPU)")
    group.add_argument("--compile", action="store_true", help="compile the forward with torch.compile")
    group.add_argument("--cuda-graph", action="store_true", help="run the step as a CUDA graph: one GPU, fixed shapes")
    group.add_argument("--bad-steps", type=int, default=5, help="consecutive non-finite steps that end the run (5)")
    group.add_argument("--seed", type=int, default=0, help="random seed (0)")


def _add_run(group: Any) -> None:
    group.add_argument("--output", type=Path, help="the run's folder; default: a new one under fasttfm-runs")
    group.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in --output")
    group.add_argument(
        "--overwrite", action="store_true", help="replace the run in --output, or write to a folder that has files"
    )
    group.add_argument("--device", help="cpu, cuda or cuda:<number>; default: a GPU where there is one")
    group.add_argument("--parallel", help="under torchrun: ddp (default) or fsdp")
    group.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="default: five times per run, at most every 1000"
    )
    group.add_argument("--keep", type=int, default=3, help="checkpoints to keep (3)")
    group.add_argument("--evaluate-every", type=int, metavar="STEPS", help="default: ten times per run")
    group.add_argument("--evaluation-batches", type=int, default=8, help="per process (8)")
    group.add_argument("--log-every", type=int, default=10, metavar="STEPS", help="steps per log row (10)")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="at the end, time a training step of bert or gpt2 against plain torch; default: without --data",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def _field(text: str) -> tuple[str, Any]:
    """A field of the configuration and its value: hidden_size=512."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from fasttfm.train.pretrain import pretrain

    begun = time.perf_counter()
    with exit_on_user_error(arguments):
        settings, where = _settings(arguments)
        compares = _compares(arguments)
        summary = pretrain(settings, where)
        if summary is not None and not arguments.quiet:
            print(_report(summary, time.perf_counter() - begun))
            if summary.learnt is not None:
                print(f"\n{summary.learnt}")
            if compares:
                print(f"\n{_step_times(summary, arguments.model, where.device)}")
    return 0


def _compares(arguments: argparse.Namespace) -> bool:
    """Whether a step is timed against plain torch: by default where the package's own model and text are tried."""
    if arguments.compare is None:
        return arguments.model in _COMPARED and not arguments.data
    if arguments.compare and arguments.model not in _COMPARED:
        raise ValueError(f"--compare: expected with {' or '.join(_COMPARED)}, got {arguments.model}")
    return bool(arguments.compare)


def _step_times(summary: Any, model: str, device: str | None) -> Any:
    import torch

    from fasttfm import models
    from fasttfm.cli.torch_step import compare_steps

    kind = models.BertForPreTraining if model == "bert" else models.GPT2LMHeadModel
    config = kind.from_pretrained(summary.checkpoint).config
    return compare_steps(config, summary.batch, torch.device(device or _default_device()))


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _settings(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from fasttfm.train.settings import (
        OptimizerSettings,
        PretrainSettings,
        RunSettings,
        ScheduleSettings,
        StepSettings,
    )

    if arguments.resume and arguments.overwrite:
        raise ValueError("--resume: expected without --overwrite, which starts a new run")
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume: expected --output, the folder of the run to resume")
    size = arguments.size or FAMILIES[arguments.model].default_size
    device = arguments.device or _default_device()
    warmup = arguments.steps // 10 if arguments.warmup is None else arguments.warmup
    settings = PretrainSettings(
        arguments.model,
        size,
        ScheduleSettings(arguments.steps, warmup, arguments.schedule),
        OptimizerSettings(
            arguments.optimizer,
            _DEFAULT_RATES.get(size, 1e-4) if arguments.learning_rate is None else arguments.learning_rate,
            tuple(arguments.betas),
            weight_decay=arguments.weight_decay,
        ),
        StepSettings(
            arguments.clip or None,
            arguments.precision or ("bfloat16" if device.startswith("cuda") else "float32"),
            arguments.compile,
            arguments.cuda_graph,
            arguments.bad_steps,
        ),
        **{
            name: getattr(arguments, name)
            for name in (
                *("tokenizer", "vocabulary", "held_out", "tokens_per_step", "accumulation", "max_length", "masking"),
                *("whole_word", "ngram", "dropout", "seed"),
            )
        },
        data=tuple(arguments.data),
        changes=dict(arguments.set),
    )
    where = RunSettings(
        arguments.output or _new_directory(f"{arguments.model}-{size}"),
        progress=not arguments.quiet,
        **{
            name: getattr(arguments, name)
            for name in (
                *("prepared", "device", "parallel", "resume", "overwrite", "checkpoint_every", "keep"),
                *("evaluate_every", "evaluation_batches", "log_every", "workers"),
            )
        },
    )
    return settings, where


def _new_directory(name: str) -> Path:
    """A new one. All processes of a run must find the same: under torchrun --output is needed."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--output: expected under torchrun")
    return new_directory(name)


def _report(summary: Any, seconds: float) -> str:
    from fasttfm.train.curves import CURVES
    from fasttfm.train.logs import CSV

    held_out = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in summary.held_out.items())
    skipped = f"; {summary.skipped} were skipped, their loss or gradient was not finite" if summary.skipped else ""
    rate = "" if summary.tokens_per_second is None else f"; {summary.tokens_per_second:,.0f} tokens/s after warmup"
    return (
        f"{summary.steps} steps, {summary.tokens:,} tokens in {seconds:.0f} s{skipped}{rate}\n"
        f"training loss {summary.loss:.3f}; validation: {held_out}\n"
        f"checkpoint  {summary.checkpoint}\n"
        f"log         {summary.directory / CSV}\n"
        f"curves      {summary.directory / CURVES}"
    )
