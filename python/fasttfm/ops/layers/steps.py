"""The steps of a plan. A field is the name of a tensor, None, or a number; the core reads them in this order
(kernels/layers/run.h). ``CODES`` are LayerStep's in kernels/layers/op.h."""

from __future__ import annotations

from typing import Any, NamedTuple

from fasttfm.ops.layers.few_rows_steps import FewRowsAddNorm, FewRowsGemm, FewRowsLayers

Name = str  # of a tensor


class Zero(NamedTuple):
    """Sets bytes to 0."""

    target: Name
    bytes: int


class Gemm(NamedTuple):
    """d = a b + bias + c; b is [columns, inner] if it is transposed, otherwise [inner, columns]."""

    a: Name
    b: Name
    bias: Name | None
    c: Name | None
    d: Name
    columns: int
    inner: int
    transposed: bool
    # On a CPU with few rows, whether a kernel of the core reads b once, whose bits are not those of the BLAS.
    reads_once: bool = False


class AdaptedGemm(NamedTuple):
    """y = x b + t c + bias + add; b is [columns, inner] if it is transposed, otherwise [inner, columns], and so is c
    with the rank in place of inner."""

    x: Name
    b: Name
    t: Name
    c: Name
    bias: Name | None
    add: Name | None
    y: Name
    columns: int
    inner: int
    rank: int
    transposed: bool


class SelectedGemm(NamedTuple):
    """y's columns = x's columns b^T, where b is the matrix [columns, inner] of the token's adapter, a part of its
    [b_rows, inner]. ``adds``: y's columns += it. A token without an adapter has 0."""

    x: Name
    x_columns: int  # of a whole row, like y_columns
    x_first: int
    b: Name
    b_rows: int
    b_first: int
    y: Name
    y_columns: int
    y_first: int
    columns: int
    inner: int
    adds: bool
    adapters: Name  # int32 [T]: the index of each token's adapter, -1 for none


class Int8Gemm(NamedTuple):
    """y = activation(x weight^T + bias) + residual on a CPU; x is rounded to int8, and the weight is int8."""

    x: Name
    weight: Name
    sums: Name
    scales: Name
    bias: Name
    outliers: Name
    outlier_weights: Name
    residual: Name | None
    y: Name
    columns: int
    inner: int
    activation: int  # -1 for none
    products: int


class PackedGemm(NamedTuple):
    """y = activation(x weight^T + bias) + residual on a CPU; the weight is packed in bf16, and x is rounded to bf16, or
    both are fp32."""

    x: Name
    weight: Name
    bias: Name
    residual: Name | None
    y: Name
    columns: int
    inner: int
    activation: int  # -1 for none
    products: int


class Fp8Cast(NamedTuple):
    """y = x in FP8."""

    x: Name
    scale: Name
    amax: Name
    y: Name
    columns: int


class Fp8Gemm(NamedTuple):
    """y = x weight^T + bias + c; x and the weight are in FP8."""

    x: Name
    weight: Name
    x_inverse: Name
    weight_inverse: Name
    bias: Name | None
    c: Name | None
    y: Name
    columns: int
    inner: int


class Fp8GemmActivation(NamedTuple):
    """y = activation(x weight^T + bias), all three matrices in FP8."""

    x: Name
    weight: Name
    x_inverse: Name
    weight_inverse: Name
    bias: Name | None
    scale: Name
    amax: Name
    y: Name
    columns: int
    activation: int
    inner: int


class WeightGradient(NamedTuple):
    """d [rows, columns] = a^T b in the parameters' dtype."""

    a: Name
    b: Name
    d: Name
    rows: int
    columns: int


class Range(NamedTuple):
    """The steps up to the next one of these are those of a layer, whose name profiles show."""

    layer: int
    backward: bool


class Projection(NamedTuple):
    """qkv = x weight^T + bias by a kernel that may also rotate queries and keys: with tables of cosines and sines."""

    x: Name
    weight: Name
    bias: Name | None
    qkv: Name
    columns: int
    inner: int
    cos: Name | None
    sin: Name | None
    positions: Name | None
    table_rows: int  # the index of the buffer that has their number
    heads: int
    head_dim: int


