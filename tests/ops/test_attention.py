from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import fasttfm
from fasttfm.kernels.attention import reference
from fasttfm.kernels.common import philox
from fasttfm.ops import attention, attention_weights, cu_seqlens_from_lengths, qkv_projection
from fasttfm.ops.core import backends
from fasttfm.ops.core.backends import BackendRefused
from fasttfm.testing.harness import draw_inputs, run, same_bits, with_backend
from fasttfm.testing.pytest_ops import interpreted, op_tests
from fasttfm.testing.saved import saved_bytes
from fasttfm.testing.specs.attention import SPEC
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

TestAttention = op_tests(SPEC)

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)
BACKENDS = [
    ("cpu", "cpu"),
    ("reference", "cpu"),
    pytest.param("triton", "cpu", marks=interpreted),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=[pytest.mark.gpu, HOPPER]),
]
GPU_BACKENDS = ["triton", pytest.param("cuda", marks=HOPPER)]
LENGTHS = (7, 1, 0, 70)
CASES = {case.name: case for case in SPEC.cases}


def randn_for(backend: str, device: str, *shape: int) -> Tensor:
    """With a type and a head dim that the backend supports: "cuda" has no fp32 and few head dims."""
    if backend == "cuda":
        return torch.randn(*shape[:-1], 64, dtype=torch.bfloat16, device=device)
    return torch.randn(*shape, device=device)


def seed_of(number: int, device: str = "cpu") -> Tensor:
    return torch.tensor([number], device=device)


def int32(values: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def present(lengths: tuple[int, ...], longest: int, device: str = "cpu") -> Tensor:
    """[sequences, longest]: which tokens of a padded batch are real."""
    return torch.arange(longest, device=device) < int32(lengths, device)[:, None]


def with_gradients(function: Callable[..., Any], inputs: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    """The output of ``function`` and the gradients of its inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    return (out, *torch.autograd.grad(out, leaves, dout))


# ---- against torch ---------------------------------------------------------------------------------------------------


def allowed(queries: int, keys: int, left: int | None, right: int | None) -> Tensor:
    """The mask, query by query, as documented."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for i in range(queries):
        position = i + keys - queries
        for j in range(keys):
            mask[i, j] = (left is None or j >= position - left) and (right is None or j <= position + right)
    return mask


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (1, 7)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 1), (0, None), (-1, 2), (3, -1)])
def test_masks_are_those_of_torch(queries: int, keys: int, causal: bool, window: Any) -> None:
    q, k, v = (torch.randn(2, tokens, 4, 16, dtype=torch.float64) for tokens in (queries, keys, keys))
    left, right = (None if side in (None, -1) else side for side in (window or (None, None)))
    mask = allowed(queries, keys, left, 0 if causal else right)

    def composed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    dout = torch.randn_like(q)
    expected = with_gradients(composed, (q, k, v), dout)
    for found, wanted in zip(
        with_gradients(partial(attention, causal=causal, window=window), (q, k, v), dout), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_grouped_heads_are_those_of_torch() -> None:
    q, k, v = (torch.randn(2, 5, heads, 16, dtype=torch.float64) for heads in (6, 2, 2))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(q, k, v), expected)


