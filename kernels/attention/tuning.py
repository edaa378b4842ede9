"""Tile sizes of attention's Triton kernels: a table by the properties of a call. Nothing is timed at run time.

The numbers for Hopper are measured (benchmarks/lab/attention_tiles.py) for 16-bit types and head dims of 64 and 128;
those for other GPUs fit, up to a head dim of 128, into 99 KB of shared memory, the least that a supported GPU has.
Above it, tiles depend on the shared memory of the GPU.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """The numbers of queries and keys of a tile, and the launch options of a program."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # maxnreg
    programs: int = 1  # per SM, where programs iterate over heads
    ahead: int = 0  # programs of keys prefetch for the program that is this many per SM later; 0: no prefetch
    keys_first: bool = False  # computes scores transposed, [keys, queries]; not with dropout, which draws along keys

    def options(self) -> dict[str, int | None]:
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


class Call(NamedTuple):
    """The properties of a call on which tile sizes depend."""

    hopper: bool
    head_dim: int
    element_bytes: int
    queries: int  # of the longest sequence
    keys: int
    dropout: bool
    block_memory: int  # bytes of shared memory that a program may use
    bias: bool = False


# Larger tiles need 139264 bytes in 16-bit types with head dims above 128. GPUs have either 99 KB, or 163 KB and more.
_LARGE_MEMORY = 144 * 1024
# In fp32, keys and values of such head dims take 128 KB. Dropout draws for 64 keys at a time, so no tile is smaller.
FLOAT_BACKWARD_MEMORY = 172032


def short_forward_tiles(call: Call) -> Tiles | None:
    """Tiles of the kernel that holds a whole head in one tile; None if a head does not fit."""
    if not _short(call):
        return None
    if max(call.queries, call.keys) <= 64:
        return Tiles(64, 64, 4, _short_stages(call), programs=2)
    return Tiles(128, 128, 8, 2, registers=128, programs=2)


def short_backward_tiles(call: Call) -> Tiles | None:
    if not _short(call):
        return None
    if max(call.queries, call.keys) <= 64:
        return Tiles(64, 64, 4, _short_stages(call))
    return Tiles(128, 128, 8, 3)


def _short(call: Call) -> bool:
    """Whether all queries and keys of a head fit into one tile."""
    longest = 128 if call.hopper and call.element_bytes == 2 else 64
    return call.head_dim <= 64 and max(call.queries, call.keys) <= longest


def _short_stages(call: Call) -> int:
    return 1 if call.element_bytes == 4 else 3 if call.hopper else 2


def _little_memory(call: Call, above: int) -> bool:
    return call.head_dim > above and call.block_memory < _LARGE_MEMORY


def refuse_backward(head_dim: int, element_bytes: int, block_memory: int) -> str | None:
    """Why no tiles of the backward fit."""
    if element_bytes < 4 or head_dim <= 128 or block_memory >= FLOAT_BACKWARD_MEMORY:
        return None
    needs = f"{FLOAT_BACKWARD_MEMORY} bytes of shared memory for a program, the GPU has {block_memory}"
    return f"goes backward in float32 with head dims above 128 with {needs}"


def _float_tiles(call: Call) -> Tiles:
    """The tiles for fp32, which tensor cores would round to TF32."""
    return Tiles(16, 64, 8, 1) if call.head_dim > 128 else Tiles(32, 64, 4, 1)


def forward_tiles(call: Call) -> Tiles:
    if call.element_bytes == 4:
        return _float_tiles(call) if call.head_dim > 64 else Tiles(64, 64, 4, 1)
    if not call.hopper:
        return Tiles(64, 64, 4, 1 if call.head_dim > 128 else 2)
    return Tiles(64, 64, 4, 2 if call.head_dim > 128 else 3)


def query_tiles(call: Call) -> Tiles:
    if call.element_bytes == 4:
        return _float_tiles(call)
    if not call.hopper:
        return Tiles(32, 64, 4, 1) if _little_memory(call, above=128) else Tiles(64, 64, 4, 1)
    return Tiles(64, 64, 4, 3 if call.head_dim <= 64 else 2)


def key_tiles(call: Call) -> Tiles:
    first = not call.dropout
    if _little_memory(call, above=64 if call.element_bytes == 4 else 128):
        return Tiles(16, 64, 4, 1)
    if call.element_bytes == 4:
        return _float_tiles(call)
    if not call.hopper:
        return Tiles(64, 64, 8, 1) if call.head_dim > 64 else Tiles(32, 64, 4, 2)
    if call.head_dim > 128:
        return Tiles(64, 64, 4, 1, keys_first=first)
    if call.head_dim > 64:
        return Tiles(64, 128, 8, 2, keys_first=True) if first else Tiles(64, 64, 4, 2)
    return Tiles(64, 64, 4, 2 if call.bias else 3, ahead=2)  # with tiles of a bias in a third stage, registers spill


def bias_tiles(call: Call) -> Tiles:
    """The tiles of the bias's gradient, whose programs hold a tile of five tensors at a time."""
    if call.head_dim > 128 or (call.element_bytes == 4 and call.head_dim > 64):
        return Tiles(16, 64, 4, 1)
    if call.element_bytes == 4:
        return _float_tiles(call)
    return Tiles(64, 128, 8, 1) if call.hopper and call.head_dim <= 64 else Tiles(64, 64, 4, 1)
