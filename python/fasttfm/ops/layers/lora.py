"""LoRA (Hu et al., 2022) in a plan: steps next to the GEMM of a linear layer, and their operands.

    t = x A^T        y = x W^T + bias        y += t (scale B)^T

``A`` and ``B`` are those of several modules of a checkpoint, such as query, key and value, where one linear layer
computes all of them: A's rows are one below the other, and each B is for a block of y's columns. The backward, which
follows from the steps, has no gradient of a frozen W.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.ops.layers import steps
from fasttfm.ops.layers.spec import Adapter, LayerSpec

OPERANDS = ("a", "b", "da", "db")  # the entries of a linear layer in the core's table
LINEARS = ("qkv", "out", "up", "down")
_MULTIPLE = 8  # of a GEMM's columns on a GPU


class Pair(NamedTuple):
    """The parameters of a linear layer's adapter."""

    a: Tensor  # [blocks * rank, inner]; of selected adapters [adapters, blocks * rank, inner]
    b: Tensor  # [columns of all blocks, rank]; of selected adapters [adapters, columns of y, rank], scaled
    scale: float = 1.0


Pairs = Sequence[tuple[Pair, ...]]  # of each layer, in the order of its spec's adapters


def tensors_of(pairs: Pairs) -> list[Tensor]:
    return [tensor for of_layer in pairs for pair in of_layer for tensor in (pair.a, pair.b)]


# ---- steps -----------------------------------------------------------------------------------------------------------


