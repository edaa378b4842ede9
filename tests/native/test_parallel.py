"""Threads: every number of threads gives the same bits, torch's pool is used, and limits and forks are handled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from native.calls import elementwise, layer_norm_arguments
from torch import Tensor

from fasttfm import _C, _native


def forward(x: Tensor, threads: int) -> dict[str, Tensor]:
    arguments, outputs = layer_norm_arguments(x)
    with thread_count(threads):
        _native.core().layer_norm_forward(*arguments)
    return outputs


def forward_and_backward(x: Tensor, threads: int) -> dict[str, Tensor]:
    columns = x.shape[1]
    weight = torch.linspace(0.5, 1.5, columns)
    outputs = forward(x, threads)
    gradients = {"dx": torch.empty_like(x), "dweight": torch.empty(columns), "dbias": torch.empty(columns)}
    workspace = torch.empty(_C.layer_norm_backward_workspace(x))
    dy = x.flip(0).contiguous()
    with thread_count(threads):
        _C.layer_norm_backward(dy, x, weight, outputs["statistics"], *gradients.values(), workspace)
    return {**outputs, **gradients}


@contextlib.contextmanager
def thread_count(threads: int) -> Iterator[None]:
    """torch's number of threads, which functions of tensors follow; each Python thread has its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def draw(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture(params=["openmp", "threads"])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on torch's OpenMP threads and on plain ones."""
    _native.core()
    if request.param == "threads":
        _C.use_plain_threads()
    elif _C.parallel_runtime() != "openmp":
        pytest.skip(f"torch's OpenMP runtime is not shared: {_native.shared_openmp()[1]}")
    yield request.param
    _native.shared_openmp.cache_clear()
    _native.shared_openmp()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5), (9, 100), (517, 33)])
def test_thread_counts_give_the_same_bits(runtime: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    one = forward_and_backward(x, 1)
    for threads in range(2, 9):
        assert_same_bits(forward_and_backward(x, threads), one)


def test_more_threads_than_items(runtime: str) -> None:
    x = draw(3, 40)  # one item: fewer rows than a chunk has
    assert_same_bits(forward_and_backward(x, 64), forward_and_backward(x, 1))
    x = draw(17, 40)
    assert_same_bits(forward_and_backward(x, 64), forward_and_backward(x, 1))


@pytest.mark.parametrize("threads", [-1, 0, 1, 4])
def test_no_items_and_odd_thread_counts(runtime: str, threads: int) -> None:
    empty = forward_and_backward(draw(0, 40), max(threads, 1))
    assert (empty["dweight"] == 0).all()
    assert (empty["dbias"] == 0).all()
    x = draw(1000, 40)
    assert torch.equal(elementwise(x, "exp", threads=threads), elementwise(x, "exp", threads=1))


def test_calls_from_several_python_threads_at_once(runtime: str) -> None:
    inputs = [draw(300 + i, 64) for i in range(4)]
    expected = [forward_and_backward(x, 1) for x in inputs]
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(20):
            try:
                assert_same_bits(forward_and_backward(inputs[index], 3), expected[index])
            except AssertionError as error:
                wrong.append(str(error))

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    assert not wrong


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", PROLOGUE + code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


PROLOGUE = """
import os, signal, sys
import torch
import fasttfm
from fasttfm import _C, _native

def threads():
    return len(os.listdir("/proc/self/task"))

ones = torch.ones(64).expand(1000, 64)  # too small for torch to start its threads

def ours():
    return fasttfm.ops.layer_norm(ones)
"""


def test_the_pool_is_torchs_and_follows_its_thread_count() -> None:
    counts = run_python("""
torch.set_num_threads(1)
ours()
before = threads()
torch.set_num_threads(4)
ours()
with_ours = threads()
torch.ones(1 << 20).add_(1)
print(with_ours - before, threads() - before, _C.parallel_runtime())
""")
    assert counts == "3 3 openmp"


@pytest.mark.parametrize(
    "environment",
    [{"OMP_DYNAMIC": "true"}, {"OMP_THREAD_LIMIT": "1"}, {"OMP_MAX_ACTIVE_LEVELS": "0"}, {"OMP_NUM_THREADS": "1"}],
    ids=str,
)
def test_fewer_threads_than_asked_for_still_do_all_the_work(environment: dict[str, str]) -> None:
    code = "torch.set_num_threads(6)\nassert torch.equal(ours(), torch.zeros(1000, 64))"
    run_python(code, **environment)


@pytest.mark.parametrize("used_by", ["ours()", "torch.ones(1 << 20).add_(1)"], ids=["by us", "by torch"])
def test_a_fork_after_the_pool_was_used(used_by: str) -> None:
    code = f"""
torch.set_num_threads(2)
{used_by}
child = os.fork()
if child == 0:
    signal.alarm(20)  # a hang ends as a signal, not as a timeout of the test
    right = ours()[999].tolist() == [0.0] * 64  # torch's own large operations hang in such a child
    os._exit(0 if right and _C.parallel_runtime() == "threads" else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run_python(code) == "0"


def test_a_missing_library() -> None:
    runtime, reason = _C.share_openmp("/nowhere/libtorch_cpu.so")
    assert runtime == ""
    assert reason == "the library is not loaded in this process"
