"""The steps of a plan for few rows (kernels/few_rows), with the fields in the order in which the core reads them."""

from __future__ import annotations

from typing import NamedTuple

Name = str  # of a tensor

BIAS_TYPES = OF_X, OF_PARAMETERS, FP32 = range(3)  # the types of a GEMM's bias


class FewRowsGemm(NamedTuple):
    """y = activation(x weight^T + bias) by the kernels for few rows; without y, partial sums of x weight^T, which the
    next step adds. With ``statistics``, the rows of the residual or, without one, of x are those before a LayerNorm."""

    x: Name
    weight: Name
    bias: Name | None
    bias_type: int  # BIAS_TYPES
    statistics: Name | None
    residual: Name | None
    residual_weight: Name | None
    y: Name | None
    y_statistics: Name | None
    norms: Name | None  # mean and rstd of x
    columns: int
    inner: int
    activation: int  # -1 for none
    eps: float
    role: int  # the index of the linear layer in LINEARS
    width: int
    intermediate: int
    folded: int  # FoldedNorms


class FewRowsAddNorm(NamedTuple):
    """z = residual + the partial sums of the previous step, if it ``adds`` them, + linear_bias; y = LayerNorm(z). With
    ``norms``, the residual is normalized first."""

    residual: Name
    linear_bias: Name | None
    weight: Name | None
    bias: Name | None
    norms: Name | None
    residual_weight: Name | None
    residual_bias: Name | None
    y: Name
    z: Name | None
    eps: float
    adds: bool
    role: int
    width: int
    intermediate: int
    folded: int


class FewRowsLayers(NamedTuple):
    """All layers in one kernel, which hand over their rows in a workspace that the caller keeps."""

    x: Name
    workspace: Name
    y: Name
    layers: int
    entries: int  # of a layer in the table of parameters
    width: int
    intermediate: int
    heads: int
    activation: int
    eps_a: float
    eps_b: float
    polls: int
