"""Layers by plans of the core against layers op by op: the same bits if both use the same GEMMs."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from described_layers import call_of, native_layers, run
from torch import Tensor

from fasttfm import _native, use_backend
from fasttfm.ops import linear
from fasttfm.ops.layers import core_executor, rules, stack, support
from fasttfm.ops.layers import parameters as layer_parameters
from fasttfm.ops.layers.parameters import NOT_PLAIN
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters, transformer_block

pytestmark = pytest.mark.usefixtures("torch_multiplies_by_blas")
SEQUENCES = [0, 9, 9, 10, 40]  # one is empty
OPTIONS = BlockOptions(2, 30, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-6, False, False, None)
RATES = {"attention_p": 0.1, "p_a": 0.2, "p_b": 0.3}

takes_cpu = pytest.mark.skipif(support.missing_cpu() is not None, reason=f"CPU: {support.missing_cpu()}")
hopper = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
DEVICES = [
    pytest.param("cpu", torch.float32, torch.float32, marks=takes_cpu, id="cpu"),
    pytest.param("cuda", torch.bfloat16, torch.float32, marks=[pytest.mark.gpu, hopper], id="bf16-fp32"),
    pytest.param("cuda", torch.bfloat16, torch.bfloat16, marks=[pytest.mark.gpu, hopper], id="bf16"),
    pytest.param("cuda", torch.float16, torch.float32, marks=[pytest.mark.gpu, hopper], id="fp16-fp32"),
]
LAYOUTS = [
    pytest.param({}, False, id="post-LN"),
    pytest.param({}, True, id="pre-LN"),
    pytest.param({"window_right": 0}, True, id="causal"),
    pytest.param(RATES, False, id="dropout"),
    pytest.param({**RATES, "keep_activation": True}, True, id="pre-LN-dropout-kept"),
    pytest.param({"recompute": True, "activation": "relu"}, False, id="recompute"),
    pytest.param({"keep_activation": True, "activation": "gelu_tanh"}, False, id="kept"),
]


@pytest.fixture(autouse=True)
def kernels_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the kernels for few rows and for short sequences, which have their own tests
    (tests/kernels/test_few_rows.py)."""
    with_rules = core_executor.with_rules

    def without(*call: Any) -> Any:
        found = with_rules(*call)
        return found._replace(rules=found.rules - {"few_rows", "short_attention"})

    monkeypatch.setattr(core_executor, "with_rules", without)


