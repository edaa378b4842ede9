"""What layers over few tokens on Hopper keep between calls: the workspace of the kernel for all layers, and the folded
weights. Other kernels need neither.

The blocks of the kernel for all layers (kernels/few_rows/cuda_layers.cu) hand data to each other through a workspace,
which no two launches may use at the same time. So it runs only inside of ``using``: an inference session has a
workspace, and one stream for all its launches.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from fasttfm.kernels.common.index_errors import also_checked
from fasttfm.ops.layers.few_rows_forward import POLLS
from fasttfm.ops.layers.folded import FoldedNorms, FoldedWeights
from fasttfm.ops.layers.parameters import Layers
from fasttfm.ops.layers.rules import one_kernel_bytes
from fasttfm.ops.layers.spec import Specs

_FOLDED = {"folded_norms": FoldedNorms.BOTH, "folded_first_norm": FoldedNorms.FIRST}


class Workspace:
    """The memory of launches that follow one another on one stream, which orders it: packets, the last tag in use, and
    whether a launch gave up. It is allocated by the first launch of each size; CUDA graphs contain its address."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self.fits = True  # whether all blocks are resident at once on the stream's SMs
        also_checked(self)

    def memory(self, size: int, device: torch.device) -> Tensor | None:
        """``size`` bytes, which were zero before the first launch; None if a capture would have to allocate them."""
        memory = self._memory.get(size)
        if memory is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            memory = self._memory[size] = torch.zeros(size, dtype=torch.uint8, device=device)
        return memory

    def raise_if_any(self) -> None:
        """Called by ``check_errors()``: synchronizes and raises if blocks of a launch gave up waiting for others. The
        results of that launch are NaN, and the GPU remains usable."""
        for memory in self._memory.values():
            if memory.is_cuda:
                torch.cuda.synchronize(memory.device)
            late = memory[4:8].view(torch.int32)
            if late.item() != 0:
                late.zero_()
                raise RuntimeError(
                    "few_rows_layers: expected all blocks of a launch to run at the same time, got none from some of"
                    f" them in {POLLS} polls: results of that launch are NaN"
                )

    def reset(self) -> None:
        """Starts again with the first tag, on the current stream. Needed before 2^32 tags are used up: a launch takes
        two for each layer."""
        for memory in self._memory.values():
            memory.zero_()


class FewTokens:
    """The memory of calls that follow one another on one stream."""

    def __init__(self) -> None:
        self.workspace, self.folded = Workspace(), FoldedWeights()

    def operands(self, rule: str, specs: Specs, layers: Layers) -> array[int] | None:
        """The table of operands for a plan with the rule; None if the plan cannot run: blocks of its kernel are not
        resident at the same time, or a capture would have to allocate memory."""
        if rule in _FOLDED:
            weights = self.folded.of(layers, _FOLDED[rule])
            return None if weights is None else weights.table
        memory = self.workspace.memory(one_kernel_bytes(specs[0]), layers.device) if self.workspace.fits else None
        return None if memory is None else array("q", (memory.data_ptr(),))


_current: ContextVar[FewTokens | None] = ContextVar("few_tokens", default=None)


@contextlib.contextmanager
def using(kept: FewTokens) -> Iterator[None]:
    """A context in which layers may run in the kernel for all of them, and with folded LayerNorms."""
    token = _current.set(kept)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> FewTokens | None:
    return _current.get()
