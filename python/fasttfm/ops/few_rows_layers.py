"""All layers of an encoder over up to 32 tokens in one kernel on Hopper (kernels/few_rows/cuda_layers.cu).

Its blocks hand data to each other through a workspace, which no two launches may use at the same time. So the kernel
runs only inside of ``few_tokens.using``: an inference session has a workspace, and one stream for all its launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.index_errors import also_checked
from fasttfm.ops.attention_checks import check_values
from fasttfm.ops.backends import dtype_name
from fasttfm.ops.transformer_block import BlockOptions
from fasttfm.ops.transformer_native import Batch, Layers, missing_cuda

MOST_ROWS = 32  # kernels/few_rows/layers_shape.h
# The kernel was measured with 6 and 12 layers; its arguments have room for the addresses of the parameters of 24.
LEAST_LAYERS, MOST_LAYERS = 6, 24
_ACTIVATIONS = ("gelu", "gelu_tanh")
# After so many polls, 20 seconds or more, a block gives up waiting for another one. All are resident before any starts,
# so that none has to, whatever other streams run.
POLLS = 1 << 26


class Workspace:
    """The memory of launches that follow one another on one stream, which orders it: packets, the last tag in use, and
    whether a launch gave up. It is allocated by the first launch of each size; CUDA graphs contain its address."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self.fits = True  # whether all blocks are resident at once on the stream's SMs
        also_checked(self)

    def memory(self, size: int, device: torch.device) -> Tensor | None:
        """``size`` bytes, which were zero before the first launch; None if a capture would have to allocate them."""
        found = self._memory.get(size)
        if found is None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            found = self._memory[size] = torch.zeros(size, dtype=torch.uint8, device=device)
        return found

    def raise_if_any(self) -> None:
        """For ``check_errors()``: synchronizes and raises if blocks of a launch gave up waiting for others. The results
        of that launch are NaN, and the GPU remains usable."""
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
        for each in self._memory.values():
            each.zero_()


def refuse(batch: Batch, layers: Layers, options: BlockOptions) -> str | None:
    """Why the kernel does not support a call without gradients that ``transformer_native.refuse`` accepts with the
    kernels for few rows; None if it does."""
    tokens, width = batch.x.shape
    window = (options.window_left, options.window_right)
    if not 1 <= tokens <= MOST_ROWS:
        return f"takes 1 to {MOST_ROWS} tokens, got {tokens}"
    if batch.x.dtype != torch.bfloat16 or layers.dtype != torch.bfloat16:
        return f"takes bfloat16, got {dtype_name(batch.x.dtype)} and parameters in {dtype_name(layers.dtype)}"
    if not LEAST_LAYERS <= layers.depth <= MOST_LAYERS:
        return f"takes {LEAST_LAYERS} to {MOST_LAYERS} layers, got {layers.depth}"
    if batch.residual_dtype is not None:
        return "takes post-LN layers"
    if batch.seeds is not None:
        return "takes no dropout"
    if window != (-1, -1):
        return f"attends to all keys, got a window of {window}"
    if options.activation not in _ACTIVATIONS:
        return f"takes {' and '.join(_ACTIVATIONS)}, got {options.activation}"
    if None in layers.shapes:
        return "takes layers with all biases and LayerNorm parameters"
    if _native.core().few_rows_layers_workspace(width, layers.intermediate, options.heads) == 0:
        sizes = f"{width} columns, {layers.intermediate} in the feed-forward block and {options.heads} heads"
        return f"takes the sizes of BERT-base's and MiniLM's layers, got {sizes}"
    return missing_cuda(batch.x.device)


def run(workspace: Workspace, batch: Batch, layers: Layers, options: BlockOptions) -> Tensor | None:
    """The result of the layers; None if the kernel has to leave the call to others, because its blocks are not all
    resident at once, or because a CUDA graph is captured before the workspace is allocated."""
    x = batch.x
    size = _native.core().few_rows_layers_workspace(x.shape[1], layers.intermediate, options.heads)
    memory = workspace.memory(size, x.device) if workspace.fits else None
    if memory is None:
        return None
    check_values("attention", x.shape[0], options.max_seqlen, batch.cu_seqlens, None)
    y = torch.empty_like(x)
    sizes = (layers.intermediate, options.heads, CODES[options.activation], options.eps_a, options.eps_b, POLLS)
    try:
        _native.core().few_rows_layers_cuda(
            *(layers.table.buffer_info()[0], layers.depth, x, y, batch.cu_seqlens, memory), *sizes
        )
    except _native.DoesNotFit:
        workspace.fits = False
        return None
    return y