class Problem:
    """A stack of layers and its inputs, random with a fixed seed."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        parameter_dtype: torch.dtype,
        *,
        pre_norm: bool = False,
        layers: int = 3,
        head_dim: int = 64,
        bias: bool = True,
        sequences: list[int] | None = None,
        options: BlockOptions = OPTIONS,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        width, inner, count = 2 * head_dim, 3 * head_dim, layers

        def draw(*shape: int, scale: float = 0.3) -> Tensor:
            return torch.randn(shape, generator=generator).mul(scale)

        def layer() -> BlockParameters:
            tensors = [
                *(draw(3 * width, width), draw(3 * width), draw(width, width), draw(width), 1 + draw(width)),
                *(draw(width), draw(inner, width), draw(inner), draw(width, inner), draw(width), 1 + draw(width)),
                draw(width),
            ]
            named = BlockParameters(*(each.to(device, parameter_dtype).requires_grad_() for each in tensors))
            none = {"qkv_bias": None, "out_bias": None, "up_bias": None, "down_bias": None}
            return named if bias else named._replace(**none)

        boundaries = SEQUENCES if sequences is None else sequences
        tokens = boundaries[-1]
        self.layers = [layer() for _ in range(count)]
        self.cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
        self.x = draw(tokens, width, scale=1.0).to(device, dtype).requires_grad_()
        stream = parameter_dtype if pre_norm else None
        self.residual = None if stream is None else draw(tokens, width, scale=1.0).to(device, stream).requires_grad_()
        drops = options.attention_p + options.p_a + options.p_b > 0
        self.seeds = torch.arange(3 * count, device=device).view(count, 3) + 7 if drops else None
        longest = max(after - before for before, after in pairwise(boundaries))
        self.options = options._replace(max_seqlen=longest)
        self.weights = [draw(tokens, width).to(device) for _ in range(2)]

    def parameters(self) -> list[Tensor]:
        unique = {id(each): each for layer in self.layers for each in layer if each is not None}
        return list(unique.values())

    def leaves(self) -> list[Tensor]:
        return [each for each in (self.x, self.residual, *self.parameters()) if each is not None]

    def op_by_op(self, backend: str | None = "own") -> tuple[Tensor, Tensor | None]:
        """By default with the kernels that the native layers run."""
        x, residual = self.x, self.residual
        options = self.options._replace(backend=x.device.type if backend == "own" else backend)
        for index, layer in enumerate(self.layers):
            seeds = None if self.seeds is None else self.seeds[index]
            x, residual = transformer_block(x, residual, self.cu_seqlens, seeds, options, layer)
        return x, residual

    def in_one_call(self) -> tuple[Tensor, Tensor | None]:
        arguments = (self.x, self.residual, self.cu_seqlens, self.seeds, self.options, self.layers)
        assert stack.refused(*call_of(*arguments)) is None
        return run(*arguments)

    def results(self, call: Callable[[], tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """Outputs and all gradients."""
        outputs = [each for each in call() if each is not None]
        loss = sum((output.float() * weight).sum() for output, weight in zip(outputs, self.weights, strict=False))
        assert isinstance(loss, Tensor)
        return [*outputs, *torch.autograd.grad(loss, self.leaves())]


def multiply(a: Tensor, b: Tensor, *, bias: Tensor | None, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``a @ b`` by the GEMM of the native layers."""

    def stored(matrix: Tensor) -> tuple[Tensor, bool]:
        transposed = matrix.stride(0) == 1 and matrix.stride(1) != 1
        return (matrix.t() if transposed else matrix), transposed

    (a, transposed_a), (b, transposed_b) = stored(a), stored(b)
    rows, columns = a.shape[1] if transposed_a else a.shape[0], b.shape[0] if transposed_b else b.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=a.device) if total is None else total
    core = _native.core()
    workspace = torch.empty(core.gemm_workspace_bytes_cuda(), dtype=torch.uint8, device=a.device)
    core.gemm_cuda(a, b, bias, total, out, workspace, transposed_a, transposed_b)
    return out


