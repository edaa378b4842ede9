"""Kernels for inference over few tokens (kernels/few_rows), each against fp64, and layers that run on them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from described_layers import call_of, run
from torch import Tensor
from torch.nn import functional

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES, activate
from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.layers import core_executor
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}"),
]
TILES = 10
ADDING = (0, 1, 2, 4)  # tiles that add a residual
ROWS = [1, 7, 16, 17, 33, 64, 128, 200, 300, 512, 1280]
# N and K of the products of BERT-base, BERT-large and MiniLM, and sizes that are no multiples of a tile.
SIZES = [
    *((2304, 768), (768, 768), (3072, 768), (768, 3072)),
    *((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)),
    *((1152, 384), (384, 384), (1536, 384), (384, 1536)),
    (72, 200),
]
TYPES = [torch.bfloat16, torch.float16]
_EPS = 1e-5
_FIRST = 0  # the kernel does not depend on the previous one
_OWN_CLUSTER, _NO_NORM = 0, (0.0, None, None, None, None, None)


def draw(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str | None = None,
    *,
    partial: bool = False,
    tile: int | None = None,
    parts: int | None = None,
) -> Tensor:
    (rows, inner), columns = x.shape, weight.shape[0]
    sizes = (rows, columns, inner, torch.cuda.get_device_properties(0).multi_processor_count, int(partial))
    core = _native.core()
    count = core.few_rows_parts(*sizes) if parts is None else parts
    out = x.new_empty(count, rows, columns, dtype=torch.float32) if partial else x.new_empty(rows, columns)
    tile = core.few_rows_tile(*sizes) if tile is None else tile
    outputs = (None, out) if partial else (out, None)
    activation = (kind is not None, CODES[kind or "gelu"])
    core.few_rows_gemm_cuda(x, weight, bias, *outputs, tile, _OWN_CLUSTER, count, *activation, _FIRST, *_NO_NORM)
    return out


def hold(name: str, out: Tensor, naive: Tensor, exact: Tensor) -> None:
    comparison = compare(name, out, naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, comparison


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("columns", "inner"), SIZES)
def test_products(columns: int, inner: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = draw(columns, inner, dtype=dtype, scale=inner**-0.5)
    bias = draw(columns, dtype=dtype)
    for rows in ROWS:
        x = draw(rows, inner, dtype=dtype)
        exact, naive = x.double() @ weight.double().t(), x.float() @ weight.float().t()
        hold(f"bias, {rows} rows", product(x, weight, bias), (naive + bias).to(dtype), exact + bias)
        for kind in ("gelu", "gelu_tanh", "relu") if rows == 33 else ("gelu",):
            expected = activate(exact + bias.double(), kind)
            found = product(x, weight, bias.float(), kind)
            hold(f"{kind}, {rows} rows", found, activate(naive + bias, kind).to(dtype), expected)
        parts = product(x, weight, partial=True)
        hold(f"parts, {rows} rows", parts.sum(0).to(dtype), naive.to(dtype), exact)
        assert same_bits(parts, product(x, weight, partial=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(200, 296, 776), (1, 8, 8), (385, 1032, 200)], ids=str)
@pytest.mark.parametrize("tile", range(TILES))
def test_every_tile(tile: int, rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    """Sizes that are no multiples of a tile, without and with a bias and each activation, and K in more parts than the
    plan has, every time with the same bits."""
    torch.manual_seed(0)
    x, weight = draw(rows, inner, dtype=dtype), draw(columns, inner, dtype=dtype, scale=inner**-0.5)
    bias = draw(columns, dtype=torch.float32)
    exact, naive = x.double() @ weight.double().t(), x.float() @ weight.float().t()
    hold("no bias", product(x, weight, tile=tile), naive.to(dtype), exact)
    for kind in (None, *CODES):
        found = product(x, weight, bias, kind, tile=tile)
        assert same_bits(found, product(x, weight, bias, kind, tile=tile))
        if kind is None:
            hold("bias", found, (naive + bias).to(dtype), exact + bias)
        else:
            hold(kind, found, activate(naive + bias, kind).to(dtype), activate(exact + bias.double(), kind))
    for count in {1, min(7, -(-inner // 64))}:
        parts = product(x, weight, partial=True, tile=tile, parts=count)
        hold(f"{count} parts", parts.sum(0).to(dtype), naive.to(dtype), exact)
        assert same_bits(parts, product(x, weight, partial=True, tile=tile, parts=count))


def statistics_of(z: Tensor) -> Tensor:
    """[columns / 64, rows, 2]: mean and sum of squared deviations of each 64 columns, in fp64."""
    groups = z.double().unflatten(1, (-1, 64))
    mean = groups.mean(2)
    return torch.stack([mean, (groups - mean[..., None]).square().sum(2)], 2).transpose(0, 1).contiguous()


def takes_residual(tile: int, cluster: int, parts: int) -> bool:
    """takes_residual() of kernels/few_rows/gemm_tiles.h."""
    rows, joined = 128 if tile == 4 else 64, 2 if tile == 0 else 1  # joined: the columns are no multiple of 64
    fits = cluster * parts <= 8 and rows // 8 % (joined * parts) == 0
    return tile in ADDING and cluster % joined == 0 and fits


def without_parameters(x: Tensor, wide: torch.dtype) -> Tensor:
    return functional.layer_norm(x.to(wide), x.shape[1:], eps=_EPS)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("tile", range(TILES))
def test_products_of_normalized_rows(tile: int, cluster: int, dtype: torch.dtype) -> None:
    """The weight's rows sum to 0 before they are rounded, so that the mean of x, which is larger than its deviation,
    has no part in the result but by rounding; the statistics are of 17 groups, more than are loaded at once. Mean and
    deviation are written, too."""
    torch.manual_seed(0)
    rows, columns, inner = 200, 296, 64 * 17
    x, bias = 3 + 2 * draw(rows, inner, dtype=dtype), draw(columns, dtype=torch.float32)
    weight = draw(columns, inner, dtype=torch.float64, scale=inner**-0.5)
    weight = (weight - weight.mean(1, keepdim=True)).to(dtype)
    rstd = (x.double().var(1, correction=0, keepdim=True) + _EPS).rsqrt()
    exact = rstd * (x.double() @ weight.double().t()) + bias
    naive = (rstd.float() * (x.float() @ weight.float().t()) + bias).to(dtype)
    statistics, norms = statistics_of(x).float(), bias.new_full((rows, 2), torch.nan)
    y, again = (x.new_full((rows, columns), torch.nan) for _ in range(2))
    for out in (y, again):
        given = (out, None, tile, cluster, 1, 0, CODES["gelu"], _FIRST, _EPS, statistics, norms, None, None, None)
        _native.core().few_rows_gemm_cuda(x, weight, bias, *given)
    hold("y", y, naive, exact)
    assert same_bits(y, again)
    expected = torch.cat([x.double().mean(1, keepdim=True), rstd], 1)
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("tile", range(TILES))
def test_products_with_a_residual(tile: int, cluster: int, parts: int, dtype: torch.dtype) -> None:
    """Sizes that are no multiples of a tile; the residual is normalized, or added as it is, which tiles of 64 columns
    have another kernel for if K has one part: its blocks exchange nothing."""
    torch.manual_seed(0)
    rows, columns, inner = 200, 320, 520
    x, weight = draw(rows, inner, dtype=dtype), draw(columns, inner, dtype=dtype, scale=inner**-0.5)
    bias, gamma = (draw(columns, dtype=torch.float32) for _ in range(2))
    residual = 3 + draw(rows, columns, dtype=dtype)
    y, statistics = residual.new_empty(rows, columns), bias.new_empty(columns // 64, rows, 2)

    def launch(norm: Tensor | None, scale: Tensor | None) -> Tensor:
        y.fill_(torch.nan)
        given = (y, None, tile, cluster, parts, 0, CODES["gelu"], _FIRST, _EPS, norm, None, residual, scale)
        _native.core().few_rows_gemm_cuda(x, weight, bias, *given, statistics.fill_(torch.nan))
        return y.clone()

    def expected(wide: torch.dtype, normalized: bool) -> Tensor:
        product = x.to(wide) @ weight.to(wide).t() + bias.to(wide)
        return product + (without_parameters(residual, wide) * gamma.to(wide) if normalized else residual.to(wide))

    def check(name: str, norm: Tensor | None, scale: Tensor | None) -> None:
        found, normalized = launch(norm, scale), norm is not None
        hold(name, found, expected(torch.float32, normalized).to(dtype), expected(torch.float64, normalized))
        torch.testing.assert_close(statistics.double(), statistics_of(found), rtol=1e-5, atol=1e-5)
        assert same_bits(found, launch(norm, scale))

    norm, exchanges = statistics_of(residual).float(), takes_residual(tile, cluster, parts)
    if exchanges:
        check("normalized", norm, gamma)
    else:
        with pytest.raises(ValueError, match="residual"):
            launch(norm, gamma)
    if exchanges or (tile in (1, 2, 4) and parts == 1):
        check("added", None, None)
    else:
        with pytest.raises(ValueError, match="residual"):
            launch(None, None)


def test_a_tile_that_does_not_exist() -> None:
    x, weight = draw(8, 8, dtype=torch.bfloat16), draw(8, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tile: expected an index"):
        product(x, weight, tile=TILES)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stream", [torch.float32, None], ids=["fp32", "same"])
@pytest.mark.parametrize("columns", [8, 384, 768, 1024, 8192])
@pytest.mark.parametrize("count", [0, 1, 5, 12, 18])
def test_add_norm(count: int, columns: int, stream: torch.dtype | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 37
    parts = draw(count, rows, columns, dtype=torch.float32)
    residual = 1 + draw(rows, columns, dtype=stream or dtype)
    linear_bias, weight, bias = (draw(columns, dtype=torch.float32) for _ in range(3))
    y, z = residual.new_empty(rows, columns, dtype=dtype), torch.empty_like(residual)
    launch = _native.core().few_rows_add_norm_cuda
    launch(parts, residual, linear_bias, weight, bias, y, z, 1e-5, _FIRST, None, None, None)

    def expected(wide: torch.dtype) -> tuple[Tensor, Tensor]:
        total = parts.to(wide).sum(0) + linear_bias.to(wide) + residual.to(wide)
        total = total.to(residual.dtype).to(wide) if wide == torch.float32 else total
        return functional.layer_norm(total, (columns,), weight.to(wide), bias.to(wide), 1e-5), total

    (naive_y, naive_z), (exact_y, exact_z) = expected(torch.float32), expected(torch.float64)
    hold("z", z, naive_z.to(z.dtype), exact_z)
    hold("y", y, naive_y.to(dtype), exact_y)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [64, 384, 768, 1024, 8192])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_add_norm_of_a_normalized_residual(count: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 37
    parts, residual = draw(count, rows, columns, dtype=torch.float32), 3 + 2 * draw(rows, columns, dtype=dtype)
    linear_bias, weight, bias, scale, shift = (draw(columns, dtype=dtype) for _ in range(5))
    wide = residual.double()
    rstd = (wide.var(1, correction=0, keepdim=True) + _EPS).rsqrt()
    norms = torch.cat([wide.mean(1, keepdim=True), rstd], 1).float()
    y, again = (residual.new_full((rows, columns), torch.nan) for _ in range(2))
    for out in (y, again):
        given = (parts, residual, linear_bias, weight, bias, out, None, _EPS, _FIRST, norms, scale, shift)
        _native.core().few_rows_add_norm_cuda(*given)

    def expected(wide: torch.dtype) -> Tensor:
        normalized = functional.layer_norm(residual.to(wide), (columns,), scale.to(wide), shift.to(wide), _EPS)
        total = parts.to(wide).sum(0) + linear_bias.to(wide) + normalized
        total = total.to(dtype).to(wide) if wide == torch.float32 else total
        return functional.layer_norm(total, (columns,), weight.to(wide), bias.to(wide), _EPS)

    hold("y", y, expected(torch.float32).to(dtype), expected(torch.float64))
    assert same_bits(y, again)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3)], ids=str)
@pytest.mark.parametrize("split", [0, 1], ids=["queries", "keys"])
def test_attention(split: int, window: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    """Sequences of more than 128 tokens; shorter ones have their own kernel (test_native_attention.py). An empty
    sequence, one of a single token, others whose lengths are no multiples of 64, and two tokens after the last."""
    torch.manual_seed(0)
    places, heads = [0, 64, 64, 65, 198, 500], 3
    tokens = places[-1] + 2
    qkv = draw(tokens, 3, heads, head_dim, dtype=dtype)
    out = torch.full((tokens, heads, head_dim), torch.nan, dtype=dtype, device="cuda")
    cu_seqlens = torch.tensor(places, dtype=torch.int32, device="cuda")
    _native.core().few_rows_attention_cuda(qkv, out, cu_seqlens, 302, *window, head_dim**-0.5, split, _FIRST)
    options = BlockOptions(heads, 302, *window, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-5, False, False, None)

    def expected(given: Tensor) -> Tensor:
        each = [reference._attention(given[first:end], options) for first, end in pairwise(places)]
        return torch.cat(each).view(-1, heads, head_dim)

    hold("out", out[: places[-1]], expected(qkv[: places[-1]]), expected(qkv[: places[-1]].double()))
    assert torch.equal(out[places[-1] :], torch.zeros_like(out[places[-1] :]))


def layer_of(width: int, inner: int, dtype: torch.dtype) -> BlockParameters:
    def weight(outputs: int, inputs: int) -> Tensor:
        return draw(outputs, inputs, dtype=dtype, scale=inputs**-0.5)

    def vector(size: int, mean: float = 0.0) -> Tensor:
        return mean + draw(size, dtype=dtype, scale=0.1)

    return BlockParameters(
        *(weight(3 * width, width), vector(3 * width), weight(width, width), vector(width), vector(width, 1.0)),
        *(vector(width), weight(inner, width), vector(inner), weight(width, inner), vector(width)),
        *(vector(width, 1.0), vector(width)),
    )


def in_type(layer: BlockParameters, dtype: torch.dtype) -> BlockParameters:
    return BlockParameters(*(None if each is None else each.to(dtype) for each in layer))  # type: ignore[arg-type]


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
@pytest.mark.parametrize(("width", "heads"), [(128, 4), (768, 12), (256, 2)])
@pytest.mark.parametrize("dtype", TYPES)
def test_layers(dtype: torch.dtype, width: int, heads: int, pre_norm: bool) -> None:
    """Two layers against the reference, by the tolerance rule; every run and a CUDA graph give the same bits."""
    torch.manual_seed(0)
    places = torch.tensor([0, 9, 9, 140, 200], dtype=torch.int32, device="cuda")
    x = draw(200, width, dtype=dtype)
    residual = draw(200, width, dtype=torch.float32) if pre_norm else None
    layers = [in_type(layer_of(width, 2 * width, dtype), torch.float32) for _ in range(2)]
    options = BlockOptions(heads, 131, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-6, False, False, None)
    call = (x, residual, places, None, options, layers)
    specs, inputs, _ = call_of(*call)
    plan = core_executor.plan_of(specs, inputs, training=False)
    assert "FewRowsGemm" in {type(step).__name__ for step in plan.forward}
    y, z = run(*call)
    again, _ = run(*call)
    assert same_bits(y, again)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = run(*call)
    graph.replay()
    assert same_bits(captured, y)

    def expected(wide: torch.dtype, stream: torch.dtype) -> tuple[Tensor, Tensor | None]:
        state, rest = x.to(wide), None if residual is None else residual.to(stream)
        for layer in layers:
            own = in_type(layer, wide)
            state, rest = reference.transformer_block(state, rest, places, options, own)
            state = state.to(wide)
        return state, rest

    exact_y, exact_z = expected(torch.float64, torch.float64)
    naive_y, naive_z = expected(dtype, dtype)
    hold("y", y, naive_y, exact_y)
    if z is not None and naive_z is not None and exact_z is not None:
        hold("z", z.to(dtype), naive_z, exact_z)


def test_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens in short sequences: attention's kernel for few rows with the GEMMs for many rows."""
    with_rules, heads = core_executor.with_rules, 2

    def without(*call: Any) -> Situation:
        found = with_rules(*call)
        return found._replace(rules=found.rules - {"few_rows"})

    monkeypatch.setattr(core_executor, "with_rules", without)
    torch.manual_seed(0)
    places = torch.tensor([0, 30, 30, 100], dtype=torch.int32, device="cuda")
    x = draw(100, 128, dtype=torch.bfloat16)
    layers = [layer_of(128, 256, torch.bfloat16) for _ in range(2)]
    options = BlockOptions(heads, 70, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-6, False, False, None)
    y, _ = run(x, None, places, None, options, layers)
    assert same_bits(y, run(x, None, places, None, options, layers)[0])
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        state = x.to(dtype)
        for layer in layers:
            state, _ = reference.transformer_block(state, None, places, options, in_type(layer, dtype))
        results.append(state)
    hold("y", y, *results)
