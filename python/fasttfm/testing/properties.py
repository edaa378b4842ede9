"""The properties of every op and every backend, apart from accuracy: each is one function of a Call.

The tolerance follows from the reference in the tested dtype and in fp64. A property that does not hold raises
AssertionError; ``tests/testing/test_properties.py`` checks with broken ops that each of them can fail.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from fasttfm.bench.peers import Inputs
from fasttfm.ops.core.backends import tables
from fasttfm.ops.core.library import OpFunction
from fasttfm.testing.call import Call, floating_inputs, hold
from fasttfm.testing.harness import Run, floating_of, incoming_gradients, same_bits
from fasttfm.testing.memory_layouts import INCOMING_LAYOUTS
from fasttfm.testing.non_finite import check_non_finite
from fasttfm.testing.spec import outputs_of

# ---- incoming gradients ----------------------------------------------------------------------------------------------


def check_gradient_layouts(call: Call) -> None:
    """Incoming gradients may have any memory layout."""
    inputs = call.inputs()
    incoming = call.incoming(inputs)
    for layout, change in INCOMING_LAYOUTS.items():
        call.check(f"{layout} gradients", inputs, incoming=[change(gradient) for gradient in incoming])


def check_absent_gradients(call: Call) -> None:
    """One input, or all inputs but one, require a gradient; and one output, or all but one, have one."""
    inputs = call.inputs()
    incoming = call.incoming(inputs)
    names = [name for name in call.spec.differentiable if inputs.get(name) is not None]
    for differentiated in _singles_and_rests(names):
        call.check(
            f"gradients of {', '.join(differentiated)} only", inputs, differentiated=differentiated, incoming=incoming
        )
    for indices in _singles_and_rests(range(len(incoming))):
        some = [gradient if index in indices else None for index, gradient in enumerate(incoming)]
        call.check(f"a gradient for outputs {indices} only", inputs, incoming=some)


def _singles_and_rests(items: Sequence[Any]) -> list[list[Any]]:
    """Lists of each single item and, if these differ from them, lists of all items but one."""
    if len(items) < 2:
        return []
    rests = [[other for other in items if other != item] for item in items]
    return [[item] for item in items] + (rests if len(items) > 2 else [])


# ---- tensor subclasses -----------------------------------------------------------------------------------------------


class WrapperTensor(Tensor):
    """A wrapper subclass, like quantized and distributed tensors: its numbers are in another tensor, and its own
    ``data_ptr()`` is 0. Every op on it runs on the wrapped tensor."""

    wrapped: Tensor

    @staticmethod
    def __new__(cls, wrapped: Tensor) -> WrapperTensor:
        wrapper: WrapperTensor = Tensor._make_wrapper_subclass(
            cls, wrapped.shape, strides=wrapped.stride(), dtype=wrapped.dtype, device=wrapped.device
        )
        wrapper.wrapped = wrapped
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain_args, plain_kwargs = tree_map_only(WrapperTensor, lambda wrapper: wrapper.wrapped, (args, kwargs or {}))
        return tree_map_only(Tensor, WrapperTensor, func(*plain_args, **plain_kwargs))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WrapperTensor({self.wrapped!r})"


def check_subclass(call: Call) -> None:
    """A tensor subclass without memory, as any argument, gives the right numbers or an error that names the op: it is
    never mistaken for an omitted argument."""
    inputs = call.inputs()
    positions = [name for name, value in inputs.items() if isinstance(value, Tensor)]
    incoming = call.incoming(inputs)
    how = {"incoming": incoming}
    naive, exact = call.naive(inputs, **how), call.exact(inputs, **how)
    for wrapped in [*([name] for name in positions), positions]:
        mixed = {name: WrapperTensor(value) if name in wrapped else value for name, value in inputs.items()}
        with refusal_allowed():
            hold(f"a subclass for {', '.join(wrapped)}", _unwrapped(call.tested(mixed, **how)), naive, exact)
    with refusal_allowed():
        how["incoming"] = [WrapperTensor(gradient) for gradient in incoming]
        hold("a subclass for the gradients", _unwrapped(call.tested(inputs, **how)), naive, exact)


def _unwrapped(result: Run) -> Run:
    outputs, gradients = tree_map_only(
        WrapperTensor, lambda wrapper: wrapper.wrapped, (result.outputs, result.gradients)
    )
    return Run(outputs, gradients)


@contextlib.contextmanager
def refusal_allowed() -> Iterator[None]:
    """An op may refuse with an error that names it; any other error is a defect."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        names = "|".join({*tables(), *(function.op.split()[0] for function in OpFunction.__subclasses__())})
        named = re.match(rf"(fasttfm::)?({names})(_forward|_backward)?\b.*: ", str(error))
        assert named, f"expected an error that names the op, got {error!r}"


