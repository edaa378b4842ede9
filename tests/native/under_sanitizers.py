"""Every kernel, forward and backward, to be run under sanitizers; results are compared in tests/ops.

pytest does not collect this file by its name: ``make asan`` and ``make sanitize-gpu`` run it.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fasttfm import _native, nn
from fasttfm.kernels.attention.problem import AttentionProblem, window_bounds
from fasttfm.kernels.common.activation import CODES
from fasttfm.ops import (
    attention,
    cu_seqlens_from_lengths,
    dropout_add_layer_norm,
    fp8,
    gelu_gemm,
    qkv_projection,
    unpack,
)
from fasttfm.ops.attention import forward_op
from fasttfm.ops.core.backends import BackendRefused, dtype_name, tables
from fasttfm.ops.core.declare import normalizing_ops
from fasttfm.ops.fp8 import attention as fp8_attention
from fasttfm.ops.fp8 import norm as fp8_norm
from fasttfm.ops.gelu_gemm import DERIVATIVE, NOTHING, PRODUCT
from fasttfm.ops.layers import core_executor, few_rows, few_tokens, plan, steps
from fasttfm.ops.layers.decode_layers import DecodeLayers, DecoderLayers, refuse
from fasttfm.ops.layers.parameters import address_table
from fasttfm.ops.layers.spec import FIELDS
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.pack import layout_of_mask
from fasttfm.testing.harness import draw_inputs, run, with_backend
from fasttfm.testing.spec import OpCase, OpSpec
from fasttfm.testing.specs import all_specs

SPECS = all_specs().values()


def calls(specs: list[OpSpec]) -> list[Any]:
    return [pytest.param(spec, case, id=f"{spec.name}-{case}") for spec in specs for case in spec.cases]


def has_backend(spec: OpSpec, name: str) -> bool:
    return any(backend.name == name for backend in tables()[spec.name].backends)


# ---- on the CPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "case"), calls(list(SPECS)))
def test_on_the_cpu(spec: OpSpec, case: OpCase, isa: str) -> None:
    """An op without CPU kernels of its own calls those of others."""
    function = with_backend(spec, "cpu" if has_backend(spec, "cpu") else None)
    threads = torch.get_num_threads()
    try:
        for dtype in case.dtypes:
            inputs = draw_inputs(spec, case, dtype)
            for count in (1, 3):
                torch.set_num_threads(count)
                run(spec, function, inputs, case.options)
    except BackendRefused as refusal:
        pytest.skip(str(refusal))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"keep_activation": True}, {"norm_first": True}], ids=str)
def test_layers_in_one_call(options: dict[str, bool], isa: str) -> None:
    run_layers(options, torch.device("cpu"), torch.float32)


def run_layers(options: dict[str, bool], device: torch.device, dtype: torch.dtype) -> None:
    """Three layers, forward and backward, over packed tokens."""
    layers = [nn.PackedLayer(64, 1, 136, device=device, **options) for _ in range(3)]
    final_norm = torch.nn.LayerNorm(64, device=device) if options.get("norm_first") else None
    module, cu_seqlens = nn.PackedTransformer(layers, final_norm), cu_seqlens_from_lengths((5, 0, 130), device=device)
    x = torch.randn(135, 64, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype != torch.float32):
        assert module.explain(x, 130).chosen in ("core", "ops")
        module(x, cu_seqlens, 130).float().square().sum().backward()


# Layers with rotary positions, which one plan runs: heads with norms, fewer heads of keys, gates, and none of these.
ROTARY: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 3)},
    "grouped": {"norm": "rms", "head_norm": True, "kv_heads": 1, "head_dim": 128, "activation": "silu"},
    "post_norm": {"norm_first": False, "attention_bias": True, "feed_forward_bias": True},
    "without_gate": {"gated": False, "norm_bias": True},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.1, "feed_forward_dropout": 0.1},
}
ROTARY_CALLS = [pytest.param(name, id=f"layers-{name}") for name in ROTARY]


def rotary_layers(name: str, device: torch.device, dtype: torch.dtype) -> nn.RotaryTransformer:
    given = {"device": device, "dtype": dtype, **ROTARY[name]}
    layers = [nn.RotaryLayer(128, 2, 136, **given) for _ in range(2)]
    final_norm = layers[0].norm1 if layers[0].norm_first else None
    return nn.RotaryTransformer(layers, copy.deepcopy(final_norm), positions=16)


def run_rotary_layers(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Forward and backward, then without gradients, where more is fused; 600 rows have other fused steps than 40."""
    module = rotary_layers(name, device, dtype)
    for lengths in ((30, 0, 10), (300, 170, 130)):
        cu_seqlens = cu_seqlens_from_lengths(lengths, device=device)
        x = torch.randn(sum(lengths), 128, device=device, dtype=dtype, requires_grad=True)
        assert module.explain(x, max(lengths)).chosen == "core"
        module.train()(x, cu_seqlens, max(lengths)).float().square().sum().backward()
        with torch.no_grad():
            module.eval()(x, cu_seqlens, max(lengths))


