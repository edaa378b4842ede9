"""The GEMMs of a feed-forward block with its activation in the epilogue: the registered ops, and the Hopper kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fasttfm
from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.ops import gelu_gemm, mlp
from fasttfm.ops.gelu_gemm import DERIVATIVE, NOTHING, PRODUCT
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="requires Hopper"
)


class Case(NamedTuple):
    rows: int
    inner: int
    columns: int
    kind: str = "gelu"
    bias: torch.dtype | None = torch.float32


CASES = [
    Case(256, 64, 256),
    Case(1, 8, 8),
    Case(300, 200, 392),
    Case(127, 72, 328, bias=None),
    Case(777, 768, 3072),
    Case(1500, 1024, 4096, kind="gelu_tanh"),
    Case(640, 320, 264, kind="relu"),
    Case(129, 64, 512, kind="silu", bias=torch.bfloat16),
    # Several rounds of tiles on 132 SMs; in the last round several blocks share a tile.
    Case(4700, 64, 4096),
    Case(4300, 64, 4096),
]


class Tensors(NamedTuple):
    x: Tensor  # and dy, whose product is with the weight's transpose
    weight: Tensor
    bias: Tensor | None
    h: Tensor
    slope: Tensor  # the activation's derivative at h + bias, rounded


def draw(case: Case, dtype: torch.dtype, device: str = "cuda") -> Tensors:
    torch.manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=device)).to(dtype)

    bias = None if case.bias is None else randn(case.columns).to(case.bias)
    weight = randn(case.columns, case.inner, scale=case.inner**-0.5)
    x, h = randn(case.rows, case.inner), randn(case.rows, case.columns)
    slope = derivative(h.double() if bias is None else h.double() + bias.double(), case.kind)
    return Tensors(x, weight, bias, h, slope.to(dtype))


def plain(given: Tensors, kind: str) -> dict[str, Tensor]:
    """Both directions by torch in the tensors' types: sums and activations in fp32, or fp64, rounded in between."""
    x, weight, bias, h, slope = given
    dtype = x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def shifted(values: Tensor) -> Tensor:
        return values.to(wide) if bias is None else values.to(wide) + bias.to(wide)

    product = (x.to(wide) @ weight.to(wide).t()).to(dtype)
    exact = product.to(wide) * derivative(shifted(h), kind)
    scaled = (product.to(wide) * slope.to(wide)).to(dtype)
    bias_dtype = dtype if bias is None else bias.dtype
    a = activate(shifted(product), kind).to(dtype)
    return {
        "h": product,
        "a": a,
        "dh": exact.to(dtype),
        "a again": activate(shifted(h), kind).to(dtype),
        "dbias": exact.sum(0).to(bias_dtype),
        "a beside slope": a,
        "slope": derivative(shifted(product), kind).to(dtype),
        "scaled dh": scaled,
        "scaled dbias": scaled.to(wide).sum(0).to(bias_dtype),
    }


def fused(given: Tensors, kind: str, backend: str | None = "cuda") -> dict[str, Tensor]:
    x, weight, bias, h, given_slope = given
    want_dbias = bias is not None
    a, product = gelu_gemm.forward_op(x, weight, bias, kind, PRODUCT, backend)
    beside_slope, slope = gelu_gemm.forward_op(x, weight, bias, kind, DERIVATIVE, backend)
    transposed = weight.t().contiguous()
    dh, dbias, again = gelu_gemm.backward_op(x, transposed, h, bias, kind, want_dbias, True, backend)
    scaled, scaled_dbias = gelu_gemm.scaled_op(x, transposed, given_slope, bias, want_dbias, backend)
    of_product = {"h": product, "a": a, "dh": dh, "a again": again, "dbias": dbias}
    of_slope = {"a beside slope": beside_slope, "slope": slope, "scaled dh": scaled, "scaled dbias": scaled_dbias}
    return {**of_product, **of_slope}


def check(found: dict[str, Tensor], given: Tensors, kind: str) -> None:
    assert same_bits(found["a"], found["a beside slope"])
    naive = plain(given, kind)
    double = Tensors(*(None if t is None else t.double() for t in given))
    exact = plain(double, kind)
    for name, value in found.items():
        if name.endswith("dbias") and given.bias is None:
            assert value.numel() == 0
            continue
        factor = OUTPUT_FACTOR if name in ("h", "a", "a again", "slope") else GRADIENT_FACTOR
        comparison = compare(name, value, naive[name], exact[name], factor)
        assert comparison.ok, comparison


# ---- everywhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(9, 16, 24), Case(7, 5, 3, kind="gelu_tanh", bias=None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_on_the_cpu(case: Case, dtype: torch.dtype) -> None:
    given = draw(case, dtype, "cpu")
    check(fused(given, case.kind, None), given, case.kind)


