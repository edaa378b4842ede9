"""Allocations of torch with guards around them, and allocations that fail."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fasttfm.testing.seams.entry import EntryPoint, Inputs, SeamError, chain, check_close, check_same

# Bytes on each side; a multiple of every alignment that kernels ask for. None where each tensor is an allocation of its
# own: what lies around it is then no memory, and compute-sanitizer reports it.
_GUARD = 0 if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1" else 4096
_PATTERN = 0xA5
_FAILURES = 4  # of one call, spread over its allocations


# ---- what the package allocates with ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _patched(
    empty: Callable[[tuple[int, ...], torch.dtype, torch.device, Callable[[], Tensor]], Tensor],
) -> Iterator[None]:
    """Replaces the functions of torch that the package allocates with. ``empty`` gets the sizes, the dtype and the
    device of contiguous memory, and a function that allocates as torch does."""

    def wrap(original: Callable[..., Tensor], like: bool) -> Callable[..., Tensor]:
        def allocate(*args: Any, **options: Any) -> Tensor:
            def plain() -> Tensor:
                return original(*args, **options)

            probe = _described(args, options, like)
            return plain() if probe is None else empty(*probe, plain)

        return allocate

    with contextlib.ExitStack() as stack:
        for owner, name, like in (
            (torch, "empty", False),
            (torch, "zeros", False),
            (torch, "empty_like", True),
            (torch, "zeros_like", True),
            (Tensor, "new_empty", True),
            (Tensor, "new_zeros", True),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name), like)))
        yield


def _described(
    args: tuple[Any, ...], options: dict[str, Any], like: bool
) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    """Sizes, dtype and device of an allocation; None if it has other options than these or strides."""
    if set(options) - {"dtype", "device", "requires_grad", "memory_format"} or not args:
        return None
    first = args[0]
    if like and isinstance(first, Tensor) and type(first) in (Tensor, torch.nn.Parameter):
        if len(args) == 1 and not first.is_contiguous():
            return None
        shape = tuple(first.shape) if len(args) == 1 else _shape(args[1:])
        return shape, options.get("dtype") or first.dtype, torch.device(options.get("device") or first.device)
    if like:
        return None
    dtype = options.get("dtype") or torch.get_default_dtype()
    return _shape(args), dtype, torch.device(options.get("device") or torch.get_default_device())


def _shape(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)


# ---- guards ----------------------------------------------------------------------------------------------------------


class Guards:
    """Tensors whose memory lies between two regions of a known pattern, which nothing may change."""

    def __init__(self) -> None:
        self._blocks: list[tuple[str, Tensor, int]] = []

    def like(self, name: str, value: Any) -> Any:
        """A copy of an input between guards."""
        if not isinstance(value, Tensor) or not value.is_contiguous():
            return value
        copy = self.empty(tuple(value.shape), value.dtype, value.device, name)
        copy.copy_(value)
        return copy

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = "") -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // 512) * 512 if _GUARD else size
        block = _EMPTY(2 * _GUARD + padded, dtype=torch.uint8, device=device).fill_(_PATTERN)
        self._blocks.append((name or f"an allocation of {shape}", block, size))
        return block[_GUARD : _GUARD + size].view(dtype).view(shape)

    @contextlib.contextmanager
    def around_allocations(self) -> Iterator[None]:
        """Guards what the package allocates inside of the block."""

        def empty(
            shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, plain: Callable[[], Tensor]
        ) -> Tensor:
            made = plain()
            if made.device.type != device.type or not made.is_contiguous() or made.device.type == "meta":
                return made
            guarded = self.empty(tuple(made.shape), made.dtype, made.device)
            return guarded.copy_(made)

        with _patched(empty):
            yield

    def check(self, what: str) -> None:
        for name, block, size in self._blocks:
            if block.untyped_storage().size() == 0:  # the package has freed it
                continue
            before, after = block[:_GUARD], block[_GUARD + size :]
            for where, region in (("before", before), ("after", after)):
                if bool((region != _PATTERN).any()):
                    first = int((region != _PATTERN).nonzero()[0])
                    raise SeamError(f"{what}: {name}: the memory {where} it was written, at byte {first} of the guard")


_EMPTY = torch.empty  # also where it is replaced


def guarded(guards: Guards, inputs: Inputs) -> Inputs:
    return {name: guards.like(name, value) for name, value in inputs.items()}


# ---- failures --------------------------------------------------------------------------------------------------------


class _Failure(torch.OutOfMemoryError):
    """The failure of an allocation that a test simulates."""


@contextlib.contextmanager
def failing_allocation(index: int) -> Iterator[list[int]]:
    """The allocation with this number raises; yields the list of the sizes that were asked for."""
    sizes: list[int] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, plain: Callable[[], Tensor]) -> Tensor:
        sizes.append(math.prod(shape))
        if len(sizes) - 1 == index:
            raise _Failure(f"simulated: no memory for {shape} of {dtype}")
        return plain()

    with _patched(empty):
        yield sizes


def check_failed_allocations(entry: EntryPoint, device: torch.device) -> None:
    """An allocation inside of a call fails, a different one each time: the call raises this failure, also in the first
    call of an object, and the next call of the same object is right."""
    inputs, expected = entry.inputs(0, device), entry.expected(0, device)
    with failing_allocation(-1) as sizes:
        entry.call(entry.make(device), inputs)
    count = len(sizes)
    chosen = sorted({round(step * (count - 1) / max(1, _FAILURES - 1)) for step in range(_FAILURES)}) if count else []
    used = entry.make(device)
    for number, index in enumerate(chosen):
        subject, results = used if number % 2 else entry.make(device), None
        try:
            with failing_allocation(index):
                results = entry.call(subject, inputs)
        except Exception as error:
            if "simulated" not in chain(error):
                raise SeamError(f"{entry}: allocation {index} failed, and the call raised {error!r}") from error
        if results is not None:  # a session computes the parts of a batch one by one
            check_close(results, expected, f"{entry}: a call whose allocation {index} failed")
        check_same(entry.call(subject, inputs), expected, f"{entry}: after allocation {index} failed")


_WITHOUT_GRAPHS = 20  # calls, each with several lookups: ops/core/graph_cache.py waits for 64 after a failure


def check_out_of_memory(entry: EntryPoint, device: torch.device) -> None:
    """On a GPU whose memory is used up, a call raises torch's error or is right; with memory again it is right. A
    session that could not capture a graph adds in another order until it captures again."""
    inputs = entry.inputs(0, device)
    subject = entry.make(device)
    expected = entry.expected(0, device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(max(torch.cuda.memory_reserved(index), 1) / total, index)
    blocks: list[Tensor] = []
    try:
        size = 1 << 21
        while size >= 512:
            try:
                blocks.append(torch.empty(size, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                size //= 2
        for _ in range(2):
            results = None
            with contextlib.suppress(torch.OutOfMemoryError):
                results = entry.call(subject, inputs)
            if results is not None:
                check_close(results, expected, f"{entry}: with little memory")
    except RuntimeError as error:
        if "out of memory" not in chain(error):
            raise SeamError(f"{entry}: without memory a call raised {error!r}") from error
    finally:
        blocks.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, index)
    what, results = f"{entry}: after it had no memory", entry.call(subject, inputs)
    check_close(results, expected, what)
    for _ in range(_WITHOUT_GRAPHS if "inference.Session" in entry.covers else 0):
        results = entry.call(subject, inputs)
    check_same(results, expected, what)
    torch.cuda.synchronize(device)
