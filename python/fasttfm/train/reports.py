"""Services that receive a run's numbers, in addition to its log."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbReport:
    """Weights & Biases, with the interface of TensorBoard's writer."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ImportError("the report to Weights & Biases needs wandb: pip install wandb") from None
        self._run = wandb.init(project="fasttfm", name=directory.name, dir=str(directory), config=dict(settings))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_reports(names: list[str]) -> None:
    """Raises ImportError if the package of a report is not installed."""
    if "tensorboard" in names:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            raise ImportError("the report to TensorBoard needs tensorboard: pip install tensorboard") from None


def open_reports(names: list[str], directory: Path, settings: Mapping[str, Any]) -> list[Any]:
    """The reports with these names, except for TensorBoard's, which every log writes if it is installed."""
    return [WandbReport(directory, settings)] if "wandb" in names else []
