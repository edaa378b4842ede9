"""Steps as the native core reads them: 64-bit words (kernels/layers/op.h)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fasttfm.ops.layers import lora, steps
from fasttfm.ops.layers.spec import FIELDS

# The buffers of a call, in the order of the core's table: the last ones are a KV cache, its two sizes, and the adapter
# of each token. After them, each pair of rotary tables has its cosines, its sines and their number of rows.
BUFFERS = (
    *("scratch", "kept", "x", "residual", "y", "z", "seeds", "positions", "dy", "dz", "dx", "dresidual"),
    *("keys", "values", "places", "lengths", "capacity", "cache_rows"),
    "adapters",
)
TABLE_FIELDS = 3
_GIVEN = frozenset(BUFFERS[2:])

# The linear layers of a layer, and what a GEMM of a precision reads of each: the tensors of ops.int8_linear's
# Int8Weight and of ops.packed_linear's PackedWeight; the weight in FP8, 1 / its scale, and scale, 1 / scale and largest
# magnitude of the input. "int8 0.qkv.sums" is an entry of the table of operands, which has a row for each linear layer.
LINEARS = lora.LINEARS
OPERANDS = {
    "int8": ("panels", "sums", "scales", "bias", "outliers", "outlier_weights"),
    "bf16": ("panels", "bias"),
    "fp32": ("panels", "bias"),
    "fp8": ("weight", "weight_inverse", "scale", "inverse", "amax"),
    "lora": lora.OPERANDS,
}
# What the GEMMs read into which LayerNorms are folded: "folded 0.up_weight" (folded.py). Weights have x's
# dtype, the others fp32.
FOLDED = (
    *("up_weight", "up_bias", "qkv_weight", "qkv_bias"),
    *("out_bias", "residual_a", "down_bias", "residual_b"),
)
PACKED = {"fp32": torch.float32, "bf16": torch.bfloat16}  # precisions with the weights of ops.packed_linear
WORKSPACE = "workspace"  # of the kernel for all layers: the only operand
_PARAMETERS, _GRADIENTS, _OPERANDS = 1 << 56, 2 << 56, 3 << 56
_NULL = -1


class EncodedSteps:
    """Steps as the core reads them, and the bytes of the workspace that they need, by the sizes of a call."""

    def __init__(self, encoded: array[int]) -> None:
        self.encoded = encoded
        self.workspace_bytes: dict[Any, int] = {}


def table_buffer(table: int) -> int:
    """The index of the buffer of a table's cosines."""
    return len(BUFFERS) + TABLE_FIELDS * table


def in_buffer(buffer: str, places: Mapping[str, int]) -> dict[str, int]:
    """The words of tensors at offsets in bytes per token."""
    index = BUFFERS.index(buffer)
    return {name: index << 40 | offset for name, offset in places.items()}


def fp8_operands(index: int, linear: str) -> tuple[str, ...]:
    """The names of a linear layer's operands."""
    return tuple(f"fp8 {index}.{linear}.{which}" for which in OPERANDS["fp8"])


def encode(sequence: Sequence[Any], places: Mapping[str, int]) -> EncodedSteps:
    """Encodes steps. ``places``: the words of the tensors that a plan places."""
    words = array("q")
    for step in sequence:
        words.extend((steps.CODES[type(step)], len(step) + 2))
        words.extend(_word(field, places) for field in step)
    return EncodedSteps(words)


def _word(field: Any, places: Mapping[str, int]) -> int:
    if field is None:
        return _NULL
    if isinstance(field, float):
        (bits,) = struct.unpack("q", struct.pack("d", field))
        return int(bits)
    if not isinstance(field, str):
        return int(field)
    if field in places:
        return places[field]
    if field in _GIVEN:
        return BUFFERS.index(field) << 40
    if field.startswith(("cos", "sin")):
        return table_buffer(int(field[3:])) + (0 if field.startswith("cos") else 1) << 40
    if field == WORKSPACE:
        return _OPERANDS
    precision, _, operand = lora.gradient_as_operand(field).partition(" ")
    if precision == "folded":
        layer, which = operand.split(".")
        return _OPERANDS | int(layer) * len(FOLDED) + FOLDED.index(which) << 40
    if precision in OPERANDS:
        layer, linear, which = operand.split(".")
        row, names = int(layer) * len(LINEARS) + LINEARS.index(linear), OPERANDS[precision]
        return _OPERANDS | row * len(names) + names.index(which) << 40
    table, name = (_GRADIENTS, field[2:]) if field.startswith("d ") else (_PARAMETERS, field)
    index, _, parameter = name.partition(".")
    return table | int(index) * len(FIELDS) + FIELDS.index(parameter) << 40
