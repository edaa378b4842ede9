"""The forward steps of layers over few rows: seven kernels a layer; six or five where LayerNorms, of each layer the
first or both, are folded into the GEMMs around them (folded.py); or one kernel for all layers.

Kernels overlap: each starts while the previous one still runs (kernels/few_rows).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fasttfm.kernels.common.activation import CODES as ACTIVATIONS
from fasttfm.ops.layers import steps
from fasttfm.ops.layers.encoding import LINEARS, WORKSPACE
from fasttfm.ops.layers.few_rows_steps import FP32, OF_PARAMETERS, OF_X, FewRowsAddNorm, FewRowsGemm, FewRowsLayers
from fasttfm.ops.layers.folded import FoldedNorms
from fasttfm.ops.layers.spec import FIELDS, LayerSpec
from fasttfm.ops.layers.step_list import StepList

_GROUP = 64  # columns, which have statistics of their own
# After this many polls, 20 seconds or more, a block gives up waiting for another one. All blocks are resident before
# any of them starts, so that none has to, whatever other streams run.
POLLS = 1 << 26


class _Rows(NamedTuple):
    """Normalized rows or, with statistics, rows before a LayerNorm."""

    data: str
    statistics: str | None = None
    eps: float = 0.0  # of the LayerNorm


def add_one_kernel(forward: StepList) -> None:
    spec, attention = forward.specs[0], forward.specs[0].attention
    sizes = (len(forward.specs), len(FIELDS), spec.width, spec.feed_forward.columns, attention.heads)
    activation = ACTIVATIONS[spec.feed_forward.activation]
    step = FewRowsLayers("x", WORKSPACE, "y", *sizes, activation, spec.norm_a.eps, spec.norm_b.eps, POLLS)
    forward.steps.append(step)


class FewRows:
    """Adds the steps to a forward."""

    def __init__(self, forward: StepList, norms: FoldedNorms) -> None:
        self._forward, self._norms = forward, norms
        x, residual = _Rows("x"), "residual" if forward.specs[0].pre_norm else None
        count = len(forward.specs)
        for index, spec in enumerate(forward.specs):
            forward.steps.append(steps.Range(index, False))
            last = index + 1 == count
            out = forward.attend(index, spec, self._project_qkv(index, spec, x))
            x1, z1 = self._project_out(index, spec, out, x, residual)
            a = self._project_up(index, spec, x1)
            y = forward.tensor(f"{index}.y2", spec.width) if not last or self._folds_both else "y"
            residual = None if not spec.pre_norm else "z" if last else forward.stream(f"{index}.z2", spec.width)
            x = self._project_down(index, spec, a, x1, z1, (y, residual))
        if x.statistics is not None:
            spec = forward.specs[-1]
            self._add_norm(count - 1, spec, x.data, "norm_b", x.eps, ("y", None), linear=None)

    @property
    def _folds_first(self) -> bool:
        return self._norms != FoldedNorms.NONE

    @property
    def _folds_both(self) -> bool:
        return self._norms == FoldedNorms.BOTH

    def _gemm(
        self, spec: LayerSpec, linear: str, x: str, weight: str, bias: tuple[str | None, int], **fields: Any
    ) -> None:
        width, intermediate = spec.width, spec.feed_forward.columns
        columns = {"qkv": 3 * width, "out": width, "up": intermediate, "down": width}[linear]
        optional: dict[str, Any] = dict.fromkeys(
            ("statistics", "residual", "residual_weight", "y", "y_statistics", "norms")
        )
        optional |= {"activation": -1, "eps": 0.0, **fields}
        inner = intermediate if linear == "down" else width
        layer: dict[str, Any] = {"width": width, "intermediate": intermediate, "folded": int(self._norms)}
        name, kind = bias
        self._forward.steps.append(
            FewRowsGemm(
                x=x,
                weight=weight,
                bias=name,
                bias_type=kind,
                columns=columns,
                inner=inner,
                role=LINEARS.index(linear),
                **optional,
                **layer,
            )
        )

    def _project_qkv(self, index: int, spec: LayerSpec, x: _Rows) -> str:
        qkv = self._forward.tensor(f"{index}.qkv", spec.attention.columns)
        weight, bias = f"{index}.qkv_weight", (self._forward.parameter(index, spec, "qkv_bias"), OF_X)
        if self._folds_both:
            weight, bias = f"folded {index}.qkv_weight", (f"folded {index}.qkv_bias", FP32)
        self._gemm(spec, "qkv", x.data, weight, bias, statistics=x.statistics, eps=x.eps, y=qkv)
        return qkv

    def _project_out(
        self, index: int, spec: LayerSpec, out: str, x: _Rows, residual: str | None
    ) -> tuple[_Rows, str | None]:
        """The rows that up reads, and the stream of a pre-LN model."""
        weight, bias = f"{index}.out_weight", self._forward.parameter(index, spec, "out_bias")
        y1 = self._forward.tensor(f"{index}.y1", spec.width)
        if not self._folds_first:
            z1 = self._forward.stream(f"{index}.z1", spec.width) if spec.pre_norm else None
            self._gemm(spec, "out", out, weight, (None, OF_PARAMETERS))
            stream = x.data if residual is None else residual
            self._add_norm(index, spec, stream, "norm_a", spec.norm_a.eps, (y1, z1), linear="out")
            return _Rows(y1), z1
        rows = _Rows(y1, self._statistics(y1, spec), spec.norm_a.eps)
        both = self._folds_both
        folded_bias = (f"folded {index}.out_bias", FP32) if both else (bias, OF_PARAMETERS)
        self._add(spec, "out", out, weight, folded_bias, f"folded {index}.residual_a" if both else None, x, rows)
        return rows, None

    def _project_up(self, index: int, spec: LayerSpec, x1: _Rows) -> str:
        a, activation = self._forward.tensor(f"{index}.a", spec.feed_forward.columns), spec.feed_forward.activation
        weight, bias = f"{index}.up_weight", (self._forward.parameter(index, spec, "up_bias"), OF_PARAMETERS)
        norms = None
        if self._folds_first:
            weight, bias = f"folded {index}.up_weight", (f"folded {index}.up_bias", FP32)
            norms = None if self._folds_both else self._forward.sized(f"{index}.norms", 8)
        rows = {"statistics": x1.statistics, "eps": x1.eps, "norms": norms}
        self._gemm(spec, "up", x1.data, weight, bias, **rows, activation=ACTIVATIONS[activation], y=a)
        return a

    def _project_down(
        self, index: int, spec: LayerSpec, a: str, x1: _Rows, z1: str | None, results: tuple[str, str | None]
    ) -> _Rows:
        """The rows after the layer."""
        weight, (y, _) = f"{index}.down_weight", results
        if self._folds_both:
            rows = _Rows(y, self._statistics(y, spec), spec.norm_b.eps)
            bias = (f"folded {index}.down_bias", FP32)
            self._add(spec, "down", a, weight, bias, f"folded {index}.residual_b", x1, rows)
            return rows
        self._gemm(spec, "down", a, weight, (None, OF_PARAMETERS))
        stream, norms = x1.data if z1 is None else z1, None if x1.statistics is None else f"{index}.norms"
        self._add_norm(index, spec, stream, "norm_b", spec.norm_b.eps, results, linear="down", norms=norms)
        return _Rows(y)

    def _statistics(self, name: str, spec: LayerSpec) -> str:
        return self._forward.sized(f"{name}.statistics", 8 * (spec.width // _GROUP))

    def _add(
        self,
        spec: LayerSpec,
        linear: str,
        x: str,
        weight: str,
        bias: tuple[str | None, int],
        scale: str | None,
        residual: _Rows,
        z: _Rows,
    ) -> None:
        """Adds LayerNorm(residual), with the weight ``scale``, to the GEMM's result. The LayerNorm's bias is part of
        that of the GEMM."""
        rows = {"residual": residual.data, "statistics": residual.statistics, "eps": residual.eps}
        self._gemm(spec, linear, x, weight, bias, **rows, residual_weight=scale, y=z.data, y_statistics=z.statistics)

    def _add_norm(
        self,
        index: int,
        spec: LayerSpec,
        residual: str,
        norm: str,
        eps: float,
        results: tuple[str, str | None],
        *,
        linear: str | None,
        norms: str | None = None,
    ) -> None:
        """``linear``: whose result is added to the residual. ``norms``: of the residual, which is before norm_a."""

        def parameter(name: str) -> str | None:
            return self._forward.parameter(index, spec, name)

        before = (None, None) if norms is None else (parameter("norm_a_weight"), parameter("norm_a_bias"))
        self._forward.steps.append(
            FewRowsAddNorm(
                residual,
                None if linear is None else parameter(f"{linear}_bias"),
                *(parameter(f"{norm}_weight"), parameter(f"{norm}_bias"), norms, *before, *results, eps),
                linear is not None,
                LINEARS.index(linear or "down"),
                *(spec.width, spec.feed_forward.columns, int(self._norms)),
            )
        )
