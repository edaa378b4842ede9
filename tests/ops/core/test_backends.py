"""The selection of a backend: requests, explanations, errors with all reasons, and the backward of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fasttfm
from fasttfm.ops import layer_norm
from fasttfm.ops.core import backends
from fasttfm.ops.core.backends import Backend, BackendTable, explain, tables, use_backend

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
TABLE = backends.tables()["layer_norm"]


@pytest.fixture
def ran() -> Iterator[list[str]]:
    """Records the backends that run layer_norm's calls, as "<backend> <function>", in order."""
    calls: list[str] = []

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    watched = tuple(
        dataclasses.replace(
            backend,
            forward=recorded(f"{backend.name} forward", backend.forward),
            backward=recorded(f"{backend.name} backward", backend.backward),
            infer=None if backend.infer is None else recorded(f"{backend.name} forward", backend.infer),
        )
        for backend in TABLE.backends
    )
    before = TABLE.backends
    object.__setattr__(TABLE, "backends", watched)
    yield calls
    object.__setattr__(TABLE, "backends", before)


def test_the_first_backend_that_supports_the_call_runs_it(ran: list[str]) -> None:
    layer_norm(X)
    layer_norm(X.double())
    assert ran == ["cpu forward", "reference forward"]


def test_argument_and_context_request_a_backend(ran: list[str]) -> None:
    layer_norm(X, backend="reference")
    with use_backend("reference"):
        layer_norm(X)
        layer_norm(X, backend="cpu")  # the argument has priority
        with use_backend(None):
            layer_norm(X)
        layer_norm(X)
    layer_norm(X)
    names = [call.split()[0] for call in ran]
    assert names == ["reference", "reference", "cpu", "cpu", "reference", "cpu"]


def test_context_ends_with_an_exception(ran: list[str]) -> None:
    with pytest.raises(RuntimeError), use_backend("reference"):
        raise RuntimeError
    layer_norm(X)
    assert ran == ["cpu forward"]


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_contexts_of_two_threads_overlap(ran: list[str]) -> None:
    first, second = use_backend("reference"), use_backend("cpu")
    with ThreadPoolExecutor(1) as other:  # one thread
        first.__enter__()
        other.submit(second.__enter__).result()
        layer_norm(X)
        other.submit(layer_norm, X).result()
        in_thread(lambda: layer_norm(X))  # in no block of its own: the last one
        first.__exit__(None, None, None)
        layer_norm(X)
        other.submit(layer_norm, X).result()
        other.submit(second.__exit__, None, None, None).result()
        for run in (lambda call: call(), in_thread, lambda call: other.submit(call).result()):
            run(lambda: layer_norm(X))
    names = [call.split()[0] for call in ran]
    assert names == ["reference", "cpu", "cpu", "cpu", "cpu", "cpu", "cpu", "cpu"]
    assert in_thread(lambda: backends.requested(None)) is None
    assert backends.requested(None) is None


def test_a_thread_without_a_context_follows_the_others(ran: list[str]) -> None:
    with use_backend("reference"):
        in_thread(lambda: layer_norm(X))
        with use_backend(None):
            in_thread(lambda: layer_norm(X))
    assert [call.split()[0] for call in ran] == ["reference", "cpu"]


def test_contexts_of_generators_end_in_any_order(ran: list[str]) -> None:
    def block(name: str) -> Iterator[None]:
        with use_backend(name):
            yield

    first, second = block("reference"), block("cpu")
    next(first)
    next(second)
    first.close()
    layer_norm(X)
    second.close()
    assert ran == ["cpu forward"]
    assert backends.requested(None) is None


def test_a_compiled_function_follows_the_context_of_its_thread(ran: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer_norm(x), fullgraph=True, backend="aot_eager")

    def in_other_block() -> None:
        with use_backend("cpu"):
            compiled(X)

    compiled(X)
    with use_backend("reference"):
        compiled(X)
        in_thread(lambda: compiled(X))
        in_thread(in_other_block)
        compiled(X)
    compiled(X)
    names = [call.split()[0] for call in ran]
    assert names == ["cpu", "reference", "reference", "cpu", "reference", "cpu"]


def test_the_backward_uses_the_backend_requested_for_the_forward(ran: list[str]) -> None:
    x = X.clone().requires_grad_()
    with use_backend("reference"):
        y = layer_norm(x)
    y.sum().backward()
    with use_backend("reference"):
        z = layer_norm(x, backend="cpu")
        z.sum().backward()
    assert ran == ["reference forward", "reference backward", "cpu forward", "cpu backward"]


def test_a_compiled_function_follows_the_context(ran: list[str]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer_norm(x), fullgraph=True, backend="aot_eager")
    compiled(X)
    with use_backend("reference"):
        compiled(X)
    compiled(X)
    assert [call.split()[0] for call in ran] == ["cpu", "reference", "cpu"]


def test_unknown_names_raise_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"layer_norm: backend: expected one of .*cpu.*reference.*, got 'fastest'"):
        layer_norm(X, backend="fastest")
    unknown = use_backend("fastest")
    with pytest.raises(ValueError, match=r"use_backend: name: expected one of .*reference.*, got 'fastest'"), unknown:
        pass
    with pytest.raises(ValueError, match=r"explain: op: expected one of .*layer_norm.*, got 'layernorm'"):
        explain("layernorm", X)
    with pytest.raises(ValueError, match=r"layer_norm: backend: expected one of .*, got 'fastest'"):
        explain("layer_norm", X, backend="fastest")


