"""Limits of attention: large bounds, kernels that do not fit on the GPU, meta tensors."""

from __future__ import annotations

import importlib
import itertools
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.attention.problem import AttentionProblem
from fasttfm.ops import attention, attention_weights, cu_seqlens_from_lengths
from fasttfm.ops.attention import backward_op, qkv_backward_op
from fasttfm.ops.core import backends, checks
from fasttfm.ops.core.backends import BackendRefused
from fasttfm.testing.pytest_ops import interpreted
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)
HUGE = 2**60

# ---- bounds ----------------------------------------------------------------------------------------------------------


def gradients(backend: str, device: str, **options: Any) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    dtype, head_dim = (torch.float32, 16) if device == "cpu" else (torch.bfloat16, 64)
    q, k, v, dout = torch.randn(4, 9, 2, head_dim, generator=generator, device=device).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    starts = cu_seqlens_from_lengths((4, 5), device=device)
    out = attention(*leaves, cu_seqlens=starts, backend=backend, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("options", [{"max_seqlen": HUGE}, {"window": (HUGE, HUGE)}, {"window": (2**31 - 1,) * 2}])
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("cpu", "cpu"),
        ("reference", "cpu"),
        pytest.param("triton", "cpu", marks=interpreted),
        pytest.param("triton", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda", "cuda", marks=[pytest.mark.gpu, HOPPER]),
    ],
)
def test_bounds_above_the_tokens_change_nothing(backend: str, device: str, options: dict[str, Any]) -> None:
    for found, expected in zip(gradients(backend, device, **options), gradients(backend, device), strict=True):
        torch.testing.assert_close(found, expected)


LIMITED = [
    ("reference", "cpu"),
    pytest.param("triton", "cpu", marks=interpreted),
    pytest.param("triton", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=[pytest.mark.gpu, HOPPER]),
]