def columns_of(adapter: Adapter, device: str) -> int:
    """Columns of t."""
    step = _MULTIPLE if device == "cuda" and not adapter.selected else 1
    return -(-adapter.columns // step) * step


def adapted(
    index: int, adapter: Adapter, product: steps.Gemm, t: str, columns: int, *, fused: bool = False
) -> list[Any]:
    """The steps of a layer's linear layer with an adapter. ``product`` is the GEMM without it, ``t`` a tensor of
    ``columns`` columns. ``fused``: one GEMM adds both products."""
    a, b = (f"lora {index}.{adapter.linear}.{which}" for which in "ab")
    x, y, inner = product.a, product.d, product.inner
    if not adapter.selected:
        down = steps.Gemm(x, a, None, None, t, columns, inner, True)
        if fused:
            operands = (x, product.b, t, b, product.bias, None, y)
            return [down, steps.AdaptedGemm(*operands, product.columns, inner, columns, True)]
        return [down, product, steps.Gemm(t, b, None, y, y, product.columns, columns, True)]
    rank = adapter.rank
    shared: dict[str, Any] = {"adapters": "adapters"}
    down_fields = (x, inner, 0, a, columns, 0, t, columns, 0, columns, inner, False)
    up = [
        steps.SelectedGemm(
            *(t, columns, number * rank, b, product.columns, first),
            *(y, product.columns, first, last - first, rank, True),
            **shared,
        )
        for number, (first, last) in enumerate(adapter.blocks)
    ]
    return [steps.SelectedGemm._make((*down_fields, "adapters")), product, *up]


def without_adapter(sequence: list[Any], branch: str, total: str) -> tuple[list[Any], list[Any]]:
    """Splits off the last steps that add an adapter's product to ``branch``. They add it to ``total``."""
    count = len(sequence)
    while count and _adds_to(sequence[count - 1], branch):
        count -= 1
    names = [dict.fromkeys(("c", "d") if isinstance(step, steps.Gemm) else ("y",), total) for step in sequence[count:]]
    return sequence[:count], [step._replace(**fields) for step, fields in zip(sequence[count:], names, strict=True)]


def _adds_to(step: Any, y: str) -> bool:
    return (isinstance(step, steps.Gemm) and step.c == step.d == y) or (
        isinstance(step, steps.SelectedGemm) and step.adds and step.y == y
    )


def first_of(b: str) -> str:
    """The name of A, by that of B."""
    return f"{b.removesuffix('b')}a"


def gradient_as_operand(name: str) -> str:
    """The entry of the table of operands that a gradient of A or B is written to; other names as they are."""
    if not name.startswith("d lora "):
        return name
    linear, _, which = name.removeprefix("d ").rpartition(".")
    return f"{linear}.d{which}"


# ---- operands --------------------------------------------------------------------------------------------------------


class Operands:
    """What the GEMMs of a plan read of the adapters: A, and the scaled B of all blocks in one matrix
    [columns of y, columns of t], in x's dtype. Made by a few launches for all layers."""

    def __init__(self, specs: Sequence[LayerSpec], pairs: Pairs, dtype: torch.dtype) -> None:
        self._pairs, self._table = pairs, array("q", bytes(8 * len(specs) * len(LINEARS) * len(OPERANDS)))
        # The pairs of equal adapters in all layers, and the rows of the table that theirs are in.
        self._groups: dict[Any, tuple[list[Pair], list[int]]] = {}
        for layer, (spec, of_layer) in enumerate(zip(specs, pairs, strict=True)):
            for adapter, pair in zip(spec.adapters, of_layer, strict=True):
                known = self._groups.setdefault((adapter, pair.a.shape, pair.scale), ([], []))
                known[0].append(pair)
                known[1].append(layer * len(LINEARS) + LINEARS.index(adapter.linear))
        self._held: list[Tensor] = []  # whose addresses are in the table
        for (adapter, _, scale), (of_group, rows) in self._groups.items():
            columns = columns_of(adapter, of_group[0].a.device.type)
            a = _in_type([pair.a for pair in of_group], columns, dtype)
            b = [pair.b for pair in of_group]
            if not adapter.selected:
                b = _joined(_scaled(b, scale), adapter, columns, dtype)
            self._write(rows, "a", a)
            self._write(rows, "b", b)

    @property
    def table(self) -> array[int]:
        return self._table

    def _write(self, rows: Sequence[int], which: str, tensors: Sequence[Tensor]) -> None:
        entry = OPERANDS.index(which)
        for row, tensor in zip(rows, tensors, strict=True):
            self._table[row * len(OPERANDS) + entry] = tensor.data_ptr()
        self._held += tensors

    def gradients(self, dtype: torch.dtype) -> Gradients:
        """Memory for the gradients, in the dtype in which the core writes them, whose addresses are in the table."""
        groups = []
        for (adapter, shape, scale), (of_group, rows) in self._groups.items():
            columns = columns_of(adapter, of_group[0].a.device.type)
            da = [pair.a.new_empty((columns, shape[-1]), dtype=dtype) for pair in of_group]
            db = [pair.b.new_empty((adapter.outputs, columns), dtype=dtype) for pair in of_group]
            self._write(rows, "da", da)
            self._write(rows, "db", db)
            groups.append((adapter, scale, of_group, rows, da, db))
        return Gradients(self._pairs, groups)


class Gradients:
    """The gradients of A and B, before they are in the shapes and dtypes of the parameters."""

    def __init__(self, pairs: Pairs, groups: list[Any]) -> None:
        self._pairs, self._groups = pairs, groups

    def of_parameters(self) -> list[Tensor]:
        """The gradients in the order of ``tensors_of``."""
        by_pair: dict[int, tuple[Tensor, Tensor]] = {}
        for adapter, scale, of_group, _, da, db in self._groups:
            a = [gradient[: adapter.columns].to(of_group[0].a.dtype) for gradient in da]
            b = [_parts(gradient, adapter).to(of_group[0].b.dtype) for gradient in db]
            b = _scaled(b, scale)
            by_pair.update((id(pair), (of_a, of_b)) for pair, of_a, of_b in zip(of_group, a, b, strict=True))
        return [tensor for of_layer in self._pairs for pair in of_layer for tensor in by_pair[id(pair)]]


def _scaled(tensors: list[Tensor], scale: float) -> list[Tensor]:
    return tensors if scale == 1.0 else list(torch._foreach_mul(tensors, scale))


def _in_type(tensors: list[Tensor], rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Matrices of equal shapes with this number of rows, of which the last ones are 0."""
    first = tensors[0]
    if first.dtype == dtype and first.shape[-2] == rows and all(tensor.is_contiguous() for tensor in tensors):
        return tensors
    shape = (len(tensors), *first.shape[:-2], rows, first.shape[-1])
    stacked = first.new_empty(shape, dtype=dtype)
    if rows > first.shape[-2]:
        stacked[..., first.shape[-2] :, :].zero_()
    torch._foreach_copy_(list(stacked[..., : first.shape[-2], :].unbind()), tensors)
    return list(stacked.unbind())


def _is_whole(adapter: Adapter, columns: int) -> bool:
    """Whether B is the operand: it has one block, which is all of y."""
    return columns == adapter.rank and adapter.blocks == ((0, adapter.outputs),)


def _joined(b: list[Tensor], adapter: Adapter, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """The blocks of each B, whose columns are those of their part of t, in a matrix that is 0 elsewhere."""
    whole = _in_type(b, len(b[0]), dtype)
    if _is_whole(adapter, columns):
        return whole
    compact = torch.stack(whole)
    full = compact.new_zeros((len(b), adapter.outputs, columns))
    start = 0
    for number, (first, last) in enumerate(adapter.blocks):
        of_block = slice(number * adapter.rank, (number + 1) * adapter.rank)
        full[:, first:last, of_block] = compact[:, start : start + last - first]
        start += last - first
    return list(full.unbind())


def _parts(full: Tensor, adapter: Adapter) -> Tensor:
    """The blocks of the gradient of a matrix of ``_joined``, one below the other."""
    if _is_whole(adapter, full.shape[1]):
        return full
    rank = adapter.rank
    parts = [full[first:last, i * rank : (i + 1) * rank] for i, (first, last) in enumerate(adapter.blocks)]
    return torch.cat(parts)


def operands_of(specs: Sequence[LayerSpec], inputs: Any) -> Operands | None:
    return Operands(specs, inputs.pairs, inputs.x.dtype) if inputs.pairs else None


def differentiable(specs: Sequence[LayerSpec], inputs: Any) -> dict[str, Tensor]:
    """The operands by their names in steps, by torch's ops, which autograd differentiates."""
    operands, dtype = {}, inputs.x.dtype
    for layer, (spec, of_layer) in enumerate(zip(specs, inputs.pairs, strict=False)):
        for adapter, pair in zip(spec.adapters, of_layer, strict=True):
            name = f"lora {layer}.{adapter.linear}"
            operands[f"{name}.a"] = pair.a.to(dtype)
            operands[f"{name}.b"] = pair.b.to(dtype) if adapter.selected else _expanded(pair, adapter).to(dtype)
    return operands


def _expanded(pair: Pair, adapter: Adapter) -> Tensor:
    rows = torch.zeros(adapter.outputs, adapter.columns, dtype=pair.b.dtype, device=pair.b.device)
    start = 0
    for number, (first, last) in enumerate(adapter.blocks):
        of_block = slice(number * adapter.rank, (number + 1) * adapter.rank)
        rows[first:last, of_block] = pair.b[start : start + last - first] * pair.scale
        start += last - first
    return rows
