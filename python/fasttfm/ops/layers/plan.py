"""The steps of a stack of layers, forward and backward, and where their tensors lie in memory.

All tensors are proportional to the number of tokens, so that a plan counts bytes per token and serves any batch. A
tensor that the backward reads is kept; another one is in scratch memory, from the step that writes it to the last one
that reads it.
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES as ACTIVATIONS
from fasttfm.ops.int8_linear import fastest_products
from fasttfm.ops.layers import steps
from fasttfm.ops.layers.rules import RULES, Situation
from fasttfm.ops.layers.spec import FIELDS, LayerSpec, Norm

SEEDS = 3  # of a layer

# The buffers of a call, in the order of the core's table. After them, each pair of rotary tables has its cosines, its
# sines and their number of rows.
BUFFERS = ("scratch", "kept", "x", "residual", "y", "z", "seeds", "positions", "dy", "dz", "dx", "dresidual")
TABLE_FIELDS = 3
_GIVEN = frozenset(BUFFERS[2:])
_ROWS = 64  # kernels/layers/op.h: kLayerRows
_MOST_CAST_COLUMNS = 1024  # of a LayerNorm whose kernel also writes FP8
_ALIGNMENT = 4  # bytes per token, which are 256 bytes of _ROWS tokens


class Words:
    """Steps as the core reads them, and the bytes of the workspace that they need, by the sizes of a call."""

    def __init__(self, encoded: array[int]) -> None:
        self.encoded = encoded
        self.workspace_bytes: dict[Any, int] = {}


class Plan(NamedTuple):
    """Steps of both directions, and their words for the core."""

    forward: tuple[Any, ...]
    backward: tuple[Any, ...]  # empty without training
    words: Words
    backward_words: Words
    kept: int  # bytes per token, like the following
    scratch: int
    backward_scratch: int


@functools.lru_cache(maxsize=256)
def plan(specs: tuple[LayerSpec, ...], situation: Situation) -> Plan:
    """The plan for layers in a situation."""
    forward = _Forward(specs, situation)
    backward = _Backward(forward).steps if situation.training else []
    read_later = {name for step in backward for name in steps.names_in(step)}
    sizes = forward.sizes
    kept = [name for name in sizes if name in read_later and any(name in _defined(step) for step in forward.steps)]
    places, kept_bytes = _in_order(kept, sizes), sum(map(sizes.__getitem__, kept))
    scratch, scratch_bytes = _placed(forward.steps, sizes, {*kept})
    words = _encoded(forward.steps, {**_named("kept", places), **_named("scratch", scratch)})
    later, later_bytes = _placed(backward, sizes, {*kept})
    backward_words = _encoded(backward, {**_named("kept", places), **_named("scratch", later)})
    return Plan(tuple(forward.steps), tuple(backward), words, backward_words, kept_bytes, scratch_bytes, later_bytes)


def _defined(step: Any) -> list[str]:
    return steps.written_by(step)


# ---- the forward -----------------------------------------------------------------------------------------------------


class _Forward:
    """``sizes``: bytes per token of each tensor that the plan places."""

    def __init__(self, specs: tuple[LayerSpec, ...], situation: Situation) -> None:
        self.specs, self.situation = specs, situation
        self.steps: list[Any] = []
        self.sizes: dict[str, int] = {}
        self.columns: dict[str, int] = {}  # of tensors in x's dtype
        self._eight: dict[str, str] = {}  # of tensors that a GEMM reads in FP8: the tensor in FP8
        self._counters = self._tile_counters()
        x, stream = "x", "residual" if specs[0].pre_norm else "x"
        for index, spec in enumerate(specs):
            last = index + 1 == len(specs)
            branch = self._attention(index, spec, x)
            norm = (spec.norm_a, "norm_a", "out_bias", spec.dropout_a, 1)
            y1, z1 = self._add_norm(index, spec, branch, stream, norm, ("y1", "z1"))
            branch = self._feed_forward(index, spec, y1)
            norm = (spec.norm_b, "norm_b", "down_bias", spec.dropout_b, 2)
            results = ("y", "z" if spec.pre_norm else None) if last else None
            x, z = self._add_norm(index, spec, branch, z1 if spec.pre_norm else y1, norm, ("y2", "z2"), results)
            stream = z if spec.pre_norm else x

    def tensor(self, name: str, columns: int) -> str:
        """A tensor of the plan, in x's dtype."""
        self.columns[name] = columns
        return self._sized(name, columns * self.situation.itemsize)

    def stream(self, name: str, columns: int) -> str:
        return self._sized(name, columns * self.situation.stream_itemsize)

    def _sized(self, name: str, size: int) -> str:
        self.sizes[name] = -(-size // _ALIGNMENT) * _ALIGNMENT
        return name

    def parameter(self, index: int, spec: LayerSpec, name: str) -> str | None:
        return f"{index}.{name}" if name in spec.present else None

    def _tile_counters(self) -> str | None:
        """Hopper's attention reads a counter, which is 0 before the first step that depends on others."""
        if self.situation.device != "cuda":
            return None
        size = 4 * len(self.specs)
        self.steps.append(steps.Zero("counters", size))
        return self._sized("counters", -(-size // _ROWS))

    def _attention(self, index: int, spec: LayerSpec, x: str) -> str:
        attention = spec.attention
        qkv = self._project(index, spec, x)
        attended = attention.heads * attention.head_dim
        out, lse = self.tensor(f"{index}.out", attended), self._sized(f"{index}.lse", 4 * attention.heads)
        scale = 1 / math.sqrt(attention.head_dim) if attention.scale is None else attention.scale
        threshold = philox.threshold(attention.dropout)
        seed = "seeds" if threshold else None
        self.steps.append(
            steps.Attention(
                *(qkv, seed, SEEDS * index, attention.heads, attention.kv_heads, attention.head_dim),
                *(attention.window_left, attention.window_right, scale, threshold, philox.scale(threshold)),
                *(out, lse, self._counters, index, self._applies("short_attention", spec)),
            )
        )
        return self._linear(index, spec, "out", out, attended, spec.width)

    def _project(self, index: int, spec: LayerSpec, x: str) -> str:
        """q, k and v, whose q and k are normalized and rotated."""
        attention = spec.attention
        qkv = self.tensor(f"{index}.qkv", attention.columns)
        weight, bias = f"{index}.qkv_weight", self.parameter(index, spec, "qkv_bias")
        tables: tuple[Any, ...] = ()
        if attention.rotary is not None:
            tables = (
                f"cos{attention.rotary}",
                f"sin{attention.rotary}",
                "positions",
                _table_buffer(attention.rotary) + 2,
            )
        if self._applies("rotary_projection", spec):
            sizes = (attention.heads, attention.head_dim)
            self.steps.append(
                steps.RotaryProjection._make((x, weight, bias, qkv, attention.columns, spec.width, *tables, *sizes))
            )
            return qkv
        self._gemm(index, "qkv", x, qkv, attention.columns, spec.width, bias)
        if attention.head_norm_eps is not None:
            qkv = self._normalized_heads(index, spec, qkv, attention.head_norm_eps)
        if attention.rotary is not None:
            heads = (
                attention.heads + 2 * attention.kv_heads,
                attention.heads + attention.kv_heads,
                attention.head_dim,
                attention.rotary_columns // 2,
            )
            self.steps.append(steps.Rotary._make((qkv, *tables, *heads, 1.0)))
        return qkv

    def _normalized_heads(self, index: int, spec: LayerSpec, qkv: str, eps: float) -> str:
        attention = spec.attention
        y = self.tensor(f"{index}.qkv.normalized", attention.columns)
        q_weight, k_weight = (self.parameter(index, spec, name) for name in ("q_norm_weight", "k_norm_weight"))
        rstd = self._sized(f"{index}.qkv.rstd", 4 * (attention.heads + attention.kv_heads))
        self.steps.append(
            steps.HeadNorm(
                qkv, q_weight, k_weight, rstd, attention.heads, attention.kv_heads, attention.head_dim, y, eps
            )
        )
        return y

    def _applies(self, name: str, spec: LayerSpec) -> bool:
        if name not in self.situation.rules:
            return False
        rule = next(rule for rule in RULES if rule.name == name)
        return rule.refusal(spec, self.situation) is None

    def _gemm(
        self, index: int, name: str, x: str, y: str, columns: int, inner: int, bias: str | None, activation: int = -1
    ) -> None:
        """y = x weight^T + bias, in the situation's precision. In int8 the bias is one of the operands, and there may
        be an activation."""
        if self.situation.precision == "fp8":
            x8, (weight, weight_inverse, _, x_inverse, _) = self._in_fp8(index, name, x, inner), _fp8(index, name)
            self.steps.append(steps.Fp8Gemm(x8, weight, x_inverse, weight_inverse, bias, None, y, columns, inner))
        elif self.situation.precision == "int8":
            operands = (f"int8 {index}.{name}.{which}" for which in OPERANDS["int8"])
            products = fastest_products()
            self.steps.append(steps.Int8Gemm._make((x, *operands, None, y, columns, inner, activation, products)))
        else:
            self.steps.append(steps.Gemm(x, f"{index}.{name}_weight", bias, None, y, columns, inner, True))

    def _in_fp8(self, index: int, linear: str, x: str, columns: int) -> str:
        """x in FP8, with the scale of a linear layer's input: written by the step that computes x, if that can, or by
        a step of its own."""
        if x in self._eight:
            return self._eight[x]
        x8 = self._eight[x] = self._sized(f"{index}.{linear}.x8", columns)
        _, _, scale, _, amax = _fp8(index, linear)
        last = self.steps[-1] if self.steps else None
        if isinstance(last, steps.AddNorm) and last.y == x and columns <= _MOST_CAST_COLUMNS:
            self.steps[-1] = last._replace(y_scale=scale, y_amax=amax, y8=x8)
        else:
            self.steps.append(steps.Fp8Cast(x, scale, amax, x8, columns))
        return x8

    def _linear(self, index: int, spec: LayerSpec, name: str, x: str, inner: int, columns: int) -> str:
        """The product with a weight; its bias is added with the residual."""
        branch = self.tensor(f"{index}.{name}.branch", columns)
        self._gemm(index, name, x, branch, columns, inner, None)
        return branch

    def _feed_forward(self, index: int, spec: LayerSpec, y1: str) -> str:
        feed_forward = spec.feed_forward
        weight, bias = f"{index}.up_weight", self.parameter(index, spec, "up_bias")
        a, code = self.tensor(f"{index}.a", feed_forward.columns), ACTIVATIONS[feed_forward.activation]
        if self._applies("gated_gemm" if feed_forward.gated else "gemm_activation", spec):
            self.steps.append(
                steps.GemmActivation(y1, weight, bias, feed_forward.columns, code, spec.width, feed_forward.gated, a)
            )
        elif self.situation.precision == "fp8" and not feed_forward.gated:
            x8, (up, up_inverse, _, x_inverse, _) = self._in_fp8(index, "up", y1, spec.width), _fp8(index, "up")
            a8 = self._eight[a] = self._sized(f"{index}.down.x8", feed_forward.columns)
            _, _, scale, _, amax = _fp8(index, "down")
            operands = (x8, up, x_inverse, up_inverse, bias, scale, amax, a8)
            self.steps.append(steps.Fp8GemmActivation(*operands, feed_forward.columns, code, spec.width))
        elif self.situation.precision == "int8" and not feed_forward.gated:
            self._gemm(index, "up", y1, a, feed_forward.columns, spec.width, None, code)
        else:
            rows = feed_forward.columns * (2 if feed_forward.gated else 1)
            h = self.tensor(f"{index}.h", rows)
            self._gemm(index, "up", y1, h, rows, spec.width, None)
            if feed_forward.gated:
                self.steps.append(steps.GatedActivation(h, bias, feed_forward.columns, code, True, a))
            else:
                self.steps.append(steps.Activation(h, bias, feed_forward.columns, code, a))
        return self._linear(index, spec, "down", a, feed_forward.columns, spec.width)

    def _add_norm(
        self,
        index: int,
        spec: LayerSpec,
        branch: str,
        stream: str,
        norm: tuple[Norm, str, str, float, int],
        names: tuple[str, str],
        results: tuple[str, str | None] | None = None,
    ) -> tuple[str, str]:
        """The normalized sum, and the sum. ``results``: the call's own tensors for both."""
        kind, prefix, linear_bias, p, seed_index = norm
        y = self.tensor(f"{index}.{names[0]}", spec.width) if results is None else results[0]
        z: str | None = results[1] if results is not None else None
        if z is None and (self.situation.training or spec.pre_norm or kind.kind == "rms"):
            z = self.stream(f"{index}.{names[1]}", spec.width)
        weight = self.parameter(index, spec, f"{prefix}_weight")
        if kind.kind == "rms":
            assert z is not None
            self._add_in_gemm(branch, stream, z)
            rstd = self._sized(f"{index}.{prefix}.rstd", 4)
            self.steps.append(steps.RmsNorm(z, weight, y, rstd, spec.width, kind.eps))
            return y, z
        threshold = philox.threshold(p)
        seed = "seeds" if threshold else None
        statistics = self._sized(f"{index}.{prefix}.statistics", 8)
        self.steps.append(
            steps.AddNorm(
                spec.width,
                seed,
                SEEDS * index + seed_index,
                threshold,
                philox.scale(threshold),
                x=branch,
                residual=stream,
                linear_bias=self.parameter(index, spec, linear_bias),
                weight=weight,
                bias=self.parameter(index, spec, f"{prefix}_bias"),
                y=y,
                z=z,
                statistics=statistics,
                eps=kind.eps,
            )
        )
        return y, y if z is None else z

    def _add_in_gemm(self, branch: str, stream: str, z: str) -> None:
        """The last step, a GEMM, adds the stream."""
        product = self.steps.pop()
        assert branch in steps.written_by(product)
        del self.sizes[branch]
        of_kind = {steps.Gemm: ("c", "d"), steps.Int8Gemm: ("residual", "y"), steps.Fp8Gemm: ("c", "y")}
        self.steps.append(product._replace(**dict(zip(of_kind[type(product)], (stream, z), strict=True))))


def _table_buffer(table: int) -> int:
    return len(BUFFERS) + TABLE_FIELDS * table


# ---- the backward ----------------------------------------------------------------------------------------------------


class _Backward:
    """The backward steps of a forward, from its last step to its first. ``_gradients``: the tensor with the gradient of
    each tensor, as far as its consumers have been passed."""

    def __init__(self, forward: _Forward) -> None:
        self.forward = forward
        self.steps: list[Any] = []
        self._gradients = {"y": "dy"}
        if forward.specs[0].pre_norm:
            self._gradients["z"] = "dz"
        # The sums to which a GEMM adds an input of the call: their gradient is that of the input.
        products = [step for step in forward.steps if isinstance(step, steps.Gemm)]
        self._inputs = {step.d: step.c for step in products if step.c in ("x", "residual")}
        for step in reversed(forward.steps):
            if not isinstance(step, steps.Zero):
                getattr(self, f"_{type(step).__name__}")(step)

    def _gradient(self, name: str) -> str:
        return self._gradients[name]

    def _new(self, name: str) -> str:
        """The tensor for the gradient of another."""
        if name in ("x", "residual"):
            gradient = f"d{name}"
        else:
            gradient = f"d {name}"
            self.forward.sizes[gradient] = self.forward.sizes[name]
        self._gradients[name] = gradient
        return gradient

    def _like(self, name: str, gradient: str) -> str:
        self.forward.sizes[gradient] = self.forward.columns[name] * self.forward.situation.itemsize
        return gradient

    @staticmethod
    def _of(parameter: str | None) -> str | None:
        return None if parameter is None else f"d {parameter}"

    def _linear(self, x: str, weight: str, bias: str | None, dy: str, columns: int, inner: int) -> None:
        self.steps.append(steps.WeightGradient(dy, x, f"d {weight}", columns, inner))
        if bias is not None:
            self.steps.append(steps.ColumnSum(dy, f"d {bias}", columns))
        partial = self._gradients.get(x)  # of another consumer: the GEMM adds to it
        total = self._new(x) if partial is None else partial
        self.steps.append(steps.Gemm(dy, weight, None, partial, total, inner, columns, False))

    def _Gemm(self, step: steps.Gemm) -> None:
        dy = self._gradient(step.d)
        if step.c is not None and step.d not in self._inputs:
            assert step.c not in self._gradients
            self._gradients[step.c] = dy
        self._linear(step.a, step.b, step.bias, dy, step.columns, step.inner)

    def _RotaryProjection(self, step: steps.RotaryProjection) -> None:
        dy, heads = self._gradient(step.qkv), step.heads
        tables = (step.cos, step.sin, step.positions, step.table_rows)
        sizes = (3 * heads, 2 * heads, step.head_dim, step.head_dim // 2)
        self.steps.append(steps.Rotary(dy, *tables, *sizes, -1.0))
        self._linear(step.x, step.weight, step.bias, dy, step.columns, step.inner)

    def _Rotary(self, step: steps.Rotary) -> None:
        self.steps.append(step._replace(x=self._gradient(step.x), sign=-step.sign))

    def _HeadNorm(self, step: steps.HeadNorm) -> None:
        dy, weights = self._gradient(step.y), (step.q_weight, step.k_weight)
        sizes = (step.heads, step.kv_heads, step.head_dim)
        self.steps.append(steps.HeadNormBackward(step.x, *weights, step.rstd, *sizes, dy, *map(self._of, weights)))
        self._gradients[step.x] = dy

    def _Attention(self, step: steps.Attention) -> None:
        common = step[: steps.Attention._fields.index("out")]
        dout = self._gradient(step.out)
        self.steps.append(steps.AttentionBackward._make((*common, dout, step.out, step.lse, self._new(step.qkv))))

    def _AddNorm(self, step: steps.AddNorm) -> None:
        assert step.residual not in self._gradients
        assert step.z is not None
        situation = self.forward.situation
        separate = step.threshold > 0 or situation.itemsize != situation.stream_itemsize
        dz = self._gradients.get(step.z)
        dstream = self._new(step.residual)
        dx = self._like(step.x, f"d {step.x}") if separate else None
        self._gradients[step.x] = dstream if dx is None else dx
        self.steps.append(
            steps.AddNormBackward(
                *(step.columns, step.seed, step.seed_index, step.threshold, step.scale, self._gradient(step.y), dz),
                *(step.z, step.weight, step.statistics, dstream, dx),
                *map(self._of, (step.weight, step.bias, step.linear_bias)),
            )
        )

    def _RmsNorm(self, step: steps.RmsNorm) -> None:
        dz = self._gradients.get(step.x)
        source = self._inputs.get(step.x)
        if source is not None:
            total = self._gradients[step.x] = self._new(source)
        elif step.x == "z":
            total = self._gradients["z"] = self.forward.stream("d z", step.columns)
        else:
            total = self._new(step.x)
        norm = (self._gradient(step.y), dz, step.x, step.weight, step.rstd, total, self._of(step.weight), step.columns)
        self.steps.append(steps.RmsNormBackward(*norm))

    def _GatedActivation(self, step: steps.GatedActivation) -> None:
        common = (step.x, step.bias, step.columns, step.activation, step.gate_first)
        dy, dx = self._gradient(step.y), self._new(step.x)
        self.steps.append(steps.GatedActivationBackward(*common, dy, dx, self._of(step.bias)))

    def _Activation(self, step: steps.Activation) -> None:
        common = (step.x, step.bias, step.columns, step.activation)
        dy, dx = self._gradient(step.y), self._new(step.x)
        self.steps.append(steps.ActivationBackward(*common, dy, dx, None, self._of(step.bias)))


# ---- memory ----------------------------------------------------------------------------------------------------------


def _in_order(names: Iterable[str], sizes: dict[str, int]) -> dict[str, int]:
    """Offsets of tensors one after the other."""
    places, end = {}, 0
    for name in names:
        places[name] = end
        end += sizes[name]
    return places


def _placed(sequence: Sequence[Any], sizes: dict[str, int], others: set[str]) -> tuple[dict[str, int], int]:
    """Offsets of the tensors of the steps that are not among the ``others``, and the end of the last one: the largest
    first, each at the lowest offset at which it overlaps none that is in use at the same time."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(sequence):
        for name in steps.names_in(step):
            if name in sizes and name not in others:
                first.setdefault(name, number)
                last[name] = number
    places: dict[str, int] = {}
    end = 0
    for name in sorted(first, key=lambda name: (-sizes[name], first[name])):
        meeting = sorted(
            (places[other], places[other] + sizes[other])
            for other in places
            if first[other] <= last[name] and first[name] <= last[other]
        )
        offset = 0
        for start, stop in meeting:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, stop)
        places[name] = offset
        end = max(end, offset + sizes[name])
    return places, end


def _named(buffer: str, places: dict[str, int]) -> dict[str, int]:
    index = BUFFERS.index(buffer)
    return {name: index << 40 | offset for name, offset in places.items()}


# ---- words for the core: kernels/layers/op.h -------------------------------------------------------------------------

_PARAMETERS, _GRADIENTS, _OPERANDS = 1 << 56, 2 << 56, 3 << 56
_NULL = -1

# The linear layers of a layer, and what a GEMM of a precision reads of each: the tensors of ops.int8_linear's
# Int8Weight; the weight in FP8, 1 / its scale, and scale, 1 / scale and largest magnitude of the input.
# "int8 0.qkv.sums" is an entry of the table of operands, which has a row for each linear layer.
LINEARS = ("qkv", "out", "up", "down")
OPERANDS = {
    "int8": ("panels", "sums", "scales", "bias"),
    "fp8": ("weight", "weight_inverse", "scale", "inverse", "amax"),
}


def _fp8(index: int, linear: str) -> tuple[str, ...]:
    """The names of a linear layer's operands."""
    return tuple(f"fp8 {index}.{linear}.{which}" for which in OPERANDS["fp8"])


def _encoded(sequence: Sequence[Any], places: dict[str, int]) -> Words:
    words = array("q")
    for step in sequence:
        words.extend((steps.CODES[type(step)], len(step) + 2))
        words.extend(_word(field, places) for field in step)
    return Words(words)


def _word(field: Any, places: dict[str, int]) -> int:
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
        return _table_buffer(int(field[3:])) + (0 if field.startswith("cos") else 1) << 40
    precision, _, operand = field.partition(" ")
    if precision in OPERANDS:
        layer, linear, which = operand.split(".")
        row, names = int(layer) * len(LINEARS) + LINEARS.index(linear), OPERANDS[precision]
        return _OPERANDS | row * len(names) + names.index(which) << 40
    table, name = (_GRADIENTS, field[2:]) if field.startswith("d ") else (_PARAMETERS, field)
    index, _, parameter = name.partition(".")
    return table | int(index) * len(FIELDS) + FIELDS.index(parameter) << 40
