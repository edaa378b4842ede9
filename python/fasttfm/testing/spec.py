"""The specification of an op for tests and benchmarks: cases, costs, peers, bad inputs and broken copies.

``fasttfm.testing.specs.<op>`` holds one OpSpec per op. Tests (harness.py), ahead-of-time compilation (aot.py) and
benchmarks (fasttfm.bench) are all derived from it.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs, Peer

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class OpCase:
    """One way to call an op: sizes that ``OpSpec.inputs`` draws tensors for, and options passed on as they are."""

    name: str
    sizes: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    interpret: bool = True  # small enough for Triton's interpreter

    def __str__(self) -> str:
        return self.name


def op_case(name: str, options: Mapping[str, Any], **sizes: Any) -> OpCase:
    """A case; ``dtypes`` and ``interpret`` among the sizes are those of the case."""
    fields = {field: sizes.pop(field) for field in ("dtypes", "interpret") if field in sizes}
    return OpCase(name, sizes, options, **fields)


@dataclass(frozen=True)
class BadCall:
    """A call that must raise ``error`` before anything runs; the message names op, ``argument``, expected and got."""

    name: str
    argument: str
    error: type[Exception]
    change: Callable[[Inputs, dict[str, Any]], None]  # spoils a good call's inputs and options in place


def spoil(argument: str, value: Any) -> Callable[[Inputs, dict[str, Any]], None]:
    """Replaces a good call's input or option by ``value``."""

    def change(inputs: Inputs, options: dict[str, Any]) -> None:
        (options if argument in options else inputs)[argument] = value

    return change


@dataclass(frozen=True)
class Cost:
    """The minimum cost of an implementation: bytes of memory traffic, and floating-point operations of the tensor
    cores."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class TritonKernel:
    """A Triton kernel with one set of compile-time values, to be compiled ahead of time."""

    kernel: Any  # the @triton.jit function
    signature: Mapping[str, str]  # argument -> Triton type ("*bf16", "i32", "fp32"), without compile-time arguments
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    allow_spills: bool = False
    target: int | None = None  # compute capability, 90 for sm_90; None: all targets
    least_memory: int = 0  # bytes of shared memory that a block may have on the GPUs for which it is chosen


def triton_kernels(op: str, *calls: tuple[Any, ...]) -> Callable[[], list[TritonKernel]]:
    """The kernels that ``compile_signatures`` of the op's Triton module describes for the arguments of each call."""

    def kernels() -> list[TritonKernel]:
        module = importlib.import_module(f"fasttfm.kernels.{op}.triton")
        return [TritonKernel(**description) for call in calls for description in module.compile_signatures(*call)]

    return kernels


Registered = tuple[Any, tuple[Any, ...]]  # a registered op and the arguments of a call


@dataclass(frozen=True)
class OpSpec:
    """Everything the harness needs to know about an op.

    ``function(**inputs, **options, backend=...)`` is the public op; ``reference(**inputs, **options)`` the same in
    plain torch for any floating type, differentiable by autograd. Both return a tensor or a tuple of tensors.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: Callable[[OpCase, torch.dtype, torch.device, torch.Generator], Inputs]
    differentiable: tuple[str, ...]
    cases: tuple[OpCase, ...]
    bench_cases: tuple[OpCase, ...] = ()
    bench_cases_cpu: tuple[OpCase, ...] = ()
    forward_cost: Callable[[OpCase, torch.dtype], Cost] | None = None
    backward_cost: Callable[[OpCase, torch.dtype], Cost] | None = None
    inference_cost: Callable[[OpCase, torch.dtype], Cost] | None = None  # of a forward without gradients
    torch_products: bool = False  # matrix products inside are torch's, whose bits depend on the number of its threads
    gradients_in_forward: bool = False  # the backward is trivial and not measured separately
    peers: tuple[Peer, ...] = ()
    curves: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # a chart's panels: size -> case, by title
    bad_calls: tuple[BadCall, ...] = ()
    mutants: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # broken copies of ``reference``
    random_case: Callable[[random.Random], OpCase] | None = None  # for random calls (fuzz.py)
    property_cases: tuple[str, ...] = ()  # cases that the properties hold for (properties.py); none: the first
    # For an op whose gradients may cancel (tolerance.py): like ``reference``, but for absolute inputs and incoming
    # gradients its gradients are the sums of the terms' magnitudes.
    terms: Callable[..., Any] | None = None
    infinity_masks: tuple[str, ...] = ()  # inputs whose infinities mask elements, instead of making NaN
    triton_kernels: Callable[[], list[TritonKernel]] | None = None
    # For opcheck: calls of registered ops that the public function does not make, out of those that it makes.
    further_calls: Callable[[Sequence[Registered]], Sequence[Registered]] = lambda _: ()


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """An op's result as a tuple of tensors."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def draw(
    generator: torch.Generator, *shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Normal random numbers, drawn on the CPU so that every device sees the same, then rounded to ``dtype``."""
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)
