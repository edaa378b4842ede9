"""The checks that every op passes, derived from its OpSpec; ``tests/ops/test_<op>.py`` calls ``op_tests(SPEC)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm.bench.peers import Inputs
from fasttfm.ops.core.library import NAMESPACE
from fasttfm.testing.spec import BadCall, OpCase, OpSpec, Registered, outputs_of
from fasttfm.testing.tolerance import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    Comparison,
    compare,
    compare_with_terms,
    summary,
)

SEED = 1234
_GRADCHECK_ELEMENTS = 300
_DRAWS_OF_A_NUMBER = 5


@dataclass(frozen=True)
class Run:
    """An op's outputs and the gradients of its differentiable inputs, by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        return {**self.outputs, **self.gradients}


def draw_inputs(
    spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = SEED
) -> Inputs:
    """The case's inputs: the same for every device and backend."""
    return spec.inputs(case, dtype, torch.device(device), torch.Generator().manual_seed(seed))


def run(
    spec: OpSpec,
    function: Callable[..., Any],
    inputs: Inputs,
    options: Mapping[str, Any],
    wide: bool = False,
    incoming: Sequence[Tensor | None] | None = None,
    differentiated: Collection[str] | None = None,
) -> Run:
    """Calls ``function`` forward and backward. ``wide`` converts floating inputs and incoming gradients to fp64.

    ``incoming`` holds a gradient, or None, for each floating output; random numbers by default. ``differentiated``
    names the inputs that require a gradient; all of ``spec.differentiable`` by default.
    """
    names = [name for name in spec.differentiable if inputs.get(name) is not None]
    names = names if differentiated is None else [name for name in names if name in differentiated]

    def prepare(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        value = value.detach()
        if wide:
            value = value.double()
        return value.requires_grad_() if name in names else value

    prepared = {name: prepare(name, value) for name, value in inputs.items()}
    outputs = outputs_of(function(**prepared, **options))
    leaves = {name: prepared[name] for name in names}
    gradients = _gradients(floating_of(outputs), list(leaves.values()), wide, incoming, inputs)
    named = {
        f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
    }
    return Run({f"output{i}": output.detach() for i, output in enumerate(outputs)}, named)


def floating_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    return [output for output in outputs if output.is_floating_point()]


def _gradients(
    outputs: list[Tensor], leaves: list[Tensor], wide: bool, incoming: Sequence[Tensor | None] | None, inputs: Inputs
) -> Sequence[Tensor | None]:
    if incoming is None:
        incoming = incoming_gradients(outputs, inputs, wide)
    elif wide:
        incoming = [None if gradient is None else gradient.double() for gradient in incoming]
    pairs = zip(outputs, incoming, strict=True)
    connected = [(output, gradient) for output, gradient in pairs if output.requires_grad and gradient is not None]
    if not connected or not leaves:
        return [None] * len(leaves)
    used, used_incoming = zip(*connected, strict=True)
    return torch.autograd.grad(used, leaves, used_incoming, allow_unused=True)


def incoming_gradients(outputs: Sequence[Tensor], inputs: Inputs, wide: bool = False, seed: int = SEED) -> list[Tensor]:
    return [_incoming(seed + 1 + index, output, wide, inputs) for index, output in enumerate(outputs)]


def _incoming(seed: int, output: Tensor, wide: bool, inputs: Inputs) -> Tensor:
    """An output's incoming gradient: random, rounded to the tested type, the same numbers in every precision."""
    tested = next(value.dtype for value in inputs.values() if isinstance(value, Tensor) and value.is_floating_point())
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    return gradient.to(tested).to(torch.float64 if wide else output.dtype).to(output.device)


def with_backend(spec: OpSpec, backend: str | None) -> Callable[..., Any]:
    def call(**arguments: Any) -> Any:
        return spec.function(**arguments, backend=backend)

    return call


def accuracy(
    spec: OpSpec,
    case: OpCase,
    dtype: torch.dtype,
    backend: str | None,
    device: torch.device | str = "cpu",
    function: Callable[..., Any] | None = None,
) -> list[Comparison]:
    """Compares every output and gradient of a backend (or of ``function``) with the reference in fp64. An output that
    is a single number is compared in several draws."""

    def compared(seed: int, differentiated: Collection[str] | None) -> tuple[list[Comparison], set[str]]:
        inputs = draw_inputs(spec, case, dtype, device, seed)
        exact = run(spec, spec.reference, inputs, case.options, wide=True, differentiated=differentiated)
        naive = run(spec, spec.reference, inputs, case.options, differentiated=differentiated)
        tested = run(spec, function or with_backend(spec, backend), inputs, case.options, differentiated=differentiated)
        numbers = {name for name, output in exact.outputs.items() if output.numel() == 1}
        return comparisons_of(tested, naive, exact), numbers

    first, numbers = compared(SEED, None)
    draws = {comparison.name: [comparison] for comparison in first}
    for draw in range(1, _DRAWS_OF_A_NUMBER if numbers else 1):
        for comparison in compared(SEED + draw, ())[0]:
            if comparison.name in numbers:
                draws[comparison.name].append(comparison)
    return [summary(comparisons) for comparisons in draws.values()]


def comparisons_of(tested: Run, naive: Run, exact: Run, terms: Run | None = None) -> list[Comparison]:
    """Compares a run with the reference in its own dtype and in fp64. Integers must be equal. ``terms``: the magnitudes
    of the terms whose differences are the gradients."""
    plain, true = naive.tensors(), exact.tensors()
    cancelling = {} if terms is None else terms.gradients
    comparisons: list[Comparison] = []
    for name, out in tested.tensors().items():
        if not out.is_floating_point():
            assert torch.equal(out, true[name]), f"{name}: integers differ"
            continue
        factor = GRADIENT_FACTOR if name in tested.gradients else OUTPUT_FACTOR
        arguments = (name, out, plain[name], true[name], factor)
        if name in cancelling:
            comparisons.extend(compare_with_terms(*arguments, cancelling[name]))
        else:
            comparisons.append(compare(*arguments))
    return comparisons


def check_accuracy(*args: Any, **kwargs: Any) -> None:
    wrong = [str(comparison) for comparison in accuracy(*args, **kwargs) if not comparison.ok]
    assert not wrong, "; ".join(wrong)


def check_mutant_rejected(spec: OpSpec, mutant: Callable[..., Any]) -> None:
    """A deliberately broken copy of the reference must fail the accuracy check in at least one case."""
    for case in spec.cases:
        try:
            check_accuracy(spec, case, torch.float32, None, function=mutant)
        except AssertionError:
            return
    raise AssertionError("the accuracy check accepts a broken implementation")


def check_same_bits(
    spec: OpSpec, case: OpCase, dtype: torch.dtype, backend: str, device: torch.device | str = "cpu", repeats: int = 5
) -> None:
    """Repeated runs give the same bits. On the CPU this includes other numbers of threads and other addresses of the
    inputs; but torch's own results, those of the reference and of products, depend on the number of its threads."""
    inputs = draw_inputs(spec, case, dtype, device)
    first = run(spec, with_backend(spec, backend), inputs, case.options).tensors()

    def compare_with_first(inputs: Inputs, what: str) -> None:
        again = run(spec, with_backend(spec, backend), inputs, case.options).tensors()
        for name, tensor in first.items():
            assert same_bits(tensor, again[name]), f"{name}: {what} differs from the first"

    for repeat in range(repeats):
        count = torch.get_num_threads() if backend == "reference" else 1 + repeat % 3
        with _own_threads(count) if spec.torch_products else _threads(count):
            compare_with_first(inputs, f"run {repeat + 2}")
    if backend == "cpu" and not spec.torch_products:
        moved = {name: _moved(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        compare_with_first(moved, "a run with inputs elsewhere in memory")


def _moved(tensor: Tensor) -> Tensor:
    """A copy with the same strides that begins one element after a multiple of 64 bytes."""
    if tensor.numel() == 0:
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(extent + 1, dtype=tensor.dtype)
    memory[1:] = tensor.as_strided((extent,), (1,), tensor.storage_offset())
    return memory.as_strided(tensor.shape, tensor.stride(), 1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as bit patterns: NaN equals itself, 0.0 does not equal -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else a.item() == b.item()
    )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _own_threads(count: int) -> Iterator[None]:
    """Sets the number of threads of the library's kernels, but not that of torch's products."""
    with mock.patch.object(torch, "get_num_threads", return_value=count):
        yield


def check_gradients(spec: OpSpec, case: OpCase) -> None:
    """Checks the reference backend's hand-written backward against finite differences, in fp64."""
    inputs = draw_inputs(spec, case, torch.float64)
    names = [name for name in spec.differentiable if inputs.get(name) is not None]
    fixed = {name: value for name, value in inputs.items() if name not in names}

    def function(*values: Tensor) -> Any:
        arguments = dict(zip(names, values, strict=True))
        result = outputs_of(spec.function(**arguments, **fixed, **case.options, backend="reference"))
        return tuple(output for output in result if output.is_floating_point())

    values = [inputs[name].requires_grad_() for name in names]
    # The fast mode checks a random direction instead of every element; the full Jacobian would take seconds.
    large = sum(value.numel() for value in values) > _GRADCHECK_ELEMENTS
    assert torch.autograd.gradcheck(function, values, fast_mode=large)


class _RegisteredCalls(TorchDispatchMode):
    """Records the calls of registered ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Registered] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == NAMESPACE:
            copies = [value.detach().clone() if isinstance(value, Tensor) else value for value in args]
            self.calls.append((function, tuple(copies)))
        return function(*args, **(kwargs or {}))


def check_registration(spec: OpSpec, case: OpCase, dtype: torch.dtype) -> None:
    """torch.library.opcheck on the registered ops that a call without and one with gradients use: schema, fake tensors,
    ahead-of-time autograd with dynamic shapes."""
    inputs = draw_inputs(spec, case, dtype)
    with _RegisteredCalls() as recorded:
        if spec.differentiable:
            run(spec, spec.function, inputs, case.options)
        with torch.no_grad():
            spec.function(**draw_inputs(spec, case, dtype), **case.options)
    assert recorded.calls
    for operator, arguments in [*recorded.calls, *spec.further_calls(recorded.calls)]:
        torch.library.opcheck(operator, arguments)


def check_compiled(spec: OpSpec, cases: list[OpCase], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """One fullgraph compilation with dynamic shapes gives the same bits as the eager call, forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(spec.function, fullgraph=True, dynamic=True, backend="aot_eager")
    for case in cases:
        inputs = draw_inputs(spec, case, dtype, device)
        eager = run(spec, spec.function, inputs, case.options).tensors()
        traced = run(spec, compiled, inputs, case.options).tensors()
        for name, tensor in eager.items():
            assert same_bits(tensor, traced[name]), f"{case}: {name} differs under torch.compile"


def check_autocast(spec: OpSpec, case: OpCase, device: torch.device | str = "cpu") -> None:
    """Under autocast, forward and backward run, and each gradient has the dtype of its input."""
    inputs = draw_inputs(spec, case, torch.float32, device)
    with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
        result = run(spec, spec.function, inputs, case.options)
    for name, gradient in result.gradients.items():
        assert gradient.dtype == torch.float32, f"{name}: {gradient.dtype} for a float32 input"
    for name, tensor in result.tensors().items():
        assert tensor.isfinite().all(), f"{name} is not finite"


def check_cuda_graph(spec: OpSpec, case: OpCase, dtype: torch.dtype) -> None:
    """Captured once, forward and backward follow new data in the same tensors: replays give the eager call's bits."""
    static = draw_inputs(spec, case, dtype, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # warm-up: no compilation and no first allocation in the capture
        outputs = run(spec, spec.function, static, case.options).outputs.values()
        incoming = incoming_gradients(floating_of(outputs), static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(spec, spec.function, static, case.options, incoming=incoming).tensors()
    fresh = spec.inputs(case, dtype, torch.device("cuda"), torch.Generator().manual_seed(SEED + 100))
    for name, value in fresh.items():
        if isinstance(value, Tensor):
            static[name].copy_(value)
    graph.replay()
    eager = run(spec, spec.function, static, case.options, incoming=incoming).tensors()
    for name, tensor in eager.items():
        assert same_bits(tensor, captured[name]), f"{name} differs between graph replay and eager call"


def check_bad_call(spec: OpSpec, bad: BadCall) -> None:
    """The call raises the declared error, and the message states op, argument, expected and got."""
    case = spec.cases[0]
    inputs, options = draw_inputs(spec, case, torch.float32), dict(case.options)
    bad.change(inputs, options)
    try:
        spec.function(**inputs, **options)
    except (ValueError, TypeError) as error:
        assert type(error) is bad.error, f"expected {bad.error.__name__}, got {type(error).__name__}: {error}"
        for part in (f"{spec.name}: ", f"{bad.argument}: ", "expected ", ", got "):
            assert part in str(error), f"the message lacks {part!r}: {error}"
    else:
        raise AssertionError("the call was accepted")