@pytest.mark.parametrize("wanted", [True, False])
def test_registration(wanted: bool) -> None:
    x, weight, bias, h, slope = draw(Case(6, 16, 24), torch.float32, "cpu")
    forward = torch.ops.fasttfm.gelu_gemm_forward.default
    backward = torch.ops.fasttfm.gelu_gemm_backward.default
    scaled = torch.ops.fasttfm.gelu_gemm_scaled.default
    transposed = weight.t().contiguous()
    for kept in (PRODUCT, DERIVATIVE) if wanted else (NOTHING,):
        torch.library.opcheck(forward, (x, weight, bias, "gelu", kept, None))
    torch.library.opcheck(backward, (x, transposed, h, bias, "gelu", wanted, wanted, None))
    torch.library.opcheck(scaled, (x, transposed, slope, bias, wanted, None))


def test_what_the_hopper_kernels_do_not_support() -> None:
    x, weight, bias, *_ = draw(Case(8, 16, 24), torch.float32, "cpu")
    assert gelu_gemm.refuse_cuda(x, weight, bias) == "takes bfloat16 and float16, got float32"
    assert gelu_gemm.kept_beside(None, x, weight) == PRODUCT
    x, weight, bias, *_ = draw(Case(8, 16, 24), torch.bfloat16, "cpu")
    assert gelu_gemm.kept_beside(None, x, weight) == PRODUCT
    assert gelu_gemm.refuse_cuda(x, weight, bias) == "takes tensors on a GPU of compute capability 9.0"


def test_the_constant_has_the_mark_of_torch() -> None:
    """``gelu_gemm`` writes the mark itself, because torch's decorator imports torch._dynamo."""

    def constant() -> None: ...

    torch.compiler.assume_constant_result(constant)
    assert vars(gelu_gemm._has_kernels) == vars(constant) != {}


# ---- Hopper's kernels ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case: Case, dtype: torch.dtype) -> None:
    given = draw(case, dtype)
    assert gelu_gemm.refuse_cuda(*given[:3]) is None
    check(fused(given, case.kind), given, case.kind)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("kept", [NOTHING, PRODUCT, DERIVATIVE])