@pytest.mark.parametrize("name", ROTARY_CALLS)
def test_layers_by_a_plan(name: str, isa: str) -> None:
    run_rotary_layers(name, torch.device("cpu"), torch.float32)


HEAD_CALLS = [pytest.param(*call, id="head_norm-" + "-".join(map(str, call))) for call in ((64, 13), (128, 700))]
GATED_INNER = 136


def run_steps(kind: str, head_dim: int, rows: int, device: torch.device, dtype: torch.dtype) -> None:
    """Steps that only plans have, without cuBLAS. ``heads``: norms of two heads of queries and one of keys in both
    directions, and their rotation; ``gated_gemm``: the GEMM whose epilogue multiplies gate and up."""
    columns, norms, heads = 4 * head_dim, ("0.q_norm_weight", "0.k_norm_weight"), (2, 1, head_dim)
    make = partial(torch.randn, device=device, dtype=dtype)
    given = {name: make(rows, columns) for name in ("x", "y", "dy")} | {"dx": make(rows, GATED_INNER)}
    given |= {"z": make(rows, 3).float(), "positions": torch.arange(rows, device=device)}
    rotated = ("cos0", "sin0", "positions", len(plan.BUFFERS) + 2, 4, 3, head_dim, head_dim // 2, 1.0)
    sequences = {
        "heads": [
            steps.HeadNorm("x", *norms, "z", *heads, "y", 1e-6),
            steps.Rotary("y", *rotated),
            steps.HeadNormBackward("x", *norms, "z", *heads, "dy", *(f"d {name}" for name in norms)),
        ],
        "gated_gemm": [steps.GemmActivation("x", "0.up_weight", None, GATED_INNER, CODES["gelu"], columns, True, "dx")],
    }
    weights = {"q_norm_weight": make(head_dim), "k_norm_weight": make(head_dim)}
    weights["up_weight"] = make(2 * GATED_INNER, columns)
    gradients = {name: torch.empty_like(each) for name, each in weights.items()}
    parameters, targets = (address_table([table.get(name) for name in FIELDS]) for table in (weights, gradients))
    bounds, angles = cu_seqlens_from_lengths((rows,), device=device), torch.randn(2, rows, head_dim // 2, device=device)
    inputs = Inputs(given["x"], None, bounds, rows, None, ((angles[0], angles[1]),), given["positions"])
    buffers = core_executor._buffers(inputs, **{name: given[name] for name in ("y", "z", "dy", "dx")})
    layers: Any = SimpleNamespace(dtype=dtype)
    tables = {"parameters": parameters, "gradients": targets}
    core_executor._run(plan._encoded(sequences[kind], {}), inputs, layers, buffers, **tables)


@pytest.mark.parametrize(("head_dim", "rows"), HEAD_CALLS)
def test_steps_of_heads(head_dim: int, rows: int, isa: str) -> None:
    run_steps("heads", head_dim, rows, torch.device("cpu"), torch.float32)


# ---- CUDA kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROTARY_CALLS)
def test_layers_by_a_plan_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    run_rotary_layers(name, torch.device("cuda"), dtype)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["heads", "gated_gemm"])
@pytest.mark.parametrize(("head_dim", "rows"), HEAD_CALLS)
def test_steps_on_a_gpu(head_dim: int, rows: int, kind: str, dtype: torch.dtype) -> None:
    run_steps(kind, head_dim, rows, torch.device("cuda"), dtype)
    torch.cuda.synchronize()


# Triton's kernels: tools/sanitize_gpu.py runs them under memcheck.
TRITON = [spec for spec in SPECS if has_backend(spec, "triton")]
TRITON_CALLS = [
    pytest.param(spec, case, id=f"{spec.name}-{case}")
    for spec in TRITON
    for case in spec.cases
    if case.name in spec.property_cases or spec.name in ("disentangled_attention", "maxsim")
]


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), TRITON_CALLS)
def test_triton_kernels(spec: OpSpec, case: OpCase) -> None:
    dtype = torch.bfloat16 if torch.bfloat16 in case.dtypes else case.dtypes[0]
    run(spec, with_backend(spec, "triton"), draw_inputs(spec, case, dtype, "cuda"), case.options)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"keep_activation": True}, {"norm_first": True}], ids=str)
