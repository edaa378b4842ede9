"""The bytes that a call saves for its backward, which a training step holds until then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def saved_bytes(call: Callable[[], object]) -> int:
    """The bytes of all tensors that ``call`` saves for the backward; shared memory counts once."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()  # kept until the sizes are summed, so that no address is used twice
    del result
    return sum(sizes.values())
