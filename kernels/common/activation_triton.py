"""Values and derivatives of the activations in Triton. The formulas are in activation.py; activation.cuh says why."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_HALF_ROOT = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)
_TANH_SLOPE = tl.constexpr(1.5957691216057308)
_TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _tail(a):
    """1 - Phi(a) for a in [0, 10]."""
    power = 6.45140426e-06 * a - 3.6043326e-05
    power = power * a - 4.79933078e-04
    power = power * a + 7.47827953e-03
    power = power * a - 5.27534895e-02
    power = power * a - 0.459136069
    power = power * a - 1.15111172
    return tl.exp2(power * a - 1.0)


@triton.jit
def activated(u, KIND: tl.constexpr, EXACT: tl.constexpr):
    """The activation of fp32 ``u`` and its derivative; what is not used is not computed.

    EXACT asks for fp32's precision; without it, that of 16-bit results.
    """
    if KIND == "gelu":
        density = tl.exp2(u * u * (-0.5 * _LOG2_E)) * _DENSITY
        if EXACT:
            below = tl.math.erf(u * _HALF_ROOT) * 0.5 + 0.5
            value = u * below
            derivative = u * density + below
        else:
            a = tl.minimum(tl.abs(u), 10.0, propagate_nan=tl.PropagateNan.ALL)
            tail = _tail(a)
            value = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL) - a * tail
            rest = tail - a * density
            derivative = tl.where(u < 0.0, rest, 1.0 - rest)
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