class Rotary(NamedTuple):
    """Rotates the first heads of x in place; ``sign`` is -1 for the inverse rotation."""

    x: Name
    cos: Name
    sin: Name
    positions: Name
    table_rows: int
    heads: int
    rotary_heads: int
    columns: int
    pairs: int
    sign: float


class Attention(NamedTuple):
    qkv: Name
    seed: Name | None
    seed_index: int
    heads: int
    kv_heads: int
    head_dim: int
    window_left: int
    window_right: int
    scale: float
    threshold: int
    dropout_scale: float
    out: Name
    lse: Name
    counters: Name | None
    counter: int
    short: bool  # by the kernel for short sequences


class AttentionBackward(NamedTuple):
    qkv: Name
    seed: Name | None
    seed_index: int
    heads: int
    kv_heads: int
    head_dim: int
    window_left: int
    window_right: int
    scale: float
    threshold: int
    dropout_scale: float
    dout: Name
    out: Name
    lse: Name
    dqkv: Name
    sums: Name | None  # of dqkv over all tokens


class OtherAttentionBackward(AttentionBackward):
    """The same by the op, whose fastest backend may be another one: not a step of the core. It writes no sums."""


class AddNorm(NamedTuple):
    """z = residual + dropout(x + linear_bias), y = LayerNorm(z), and y8, if it is not None, is y in FP8."""

    columns: int
    seed: Name | None
    seed_index: int
    threshold: int
    scale: float
    x: Name
    residual: Name
    linear_bias: Name | None
    weight: Name | None
    bias: Name | None
    y: Name
    z: Name | None
    statistics: Name
    eps: float
    y_scale: Name | None = None
    y_amax: Name | None = None
    y8: Name | None = None


class AddNormBackward(NamedTuple):
    """dresidual = dz + the gradient through the norm, dx that through dropout; None if they are equal."""

    columns: int
    seed: Name | None
    seed_index: int
    threshold: int
    scale: float
    dy: Name
    dz: Name | None
    z: Name
    weight: Name | None
    statistics: Name
    dresidual: Name
    dx: Name | None
    dweight: Name | None
    dbias: Name | None
    dlinear_bias: Name | None


class LayerNorm(NamedTuple):
    x: Name
    weight: Name | None
    bias: Name | None
    y: Name
    statistics: Name
    columns: int
    eps: float


class RmsNorm(NamedTuple):
    x: Name
    weight: Name | None
    y: Name
    rstd: Name
    columns: int
    eps: float


class RmsNormBackward(NamedTuple):
    """dx = dz + the gradient through the norm."""

    dy: Name
    dz: Name | None
    x: Name
    weight: Name | None
    rstd: Name
    dx: Name
    dweight: Name | None
    columns: int


class GatedActivation(NamedTuple):
    """y = activation(gate) * up of x [T, 2 columns] + bias."""

    x: Name
    bias: Name | None
    columns: int
    activation: int
    gate_first: bool
    y: Name


class GatedActivationBackward(NamedTuple):
    x: Name
    bias: Name | None
    columns: int
    activation: int
    gate_first: bool
    dy: Name
    dx: Name
    dbias: Name | None


class Activation(NamedTuple):
    """y = activation(x + bias)."""

    x: Name
    bias: Name | None
    columns: int
    activation: int
    y: Name


class ActivationBackward(NamedTuple):
    x: Name
    bias: Name | None
    columns: int
    activation: int
    dy: Name
    dx: Name
    y: Name | None
    dbias: Name | None


class GemmActivation(NamedTuple):
    """y = activation(x weight^T + bias), or, if it is gated, activation(g) * u of the product's halves g and u.

    Without a gate, ``left`` may be what the backward reads: the product without bias or, in a step that is ``scaled``,
    the activation's derivative."""

    x: Name
    weight: Name
    bias: Name | None
    columns: int
    activation: int
    inner: int
    gated: bool
    scaled: bool
    left: Name | None
    y: Name


class GemmActivationBackward(NamedTuple):
    """dh = (dy weight) * activation'(h + bias), for ``left`` of a GemmActivation, and y, the activation once more."""

    dy: Name
    weight: Name  # [inner, columns]
    bias: Name | None
    left: Name
    columns: int
    activation: int
    inner: int
    scaled: bool
    dh: Name
    y: Name | None
    dbias: Name | None


