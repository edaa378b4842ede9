"""Launches without a GPU, in a process of its own: ``python triton_launch_cases.py FOLDER`` with the driver of
fake_driver.c as FOLDER/libcuda.so.1. Prints the failures as JSON: a traceback for each case, empty if it passed.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton_launch_kernels import add_kernel

from fasttfm import _C
from fasttfm.kernels.common.triton import launcher

STREAM = 0x1230
SIZES = {"64": 8, "32": 4, "16": 2, "8": 1}


class Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("attribute_count", ctypes.c_uint32),
        ("attributes", ctypes.c_int32 * 2 * 4),
        ("parameters", ctypes.c_uint64 * 128),
    )


class FakeDriver(CudaDriver):
    """Triton's driver for an H100, with CPU tensors in place of a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def load(path: Path) -> ctypes.CDLL:
    """The fake driver, in place of Triton's driver and of torch's functions for tensors."""
    driver = ctypes.CDLL(str(path))
    capsule, api = torch.Tensor.__dlpack_c_exchange_api__, ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"dlpack_exchange_api"
    driver.replace_torch(ctypes.c_void_p(api.PyCapsule_GetPointer(capsule, name)))
    replaced = ctypes.addressof(ctypes.c_char.in_dll(driver, "exchange"))
    torch.Tensor.__dlpack_c_exchange_api__ = api.PyCapsule_New(replaced, name, None)
    _C.use_torch(torch)
    ctypes.c_uint64.in_dll(driver, "stream").value = STREAM
    triton.runtime.driver.set_active(FakeDriver())
    return driver


fake = load(Path(sys.argv[1]) / "libcuda.so.1")
launch_count = ctypes.c_int64.in_dll(fake, "launch_count")


@contextmanager
def set_to(name: str, value: int) -> Iterator[None]:
    """Another value of a variable of the fake driver."""
    variable = ctypes.c_int32.in_dll(fake, name)
    before, variable.value = variable.value, value
    yield
    variable.value = before


@contextmanager
def counted(kernel: Any = add_kernel) -> Iterator[list[bool]]:
    """Whether each call of Triton's run() is a launch."""
    calls: list[bool] = []

    def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        calls.append(not warmup)
        return type(kernel).run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    kernel.run = run
    yield calls
    del kernel.run


def parameter_sizes(compiled: Any) -> list[int]:
    """The bytes of each of the kernel's parameters, as its PTX declares them."""
    declared = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    return [SIZES[bits] for bits in re.findall(r"\.param \.[a-z](\d+)", declared)]


def launched(launch: Callable[[], object], sizes: list[int]) -> dict[str, Any]:
    """What the driver got from one launch, with the first parameters, which have these sizes."""
    before = launch_count.value
    (ctypes.c_int32 * 128).in_dll(fake, "parameter_sizes")[:] = sizes + [0] * (128 - len(sizes))
    launch()
    assert launch_count.value == before + 1, f"{launch_count.value - before} launches"
    found = Launch.in_dll(fake, "last_launch")
    return {
        "function": found.function,
        "stream": found.stream,
        "grid": list(found.grid),
        "block": list(found.block),
        "shared_bytes": found.shared_bytes,
        "attributes": [tuple(each) for each in found.attributes[: found.attribute_count]],
        "parameters": list(found.parameters),
    }


