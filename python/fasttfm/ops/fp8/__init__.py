"""Linear layers whose three GEMMs have FP8 operands with one scale for each tensor.

    forward            y = x8 W8^T + bias
    gradient of x      dx = g8 W8
    gradient of W      dW = g8^T x8

x8, W8 and g8 are the input, the weight and the incoming gradient, rounded as kernels/fp8/reference.py says. Hopper's
FP8 tensor cores need both operands contiguous along the summed dimension, so every tensor is stored in two layouts,
``rows`` and ``columns``, which one pass writes. GEMMs accumulate in fp32. Results have the dtype of the activations,
gradients of weights that of the weight.

Scaling is delayed: a tensor's scale follows from its largest magnitudes in the last steps, so that casting reads the
tensor only once. Scales are powers of two, so dividing by them does not round.
"""

from fasttfm.kernels.fp8.reference import ALIGNMENT, record_amax
from fasttfm.ops.fp8.casts import (
    TABLE,
    Quantized,
    cast,
    cast_dropped,
    drops_in_cast,
    empty_layouts,
    gelu,
    gelu_backward,
)
from fasttfm.ops.fp8.linear import Fp8Linear, Fp8Weight, LayerFp8, gemm, refresh_all
from fasttfm.ops.fp8.scales import E4M3, E5M2, FORMATS, Scales, Slot, is_capturing, missing

__all__ = [
    "ALIGNMENT",
    "E4M3",
    "E5M2",
    "FORMATS",
    "TABLE",
    "Fp8Linear",
    "Fp8Weight",
    "LayerFp8",
    "Quantized",
    "Scales",
    "Slot",
    "cast",
    "cast_dropped",
    "drops_in_cast",
    "empty_layouts",
    "gelu",
    "gelu_backward",
    "gemm",
    "is_capturing",
    "missing",
    "record_amax",
    "refresh_all",
]
