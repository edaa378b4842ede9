"""``embedding``: word + position + segment rows, LayerNorm and dropout, in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.rows import gradient_like
from fasttfm.kernels.embedding import reference
from fasttfm.ops import checks, embedding_native
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    dtype_name,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.embedding_native import INDEX_ARGUMENTS, OP, errors
from fasttfm.ops.library import OpFunction, needs_gradient, register, unshared


def embedding(
    ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None = None,
    segment_table: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    segment_ids: Tensor | None = None,
    layer_norm: bool = False,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.0,
    cu_seqlens: Tensor | None = None,
    padding_idx: int | None = None,
    dtype: torch.dtype | None = None,
    seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Looks up and adds a word, a position and a segment row for every token, normalises the sum and applies dropout.

    Args:
        ids: ``[..., S]``, or packed ``[T]`` with ``cu_seqlens``; int64 or int32.
        word_table: ``[V, C]``, fp32, bf16 or fp16 (fp64 on the reference backend).
        position_table: ``[positions, C]`` of the same type, or None.
        segment_table: ``[segments, C]`` of the same type, or None.
        position_ids: In ``ids``'s shape; by default a token's index in its own sequence.
        segment_ids: In ``ids``'s shape; by default 0.
        layer_norm: Whether to normalise without weight and bias; with either of them it always does.
        weight: LayerNorm's, ``[C]``, of any precision; None for 1.
        bias: LayerNorm's, ``[C]``; None for 0.
        eps: Added to the variance.
        p: The dropout probability, rounded to a multiple of 1/256.
        cu_seqlens: int32 ``[sequences + 1]``: sequence i is made of the tokens from cu_seqlens[i] to cu_seqlens[i + 1].
        padding_idx: A row of the word table that gets no gradient.
        dtype: The dtype of the output, by default the tables'. In training, bf16 from fp32 tables is usual.
        seed: int64 ``[1]``; by default drawn from torch's generator. The same seed drops the same elements.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``[..., S, C]`` or ``[T, C]``, contiguous.

    Raises:
        ValueError: For an index outside its table. On the CPU this call raises. On a GPU the token's row is NaN, and a
            later call or ``fasttfm.ops.check_errors()`` raises: a call never synchronizes with the GPU.
    """
    tables = {"word_table": word_table, "position_table": position_table, "segment_table": segment_table}
    _check_tables(tables)
    _check_indices(ids, position_ids, segment_ids, cu_seqlens, tables)
    _check_options(word_table, weight, bias, eps, p, padding_idx, dtype, seed)
    TABLE.check_name(backend)
    if p == 0:
        seed = None
    elif seed is None:
        seed = philox.draw_seed(word_table.device)
    normalise = bool(layer_norm) or weight is not None or bias is not None
    tensors: tuple[Any, ...] = (ids, *tables.values(), position_ids, segment_ids, cu_seqlens, weight, bias, seed)
    options = (normalise, float(eps), float(p), dtype or word_table.dtype, padding_idx, requested(backend))
    if needs_gradient(*tables.values(), weight, bias):
        result: Tensor = _Embedding.apply(*tensors, *options)
    else:
        *forward_options, _, backend = options
        result, _ = forward_op(*tensors, *forward_options, backend)
    return result


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_tables(tables: dict[str, Any]) -> None:
    word_table = tables["word_table"]
    for name, table in tables.items():
        if table is None and name != "word_table":
            continue
        checks.check_floating(OP, name, table)
        if table.dim() != 2 or table.shape[0] == 0 or table.shape[1] == 0:
            raise checks.bad_value(OP, name, "two dimensions, none of them 0", f"shape {tuple(table.shape)}")
        if table.shape[1] != word_table.shape[1]:
            expected = f"{word_table.shape[1]} columns as in word_table"
            raise checks.bad_value(OP, name, expected, f"shape {tuple(table.shape)}")
        if table.dtype != word_table.dtype:
            raise checks.bad_type(OP, name, f"{dtype_name(word_table.dtype)} as word_table", dtype_name(table.dtype))
        checks.check_device(OP, name, table, like=word_table)