def test_layers_in_one_call_on_a_gpu(options: dict[str, bool]) -> None:
    """Kernels start before the previous one ends, attention's forward among them."""
    run_layers(options, torch.device("cuda"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case"), calls([spec for spec in SPECS if has_backend(spec, "cuda")]))
def test_on_a_gpu(spec: OpSpec, case: OpCase) -> None:
    run_cuda_kernels(spec, case)


def run_cuda_kernels(spec: OpSpec, case: OpCase) -> None:
    """In each of the case's types that the kernels support; skips if they support none."""
    refusals = []
    for dtype in case.dtypes:
        try:
            run(spec, with_backend(spec, "cuda"), draw_inputs(spec, case, dtype, "cuda"), case.options)
        except BackendRefused as refusal:
            refusals.append(str(refusal))
    if len(refusals) == len(case.dtypes):
        pytest.skip(refusals[0])


ROW_OPS = [spec for spec in SPECS if spec.name in normalizing_ops()]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(13, 512), (13, 768), (13, 1024), (13, 1544), (13, 2568), (13, 4104), (1601, 1544), (1601, 2568)],
)
@pytest.mark.parametrize("spec", [pytest.param(spec, id=f"{spec.name}-rows") for spec in ROW_OPS])
def test_rows(spec: OpSpec, rows: int, columns: int) -> None:
    """For each number of vectors and warps per row (common/cuda/rows.cuh). With 13 rows some groups of the last block
    have none, with 1601 every group has several."""
    typical = next(case for case in spec.cases if case.name == "typical")
    case = replace(typical, sizes={**typical.sizes, "shape": (rows, columns)})
    run_cuda_kernels(spec, case)


# Lengths of queries and keys. Sums of dq are kept in shared memory up to 512 queries, and in global memory beyond,
# where several blocks share a head. If lengths differ, blocks fetch heads from a counter.
LENGTHS = {
    "equal": ([130, 130], [130, 130]),
    "different": ([150, 0, 1, 270, 64], [64, 3, 200, 270, 0]),
    "long": ([700, 5, 64], [600, 130, 1000]),
}
ATTENTION_CALLS = [
    pytest.param(*call, id="attention-" + "-".join(map(str, call)))
    for call in itertools.product(LENGTHS, (64, 128), (False, True), (0.0, 0.1))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "head_dim", "causal", "p"), ATTENTION_CALLS)
def test_attention(name: str, head_dim: int, causal: bool, p: float) -> None:
    lengths, lengths_k = LENGTHS[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(sum(tokens), 2, head_dim, generator=generator).bfloat16().cuda()
        for tokens in (lengths, lengths_k, lengths_k, lengths)
    )
    options: dict[str, Any] = {"causal": causal, "dropout_p": p, "seed": torch.tensor([7]).cuda(), "backend": "cuda"}
    if name == "equal":
        q, k, v, dout = (x.view(len(lengths), -1, 2, head_dim) for x in (q, k, v, dout))
    else:
        options["cu_seqlens"] = cu_seqlens_from_lengths(lengths, device="cuda")
        options["cu_seqlens_k"] = cu_seqlens_from_lengths(lengths_k, device="cuda")
        options |= {"max_seqlen": max(lengths), "max_seqlen_k": max(lengths_k)}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(attention(*leaves, **options), leaves, dout)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["attention-full", "attention-causal"])
@pytest.mark.parametrize(("sequences", "tokens"), [(5, 256), (3, 300)])  # tiles of 256 and of 192 queries
def test_attention_with_many_heads(sequences: int, tokens: int, causal: bool) -> None:
    q = torch.randn(sequences, tokens, 16, 64).bfloat16().cuda()
    attention(q, q, q, causal=causal, backend="cuda")


