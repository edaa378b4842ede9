"""What a declared op takes and returns: its tensors, options and outputs (ops/core/declare.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulation_type
from fasttfm.kernels.common.rows import contiguous_like, empty_numbers, row_count
from fasttfm.ops.core import checks

# ---- what an op takes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A tensor. ``kind`` is its letter in ``_C.signature`` (csrc/calls.cpp); ``check(op, tensor, first)`` raises if it
    is invalid, by itself or in combination with the first input. ``flagged``: the backward is passed whether its
    gradient is needed. ``indices``: the backward gets a copy if NumPy may share the memory (``unshared``). ``changed``:
    the letter of torch's schema for a tensor that the op changes in place."""

    name: str
    kind: str
    check: Callable[[str, Any, Any], None]
    optional: bool = False
    flagged: bool = False
    indices: bool = False
    changed: str = ""

    @property
    def schema(self) -> str:
        written = f"({self.changed}!)" if self.changed else ""
        return f"Tensor{written}{'?' if self.optional else ''} {self.name}"


def rows(name: str) -> Input:
    """Floating-point rows [..., C] with at least one column; the first input."""

    def check(op: str, tensor: Any, _: Any) -> None:
        checks.check_floating(op, name, tensor)
        if tensor.dim() == 0 or tensor.shape[-1] == 0:
            raise checks.bad_value(op, name, "at least one dimension and one column", f"shape {tuple(tensor.shape)}")

    return Input(name, "r", check)


def paired_rows(name: str) -> Input:
    """Floating-point rows [..., 2 C], of two halves; the first input."""

    def check(op: str, tensor: Any, _: Any) -> None:
        checks.check_floating(op, name, tensor)
        if tensor.dim() == 0 or tensor.shape[-1] == 0 or tensor.shape[-1] % 2:
            expected = "at least one dimension and an even number of columns"
            raise checks.bad_value(op, name, expected, f"shape {tuple(tensor.shape)}")

    return Input(name, "r", check)


def rows_like_first(name: str) -> Input:
    """Floating-point rows of the first input's shape."""

    def check(op: str, tensor: Any, first: Any) -> None:
        checks.check_floating(op, name, tensor)
        checks.check_shape(op, name, tensor, first.shape)
        checks.check_device(op, name, tensor, like=first)

    return Input(name, "l", check)


def parameter(name: str) -> Input:
    """A floating-point [C] or None, for rows of C columns."""

    def check(op: str, tensor: Any, first: Any) -> None:
        if tensor is not None:
            checks.check_floating(op, name, tensor, optional=True)
            checks.check_shape(op, name, tensor, (first.shape[-1],))
            checks.check_device(op, name, tensor, like=first)

    return Input(name, "p", check, optional=True, flagged=True)


def boundaries(name: str = "cu_seqlens") -> Input:
    """An optional argument: the boundaries of packed rows [T, C], which have at least one sequence; ``check_values``
    looks at their values."""

    def check(op: str, tensor: Any, first: Any) -> None:
        if tensor is None:
            return
        checks.check_cu_seqlens(op, tensor, like=first, argument=name)
        if tensor.shape[0] < 2 or not tensor.is_contiguous():
            got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise checks.bad_value(op, name, "a contiguous [sequences + 1], at least one sequence", got)

    return Input(name, "c", check, optional=True, indices=True)


def seed(name: str = "seed") -> Input:
    """An optional argument: the seed of dropout."""
    return Input(name, "s", lambda op, tensor, first: checks.check_seed(op, tensor, like=first), optional=True)


def checked(name: str, *, optional: bool = False, flagged: bool = False, changed: str = "") -> Input:
    """A tensor that the public function checks. An op with such an input is called by ``apply``."""
    return Input(name, "", lambda *_: None, optional, flagged, changed=changed)


def indices(name: str, *, optional: bool = False) -> Input:
    """Integers or truth values that the public function checks; ``check_values`` looks at their values."""
    return Input(name, "", lambda *_: None, optional, indices=True)


_FLOATING_KINDS = "rlp"