def test_gelu_of_every_bf16_number(kept: int) -> None:
    """The error is at most that of rounding plus that of 1 - Phi: tests/native/gelu_tail.cpp has bounds of the relative
    error of the latter, which is GELU's own at negative numbers and less at positive ones. exp2 and fp32 arithmetic add
    2^-20. Below -5.5, where fp64 has at most 1.1e-7, the error is at most as large. At infinity and -infinity GELU is
    infinity and 0, and NaN stays NaN."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    numbers = bits.view(torch.bfloat16).float()  # as a bias, because an infinite factor makes every sum NaN
    x, weight = (torch.zeros(size, 8, device="cuda", dtype=torch.bfloat16) for size in (1, len(numbers)))
    a, stored = gelu_gemm.forward_op(x, weight, numbers, "gelu", kept, "cuda")
    finite, every = numbers.isfinite(), a.double().flatten()
    u = numbers.double()[finite]
    exact = u * torch.special.erfc(-u * 0.5**0.5) / 2
    relative = torch.where(u < -4, 5.5e-3, 1.24e-4) + 2.0**-20
    unrounded = exact.abs() * (1 + relative)
    half_step = 2.0 ** (unrounded.clamp_min(2.0**-126).log2().floor() - 8)
    bound = torch.where(u < -5.5, 1.1e-7, exact.abs() * relative + half_step)
    assert bool(((every[finite] - exact).abs() <= bound).all())
    others = [(every, torch.inf)]
    if kept == DERIVATIVE:
        others.append((stored.double().flatten(), 1.0))
    for found, at_infinity in others:
        assert found[numbers == torch.inf].tolist() == [at_infinity]
        assert found[numbers == -torch.inf].tolist() == [0.0]
        assert bool(found[numbers.isnan()].isnan().all())


@pytest.mark.gpu
@on_hopper
def test_refusals_on_the_gpu() -> None:
    x, weight, bias, *_ = draw(Case(8, 20, 24), torch.bfloat16)
    assert gelu_gemm.refuse_cuda(x, weight, bias) == "takes sizes that are multiples of 8, got 20"
    assert gelu_gemm.kept_beside(None, x, weight) == PRODUCT
    given = draw(Case(8, 16, 24), torch.bfloat16)
    x, weight, bias, *_ = given
    assert gelu_gemm.kept_beside(None, x, weight) == DERIVATIVE
    assert gelu_gemm.kept_beside("torch", x, weight) == PRODUCT
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x)
    assert gelu_gemm.refuse_cuda(odd, weight, bias) == "takes tensors that start at a multiple of 16 bytes"
    across = given._replace(weight=weight.t().contiguous().t())
    assert gelu_gemm.refuse_cuda(*across[:3]) == "takes contiguous parameters"
    check(fused(across, "gelu"), across, "gelu")


@pytest.mark.gpu
@on_hopper
def test_results_that_are_not_needed() -> None:
    case = Case(900, 256, 512)
    given = draw(case, torch.bfloat16)
    x, weight, bias, h, slope = given
    everything = fused(given, case.kind)
    a, none = gelu_gemm.forward_op(x, weight, bias, case.kind, NOTHING, "cuda")
    assert none.numel() == 0
    assert same_bits(a, everything["a"])
    transposed = weight.t().contiguous()
    dh, dbias, again = gelu_gemm.backward_op(x, transposed, h, bias, case.kind, False, False, "cuda")
    assert dbias.numel() == again.numel() == 0
    assert same_bits(dh, everything["dh"])
    scaled, dbias = gelu_gemm.scaled_op(x, transposed, slope, bias, False, "cuda")
    assert dbias.numel() == 0
    assert same_bits(scaled, everything["scaled dh"])


@pytest.mark.gpu
@on_hopper
def test_strides_and_odd_addresses() -> None:
    case = Case(500, 128, 512)
    given = draw(case, torch.bfloat16)
    expected = fused(given, case.kind)
    wide = torch.randn(case.rows, 3 * case.inner, device="cuda").bfloat16()
    wide[:, case.inner : 2 * case.inner] = given.x
    apart = wide[:, case.inner : 2 * case.inner]
    found = fused(given._replace(x=apart), case.kind)
    assert all(same_bits(found[name], expected[name]) for name in expected)
    odd = torch.empty(given.x.numel() + 1, dtype=given.x.dtype, device="cuda")[1:].view_as(given.x).copy_(given.x)
    transposed = given.weight.t().contiguous()
    dh, *_ = gelu_gemm.backward_cuda(odd, transposed, given.h, given.bias, case.kind, False, False)
    assert same_bits(dh, expected["dh"])
    scaled, _ = gelu_gemm.scaled_cuda(odd, transposed, given.slope, given.bias, False)
    assert same_bits(scaled, expected["scaled dh"])


@pytest.mark.gpu
@on_hopper
def test_no_rows() -> None:
    x, weight, bias, h, slope = draw(Case(0, 64, 128), torch.bfloat16)
    transposed = weight.t().contiguous()
    a, product = gelu_gemm.forward_cuda(x, weight, bias, "gelu")
    _, kept = gelu_gemm.forward_cuda(x, weight, bias, "gelu", DERIVATIVE)
    dh, dbias, _ = gelu_gemm.backward_cuda(x, transposed, h, bias, "gelu", True, True)
    scaled, scaled_dbias = gelu_gemm.scaled_cuda(x, transposed, slope, bias, True)
    assert a.shape == product.shape == kept.shape == dh.shape == scaled.shape == (0, 128)
    assert not dbias.any()
    assert not scaled_dbias.any()


@pytest.mark.gpu
@on_hopper
def test_same_bits_under_load() -> None:
    case = Case(18400, 768, 3072)
    given = draw(case, torch.bfloat16)
    first = fused(given, case.kind)
    for _ in range(100):
        found = fused(given, case.kind)
        for name, expected in first.items():
            assert same_bits(found[name], expected), name


@pytest.mark.gpu
@on_hopper
def test_a_cuda_graph_gives_the_same_bits() -> None:
    case = Case(2000, 256, 1024)
    given = draw(case, torch.bfloat16)
    torch.cuda.synchronize()  # the other stream does not wait for the inputs
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = fused(given, case.kind)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(given, case.kind)
    graph.replay()
    assert all(same_bits(captured[name], expected[name]) for name in expected)


@pytest.mark.gpu
@on_hopper
def test_mlp_uses_them() -> None:
    def leaves(**options: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        shapes = {"x": (300, 256), "w1": (512, 256), "b1": (512,), "w2": (264, 512), "b2": (264,)}
        scales = {"w1": 256**-0.5, "w2": 512**-0.5}
        drawn = {name: scales.get(name, 1.0) * torch.randn(shape, device="cuda") for name, shape in shapes.items()}
        return {name: value.to(**options).requires_grad_() for name, value in drawn.items()}

    given = leaves(dtype=torch.bfloat16)
    assert fasttfm.explain("mlp", *given.values()).chosen == "cuda"
    assert fasttfm.explain("linear_gelu", *list(given.values())[:3]).chosen == "cuda"
    results = []
    for backend, recompute in (("torch", True), (None, True), (None, False)):
        tensors = leaves(dtype=torch.bfloat16)
        y = mlp(**tensors, backend=backend, recompute=recompute)
        results.append([y.detach(), *torch.autograd.grad(y, list(tensors.values()), torch.ones_like(y))])
    theirs, *ours = results
    for own in ours:
        for found, expected in zip(own, theirs, strict=True):
            difference = (found.double() - expected.double()).norm() / expected.double().norm()
            assert difference < 2 * torch.finfo(torch.bfloat16).eps
