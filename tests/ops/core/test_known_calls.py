"""A call with the properties of an earlier one skips checks and the selection of a backend (ops/core/declare.py). Wrong
calls are still refused, dispatch modes and subclasses see every call, and the numbers of rows and tokens may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm import _native, ops, use_backend
from fasttfm.ops import attention_native
from fasttfm.ops.attention import TABLE
from fasttfm.ops.core.backends import Backend, always
from fasttfm.ops.core.declare import KnownCalls

X, W = torch.randn(3, 4, 16), torch.randn(16)
Q = torch.randn(2, 5, 2, 16)
LENGTHS = torch.tensor([9, 9], dtype=torch.int32)  # more tokens than the tensors have
IDS, WORDS, POSITIONS = torch.arange(6).view(2, 3), torch.randn(9, 16), torch.randn(4, 16)
CALLS: dict[str, Callable[[], Any]] = {
    "layer_norm": lambda: ops.layer_norm(X, W, W),
    "dropout_add_layer_norm": lambda: ops.dropout_add_layer_norm(X, X, W, W),
    "attention": lambda: ops.attention(Q, Q, Q),
    "embedding": lambda: ops.embedding(IDS, WORDS, POSITIONS, weight=W, bias=W),
}


def embed(ids: Tensor = IDS, **changed: Any) -> Tensor:
    return ops.embedding(ids, WORDS, POSITIONS, **{"weight": W, "bias": W, **changed})


@pytest.fixture(autouse=True)
def _known() -> None:
    for call in CALLS.values():
        call()


@pytest.mark.skipif(_native.signature("r", X) is None, reason="torch has no DLPack exchange table: none is known")
@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_selects_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownCalls, "add", None)
    CALLS[name]()
    if name == "layer_norm":
        ops.layer_norm(torch.randn(7, 16), W, W)  # other rows
    if name == "attention":
        ops.attention(*[torch.randn(1, 9, 2, 16)] * 3)
    if name == "embedding":
        ops.embedding(IDS[:, :2], WORDS, POSITIONS, weight=W, bias=W)
    with pytest.raises(TypeError, match="not callable"):
        ops.layer_norm(torch.randn(7, 17))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.layer_norm(X, W, W, eps=-1.0), "layer_norm: eps: expected a number in"),
        (lambda: ops.layer_norm(X, W, W, eps=True), "layer_norm: eps: expected a number, got bool"),
        (lambda: ops.layer_norm(X, W, W, eps="0"), "layer_norm: eps: expected a number, got str"),
        (lambda: ops.layer_norm(X, W, W, backend="none"), "layer_norm: backend: expected one of"),
        (lambda: ops.layer_norm(X, W[:8], W), r"layer_norm: weight: expected shape \(16,\)"),
        (lambda: ops.layer_norm(X, None, W[None]), r"layer_norm: bias: expected shape \(16,\)"),
        (lambda: ops.layer_norm(X, W.double(), W), "layer_norm: x: expected float64 like weight"),
        (lambda: ops.layer_norm(X, W.to("meta"), W), "layer_norm: weight: expected a tensor on cpu"),
        (lambda: ops.layer_norm(None, W, W), "layer_norm: x: expected a tensor, got NoneType"),
        (lambda: ops.dropout_add_layer_norm(X, None), "dropout_add_layer_norm: residual: expected a tensor"),
        (lambda: ops.dropout_add_layer_norm(X, X[:2], W, W), "dropout_add_layer_norm: residual: expected shape"),
        (lambda: ops.dropout_add_layer_norm(X, X, W, W, p=1.5), "dropout_add_layer_norm: p: expected a number in"),
        (lambda: ops.attention(Q, Q, Q[:, :4]), "attention: v: expected shape"),
        (lambda: ops.attention(Q, Q, None), "attention: v: expected a tensor"),
        (lambda: ops.attention(Q, Q[:1], Q[:1]), "attention: k: expected"),
        (lambda: ops.attention(Q, Q, Q, causal=1), "attention: causal: expected True or False, got int"),
        (lambda: ops.attention(Q, Q, Q, dropout_p=-0.5), "attention: dropout_p: expected a number in"),
        (lambda: ops.attention(Q, Q, Q, max_seqlen=3), "attention: max_seqlen: expected None without cu_seqlens"),
        (
            lambda: ops.attention(Q, Q, Q, lengths=torch.tensor([9, 9], dtype=torch.int32)),
            "attention: lengths: expected",
        ),
        (lambda: embed(eps=-1.0), "embedding: eps: expected a number in"),
        (lambda: embed(p=True), "embedding: p: expected a number, got bool"),
        (lambda: embed(padding_idx=9), r"embedding: padding_idx: expected a row in \[0, 9\), got 9"),
        (lambda: embed(padding_idx=True), "embedding: padding_idx: expected an integer or None, got bool"),
        (lambda: embed(dtype=torch.int32), "embedding: dtype: expected None or one of"),
        (lambda: embed(backend="none"), "embedding: backend: expected one of"),
        (lambda: embed(segment_ids=IDS), "embedding: segment_ids: expected None without segment_table"),
        (lambda: embed(cu_seqlens=LENGTHS), "embedding: ids: expected one dimension with cu_seqlens"),
        (lambda: embed(IDS.view(1, 6)), "embedding: ids: expected at most 4 tokens, the rows of position_table, got 6"),
        (lambda: embed(IDS + 4), r"embedding: ids: expected indices in \[0, 9\), got 9 at"),
        (lambda: embed(IDS.float()), "embedding: ids: expected a tensor of int64 or int32"),
        (lambda: ops.embedding(IDS, WORDS, POSITIONS[:, :8]), "embedding: position_table: expected 16 columns"),
    ],
)
def test_what_is_wrong_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_a_dispatch_mode_sees_a_known_call(name: str) -> None:
    with Seen() as seen:
        CALLS[name]()
    assert f"fasttfm.{name}_forward.default" in seen.names


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_follows_use_backend(name: str) -> None:
    expected = CALLS[name]()
    with use_backend("reference"):
        found = CALLS[name]()
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="does not support this call"), use_backend("cuda"):
        CALLS[name]()


@pytest.mark.parametrize("inference", [False, True])
def test_gradients_flow_where_they_are_required(inference: bool) -> None:
    x, weight = X.clone().requires_grad_(), torch.nn.Parameter(W.clone())
    with torch.inference_mode(inference):
        y = ops.layer_norm(x, weight, weight)
    assert y.requires_grad is not inference
    assert not ops.layer_norm(x.detach(), weight.detach()).requires_grad
    assert ops.layer_norm(X, weight, W).requires_grad


class Wrapper(Tensor):
    """A subclass with __torch_function__."""


def test_a_subclass_is_not_taken_for_a_plain_tensor() -> None:
    assert _native.signature("rpp", X.as_subclass(Wrapper), W, W) is None
    assert _native.signature("rpp", X, W.as_subclass(Wrapper), None) is None
    assert _native.signature("rpp", X.to("meta"), None, None) is None
    torch.testing.assert_close(ops.layer_norm(X.as_subclass(Wrapper), W, W).as_subclass(Tensor), CALLS["layer_norm"]())


def test_a_wrapper_that_outlived_its_transform() -> None:
    leaked: list[Tensor] = []
    torch.func.grad(lambda x: (leaked.append(x), x.sum())[1])(X)
    torch.testing.assert_close(ops.layer_norm(leaked[0], W, W), CALLS["layer_norm"]())


@pytest.mark.parametrize("change", ["types", "rows", "contiguity", "dimensions"])
def test_tables_for_which_the_choice_may_differ_are_distinguished(change: str) -> None:
    known = _native.signature("it", IDS, WORDS)
    if known is None:
        pytest.skip("torch has no DLPack exchange table")
    assert known == _native.signature("it", IDS[:1], torch.zeros(9, 16))
    other = {
        "types": lambda: _native.signature("it", IDS.int(), WORDS),
        "rows": lambda: _native.signature("it", IDS, WORDS[:8]),
        "contiguity": lambda: _native.signature("it", IDS, torch.randn(16, 9).t()),
        "dimensions": lambda: _native.signature("it", IDS.flatten(), WORDS),
    }[change]()
    assert other is not None
    assert other != known


def test_indices_of_another_shape_are_checked_in_each_call() -> None:
    assert _native.signature("ij", IDS, IDS[:, :1]) is None
    assert _native.signature("i", IDS.float()) is None


@pytest.mark.parametrize("change", ["types", "columns", "alignment", "strides", "absent"])
def test_calls_for_which_the_choice_may_differ_are_distinguished(change: str) -> None:
    if _native.signature("r", X) is None:
        pytest.skip("torch has no DLPack exchange table")
    known = _native.signature("rpp", X, W, W)
    other = {
        "types": lambda: _native.signature("rpp", X.bfloat16(), W, W),
        "columns": lambda: _native.signature("rpp", X[..., :8].contiguous(), W[:8], W[:8]),
        "alignment": lambda: _native.signature("rpp", torch.randn(3 * 4 * 16 + 1)[1:].view(3, 4, 16), W, W),
        "strides": lambda: _native.signature("rpp", torch.randn(12, 17)[:, :16], W, W),
        "absent": lambda: _native.signature("rpp", X, W, None),
    }[change]()
    assert other is not None
    assert other != known


def test_the_backend_of_a_call_without_dropout_is_not_reused_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, dropout_p: float = 0.0, **__: Any) -> str | None:
        return "does not support dropout" if dropout_p > 0 else None

    runs: list[str] = []

    def forward(*arguments: Any) -> Any:
        runs.append("first")
        return attention_native.forward(*arguments)

    first = Backend("first", always, refuse, forward)
    monkeypatch.setitem(vars(TABLE), "backends", (first, *TABLE.backends))
    for p in (0.0, 0.1, 0.0):
        ops.attention(Q, Q, Q, dropout_p=p)
    assert runs == ["first", "first"]


def test_a_function_mode_is_supported() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.testing.assert_close(ops.layer_norm(X, W, W), torch.nn.functional.layer_norm(X, (16,), W, W))