def check_inputs(op: str, inputs: Sequence[Input], tensors: Sequence[Any]) -> None:
    """Raises what is wrong with the tensors of a call."""
    floating = {}
    for argument, tensor in zip(inputs, tensors, strict=True):
        argument.check(op, tensor, tensors[0])
        if argument.kind in _FLOATING_KINDS:
            floating[argument.name] = tensor
    checks.check_double(op, **floating)


@dataclass(frozen=True)
class Option:
    """An argument that is not a tensor: ``convert(op, value)`` checks it and returns the value for backends. None if
    the public function has done so."""

    name: str
    schema: str
    convert: Callable[[str, Any], Any] | None


def number(name: str, *, low: float = 0.0, high: float = math.inf) -> Option:
    def convert(op: str, value: Any) -> float:
        if type(value) is float and low <= value <= high:  # most are
            return value
        checks.check_number(op, name, value, low=low, high=high)
        return float(value)

    return Option(name, f"float {name}", convert)


def choice(name: str, kinds: Mapping[str, str], *, passed_as: str) -> Option:
    """One of several names. Backends get its value, as ``passed_as``."""

    def convert(op: str, value: Any) -> str:
        if not isinstance(value, str):
            raise checks.bad_type(op, name, "a name", type(value).__name__)
        if value not in kinds:
            raise checks.bad_value(op, name, f"one of {', '.join(kinds)}", repr(value))
        return kinds[value]

    return Option(name, f"str {passed_as}", convert)


def flag(name: str) -> Option:
    def convert(op: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise checks.bad_type(op, name, "a bool", type(value).__name__)
        return value

    return Option(name, f"bool {name}", convert)


def converted(name: str, schema: str) -> Option:
    """An argument that the public function checks and converts; ``schema`` is its type in torch's schema text."""
    return Option(name, f"{schema} {name}", None)


_SCHEMA_TYPES = {int: "SymInt", float: "float", bool: "bool"}


def fields(arguments: type, **types: str) -> tuple[Input | Option, ...]:
    """The fields of a NamedTuple, tensors first, as inputs and options that the public function checks. ``types`` are
    those of the schema that differ from the usual."""
    hints = get_type_hints(arguments)
    return tuple(
        checked(name, optional=hint is not Tensor)
        if hint in (Tensor, Tensor | None)
        else converted(name, types.get(name) or _SCHEMA_TYPES[hint])
        for name, hint in hints.items()
    )


# ---- what an op returns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """An output; ``make(inputs and options)`` allocates it, for kernels and for tracers. ``optional``: the backward
    need not get it."""

    name: str
    make: Callable[..., Tensor]
    optional: bool = False

    @property
    def schema(self) -> str:
        return f"Tensor {self.name}"


@dataclass(frozen=True)
class Gradient:
    """The gradient of the input ``name``; ``make(arguments of the backward)`` allocates it. By default a gradient is
    like its input, which the backward gets then."""

    name: str
    make: Callable[..., Tensor]


def outputs(*names: str, make: Callable[..., Sequence[Tensor]]) -> tuple[Output, ...]:
    """Outputs that one function makes."""

    def output(index: int, name: str) -> Output:
        return Output(name, lambda *arguments: make(*arguments)[index])

    return tuple(output(index, name) for index, name in enumerate(names))


def like_first(name: str) -> Output:
    """Contiguous, of the first input's shape and type."""
    return Output(name, lambda x, *_: contiguous_like(x))


def wide_like_first(name: str) -> Output:
    """Contiguous, of the first input's shape, in the accumulation type."""
    return Output(name, lambda x, *_: x.new_empty(x.shape, dtype=accumulation_type(x)))


def half_of_first(name: str) -> Output:
    """Contiguous [..., C] of the first input's type, for rows [..., 2 C]."""

    def make(x: Tensor, *_: Any) -> Tensor:
        return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)

    return Output(name, make)


def row_statistics(name: str, count: int | None = None) -> Output:
    """[N] or [count, N] numbers of the accumulation type, for N rows."""
    leading = () if count is None else (count,)
    return Output(name, lambda x, *_: empty_numbers(x, *leading, row_count(x)))
