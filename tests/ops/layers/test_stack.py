"""Layers as data: the core's executors against torch's ops in fp64, forward and backward, for layers of many
descriptions."""

import itertools
from array import array
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.ops.layers import core_executor, stack, support, torch_executor
from fasttfm.ops.layers.encoding import EncodedSteps
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.spec import FIELDS, Attention, FeedForward, LayerSpec, Norm, Specs
from fasttfm.ops.layers.torch_executor import Inputs

pytestmark = pytest.mark.usefixtures("torch_multiplies_by_blas")

takes_cpu = pytest.mark.skipif(support.missing_cpu() is not None, reason=f"CPU: {support.missing_cpu()}")
hopper = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
DEVICES = [
    pytest.param("cpu", torch.float32, torch.float32, marks=takes_cpu, id="cpu"),
    pytest.param("cuda", torch.bfloat16, torch.float32, marks=[pytest.mark.gpu, hopper], id="bf16-fp32"),
    pytest.param("cuda", torch.bfloat16, torch.bfloat16, marks=[pytest.mark.gpu, hopper], id="bf16"),
    pytest.param("cuda", torch.float16, torch.float16, marks=[pytest.mark.gpu, hopper], id="fp16"),
]
SEQUENCES = [0, 9, 9, 10, 40, 77]  # one is empty
HEADS, WIDTH, INNER, HEAD_DIM = 2, 128, 192, 64
HEAD_NORMS = frozenset(("q_norm_weight", "k_norm_weight"))
EVERY = frozenset(FIELDS) - HEAD_NORMS
NO_BIASES = frozenset(name for name in EVERY if name.endswith("weight"))
LAYER_NORM, RMS_NORM = Norm("layer", 1e-5), Norm("rms", 1e-6)
ATTENTION = Attention(HEADS, HEADS, HEAD_DIM)
GELU, GATED = FeedForward(INNER, "gelu"), FeedForward(INNER, "gelu", gated=True)
BERT = LayerSpec(WIDTH, False, ATTENTION, GELU, LAYER_NORM, LAYER_NORM, EVERY)
GPT = replace(BERT, pre_norm=True, attention=replace(ATTENTION, window_right=0))
ROTARY = replace(ATTENTION, rotary=0, rotary_columns=HEAD_DIM)
LOCAL = replace(ROTARY, rotary=1, window_left=8, window_right=8)
MODERN = LayerSpec(WIDTH, True, ROTARY, GATED, LAYER_NORM, LAYER_NORM, NO_BIASES)
LLAMA = LayerSpec(
    WIDTH,
    True,
    replace(ROTARY, heads=4, kv_heads=2, window_right=0),
    FeedForward(INNER, "silu", gated=True),
    RMS_NORM,
    RMS_NORM,
    NO_BIASES,
)
QWEN3 = replace(LLAMA, attention=replace(LLAMA.attention, head_norm_eps=1e-6), present=NO_BIASES | HEAD_NORMS)
STACKS = {
    "BERT": (BERT,) * 3,
    "GPT": (GPT,) * 3,
    "relu": (replace(BERT, feed_forward=FeedForward(INNER, "relu")),) * 2,
    "recompute": (replace(BERT, recomputed=frozenset(("a", "y1"))),) * 2,
    "GPT-recompute-dropout": (replace(GPT, recomputed=frozenset(("a",)), dropout_a=0.2, dropout_b=0.3),) * 2,
    "BERT-dropout": (replace(BERT, dropout_a=0.2, dropout_b=0.3, attention=replace(ATTENTION, dropout=0.1)),) * 2,
    "GPT-dropout": (replace(GPT, dropout_a=0.2, dropout_b=0.3),) * 2,
    "ModernBERT": (MODERN, replace(MODERN, attention=LOCAL), MODERN),
    "ModernBERT-biases": (replace(MODERN, present=EVERY),) * 2,
    "gate-of-200": (replace(MODERN, feed_forward=replace(GATED, columns=200), present=EVERY),) * 2,
    "post-LN-gated": (replace(BERT, feed_forward=GATED, attention=ROTARY),) * 2,
    "half-rotated": (replace(MODERN, attention=replace(ROTARY, rotary_columns=HEAD_DIM // 2)),) * 2,
    "grouped": (replace(MODERN, attention=replace(ROTARY, heads=4, kv_heads=1)),) * 2,
    "scaled": (replace(MODERN, attention=replace(ROTARY, scale=0.2)),) * 2,
    "LLaMA": (LLAMA,) * 3,
    "Qwen3": (QWEN3,) * 3,
    "one-head-norm": (replace(QWEN3, present=NO_BIASES | {"q_norm_weight"}),) * 2,
    "post-RMS": (replace(LLAMA, pre_norm=False),) * 2,
}
LONG = [0, 1500, 1510, 2300]  # rows for which the projection rotates, on Hopper
LONG_ON_CPU = [0, 300, 310, 700]  # more than one block of each kernel


class Problem:
    """A stack and its inputs, random with a fixed seed."""

    def __init__(
        self,
        specs: tuple[LayerSpec, ...],
        device: str,
        dtype: torch.dtype,
        parameter_dtype: torch.dtype,
        sequences: list[int] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, scale: float = 0.1) -> Tensor:
            return torch.randn(shape, generator=generator).mul(scale)

        boundaries = SEQUENCES if sequences is None else sequences
        tokens, first = boundaries[-1], specs[0]
        self.specs = Specs.of(specs)
        drawn: list[Tensor | None] = []
        for spec in specs:
            shapes = spec.shapes()
            for name in FIELDS:
                shape = shapes.get(name)
                offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                drawn.append(None if shape is None else (offset + draw(*shape)).to(parameter_dtype))
        rms = first.norm_a.kind == "rms"
        stream = dtype if rms else parameter_dtype
        residual = draw(tokens, WIDTH, scale=1.0).to(stream) if first.pre_norm else None
        self.on_cpu = [draw(tokens, WIDTH, scale=1.0).to(dtype), residual, *drawn]
        self.device = device
        longest = max(after - before for before, after in pairwise(boundaries))
        angles = torch.arange(longest)[:, None] * 0.5 ** torch.arange(first.attention.rotary_columns // 2)
        self.tables = tuple((turned.cos(), turned.sin()) for turned in (angles, angles * 0.3))
        drops = any(spec.dropout_a or spec.dropout_b or spec.attention.dropout for spec in specs)
        seeds = torch.arange(3 * len(specs)).view(-1, 3) + 7 if drops else None
        starts = torch.tensor(boundaries)
        lengths = starts.diff()
        positions = torch.arange(tokens) - starts[:-1].repeat_interleave(lengths)
        self.rest = (torch.tensor(boundaries, dtype=torch.int32), longest, seeds, positions)
        self.weights = [draw(tokens, WIDTH) for _ in range(2)]

    def call(self, run: Any, *, double: bool = False, gradient: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and gradients of all that has one. ``double``: in fp64 on the CPU."""
        device = "cpu" if double else self.device
        leaves = [
            None if each is None else (each.double() if double else each.to(device)).clone().requires_grad_(gradient)
            for each in self.on_cpu
        ]
        cu_seqlens, longest, seeds, positions = (
            each.to(device) if isinstance(each, Tensor) else each for each in self.rest
        )
        tables = tuple(tuple((t.double() if double else t).to(device) for t in pair) for pair in self.tables)
        x, residual, *parameters = leaves
        inputs = Inputs(x, residual, cu_seqlens, longest, seeds, tables if self._rotates() else (), positions)
        found = [each for each in run(self.specs, inputs, parameters) if each is not None]
        if not gradient:
            return [each.cpu() for each in found], []
        loss = sum((each.float() * w.to(device)).sum() for each, w in zip(found, self.weights, strict=False))
        wanted = [each for each in leaves if each is not None]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=False)
        return [each.detach().cpu() for each in found], [each.cpu() for each in gradients]

    def _rotates(self) -> bool:
        return any(spec.attention.rotary is not None for spec in self.specs)


def by_ops(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
    steps = plan(specs, Situation("cpu", False, 4, 4)).forward
    return torch_executor.run(steps, inputs, parameters)


def by_autocast_ops(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
    """Torch's ops with the operands of GEMMs in x's dtype."""
    cast = [
        each.to(inputs.x.dtype) if each is not None and "norm" not in FIELDS[index % len(FIELDS)] else each
        for index, each in enumerate(parameters)
    ]
    return by_ops(specs, inputs, cast)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions that the core has run."""
    called: list[str] = []
    for name in ("forward", "backward"):
        run = getattr(core_executor, name)

        def record(*args: Any, name: str = name, run: Any = run, **options: Any) -> Any:
            called.append(name)
            return run(*args, **options)

        monkeypatch.setattr(core_executor, name, record)
    return called


def assert_as_accurate(found: list[Tensor], plain: list[Tensor], exact: list[Tensor]) -> None:
    """The error is at most twice that of torch's ops in the same dtypes, or a few roundings of the largest element."""
    assert len(found) == len(exact)
    for number, (got, torchs, true) in enumerate(zip(found, plain, exact, strict=True)):
        assert got.isfinite().all(), number
        largest = true.abs().max().item()
        unit = torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 2e-6
        bound = 2 * (torchs.double() - true).abs().max().item() + unit * largest
        error = (got.double() - true).abs().max().item()
        assert error <= bound, f"{number}: {error} > {bound}, of elements up to {largest}"


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_core_and_ops(
    name: str, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, runs: list[str]
) -> None:
    problem = Problem(STACKS[name], device, dtype, parameter_dtype)
    exact = problem.call(by_ops, double=True)
    plain = problem.call(by_autocast_ops)
    found = problem.call(stack.run_stack)
    assert runs == ["forward", "backward"]
    for each in range(2):
        assert_as_accurate(found[each], plain[each], exact[each])
    results, _ = problem.call(stack.run_stack, gradient=False)
    assert runs[2:] == ["forward"]
    assert_as_accurate(results, plain[0], exact[0])


@pytest.mark.parametrize("name", ["ModernBERT", "LLaMA", "Qwen3", "post-LN-gated"])
@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_many_rows(name: str, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, runs: list[str]) -> None:
    problem = Problem(STACKS[name], device, dtype, parameter_dtype, LONG if device == "cuda" else LONG_ON_CPU)
    exact = problem.call(by_ops, double=True)
    plain = problem.call(by_autocast_ops)
    found = problem.call(stack.run_stack)
    assert runs == ["forward", "backward"]
    for each in range(2):
        assert_as_accurate(found[each], plain[each], exact[each])


@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_same_bits(device: str, dtype: torch.dtype, parameter_dtype: torch.dtype) -> None:
    problem = Problem(STACKS["ModernBERT"], device, dtype, parameter_dtype)
    first, second = (problem.call(stack.run_stack) for _ in range(2))
    for a, b in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(a, b)


@takes_cpu
def test_memory_is_placed_without_overlap() -> None:
    """Tensors that are in use at the same time have memory of their own: every placement of each plan."""
    from fasttfm.ops.layers import steps
    from fasttfm.ops.layers.forward import Forward
    from fasttfm.ops.layers.plan import placed

    for specs in STACKS.values():
        for training in (False, True):
            for device in ("cpu", "cuda"):
                rules = frozenset(("rotary_projection", "gemm_activation"))
                situation = Situation(device, training, 2, 4 if specs[0].norm_a.kind == "layer" else 2, rules)
                forward = Forward(Specs.of(specs), situation)
                places, end = placed(forward.steps, forward.sizes, set())
                used = {
                    name: [n for n, step in enumerate(forward.steps) if name in steps.names_in(step)] for name in places
                }
                for name, start in places.items():
                    assert start + forward.sizes[name] <= end
                    for other, begin in places.items():
                        if other == name or used[other][0] > used[name][-1] or used[name][0] > used[other][-1]:
                            continue
                        apart = start + forward.sizes[name] <= begin or begin + forward.sizes[other] <= start
                        assert apart, (name, other)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", STACKS)
def test_the_workspace_does_not_overflow(name: str, device: str) -> None:
    """For any number of tokens and sequences: a positive size, or an error."""
    count = getattr(_native.core(), f"layers_workspace_{device}", None)
    if count is None:
        pytest.skip(f"the core has no layers on {device}")
    types = (0, 0, 0) if device == "cpu" else (1, 1, 1)
    sizes = (1, 128, 2**20, 2**31, 2**40, 2**59, 2**63 - 1)
    made = plan(Specs.of(STACKS[name]), Situation(device, True, 2, 2))
    for words in (made.words, *made.backward_parts):
        assert isinstance(words, EncodedSteps)
        for tokens, sequences, longest in itertools.product(sizes, repeat=3):
            needed = array("q", (0,))
            address = needed.buffer_info()[0]
            try:
                count(*words.encoded.buffer_info(), tokens, sequences, longest, 2, *types, address)
            except ValueError:
                continue
            assert 0 <= needed[0] < 2**63 - 1


def test_what_the_core_does_not_take_runs_by_ops(runs: list[str]) -> None:
    problem = Problem(STACKS["ModernBERT"], "cpu", torch.float32, torch.float32)
    results, _ = problem.call(stack.run_stack, double=True)
    expected, _ = problem.call(by_ops, double=True)
    assert not runs
    assert torch.equal(results[0], expected[0])


@takes_cpu
def test_a_parameter_that_changes_before_the_backward_raises() -> None:
    problem = Problem(STACKS["LLaMA"], "cpu", torch.float32, torch.float32)

    def change(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
        found = stack.run_stack(specs, inputs, parameters)
        with torch.no_grad():
            parameters[0].add_(1)
        return found

    with pytest.raises(RuntimeError, match="has changed between forward and backward"):
        problem.call(change)


@takes_cpu
def test_frozen_layers_have_no_gradients(runs: list[str]) -> None:
    """Layers whose parameters partly need no gradient: the others get the same ones."""
    problem = Problem(STACKS["ModernBERT"], "cpu", torch.float32, torch.float32)
    _, expected = problem.call(stack.run_stack)
    kept: list[Tensor] = []

    def freeze(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
        for parameter in parameters[: len(FIELDS)]:
            if parameter is not None:
                parameter.requires_grad_(False)
        kept.extend(each for each in parameters[len(FIELDS) :] if each is not None)
        y, z = stack.run_stack(specs, inputs, parameters)
        total = (y * problem.weights[0]).sum() + (z * problem.weights[1]).sum()
        gradients = torch.autograd.grad(total, kept)
        for got, true in zip(gradients, expected[-len(kept) :], strict=True):
            torch.testing.assert_close(got, true)
        return y.detach(), z.detach()

    freeze(*_arguments(problem))


def _arguments(problem: Problem) -> tuple[Any, Inputs, list[Any]]:
    x, residual, *parameters = problem.on_cpu
    cu_seqlens, longest, seeds, positions = problem.rest
    leaves = [None if each is None else each.clone().requires_grad_() for each in parameters]
    return problem.specs, Inputs(x, residual, cu_seqlens, longest, seeds, problem.tables, positions), leaves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, "in shapes that fit"),
        ({"dropout_a": 0.1, "norm_a": RMS_NORM}, "RMSNorm without dropout"),
    ],
)
@takes_cpu
def test_refusals(change: dict[str, Any], message: str) -> None:
    problem = Problem(STACKS["GPT"], "cpu", torch.float32, torch.float32)
    _, inputs, parameters = _arguments(problem)
    reason = stack.refused(Specs.of([replace(GPT, **change)] * 3), inputs, parameters)
    assert reason is not None
    assert message in reason
