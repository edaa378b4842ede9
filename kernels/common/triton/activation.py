"""Values and derivatives of the activations in Triton. The formulas are in activation.py and explained in
activation.cuh."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_HALF_ROOT = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_TANH_SLOPE = tl.constexpr(1.5957691216057308)
_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _logit(square):
    """log2(Phi(u) / (1 - Phi(u))) / u of u^2; the fit is described in activation.h."""
    r = 5.22065902e-09 * square - 3.85620922e-07
    r = r * square + 1.14639461e-05
    r = r * square - 1.59498188e-04
    r = r * square - 9.50880494e-05
    r = r * square + 0.104837507
    return r * square + 2.30220795


@triton.jit
def activated(u, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The activation of fp32 ``u`` and its derivative; what is not used is not computed.

    With EXACT the error is relative to the result, at fp32's precision; without it, for 16-bit types, it is absolute.
    """
    if KIND == "gelu":
        density = tl.exp2(u * u * (-0.5 * _LOG2_E)) * _DENSITY
        below = tl.math.erf(u * _HALF_ROOT) * 0.5 + 0.5 if EXACT else 1.0 / (1.0 + tl.exp2(-u * _logit(u * u)))
        value = u * below
        derivative = u * density + below
    elif KIND == "gelu_tanh":
        v = tl.maximum(u, -10.0, propagate_nan=tl.PropagateNan.ALL)
        square = tl.minimum(v * v, 100.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(v * (square * (-_TANH_SLOPE * _TANH_CUBIC * _LOG2_E) - _TANH_SLOPE * _LOG2_E))
        s = 1.0 / (1.0 + e)
        value = v * s
        derivative = value * (e * s) * (square * (3.0 * _TANH_SLOPE * _TANH_CUBIC) + _TANH_SLOPE) + s
    elif KIND == "relu":
        value = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
        derivative = tl.where(u > 0.0, 1.0, 0.0)
    else:
        v = tl.maximum(u, -85.0, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(v * -_LOG2_E)
        s = 1.0 / (1.0 + e)
        value = v * s
        derivative = value * (e * s) + s
    return value, derivative