# ---- other ways to differentiate -------------------------------------------------------------------------------------


def check_second_order(call: Call) -> None:
    """Second derivatives are right, or an error that names the op states that they are not supported."""
    inputs = call.inputs()
    naive, exact = (_second_order(call, call.spec.reference, inputs, wide) for wide in (False, True))
    with refusal_allowed():
        hold("second derivatives", _second_order(call, call.op(), inputs), naive, exact)


def _second_order(call: Call, function: Callable[..., Any], inputs: Inputs, wide: bool = False) -> Run:
    """The derivatives of a weighted sum of the first derivatives, by inputs and by incoming gradients."""
    arguments, leaves = _leaves(call, inputs, wide)
    floating = floating_of(outputs_of(function(**arguments, **call.case.options)))
    outputs = [output for output in floating if output.requires_grad]
    incoming = [gradient.requires_grad_() for gradient in incoming_gradients(outputs, inputs, wide)]
    first = torch.autograd.grad(outputs, list(leaves.values()), incoming, create_graph=True, allow_unused=True)
    gradients = [gradient for gradient in first if gradient is not None]
    total = torch.stack(
        [(x * weight).sum() for x, weight in zip(gradients, incoming_gradients(gradients, inputs, wide), strict=True)]
    ).sum()
    by = {**leaves, **{f"incoming{index}": gradient for index, gradient in enumerate(incoming)}}
    second = torch.autograd.grad(total, list(by.values()), allow_unused=True)
    pairs = zip(by.items(), second, strict=True)
    return Run({}, {f"dd{name}": torch.zeros_like(x) if d is None else d for (name, x), d in pairs})


def _leaves(call: Call, inputs: Inputs, wide: bool, requires_grad: bool = True) -> tuple[Inputs, dict[str, Tensor]]:
    """The inputs, in fp64 if ``wide``, and those of them that have a gradient."""
    arguments = dict(inputs)
    for name in floating_inputs(inputs):
        arguments[name] = (inputs[name].double() if wide else inputs[name]).detach()
    names = [name for name in call.spec.differentiable if inputs.get(name) is not None]
    return arguments, {name: arguments[name].requires_grad_(requires_grad) for name in names}


def check_forward_mode(call: Call) -> None:
    """A tangent of any input propagates to the outputs as in the reference, or an error that names the op states that
    forward mode is not supported; with and without inputs that require a gradient."""
    inputs = call.inputs()
    names = [name for name in call.spec.differentiable if inputs.get(name) is not None]
    for name in names:
        naive, exact = (_tangents(call, call.spec.reference, inputs, name, wide, True) for wide in (False, True))
        for requires_grad in (True, False):
            with refusal_allowed():
                tested = _tangents(call, call.op(), inputs, name, False, requires_grad)
                hold(f"the tangent of {name}, requires_grad={requires_grad}", tested, naive, exact)


def _tangents(
    call: Call, function: Callable[..., Any], inputs: Inputs, name: str, wide: bool, requires_grad: bool
) -> Run:
    arguments, leaves = _leaves(call, inputs, wide, requires_grad)
    (direction,) = incoming_gradients([leaves[name]], inputs, wide)
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], direction)
        outputs = outputs_of(function(**arguments, **call.case.options))
        pairs = [forward_ad.unpack_dual(output) for output in outputs if output.is_floating_point()]
        tangents = [torch.zeros_like(x) if tangent is None else tangent for x, tangent in pairs]
        return Run({}, {f"tangent{index}": tangent.detach() for index, tangent in enumerate(tangents)})


