"""The common part of specs of losses over a vocabulary: hidden rows, a weight, labels (some ignored), costs."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.testing.spec import Cost, Inputs, OpCase, draw

IGNORED = -100


def draw_hidden(case: OpCase, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    """hidden of the case's ``shape``, weight and, unless ``bias`` is false, bias over ``vocabulary`` tokens. ``scale``
    is that of the logits."""
    shape, vocabulary = case.sizes["shape"], case.sizes["vocabulary"]
    scale = case.sizes.get("scale", 1.0)

    def tensor(*sizes: int, scale: float = 1.0) -> Tensor:
        return draw(generator, *sizes, dtype=dtype, device=device, scale=scale)

    hidden = tensor(*shape)
    if case.sizes.get("layout") == "transposed":
        hidden = hidden.transpose(0, 1)
    elif case.sizes.get("layout") == "strided":
        hidden = hidden.repeat_interleave(2, dim=-1)[..., ::2]
    return {
        "hidden": hidden,
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
