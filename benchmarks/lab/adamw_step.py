"""Training steps with torch's fused AdamW and with fasttfm's, without copies of weights and with them, in turn, in one
process on a GPU.

python benchmarks/lab/adamw_step.py bert-large 64x512 [padded] [graph]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from step_turns import medians
from training_contenders import Case, make_batch
from training_step import training_step

from fasttfm import optim


def torchs(parameters: Any, *, weight_copies: bool, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options, fused=True)


def without_copies(parameters: Any, *, weight_copies: bool, **options: Any) -> torch.optim.Optimizer:
    return OURS(parameters, **options)


OURS = optim.AdamW
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch's AdamW": torchs,
    "without copies": without_copies,
    "with copies": OURS,
}


def main() -> None:
    model, batch, *rest = sys.argv[1:]
    sequences, length = map(int, batch.split("x"))
    case, device = Case(model, sequences, length, "padded" in rest), torch.device("cuda")
    given = make_batch(case, case.config().vocab_size, device)
    steps = {}
    for name, made in OPTIMIZERS.items():
        optim.AdamW = made  # type: ignore[assignment, misc]
        steps[name] = training_step("fasttfm-graph" if "graph" in rest else "fasttfm", case, given, device)
        losses = [float(steps[name]()) for _ in range(4)]
        print(f"{name}: losses {' '.join(f'{each:.5f}' for each in losses)}", flush=True)
    for name, found in medians(steps).items():
        print(f"{' '.join([model, batch, *rest])} {name}: {found:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