@pytest.mark.parametrize(("lengths", "longest"), [((150, 96), 96), ((40, 20), 20)])  # kernels for long and short ones
@pytest.mark.parametrize(("backend", "device"), LIMITED)
def test_a_sequence_ends_at_max_seqlen(
    backend: str, device: str, lengths: tuple[int, int], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows beyond it have no result, and no other row depends on them. Memory that nothing wrote is NaN."""
    dtype, head_dim = (torch.float32, 16) if device == "cpu" else (torch.bfloat16, 64)
    tokens = sum(lengths)
    monkeypatch.setattr(checks, "check_cu_seqlens_values", lambda *_, **__: None)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, tokens, 2, head_dim, generator=generator).to(device, dtype)
    inside = torch.ones(tokens, dtype=torch.bool)
    inside[longest : lengths[0]] = False
    dout[~inside] = 0
    starts = cu_seqlens_from_lengths(lengths, device=device)

    def run(name: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, cu_seqlens=starts, max_seqlen=longest, backend=name)
        if device == "cuda":  # what the backward allocates
            freed = [torch.full((size,), torch.nan, device=device) for size in (1 << 12, 1 << 14, 1 << 16, 5000, 3000)]
            del freed
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    factors = (OUTPUT_FACTOR, *[GRADIENT_FACTOR] * 3)
    results = (run(backend, dtype), run("reference", dtype), run("reference", torch.float64))
    for name, factor, *tensors in zip(("out", "dq", "dk", "dv"), factors, *results, strict=True):
        comparison = compare(name, *(tensor[inside] for tensor in tensors), factor)
        assert comparison.ok, comparison


@pytest.mark.parametrize(
    ("dtype", "queries", "head_dim"),
    [(torch.float32, 64, 64), (torch.bfloat16, 64, 48), (torch.float32, 63, 64), (torch.float32, 256, 64)],
)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_queries_without_keys(device: str, dtype: torch.dtype, queries: int, head_dim: int) -> None:
    dtype = torch.float32 if device == "cpu" else dtype
    q = torch.randn(2, queries, 2, head_dim, device=device, dtype=dtype)
    kv = torch.empty(2, 0, 2, head_dim, device=device, dtype=dtype)
    out, lse = attention(q, kv, kv, return_lse=True, backend="triton")
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


# ---- rows that are far apart -----------------------------------------------------------------------------------------


def test_strides_with_offsets_of_64_bits() -> None:
    pytest.importorskip("triton")
    from fasttfm.kernels.attention.triton import _strides

    def wide(stride: int, heads: int = 1) -> bool:
        tensor = torch.empty(0, device="meta").as_strided((1, 64, heads, 16), (16, stride, 16, 1))
        return bool(_strides({"q": tensor, "k": tensor})["WIDE"])

    assert not wide(16)
    assert not wide(2**24 - 16)
    assert wide(2**24)
    assert wide(2**24 + 1)
    assert wide(16, heads=2**20)  # the rows of out


@interpreted
@pytest.mark.parametrize("longest", [40, 200])
def test_offsets_of_64_bits_change_nothing(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fasttfm.kernels.attention import triton as launchers

    qkv = torch.randn(2, longest, 3, 2, 16, requires_grad=True)

    def results() -> list[Tensor]:
        out = attention(qkv, causal=True, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, qkv, torch.ones_like(out))]

    expected, strides = results(), launchers._strides
    monkeypatch.setattr(launchers, "_strides", lambda tensors: {**strides(tensors), "WIDE": True})
    for found, wanted in zip(results(), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.large_memory
def test_a_tile_that_spans_two_to_the_31_elements() -> None:
    stride = 2**31 // 63 // 16 * 16 + 64  # as q of [64, B, H, D] with B * H * D = 34 million
    memory = torch.zeros(63 * stride + 4096, dtype=torch.float16, device="cuda")
    q = memory.as_strided((1, 64, 1, 16), (16, stride, 16, 1))
    q.copy_(torch.randn(1, 64, 1, 16, device="cuda"))
    k, v = torch.randn(2, 1, 64, 1, 16, device="cuda", dtype=torch.float16)
    assert torch.equal(attention(q, k, v, backend="triton"), attention(q.contiguous(), k, v, backend="triton"))


# few_rows_layers_workspace is 0 for all but two sizes of layers (tests/ops/layers/test_few_rows_layers.py), and those
# of layers read a plan at an address (tests/ops/layers/test_stack.py).
OTHERS = ("few_rows_layers_workspace", "layers_workspace_cpu", "layers_workspace_cuda")
WORKSPACES = sorted(
    name for name in dir(_native.core()) if ("workspace" in name or "column_parts" in name) and name not in OTHERS
)
_NUMBERS = (1, 128, 2**20, 2**31, 2**40, HUGE, 2**63 - 1)
_TENSORS = tuple(torch.zeros(1, 1, 1, 8).expand(1, tokens, 1, 8) for tokens in (1, 128, 2**31, 2**59))  # rows of 8


@pytest.mark.parametrize("name", WORKSPACES)
def test_workspace_sizes_do_not_overflow(name: str) -> None:
    """For any arguments: a positive size that is large enough, or an error."""
    function = getattr(_native.core(), name)
    types = re.findall(r": ([^,)]*)", function.__doc__.partition("->")[0])
    choices = [_TENSORS if "Tensor" in type else _NUMBERS for type in types]
    for arguments in itertools.product(*choices):
        try:
            size = function(*arguments)
        except ValueError:
            continue
        assert max([0, *(number for number in arguments if isinstance(number, int))]) <= 2**40
        assert 0 < size < 2**63 - 1
    for negative, type in enumerate(types):
        if "Tensor" not in type:
            with pytest.raises(ValueError, match=f"{name}: .* expected a number in"):
                function(*(-1 if index == negative else given[0] for index, given in enumerate(choices)))


# ---- kernels whose blocks wait for each other ------------------------------------------------------------------------


def test_a_kernel_that_does_not_fit_leaves_the_call_to_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error only if the backend was requested by name."""
    table = backends.tables()["attention"]

    def too_large(*_: Any, **__: Any) -> None:
        raise _native.DoesNotFit("too many blocks in cooperative launch")

    first, *others = table.backends
    monkeypatch.setitem(vars(table), "backends", (replace(first, backward=too_large), *others))

    def dqkv(backend: str | None) -> Tensor:
        qkv = torch.linspace(-1, 1, 2 * 5 * 3 * 2 * 16).view(2, 5, 3, 2, 16).requires_grad_()
        out = attention(qkv, backend=backend)
        (found,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
        return found

    torch.testing.assert_close(dqkv(None), dqkv("reference"))
    with pytest.raises(BackendRefused, match="'cpu' does not support the backward of this call: too many blocks"):
        dqkv("cpu")
    qkv = torch.randn(2, 5, 3, 2, 16)
    out, lse = attention(qkv, return_lse=True)
    options = (None,) * 7 + (5, 5, -1, -1, 0.25, 0.0, None)
    found, sums = qkv_backward_op(torch.ones_like(out), qkv, out, lse, torch.float32, *options)
    torch.testing.assert_close(sums, found.flatten(-3).sum((0, 1)))


NO_GREEN_CONTEXT = 77  # the exit code that says so


def backward_in_a_green_context(head_dim: int) -> None:
    """The blocks of a cooperative launch do not fit on few SMs: the backward is that of Triton, to the bit."""
    q, k, v, dout = torch.randn(4, 1, 4096, 12, head_dim, dtype=torch.bfloat16, device="cuda")
    assert backends.explain("attention", q, k, v).backward == "cuda"
    out, lse = attention(q, k, v, return_lse=True)
    problem = AttentionProblem(max_seqlen=4096, max_seqlen_k=4096, scale=head_dim**-0.5)
    arguments = (dout, q, k, v, out, lse, *problem)
    (triton,) = (backend for backend in backends.tables()["attention"].backends if backend.name == "triton")
    expected = [torch.empty_like(x) for x in (q, k, v)]
    triton.backward(dout, q, k, v, out, lse, problem, *expected)
    try:
        contexts = importlib.import_module("torch.cuda.green_contexts")
        context = contexts.GreenContext.create(num_sms=16, device_id=0)  # destroyed with its last reference
        stream = context.Stream()
    except (ImportError, AttributeError, RuntimeError) as error:
        print(f"no green context here: {error}")
        sys.exit(NO_GREEN_CONTEXT)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        found = backward_op(*arguments, None)
        with pytest.raises(BackendRefused, match="cooperative launch"):
            backward_op(*arguments, "cuda")
    torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    torch.zeros(1, device="cuda").add_(1)  # the refused launch left no error
    torch.cuda.synchronize()
    del context  # it outlives all that uses its stream


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_backward_in_a_green_context(head_dim: int) -> None:
    """In a separate process, so that no other test gets memory of a stream of a destroyed context."""
    command = [sys.executable, __file__, str(head_dim)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == NO_GREEN_CONTEXT:
        pytest.skip(result.stdout.splitlines()[-1])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_streams_of_different_priority_do_not_deadlock(head_dim: int) -> None:
    """The blocks of a cooperative launch are all resident or none is, so that two launches do not deadlock."""
    q, k, v, dout = torch.randn(4, 1, 4096, 8, head_dim, dtype=torch.bfloat16, device="cuda")
    out, lse = attention(q, k, v, return_lse=True, backend="cuda")
    options = (None,) * 7 + (4096, 4096, -1, -1, head_dim**-0.5, 0.0, "cuda")
    arguments = (dout, q, k, v, out, lse, *options)  # not by autograd, which takes the forward's stream
    expected = backward_op(*arguments)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(priority=priority) for priority in (0, -1)]
    found = []
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(backward_op(*arguments))
    torch.cuda.synchronize()
    for gradients_found in found:
        for ours, theirs in zip(gradients_found, expected, strict=True):
            assert torch.equal(ours, theirs)


# ---- meta tensors and Triton's interpreter ---------------------------------------------------------------------------


def test_meta_tensors_have_shapes() -> None:
    q, k = (torch.empty(2, tokens, 4, 16, device="meta", requires_grad=True) for tokens in (5, 7))
    out, lse = attention(q, k, k, dropout_p=0.1, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 5))
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]
    assert attention_weights(q, k).shape == (2, 4, 5, 7)


@interpreted
def test_the_interpreter_refuses_bfloat16() -> None:
    q = torch.randn(1, 5, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(BackendRefused, match="triton: takes no bfloat16 in Triton's interpreter"):
        attention(q, q, q, backend="triton")


if __name__ == "__main__":
    backward_in_a_green_context(int(sys.argv[1]))
