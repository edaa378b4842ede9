"""Processes of torch.distributed in tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_ROOT = Path(__file__).parents[1]


def run_ranks(function: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    """Calls ``function(rank, *arguments)`` in one process per rank. They import the function's module, whose name
    begins with ``tests``; the repository's root comes last, because its ``kernels`` would hide an installed package."""
    with mock.patch.object(sys, "path", [*sys.path, str(_ROOT)]):
        torch.multiprocessing.spawn(function, arguments, nprocs=ranks)
