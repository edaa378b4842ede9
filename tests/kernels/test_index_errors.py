"""The words in which kernels record wrong indices (kernels/common/index_errors.py), on several streams and in CUDA
graphs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from fasttfm import ops
from fasttfm.kernels.common import index_errors
from fasttfm.kernels.common.index_errors import IndexErrors

_BAD = [[7 << 32 | 50], [10]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of an op whose kernels are loaded, and that has no words yet; its labels are an attribute."""
    errors = importlib.import_module("fasttfm.ops.linear_cross_entropy")._errors
    weight = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 512, (128,), device="cuda")

    def run() -> torch.Tensor:
        return ops.linear_cross_entropy(hidden, weight, labels)

    run.labels = labels  # type: ignore[attr-defined]
    run()
    ops.check_errors()
    monkeypatch.setattr(errors, "_devices", {})
    return run


@pytest.mark.gpu
def test_the_first_call_on_a_busy_stream(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of other streams, which do not wait for it, find words that are filled."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()  # cuBLAS's workspace of this stream
        torch.cuda.synchronize()
        errors = importlib.import_module("fasttfm.ops.linear_cross_entropy")._errors
        monkeypatch.setattr(errors, "_devices", {})
        old = [torch.zeros(8, dtype=torch.int64, device="cuda") for _ in range(64)]  # memory that is used again
        torch.cuda.synchronize()
        del old
        torch.cuda._sleep(1_000_000_000)
        call()
    for _ in range(3):
        call()
        torch.cuda.current_stream().synchronize()
    assert not side.query(), "the host synchronized with the busy stream"
    torch.cuda.synchronize()
    ops.check_errors()


@pytest.mark.gpu
def test_the_first_call_inside_of_a_capture_raises(call: Any) -> None:
    with (
        pytest.raises(RuntimeError, match="expected a call on cuda:0 before the first one inside of the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        call()
    call()
    torch.cuda.synchronize()
    ops.check_errors()


@pytest.mark.gpu
def test_a_wrong_index_of_any_replay_is_found(call: Any) -> None:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = call()
    call.labels[0] = 999
    graph.replay()
    assert loss.isnan()
    call.labels[0] = 1
    graph.replay()
    assert loss.isfinite()
    with pytest.raises(ValueError, match=r"labels: .*got 999 at token 0"):
        ops.check_errors()
    ops.check_errors()


@pytest.mark.gpu
def test_an_error_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of another stream that is in flight while the words are reset still holds the error."""
    monkeypatch.setattr(index_errors, "_all", [])
    errors, device, side = IndexErrors("op", ("ids",)), torch.device("cuda", 0), torch.cuda.Stream()
    errors.words(device).copy_(torch.tensor(_BAD))
    errors.watch(device)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
        errors._state(device).host.copy_(errors.words(device), non_blocking=True)
    with pytest.raises(ValueError, match=r"op: ids: .*got 50 at token 7 in an earlier call"):
        errors.raise_if_seen(device)
    with torch.cuda.stream(side):
        errors.watch(device)
    torch.cuda.synchronize()
    errors.raise_if_seen(device)
    errors.raise_if_any()


def test_words_on_the_cpu_are_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_errors, "_all", [])
    errors = IndexErrors("op", ("ids",))
    errors.words(torch.device("cpu")).copy_(torch.tensor(_BAD))
    with pytest.raises(ValueError, match=r"op: ids: .*got 50 at token 7 in a call"):
        errors.raise_if_any()
    errors.raise_if_any()


def test_other_objects_are_checked_while_they_exist() -> None:
    class Broken:
        def raise_if_any(self) -> None:
            raise RuntimeError("broken")

    broken = Broken()
    index_errors.also_checked(broken)
    with pytest.raises(RuntimeError, match="broken"):
        ops.check_errors()
    del broken
    ops.check_errors()
