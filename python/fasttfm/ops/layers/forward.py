"""The forward steps of a stack of layers."""

from __future__ import annotations

from typing import Any

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES as ACTIVATIONS
from fasttfm.ops import int8_linear, packed_linear
from fasttfm.ops.layers import lora, steps
from fasttfm.ops.layers.encoding import OPERANDS, PACKED, fp8_operands, table_buffer
from fasttfm.ops.layers.few_rows_forward import FewRows, add_one_kernel
from fasttfm.ops.layers.folded import FoldedNorms
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.spec import Adapter, LayerSpec, Norm, Specs
from fasttfm.ops.layers.step_list import SEEDS, StepList

_ROWS = 64  # kernels/layers/op.h: kLayerRows
_MOST_CAST_COLUMNS = 1024  # of a LayerNorm whose kernel also writes FP8


class Forward(StepList):
    """Makes the steps of all layers."""

    def __init__(self, specs: Specs, situation: Situation) -> None:
        super().__init__(specs, situation)
        self._eight: dict[str, str] = {}  # of tensors that a GEMM reads in FP8: the tensor in FP8
        if self._adds_few_rows():
            return
        self.counters = self._tile_counters()
        x, stream = "x", "residual" if specs[0].pre_norm else "x"
        for index, spec in enumerate(specs):
            self.steps.append(steps.Range(index, False))
            last = index + 1 == len(specs)
            branch = self._attention(index, spec, x)
            norm = (spec.norm_a, "norm_a", "out_bias", spec.dropout_a, 1)
            y1, z1 = self._add_norm(index, spec, branch, stream, norm, ("y1", "z1"))
            branch = self._feed_forward(index, spec, y1)
            norm = (spec.norm_b, "norm_b", "down_bias", spec.dropout_b, 2)
            results = ("y", "z" if spec.pre_norm else None) if last else None
            x, z = self._add_norm(index, spec, branch, z1 if spec.pre_norm else y1, norm, ("y2", "z2"), results)
            stream = z if spec.pre_norm else x

    def _adds_few_rows(self) -> bool:
        """Adds the steps for few rows, if their rule applies to all layers."""
        every = self.specs.kinds
        if len(every) == 1 and self.applies("one_kernel", self.specs[0]):
            self.owner = "one_kernel"
            add_one_kernel(self)
            return True
        if not all(self.applies("few_rows", spec) for spec in every):
            return False
        norms = FoldedNorms.NONE
        for name, folded in (("folded_norms", FoldedNorms.BOTH), ("folded_first_norm", FoldedNorms.FIRST)):
            if norms == FoldedNorms.NONE and all(self.applies(name, spec) for spec in every):
                norms, self.owner = folded, name
        FewRows(self, norms)
        return True

    def _tile_counters(self) -> str | None:
        """Hopper's attention reads a counter, which is 0 before the first step that depends on others."""
        if self.situation.device != "cuda" or all(self.applies("short_attention", spec) for spec in self.specs.kinds):
            return None
        size = 4 * len(self.specs)
        self.steps.append(steps.Zero("counters", size))
        return self.sized("counters", -(-size // _ROWS))

    def _attention(self, index: int, spec: LayerSpec, x: str) -> str:
        out, attention = self.attend(index, spec, self._project(index, spec, x)), spec.attention
        return self._linear(index, spec, "out", out, attention.heads * attention.head_dim, spec.width)

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
                table_buffer(attention.rotary) + 2,
            )
        if self.applies("rotary_projection", spec):
            sizes = (attention.columns, spec.width, *tables, attention.heads, attention.head_dim)
            self.steps.append(steps.Projection._make((x, weight, bias, qkv, *sizes)))
            return qkv
        if self.applies("projection", spec):
            sizes = (attention.columns, spec.width, None, None, None, 0, attention.heads, attention.head_dim)
            self.steps.append(steps.Projection._make((x, weight, bias, qkv, *sizes)))
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
        rstd = self.sized(f"{index}.qkv.rstd", 4 * (attention.heads + attention.kv_heads))
        self.steps.append(
            steps.HeadNorm(
                qkv, q_weight, k_weight, rstd, attention.heads, attention.kv_heads, attention.head_dim, y, eps
            )
        )
        return y

    def _gemm(
        self, index: int, name: str, x: str, y: str, columns: int, inner: int, bias: str | None, activation: int = -1
    ) -> None:
        """y = x weight^T + bias, in the situation's precision. With weights in int8 or packed weights on a
        CPU, the bias is one of the operands, and there may be an activation."""
        if self.situation.precision == "fp8":
            x8, (weight, weight_inverse, _, x_inverse, _) = (
                self._in_fp8(index, name, x, inner),
                fp8_operands(index, name),
            )
            self.steps.append(steps.Fp8Gemm(x8, weight, x_inverse, weight_inverse, bias, None, y, columns, inner))
        elif self.situation.precision == "int8":
            operands = (f"int8 {index}.{name}.{which}" for which in OPERANDS["int8"])
            products = int8_linear.fastest_products()
            self.steps.append(steps.Int8Gemm._make((x, *operands, None, y, columns, inner, activation, products)))
        elif self.situation.precision in PACKED:
            precision = self.situation.precision
            operands = (f"{precision} {index}.{name}.{which}" for which in OPERANDS[precision])
            products = packed_linear.fastest_products(PACKED[precision])
            self.steps.append(steps.PackedGemm._make((x, *operands, None, y, columns, inner, activation, products)))
        else:
            decodes = self.situation.cache == "tokens"
            product = steps.Gemm(x, f"{index}.{name}_weight", bias, None, y, columns, inner, True, decodes)
            adapter = self.specs[index].adapter(name)
            self.steps += [product] if adapter is None else self._adapted(index, adapter, product)

    def _adapted(self, index: int, adapter: Adapter, product: steps.Gemm) -> list[Any]:
        columns = lora.columns_of(adapter, self.situation.device)
        t, fused = self.tensor(f"{index}.{adapter.linear}.t", columns), self.applies("adapted_gemm", self.specs[index])
        return lora.adapted(index, adapter, product, t, columns, fused=fused)

    def _in_fp8(self, index: int, linear: str, x: str, columns: int) -> str:
        """x in FP8, with the scale of a linear layer's input: written by the step that computes x, if that can, or by
        a step of its own."""
        if x in self._eight:
            return self._eight[x]
        x8 = self._eight[x] = self.sized(f"{index}.{linear}.x8", columns)
        _, _, scale, _, amax = fp8_operands(index, linear)
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
        if self.applies("gated_gemm" if feed_forward.gated else "gemm_activation", spec):
            left = self.tensor(f"{index}.left", feed_forward.columns) if self.situation.training else None
            scaled, sizes = "a" not in spec.recomputed, (feed_forward.columns, code, spec.width)
            step = steps.GemmActivation(y1, weight, bias, *sizes, feed_forward.gated, scaled, left, a)
            self.steps.append(step)
        elif self.situation.precision == "fp8" and not feed_forward.gated:
            x8, (up, up_inverse, _, x_inverse, _) = self._in_fp8(index, "up", y1, spec.width), fp8_operands(index, "up")
            a8 = self._eight[a] = self.sized(f"{index}.down.x8", feed_forward.columns)
            _, _, scale, _, amax = fp8_operands(index, "down")
            operands = (x8, up, x_inverse, up_inverse, bias, scale, amax, a8)
            self.steps.append(steps.Fp8GemmActivation(*operands, feed_forward.columns, code, spec.width))
        elif self.situation.precision in ("int8", *PACKED) and not feed_forward.gated:
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
            rstd = self.sized(f"{index}.{prefix}.rstd", 4)
            self.steps.append(steps.RmsNorm(z, weight, y, rstd, spec.width, kind.eps))
            return y, z
        threshold = philox.threshold(p)
        seed = "seeds" if threshold else None
        statistics = self.sized(f"{index}.{prefix}.statistics", 8)
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
        """The GEMM that computes the branch adds the stream."""
        self.steps, after = lora.without_adapter(self.steps, branch, z)
        product = self.steps.pop()
        assert branch in steps.written_by(product)
        del self.sizes[branch]
        of_kind = {steps.Gemm: ("c", "d"), steps.Int8Gemm: ("residual", "y"), steps.Fp8Gemm: ("c", "y")}
        of_kind[steps.PackedGemm] = of_kind[steps.Int8Gemm]
        of_kind[steps.AdaptedGemm] = ("add", "y")
        self.steps += [product._replace(**dict(zip(of_kind[type(product)], (stream, z), strict=True))), *after]
