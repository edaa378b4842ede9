"""Special rows of attention's results: with a NaN, outside of all sequences, with nothing to attend to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fasttfm.kernels.attention.problem import AttentionProblem
from fasttfm.ops import attention, attention_weights, cu_seqlens_from_lengths
from fasttfm.ops.core import backends
from fasttfm.testing.pytest_ops import interpreted

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)
# Backend, device, head dim.
EXCEPT_HOPPER = [
    ("cpu", "cpu", 16),
    ("reference", "cpu", 16),
    pytest.param("triton", "cpu", 16, marks=interpreted),
    pytest.param("reference", "cuda", 64, marks=pytest.mark.gpu),
    pytest.param("triton", "cuda", 64, marks=pytest.mark.gpu),
    pytest.param("triton", "cuda", 128, marks=pytest.mark.gpu),
]
BACKENDS = [
    *EXCEPT_HOPPER,
    pytest.param("cuda", "cuda", 64, marks=[pytest.mark.gpu, HOPPER]),
    pytest.param("cuda", "cuda", 128, marks=[pytest.mark.gpu, HOPPER]),
]


def dtype_on(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def int32(*values: int, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---- NaN and infinity ------------------------------------------------------------------------------------------------

INPUTS = ("q", "k", "v", "dout")  # sequence i has its number in the i-th; the last sequence has none
HEAD, COLUMN = 1, 3  # where it is
TOKENS = {"cpu": (30, 37), "cuda": (150, 200)}  # real ones and all
LONG_TOKENS = (600, 700)
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "dropout": {"dropout_p": 0.3},
    "long": {},
    "long, causal": {"causal": True},
}


def reached(name: str, token: int, attended: Tensor) -> dict[str, tuple[Tensor, Any]]:
    """Rows and columns of each result that depend on one element of an input."""
    own = torch.arange(attended.shape[1], device=attended.device) == token
    queries = own if name in ("q", "dout") else attended[:, token]
    keys = attended[queries].any(dim=0)
    every = slice(None)
    results = {"dq": (queries, every), "dk": (keys, every)}
    if name in ("q", "k"):
        results |= {"out": (queries, every), "lse": (queries, every), "dv": (keys, every)}
    elif name == "v":
        results["out"] = (queries, COLUMN)
    else:
        results["dv"] = (keys, COLUMN)
    return results


@pytest.mark.parametrize(("number", "padded"), [(float("nan"), False), (float("nan"), True), (float("inf"), True)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("backend", "device", "head_dim"),
    [*BACKENDS, *(pytest.param("cuda", "cuda", each, marks=[pytest.mark.gpu, HOPPER]) for each in (192, 256))],
)
def test_a_nan_reaches_what_depends_on_it(
    backend: str, device: str, head_dim: int, padded: bool, options: str, number: float
) -> None:
    """It reaches neither other heads, nor other sequences, nor rows past the end of a sequence."""
    if options.startswith("long") and backend != "cuda":
        pytest.skip("where Hopper's kernels change")
    if head_dim > 128 and options in ("window", "dropout"):
        pytest.skip("not supported by Hopper's kernels")
    real, size = LONG_TOKENS if options.startswith("long") else TOKENS[device]
    size = size if padded else real
    token = real // 2
    generator = torch.Generator(device).manual_seed(1)
    inputs = {
        name: torch.rand(5, size, 2, head_dim, generator=generator, device=device).add(0.1).to(dtype_on(device))
        for name in INPUTS
    }
    for sequence, name in enumerate(INPUTS):
        inputs[name][sequence, token, HEAD, COLUMN] = number
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    arguments = dict(OPTIONS[options])
    if padded:
        arguments["lengths"] = int32(*[real] * 5, device=device)
    if options == "dropout":
        arguments["seed"] = torch.tensor([3], device=device)
    out, lse = attention(q, k, v, **arguments, return_lse=True, backend=backend)
    gradients = torch.autograd.grad(out, (q, k, v), inputs["dout"])
    results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    results["lse"] = lse.transpose(1, 2)[..., None]

    i, j = torch.arange(real, device=device)[:, None], torch.arange(real, device=device)
    left, right = OPTIONS[options].get("window", (real, 0 if "causal" in OPTIONS[options] else real))
    attended = (j >= i - left) & (j <= i + right)
    for sequence, name in enumerate(INPUTS):
        for result, (rows, columns) in reached(name, token, attended).items():
            if options == "dropout" and (name in ("v", "dout") or result == "dv"):
                continue  # the weight may be dropped
            if number == float("inf") and result.startswith("d"):
                continue  # as a score it may give weights of 0
            found = results[result][sequence, :real, HEAD][rows][:, columns]
            wrong = found.isfinite() if number == float("inf") else ~found.isnan()
            assert found.numel() > 0
            assert not wrong.any(), f"{name} -> {result}: {int(wrong.sum())} of {found.numel()}"
    for result, tensor in results.items():
        assert tensor[4, :real].isfinite().all(), f"{result}: of another sequence"
        assert tensor[:, :real, 1 - HEAD].isfinite().all(), f"{result}: of another head"
        past = tensor[:, real:]
        if backend == "cuda" and result.startswith("d"):
            past = past[4:]  # the Hopper kernels propagate a NaN of a sequence to gradients past its end
        assert (past == (-torch.inf if result == "lse" else 0.0)).all(), f"{result}: past the end"


# ---- rows outside of all sequences -----------------------------------------------------------------------------------


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors are full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fill_uninitialized_memory needs; it is the default
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


PACKED = {
    "short": ((7, 1, 0, 50), (9, 0, 3, 40)),
    "long": ((7, 70, 0, 5), (9, 66, 3, 4)),
    "longer than 128": ((7, 160), (9, 150)),
    "longer than 512": ((0, 600), (40, 700)),
    "nothing": ((0, 0), (0, 0)),
    "no queries": ((0, 0), (3, 150)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(
    ("backend", "device", "head_dim"),
    [*BACKENDS, *(pytest.param("cuda", "cuda", each, marks=[pytest.mark.gpu, HOPPER]) for each in (80, 96, 192, 256))],
)
def test_every_row_is_written(
    backend: str, device: str, head_dim: int, name: str, causal: bool, poisoned_memory: None
) -> None:
    if name.startswith("longer") and device == "cpu":
        pytest.skip("where the GPU's kernels change")
    chosen = next(b for b in backends.tables()["attention"].backends if b.name == backend)
    lengths, lengths_k = PACKED[name]
    generator = torch.Generator(device).manual_seed(1)

    def computed(after: int, after_k: int) -> list[Tensor]:
        """Results of the same sequences, followed by this many queries and keys of no sequence."""
        generator.manual_seed(1)
        problem = AttentionProblem(
            max_seqlen=max(lengths),
            max_seqlen_k=max(lengths_k),
            scale=head_dim**-0.5,
            window_right=0 if causal else -1,
            cu_seqlens=cu_seqlens_from_lengths(lengths, device=device),
            cu_seqlens_k=cu_seqlens_from_lengths(lengths_k, device=device),
        )

        def randn(rows: int, more: int) -> Tensor:
            real = torch.randn(rows, 2, head_dim, generator=generator, device=device)
            return torch.cat([real, real.new_full((more, 2, head_dim), torch.nan)]).to(dtype_on(device))

        q, dout = randn(sum(lengths), after), randn(sum(lengths), after)
        k, v = randn(sum(lengths_k), after_k), randn(sum(lengths_k), after_k)
        out, lse = chosen.forward(q, k, v, problem)
        gradients = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
        chosen.backward(dout, q, k, v, out, lse, problem, *gradients)
        return [out, lse.t(), *gradients]

    after, after_k = 75, 140
    for result, found, expected in zip(
        ("out", "lse", "dq", "dk", "dv"), computed(after, after_k), computed(0, 0), strict=True
    ):
        real = len(expected)
        assert len(found) == real + (after_k if result in ("dk", "dv") else after)
        assert not expected.isnan().any(), result
        assert torch.equal(found[:real], expected), result
        assert (found[real:] == (-torch.inf if result == "lse" else 0.0)).all(), result


# ---- nothing to attend to --------------------------------------------------------------------------------------------


# The Hopper kernels propagate a NaN of a sequence to the gradients of all its queries.
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("tokens", [(8, 2), (150, 70)])
@pytest.mark.parametrize(
    ("backend", "device", "head_dim"),
    EXCEPT_HOPPER,
)
def test_a_nan_does_not_reach_queries_that_attend_to_nothing(
    backend: str, device: str, head_dim: int, tokens: tuple[int, int], name: str, layout: str
) -> None:
    queries, keys = tokens  # causal attention is aligned at the end: the first queries have no keys
    generator = torch.Generator(device).manual_seed(1)

    def randn(rows: int) -> Tensor:
        return torch.randn(1, rows, 2, head_dim, generator=generator, device=device).to(dtype_on(device))

    q, dout, k, v = randn(queries), randn(queries), randn(keys), randn(keys)
    {"k": k, "v": v}[name][0, 1, 1, 3] = torch.nan
    arguments: dict[str, Any] = {}
    if layout == "packed":
        q, dout, k, v = (tensor[0] for tensor in (q, dout, k, v))
        arguments = {
            "cu_seqlens": int32(0, queries, device=device),
            "cu_seqlens_k": int32(0, keys, device=device),
            "max_seqlen": queries,
            "max_seqlen_k": keys,
        }
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, lse = attention(*leaves, causal=True, return_lse=True, backend=backend, **arguments)
    dq, _, _ = torch.autograd.grad(out, leaves, dout)
    out, dq, lse = out.view(queries, 2, -1), dq.view(queries, 2, -1), lse.view(2, queries)
    empty = queries - keys
    assert (lse[:, :empty] == -torch.inf).all()
    assert not out[:empty].any()
    assert not dq[:empty].any()
    assert out[-1, 1, 3].isnan()
    assert dq[-1, 1].isnan().all()


@pytest.mark.parametrize(
    ("backend", "device", "tokens"),
    [
        ("reference", "cpu", 5),
        pytest.param("triton", "cpu", 5, marks=interpreted),
        pytest.param("reference", "cuda", 70, marks=pytest.mark.gpu),
        pytest.param("triton", "cuda", 70, marks=pytest.mark.gpu),
    ],
)
def test_a_bias_may_exclude_every_key(backend: str, device: str, tokens: int) -> None:
    """Such a query gives 0 and gradients of 0, as with scaled_dot_product_attention, and lse is -inf."""
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = torch.randn(4, 2, tokens, 2, 16, generator=generator, device=device)
    bias = torch.zeros(2, tokens, tokens, device=device)
    bias[:, 2] = -torch.inf
    bias[0, 0, 3] = -torch.inf

    def results(compute: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = compute(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    found = results(lambda q, k, v: attention(q, k, v, bias=bias, backend=backend))
    expected = results(
        lambda *x: scaled_dot_product_attention(*(t.transpose(1, 2) for t in x), attn_mask=bias).transpose(1, 2)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not found[0][:, 2].any()
    assert not found[1][:, 2].any()
    _, lse = attention(q, k, v, bias=bias, backend=backend, return_lse=True)
    assert (lse[:, :, 2] == -torch.inf).all()
    assert lse[:, :, [0, 1, 3, 4]].isfinite().all()
    if backend == "reference":
        assert not attention_weights(q, k, bias=bias)[:, :, 2].any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_empty_tensors_may_have_any_strides(backend: str) -> None:
    """torch calls them contiguous and copies them with their strides."""
    q = torch.empty(2, 0, 2, 32)[..., ::2].requires_grad_()
    out = attention(q, q, q, backend=backend)
    (dq,) = torch.autograd.grad(out, q, out)
    assert out.shape == dq.shape == (2, 0, 2, 16)
