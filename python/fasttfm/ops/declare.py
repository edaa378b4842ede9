"""One declaration per op. From it follow the op's registration with torch.library (schema and fake), its autograd
function, the choice among its backends, ``explain``, and the checks of its arguments.

    OP = Op(
        "layer_norm",
        inputs=(rows("x"), parameter("weight"), parameter("bias")),
        options=(number("eps", low=0.0),),
        outputs=(like("y", "x"), row_statistics("statistics", 2)),
        saves=("x", "weight", "bias", "statistics"),
        gradients=("x", "weight", "bias"),
        instead="torch.nn.functional.layer_norm",
        backends=lambda: (...),
    )

registers

    fasttfm::layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, str? backend)
        -> (Tensor y, Tensor statistics)
    fasttfm::layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics,
        bool want_dweight, bool want_dbias, str? backend) -> (Tensor dx, Tensor dweight, Tensor dbias)

and ``OP(x, weight, bias, eps, backend=backend)`` is a checked, differentiable call. A backend's ``forward`` takes the
inputs and options and returns the outputs; its ``backward`` takes what ``fasttfm::..._backward`` takes, without the
backend's name, and returns the gradients; those that are not needed are empty.

A call takes one of two paths. The checks and the choice of a backend depend on a few facts about the tensors (dtypes,
columns, strides, alignment), which the native core gathers in a microsecond (``_C.signature``). If they have been seen
before and all tensors are plain, the backend is called directly. All other calls are checked, and go through torch's
dispatcher if a tracer, a mode or a tensor subclass has to see them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm import _native
from fasttfm.kernels.common.linear import accumulation_type
from fasttfm.kernels.common.rows import contiguous_like, empty_numbers, empty_output, gradient_like, row_count
from fasttfm.ops import checks
from fasttfm.ops.backends import Backend, BackendTable, requested
from fasttfm.ops.library import (
    OpFunction,
    any_requires_grad,
    is_compiling,
    is_plain,
    needs_gradient,
    register,
    unshared,
)

# ---- what an op takes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A tensor. ``kind`` is its letter in ``_C.signature`` (csrc/calls.cpp); ``check(op, tensor, first)`` raises if it
    is invalid, by itself or in combination with the first input. ``flagged``: the backward is passed whether its
    gradient is needed. ``indices``: the backward gets a copy if NumPy may share the memory (``unshared``)."""

    name: str
    kind: str
    check: Callable[[str, Any, Any], None]
    optional: bool = False
    flagged: bool = False
    indices: bool = False

    @property
    def schema(self) -> str:
        return f"Tensor{'?' if self.optional else ''} {self.name}"


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


def checked(name: str, *, optional: bool = False, flagged: bool = False) -> Input:
    """A tensor that the public function checks. An op with such an input is called by ``apply``."""
    return Input(name, "", lambda *_: None, optional, flagged)


def indices(name: str, *, optional: bool = False) -> Input:
    """Integers or truth values that the public function checks; ``check_values`` looks at their values."""
    return Input(name, "", lambda *_: None, optional, indices=True)


def check_inputs(op: str, inputs: Sequence[Input], tensors: Sequence[Any]) -> None:
    """Raises what is wrong with the tensors of a call."""
    for given, tensor in zip(inputs, tensors, strict=True):
        given.check(op, tensor, tensors[0])
    checks.check_double(op, **{given.name: tensor for given, tensor in zip(inputs, tensors, strict=True)})


@dataclass(frozen=True)
class Option:
    """An argument that is not a tensor: ``convert(op, value)`` checks it and returns the value for backends."""

    name: str
    schema: str
    convert: Callable[[str, Any], Any]


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
    return Option(name, f"{schema} {name}", lambda _, value: value)


# ---- what an op returns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """An output; ``make(inputs and options)`` allocates it, for kernels and for tracers."""

    name: str
    make: Callable[..., Tensor]

    @property
    def schema(self) -> str:
        return f"Tensor {self.name}"


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


# ---- the op ----------------------------------------------------------------------------------------------------------


class Selected(NamedTuple):
    """The backend of a call whose checks have passed."""

    backend: Backend
    requested: str | None


_MOST_KNOWN = 4096  # calls that differ in dtypes, columns, heads, strides or alignment, not in rows or tokens


