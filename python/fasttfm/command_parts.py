"""What the commands around trained models share: options, sentences for what is wrong, files that are whole."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written, and every option's default where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda; by default a GPU if there is one")


def add_training_options(parser: argparse.ArgumentParser, *, rate: float) -> None:
    """How a model is trained, whatever it is trained for."""
    group = parser.add_argument_group("training")
    group.add_argument("--learning-rate", type=float, default=rate, metavar="RATE", help="the largest learning rate")
    group.add_argument("--warmup", type=float, default=0.1, metavar="SHARE", help="of all steps, while the rate rises")
    group.add_argument("--weight-decay", type=float, default=0.01, metavar="RATE", help="of matrices")
    group.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="the gradient's largest norm")
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches in a step")
    group.add_argument(
        "--precision", choices=("float32", "bfloat16"), help="of products; by default bfloat16 on a GPU, else float32"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random")


def device_of(arguments: argparse.Namespace) -> Any:
    """The device that was asked for, or a GPU if there is one."""
    import torch

    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: expected cpu or cuda, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device: expected a device that is here, got {name}, and torch sees no GPU")
    return device


def precision_of(arguments: argparse.Namespace, device: Any) -> str:
    return arguments.precision or ("bfloat16" if device.type == "cuda" else "float32")


@contextlib.contextmanager
def refusing(arguments: argparse.Namespace) -> Iterator[None]:
    """Around what reads arguments and files: what is wrong with them ends the command with a sentence and status 2.
    Warnings become lines on stderr."""

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"note: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = note
        try:
            yield
        except (ValueError, ImportError, OSError) as error:
            arguments.refuse(str(error))


def write_text(path: Path, text: str) -> None:
    """Writes beside ``path`` first: whoever finds the file finds it whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sentence(scores: Mapping[str, float]) -> str:
    """Scores on one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in scores.items())
