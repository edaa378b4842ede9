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

import copy
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fasttfm import _native
from fasttfm.kernels.common.rows import empty_output, gradient_like
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Gradient, Input, Option, Output, check_inputs, checked, converted, flag
from fasttfm.ops.core.backends import Backend, BackendTable, requested
from fasttfm.ops.core.library import (
    OpFunction,
    RegisteredOp,
    any_requires_grad,
    is_compiling,
    is_plain,
    needs_gradient,
    register,
    unshared,
)


def define(
    name: str, arguments: Sequence[Any], results: Sequence[Any], implementation: Callable[..., Any]
) -> RegisteredOp:
    """Registers ``fasttfm::<name>`` of these inputs and options, and of a backend's name. Its fake implementation makes
    the ``results``."""
    return register(
        _schema(name, arguments, results),
        implementation,
        lambda *passed: _returned([result.make(*passed) for result in results]),
    )


def _schema(name: str, arguments: Sequence[Any], results: Sequence[Any]) -> str:
    returned = "Tensor" if len(results) == 1 else f"({', '.join(result.schema for result in results)})"
    return f"{name}({', '.join(argument.schema for argument in arguments)}, str? backend) -> {returned}"


DECLARED: dict[str, Op | ForwardOp] = {}  # by name


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
    options; ``gradients`` names the inputs that it returns gradients of: parameters' only where they are needed, by a
    flag for each, or with ``flag_list`` by the flags ``needed`` in one list; ``recomputes`` names outputs that it can
    return once more, for ops that are made of this one. ``chosen_by`` names what the backends' ``refuse`` gets: by
    default the inputs; ``backward_chosen_by`` what it gets in the backward, if that is something else. ``check_values``
    gets inputs and options, and raises for indices on the CPU that kernels must not see.

    For ops that need more: ``function`` is an autograd function of the op's own, which gets what ``forward`` gets,
    where a ``Selected`` may be in place of the requested backend's name; ``returned`` names the outputs whose gradients
    the backward then gets, and ``result(outputs, arguments)`` is what a call returns. ``run_forward`` and
    ``run_backward`` are the implementations of the registered ops, if these do more than calling a backend."""

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[Input],
        options: Sequence[Option] = (),
        outputs: Sequence[Output],
        saves: Sequence[str],
        gradients: Sequence[str | Gradient],
        backends: Sequence[Backend],
        instead: str = "",
        backward_options: Sequence[str] = (),
        recomputes: Sequence[str] = (),
        flag_list: bool = False,
        chosen_by: Sequence[str] | None = None,
        backward_chosen_by: Sequence[str] | None = None,
        check_values: Callable[..., None] | None = None,
        function: type[OpFunction] | None = None,
        returned: Sequence[str] = (),
        result: Callable[[Any, Sequence[Any]], Any] | None = None,
        run_forward: Callable[..., Any] | None = None,
        run_backward: Callable[..., Any] | None = None,
    ) -> None:
        DECLARED[name] = self
        self.name, self.inputs, self.options, self.outputs = name, inputs, options, outputs
        self._check_values = check_values
        self.table = BackendTable(name, tuple(backends))
        self.kinds = "".join(argument.kind for argument in inputs)
        self._count = len(inputs)
        self.known = KnownCalls(self.table)
        self._converted = [(self._count + i, option.convert) for i, option in enumerate(options) if option.convert]
        everything: list[Any] = [*inputs, *options, *outputs]
        indices = {item.name: index for index, item in enumerate(everything)}
        self.made = [item if isinstance(item, Gradient) else None for item in gradients]
        sources = [item if isinstance(item, str) else item.name for item in gradients]
        self.differentiable = [inputs[indices[source]] for source in sources]
        self.saved_indices = [indices[source] for source in saves]
        self.kept_indices = [indices[source] for source in backward_options]
        self.gradient_indices = [indices[source] for source in sources]
        self.flagged_indices = [index for index in self.gradient_indices if inputs[index].flagged]
        self.copied_saves = [
            saves.index(argument.name) for argument in inputs if argument.indices and argument.name in saves
        ]
        self.recomputed = [everything[indices[source]] for source in recomputes]
        self._flag_list = flag_list
        incoming = [checked(f"d{output}", optional=index > 0) for index, output in enumerate(returned)]
        incoming = incoming or [checked(f"d{outputs[0].name}")]
        self.backward_arguments = (
            *incoming,
            *(_saved(everything[index]) for index in self.saved_indices),
            *(everything[index] for index in self.kept_indices),
        )
        # Where the backward finds the tensors that its gradients are like, and those that its backend is chosen by.
        names = [argument.name for argument in self.backward_arguments]
        self._sources = [-1 if made else names.index(source) for source, made in zip(sources, self.made, strict=True)]
        chosen_by = [argument.name for argument in inputs] if chosen_by is None else chosen_by
        self._choosers = _picker([indices[source] for source in chosen_by])
        backward_chosen_by = chosen_by if backward_chosen_by is None else backward_chosen_by
        self._backward_choosers = _picker([names.index(source) for source in backward_chosen_by])
        self._absent = [None] * (self._count - len(chosen_by))  # in the key: what no backend is chosen by
        self._result = result or (lambda outputs, _: first_of(outputs))
        self.forward = define(f"{name}_forward", (*inputs, *options), outputs, run_forward or self.forward_by_backend)
        self.backward = self._define_backward(run_backward or self.backward_by_backend)
        self._function = function or _autograd_function(self, instead)

    # ---- a call ----

    def __call__(self, *arguments: Any, backend: str | None = None) -> Any:
        """A checked, differentiable call, inputs and options by position. Returns the first output, or ``result``."""
        asked, tensors, known = requested(backend), arguments[: self._count], self.known
        key = known.key(self.kinds, *tensors)
        selected = known.find(key, asked)
        if selected is None:
            check_inputs(self.name, self.inputs, tensors)
        for index, convert in self._converted:
            value = arguments[index]
            converted_value = convert(self.name, value)
            if converted_value is not value:  # rarely
                arguments = (*arguments[:index], converted_value, *arguments[index + 1 :])
        if selected is None:
            self.table.check_name(backend)
            if key is None:
                if needs_gradient(*tensors):
                    return self._function.apply(*arguments, asked)
                return self._result(self.forward(*arguments, asked), arguments)
            selected = self.add_known(key, asked, *arguments)
        if self._check_values is not None:
            return self.run(selected, *arguments)
        if torch.is_grad_enabled() and any_requires_grad(*tensors):  # as run(), without the cost of one more call
            return self._function.apply_plain(*arguments, selected)
        infer = selected.backend.infer
        return self._result(selected.backend.forward(*arguments), arguments) if infer is None else infer(*arguments)

    def run(self, selected: Selected, *arguments: Any) -> Any:
        """A differentiable call of checked and converted arguments, all of them plain: torch's dispatcher is
        bypassed."""
        if self._check_values is not None:
            self._check_values(*arguments)
        if torch.is_grad_enabled() and any_requires_grad(*arguments[: self._count]):
            return self._function.apply_plain(*arguments, selected)
        backend = selected.backend
        if backend.infer is not None:
            return backend.infer(*arguments)
        return self._result(backend.forward(*arguments), arguments)

    def add_known(self, key: Hashable, asked: str | None, *arguments: Any) -> Selected:
        """Selects the backend for checked and converted arguments, and for later calls with the same key."""
        return self.known.add(key, asked, self.table.select(asked, *self._choosers(arguments)))

    def apply(self, *arguments: Any, backend: str | None = None) -> Any:
        """The same call, of arguments that the public function has checked and converted."""
        if backend is not None:
            self.table.check_name(backend)
        differentiable = [arguments[index] for index in self.gradient_indices]
        if not needs_gradient(*differentiable):
            return self._result(self.forward(*arguments, requested(backend)), arguments)
        plain = is_plain(arguments[: self._count])
        return (self._function.apply_plain if plain else self._function.apply)(*arguments, requested(backend))

    def choose(self, asked: str | None, *tensors: Tensor | None) -> Backend:
        """The backend of the forward."""
        if self.kinds:
            selected = self.known.find(self.known.key(self.kinds, *tensors, *self._absent), asked)
            if selected is not None:
                return selected.backend
        return self.table.select(asked, *tensors)

    # ---- torch.library: the last argument is the backend's name ----

    def _define_backward(self, implementation: Callable[..., Any]) -> RegisteredOp:
        names = [f"d{self.inputs[index].name}" for index in self.flagged_indices]
        names += [output.name for output in self.recomputed]
        flags = [flag(f"want_{name}") for name in names]
        if self._flag_list:
            flags = [converted("needed", "bool[]")]
        results = [checked(f"d{argument.name}") for argument in self.differentiable] + [*self.recomputed]
        schema = _schema(f"{self.name}_backward", (*self.backward_arguments, *flags), results)
        return register(schema, implementation, self._make_gradients)

    def forward_by_backend(self, *arguments: Any) -> Any:
        passed, asked = arguments[:-1], arguments[-1]
        if self._check_values is not None:
            self._check_values(*passed)
        return self.choose(asked, *self._choosers(passed)).forward(*passed)

    def backward_by_backend(self, *arguments: Any) -> Any:
        passed, asked = arguments[:-1], arguments[-1]
        tensors = self._backward_choosers(passed)
        key = self.known.key(self.kinds, *tensors, *self._absent) if self.kinds else None
        selected = self.known.find(key, asked)
        chosen = self.table.select(asked, *tensors) if selected is None else selected.backend
        if chosen.has_reasons and chosen.backward_reason(asked, *tensors) is not None:
            chosen = self.table.select_backward(asked, *tensors)
        return chosen.backward(*passed)

    def make_outputs(self, *arguments: Any) -> Any:
        """Allocates the outputs."""
        return _returned([output.make(*arguments) for output in self.outputs])

    def _make_gradients(self, *arguments: Any) -> Any:
        flags = arguments[len(self.backward_arguments) : -1]
        needed = iter(flags[0] if self._flag_list else flags)
        first = arguments[max(self._sources[0], 0)]
        gradients = []
        for argument, source, made in zip(self.differentiable, self._sources, self.made, strict=True):
            if argument.flagged and not next(needed):
                gradients.append(empty_output(first))
            elif made is not None:
                gradients.append(made.make(*arguments))
            else:
                gradients.append(gradient_like(arguments[source], True, first))
        gradients += [output.make(first) if next(needed) else empty_output(first) for output in self.recomputed]
        return _returned(gradients)


def _saved(item: Any) -> Any:
    """An input or output as an argument of the backward."""
    return checked(item.name, optional=item.optional)


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the arguments at these indices. torch.compile cannot trace it."""
    if list(indices) == list(range(len(indices))):
        return operator.itemgetter(slice(len(indices)))
    return operator.itemgetter(*indices) if len(indices) > 1 else operator.itemgetter(slice(indices[0], indices[0] + 1))