def test_a_refused_request_lists_every_reason() -> None:
    with pytest.raises(ValueError, match="backend 'cpu' does not support this call") as refused:
        layer_norm(X.double(), backend="cpu")
    lines = str(refused.value).splitlines()
    assert lines[0] == "layer_norm: backend 'cpu' does not support this call:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == list(TABLE.names)
    assert "  cpu: takes float32, bfloat16 and float16, got float64" in lines
    assert "  reference: supports this call" in lines


def test_no_backend_at_all_raises_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a backend that refuses was called")

    monkeypatch.setattr(backends, "_tables", {})
    table = BackendTable(
        "scale",
        (
            Backend("cpu", lambda: "no core", lambda *_: None, never, never),
            Backend("reference", lambda: None, lambda *_: "too large", never, never),
        ),
    )
    expected = "scale: no backend supports this call:\n  cpu: no core\n  reference: too large"
    with pytest.raises(ValueError, match="no backend") as refused:
        table.select(None, X)
    assert str(refused.value) == expected


def test_explain_names_the_backend_and_why_not_the_others() -> None:
    free = fasttfm.explain("layer_norm", X)
    assert free.chosen == "cpu"
    assert str(free).startswith("layer_norm: cpu\n")
    assert "  cpu        runs this call" in str(free)
    assert "  reference  supports this call" in str(free)

    double = explain("layer_norm", X.double())
    assert double.chosen == "reference"
    assert double.reasons["cpu"] == "takes float32, bfloat16 and float16, got float64"


def test_explain_follows_requests_as_a_call_would() -> None:
    assert explain("layer_norm", X, backend="reference").chosen == "reference"
    with use_backend("reference"):
        assert explain("layer_norm", X).chosen == "reference"
    refused = explain("layer_norm", X.double(), backend="cpu")
    assert refused.chosen is None
    assert str(refused).startswith("layer_norm: no backend\n")


def test_a_backend_may_leave_the_backward_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_tables", {})
    table = BackendTable(
        "scale",
        (
            Backend(
                "cuda",
                lambda: None,
                lambda x, factor=1: "takes a factor of 1" if factor != 1 else None,
                forward=abs,
                refuse_backward=lambda x, factor=1: None if len(x) > 2 else "takes three rows in its backward",
                yield_backward=lambda x, factor=1: "is slower there" if len(x) > 3 else None,
            ),
            Backend("triton", lambda: "no GPU", lambda *_, **__: None, abs, abs),
            Backend("reference", lambda: None, lambda *_, **__: None, abs, abs),
        ),
    )
    assert table.select("cuda", X[:2]).name == "cuda"
    assert table.select_backward("cuda", X[:2]).name == "reference"
    assert table.select_backward(None, X).name == "cuda"
    assert table.select_backward(None, X, factor=2).name == "reference"
    alone = explain("scale", X[:2])
    assert (alone.chosen, alone.backward) == ("cuda", "reference")
    assert "  cuda       runs this call, reference its backward: cuda takes three rows in its backward" in str(alone)
    assert explain("scale", X).backward == "cuda"
    slow = torch.cat([X, X])
    assert str(explain("scale", slow)).count("runs this call, reference its backward: cuda is slower there") == 1
    asked = explain("scale", slow, backend="cuda")
    assert (asked.backward, asked.backward_reason) == ("cuda", None)
    assert explain("scale", X, factor=2).reasons["cuda"] == "takes a factor of 1"
    table = BackendTable("scale", table.backends[:1])
    assert table.select_backward(None, slow).name == explain("scale", slow).backward == "cuda"
    with pytest.raises(ValueError, match="scale: no backend after 'cuda' supports the backward of this call"):
        table.select_backward(None, X[:2])


def test_a_backend_may_yield_calls_to_the_next_unless_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_tables", {})
    slower = Backend(
        "cuda", lambda: None, lambda *_: None, abs, abs, yield_forward=lambda x: "is slower" if len(x) > 2 else None
    )
    table = BackendTable("scale", (slower, Backend("reference", lambda: None, lambda *_: None, abs, abs)))
    assert [table.select(None, X[:2]).name, table.select(None, X).name, table.select("cuda", X).name] == [
        "cuda",
        "reference",
        "cuda",
    ]
    assert (explain("scale", X).chosen, explain("scale", X, backend="cuda").chosen) == ("reference", "cuda")
    assert "is slower" in str(explain("scale", X))


def test_attention_of_short_sequences_yields_only_its_backward() -> None:
    cuda = next(each for each in tables()["attention"].backends if each.name == "cuda")
    q = torch.empty(8, 128, 16, 64, dtype=torch.bfloat16)
    assert cuda.yield_forward(q, q, q) is None
    assert "is slower backward" in str(cuda.yield_backward(q, q, q))


def test_explain_computes_nothing(ran: list[str]) -> None:
    explain("layer_norm", X)
    assert ran == []