# One tile, tiles that extend past the end, and several rounds of tiles on all SMs.
PRODUCT_SIZES = [(300, 200, 392), (127, 72, 328), (4300, 64, 4096)]
PRODUCT_CALLS = [
    pytest.param(*sizes, kind, dtype, id="gelu_gemm-" + "-".join(map(str, (*sizes, kind, dtype_name(dtype)))))
    for sizes, kind, dtype in (
        *((sizes, "gelu", torch.bfloat16) for sizes in PRODUCT_SIZES),
        *itertools.product([(130, 72, 200)], CODES, (torch.bfloat16, torch.float16)),
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inner", "columns", "kind", "dtype"), PRODUCT_CALLS)
def test_gelu_gemm(rows: int, inner: int, columns: int, kind: str, dtype: torch.dtype) -> None:
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, h = (randn(*shape).to(dtype).cuda() for shape in ((rows, inner), (columns, inner), (rows, columns)))
    bias = randn(columns).cuda()
    for kept in (NOTHING, PRODUCT, DERIVATIVE):
        gelu_gemm.forward_op(x, weight, bias, kind, kept, "cuda")
    transposed = weight.t().contiguous()
    gelu_gemm.backward_op(x, transposed, h, bias, kind, True, True, "cuda")
    gelu_gemm.scaled_op(x, transposed, h, bias, True, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(127, 72), (300, 200), (4300, 1024)])
def test_qkv_projection(rows: int, columns: int, dtype: torch.dtype) -> None:
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, bias = (
        randn(*shape).to(dtype).cuda() for shape in ((rows, columns), (3 * columns, columns), (3 * columns,))
    )
    qkv_projection(x, weight, bias, 2, backend="cuda")


# Rows that do not fill a tile, and several rounds of tiles on all SMs.
FP8_SIZES = [(37, 144), (300, 768), (4250, 1024)]
FP8_CALLS = [pytest.param(*sizes, id=f"fp8-{sizes[0]}-{sizes[1]}") for sizes in FP8_SIZES]


def fp8_slots(device: torch.device) -> tuple[fp8.Slot, ...]:
    """Three slots with known scales, as after the first step."""
    scales = fp8.Scales([fp8.E4M3, fp8.E5M2, fp8.E4M3], 2, device)
    scales.set_magnitudes(4.0)
    return tuple(scales.slots)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), FP8_CALLS)
def test_fp8_passes(rows: int, columns: int) -> None:
    x, bias = torch.randn(rows, columns).bfloat16().cuda(), torch.randn(columns).cuda()
    slot, gradient_slot, weight_slot = fp8_slots(x.device)
    cu_seqlens, seed = cu_seqlens_from_lengths((rows - 5, 0, 5), device=x.device), torch.tensor([7]).cuda()
    x8 = fp8.cast(x, slot, backend="cuda")
    fp8.cast(x, slot, with_columns=False, backend="cuda")
    fp8.cast_dropped(x, gradient_slot, (cu_seqlens, seed, 0.1))
    fp8.gelu(x, bias, "gelu", slot, "cuda")
    fp8.gelu_backward(x, x, bias, "gelu", slot, gradient_slot, True, "cuda")
    layer = fp8.Fp8Linear(torch.randn(208, columns).cuda(), (slot, weight_slot, gradient_slot))
    fp8.refresh_all([layer], None)
    for keep_h in (True, False):
        h, _ = layer.forward_gelu(x8, torch.bfloat16, torch.randn(208).cuda(), "gelu", slot, keep_h=keep_h)
        if keep_h:
            dy = fp8.cast(torch.randn_like(h), gradient_slot, backend="cuda")
            layer.input_gradient(dy, torch.bfloat16)
            layer.input_gradient_gelu(dy, x, bias, "gelu", gradient_slot, True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), FP8_CALLS)
def test_fp8_norms(rows: int, columns: int) -> None:
    x, residual, dy, dz = (torch.randn(rows, columns).bfloat16().cuda() for _ in range(4))
    weight, bias, linear_bias = (torch.randn(columns).cuda() for _ in range(3))
    slot, gradient_slot, _ = fp8_slots(x.device)
    cu_seqlens, seed = cu_seqlens_from_lengths((rows - 5, 0, 5), device=x.device), torch.tensor([7]).cuda()
    norm = fp8_norm.NormArguments(weight, bias, linear_bias, cu_seqlens, seed, 0.1, 1e-5)
    found = fp8_norm.add_norm_cast(x, residual, norm, slot, "cuda")
    gradients = (dy, dz), found.z, found.statistics, norm, [True] * 3, gradient_slot, "cuda"
    assert fp8_norm.add_norm_backward_cast(*gradients) is not None


