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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm import _native
from fasttfm.kernels.common.rows import contiguous_like, empty_output, gradient_like
from fasttfm.ops import checks
from fasttfm.ops.backends import Backend, BackendTable, requested
from fasttfm.ops.library import OpFunction, any_requires_grad, is_compiling, needs_gradient, register

# ---- what an op takes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A tensor. ``kind`` is its letter in ``_C.signature`` (csrc/calls.cpp); ``check(op, tensor, first)`` raises if it
    is invalid, by itself or in combination with the first input."""

    name: str
    kind: str
    check: Callable[[str, Any, Any], None]
    optional: bool = False

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

    return Input(name, "p", check, optional=True)


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
        if type(value) is not float or not low <= value <= high:  # most are
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


# ---- what an op returns ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """An output; ``make(first input)`` allocates it, for kernels and for tracers."""

    name: str
    make: Callable[[Tensor], Tensor]

    @property
    def schema(self) -> str:
        return f"Tensor {self.name}"


def like_first(name: str) -> Output:
    """Contiguous, of the first input's shape and type."""
    return Output(name, contiguous_like)


def half_of_first(name: str) -> Output:
    """Contiguous [..., C] of the first input's type, for rows [..., 2 C]."""

    def make(x: Tensor) -> Tensor:
        return torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)

    return Output(name, make)


