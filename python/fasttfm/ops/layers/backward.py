"""The backward steps of a stack of layers, which follow from its forward steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fasttfm.ops.layers import lora, steps
from fasttfm.ops.layers.forward import Forward


class Backward:
    """The backward steps of a forward, from its last step to its first. ``_gradients``: the tensor with the gradient of
    each tensor, as far as its consumers have been passed."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.steps: list[Any] = []
        self._gradients = {"y": "dy"}
        if forward.specs[0].pre_norm:
            self._gradients["z"] = "dz"
        # The sums to which a GEMM adds an input of the call: their gradient is that of the input.
        products = [step for step in forward.steps if isinstance(step, steps.Gemm)]
        self._inputs = {step.d: step.c for step in products if step.c in ("x", "residual")}
        adapted = [step for step in forward.steps if isinstance(step, steps.AdaptedGemm)]
        self._inputs |= {step.y: step.add for step in adapted if step.add in ("x", "residual")}
        self._fused = {step.t for step in adapted}
        activations = (steps.Activation, steps.GemmActivation)
        # If only one GEMM reads an activation, the GEMM's backward also computes the activation's gradient.
        readers = Counter(name for step in forward.steps for name in steps.names_in(step))
        single = [step for step in forward.steps if isinstance(step, activations) and readers[step.y] == 2]
        self._activations = {step.y: step for step in single}
        self._norms = {step.y: step for step in forward.steps if isinstance(step, steps.AddNorm)}
        self._spec, first = forward.specs[-1], 0  # first: of the steps of the layer
        for step in reversed(forward.steps):
            if isinstance(step, steps.Range):
                self.steps.insert(first, step._replace(backward=True))
                self._spec, first = forward.specs[step.layer - 1], len(self.steps)
            elif not isinstance(step, steps.Zero):
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
        last = self.steps[-1]
        if bias is not None and self.forward.applies("attention_sums", self._spec) and self._is_of_attention(last, dy):
            self.steps[-1] = last._replace(sums=f"d {bias}")
            bias = None
        if bias is not None:
            self.steps.append(steps.ColumnSum(dy, f"d {bias}", columns))
        read = self._norm_again(self._norms[x]) if self._is_recomputed(x, "y1") else x
        self.steps.append(steps.WeightGradient(dy, read, f"d {weight}", columns, inner))
        partial = self._gradients.get(x)  # of another consumer: the GEMM adds to it
        total = self._new(x) if partial is None else partial
        self.steps.append(steps.Gemm(dy, weight, None, partial, total, inner, columns, False))

    @staticmethod
    def _is_of_attention(step: Any, dqkv: str) -> bool:
        return type(step) is steps.AttentionBackward and step.dqkv == dqkv

    def _is_recomputed(self, name: str, tensor: str) -> bool:
        return tensor in self._spec.recomputed and name.endswith(f".{tensor}")

    def _norm_again(self, norm: steps.AddNorm) -> str:
        """y1 once more."""
        assert norm.z is not None
        y, statistics = self._like(norm.y, f"{norm.y} again"), f"{norm.statistics} again"
        self.forward.sizes[statistics] = self.forward.sizes[norm.statistics]
        self.steps.append(steps.LayerNorm(norm.z, norm.weight, norm.bias, y, statistics, norm.columns, norm.eps))
        return y

    def _AdaptedGemm(self, step: steps.AdaptedGemm) -> None:
        dy = self._gradient(step.y)
        if step.add is not None and step.y not in self._inputs:
            assert step.add not in self._gradients
            self._gradients[step.add] = dy
        self._linear(step.t, step.c, step.bias, dy, step.columns, step.rank)
        self.steps.append(steps.WeightGradient(dy, step.x, f"d {step.b}", step.columns, step.inner))
        partial = self._gradients.get(step.x)
        total = self._new(step.x) if partial is None else partial
        operands = (dy, step.b, self._gradient(step.t), lora.first_of(step.c), None, partial, total)
        self.steps.append(steps.AdaptedGemm(*operands, step.inner, step.columns, step.rank, False))

    def _Gemm(self, step: steps.Gemm) -> None:
        dy = self._gradient(step.d)
        if step.d in self._fused:  # the gradient of x is that of the fused step
            read = self._norm_again(self._norms[step.a]) if self._is_recomputed(step.a, "y1") else step.a
            self.steps.append(steps.WeightGradient(dy, read, f"d {step.b}", step.columns, step.inner))
            return
        if step.c not in (None, step.d) and step.d not in self._inputs:
            assert step.c not in self._gradients
            self._gradients[step.c] = dy
        activation = self._activations.get(step.a)
        if activation is None:
            self._linear(step.a, step.b, step.bias, dy, step.columns, step.inner)
            return
        again = self._like(step.a, f"{step.a} again") if self._is_recomputed(step.a, "a") else None
        self._activated(step, activation, dy, again)
        self.steps.append(steps.WeightGradient(dy, again or step.a, f"d {step.b}", step.columns, step.inner))
        if step.bias is not None:
            self.steps.append(steps.ColumnSum(dy, f"d {step.bias}", step.columns))

    def _activated(self, down: steps.Gemm, activation: Any, dy: str, again: str | None) -> None:
        """Adds the steps from the gradient of down's result to that of the activation's input. They recompute the
        activation as ``again``, unless that is None."""
        da, dbias = f"d {down.a}", self._of(activation.bias)
        if isinstance(activation, steps.GemmActivation):
            assert activation.left is not None
            dh = self._gradients[down.a] = self._like(down.a, f"d {activation.left}")
            bias = None if activation.scaled else activation.bias
            sizes = (down.inner, activation.activation, down.columns, activation.scaled)
            self.steps.append(steps.GemmActivationBackward(dy, down.b, bias, activation.left, *sizes, dh, again, dbias))
            return
        da = self._new(down.a)
        self.steps.append(steps.Gemm(dy, down.b, None, None, da, down.inner, down.columns, False))
        common = (activation.x, activation.bias, activation.columns, activation.activation)
        dh = self._new(activation.x)
        self.steps.append(steps.ActivationBackward(*common, da, dh, again, dbias))

    def _GemmActivation(self, step: steps.GemmActivation) -> None:
        self._linear(step.x, step.weight, None, self._gradient(step.y), step.columns, step.inner)

    def _Projection(self, step: steps.Projection) -> None:
        dy, heads = self._gradient(step.qkv), step.heads
        if step.cos is not None and step.sin is not None and step.positions is not None:
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
        fields = (*common, self._gradient(step.out), step.out, step.lse, self._new(step.qkv), None)
        is_other = self.forward.applies("other_attention", self._spec)
        kind = steps.OtherAttentionBackward if is_other else steps.AttentionBackward
        self.steps.append(kind._make(fields))

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
        """Adds no step if only one GEMM reads the activation: then its backward has computed the gradient."""
        if step.y not in self._activations:
            common = (step.x, step.bias, step.columns, step.activation)
            dy, dx = self._gradient(step.y), self._new(step.x)
            self.steps.append(steps.ActivationBackward(*common, dy, dx, None, self._of(step.bias)))