class ColumnSum(NamedTuple):
    x: Name
    sum: Name
    columns: int


class HeadNorm(NamedTuple):
    """y = x [T, heads + 2 kv_heads, head_dim] with RMSNorm of each head of q and k."""

    x: Name
    q_weight: Name | None
    k_weight: Name | None
    rstd: Name
    heads: int
    kv_heads: int
    head_dim: int
    y: Name
    eps: float


class StoreKeys(NamedTuple):
    """Writes k and v of qkv to the KV cache of a layer."""

    qkv: Name
    keys: Name
    values: Name
    places: Name
    sizes: int  # the index of the buffer that has the capacity, and after it the rows of a layer
    layer: int
    heads: int
    kv_heads: int
    head_dim: int


class CachedAttention(NamedTuple):
    """Attention of one new token of each sequence to the KV cache of a layer, to which the token is appended."""

    qkv: Name
    keys: Name
    values: Name
    lengths: Name
    sizes: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window_left: int
    scale: float
    out: Name


class HeadNormBackward(NamedTuple):
    """Replaces dy by the gradient through the norms."""

    x: Name
    q_weight: Name | None
    k_weight: Name | None
    rstd: Name
    heads: int
    kv_heads: int
    head_dim: int
    dy: Name
    dq_weight: Name | None
    dk_weight: Name | None


CODES: dict[type, int] = {
    Zero: 0,
    Gemm: 1,
    WeightGradient: 2,
    Projection: 3,
    Rotary: 4,
    Attention: 5,
    AttentionBackward: 6,
    AddNorm: 7,
    AddNormBackward: 8,
    RmsNorm: 9,
    RmsNormBackward: 10,
    GatedActivation: 11,
    GatedActivationBackward: 12,
    Activation: 13,
    ActivationBackward: 14,
    GemmActivation: 15,
    ColumnSum: 16,
    HeadNorm: 17,
    HeadNormBackward: 18,
    Int8Gemm: 19,
    Fp8Cast: 20,
    Fp8Gemm: 21,
    Fp8GemmActivation: 22,
    GemmActivationBackward: 23,
    LayerNorm: 24,
    Range: 25,
    FewRowsGemm: 26,
    FewRowsAddNorm: 27,
    FewRowsLayers: 28,
    StoreKeys: 29,
    CachedAttention: 30,
    PackedGemm: 31,
    SelectedGemm: 32,
    AdaptedGemm: 33,
}

# The fields that a step writes, if it is not only y; it reads the others.
_WRITES: dict[type, tuple[str, ...]] = {
    Zero: ("target",),
    Gemm: ("d",),
    WeightGradient: ("d",),
    Range: (),
    Projection: ("qkv",),
    Rotary: ("x",),
    Attention: ("out", "lse"),
    AttentionBackward: ("dqkv", "sums"),
    OtherAttentionBackward: ("dqkv",),
    AddNorm: ("y", "z", "statistics", "y8"),
    AddNormBackward: ("dresidual", "dx", "dweight", "dbias", "dlinear_bias"),
    LayerNorm: ("y", "statistics"),
    FewRowsGemm: ("y", "y_statistics", "norms"),
    FewRowsAddNorm: ("y", "z"),
    RmsNorm: ("y", "rstd"),
    RmsNormBackward: ("dx", "dweight"),
    GatedActivationBackward: ("dx", "dbias"),
    ActivationBackward: ("dx", "y", "dbias"),
    GemmActivation: ("left", "y"),
    GemmActivationBackward: ("dh", "y", "dbias"),
    ColumnSum: ("sum",),
    HeadNorm: ("y", "rstd"),
    HeadNormBackward: ("dy", "dq_weight", "dk_weight"),
    StoreKeys: ("keys", "values"),
    CachedAttention: ("keys", "values", "out"),
}


def names_in(step: Any) -> list[Name]:
    """The tensors that a step reads or writes."""
    return [field for field in step if isinstance(field, str)]


def written_by(step: Any) -> list[Name]:
    """The tensors that a step writes."""
    return [name for field in _WRITES.get(type(step), ("y",)) if (name := getattr(step, field)) is not None]
