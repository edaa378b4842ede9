"""``cached_loss``: the loss of a large batch of vectors whose encoder runs on small parts of it (GradCache, Gao et al.,
2021)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def cached_loss(encode: Callable[[Any], Tensor], parts: Sequence[Any], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """``loss(torch.cat([encode(part) for part in parts]))``, with the activations of one part in memory at a time.

    The vectors of all parts are computed without gradients, then the loss and its gradients with respect to the
    vectors. The backward encodes each part again, with the same dropout and under the same autocast, and backpropagates
    these gradients. So a step takes one more forward pass, and has the gradients of the whole batch.

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
    leaf = torch.cat(vectors).requires_grad_()
    value = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    gradients = gradient.split([len(each) for each in vectors])
    result = value.detach().requires_grad_()

    def backward(incoming: Tensor) -> None:
        for part, state, own in zip(parts, states, gradients, strict=True):
            with torch.enable_grad(), state.again():
                again = encode(part)
            torch.autograd.backward(again, own * incoming)

    result.register_hook(backward)
    return result


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
