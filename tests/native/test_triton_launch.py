"""Launches of Triton kernels from C++ (kernels/common/triton/launcher.py) against Triton's own: what the driver gets,
without a GPU, and results on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
CASES = (
    "same_parameters",
    "same_options",
    "same_launches_of_ops",
    "each_specialization_has_its_kernel",
    "triton_launches_the_rest",
    "a_changed_global_is_reported",
    "errors_of_the_driver",
    "an_empty_grid_launches_nothing",
    "launches_from_threads",
)


def triton_version() -> str:
    if importlib.util.find_spec("triton") is None:
        return ""
    import triton

    return str(triton.__version__)


pytestmark = [
    pytest.mark.skipif(
        not triton_version().startswith("3.6."), reason="other versions of Triton launch kernels themselves"
    ),
    pytest.mark.skipif(
        not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="requires the DLPack C exchange API of torch 2.10"
    ),
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The failures of triton_launch_cases.py, by case. Its process has no interpreter of Triton and no driver but the
    fake one."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-Wall", "-Werror", "-Wl,-soname,libcuda.so.1", "-pthread"]
    subprocess.run([compiler, *options, "-o", str(library), str(HERE / "fake_driver.c")], check=True)
    environment = {
        **{key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"},
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TRITON_LIBCUDA_PATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / "triton_launch_cases.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert tuple(found) == CASES
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="torch has a CUDA runtime, which would take the fake driver for a real one"
)
@pytest.mark.parametrize("case", CASES)
def test_on_a_fake_driver(case: str, failures: dict[str, str]) -> None:
    assert not failures[case], failures[case]


def test_arithmetic_is_tritons() -> None:
    import triton

    from fasttfm.kernels.common.launch import cdiv, next_power_of_2

    for number in range(1, 70):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert [cdiv(number - 1, divisor) for divisor in (1, 7, 64)] == [
            triton.cdiv(number - 1, divisor) for divisor in (1, 7, 64)
        ]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def add(by_triton: bool, grid: tuple[int, ...] = (4,), **changed: Any) -> Tensor:
    """The result of a kernel whose argument ``y`` starts as zeros."""
    from native.triton_launch_kernels import add_kernel

    x, other = torch.arange(1024.0, device="cuda"), torch.linspace(-1, 1, 1024, device="cuda")
    given = {"x": x, "other": other, "count": 1024, "step": 2, "factor": 0.3, "flag": True, **changed}
    given.setdefault("y", torch.zeros(1024, device="cuda"))
    if by_triton:
        add_kernel.run(grid=grid, warmup=False, **given)
    else:
        add_kernel[grid](**given)
    return given["y"]


@pytest.fixture
def triton_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that Triton launches during the test."""
    from fasttfm.kernels.common.triton.launcher import LaunchedKernel

    launches, run = [], LaunchedKernel.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            launches.append(self.__name__)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(LaunchedKernel, "run", recorded)
    return launches


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changed",
    [
        {},
        *({"step": step} for step in (1, 16, 17)),
        {"x": 1},  # the offset of a tensor that is not aligned
        {"x": 1, "other": None, "flag": False},
        {"count": 1000, "BLOCK": 256, "num_warps": 8},
        {"MODE": 3, "launch_pdl": True},
    ],
)
def test_results_are_those_of_tritons_launch(changed: dict[str, Any], triton_launches: list[str]) -> None:
    if "x" in changed:
        changed = {**changed, "x": torch.arange(1032.0, device="cuda")[changed["x"] :]}
    expected = add(True, **changed)
    assert triton_launches.pop() == "add_kernel"
    assert expected.any()
    for _ in range(2):
        assert torch.equal(add(False, **changed), expected)
    assert triton_launches == []


def attention(bias: bool) -> tuple[Tensor, ...]:
    from fasttfm.ops import attention

    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", generator=generator).requires_grad_() for _ in range(3))
    added = torch.randn(1, 4, 300, 300, device="cuda", generator=generator).requires_grad_() if bias else None
    out = attention(q, k, v, bias=added, dropout_p=0.1, seed=torch.tensor([3], device="cuda"), backend="triton")
    return out, *torch.autograd.grad(out.square().sum(), (q, k, v, *((added,) if bias else ())))


def layer_norm(columns: int) -> tuple[Tensor, ...]:
    from fasttfm.ops import layer_norm

    generator = torch.Generator("cuda").manual_seed(1)
    x, weight, shift = (
        torch.randn(*shape, columns, device="cuda", generator=generator).requires_grad_() for shape in ((50,), (), ())
    )
    y = layer_norm(x, weight, shift, backend="triton")
    return y, *torch.autograd.grad(y.square().sum(), (x, weight, shift))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", [lambda: attention(False), lambda: attention(True), lambda: layer_norm(768), lambda: layer_norm(1)]
)
def test_ops_are_the_same_bit_for_bit(
    op: Callable[[], tuple[Tensor, ...]], triton_launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    from fasttfm.kernels.common.triton.launcher import LaunchedKernel

    found = op()
    again = op()
    assert triton_launches == []
    monkeypatch.setattr(LaunchedKernel, "__getitem__", JITFunction.__getitem__)
    expected = op()
    assert triton_launches
    for first, second, third in zip(found, again, expected, strict=True):
        assert torch.equal(first, third)
        assert torch.equal(second, third)


@pytest.mark.gpu
def test_launches_are_captured_by_a_graph(triton_launches: list[str]) -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    add(False, x=x, y=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(False, x=x, y=y, other=None)
    x.fill_(2)
    y.zero_()
    graph.replay()
    assert torch.equal(y, add(False, x=x, other=None))
    assert y.any()
    assert triton_launches == []


@pytest.mark.gpu
def test_a_launch_is_in_the_current_stream(triton_launches: list[str]) -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")
    add(False, x=x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2)
        add(False, x=x, y=y)
    stream.synchronize()
    assert torch.equal(y, add(False, x=x))
    assert not torch.equal(y, add(False, x=torch.zeros_like(x)))
    assert triton_launches == []


@pytest.mark.gpu
def test_a_launch_from_a_thread_without_a_context() -> None:
    from native.triton_launch_kernels import add_kernel

    x, y = torch.arange(1024.0, device="cuda"), torch.zeros(1024, device="cuda")
    expected = add(False, x=x, other=None)
    thread = Thread(target=lambda: add_kernel[(4,)](x, None, y, 1024, 2, 0.3, True))
    thread.start()
    thread.join()
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_errors_are_clear_and_do_not_last() -> None:
    expected = add(False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"add_kernel: .* a grid of 1 x 131072 x 1 blocks .*: invalid argument"):
            add(False, (1, 131072))
    assert not add(False, (0,)).any()
    assert torch.equal(add(False), expected)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_hooks_of_profilers_are_called(triton_launches: list[str]) -> None:
    import triton

    expected = add(False)
    seen: list[object] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        assert torch.equal(add(False), expected)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1
    assert triton_launches == ["add_kernel"]
