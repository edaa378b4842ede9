"""The common part of specs of losses over a vocabulary: hidden rows, a weight, labels (some ignored), costs."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs
from fasttfm.testing.row_cases import in_layout
from fasttfm.testing.spec import Cost, OpCase, draw, op_case

IGNORED = -100


def loss_case(name: str, *shape: int, vocabulary: int, options: dict[str, Any] | None = None, **sizes: Any) -> OpCase:
    """A case of a loss whose mean is taken, unless ``options`` have another reduction."""
    return op_case(name, {"reduction": "mean", **(options or {})}, shape=shape, vocabulary=vocabulary, **sizes)


def random_loss_options(source: random.Random) -> dict[str, Any]:
    return {
        "reduction": source.choice(("mean", "sum", "none")),
        "label_smoothing": source.choice((0.0, 0.1)),
        "z_loss": source.choice((0.0, 1e-3)),
    }


def draw_hidden(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """hidden of the case's ``shape``, weight and, unless ``bias`` is false, bias over ``vocabulary`` tokens. ``scale``
    is that of the logits."""
    shape, vocabulary = case.sizes["shape"], case.sizes["vocabulary"]
    scale = case.sizes.get("scale", 1.0)

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    return {
        "hidden": in_layout(tensor(*shape), case.sizes.get("layout", "contiguous"), tensor),
        "weight": tensor(vocabulary, shape[-1], scale=scale * shape[-1] ** -0.5),
        "bias": tensor(vocabulary, scale=scale) if case.sizes.get("bias", True) else None,
    }


def draw_labels(
    shape: tuple[int, ...], share: float, vocabulary: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Labels of which about ``share`` count, at least the last one unless it is 0; the others are IGNORED."""
    labels = torch.randint(0, vocabulary, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) >= share
    if labels.numel() > 0 and share > 0:
        ignored.view(-1)[-1] = False
    return labels.masked_fill(ignored, IGNORED).to(device)


def cost(rows: int, columns: int, vocabulary: int, dtype: torch.dtype, products: int) -> Cost:
    """Products of rows x columns x vocabulary; rows and weight are read, and as much written in a backward. Logits need
    not go through memory."""
    return Cost(
        bytes=products * (rows + vocabulary) * columns * dtype.itemsize,
        flops=products * 2 * rows * columns * vocabulary,
    )
