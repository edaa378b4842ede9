"""attention's CUDA kernels for Hopper: which calls they support, accuracy, and the same bits under load."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm.kernels.attention import reference
from fasttfm.ops import attention, attention_choice, cu_seqlens_from_lengths
from fasttfm.ops.core import backends
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

(HOPPER,) = (backend for backend in backends.tables()["attention"].backends if backend.name == "cuda")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)


def starts(*lengths: int) -> Tensor:
    return cu_seqlens_from_lengths(lengths)


# ---- the rule --------------------------------------------------------------------------------------------------------


def empty(*shape: int) -> Tensor:
    """A tensor without memory (on the meta device)."""
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "multiprocessors", lambda _: 132)


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((16, 512, 16, 64), {}, None),
        ((16, 1025, 16, 64), {}, None),
        ((8, 2048, 16, 64), {"causal": True}, None),
        ((8, 2048, 16, 64), {"window": (-1, 0)}, None),
        ((4, 4096, 16, 64), {}, None),
        ((1, 16384, 16, 64), {"causal": True}, None),
        ((128, 128, 8, 128), {}, None),
        ((1, 16384, 8, 128), {"causal": True}, None),
        ((128, 128, 16, 64), {}, "is slower backward up to 128 queries and keys, got 128 and 128"),
        ((4, 129, 16, 64), {}, None),
        ((128, 128, 12, 32), {}, None),
        ((4, 512, 12, 32), {}, "got 48"),
        ((4, 256, 16, 64), {}, None),
        ((4, 257, 16, 64), {}, "is slower backward below 66 heads of all sequences, above 256 queries, got 64"),
        ((4, 512, 16, 64), {}, "got 64"),
        ((5, 257, 16, 64), {}, None),
        ((4, 1024, 16, 64), {}, None),
        ((5, 513, 15, 64), {}, "above 512 queries where it cannot use all SMs, got 75 heads"),
        ((8, 513, 16, 64), {}, None),
        ((1, 1024, 8, 64), {}, "got 8 heads"),
        ((1, 4096, 1, 64), {}, "got 1 heads"),
        ((1, 4096, 12, 64), {}, None),
        ((16, 512, 3, 16, 64), {}, None),  # one qkv
        ((128, 128, 3, 16, 64), {}, "got 128 and 128"),
        ((5000, 3, 16, 64), {"cu_seqlens": starts(2500, 2500)}, None),
        ((5000, 3, 2, 64), {"cu_seqlens": starts(2500, 2500), "max_seqlen": 2500}, "got 4 heads"),
        ((5000, 3, 16, 64), {"cu_seqlens": starts(*[500] * 10), "max_seqlen": 500}, None),
        ((5000, 3, 6, 64), {"cu_seqlens": starts(*[500] * 10), "max_seqlen": 500}, "got 60"),
        ((5000, 3, 16, 64), {"cu_seqlens": starts(*[100] * 50), "max_seqlen": 100}, "got 100 and 100"),
    ],
)
@pytest.mark.usefixtures("_an_h200")
def test_which_backward_is_faster(shape: tuple[int, ...], options: dict[str, Any], said: str | None) -> None:
    inputs = (empty(*shape),) * (1 if shape[-3] == 3 else 3)  # qkv, or q, k and v
    assert HOPPER.refuse_backward(*inputs, **options) is None
    reason = HOPPER.backward_reason(None, *inputs, **options)
    assert reason is None if said is None else reason is not None and reason.endswith(said)
    assert HOPPER.backward_reason("cuda", *inputs, **options) is None


@pytest.mark.usefixtures("_an_h200")
def test_the_number_of_keys_matters_for_few_queries() -> None:
    q, k = empty(64 * 16, 16, 64), empty(1000 * 16, 16, 64)
    options = {"cu_seqlens": starts(*[64] * 16), "cu_seqlens_k": starts(*[1000] * 16), "max_seqlen": 64}
    assert HOPPER.backward_reason(None, q, k, k, **options, max_seqlen_k=1000) is None


@pytest.mark.parametrize(
    ("q", "kv_heads", "options", "said"),
    [
        (empty(2**16, 1, 1, 64), 1, {}, "goes backward with up to 65535 sequences, got 65536"),
        (empty(4, 513, 2, 32), 2, {}, "goes backward with heads of 32 up to 512 queries, got 513"),
    ],
)
def test_calls_that_the_backward_does_not_support(q: Tensor, kv_heads: int, options: dict[str, Any], said: str) -> None:
    k = empty(*q.shape[:2], kv_heads, q.shape[-1])
    for requested in (None, "cuda"):
        assert HOPPER.backward_reason(requested, q, k, k, **options) == said


@pytest.mark.parametrize(
    ("head_dim", "length", "options", "said"),
    [
        (64, 8192, {"window": (64, 64)}, None),
        (64, 8192, {"window": (321, None), "causal": True}, None),
        (64, 512, {"window": (400, None)}, None),
        (64, 513, {"window": (400, None)}, "above 512 queries, got (400, -1)"),
        (
            64,
            8192,
            {"window": (160, 162)},
            "up to 321 keys in addition to a query's own above 512 queries, got (160, 162)",
        ),
        (128, 8192, {"window": (2000, None)}, None),
        (64, 100, {"window": (64, 64)}, "is slower backward up to 128 queries and keys, got 100 and 100"),
        (64, 1000, {"window": (64, 64), "cu_seqlens": starts(1000)}, "below 66 chunks of 512 keys, got 16"),
    ],
)
@pytest.mark.usefixtures("_an_h200")
def test_which_windows_the_backward_supports(
    head_dim: int, length: int, options: dict[str, Any], said: str | None
) -> None:
    q = empty(*(() if "cu_seqlens" in options else (8,)), length, 16, head_dim)
    reason = HOPPER.backward_reason(None, q, q, q, **options)
    assert reason is None if said is None else reason is not None and reason.endswith(said)


def test_windows_have_no_dropout() -> None:
    q = empty(4, 1024, 16, 64)
    reason = HOPPER.refuse(q, q, q, window=(64, 64), dropout_p=0.1)
    assert reason == "takes windows without dropout, got a window of (64, 64) and dropout_p 0.1"
    assert HOPPER.refuse(q, q, q, window=(-1, 0), dropout_p=0.1) != reason


@pytest.mark.gpu
@on_hopper
def test_explain_names_the_backend_of_the_backward() -> None:
    q = torch.zeros(8, 512, 16, 64, dtype=torch.bfloat16, device="cuda")
    own = fasttfm.explain("attention", q, q, q)
    assert (own.chosen, own.backward) == ("cuda", "cuda")
    short = fasttfm.explain("attention", *[q[:, :128]] * 3)
    assert (short.chosen, short.backward) == ("cuda", "triton")
    assert "triton its backward: cuda is slower backward up to 128 queries and keys" in str(short)
    assert fasttfm.explain("attention", *[q[:, :128]] * 3, backend="cuda").backward == "cuda"


# ---- the kernel ------------------------------------------------------------------------------------------------------

HEADS = {64: 16, 128: 8}  # of each head dim
FORWARD_HEADS = {**HEADS, 32: 12, 80: 4, 96: 4, 192: 4, 256: 2}  # of those that Hopper's forward takes
DIFFERENT = [*(1 + 37 * i % 512 for i in range(40)), 0, 64]

# Queries and keys of each sequence.
LOAD: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "short, dropout": ([128] * 128, [128] * 128, {"dropout_p": 0.1}),
    "causal": ([512] * 32, [512] * 32, {"causal": True}),
    "few queries, causal": ([64] * 16, [1000] * 16, {"causal": True}),
    "heads handed out, dropout": (DIFFERENT, DIFFERENT, {"dropout_p": 0.1}),
    "heads handed out, causal": (DIFFERENT, DIFFERENT[::-1], {"causal": True}),
    "sums in memory": ([700, 64] * 8, [300, 1000] * 8, {"causal": True}),
    "causal, sums in memory, dropout": ([2000] * 5, [2000] * 5, {"causal": True, "dropout_p": 0.1}),
    "long": ([4096], [4096], {}),
    "long, causal": ([4000], [4000], {"causal": True}),
    "long, causal, dropout": ([4096, 1], [4096, 7], {"causal": True, "dropout_p": 0.1}),
    "one long head among short ones": ([3000] + [60] * 50, [3000] + [60] * 50, {"dropout_p": 0.1}),
    "blocks that begin apart, dropout": ([1024] * 16, [1024] * 16, {"dropout_p": 0.1}),
    "blocks that begin apart": ([1024] * 16, [1024] * 16, {}),
    "causal, sums in memory": ([2000] * 5, [2000] * 5, {"causal": True}),
    "one long head among short ones, causal": ([3000] + [60] * 50, [3000] + [60] * 50, {"causal": True}),
    "one tile of queries after another": ([600, 60, 64], [600, 900, 1000], {}),
    "many blocks share a head": ([5000], [5000], {}),
    "many blocks share a head, causal": ([5000, 70, 0, 1], [5000, 70, 3, 1], {"causal": True}),
    "more blocks than tiles of keys": ([700, 5, 130], [600, 2500, 64], {"dropout_p": 0.1}),
}


def packed_call(case: str, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, list[Tensor], Tensor]:
    lengths, lengths_k, options = LOAD[case]
    torch.manual_seed(1)
    heads = (HEADS[head_dim], head_dim)
    q, k, v = (torch.randn(sum(n), *heads, dtype=dtype, device="cuda") for n in (lengths, lengths_k, lengths_k))
    packed: dict[str, Any] = {
        "cu_seqlens": cu_seqlens_from_lengths(lengths, device="cuda"),
        "cu_seqlens_k": cu_seqlens_from_lengths(lengths_k, device="cuda"),
        "max_seqlen": max(lengths),
        "max_seqlen_k": max(lengths_k),
        "seed": torch.tensor([7], device="cuda"),
    }
    return partial(attention, **packed, **options, backend="cuda"), [q, k, v], torch.randn_like(q)


def gradients(function: Any, inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("case", LOAD)
def test_same_bits_under_load(case: str, head_dim: int) -> None:
    function, inputs, dout = packed_call(case, head_dim)
    first = gradients(function, inputs, dout)
    for _ in range(300):
        for name, found, expected in zip(
            ("out", "dq", "dk", "dv"), gradients(function, inputs, dout), first, strict=True
        ):
            assert same_bits(found, expected), name


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.large_memory if max(LOAD[case][1]) > 2500 else ()) for case in LOAD],
)
def test_first_and_last_sequence_against_the_reference(case: str, head_dim: int, dtype: torch.dtype) -> None:
    """Under load, without dropout, whose mask depends on the index of a sequence: the reference gets single
    sequences."""
    lengths, lengths_k, options = LOAD[case]
    function, inputs, dout = packed_call(case, head_dim, dtype)
    function = partial(function, dropout_p=0.0)
    found = gradients(function, inputs, dout)
    for rows, keys in (
        (slice(0, lengths[0]), slice(0, lengths_k[0])),
        (slice(-lengths[-1], None), slice(-lengths_k[-1], None)),
    ):
        parts = [x[None, part] for x, part in zip(inputs, (rows, keys, keys), strict=True)]
        alone = partial(reference.attention, causal=options.get("causal", False))
        naive = gradients(alone, parts, dout[None, rows])
        exact = gradients(alone, [x.double() for x in parts], dout[None, rows].double())
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            own = found[index][None, rows if index < 2 else keys]
            factor = GRADIENT_FACTOR if index else OUTPUT_FACTOR
            comparison = compare(name, own, naive[index], exact[index], factor)
            assert comparison.ok, comparison


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("case", LOAD)
def test_gradients_are_those_of_triton(case: str, head_dim: int) -> None:
    """Including the dropout mask: another one would change a tenth of the terms of the sums."""
    function, inputs, dout = packed_call(case, head_dim)
    own = gradients(function, inputs, dout)[1:]
    others = gradients(partial(function, backend="triton"), inputs, dout)[1:]
    for name, found, expected in zip(("dq", "dk", "dv"), own, others, strict=True):
        difference = (found.double() - expected.double()).norm() / expected.double().norm()
        assert difference < 0.006, (name, difference)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [600, 1500])
def test_the_number_of_blocks_changes_no_bit(length: int, causal: bool) -> None:
    """Of two heads, each is shared by as many blocks as it has tiles of keys; of 160, each has one or two blocks."""
    torch.manual_seed(2)
    inputs = [torch.randn(1, length, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    function = partial(attention, causal=causal, dropout_p=0.1, seed=torch.tensor([3], device="cuda"), backend="cuda")
    alone = gradients(function, inputs[:3], inputs[3])
    many = [x.expand(80, -1, -1, -1).contiguous() for x in inputs]
    for name, own, found in zip(("out", "dq", "dk", "dv"), alone, gradients(function, many[:3], many[3]), strict=True):
        assert same_bits(own, found[:1]), name


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", HEADS)
def test_gradients_at_odd_addresses(head_dim: int) -> None:
    function, inputs, dout = packed_call("few queries, causal", head_dim)
    odd = torch.empty(dout.numel() + 1, dtype=dout.dtype, device="cuda")[1:].view_as(dout).copy_(dout)
    assert odd.data_ptr() % 16 != 0
    for found, expected in zip(gradients(function, inputs, odd), gradients(function, inputs, dout), strict=True):
        assert same_bits(found, expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("factor", [1, 4])  # sums on chip, and in memory
def test_the_order_of_sequences_changes_no_bit(head_dim: int, factor: int) -> None:
    """Sequences with the most work are scheduled first, so that the assignment to blocks depends on all of them."""
    torch.manual_seed(4)
    lengths = [factor * length for length in DIFFERENT]
    tensors = [torch.randn(sum(lengths), HEADS[head_dim], head_dim, dtype=torch.bfloat16, device="cuda")] * 4
    tensors = [torch.roll(x, 100 * index, 0) for index, x in enumerate(tensors)]

    def both(lengths: list[int], rows: Any) -> tuple[Tensor, ...]:
        starts = cu_seqlens_from_lengths(lengths, device="cuda")
        function = partial(attention, cu_seqlens=starts, max_seqlen=max(lengths), backend="cuda")
        return gradients(function, [x[rows] for x in tensors[:3]], tensors[3][rows])

    parts = torch.arange(sum(lengths), device="cuda").split(lengths)
    other = torch.cat(parts[::-1])
    for name, own, found in zip(
        ("out", "dq", "dk", "dv"), both(lengths, slice(None)), both(lengths[::-1], other), strict=True
    ):
        assert same_bits(own[other], found), name


# Queries and keys of each sequence, and the window.
WINDOWS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "own key only": ([700, 1, 64], [700, 1, 64], {"window": (0, 0)}),
    "64 and 64": ([2000, 513, 0, 77, 1024], [2000, 513, 0, 77, 1024], {"window": (64, 64)}),
    "64 and 64, one long sequence": ([5000], [5000], {"window": (64, 64)}),
    "127 before": ([1500, 130], [1500, 130], {"window": (127, None), "causal": True}),
    "127 after": ([1500, 130], [1500, 130], {"window": (0, 127)}),
    "13 and 200, more keys": ([600, 3, 900], [1700, 800, 911], {"window": (13, 200)}),
    "200 and 13, more queries": ([1700, 800, 911], [600, 3, 900], {"window": (200, 13)}),
    "as wide as the ring": ([1300, 640], [1300, 641], {"window": (160, 161)}),
    "wider than a sequence": ([512, 60, 300], [512, 60, 300], {"window": (600, 20)}),
    "one side": ([500, 60, 300], [400, 600, 300], {"window": (None, 33)}),
    "different": (DIFFERENT, DIFFERENT, {"window": (64, 64)}),
    "different, more of either": (DIFFERENT, DIFFERENT[::-1], {"window": (30, 100)}),
}


def window_call(case: str, head_dim: int, dtype: torch.dtype) -> tuple[Any, list[Tensor], Tensor]:
    lengths, lengths_k, options = WINDOWS[case]
    torch.manual_seed(5)
    q, k, v = (torch.randn(sum(n), 3, head_dim, dtype=dtype, device="cuda") for n in (lengths, lengths_k, lengths_k))
    packed: dict[str, Any] = {
        "cu_seqlens": cu_seqlens_from_lengths(lengths, device="cuda"),
        "cu_seqlens_k": cu_seqlens_from_lengths(lengths_k, device="cuda"),
        "max_seqlen": max(lengths),
        "max_seqlen_k": max(lengths_k),
    }
    return partial(attention, **packed, **options), [q, k, v], torch.randn_like(q)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", HEADS)
@pytest.mark.parametrize("case", WINDOWS)
def test_windows_against_the_reference(case: str, head_dim: int, dtype: torch.dtype) -> None:
    function, inputs, dout = window_call(case, head_dim, dtype)
    found = gradients(partial(function, backend="cuda"), inputs, dout)
    naive = gradients(partial(function, backend="reference"), inputs, dout)
    exact = gradients(partial(function, backend="reference"), [x.double() for x in inputs], dout.double())
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        factor = GRADIENT_FACTOR if index else OUTPUT_FACTOR
        comparison = compare(name, found[index], naive[index], exact[index], factor)
        assert comparison.ok, comparison
    for _ in range(50):
        repeated = gradients(partial(function, backend="cuda"), inputs, dout)
        for name, own, first in zip(("out", "dq", "dk", "dv"), repeated, found, strict=True):
            assert same_bits(own, first), name


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", HEADS)
def test_nan_outside_of_the_window_has_no_effect(head_dim: int) -> None:
    """Rows of the neighbouring sequence and tiles outside of a query's window are not read."""
    function, inputs, dout = window_call("64 and 64", head_dim, torch.bfloat16)
    for x in inputs:
        x[2000 + 300] = float("nan")  # of the second sequence
    for index, x in enumerate(gradients(partial(function, backend="cuda"), inputs, dout)):
        unaffected = torch.cat([x[:2000], x[2513:]])
        assert unaffected.isfinite().all(), index
        assert x[2000 + 300].isnan().all(), index


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "case", ["causal, sums in memory, dropout", "heads handed out, dropout", "blocks that begin apart"]
)
@pytest.mark.parametrize("head_dim", HEADS)
def test_a_cuda_graph_gives_the_same_bits(head_dim: int, case: str) -> None:
    function, inputs, dout = packed_call(case, head_dim)
    torch.cuda.synchronize()  # the other stream does not wait for the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = gradients(function, inputs, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(function, inputs, dout)
    for _ in range(3):
        graph.replay()
        for found, wanted in zip(captured, expected, strict=True):
            assert same_bits(found, wanted)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads"),
    [(32, 4), (32, 2), (64, 1), (64, 2), (80, 4), (80, 2), (96, 4), (128, 2), (192, 4), (192, 2), (256, 4), (256, 1)],
)
def test_gradients_of_other_heads(head_dim: int, kv_heads: int, padded: bool, causal: bool, dtype: torch.dtype) -> None:
    """Other head dims than HEADS, and fewer heads of k and v than of q: against the reference, and the same bits 100
    times."""
    torch.manual_seed(6)
    lengths = DIFFERENT if head_dim == 32 else [*DIFFERENT, 700, 1000]
    leading = (len(lengths), max(lengths)) if padded else (sum(lengths),)
    inputs = [
        torch.randn(*leading, heads, head_dim, dtype=dtype, device="cuda") for heads in (4, kv_heads, kv_heads, 4)
    ]
    where: dict[str, Any] = {"lengths": torch.tensor(lengths, dtype=torch.int32, device="cuda")}
    if not padded:
        where = {"cu_seqlens": cu_seqlens_from_lengths(lengths, device="cuda"), "max_seqlen": max(lengths)}
    function = partial(attention, causal=causal, **where)
    found = gradients(partial(function, backend="cuda"), inputs[:3], inputs[3])
    naive = gradients(partial(function, backend="reference"), inputs[:3], inputs[3])
    exact = gradients(partial(function, backend="reference"), [x.double() for x in inputs[:3]], inputs[3].double())
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        factor = GRADIENT_FACTOR if index else OUTPUT_FACTOR
        comparison = compare(name, found[index], naive[index], exact[index], factor)
        assert comparison.ok, comparison
    for _ in range(100):
        for own, first in zip(gradients(partial(function, backend="cuda"), inputs[:3], inputs[3]), found, strict=True):
            assert same_bits(own, first)