def compare(kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Launches by Triton, then twice from C++: the driver has to get the same each time."""
    assert type(kernel) is launcher.LaunchedKernel
    compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
    sizes = parameter_sizes(compiled)
    expected = launched(lambda: kernel.run(*args, grid=grid, warmup=False, **kwargs), sizes)
    assert expected["stream"] == STREAM
    results: list[object] = []
    for _ in range(2):
        with counted(kernel) as calls:
            got = launched(lambda: results.append(kernel._at_grid(grid)(*args, **kwargs)), sizes)
        assert got == expected, f"{got}\n{expected}"
        assert results.pop() is compiled
        assert not any(calls), "Triton launched the kernel"
    assert calls == [], "the second launch asked Triton for the kernel again"
    return expected


def arguments(**changed: Any) -> dict[str, Any]:
    x = torch.zeros(256)
    return {"x": x, "other": x, "y": x, "count": 256, "step": 2, "factor": 0.5, "flag": True, **changed}


def function(grid: Any = (1,), **changed: Any) -> int:
    """The compiled kernel that a call launches."""
    return int(launched(lambda: add_kernel[grid](**arguments(**changed)), [])["function"])


def error_of(call: Callable[[], object]) -> str:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- cases -----------------------------------------------------------------------------------------------------------


def same_parameters() -> None:
    found = compare(add_kernel, (3, 2), **arguments(count=-5, factor=-1.25, step=2**40))
    assert found["grid"] == [3, 2, 1]
    assert found["block"] == [128, 1, 1]
    compare(add_kernel, (3,), *arguments().values())
    compare(add_kernel, (3,), *list(arguments().values())[:4], step=16, factor=3.0, flag=False, BLOCK=64)
    compare(add_kernel, (1, 2, 3), **arguments(step=1, other=None))
    compare(add_kernel, (1,), **arguments(x=torch.zeros(256)[1:], y=torch.zeros(256).bfloat16()[2:]))
    compare(add_kernel, (1,), **arguments(x=torch.nn.Parameter(torch.zeros(256))))
    compare(add_kernel, (1,), **arguments(x=torch.empty(0)))
    compare(add_kernel, (2**31 - 1,), **arguments(count=2**31 - 1))


def same_options() -> None:
    found = compare(add_kernel, (3,), **arguments(), num_warps=8, launch_pdl=True)
    assert found["block"] == [256, 1, 1]
    assert found["attributes"] == [(6, 1)]
    found = compare(add_kernel, (3,), **arguments(), launch_cooperative_grid=True)
    assert found["attributes"] == [(2, 1)]
    found = compare(add_kernel, (3,), **arguments(), launch_cooperative_grid=True, launch_pdl=True, num_stages=2)
    assert found["attributes"] == [(6, 1), (2, 1)]


def same_launches_of_ops() -> None:
    """All launches of some ops, with tensors that are not aligned too."""
    from fasttfm.kernels.attention.problem import AttentionProblem
    from fasttfm.kernels.attention.triton import attention_fwd_triton
    from fasttfm.kernels.layer_norm.triton import layer_norm_backward_triton, layer_norm_forward_triton
    from fasttfm.kernels.pack.triton import pack_triton

    seen = []

    def at_grid(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            compare(kernel, grid, *args, **kwargs)
            seen.append(kernel.__name__)

        return launch

    own, launcher.LaunchedKernel.__getitem__ = launcher.LaunchedKernel.__getitem__, at_grid
    try:
        for columns in (64, 65):
            x, weight = torch.zeros(4, columns), torch.ones(columns)
            y, statistics = layer_norm_forward_triton(x[1:], weight, weight, 1e-5)
            layer_norm_backward_triton(y, x[1:], weight, weight, statistics, True, True)
        pack_triton(torch.zeros(2, 3, 8), torch.tensor([0, 1, 4], dtype=torch.int32), 4)
        q = torch.zeros(2, 300, 1, 16)
        attention_fwd_triton(q, q, q, AttentionProblem(max_seqlen=300, max_seqlen_k=300))
    finally:
        launcher.LaunchedKernel.__getitem__ = own
    assert seen == [*["_fwd_kernel", "_bwd_kernel", "sum_parts_kernel"] * 2, "_copy_kernel", "_fwd_kernel"], seen


def each_specialization_has_its_kernel() -> None:
    """What Triton compiles another kernel for is another kernel here, and nothing else is."""
    x = torch.zeros(260)
    changes: list[dict[str, Any]] = [
        {},
        {"x": x[1:257]},
        {"x": torch.zeros(256).bfloat16()},
        {"x": torch.zeros(256, dtype=torch.int32)},
        {"other": None},
        *({"step": step} for step in (1, 16, 2**31, 2**31 + 1)),
        {"count": 2**31},
        {"factor": 1},
        {"factor": 2},
        {"flag": 2},
        {"MODE": 1},
        {"MODE": 2.5},
        {"BLOCK": 64},
        *({"num_warps": number} for number in (2, 8)),
    ]
    found = [function(**change) for change in changes]
    assert len(set(found)) == len(changes), found
    assert [function(**change) for change in changes] == found
    same: list[dict[str, Any]] = [
        *({"count": count} for count in (1, 16, 17, -1, 2**31 - 1)),
        {"other": x[1:257]},  # not specialized for its alignment
        *({"step": step} for step in (3, 17, 2**31 - 1)),
        {"factor": 1.0},
        {"flag": False},
        {"y": x[4:]},
        {"MODE": 0, "BLOCK": 128},
    ]
    with counted() as calls:
        assert {function(**change) for change in same} == {found[0]}
    assert calls == [], "Triton was asked for a kernel that is known"
    assert function(step=2**31 + 16) == function(step=2**31)
    with set_to("device", 1), set_to("tensor_device", 1), counted() as calls:
        function()
    assert calls == [False], "a kernel of another device"


def triton_launches_the_rest() -> None:
    """Calls that are left to Triton, with Triton's errors."""

    def launches_by_triton(grid: Any = (1,), **changed: Any) -> bool:
        with counted() as calls:
            function(grid, **changed)
        return any(calls)

    class Subclass(torch.Tensor):
        pass

    function()
    assert not launches_by_triton()
    assert launches_by_triton(lambda _: (1,))
    assert launches_by_triton(x=torch.zeros(256).as_subclass(Subclass))
    for device in (-1, 1):  # no context; another than the tensors'
        with set_to("device", device):
            assert launches_by_triton()
    assert error_of(lambda: function(unknown=1)).startswith("KeyError")
    assert error_of(lambda: function(step=2**64)).startswith("OverflowError")
    assert error_of(lambda: add_kernel[(1,)](torch.zeros(1))).startswith("TypeError")  # arguments are missing
    assert error_of(lambda: add_kernel[(1,)](1, **arguments())).startswith("TypeError")  # one is given twice
    runtime = triton.knobs.runtime
    seen: list[object] = []
    runtime.launch_enter_hook.add(seen.append)
    function()
    assert len(seen) == 1
    runtime.launch_enter_hook.remove(seen.append)
    for name, value in (("launch_exit_hook", seen.append), ("debug", True)):
        before = getattr(runtime, name)
        setattr(runtime, name, value)
        assert launches_by_triton()
        setattr(runtime, name, before)
    add_kernel.add_pre_run_hook(lambda *_, **__: None)
    assert launches_by_triton()
    add_kernel.pre_run_hooks.clear()
    assert not launches_by_triton()


def a_changed_global_is_reported() -> None:
    variables = add_kernel.__globals__
    function()
    before, variables["OFFSET"] = variables["OFFSET"], triton.language.constexpr(1)
    try:
        assert "OFFSET has changed" in error_of(function)
    finally:
        variables["OFFSET"] = before


def errors_of_the_driver() -> None:
    for _ in range(2):  # the first with a new key
        with set_to("launch_error", 1):
            found = error_of(lambda: add_kernel[(2, 3)](**arguments(), num_warps=2, num_stages=4))
        assert found == (
            "RuntimeError: add_kernel: the CUDA driver did not launch a grid of 2 x 3 x 1 blocks with 64 threads and 0 "
            "bytes of shared memory each: invalid argument"
        )


def an_empty_grid_launches_nothing() -> None:
    before = launch_count.value
    for grid in ((0,), (1, 0), (2**16, 2**16, 0)):
        add_kernel[grid](**arguments())
    assert launch_count.value == before
    function((2**16, 2**16))  # not 0, although its product has no bit below 2**32


def launches_from_threads() -> None:
    def work(number: int) -> None:
        for turn in range(200):
            add_kernel[(1,)](**arguments(), num_stages=1 + (number + turn) % 4)

    function()
    before = launch_count.value
    with ThreadPoolExecutor(4) as pool:
        for finished in [pool.submit(work, number) for number in range(4)]:
            finished.result()  # raises what the thread has raised
    assert launch_count.value == before + 800, f"{launch_count.value - before} launches"


CASES = (
    same_parameters,
    same_options,
    same_launches_of_ops,
    each_specialization_has_its_kernel,
    triton_launches_the_rest,
    a_changed_global_is_reported,
    errors_of_the_driver,
    an_empty_grid_launches_nothing,
    launches_from_threads,
)


def failure(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({case.__name__: failure(case) for case in CASES}))