# ---- memory, tracing and threads -------------------------------------------------------------------------------------


def check_poisoned_memory(call: Call) -> None:
    """Allocating memory full of NaN (and of the largest integers) changes no bit: the op reads only what it wrote."""
    inputs = call.inputs()
    incoming = call.incoming(inputs)
    clean, poisoned = (_with_new_memory(fill, call, inputs, incoming).tensors() for fill in (False, True))
    for name, tensor in clean.items():
        assert same_bits(tensor, poisoned[name]), f"{name} depends on what was in new memory"


def _with_new_memory(fill: bool, call: Call, inputs: Inputs, incoming: Sequence[Tensor]) -> Run:
    memory: Any = torch.utils.deterministic
    before = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = fill
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own ops on a GPU warn that they are not deterministic
            return call.tested(inputs, incoming=incoming)
    finally:
        memory.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)


def check_without_data(call: Call) -> None:
    """Meta and fake tensors give the shapes, dtypes and strides of the real call, or an error that names the op."""
    inputs = call.inputs()
    incoming = call.incoming(inputs)
    real = call.tested(inputs, incoming=incoming).tensors()
    mode = FakeTensorMode()
    for kind, convert, context in (
        ("meta", lambda tensor: tensor.to("meta"), contextlib.nullcontext()),
        ("fake", mode.from_tensor, mode),
    ):
        converted, gradients = tree_map_only(Tensor, convert, (inputs, incoming))
        with refusal_allowed(), context:
            results = call.tested(converted, incoming=gradients).tensors()
            for name, tensor in real.items():
                expected, got = _description(tensor), _description(results[name])
                assert got == expected, f"{kind} tensors: {name}: expected {expected}, got {got}"


def _description(tensor: Tensor) -> str:
    """Shape, dtype and the strides of dimensions of more than one element."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return f"{tuple(tensor.shape)} of {tensor.dtype}, strides {strides if tensor.numel() > 0 else []}"


def check_threads(call: Call, threads: int = 4, repeats: int = 3) -> None:
    """Python threads that run the op forward and backward at the same time, each on its own inputs, get the same bits
    as a single thread."""
    inputs = [call.inputs(seed) for seed in range(threads)]
    expected = [call.tested(drawn).tensors() for drawn in inputs]
    start = threading.Barrier(threads)

    def repeat(drawn: Inputs) -> list[dict[str, Tensor]]:
        start.wait()
        return [call.tested(drawn).tensors() for _ in range(repeats)]

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(repeat, inputs))
    for first, several in zip(expected, results, strict=True):
        for name, repeated in itertools.product(first, several):
            assert same_bits(first[name], repeated[name]), f"{name} differs in a thread"


def check_inference_first(call: Call) -> None:
    """A call under inference_mode, then one under no_grad, then training. The first call of a process creates what an
    op keeps between calls; ``python -m fasttfm.testing.inference_first`` checks every op in a new process."""
    inputs = call.inputs()
    with torch.inference_mode():
        call.op()(**inputs, **call.case.options)
    with torch.no_grad():
        call.op()(**inputs, **call.case.options)
    call.check("after inference", inputs)


PROPERTIES: Mapping[str, Callable[[Call], None]] = {
    "non_finite": check_non_finite,
    "gradient_layouts": check_gradient_layouts,
    "absent_gradients": check_absent_gradients,
    "subclass": check_subclass,
    "second_order": check_second_order,
    "forward_mode": check_forward_mode,
    "poisoned_memory": check_poisoned_memory,
    "without_data": check_without_data,
    "threads": check_threads,
}
# Of ops with gradients.
GRADIENT_PROPERTIES = ("gradient_layouts", "absent_gradients", "second_order", "forward_mode")
# What runs in Triton's interpreter, which is slow: the others depend on the code around the kernels.
KERNEL_PROPERTIES = ("non_finite", "poisoned_memory")
