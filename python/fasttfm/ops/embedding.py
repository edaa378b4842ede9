"""``embedding``: word + position + segment rows, LayerNorm and dropout, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.linear import accumulation_type
from fasttfm.kernels.embedding import reference
from fasttfm.ops import embedding_native
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Output, checked, converted, flag, indices, number
from fasttfm.ops.core.backends import (
    Backend,
    always,
    dtype_name,
    from_triton,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.core.declare import KnownCalls, Op
from fasttfm.ops.embedding_native import INDEX_ARGUMENTS, NAME, errors


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
    asked, indices = requested(backend), (position_ids, segment_ids)
    tables = (word_table, position_table, segment_table)
    key = _key((ids, *indices, cu_seqlens, seed), (*tables, weight, bias), dtype)
    selected = OP.known.find(key, asked)
    if selected is None:
        _check_tables(tables)
        _check_parameters(word_table, weight, bias, seed)
        OP.table.check_name(backend)
    if selected is None or cu_seqlens is None:  # the key does not contain the length of a padded batch
        _check_indices(ids, *indices, cu_seqlens, tables)
    _check_options(word_table.shape[0], word_table.dtype, eps, p, padding_idx, dtype)
    if p == 0:
        seed = None
    elif seed is None:
        seed = philox.draw_seed(word_table.device)
    normalise = bool(layer_norm) or weight is not None or bias is not None
    arguments = (
        *(ids, *tables, *indices, cu_seqlens, weight, bias, seed),
        *(normalise, float(eps), float(p), dtype or word_table.dtype, padding_idx),
    )
    y: Tensor
    if key is None:
        y = OP.apply(*arguments, backend=backend)
    else:
        y = OP.run(selected or OP.add_known(key, asked, *arguments), *arguments)
    return y


def _key(
    indices: tuple[Tensor | None, ...], parameters: tuple[Tensor | None, ...], dtype: torch.dtype | None
) -> Hashable:
    """The key of a call, for ``KnownCalls``."""
    keys = KnownCalls.key("ijjcs", *indices), KnownCalls.key("ttttt", *parameters)
    return None if None in keys else (*keys, dtype)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_tables(tables: tuple[Any, ...]) -> None:
    word_table = tables[0]
    for name, table in zip(("word_table", "position_table", "segment_table"), tables, strict=True):
        if table is None and name != "word_table":
            continue
        checks.check_floating(NAME, name, table)
        if table.dim() != 2 or table.shape[0] == 0 or table.shape[1] == 0:
            raise checks.bad_value(NAME, name, "two dimensions, none of them 0", f"shape {tuple(table.shape)}")
        if table.shape[1] != word_table.shape[1]:
            expected = f"{word_table.shape[1]} columns as in word_table"
            raise checks.bad_value(NAME, name, expected, f"shape {tuple(table.shape)}")
        if table.dtype != word_table.dtype:
            raise checks.bad_type(NAME, name, f"{dtype_name(word_table.dtype)} as word_table", dtype_name(table.dtype))
        checks.check_device(NAME, name, table, like=word_table)


def _check_indices(ids: Any, position_ids: Any, segment_ids: Any, cu_seqlens: Any, tables: tuple[Any, ...]) -> None:
    word_table, position_table, segment_table = tables
    checks.check_index(NAME, "ids", ids)
    checks.check_device(NAME, "ids", ids, like=word_table)
    if ids.dim() == 0:
        raise checks.bad_value(NAME, "ids", "at least one dimension", "none")
    for name, tensor, table in (("position", position_ids, position_table), ("segment", segment_ids, segment_table)):
        if tensor is None:
            continue
        checks.check_index(NAME, f"{name}_ids", tensor)
        checks.check_shape(NAME, f"{name}_ids", tensor, ids.shape)
        checks.check_device(NAME, f"{name}_ids", tensor, like=ids)
        if table is None:
            raise checks.bad_value(NAME, f"{name}_ids", f"None without {name}_table", "a tensor")
    if cu_seqlens is not None:
        checks.check_cu_seqlens(NAME, cu_seqlens, like=ids)
        if ids.dim() != 1:
            raise checks.bad_value(NAME, "ids", "one dimension with cu_seqlens", f"shape {tuple(ids.shape)}")
    elif position_ids is None and position_table is not None and ids.shape[-1] > len(position_table):
        most = len(position_table)
        raise checks.bad_value(NAME, "ids", f"at most {most} tokens, the rows of position_table", ids.shape[-1])


def _check_parameters(word_table: Tensor, weight: Any, bias: Any, seed: Any) -> None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            checks.check_floating(NAME, name, parameter, optional=True)
            checks.check_shape(NAME, name, parameter, (word_table.shape[1],))
            checks.check_device(NAME, name, parameter, like=word_table)
    checks.check_double(NAME, word_table=word_table, weight=weight, bias=bias)
    checks.check_seed(NAME, seed, like=word_table)


def _check_options(rows: int, table_dtype: torch.dtype, eps: Any, p: Any, padding_idx: Any, dtype: Any) -> None:
    checks.check_number(NAME, "eps", eps, low=0.0, high=float("inf"))
    checks.check_number(NAME, "p", p, low=0.0, high=1.0)
    if padding_idx is not None:
        if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
            raise checks.bad_type(NAME, "padding_idx", "an integer or None", type(padding_idx).__name__)
        if not 0 <= padding_idx < rows:
            raise checks.bad_value(NAME, "padding_idx", f"a row in [0, {rows})", padding_idx)
    if dtype is not None:
        if not isinstance(dtype, torch.dtype) or dtype not in checks.FLOATING:
            expected = ", ".join(dtype_name(known) for known in checks.FLOATING)
            raise checks.bad_type(NAME, "dtype", f"None or one of {expected}", dtype)
        if (dtype == torch.float64) != (table_dtype == torch.float64):
            raise checks.bad_type(NAME, "dtype", "float64 for float64 tables, and only for them", dtype_name(dtype))


def _check_values(ids: Tensor, *others: Any) -> None:
    """Validates indices on the CPU. On a GPU the kernels do, because reading the values here would synchronize."""
    *tables, position_ids, segment_ids, cu_seqlens = others[:6]
    indices = (ids, position_ids, segment_ids)
    if ids.is_cuda:
        return
    for name, table, tensor in zip(INDEX_ARGUMENTS, tables, indices, strict=True):
        if tensor is None or table is None or tensor.numel() == 0:
            continue
        low, high = (int(value) for value in torch.aminmax(tensor))
        if low < 0 or high >= len(table):
            at = ((tensor < 0) | (tensor >= len(table))).nonzero()[0].tolist()
            raise checks.bad_value(
                NAME,
                name,
                f"indices in [0, {len(table)})",
                f"{int(tensor[tuple(at)])} at {at[0] if len(at) == 1 else at}",
            )
    if cu_seqlens is not None:
        by_default = tables[1] is not None and indices[1] is None
        longest = len(tables[1]) if by_default and tables[1] is not None else None
        checks.check_cu_seqlens_values(NAME, cu_seqlens, ids.shape[0], longest)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(tables: reference.Triple, *args: Any) -> tuple[Tensor, Tensor]:
    from fasttfm.kernels.embedding import triton

    device = tables[0].device
    errors.raise_if_seen(device)
    outputs: tuple[Tensor, Tensor] = triton.embedding_forward_triton(tables, *args, errors.words(device))
    errors.watch(device)
    return outputs


_TRITON_MAX_COLUMNS = 8192  # whole rows are kept in registers


def _refuse_cpu(
    ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None = None,
    segment_table: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    return refuse_native_cpu(word_table) or embedding_native.refuse_types(word_table, dtype)


def _refuse_triton(ids: Tensor, word_table: Tensor, *_: Any) -> str | None:
    if word_table.shape[1] > _TRITON_MAX_COLUMNS:
        return f"takes up to {_TRITON_MAX_COLUMNS} columns, got {word_table.shape[1]}"
    return refuse_triton(word_table)


def _backend(
    name: str, absent: Any, refuse: Any, forward: Callable[..., Any], backward: Callable[..., Any], **others: Any
) -> Backend:
    """A backend whose functions get tables and indices as two triples."""

    def run_forward(ids: Tensor, word: Tensor, position: Any, segment: Any, *others: Any) -> Any:
        position_ids, segment_ids, *passed, _ = others  # padding_idx matters to the backward only
        return forward((word, position, segment), (ids, position_ids, segment_ids), *passed)

    def run_backward(dy: Tensor, ids: Tensor, word: Tensor, position: Any, segment: Any, *others: Any) -> Any:
        position_ids, segment_ids, *passed, _ = others[: -len(_GRADIENTS)]  # dtype is dy's
        needed = list(others[-len(_GRADIENTS) :])
        return backward(dy, (word, position, segment), (ids, position_ids, segment_ids), *passed, needed)

    return Backend(name, absent, refuse, run_forward, run_backward, **others)


# ---- the declaration -------------------------------------------------------------------------------------------------


def _make_y(ids: Tensor, word_table: Tensor, *others: Any) -> Tensor:
    *_, dtype, _, _ = others
    return word_table.new_empty((*ids.shape, word_table.shape[1]), dtype=dtype)


def _make_statistics(ids: Tensor, word_table: Tensor, *others: Any) -> Tensor:
    *_, layer_norm, _, _, _, _, _ = others
    return word_table.new_empty((2, ids.numel() if layer_norm else 0), dtype=accumulation_type(word_table))


_GRADIENTS = ("word_table", "position_table", "segment_table", "weight", "bias")

# Saved are the inputs, the seed and two numbers per token. The backward looks up the sum of the rows again: that reads
# as many bytes as a saved sum would, and the forward does not have to write it. The CPU core comes before Triton, so
# that Triton's interpreter runs on CPU tensors only if it is requested by name.
OP = Op(
    NAME,
    inputs=(
        indices("ids"),
        checked("word_table", flagged=True),
        checked("position_table", optional=True, flagged=True),
        checked("segment_table", optional=True, flagged=True),
        indices("position_ids", optional=True),
        indices("segment_ids", optional=True),
        indices("cu_seqlens", optional=True),
        checked("weight", optional=True, flagged=True),
        checked("bias", optional=True, flagged=True),
        checked("seed", optional=True),
    ),
    options=(
        flag("layer_norm"),
        number("eps"),
        number("p"),
        converted("dtype", "ScalarType"),
        converted("padding_idx", "SymInt?"),
    ),
    outputs=(Output("y", _make_y), Output("statistics", _make_statistics)),
    saves=(
        *("ids", "word_table", "position_table", "segment_table", "position_ids", "segment_ids", "cu_seqlens"),
        *("weight", "bias", "statistics", "seed"),
    ),
    backward_options=("layer_norm", "p", "padding_idx", "dtype"),
    gradients=_GRADIENTS,
    chosen_by=("ids", "word_table", "position_table", "segment_table", "dtype"),
    instead="torch.nn.functional.embedding and layer_norm",
    check_values=_check_values,
    backends=(
        _backend("cpu", _native.missing, _refuse_cpu, embedding_native.forward_cpu, embedding_native.backward_cpu),
        _backend(
            "cuda",
            _native.missing_cuda,
            embedding_native.refuse_gpu,
            embedding_native.forward_cuda,
            embedding_native.backward_cuda,
            refuse_backward=embedding_native.refuse_gpu_backward,
        ),
        _backend(
            "triton", triton_absent, _refuse_triton, _forward_triton, from_triton(NAME, "embedding_backward_triton")
        ),
        _backend("reference", always, lambda *_: None, reference.embedding_forward, reference.embedding_backward),
    ),
)