class KnownCalls:
    """A cache of the backend for calls that an op has already checked: a call with the same key skips both steps."""

    def __init__(self, table: BackendTable) -> None:
        self.table = table
        self._known: dict[tuple[Hashable, str | None], Selected] = {}
        self._backends = table.backends

    @staticmethod
    def key(kinds: str, *tensors: Any) -> bytes | None:
        """The key of a call, with one letter of ``kinds`` (csrc/calls.cpp) for each tensor. None for calls that torch's
        dispatcher or a tracer has to see, and for rare ones."""
        if is_compiling() or forward_ad._current_level >= 0:
            return None
        return _native.signature(kinds, *tensors)

    def find(self, key: Hashable, asked: str | None) -> Selected | None:
        """The backend of a call; None for an unknown key, and for the key None. A key may have more parts than
        ``key`` returns."""
        if key is None:
            return None
        if self.table.backends is not self._backends:  # they have been replaced
            self._known, self._backends = {}, self.table.backends
        return self._known.get((key, asked))

    def add(self, key: Hashable, asked: str | None, chosen: Backend) -> Selected:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        selected = self._known[key, asked] = Selected(chosen, asked)
        return selected


class Op:
    """See the module's text. ``saves`` names the inputs and outputs that the backward gets, ``backward_options`` the
    options; ``gradients`` names the inputs that it returns gradients of: parameters' only where they are wanted;
    ``recomputes`` names outputs that it can return once more, for ops that are made of this one. ``chosen_by`` names
    what the backends' ``refuse`` gets: by default the inputs. ``check_values`` gets inputs and options, and raises for
    indices on the CPU that kernels must not see."""

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[Input],
        options: Sequence[Option] = (),
        outputs: Sequence[Output],
        saves: Sequence[str],
        gradients: Sequence[str],
        instead: str,
        backends: Sequence[Backend],
        backward_options: Sequence[str] = (),
        recomputes: Sequence[str] = (),
        chosen_by: Sequence[str] | None = None,
        check_values: Callable[..., None] | None = None,
    ) -> None:
        self.name, self.inputs, self.options, self.outputs = name, inputs, options, outputs
        self._check_values = check_values
        self.table = BackendTable(name, tuple(backends))
        self.kinds = "".join(given.kind for given in inputs)
        self._count = len(inputs)
        self.known = KnownCalls(self.table)
        everything: list[Any] = [*inputs, *options, *outputs]
        indices = {item.name: index for index, item in enumerate(everything)}
        self.saved = [everything[indices[name]] for name in saves]
        self.kept = [everything[indices[name]] for name in backward_options]
        self.differentiable = [inputs[indices[name]] for name in gradients]
        self.saved_indices = [indices[name] for name in saves]
        self.kept_indices = [indices[name] for name in backward_options]
        self.gradient_indices = [indices[name] for name in gradients]
        self.wanted_indices = [index for index in self.gradient_indices if inputs[index].flagged]
        self.copied_saves = [saves.index(given.name) for given in inputs if given.indices]
        # Where the backward finds the tensors that its gradients are like, and those that its backend is chosen by.
        self._sources = [1 + saves.index(given.name) for given in self.differentiable]
        chosen_by = [given.name for given in inputs] if chosen_by is None else chosen_by
        self._choosers = _picker([indices[name] for name in chosen_by])
        self._backward_choosers = _picker([1 + [*saves, *backward_options].index(name) for name in chosen_by])
        self.recomputed = [everything[indices[name]] for name in recomputes]
        self.forward = register(
            _schema(f"{name}_forward", (*inputs, *options), outputs), self._forward, self.make_outputs
        )
        self.backward = register(self._backward_schema(), self._backward, self._make_gradients)
        self._function = _autograd_function(self, instead)

    # ---- a call ----

    def __call__(self, *arguments: Any, backend: str | None = None) -> Any:
        """A checked, differentiable call, inputs and options by position. Returns the first output."""
        asked, tensors, known = requested(backend), arguments[: self._count], self.known
        key = known.key(self.kinds, *tensors)
        selected = known.find(key, asked)
        if selected is None:
            check_inputs(self.name, self.inputs, tensors)
        arguments = self._convert(arguments)
        if selected is None:
            self.table.check_name(backend)
            if key is None:
                call = self._function.apply if needs_gradient(*tensors) else self.forward
                return first_of(call(*arguments, asked))
            selected = known.add(key, asked, self.table.select(asked, *tensors))
        return self.run(selected, *arguments)

    def run(self, selected: Selected, *arguments: Any) -> Any:
        """A differentiable call of checked and converted arguments, all of them plain: torch's dispatcher is
        bypassed."""
        if self._check_values is not None:
            self._check_values(*arguments)
        if torch.is_grad_enabled() and any_requires_grad(*arguments[: self._count]):
            return self._function.apply_plain(*arguments, selected)
        backend = selected.backend
        return first_of(backend.forward(*arguments)) if backend.infer is None else backend.infer(*arguments)

    def add_known(self, key: Hashable, asked: str | None, *arguments: Any) -> Selected:
        """Selects the backend for checked and converted arguments, and for later calls with the same key."""
        return self.known.add(key, asked, self.table.select(asked, *self._choosers(arguments)))

    def apply(self, *arguments: Any, backend: str | None = None) -> Any:
        """As a call, of arguments that the public function has checked and converted."""
        if backend is not None:
            self.table.check_name(backend)
        differentiable = [arguments[index] for index in self.gradient_indices]
        if not needs_gradient(*differentiable):
            return first_of(self.forward(*arguments, requested(backend)))
        plain = is_plain(arguments[: self._count])
        return first_of((self._function.apply_plain if plain else self._function.apply)(*arguments, requested(backend)))

    def _convert(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with checked and converted options. Most options need no conversion: the tuple is copied only
        if one changes."""
        index = self._count
        for option in self.options:
            value = arguments[index]
            found = option.convert(self.name, value)
            if found is not value:
                arguments = (*arguments[:index], found, *arguments[index + 1 :])
            index += 1
        return arguments

    def _choose(self, asked: str | None, *tensors: Tensor | None) -> Backend:
        selected = self.known.find(self.known.key(self.kinds, *tensors), asked) if self.kinds else None
        return self.table.select(asked, *tensors) if selected is None else selected.backend

    def _choose_backward(self, asked: str | None, *tensors: Tensor | None) -> Backend:
        chosen = self._choose(asked, *tensors)
        if chosen.backward_reason(asked, *tensors) is None:
            return chosen
        return self.table.select_backward(asked, *tensors)

    # ---- torch.library: the last argument is the backend's name ----

    def _backward_schema(self) -> str:
        wanted = [f"d{self.inputs[index].name}" for index in self.wanted_indices]
        wanted += [output.name for output in self.recomputed]
        flags = [flag(f"want_{name}") for name in wanted]
        results = [*(checked(f"d{given.name}") for given in self.differentiable), *self.recomputed]
        first = checked(f"d{self.outputs[0].name}")
        return _schema(f"{self.name}_backward", (first, *self.saved, *self.kept, *flags), results)

    def _forward(self, *arguments: Any) -> Any:
        given = arguments[:-1]
        if self._check_values is not None:
            self._check_values(*given)
        return self._choose(arguments[-1], *self._choosers(given)).forward(*given)

    def _backward(self, *arguments: Any) -> Any:
        given = arguments[:-1]
        return self._choose_backward(arguments[-1], *self._backward_choosers(given)).backward(*given)

    def make_outputs(self, *arguments: Any) -> Any:
        """Allocates the outputs; the fake implementation of the forward."""
        return _returned([output.make(*arguments) for output in self.outputs])

    def _make_gradients(self, *arguments: Any) -> Any:
        flags = len(self.wanted_indices) + len(self.recomputed)
        wanted = iter(arguments[-1 - flags : -1])
        first = arguments[self._sources[0]]
        gradients = [
            gradient_like(arguments[source], not given.flagged or next(wanted), first)
            for source, given in zip(self._sources, self.differentiable, strict=True)
        ]
        gradients += [output.make(first) if next(wanted) else empty_output(first) for output in self.recomputed]
        return _returned(gradients)


def _schema(name: str, arguments: Sequence[Any], results: Sequence[Any]) -> str:
    """The schema text of an op with these inputs, options and outputs."""
    returned = "Tensor" if len(results) == 1 else f"({', '.join(result.schema for result in results)})"
    return f"{name}({', '.join(argument.schema for argument in arguments)}, str? backend) -> {returned}"


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the arguments at these indices. torch.compile cannot trace it."""
    if list(indices) == list(range(len(indices))):
        return operator.itemgetter(slice(len(indices)))
    return operator.itemgetter(*indices) if len(indices) > 1 else operator.itemgetter(slice(indices[0], indices[0] + 1))


def _returned(tensors: list[Tensor]) -> Any:
    """As a registered op returns them: one tensor by itself."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def first_of(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _autograd_function(op: Op, alternative: str) -> type[OpFunction]:
    saved_indices, kept_indices, copied_saves = op.saved_indices, op.kept_indices, op.copied_saves

    class Function(OpFunction):
        instead = alternative

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            given, asked = arguments[:-1], arguments[-1]
            if isinstance(asked, Selected):
                outputs, asked = asked.backend.forward(*given), asked.requested
            else:
                outputs = op.forward(*arguments)
            values = (*given, *outputs) if isinstance(outputs, tuple) else (*given, outputs)
            saved = [values[index] for index in saved_indices]
            for index in copied_saves:
                saved[index] = unshared(saved[index])[0]
            ctx.save_for_backward(*saved)
            ctx.kept = [given[index] for index in kept_indices] if kept_indices else ()
            ctx.requested = asked
            return values[len(given)]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad
            wanted = [needed[index] for index in op.wanted_indices]
            wanted += [False] * len(op.recomputed)
            found = op.backward(dy, *ctx.saved_tensors, *ctx.kept, *wanted, ctx.requested)
            found = found if isinstance(found, tuple) else (found,)
            gradients: list[Tensor | None] = [None] * len(needed)
            for index, gradient in zip(op.gradient_indices, found, strict=False):  # recomputed outputs follow
                if needed[index]:
                    gradients[index] = gradient
            return tuple(gradients)

    return _named(Function, op.name)


def _named(function: type[OpFunction], name: str) -> type[OpFunction]:
    function.op = name
    function.__name__ = function.__qualname__ = "".join(word.capitalize() for word in name.split("_"))
    return function


# ---- linear ops ------------------------------------------------------------------------------------------------------


class LinearOp:
    """An op that is linear in its first input, the only one with a gradient. It is registered as
    ``fasttfm::<name>(inputs, options, str? backend) -> Tensor``. Its gradient is ``adjoint(dy, shape and type of the
    first input, other inputs, options, backend)``: a call of a linear op, so that there are derivatives of any order.
    The other arguments are ``Op``'s."""

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[Input],
        options: Sequence[Option],
        output: Callable[..., Tensor],
        adjoint: Callable[..., Tensor],
        backends: Sequence[Backend],
        chosen_by: Sequence[str] = (),
        check_values: Callable[..., None] | None = None,
    ) -> None:
        self.table = BackendTable(name, tuple(backends))
        self.inputs, self.adjoint = inputs, adjoint
        arguments: list[Any] = [*inputs, *options]
        names = [argument.name for argument in arguments]
        choosers, select = _picker([0, *(names.index(chosen) for chosen in chosen_by)]), self.table.select

        def forward(*arguments: Any) -> Any:
            given = arguments[:-1]
            if check_values is not None:
                check_values(*given)
            return select(arguments[-1], *choosers(given)).forward(*given)

        self.forward = register(_schema(name, arguments, (Output("", output),)), forward, output)
        self._function = _linear_function(self)

    def __call__(self, *arguments: Any, backend: str | None = None) -> Tensor:
        """A differentiable call of arguments that the public function has checked."""
        if backend is not None:
            self.table.check_name(backend)
        return self.apply(*arguments, requested(backend))

    def apply(self, *arguments: Any) -> Tensor:
        """The same call; the last argument is the name of the requested backend, or None."""
        y: Tensor = (self._function.apply if needs_gradient(arguments[0]) else self.forward)(*arguments)
        return y


def _linear_function(op: LinearOp) -> type[OpFunction]:
    copied = [given.indices for given in op.inputs[1:]]

    class Function(OpFunction):
        instead = None

        @staticmethod
        def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
            tensors = zip(copied, others, strict=False)  # options follow
            ctx.save_for_backward(*[unshared(given)[0] if copy else given for copy, given in tensors])
            ctx.options, ctx.shape, ctx.dtype = others[len(copied) :], x.shape, x.dtype
            y: Tensor = op.forward(x, *others)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            dx = op.adjoint(dy, ctx.shape, ctx.dtype, *ctx.saved_tensors, *ctx.options)
            return dx, *[None] * (len(ctx.needs_input_grad) - 1)

    return _named(Function, op.table.op)