def row_statistics(name: str, count: int | None = None) -> Output:
    """[N] or [count, N] numbers of the accumulation type, for N rows."""
    leading = () if count is None else (count,)

    def make(x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        return torch.empty((*leading, x.numel() // x.shape[-1]), dtype=dtype, device=x.device)

    return Output(name, make)


# ---- the op ----------------------------------------------------------------------------------------------------------


class Served(NamedTuple):
    """The backend of a call whose checks have passed."""

    backend: Backend
    requested: str | None


_MOST_KNOWN = 4096  # calls that differ in dtypes, columns, heads, strides or alignment, not in rows or tokens


class KnownCalls:
    """A cache of the backend for calls that an op has already checked: a call with the same key skips both steps."""

    def __init__(self, table: BackendTable) -> None:
        self.table = table
        self._known: dict[tuple[bytes, str | None], Served] = {}
        self._backends = table.backends

    @staticmethod
    def key(kinds: str, *tensors: Any) -> bytes | None:
        """The key of a call, with one letter of ``kinds`` (csrc/calls.cpp) for each tensor. None for calls that torch's
        dispatcher or a tracer has to see, and for rare ones."""
        if is_compiling() or forward_ad._current_level >= 0:
            return None
        return _native.signature(kinds, *tensors)

    def find(self, key: bytes | None, asked: str | None) -> Served | None:
        if key is None:
            return None
        if self.table.backends is not self._backends:  # they have been replaced
            self._known, self._backends = {}, self.table.backends
        return self._known.get((key, asked))

    def add(self, key: bytes, asked: str | None, chosen: Backend) -> Served:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        served = self._known[key, asked] = Served(chosen, asked)
        return served


class Op:
    """See the module's text. ``saves`` names the inputs and outputs that the backward gets, ``backward_options`` the
    options; ``gradients`` names the inputs that it returns gradients of: parameters' only where they are wanted;
    ``recomputes`` names outputs that it can return once more, for ops that are made of this one."""

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
    ) -> None:
        self.name, self.inputs, self.options, self.outputs = name, inputs, options, outputs
        self.table = BackendTable(name, tuple(backends))
        self.kinds = "".join(given.kind for given in inputs)
        self._count = len(inputs)
        self.known = KnownCalls(self.table)
        everything: list[Any] = [*inputs, *options, *outputs]
        places = {item.name: place for place, item in enumerate(everything)}
        self.saved = [everything[places[name]] for name in saves]
        self.kept = [everything[places[name]] for name in backward_options]
        self.differentiable = [inputs[places[name]] for name in gradients]
        self.saved_places = [places[name] for name in saves]
        self.kept_places = [places[name] for name in backward_options]
        self.gradient_places = [places[name] for name in gradients]
        self.wanted_places = [place for place in self.gradient_places if inputs[place].optional]
        # Where the backward finds the tensors that its gradients are like, and those that its backend is chosen by.
        self._sources = [1 + saves.index(given.name) for given in self.differentiable]
        self._choosers = [1 + saves.index(given.name) for given in inputs]
        self.recomputed = [everything[places[name]] for name in recomputes]
        self.forward = register(self._forward_schema(), self._forward, self.make_outputs)
        self.backward = register(self._backward_schema(), self._backward, self._make_gradients)
        self._function = _autograd_function(self, instead)

    # ---- a call ----

    def __call__(self, *arguments: Any, backend: str | None = None) -> Any:
        """A checked, differentiable call, inputs and options by position. Returns the first output."""
        asked, tensors = requested(backend), arguments[: self._count]
        key = self.known.key(self.kinds, *tensors)
        served = self.known.find(key, asked)
        if served is not None:
            return self._call_plain(served, tensors, self._convert(arguments))
        check_inputs(self.name, self.inputs, tensors)
        options = self._convert(arguments)
        self.table.check_name(backend)
        if key is not None:
            served = self.known.add(key, asked, self.table.select(asked, *tensors))
            return self._call_plain(served, tensors, options)
        call = self._function.apply if needs_gradient(*tensors) else self.forward
        return first_of(call(*tensors, *options, asked))

    def _call_plain(self, served: Served, tensors: Sequence[Any], options: Sequence[Any]) -> Any:
        """A call that bypasses torch's dispatcher."""
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            return self._function.apply_plain(*tensors, *options, served)
        return first_of(served.backend.forward(*tensors, *options))

    def _convert(self, arguments: Sequence[Any]) -> list[Any]:
        name, count = self.name, self._count
        return [option.convert(name, arguments[count + place]) for place, option in enumerate(self.options)]

    def _choose(self, asked: str | None, *tensors: Tensor | None) -> Backend:
        served = self.known.find(self.known.key(self.kinds, *tensors), asked)
        return self.table.select(asked, *tensors) if served is None else served.backend

    # ---- torch.library: the last argument is the backend's name ----

    def _forward_schema(self) -> str:
        arguments = [*(given.schema for given in self.inputs), *(option.schema for option in self.options)]
        results = [output.schema for output in self.outputs]
        returned = "Tensor" if len(results) == 1 else f"({', '.join(results)})"
        return f"{self.name}_forward({', '.join(arguments)}, str? backend) -> {returned}"

    def _backward_schema(self) -> str:
        kept = [item.schema for item in (*self.saved, *self.kept)]
        wanted = [f"bool want_d{self.inputs[place].name}" for place in self.wanted_places]
        wanted += [f"bool want_{output.name}" for output in self.recomputed]
        arguments = [f"Tensor d{self.outputs[0].name}", *kept, *wanted]
        results = [
            *(f"Tensor d{given.name}" for given in self.differentiable),
            *(out.schema for out in self.recomputed),
        ]
        return f"{self.name}_backward({', '.join(arguments)}, str? backend) -> ({', '.join(results)})"

    def _forward(self, *arguments: Any) -> Any:
        *given, asked = arguments
        return self._choose(asked, *given[: self._count]).forward(*given)

    def _backward(self, *arguments: Any) -> Any:
        *given, asked = arguments
        return self._choose(asked, *(given[place] for place in self._choosers)).backward(*given)

    def make_outputs(self, x: Tensor, *_: Any) -> Any:
        """Allocates the outputs; the fake implementation of the forward."""
        return _returned([output.make(x) for output in self.outputs])

    def _make_gradients(self, *arguments: Any) -> Any:
        flags = len(self.wanted_places) + len(self.recomputed)
        wanted = iter(arguments[-1 - flags : -1])
        first = arguments[self._sources[0]]
        gradients = [
            gradient_like(arguments[source], not given.optional or next(wanted), first)
            for source, given in zip(self._sources, self.differentiable, strict=True)
        ]
        gradients += [output.make(first) if next(wanted) else empty_output(first) for output in self.recomputed]
        return _returned(gradients)


def _returned(tensors: list[Tensor]) -> Any:
    """As a registered op returns them: one tensor by itself."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def first_of(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _autograd_function(op: Op, alternative: str) -> type[OpFunction]:
    class Function(OpFunction):
        instead = alternative

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *given, asked = arguments
            if isinstance(asked, Served):
                outputs, asked = asked.backend.forward(*given), asked.requested
            else:
                outputs = op.forward(*arguments)
            values = (*given, *outputs) if isinstance(outputs, tuple) else (*given, outputs)
            ctx.save_for_backward(*[values[place] for place in op.saved_places])
            ctx.kept, ctx.requested = [given[place] for place in op.kept_places], asked
            return first_of(outputs)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad
            wanted = [needed[place] for place in op.wanted_places]
            wanted += [False] * len(op.recomputed)
            found = op.backward(dy, *ctx.saved_tensors, *ctx.kept, *wanted, ctx.requested)
            found = found if isinstance(found, tuple) else (found,)
            gradients: list[Tensor | None] = [None] * len(needed)
            for place, gradient in zip(op.gradient_places, found, strict=False):  # recomputed outputs follow
                if needed[place]:
                    gradients[place] = gradient
            return tuple(gradients)

    Function.op = op.name
    Function.__name__ = Function.__qualname__ = "".join(word.capitalize() for word in op.name.split("_"))
    return Function