@pytest.fixture
def same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the ops use the GEMM algorithms of the native layers."""
    torch_mm = torch.mm

    def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, shape: Any = None) -> Tensor:
        if not a.is_cuda:
            return found(a, b, bias, shape=shape)
        product = multiply(a, b, bias=bias, total=None, dtype=a.dtype)
        return product if shape is None else product.view(*shape)

    def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return multiply(a, b, bias=None, total=total, dtype=a.dtype) if a.is_cuda else added(total, a, b)

    def mm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        if not a.is_cuda or "out_dtype" not in options:
            return torch_mm(a, b, **options)
        return multiply(a, b, bias=None, total=None, dtype=options["out_dtype"])

    found, added = linear.matmul, linear.add_matmul
    monkeypatch.setattr(linear, "matmul", matmul)
    monkeypatch.setattr(linear, "add_matmul", add_matmul)
    monkeypatch.setattr(torch, "mm", mm)


def different(found: list[Tensor], expected: list[Tensor]) -> list[int]:
    """The indices of tensors that differ in a bit."""
    pairs = enumerate(zip(found, expected, strict=True))
    return [index for index, (a, b) in pairs if a.dtype != b.dtype or not torch.equal(a, b)]


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
@pytest.mark.parametrize(("changed", "pre_norm"), LAYOUTS)
def test_same_bits_as_op_by_op(
    device: str,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    changed: dict[str, Any],
    pre_norm: bool,
    same_products: None,
) -> None:
    problem = Problem(device, dtype, parameter_dtype, pre_norm=pre_norm, options=OPTIONS._replace(**changed))
    expected = problem.results(problem.op_by_op)
    found = problem.results(problem.in_one_call)
    assert different(found, expected) == []
    assert different(problem.results(problem.in_one_call), found) == []  # run after run
    with torch.no_grad():
        y, z = problem.in_one_call()
    assert different([each for each in (y, z) if each is not None], found[: 1 + pre_norm]) == []


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_other_sizes(device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, same_products: None) -> None:
    """Heads of 128, sequences of a few tokens (for which another kernel computes column sums), one token, no biases.
    The CPU's core multiplies up to 16 rows itself, with other bits than torch's BLAS."""
    problems = [
        Problem(device, dtype, parameter_dtype, head_dim=128, sequences=[0, 130, 300]),
        Problem(device, dtype, parameter_dtype, sequences=list(range(0, 65, 8))),
        Problem(device, dtype, parameter_dtype, layers=1, sequences=[0, 1]),
        Problem(device, dtype, parameter_dtype, layers=2, bias=False, sequences=[0, 200]),
    ]
    for problem in problems:
        assert different(problem.results(problem.in_one_call), problem.results(problem.op_by_op)) == []


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
@pytest.mark.parametrize("wanted", ["layer by layer", "no gradient of the first layer", "no gradient of biases"])
def test_gradients_that_are_requested(
    device: str,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    wanted: str,
    same_products: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem(device, dtype, parameter_dtype)
    if wanted == "layer by layer":
        monkeypatch.setattr(layer_parameters, "_LARGE", 1)
        monkeypatch.setattr(rules, "is_large", lambda *_: False)  # attention's backward by Triton has other bits
    else:
        frozen = problem.layers[0] if "first" in wanted else [each.up_bias for each in problem.layers]
        frozen = [*frozen, *(each.qkv_bias for each in problem.layers if "biases" in wanted)]
        for parameter in frozen:
            parameter.requires_grad_(False)
    monkeypatch.setattr(Problem, "leaves", lambda self: [p for p in (self.x, *self.parameters()) if p.requires_grad])
    assert different(problem.results(problem.in_one_call), problem.results(problem.op_by_op)) == []


@takes_cpu
def test_which_gradients_are_computed_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("cpu", torch.float32, torch.float32, options=OPTIONS._replace(**RATES))

    def depths() -> list[int]:
        layers = native_layers(problem.layers)
        return [part.depth for part, _ in layer_parameters.parts_of(problem.x, problem.seeds, layers)]

    assert depths() == [3]
    hook = problem.layers[1].up_bias.register_post_accumulate_grad_hook(lambda _: None)
    assert depths() == [1, 1, 1]
    hook.remove()
    assert depths() == [3]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert depths() == [1, 1, 1]


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
def test_shared_layers(
    device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, pre_norm: bool, same_products: None
) -> None:
    problem = Problem(device, dtype, parameter_dtype, pre_norm=pre_norm)
    shared, other, _ = problem.layers
    problem.layers = [shared, other, shared, shared]
    assert different(problem.results(problem.in_one_call), problem.results(problem.op_by_op)) == []


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
def test_a_backward_that_does_not_fit_runs_attention_by_the_op(
    device: str,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    pre_norm: bool,
    same_products: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = OPTIONS._replace(**RATES, keep_activation=pre_norm)
    problem = Problem(device, dtype, parameter_dtype, pre_norm=pre_norm, options=options)
    expected = problem.results(lambda: problem.op_by_op(backend=None))
    plans = _record_backwards(monkeypatch, fails=True)
    monkeypatch.setattr(rules.Rule, "refusal", _as_on_hopper(rules.Rule.refusal))
    found = problem.results(problem.in_one_call)
    assert len(plans) == 2
    # Calls of the core, and of attention's op between them.
    assert [len(plan.backward_parts) for plan in plans] == [1, 1 + 2 * len(problem.layers)]
    assert different(found, expected) == []


def _record_backwards(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> list[Any]:
    """The plans of backwards, of which the first ``fails`` as if attention's kernel did not fit."""
    plans: list[Any] = []
    backward = core_executor.backward

    def record(plan: Any, *call: Any, **options: Any) -> Any:
        plans.append(plan)
        if fails and len(plans) == 1:
            raise _native.DoesNotFit("as under MPS")
        return backward(plan, *call, **options)

    monkeypatch.setattr(core_executor, "backward", record)
    return plans