def _check_indices(ids: Any, position_ids: Any, segment_ids: Any, cu_seqlens: Any, tables: dict[str, Any]) -> None:
    checks.check_index(OP, "ids", ids)
    checks.check_device(OP, "ids", ids, like=tables["word_table"])
    if ids.dim() == 0:
        raise checks.bad_value(OP, "ids", "at least one dimension", "none")
    for name, given in (("position", position_ids), ("segment", segment_ids)):
        if given is None:
            continue
        checks.check_index(OP, f"{name}_ids", given)
        checks.check_shape(OP, f"{name}_ids", given, ids.shape)
        checks.check_device(OP, f"{name}_ids", given, like=ids)
        if tables[f"{name}_table"] is None:
            raise checks.bad_value(OP, f"{name}_ids", f"None without {name}_table", "a tensor")
    if cu_seqlens is not None:
        checks.check_cu_seqlens(OP, cu_seqlens, like=ids)
        if ids.dim() != 1:
            raise checks.bad_value(OP, "ids", "one dimension with cu_seqlens", f"shape {tuple(ids.shape)}")
    elif (
        position_ids is None and tables["position_table"] is not None and ids.shape[-1] > len(tables["position_table"])
    ):
        most = len(tables["position_table"])
        raise checks.bad_value(OP, "ids", f"at most {most} tokens, the rows of position_table", ids.shape[-1])


def _check_options(
    word_table: Tensor, weight: Any, bias: Any, eps: Any, p: Any, padding_idx: Any, dtype: Any, seed: Any
) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            checks.check_floating(OP, name, parameter, optional=True)
            checks.check_shape(OP, name, parameter, (word_table.shape[1],))
            checks.check_device(OP, name, parameter, like=word_table)
    checks.check_double(OP, word_table=word_table, weight=weight, bias=bias)
    checks.check_number(OP, "eps", eps, low=0.0, high=float("inf"))
    checks.check_number(OP, "p", p, low=0.0, high=1.0)
    checks.check_seed(OP, seed, like=word_table)
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
            raise checks.bad_type(OP, "padding_idx", "an integer or None", type(padding_idx).__name__)
        if not 0 <= padding_idx < len(word_table):
            raise checks.bad_value(OP, "padding_idx", f"a row in [0, {len(word_table)})", padding_idx)
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or dtype not in checks.FLOATING:
            expected = ", ".join(dtype_name(known) for known in checks.FLOATING)
            raise checks.bad_type(OP, "dtype", f"None or one of {expected}", dtype)
        if (dtype == torch.float64) != (word_table.dtype == torch.float64):
            raise checks.bad_type(OP, "dtype", "float64 for float64 tables, and only for them", dtype_name(dtype))


def _check_values(tables: reference.Triple, indices: reference.Triple, cu_seqlens: Tensor | None) -> None:
    """Validates indices on the CPU. On a GPU the kernels do, because reading the values here would synchronize."""
    ids = indices[0]
    if ids.is_cuda:
        return
    for name, table, given in zip(INDEX_ARGUMENTS, tables, indices, strict=True):
        if given is None or table is None or given.numel() == 0:
            continue
        low, high = (int(value) for value in torch.aminmax(given))
        if low < 0 or high >= len(table):
            at = ((given < 0) | (given >= len(table))).nonzero()[0].tolist()
            raise checks.bad_value(
                OP, name, f"indices in [0, {len(table)})", f"{int(given[tuple(at)])} at {at[0] if len(at) == 1 else at}"
            )
    if cu_seqlens is not None:
        by_default = tables[1] is not None and indices[1] is None
        longest = len(tables[1]) if by_default and tables[1] is not None else None
        checks.check_cu_seqlens_values(OP, cu_seqlens, ids.shape[0], longest)


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Embedding(OpFunction):
    """Saves the inputs, the seed and two numbers per token. The backward looks up the sum of the rows again: that reads
    as many bytes as a saved sum would, and the forward does not have to write it."""

    op = OP
    instead = "torch.nn.functional.embedding and layer_norm"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, layer_norm, eps, p, dtype, padding_idx, backend = arguments
        y: Tensor
        y, statistics = forward_op(*tensors, layer_norm, eps, p, dtype, backend)
        ids, *tables, position_ids, segment_ids, cu_seqlens, weight, bias, seed = tensors
        ids, *indices = unshared(ids, position_ids, segment_ids, cu_seqlens)
        ctx.save_for_backward(ids, *tables, *indices, weight, bias, seed, statistics)
        ctx.options = (layer_norm, p, padding_idx)
        ctx.backend = backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, statistics = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = [*needs[1:4], *needs[7:9]]
        gradients = backward_op(dy, *tensors, statistics, *ctx.options, wanted, ctx.backend)
        dword, dposition, dsegment, dweight, dbias = (
            gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True)
        )
        return None, dword, dposition, dsegment, None, None, None, dweight, dbias, *([None] * 7)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None,
    segment_table: Tensor | None,
    position_ids: Tensor | None,
    segment_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    layer_norm: bool,
    eps: float,
    p: float,
    dtype: torch.dtype,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    tables, indices = (word_table, position_table, segment_table), (ids, position_ids, segment_ids)
    _check_values(tables, indices, cu_seqlens)
    outputs: tuple[Tensor, Tensor] = TABLE.select(
        backend, ids, word_table, position_table, segment_table, dtype
    ).forward(tables, indices, cu_seqlens, weight, bias, seed, layer_norm, eps, p, dtype)
    return outputs


