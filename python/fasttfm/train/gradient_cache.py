"""``cached_loss``: the loss of a large batch of vectors whose encoder runs on small parts of it (GradCache, Gao et al.,
2021)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def cached_loss(encode: Callable[[Any], Tensor], parts: Sequence[Any], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """``loss(torch.cat([encode(part) for part in parts]))``, with the activations of one part in memory at a time.

    The vectors of all parts are computed without gradients, then the loss. The backward computes the gradients of the
    vectors, and of the parameters that the loss itself reads. Then it encodes each part again, with the same dropout
    and under the same autocast, and backpropagates. So a step takes one more forward pass, and has the gradients of the
    whole batch.

    Args:
        encode: Computes the vectors [n, D] of a part.
        parts: Arguments of ``encode``.
        loss: Computes the loss, one number, from the vectors of all parts.
    """
    if not torch.is_grad_enabled():
        return loss(torch.cat([encode(part) for part in parts]))
    states, vectors = [], []
    with torch.no_grad():
        for part in parts:
            states.append(_States())
            vectors.append(encode(part))
    joined = torch.cat(vectors)
    anchor = torch.empty(0, dtype=joined.dtype, device=joined.device, requires_grad=True)
    return loss(_EncodedAgain.apply(anchor, joined, encode, parts, states, [len(part) for part in vectors]))


class _EncodedAgain(torch.autograd.Function):
    """The vectors, whose backward runs the encoder. ``anchor`` is an input that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, vectors: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        return vectors.view_as(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dvectors: Tensor) -> tuple[None, ...]:
        encode, parts, states, counts = ctx.arguments
        for part, state, gradient in zip(parts, states, dvectors.split(counts), strict=True):
            with torch.enable_grad(), state.again():
                again = encode(part)
            if again.requires_grad:
                torch.autograd.backward(again, gradient)
        return (None,) * 6


class _States:
    """The states of random number generators and of autocast, to repeat a computation exactly."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.devices = list(range(torch.cuda.device_count())) if cuda else []
        self.cpu = torch.get_rng_state()
        self.cuda = [torch.cuda.get_rng_state(device) for device in self.devices]
        self.autocast: list[dict[str, Any]] = [
            {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
            for kind in ("cpu", *(["cuda"] if cuda else []))
        ]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(self.devices), contextlib.ExitStack() as contexts:
            torch.set_rng_state(self.cpu)
            for device, state in zip(self.devices, self.cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            for options in self.autocast:
                contexts.enter_context(torch.autocast(**options))
            yield