# ---- the forward for few keys ----------------------------------------------------------------------------------------

ALL_LENGTHS = [1 + 37 * i % 256 for i in range(150)]

# Queries and keys of each sequence.
FEW_KEYS: dict[str, tuple[list[int], list[int], dict[str, Any]]] = {
    "64": ([64] * 100, [64] * 100, {}),
    "256": ([256] * 40, [256] * 40, {}),
    "128, causal": ([128] * 70, [128] * 70, {"causal": True}),
    "512, dropout": ([512] * 20, [512] * 20, {"dropout_p": 0.1}),
    "all lengths": (ALL_LENGTHS, ALL_LENGTHS, {}),
    "all lengths, causal, dropout": (ALL_LENGTHS, ALL_LENGTHS, {"causal": True, "dropout_p": 0.1}),
    "more queries than keys, causal": ([1000, 0, 3] * 10, [200, 7, 0] * 10, {"causal": True}),
    "few queries, causal": ([5, 70] * 40, [256, 130] * 40, {"causal": True}),
    "few heads": ([256], [256], {}),
    "many queries": ([2100, 130], [333, 500], {}),  # from 2,048 on, head dims 64 and 192 have other tiles
    "many queries, causal": ([2100, 130], [700, 500], {"causal": True}),
}


def few_keys_call(case: str, head_dim: int, dtype: torch.dtype, padded: bool) -> tuple[Any, list[Tensor]]:
    """``attention`` and its q, k and v; rows of padding are NaN."""
    lengths, lengths_k, options = FEW_KEYS[case]
    torch.manual_seed(2)
    sizes = (lengths, lengths_k, lengths_k)
    heads = (FORWARD_HEADS[head_dim], head_dim)
    parts = [[torch.randn(n, *heads, dtype=dtype, device="cuda") for n in of_tensor] for of_tensor in sizes]
    where: dict[str, Any] = {}
    if padded:
        where["lengths"], where["lengths_k"] = (
            torch.tensor(n, dtype=torch.int32, device="cuda") for n in (lengths, lengths_k)
        )
        inputs = [
            torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=float("nan")) for tensors in parts
        ]
    else:
        where["cu_seqlens"] = cu_seqlens_from_lengths(lengths, device="cuda")
        where["cu_seqlens_k"] = cu_seqlens_from_lengths(lengths_k, device="cuda")
        where |= {"max_seqlen": max(lengths), "max_seqlen_k": max(lengths_k)}
        inputs = [torch.cat(tensors) for tensors in parts]
    seed = torch.tensor([7], device="cuda")
    return partial(attention, **where, **options, seed=seed, return_lse=True), inputs


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", FORWARD_HEADS)
@pytest.mark.parametrize("case", FEW_KEYS)
def test_few_keys_against_the_reference(case: str, head_dim: int, dtype: torch.dtype, padded: bool) -> None:
    function, inputs = few_keys_call(case, head_dim, dtype, padded)
    if head_dim not in HEADS:
        function = partial(function, dropout_p=0.0)  # they have no dropout
    naive = function(*inputs, backend="reference")
    exact = function(*(x.double() for x in inputs), backend="reference")
    first = function(*inputs, backend="cuda")
    for index, name in enumerate(("out", "lse")):
        attended = exact[index].isfinite()
        assert torch.equal(first[index].isfinite(), attended), name
        tensors = (first[index][attended], naive[index][attended], exact[index][attended])
        comparison = compare(name, *tensors, OUTPUT_FACTOR)
        assert comparison.ok, comparison
    for _ in range(50):
        for name, found, expected in zip(("out", "lse"), function(*inputs, backend="cuda"), first, strict=True):
            assert same_bits(found, expected), name


# ---- the forward's softmax -------------------------------------------------------------------------------------------

# Offsets of the scores of 512 keys, from the first to the last; the kernel iterates from the last to the first.
LEVELS = {
    "rising": torch.linspace(150.0, -150.0, 512),
    "falling": torch.linspace(-150.0, 150.0, 512),
    "far below 0": torch.full((512,), -100.0),
    "from far below to 0": torch.cat([torch.zeros(64), torch.full((448,), -200.0)]),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [*HEADS, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", LEVELS)
def test_scores_far_from_0(levels: str, causal: bool, head_dim: int) -> None:
    torch.manual_seed(3)
    heads = (FORWARD_HEADS[head_dim], head_dim)
    q, k, v = (torch.randn(9, 512, *heads, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    q[..., 0] = head_dim**0.5
    k[..., 0] = LEVELS[levels].cuda()[:, None]
    k[:, LEVELS[levels] == 0.0] = 0.0  # scores of exactly 0
    function = partial(attention, causal=causal, return_lse=True)
    out, lse = function(q, k, v, backend="cuda")
    naive, _ = function(q, k, v, backend="reference")
    exact, exact_lse = function(q.double(), k.double(), v.double(), backend="reference")
    comparison = compare("out", out, naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, comparison
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-4)
