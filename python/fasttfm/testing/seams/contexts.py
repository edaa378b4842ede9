"""Settings of torch around a call: defaults, modes, autocast; and other numbers of the device."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fasttfm import _native
from fasttfm.kernels.common import launch
from fasttfm.testing.seams.entry import EntryPoint, SeamError, Tensors, check_close, check_same

# ---- defaults --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# Settings that must not change a call whose tensors say their device and dtype.
SETTINGS: dict[str, Callable[[], Any]] = {
    "default dtype bf16": functools.partial(_default_dtype, torch.bfloat16),
    "default dtype fp16": functools.partial(_default_dtype, torch.float16),
    "default dtype fp64": functools.partial(_default_dtype, torch.float64),
    "default device meta": functools.partial(torch.device, "meta"),
    "deterministic algorithms": _deterministic,
}


def check_setting(entry: EntryPoint, device: torch.device, setting: str) -> None:
    """The first call of an object, under a setting of torch, gives the bits of a call without it; and so does the next
    call without it."""
    inputs, expected = entry.inputs(0, device), entry.expected(0, device)
    subject = entry.make(device)
    with SETTINGS[setting]():
        results = entry.call(subject, inputs)
    check_same(results, expected, f"{entry}: {setting}")
    check_same(entry.call(subject, inputs), expected, f"{entry}: after {setting}")


# ---- modes -----------------------------------------------------------------------------------------------------------


def check_inference_first(entry: EntryPoint, device: torch.device) -> None:
    """The first call of an object is in inference mode; later ones compute gradients."""
    inputs = entry.inputs(0, device)
    expected = entry.expected(0, device)
    subject = entry.make(device)
    with torch.inference_mode():
        entry.call(subject, inputs)
    check_same(entry.call(subject, inputs), expected, f"{entry}: after inference mode")


def check_fake_tensors_first(entry: EntryPoint, device: torch.device) -> None:
    """The first call of an object has fake tensors, as torch.compile and torch.export make them; a later one is real.
    An entry point that reads numbers of its inputs on the host may refuse the first call."""
    inputs = entry.inputs(0, device)
    expected = entry.expected(0, device)
    subject = entry.make(device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        with contextlib.suppress(Exception):
            entry.call(subject, fake)
    results = entry.call(subject, inputs)
    for name, value in results.items():
        if isinstance(value, FakeTensor):
            raise SeamError(f"{entry}: after a call with fake tensors, {name} of a real call is fake")
    check_same(results, expected, f"{entry}: after a call with fake tensors")


def check_alternating_autocast(entry: EntryPoint, device: torch.device) -> None:
    """Calls with and without autocast alternate: each kind always gives its bits."""
    inputs = entry.inputs(0, device)
    subject = entry.make(device)
    expected: dict[bool, Tensors] = {False: entry.expected(0, device)}
    with torch.autocast(device.type, dtype=torch.bfloat16):
        expected[True] = entry.call(entry.make(device), inputs)
    for enabled in (False, True, False):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            results = entry.call(subject, inputs)
        check_same(results, expected[enabled], f"{entry}: autocast {'on' if enabled else 'off'} in turns")


# ---- numbers of the device -------------------------------------------------------------------------------------------


def check_other_instruction_sets(entry: EntryPoint, device: torch.device) -> None:
    """The CPU's instruction set changes between calls of one object: each result agrees with the first, and the first
    set again gives its bits."""
    core = _native.core()
    inputs, subject = entry.inputs(0, device), entry.make(device)
    widest = core.active_isa()
    expected = entry.expected(0, device)
    try:
        for name in core.supported_isas():
            core.set_isa(name)
            check_close(entry.call(subject, inputs), expected, f"{entry}: with {name}")
    finally:
        core.set_isa(widest)
    check_same(entry.call(subject, inputs), expected, f"{entry}: with {widest} again")


@contextlib.contextmanager
def other_gpu(multiprocessors: int) -> Iterator[None]:
    """Launchers see a GPU with this many SMs."""
    caches = (launch._multiprocessors, launch._block_memory, launch._capability)
    real = torch.cuda.get_device_properties

    def properties(*args: Any) -> Any:
        actual = real(*args)
        names = [name for name in dir(actual) if not name.startswith("_")]
        values = {name: getattr(actual, name) for name in names}
        return types.SimpleNamespace(**{**values, "multi_processor_count": multiprocessors})

    for cache in caches:
        cache.cache_clear()
    try:
        with mock.patch.object(torch.cuda, "get_device_properties", properties):
            yield
    finally:
        for cache in caches:
            cache.cache_clear()


def check_other_gpus(entry: EntryPoint, device: torch.device) -> None:
    """The number of SMs changes between calls of one object, and the device is spelled in two ways: results agree, and
    the real GPU gives its bits again."""
    subject = entry.make(torch.device("cuda"))
    inputs = entry.inputs(0, torch.device("cuda", torch.cuda.current_device()))
    expected = entry.call(entry.make(torch.device("cuda", torch.cuda.current_device())), inputs)
    check_same(entry.call(subject, inputs), expected, f"{entry}: made on 'cuda', called on 'cuda:0'")
    for count in (1, 7, 64):  # fewer than there are: blocks that wait for each other stay resident
        with other_gpu(count):
            results = entry.call(subject, inputs)
            torch.cuda.synchronize()
            check_close(results, expected, f"{entry}: with {count} SMs")
    check_same(entry.call(subject, inputs), expected, f"{entry}: with the real number of SMs again")