def _forward_fake(ids: Tensor, word_table: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    layer_norm, _, _, dtype, _ = rest[-5:]
    rows = ids.numel() if layer_norm else 0
    statistics_dtype = torch.float64 if word_table.dtype == torch.float64 else torch.float32
    y = word_table.new_empty((*ids.shape, word_table.shape[1]), dtype=dtype)
    return y, word_table.new_empty((2, rows), dtype=statistics_dtype)


def _backward(
    dy: Tensor,
    ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None,
    segment_table: Tensor | None,
    position_ids: Tensor | None,
    segment_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    layer_norm: bool,
    p: float,
    padding_idx: int | None,
    wanted: list[bool],
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables, indices = (word_table, position_table, segment_table), (ids, position_ids, segment_ids)
    chosen = TABLE.select(backend, ids, *tables, dy.dtype)
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = chosen.backward(
        dy, tables, indices, cu_seqlens, weight, bias, statistics, seed, layer_norm, p, padding_idx, wanted
    )
    return gradients


def _backward_fake(dy: Tensor, ids: Tensor, *tensors_and_options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    word_table, position_table, segment_table, _, _, _, weight, bias, *_, wanted, _ = tensors_and_options
    parameters = (word_table, position_table, segment_table, weight, bias)
    first, second, third, fourth, fifth = (
        gradient_like(parameter, wants, word_table) for parameter, wants in zip(parameters, wanted, strict=True)
    )
    return first, second, third, fourth, fifth


_TENSORS = (
    "Tensor ids, Tensor word_table, Tensor? position_table, Tensor? segment_table, Tensor? position_ids,"
    " Tensor? segment_ids, Tensor? cu_seqlens, Tensor? weight, Tensor? bias, Tensor? seed"
)
forward_op = register(
    f"embedding_forward({_TENSORS}, bool layer_norm, float eps, float p, ScalarType dtype, str? backend)"
    " -> (Tensor y, Tensor statistics)",
    _forward,
    _forward_fake,
)
backward_op = register(
    f"embedding_backward(Tensor dy, {_TENSORS}, Tensor statistics, bool layer_norm, float p, SymInt? padding_idx,"
    " bool[] wanted, str? backend)"
    " -> (Tensor dword_table, Tensor dposition_table, Tensor dsegment_table, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(tables: reference.Triple, *args: Any) -> tuple[Tensor, Tensor]:
    from fasttfm.kernels.embedding import triton

    device = tables[0].device
    errors.raise_if_seen(device)
    outputs: tuple[Tensor, Tensor] = triton.embedding_forward_triton(tables, *args, errors.words(device))
    errors.watch(device)
    return outputs


def _backward_triton(*args: Any) -> tuple[Tensor, ...]:
    from fasttfm.kernels.embedding import triton

    gradients: tuple[Tensor, ...] = triton.embedding_backward_triton(*args)
    return gradients


_TRITON_MAX_COLUMNS = 8192  # whole rows are kept in registers


def _refuse_triton(ids: Tensor, word_table: Tensor, *_: Any) -> str | None:
    if word_table.shape[1] > _TRITON_MAX_COLUMNS:
        return f"takes up to {_TRITON_MAX_COLUMNS} columns, got {word_table.shape[1]}"
    return refuse_triton(word_table)


# The CPU core comes before Triton, so that Triton's interpreter serves a CPU tensor only when it is requested by name.
TABLE = BackendTable(
    OP,
    (
        Backend(
            "cpu",
            _native.missing,
            lambda ids, word_table, *_: refuse_native_cpu(word_table),
            embedding_native.forward_cpu,
            embedding_native.backward_cpu,
        ),
        Backend(
            "cuda",
            _native.missing_cuda,
            embedding_native.refuse_gpu,
            embedding_native.forward_cuda,
            embedding_native.backward_cuda,
        ),
        Backend("triton", triton_absent, _refuse_triton, _forward_triton, _backward_triton),
        Backend("reference", always, lambda *_: None, reference.embedding_forward, reference.embedding_backward),
    ),
)
