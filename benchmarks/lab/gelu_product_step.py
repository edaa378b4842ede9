"""Training steps with Hopper's kernels of gelu_product switched on and off in turn, in one process on a GPU.

python benchmarks/lab/gelu_product_step.py bert-large 64x512
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from step_turns import medians
from training_contenders import Case, make_batch
from training_step import training_step

from fasttfm.ops import gelu_product


def main() -> None:
    model, batch = sys.argv[1:]
    sequences, length = map(int, batch.split("x"))
    case, device = Case(model, sequences, length, False), torch.device("cuda")
    step = training_step("fasttfm", case, make_batch(case, case.config().vocab_size, device), device)
    forward, backward = gelu_product.forward_cuda, gelu_product.backward_cuda
    modes = {
        "neither": (gelu_product.forward_torch, gelu_product.backward_torch),
        "forward": (forward, gelu_product.backward_torch),
        "backward": (gelu_product.forward_torch, backward),
        "both": (forward, backward),
    }

    def in_mode(mode: str) -> None:
        gelu_product.forward_cuda, gelu_product.backward_cuda = modes[mode]
        step()

    for _ in range(3):
        step()
    for mode, found in medians({mode: functools.partial(in_mode, mode) for mode in modes}).items():
        print(f"{model} {batch} {mode}: {found:.2f} ms")


if __name__ == "__main__":
    main()