def test_bias_and_slopes_are_added_to_the_scaled_scores() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 16, dtype=torch.float64)
    bias, slopes = torch.randn(4, 5, 5, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    for added, options in ((bias, {"bias": bias}), (-slopes[:, None, None] * distance, {"alibi_slopes": slopes})):
        expected = scaled_dot_product_attention(*heads_first, attn_mask=added, scale=0.3).transpose(1, 2)
        torch.testing.assert_close(attention(q, k, v, scale=0.3, **options), expected)


def one_key_bound(dout: Tensor, v: Tensor) -> Tensor:
    """Where a query has one key, its score's gradient dP - delta is 0 except for the rounding of two sums over D."""
    return 4 * torch.finfo(torch.float32).eps * dout.abs().max() * v.abs().sum(-1).max()


@pytest.mark.parametrize("seed", range(20))
def test_random_packed_batches(seed: int) -> None:
    """Packed sequences of random lengths, each against the reference on that sequence, by the tolerance rule."""
    random = Random(seed)
    lengths = [random.choice([0, 1, random.randint(2, 40)]) for _ in range(random.randint(1, 6))]
    lengths_k = [length + random.choice([0, random.randint(1, 40)]) for length in lengths]
    head_dim, causal, p = random.choice([16, 24, 64]), random.choice([False, True]), random.choice([0.0, 0.3])
    window = random.choice([None, (0, 0), (5, None), (None, 3), (9, 4)])
    starts, starts_k = cu_seqlens_from_lengths(lengths), cu_seqlens_from_lengths(lengths_k)
    generator = torch.Generator().manual_seed(seed)
    # Many heads: the rule compares largest errors, which vary too much over few elements.
    q, dout = torch.randn(2, sum(lengths), 16, head_dim, generator=generator)
    k, v = torch.randn(2, sum(lengths_k), 8, head_dim, generator=generator)
    options = {"causal": causal, "window": window, "dropout_p": p, "seed": seed_of(5)}
    packed = {"cu_seqlens": starts, "cu_seqlens_k": starts_k}

    def through(function: Callable[..., Any], dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = tuple(x.to(dtype) for x in (q, k, v))
        return with_gradients(partial(function, **packed, **options), inputs, dout.to(dtype))

    found = through(attention, torch.float32)
    naive, exact = (through(reference.attention, dtype) for dtype in (torch.float32, torch.float64))
    for name, out, plain, truth in zip(("out", "dq", "dk", "dv"), found, naive, exact, strict=True):
        if name in ("dq", "dk") and q.numel() > 0 and not truth.any():  # every query has at most one key
            bound = one_key_bound(dout, v) * (k if name == "dq" else q).abs().max() / (1 - p)
            assert out.abs().max() <= bound, name
            continue
        comparison = compare(name, out, plain, truth, OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR)
        assert comparison.ok, comparison


# ---- dropout ---------------------------------------------------------------------------------------------------------


def kept_weights(lengths: tuple[int, ...], heads: int, keys: int, p: float, seed: Tensor) -> Tensor:
    """bool [tokens, heads, keys] of packed sequences."""
    sequences, tokens = philox.row_positions(torch.Size([sum(lengths), 1]), cu_seqlens_from_lengths(lengths), "cpu")
    numbers = torch.arange(heads)
    return philox.kept_weights(seed.cpu(), sequences[:, None], numbers, tokens[:, None], keys, philox.threshold(p))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("p", [1 / 256, 0.1, 0.7])
def test_every_backend_draws_the_same_mask(backend: str, device: str, p: float) -> None:
    """With equal scores and unit vectors as values, the output is the row of weights after dropout."""
    lengths, keys, heads, head_dim = (5, 0, 1, 67), 131, 2, 136
    dtype, seed = torch.float32, seed_of(-(2**62) - 12345, device)
    if backend == "cuda":
        head_dim, dtype = 128, torch.bfloat16
    starts = {
        "cu_seqlens": cu_seqlens_from_lengths(lengths, device=device),
        "cu_seqlens_k": torch.arange(0, keys * len(lengths) + 1, keys, dtype=torch.int32, device=device),
    }
    q = torch.zeros(sum(lengths), heads, head_dim, dtype=dtype, device=device)
    k = torch.randn(keys * len(lengths), heads, head_dim, device=device).to(dtype)
    kept = kept_weights(lengths, heads, keys, p, seed)
    weight = philox.scale(philox.threshold(p)) / keys
    for first in {0, max(keys - head_dim, 0)}:  # of the keys that the head has room to show
        units = torch.eye(keys, head_dim + first, dtype=dtype, device=device)[:, first:]
        v = units.repeat(len(lengths), 1)[:, None].repeat(1, heads, 1)
        out = attention(q, k, v, dropout_p=p, seed=seed, backend=backend, **starts, max_seqlen=67, max_seqlen_k=keys)
        shown = kept[..., first : first + head_dim]
        found = out[..., : shown.shape[-1]].cpu()
        assert torch.equal(found != 0, shown)
        torch.testing.assert_close(found, (shown * weight).to(dtype))


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_backward_drops_what_forward_dropped(backend: str, device: str) -> None:
    """With equal scores and unit vectors as dout, dv is the column of weights after dropout."""
    tokens, heads, p = 60 if backend == "cuda" else 70, 2, 0.3
    v = randn_for(backend, device, 1, tokens, heads, 72).requires_grad_()
    q = torch.zeros_like(v)
    dout = torch.eye(tokens, v.shape[-1], dtype=v.dtype, device=device)[None, :, None].expand(-1, -1, heads, -1)
    out = attention(q, q, v, dropout_p=p, seed=seed_of(3, device), backend=backend)
    (dv,) = torch.autograd.grad(out, v, dout)
    kept = kept_weights((tokens,), heads, tokens, p, seed_of(3)).permute(2, 1, 0)  # [keys, heads, queries]
    assert torch.equal((dv != 0)[0, ..., :tokens].cpu(), kept)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("causal", "head_dim"), [(False, 64), (True, 24)])
def test_packed_and_padded_batches_give_the_same_bits(backend: str, device: str, causal: bool, head_dim: int) -> None:
    longest = max(LENGTHS) + 3
    real = present(LENGTHS, longest, device)
    kv_heads = 2 if backend == "cuda" else 1  # another backend would run the backward of grouped heads
    padded = tuple(
        randn_for(backend, device, len(LENGTHS), longest, heads, head_dim) for heads in (2, kv_heads, kv_heads)
    )
    dout = torch.randn_like(padded[0])
    options = {"causal": causal, "dropout_p": 0.4, "seed": seed_of(9, device), "backend": backend}
    function = partial(attention, lengths=int32(LENGTHS, device), **options)
    expected = with_gradients(function, padded, dout)
    starts = cu_seqlens_from_lengths(LENGTHS, device=device)
    function = partial(attention, cu_seqlens=starts, max_seqlen=longest, **options)
    found = with_gradients(function, tuple(x[real] for x in padded), dout[real])
    for packed, whole in zip(found, expected, strict=True):
        assert same_bits(packed, whole[real])
        assert torch.equal(whole[~real], torch.zeros_like(whole[~real]))


def test_manual_seed_reproduces() -> None:
    q, k, v = torch.randn(3, 2, 9, 2, 16)

    def both(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack([attention(q, k, v, dropout_p=0.5) for _ in range(2)])

    first = both(1)
    assert torch.equal(first, both(1))
    assert not torch.equal(first, both(2))
    assert not torch.equal(first[0], first[1])


def test_evaluation_draws_no_random_numbers() -> None:
    q, k, v = torch.randn(3, 2, 9, 2, 16)
    state = torch.get_rng_state()
    attention(q, k, v)
    attention(q, k, v, dropout_p=0.5, seed=seed_of(1))
    assert torch.equal(state, torch.get_rng_state())


def test_checkpointed_gradients_are_the_same() -> None:
    inputs, dout = tuple(torch.randn(3, 2, 20, 2, 16).unbind()), torch.randn(2, 20, 2, 16)
    block = partial(attention, dropout_p=0.3, causal=True)
    torch.manual_seed(3)
    plain = with_gradients(block, inputs, dout)
    torch.manual_seed(3)
    again = with_gradients(lambda *qkv: checkpoint(block, *qkv, use_reentrant=False), inputs, dout)
    for one, other in zip(plain, again, strict=True):
        assert same_bits(one, other)


# ---- layouts and edges -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_one_qkv_tensor_gives_the_bits_of_three(backend: str, device: str) -> None:
    qkv, dout = randn_for(backend, device, 2, 13, 3, 2, 24), randn_for(backend, device, 2, 13, 2, 24)
    function = partial(attention, causal=True, backend=backend)
    out, *gradients = with_gradients(function, tuple(x.contiguous() for x in qkv.unbind(2)), dout)
    fused_out, dqkv = with_gradients(function, (qkv,), dout)
    assert same_bits(out, fused_out)
    assert same_bits(torch.stack(gradients, dim=2), dqkv)


def test_the_output_of_the_projection_is_not_copied() -> None:
    """The projection's output is the input, and the gradient is one tensor of its shape."""
    x, weight = torch.randn(11, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
    starts = cu_seqlens_from_lengths([4, 7])
    qkv = qkv_projection(x, weight, None, 2)
    assert saved_bytes(lambda: attention(qkv, cu_seqlens=starts)) == qkv.nbytes + 11 * 32 * 4 + 11 * 2 * 4 + 12
    out = attention(qkv, cu_seqlens=starts)
    (dqkv,) = torch.autograd.grad(out.sum(), qkv, retain_graph=True)
    assert dqkv.shape == qkv.shape
    assert dqkv.is_contiguous()
    out.square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_rows_without_a_key_are_zero(backend: str, device: str) -> None:
    q, k, v, dout = (randn_for(backend, device, 2, tokens, 2, 16) for tokens in (9, 4, 4, 9))
    options = {"causal": True, "lengths_k": int32((4, 0), device), "backend": backend}
    q.requires_grad_()
    out, lse = attention(q, k, v, return_lse=True, **options)
    (dq,) = torch.autograd.grad(out, q, dout)
    empty = torch.ones(2, 9, dtype=torch.bool, device=device)
    empty[0, 5:] = False
    assert torch.equal(lse == -torch.inf, empty[:, None].expand(-1, 2, -1))
    assert torch.equal((out == 0).all(dim=(2, 3)), empty)
    assert torch.equal(dq[empty], torch.zeros_like(dq[empty]))
    assert (dq[0, 6:] != 0).any(dim=2).all()  # query 5 has one key, and so no gradient


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_one_token_attends_to_itself(backend: str, device: str) -> None:
    q, k, v, dout = randn_for(backend, device, 4, 3, 1, 2, 16)
    out, dq, dk, dv = with_gradients(partial(attention, causal=True, backend=backend), (q, k, v), dout)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(dv, dout)
    bound = one_key_bound(dout, v)
    assert dq.abs().max() <= bound * k.abs().max()
    assert dk.abs().max() <= bound * q.abs().max()


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_nothing_leaks_from_beyond_a_sequence(backend: str, device: str) -> None:
    """NaN in padding and in other sequences of a packed batch changes no bit of a result."""
    lengths, longest = (5, 0, 37), 40
    real = present(lengths, longest, device)
    clean = randn_for(backend, device, 4, len(lengths), longest, 2, 16)
    dirty = torch.where(real[:, :, None, None], clean, torch.nan)
    function = partial(attention, dropout_p=0.2, seed=seed_of(4, device), causal=True, backend=backend)
    padded = partial(function, lengths=int32(lengths, device))
    for expected, found in zip(
        with_gradients(padded, tuple(clean[:3]), clean[3]),
        with_gradients(padded, tuple(dirty[:3]), dirty[3]),
        strict=True,
    ):
        assert same_bits(expected, found)

    packed = partial(function, cu_seqlens=cu_seqlens_from_lengths(lengths, device=device), max_seqlen=longest)
    rows = clean[:, real]
    expected = with_gradients(packed, tuple(rows[:3]), rows[3])
    rows[:, 5:] = torch.nan
    for whole, spoiled in zip(expected, with_gradients(packed, tuple(rows[:3]), rows[3]), strict=True):
        assert same_bits(whole[:5], spoiled[:5])


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_gradients_may_come_in_any_layout(backend: str, device: str) -> None:
    inputs, function = tuple(randn_for(backend, device, 3, 2, 9, 2, 16)), partial(attention, backend=backend)
    ones = torch.ones_like(inputs[0])
    for view in (ones[:1, :1, :1, :1].expand_as(ones), ones.transpose(1, 2).contiguous().transpose(1, 2)):
        for found, expected in zip(
            with_gradients(function, inputs, view), with_gradients(function, inputs, ones), strict=True
        ):
            assert same_bits(found, expected)


@pytest.mark.parametrize(("backend", "device"), BACKENDS[1:-1])
def test_a_bias_may_come_in_any_layout(backend: str, device: str) -> None:
    q, k, v = torch.randn(3, 2, 9, 2, 16, device=device)
    bias, slopes = torch.randn(2, 9, 9, device=device), torch.rand(2, 2, device=device)
    expected = attention(q, k, v, bias=bias, alibi_slopes=slopes[:, 0].clone(), backend=backend)
    options = {"bias": bias.mT.contiguous().mT, "alibi_slopes": slopes[:, 0], "backend": backend}
    assert same_bits(attention(q, k, v, **options), expected)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_single_gradient(wanted: int) -> None:
    inputs, dout = torch.randn(3, 2, 9, 2, 16).unbind(), torch.randn(2, 9, 2, 16)
    expected = with_gradients(attention, inputs, dout)[1 + wanted]
    leaves = [x.clone().requires_grad_(index == wanted) for index, x in enumerate(inputs)]
    (found,) = torch.autograd.grad(attention(*leaves), leaves[wanted], dout)
    assert same_bits(found, expected)


def test_what_the_cpu_backend_does_not_support() -> None:
    q, k, v = torch.randn(3, 2, 9, 2, 20)
    assert fasttfm.explain("attention", q, k, v).chosen == "reference"
    with pytest.raises(BackendRefused, match="cpu: takes head dims of 16 to 256 in steps of 8, got 20"):
        attention(q, k, v, backend="cpu")
    q, k, v = torch.randn(3, 2, 9, 2, 16)
    with pytest.raises(BackendRefused, match="cpu: takes no bias"):
        attention(q, k, v, bias=torch.zeros(2, 9, 9), backend="cpu")
    with pytest.raises(BackendRefused, match="cpu: takes no alibi_slopes"):
        attention(q, k, v, alibi_slopes=torch.zeros(2), backend="cpu")


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("takes bfloat16 and float16, got float32", {"q": torch.randn(2, 9, 2, 64)}),
        ("takes head dims of 32, 64, 80, 96, 128, 192 and 256, got 72", {"q": torch.randn(2, 9, 2, 72).bfloat16()}),
        (
            "takes dropout with head dims of 64 and 128, got 80",
            {"q": torch.randn(2, 9, 2, 80).bfloat16(), "dropout_p": 0.1},
        ),
        (
            "takes dropout with head dims of 64 and 128, got 256",
            {"q": torch.randn(2, 9, 2, 256).bfloat16(), "dropout_p": 0.1},
        ),
        (
            "takes windows with head dims of 64 and 128, got 192",
            {"q": torch.randn(2, 9, 2, 192).bfloat16(), "window": (5, 5)},
        ),
        (
            "takes windows with head dims of 64 and 128, got 32",
            {"q": torch.randn(2, 9, 2, 32).bfloat16(), "window": (5, 5)},
        ),
        ("got a window of (5, -1) and dropout_p 0.1", {"window": (5, None), "dropout_p": 0.1}),
        ("got a window of (3, 0) and dropout_p 0.1", {"window": (3, None), "causal": True, "dropout_p": 0.1}),
        ("takes a scale above 0, got -1.0", {"scale": -1.0}),
        (
            "got strides (1152, 128, 64, 1)",
            {"k": torch.zeros(1153 * 2, dtype=torch.bfloat16)[1:2305].view(2, 9, 2, 64)},
        ),
        ("got strides (1170, 130, 65, 1)", {"k": torch.randn(2, 9, 2, 65).bfloat16()[..., :64]}),
        ("got strides (576, 64, 0, 1)", {"v": torch.randn(2, 9, 1, 64).bfloat16().expand(2, 9, 2, 64)}),
        ("takes tensors on a GPU of compute capability 9.0", {}),
    ],
)
def test_what_the_hopper_kernels_do_not_support(said: str, change: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 2, 9, 2, 64, dtype=torch.bfloat16)
    (hopper,) = (backend for backend in backends.tables()["attention"].backends if backend.name == "cuda")
    reason = hopper.refuse(**{"q": q, "k": k, "v": v, **change})
    assert reason is not None
    assert reason.endswith(said)


def test_autocast_narrows_as_it_does_for_torchs_attention() -> None:
    q, k, v = torch.randn(3, 2, 9, 2, 16).unbind()
    q.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v)
        assert out.dtype == scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert same_bits(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


# ---- what training needs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_saved_for_backward(p: float) -> None:
    """q, k, v, out, lse, the boundaries, and the seed of dropout; no weights and no mask."""
    tokens, heads, head_dim = 40, 2, 16
    q, k, v = (torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    starts = cu_seqlens_from_lengths([30, 10])
    found = saved_bytes(lambda: attention(q, k, v, cu_seqlens=starts, dropout_p=p))
    assert found == 4 * q.nbytes + 4 * heads * tokens + starts.nbytes + (8 if p else 0)


def test_changing_lengths_compile_once() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def step(qkv: Tensor, starts: Tensor, longest: int) -> Tensor:
        return attention(qkv, cu_seqlens=starts, max_seqlen=longest, dropout_p=0.1, causal=True) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counting)
    for lengths in ((5, 9, 6), (30, 4), (8, 8, 8, 8, 1), (64, 17)):
        qkv = torch.randn(sum(lengths), 3, 2, 16, requires_grad=True)
        out = compiled(qkv, cu_seqlens_from_lengths(lengths), max(lengths))
        out.sum().backward()
        assert qkv.grad is not None
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("case", ["typical", "long_packed", "long_causal", "long_128"])
def test_a_thousand_runs_give_the_same_bits(case: str, backend: str) -> None:
    inputs = draw_inputs(SPEC, CASES[case], torch.bfloat16, "cuda")
    function = with_backend(SPEC, backend)
    first = run(SPEC, function, inputs, CASES[case].options).tensors()
    for _ in range(1000):
        for name, tensor in run(SPEC, function, inputs, CASES[case].options).tensors().items():
            assert same_bits(tensor, first[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_cuda_graph_follows_new_lengths(backend: str) -> None:
    """A graph that is captured with a bound on the lengths works for any boundaries, and each replay draws a new
    seed."""
    tokens, longest = 300, 128
    qkv = torch.randn(tokens, 3, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    dout = torch.randn(tokens, 4, 64, dtype=torch.bfloat16, device="cuda")
    batches = [(100, 100, 100, 0), (128, 44, 0, 128), (0, 127, 128, 45), (60, 120, 60, 60)]
    starts = cu_seqlens_from_lengths(batches[0], device="cuda")
    function = partial(attention, cu_seqlens=starts, max_seqlen=longest, backend=backend)
    with torch.cuda.stream(torch.cuda.Stream()):
        with_gradients(function, (qkv,), dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_gradients(function, (qkv,), dout)
        dropped = function(qkv, dropout_p=0.5)
    previous = None
    for lengths in batches:
        assert sum(lengths) == tokens
        assert max(lengths) <= longest  # rows past the bound have no result
        starts.copy_(cu_seqlens_from_lengths(lengths))
        graph.replay()
        for found, expected in zip(captured, with_gradients(function, (qkv,), dout), strict=True):
            assert same_bits(found, expected)
        assert previous is None or not torch.equal(previous, dropped)
        previous = dropped.clone()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("values", [(0, 10**6, 30), (-(10**6), 5, 30), (20, 10, 30), (0, 31, 2**31 - 1)])
def test_wrong_boundaries_access_nothing_outside_of_the_tensors(values: tuple[int, ...], backend: str) -> None:
    """Values are not validated on the GPU; whatever they are, nothing outside of the tensors is accessed."""
    q, k, v, dout = torch.randn(4, 30, 2, 64, device="cuda", dtype=torch.bfloat16)
    function = partial(attention, cu_seqlens=int32(values, "cuda"), max_seqlen=64, backend=backend)
    with_gradients(function, (q, k, v), dout)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.large_memory
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_more_than_two_to_the_31_elements(backend: str) -> None:
    """Row offsets are 64-bit: the last sequence of a tensor of 2.15 billion elements is correct."""
    sequences, length = 21_000, 100
    shape = (sequences * length, 16, 64)
    q, k, v, dout = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    for tensor in (q, k, v, dout):
        tensor[-length:].normal_()
    starts = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device="cuda")
    function = partial(attention, cu_seqlens=starts, max_seqlen=length, backend=backend)
    found = with_gradients(function, (q, k, v), dout)

    def last(dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = tuple(x[None, -length:].to(dtype) for x in (q, k, v))
        return with_gradients(reference.attention, inputs, dout[None, -length:].to(dtype))

    for out, naive, exact in zip(found, last(torch.bfloat16), last(torch.float64), strict=True):
        assert compare("result", out[None, -length:], naive, exact, GRADIENT_FACTOR).ok


# ---- attention_weights -----------------------------------------------------------------------------------------------


def test_weights_are_what_attention_sums_values_with() -> None:
    q, k, v = (torch.randn(2, tokens, heads, 16, dtype=torch.float64) for tokens, heads in ((5, 4), (8, 2), (8, 2)))
    options = {"causal": True, "window": (4, None), "lengths": int32((5, 3)), "lengths_k": int32((8, 2)), "scale": 0.5}
    weights = attention_weights(q, k, **options)
    assert weights.shape == (2, 4, 5, 8)
    values = v.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", weights, values), attention(q, k, v, **options))
    sums = weights.sum(dim=-1)
    assert torch.equal(sums.round(), (sums > 0).double())


def test_weights_of_packed_sequences_are_padded() -> None:
    q, k = torch.randn(2, sum(LENGTHS), 2, 16)
    starts, longest = cu_seqlens_from_lengths(LENGTHS), max(LENGTHS)
    weights = attention_weights(q, k, cu_seqlens=starts, max_seqlen=longest, alibi_slopes=torch.tensor([0.5, 0.25]))
    assert weights.shape == (len(LENGTHS), 2, longest, longest)
    real = present(LENGTHS, longest)
    assert torch.equal(weights != 0, (real[:, :, None] & real[:, None, :])[:, None].expand_as(weights))
    alone = attention_weights(q[None, :7], k[None, :7], alibi_slopes=torch.tensor([0.5, 0.25]))
    torch.testing.assert_close(weights[:1, :, :7, :7], alone)


def test_weights_have_gradients_and_keep_their_precision() -> None:
    q, k = torch.randn(2, 1, 4, 2, 16, dtype=torch.float64).unbind()
    assert torch.autograd.gradcheck(
        partial(attention_weights, causal=True), (q.requires_grad_(), k.requires_grad_()), fast_mode=True
    )
    assert attention_weights(q.detach().bfloat16(), k.detach().bfloat16()).dtype == torch.float32


def test_weights_refuse_what_attention_refuses() -> None:
    q, k = torch.randn(2, 1, 4, 2, 16)
    with pytest.raises(ValueError, match="attention_weights: lengths: expected lengths in"):
        attention_weights(q, k, lengths=int32((5,)))
    with pytest.raises(TypeError, match="attention_weights: window: expected"):
        attention_weights(q, k, window=3)
    with pytest.raises(TypeError, match="attention_weights: k: expected a tensor"):
        attention_weights(q, None)