def _as_on_hopper(refusal: Any) -> Any:
    """Also lets a CPU's plan run attention's backward by the op."""

    def asked(rule: Any, spec: Any, situation: Any) -> Any:
        return None if rule.name == rules.OTHER_ATTENTION else refusal(rule, spec, situation)

    return asked


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-LN", "pre-LN"])
def test_attention_s_backward_by_another_backend(
    pre_norm: bool, same_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large layers of short sequences, for which Triton's kernels are faster."""
    options = OPTIONS._replace(**RATES)
    problem = Problem("cuda", torch.bfloat16, torch.float32, pre_norm=pre_norm, options=options)
    for module in (layer_parameters, rules):
        monkeypatch.setattr(module, "is_large", lambda *_: True)
    rules._rules_for.cache_clear()
    plans = _record_backwards(monkeypatch, fails=False)
    found = problem.results(problem.in_one_call)
    rules._rules_for.cache_clear()
    assert [len(plan.backward_parts) for plan in plans] == [3] * len(problem.layers)
    assert different(found, problem.results(lambda: problem.op_by_op(backend=None))) == []


@takes_cpu
def test_windows_on_the_cpu() -> None:
    options = OPTIONS._replace(window_left=3, window_right=2)
    problem = Problem("cpu", torch.float32, torch.float32, head_dim=16, options=options)
    assert different(problem.results(problem.in_one_call), problem.results(problem.op_by_op)) == []


@takes_cpu
def test_a_parameter_that_changes_before_the_backward() -> None:
    problem = Problem("cpu", torch.float32, torch.float32)
    y, _ = problem.in_one_call()
    with torch.no_grad():
        problem.layers[1].up_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@takes_cpu
def test_second_derivatives_are_refused() -> None:
    problem = Problem("cpu", torch.float32, torch.float32)
    y, _ = problem.in_one_call()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(y.sum(), problem.x, create_graph=True)


@takes_cpu
def test_boundaries_of_sequences_are_checked() -> None:
    problem = Problem("cpu", torch.float32, torch.float32)
    problem.cu_seqlens[2] = 41
    with pytest.raises(ValueError, match="cu_seqlens"):
        problem.in_one_call()


@takes_cpu
def test_boundaries_and_seeds_that_are_strided() -> None:
    problem = Problem("cpu", torch.float32, torch.float32, options=OPTIONS._replace(**RATES))
    expected = problem.results(problem.op_by_op)
    problem.cu_seqlens = problem.cu_seqlens.repeat_interleave(2)[::2]
    assert problem.seeds is not None
    problem.seeds = problem.seeds.t().contiguous().t()
    assert different(problem.results(problem.in_one_call), expected) == []


def test_what_the_core_does_not_support() -> None:
    problem = Problem("cpu", torch.float32, torch.float32)

    def reason(*, x: Tensor = problem.x, layers: list[BlockParameters] = problem.layers) -> str | None:
        return stack.refused(*call_of(x, None, problem.cu_seqlens, None, problem.options, layers))

    layer = problem.layers[0]
    wide = torch.zeros(layer.out_weight.shape[0], 2 * layer.out_weight.shape[0])
    assert "one type" in str(reason(layers=[layer._replace(norm_a_bias=torch.zeros(128, dtype=torch.bfloat16))]))
    assert "same shapes" in str(reason(layers=[layer, layer._replace(up_weight=torch.zeros(8, 128))]))
    assert "contiguous" in str(reason(layers=[layer._replace(out_weight=wide[:, ::2])]))
    elsewhere = [BlockParameters(*(each.to("meta") for each in layer))]
    assert "x's device" in str(reason(layers=elsewhere))
    assert "one device" in str(reason(layers=[layer, *elsewhere]))
    assert "fit the layers" in str(reason(layers=[layer._replace(out_weight=torch.zeros(64, 256))]))
    assert "same biases" in str(reason(layers=[layer, layer._replace(up_bias=None, qkv_bias=None)]))
    with use_backend("reference"):
        assert "backend" in str(reason())
    assert reason(x=problem.x.detach().to(torch.bfloat16)) is not None
    assert "at least one" in str(reason(x=problem.x[:0]))


class Wrapper(Tensor):
    """A subclass with __torch_function__."""


@takes_cpu
def test_parameters_that_are_not_plain_are_refused() -> None:
    problem = Problem("cpu", torch.float32, torch.float32)
    weight = problem.layers[1].out_weight.detach()
    for changed, reason in (
        (weight, None),
        (weight.as_subclass(Wrapper), NOT_PLAIN),
        (torch._neg_view(weight), NOT_PLAIN),
    ):
        layers = [problem.layers[0], problem.layers[1]._replace(out_weight=changed)]
        call = call_of(problem.x, None, problem.cu_seqlens, None, problem.options, layers)
        assert stack.refused(*call) == reason


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_in_another_dtype(bias: bool) -> None:
    """Without copies of an optimizer, the same parameters of all layers are cast into one tensor."""
    problem = Problem("cpu", torch.float32, torch.float32, bias=bias)
    layers = native_layers(problem.layers)
    with torch.no_grad():
        found, expected = (layer_parameters.in_type(layers, torch.bfloat16, copies=copies) for copies in (False, True))
    for one, other, parameter in zip(found, expected, layers.parameters, strict=True):
        assert (one is parameter) is (other is parameter)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


# ---- streams, threads, graphs, memory --------------------------------------------------------------------------------


@pytest.mark.gpu
@hopper
def test_a_captured_step_gives_the_same_bits() -> None:
    problem = Problem("cuda", torch.bfloat16, torch.float32, options=OPTIONS._replace(**RATES))
    # Detached: a live autograd graph keeps the parameters' nodes on the stream on which they were created.
    expected = [each.detach() for each in problem.results(problem.in_one_call)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            problem.results(problem.in_one_call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = problem.results(problem.in_one_call)
    for _ in range(2):
        for each in found:
            each.detach().zero_()
        graph.replay()
        assert different(found, expected) == []


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_threads_and_streams(device: str, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    problem = Problem(device, dtype, parameter_dtype, options=OPTIONS._replace(**RATES))
    expected = problem.results(problem.in_one_call)
    found: list[list[int] | BaseException] = []

    def work() -> None:
        try:
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                for _ in range(3):
                    results = problem.results(problem.in_one_call)
            if stream is not None:
                stream.synchronize()
            found.append(different(results, expected))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[]] * 4


@pytest.mark.gpu
@hopper
def test_out_of_memory_leaves_a_usable_process() -> None:
    problem = Problem("cuda", torch.bfloat16, torch.float32)
    large = Problem("cuda", torch.bfloat16, torch.float32, sequences=list(range(0, 2**16 + 1, 2**9)))  # keeps 0.6 GB
    expected = problem.results(problem.in_one_call)
    gc.collect()
    torch.cuda.empty_cache()
    fraction = (torch.cuda.memory_reserved() + (8 << 20)) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            large.results(large.in_one_call)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert different(problem.results(problem.in_one_call), expected) == []


@pytest.mark.gpu
@hopper
def test_memory_is_freed() -> None:
    """A leak grows in every round. What is allocated once and kept, or what earlier tests of this process free
    meanwhile, changes one round."""
    problem = Problem("cuda", torch.bfloat16, torch.float32)
    allocated = []
    for _ in range(4):
        problem.results(problem.in_one_call)
        y, _ = problem.in_one_call()
        del y
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert min(after - before for before, after in itertools.pairwise(allocated)) <= 0, allocated


@pytest.mark.gpu
@hopper
def test_a_new_token_count_compiles_nothing() -> None:
    """Forward and backward with a new length each time: the slowest takes at most ten times the median."""
    import time

    times = []
    for tokens in range(200, 300):
        problem = Problem("cuda", torch.bfloat16, torch.float32, sequences=[0, 100, tokens])
        torch.cuda.synchronize()
        start = time.perf_counter()
        problem.results(problem.in_one_call)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    assert sorted(times[5:])[-2] < 10 * sorted(times)[50]


# A minimal NVTX injection library, which replaces NVTX functions and prints the names of ranges.
PROFILER = """
#include <stdio.h>
struct Callbacks {
  unsigned long struct_size;
  int (*get_table)(int module, void**** table, unsigned* size);
};
static int push(const char* name) { return fprintf(stderr, "range: %s\\n", name); }
static int pop(void) { return 0; }
int InitializeInjectionNvtx2(const void* (*get_export_table)(unsigned)) {
  const struct Callbacks* callbacks = get_export_table(1);
  void*** table;
  unsigned size;
  if (callbacks == NULL || !callbacks->get_table(1, &table, &size) || size < 12) return 0;
  *table[9] = (void*)push;  /* NVTX_CBID_CORE_RangePushA */
  *table[11] = (void*)pop;
  return 1;
}
"""
PROFILED = """
import torch, fasttfm
layers = [fasttfm.nn.PackedLayer(64, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
module = fasttfm.nn.PackedTransformer(layers)
x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
module(x, torch.tensor([0, 16], dtype=torch.int32, device="cuda"), 16).sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@hopper
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_profile_names_the_layers(tmp_path: Path) -> None:
    if not _native.core().layers_names_ranges_cuda():
        pytest.skip("the core was built without NVTX's header")
    (tmp_path / "profiler.c").write_text(PROFILER)
    library = tmp_path / "profiler.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "profiler.c")], check=True)
    environment = {**os.environ, "NVTX_INJECTION64_PATH": str(library)}
    run = subprocess.run([sys.executable, "-c", PROFILED], env=environment, capture_output=True, text=True, check=True)
    names = [line.removeprefix("range: ") for line in run.stderr.splitlines() if line.startswith("range: fasttfm")]
    assert names == [f"fasttfm layer {index} forward" for index in (0, 1)] + [
        f"fasttfm layer {index} backward" for index in (1, 0)
    ]


# ---- GEMMs -----------------------------------------------------------------------------------------------------------

_ROWS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 127, 129, 511, 513, 1000, 1819, 2047, 2049, 2305, 2778, 4095, 9000)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["forward", "input gradient", "weight gradient"])
def test_gemms_of_any_number_of_rows(kind: str) -> None:
    """The algorithm is chosen for rounded sizes and has to support every size. Results of small integers are exact."""
    width, columns = 768, 264
    for rows in _ROWS:
        x, weight, dy = (
            torch.randint(-2, 3, shape, device="cuda", dtype=torch.bfloat16)
            for shape in ((rows, width), (columns, width), (rows, columns))
        )
        bias = torch.randint(-2, 3, (columns,), device="cuda", dtype=torch.bfloat16) if kind == "forward" else None
        a, b = {"forward": (x, weight.t()), "input gradient": (dy, weight), "weight gradient": (dy.t(), x)}[kind]
        found = multiply(a, b, bias=bias, total=None, dtype=torch.float32 if bias is None else torch.bfloat16)
        expected = a.double() @ b.double() + (0 if bias is None else bias.double())
        assert torch.equal(found.double(), expected.to(found.dtype).double()), rows