# Sequences that begin at multiples of 16 tokens, others, and some whose sums of dq are in global memory.
FP8_LENGTHS = {"aligned": [512, 16, 0, 256, 48], "not_aligned": [5, 0, 37, 300], "long": [704, 64, 9]}
FP8_ATTENTION_CALLS = [
    pytest.param(*call, id="fp8_attention-" + "-".join(map(str, call)))
    for call in itertools.product(FP8_LENGTHS, (False, True), (0.0, 0.1))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "causal", "p"), FP8_ATTENTION_CALLS)
def test_fp8_attention(name: str, causal: bool, p: float) -> None:
    lengths = FP8_LENGTHS[name]
    tokens = sum(lengths) + 5
    qkv, dout = (torch.randn(tokens, *shape, 64).bfloat16().cuda() for shape in ((3, 2), (2,)))
    bounds = cu_seqlens_from_lengths(lengths, device=qkv.device)
    problem = AttentionProblem(cu_seqlens=bounds, scale=0.125, window_right=window_bounds(causal, None)[1], p=p)
    seed = torch.tensor([7]).cuda() if p else None
    problem = problem._replace(seed=seed, max_seqlen=max(lengths), max_seqlen_k=max(lengths))
    saved = forward_op(qkv, None, None, *problem, "cuda")
    _, slot, _ = fp8_slots(qkv.device)
    found = fp8_attention.backward_cast(dout, qkv, saved, (*problem, "cuda"), slot, torch.float32)
    assert found is not None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [pytest.param(shape, id=f"mask-{shape}") for shape in ((7, 31), (40, 512))])
def test_mask(shape: tuple[int, int]) -> None:
    assert layout_of_mask(torch.ones(shape, dtype=torch.bool).cuda()) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [pytest.param(rows, id=f"few_rows-{rows}") for rows in (1, 17, 33, 130, 600)])
def test_few_rows(rows: int) -> None:
    """GEMMs with the tile that the plan has for these rows, the LayerNorm after them, and a layer without gradients."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, residual = (randn(*shape).bfloat16().cuda() for shape in ((rows, 200), (328, 200), (rows, 328)))
    few_rows.product(x, weight, randn(328).cuda(), activation="gelu")
    norm = torch.nn.LayerNorm(328, device="cuda")
    few_rows.add_norm(few_rows.gemm_parts(x, weight), residual, randn(328).cuda(), norm, torch.bfloat16)
    module = nn.PackedTransformer([nn.PackedLayer(64, 2, 136, device="cuda", dtype=torch.bfloat16)]).eval()
    with torch.inference_mode():
        module(randn(rows, 64).bfloat16().cuda(), cu_seqlens_from_lengths((rows,), device="cuda"), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens", [pytest.param(tokens, id=f"few_rows-folded-{tokens}") for tokens in (33, 100, 250, 600, 1200)]
)
@pytest.mark.parametrize("width", [128, 768])
def test_folded_layers_over_few_tokens(width: int, tokens: int) -> None:
    """With each tile whose blocks add parts of K, with only the first LayerNorm, and without graphs, in which layers
    would not be folded."""
    layers = [nn.PackedLayer(width, width // 64, 200, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    module, cu_seqlens = nn.PackedTransformer(layers).eval(), cu_seqlens_from_lengths((tokens - 9, 0, 9), device="cuda")
    with torch.inference_mode(), few_tokens.using(few_tokens.FewTokens()):
        module(torch.randn(tokens, width).bfloat16().cuda(), cu_seqlens, tokens)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", [pytest.param(tile, id=f"few_rows-residual-{tile}") for tile in (0, 1, 4)])
def test_few_rows_with_a_residual(tile: int, parts: int) -> None:
    """Tiles that rows and columns do not fill, and more stages than the ring buffer has, in parts that the blocks of a
    cluster add; statistics of the residual, and of the result."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, residual = (randn(*shape).bfloat16().cuda() for shape in ((150, 1096), (320, 1096), (150, 320)))
    bias, scale, statistics = (randn(*shape).square().cuda() for shape in ((320,), (320,), (5, 150, 2)))
    y, written, cluster = torch.empty_like(residual), torch.empty_like(statistics), 2 if tile == 0 else 1
    if tile == 0 and parts == 8:
        pytest.skip("takes up to eight blocks in a cluster")
    given = (y, None, tile, cluster, parts, False, CODES["gelu"], 0, 1e-5)
    _native.core().few_rows_gemm_cuda(x, weight, bias, *given, statistics, None, residual, scale, written)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [pytest.param(tile, id=f"few_rows-added-{tile}") for tile in (1, 4)])
