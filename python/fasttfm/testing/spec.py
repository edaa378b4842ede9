"""The specification of an op for tests and benchmarks: cases, costs, peers, bad inputs and broken copies.

``fasttfm.testing.specs.<op>`` holds one OpSpec per op. Tests (harness.py), ahead-of-time compilation (aot.py) and
benchmarks (fasttfm.bench) are all derived from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs

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
class Peer:
    """An implementation that users would otherwise choose.

    ``build(inputs, options)`` returns a function of no arguments that runs the forward and returns its output,
    differentiable in the same inputs; it raises PeerUnavailable if it cannot run. A peer that differs from another one
    in the backward only is measured in that direction only.
    """

    name: str
    build: Callable[[Inputs, Mapping[str, Any]], Callable[[], Any]]
    backward_only: bool = False


@dataclass(frozen=True)
class PeerCall:
    """The result of a peer's ``build`` if the peer has other inputs, for example the same numbers in another layout.
    The call is then differentiated in ``leaves``."""

    function: Callable[[], Any]
    leaves: list[Tensor]

    def __call__(self) -> Any:
        return self.function()


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
    native_ops: Callable[[Inputs, Mapping[str, Any]], list[tuple[Any, tuple[Any, ...]]]] | None = None  # for opcheck


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    """An op's result as a tuple of tensors."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def draw(
    generator: torch.Generator, *shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Normal random numbers, drawn on the CPU so that every device sees the same, then rounded to ``dtype``."""
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)