def _returned(tensors: list[Tensor]) -> Any:
    """What a registered op returns: a tuple, or a single tensor by itself."""
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def first_of(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _autograd_function(op: Op, alternative: str) -> type[OpFunction]:
    saved_indices, kept_indices, copied_saves = op.saved_indices, op.kept_indices, op.copied_saves
    flagged_indices, gradient_indices, flag_list = op.flagged_indices, op.gradient_indices, op._flag_list

    class Function(OpFunction):
        instead = alternative

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            passed, asked = arguments[:-1], arguments[-1]
            if isinstance(asked, Selected):
                outputs, asked = asked.backend.forward(*passed), asked.requested
            else:
                outputs = op.forward(*arguments)
            values = (*passed, *outputs) if isinstance(outputs, tuple) else (*passed, outputs)
            saved = [values[index] for index in saved_indices]
            for index in copied_saves:
                saved[index] = unshared(saved[index])[0]
            ctx.save_for_backward(*saved)
            ctx.kept = [passed[index] for index in kept_indices] if kept_indices else ()
            ctx.requested = asked
            return values[len(passed)]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            needed = ctx.needs_input_grad
            flags = [needed[index] for index in flagged_indices]
            flags = [flags] if flag_list else flags + [False] * len(op.recomputed)
            results = op.backward(dy, *ctx.saved_tensors, *ctx.kept, *flags, ctx.requested)
            results = results if isinstance(results, tuple) else (results,)
            gradients: list[Tensor | None] = [None] * len(needed)
            for index, gradient in zip(gradient_indices, results, strict=False):  # recomputed outputs follow
                if needed[index]:
                    gradients[index] = gradient
            return tuple(gradients)

    return _named(Function, op.name)


def _named(function: type[OpFunction], name: str) -> type[OpFunction]:
    function.op = name
    function.__name__ = function.__qualname__ = "".join(word.capitalize() for word in name.split("_"))
    return function


# ---- ops that are one registered op ----------------------------------------------------------------------------------


class ForwardOp:
    """An op without gradients, or with an autograd function outside of the declaration, registered as
    ``fasttfm::<registered>(inputs, options, str? backend) -> output``; its own name is the default of ``registered``. A
    backend is chosen by the first input and by those that ``chosen_by`` names. ``run`` is the implementation of the
    registered op, if that does more than calling a backend. The other arguments are ``Op``'s."""

    def __init__(
        self,
        name: str,
        *,
        inputs: Sequence[Any],
        options: Sequence[Any] = (),
        output: Callable[..., Tensor] | Sequence[Output],
        backends: Sequence[Backend],
        chosen_by: Sequence[str] = (),
        check_values: Callable[..., None] | None = None,
        registered: str | None = None,
        run: Callable[..., Any] | None = None,
    ) -> None:
        DECLARED[name] = self
        self.table = BackendTable(name, tuple(backends))
        self.inputs = inputs
        arguments: list[Any] = [*inputs, *options]
        names = [argument.name for argument in arguments]
        choosers, select = _picker([0, *(names.index(chosen) for chosen in chosen_by)]), self.table.select

        def forward(*arguments: Any) -> Any:
            passed, asked = arguments[:-1], arguments[-1]
            if check_values is not None:
                check_values(*passed)
            return select(asked, *choosers(passed)).forward(*passed)

        results = (Output("", output),) if callable(output) else output
        self.forward = define(registered or name, arguments, results, run or forward)

    def sharing(self, name: str) -> ForwardOp:
        """Another op on the same registered op and backends, of which ``explain`` has a table by its name."""
        other = copy.copy(self)
        DECLARED[name] = other
        other.table = BackendTable(name, self.table.backends)
        return other

    def __call__(self, *arguments: Any, backend: str | None = None) -> Tensor:
        """A call of arguments that the public function has checked."""
        if backend is not None:
            self.table.check_name(backend)
        if needs_gradient(*arguments[: len(self.inputs)]):
            expected = "a call under torch.no_grad() (there is no gradient)"
            raise checks.bad_value(self.table.op, self.inputs[0].name, expected, "one with gradients")
        y: Tensor = self.forward(*arguments, requested(backend))
        return y


class LinearOp(ForwardOp):
    """An op that is linear in its first input, the only one with a gradient: ``adjoint(dy, shape and type of the first
    input, other inputs, options, backend)``, a call of a linear op, so that there are derivatives of any order."""

    def __init__(self, name: str, *, adjoint: Callable[..., Tensor], **declared: Any) -> None:
        super().__init__(name, **declared)
        self.adjoint = adjoint
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
    copied = [argument.indices for argument in op.inputs[1:]]

    class Function(OpFunction):
        instead = None

        @staticmethod
        def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
            tensors = zip(copied, others, strict=False)  # options follow
            ctx.save_for_backward(*[unshared(tensor)[0] if copy else tensor for copy, tensor in tensors])
            ctx.options, ctx.shape, ctx.dtype = others[len(copied) :], x.shape, x.dtype
            y: Tensor = op.forward(x, *others)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            dx = op.adjoint(dy, ctx.shape, ctx.dtype, *ctx.saved_tensors, *ctx.options)
            return dx, *[None] * (len(ctx.needs_input_grad) - 1)

    return _named(Function, op.table.op)


def normalizing_ops() -> list[str]:
    """The ops that normalize rows by statistics, whose kernels keep whole rows on the chip."""
    ops = {name: op for name, op in DECLARED.items() if isinstance(op, Op) and op.kinds.startswith("r")}
    return [name for name, op in ops.items() if op.outputs[-1].name in ("statistics", "rstd")]