def test_few_rows_with_a_normalized_residual(tile: int) -> None:
    """Tiles that rows and columns do not fill, and more stages than the ring buffer has; the next GEMM reads the
    statistics, and writes the means that the LayerNorm after it reads."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, residual = (randn(*shape).bfloat16().cuda() for shape in ((150, 1096), (320, 1096), (150, 320)))
    bias, statistics, norms = (torch.empty(*shape).cuda().zero_() for shape in ((320,), (5, 150, 2), (150, 2)))
    y, again, core, kind = torch.empty_like(residual), torch.empty_like(residual), _native.core(), CODES["gelu"]
    core.few_rows_gemm_cuda(
        x, weight, bias, y, None, tile, 0, 1, 0, kind, 0, 0.0, None, None, residual, None, statistics
    )
    square = weight[:, :320].contiguous()
    core.few_rows_gemm_cuda(
        y, square, bias, again, None, tile, 0, 1, 1, kind, 1, 1e-5, statistics, norms, None, None, None
    )
    parts = randn(2, 150, 320).cuda()
    core.few_rows_add_norm_cuda(parts, y, bias, bias, bias, again, None, 1e-5, 1, norms, bias, bias)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [pytest.param(width, id=f"few_rows_layers-{width}") for width in (384, 768)])
def test_layers_in_one_kernel(width: int) -> None:
    """With each of its tiles, an empty sequence, and tokens after the last sequence."""
    layers = [nn.PackedLayer(width, 12, 4 * width, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    module = nn.PackedTransformer(layers).eval()
    with torch.inference_mode(), few_tokens.using(few_tokens.FewTokens()):
        for lengths in ((5, 0, 8), (20, 9)):
            x = torch.randn(sum(lengths) + 3, width).bfloat16().cuda()
            module(x, cu_seqlens_from_lengths(lengths, device="cuda"), max(lengths))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [pytest.param(rows, id=f"few_rows_layers-decode-{rows}") for rows in (1, 3, 16)])
def test_decoding_in_one_kernel(rows: int) -> None:
    layers = [
        nn.PackedLayer(768, 12, 3072, norm_first=True, causal=True, device="cuda", dtype=torch.bfloat16)
        for _ in range(6)
    ]
    described = DecoderLayers.of(layers, torch.nn.LayerNorm(768, device="cuda", dtype=torch.bfloat16))
    assert isinstance(described, DecoderLayers)
    keys, values = (torch.randn(6, rows, 12, 70, 64, device="cuda").bfloat16() for _ in range(2))
    assert refuse(described, rows, keys) is None
    lengths = torch.arange(rows, dtype=torch.int32, device="cuda") * 17 % 69 + 1
    x = torch.randn(rows, 768, device="cuda").bfloat16()
    kernel = DecodeLayers()
    for _ in range(2):
        assert kernel.run(x, described, keys, values, lengths) is not None
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)], ids=["full", "window"])
@pytest.mark.parametrize("head_dim", [pytest.param(size, id=f"few_rows-attention-{size}") for size in (32, 64, 128)])
def test_short_attention(head_dim: int, window: tuple[int, int]) -> None:
    """Up to 128 tokens, and more than that in the kernel for longer sequences, with and without a division of keys."""
    lengths = (64, 0, 1, 128, 33, 65)
    for longest, dtype in itertools.product((128, 150), (torch.bfloat16, torch.float16)):
        tokens = sum(lengths) - 128 + longest
        cu_seqlens = cu_seqlens_from_lengths([longest if each == 128 else each for each in lengths], device="cuda")
        qkv = torch.randn(tokens + 9, 3, 2, head_dim).to(dtype).cuda()
        for split in (0, 1):
            out = torch.empty(tokens + 9, 2, head_dim, dtype=dtype, device="cuda")
            given = (longest, *window, head_dim**-0.5, split, 0)
            _native.core().few_rows_attention_cuda(qkv, out, cu_seqlens, *given)
    torch.cuda.synchronize()


# Boundaries of two sequences in 30 tokens that are not valid: not in order, negative, after the end.
WRONG = [(0, 10**6, 30), (-(10**6), 5, 30), (20, 10, 30), (7, -(2**31), 2**31 - 1)]
WRONG_CALLS = [pytest.param(values, id=f"boundaries-{index}") for index, values in enumerate(WRONG)]


@pytest.mark.gpu
@pytest.mark.parametrize("values", WRONG_CALLS)
def test_boundaries_that_are_not_valid(values: tuple[int, ...]) -> None:
    """Every CUDA kernel that reads boundaries; test_boundaries.py has more of them, without a sanitizer."""
    bounds, core = torch.tensor(values, dtype=torch.int32).cuda(), _native.core()
    for head_dim, longest, split in ((32, 30, 0), (64, 30, 0), (64, 150, 1), (128, 30, 0), (128, 30, 1)):
        qkv = torch.randn(30, 3, 2, head_dim).bfloat16().cuda()
        out = torch.zeros_like(qkv[:, 0])
        core.few_rows_attention_cuda(qkv, out, bounds, longest, -1, -1, head_dim**-0.5, split, 0)
        if head_dim > 32:
            leaf = qkv.requires_grad_()
            result = attention(leaf, cu_seqlens=bounds, max_seqlen=30, backend="cuda")
            torch.autograd.grad(result, leaf, torch.ones_like(result))
    x, residual = (torch.randn(30, 256).bfloat16().cuda().requires_grad_() for _ in range(2))
    weight, seed = torch.ones(256).cuda(), torch.tensor([7]).cuda()
    options = {"p": 0.1, "cu_seqlens": bounds, "seed": seed, "backend": "cuda"}
    dropout_add_layer_norm(x, residual, weight, weight, **options).float().sum().backward()
    slot, gradient_slot, _ = fp8_slots(x.device)
    rows = x.detach()
    fp8.cast_dropped(rows, gradient_slot, (bounds, seed, 0.1))
    norm = fp8_norm.NormArguments(weight, weight, weight, bounds, seed, 0.1, 1e-5)
    found = fp8_norm.add_norm_cast(rows, rows, norm, slot, "cuda")
    fp8_norm.add_norm_backward_cast((rows, rows), found.z, found.statistics, norm, [True] * 3, gradient_slot, "cuda")
    unpack(rows, bounds, 30, backend="cuda")
    layers = [nn.PackedLayer(384, 12, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    with torch.inference_mode(), few_tokens.using(few_tokens.FewTokens()):
        nn.PackedTransformer(layers).eval()(torch.randn(30, 384).bfloat16().cuda(), bounds, 30)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("values", WRONG_CALLS)
def test_layers_by_a_plan_with_boundaries_that_are_not_valid(values: tuple[int, ...]) -> None:
    bounds = torch.tensor(values, dtype=torch.int32).cuda()
    for name in ROTARY:
        module, x = rotary_layers(name, bounds.device, torch.bfloat16), torch.randn(30, 128).bfloat16().cuda()
        module(x.requires_grad_(), bounds, 30).float().sum().backward()
        with torch.inference_mode():
            module.eval()(x.detach(), bounds, 30)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [pytest.param(tile, id=f"few_rows-producer-{tile}") for tile in range(10)])
def test_few_rows_with_a_producer(tile: int, dtype: torch.dtype) -> None:
    """Tiles that rows and columns do not fill, and more stages than the ring buffer has, in one and in two parts."""
    randn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight, bias = (randn(*shape).to(dtype).cuda() for shape in ((150, 1096), (328, 1096), (328,)))
    y, parts = x.new_empty(150, 328), x.new_empty(2, 150, 328, dtype=torch.float32)
    product = _native.core().few_rows_gemm_cuda
    plain = (0.0, None, None, None, None, None)
    product(x, weight, bias, y, None, tile, 0, 1, True, CODES["gelu"], 0, *plain)
    product(x, weight, None, None, parts, tile, 0, 2, False, CODES["gelu"], 1, *plain)
