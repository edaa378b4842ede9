"""LoRA in the plans of layers: the core's executors against torch's ops in fp64, and what frozen weights leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.ops.layers import lora, stack, steps, torch_executor
from fasttfm.ops.layers.lora import Pair
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.spec import FIELDS, Adapter, LayerSpec, Specs
from fasttfm.ops.layers.torch_executor import Inputs
from tests.ops.layers.test_stack import DEVICES, LONG, LONG_ON_CPU, STACKS, Problem, assert_as_accurate, runs, takes_cpu

__all__ = ["runs"]  # a fixture
pytestmark = pytest.mark.usefixtures("torch_multiplies_by_blas")
SCALE = 1.5
TRAINED = [
    "BERT",
    "recompute",
    "GPT",
    "BERT-dropout",
    "ModernBERT",
    "ModernBERT-biases",
    "grouped",
    "LLaMA",
    "Qwen3",
    "post-RMS",
]
SELECTED = ["BERT", "ModernBERT", "LLaMA", "Qwen3", "post-LN-gated"]
COUNT = 3  # of selected adapters
FROZEN = frozenset(FIELDS) | {"x", "residual"}


def adapters_of(spec: LayerSpec, rank: int, *, selected: bool = False) -> tuple[Adapter, ...]:
    """Of each linear layer one: queries and values of qkv, gate and up, all of the others."""
    attention, shapes = spec.attention, spec.shapes()
    queries, values = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    outputs = {name: shapes[f"{name}_weight"][0] for name in lora.LINEARS}
    halves = ((0, outputs["up"] // 2), (outputs["up"] // 2, outputs["up"]))
    blocks = {
        "qkv": ((0, queries), (queries + values, queries + 2 * values)),
        "out": ((0, outputs["out"]),),
        "up": halves if spec.feed_forward.gated else ((0, outputs["up"]),),
        "down": ((0, outputs["down"]),),
    }
    return tuple(Adapter(name, rank, outputs[name], blocks[name], selected) for name in lora.LINEARS)


class LoraProblem(Problem):
    """A stack of frozen layers with adapters."""

    def __init__(self, name: str, *given: Any, rank: int = 4, selected: bool = False, **options: Any) -> None:
        specs = tuple(replace(spec, adapters=adapters_of(spec, rank, selected=selected)) for spec in STACKS[name])
        super().__init__(specs, *given, **options)
        generator = torch.Generator().manual_seed(1)
        kind: Any = given[1] if selected else torch.float32

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).mul(0.1).to(kind)

        count = (COUNT,) if selected else ()
        self.pairs = []
        for spec in specs:
            of_layer = []
            for adapter in spec.adapters:
                inner = spec.shapes()[f"{adapter.linear}_weight"][1]
                rows = sum(last - first for first, last in adapter.blocks)
                b = draw(*count, adapter.outputs if selected else rows, rank)
                of_layer.append(Pair(draw(*count, adapter.columns, inner), b, 1.0 if selected else SCALE))
            self.pairs.append(tuple(of_layer))
        tokens = len(self.on_cpu[0])  # type: ignore[arg-type]
        runs_of_tokens = torch.randint(-1, COUNT, (8,), generator=generator).repeat_interleave(-(-tokens // 8))
        self.adapters = runs_of_tokens[:tokens].int() if selected else None

    def run(self, run: Any, *, double: bool = False, gradient: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Results, and the gradients of x and of all pairs. ``double``: in fp64 on the CPU."""
        device = "cpu" if double else self.device

        def leaf(each: Any, *, trained: bool = False) -> Any:
            if each is None:
                return None
            return (each.double() if double else each.to(device)).clone().requires_grad_(trained and gradient)

        x, residual, *parameters = map(leaf, self.on_cpu)
        x.requires_grad_(gradient)
        pairs = [tuple(Pair(leaf(a, trained=True), leaf(b, trained=True), s) for a, b, s in own) for own in self.pairs]
        rest = [each.to(device) if isinstance(each, Tensor) else each for each in self.rest]
        tables = tuple(tuple((t.double() if double else t).to(device) for t in pair) for pair in self.tables)
        adapters = None if self.adapters is None else self.adapters.to(device)
        angles: Any = tables if self._rotates() else ()
        inputs = Inputs(x, residual, *rest[:3], angles, rest[3], pairs=pairs, adapters=adapters)  # type: ignore[misc]
        found = [each for each in run(self.specs, inputs, parameters) if each is not None]
        if not gradient:
            return [each.cpu() for each in found], []
        loss = sum((each.float() * w.to(device)).sum() for each, w in zip(found, self.weights, strict=False))
        gradients = torch.autograd.grad(loss, [x, *lora.tensors_of(pairs)])
        return [each.detach().cpu() for each in found], [each.cpu() for each in gradients]


def by_ops(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
    """Torch's ops, with the operands of GEMMs in x's dtype."""
    dtype = inputs.x.dtype
    cast = [
        each.to(dtype) if each is not None and "norm" not in FIELDS[index % len(FIELDS)] else each
        for index, each in enumerate(parameters)
    ]
    forward = plan(specs, Situation("cpu", False, 4, 4)).forward
    return torch_executor.run(forward, inputs, cast, lora.differentiable(specs, inputs))


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_training(name: str, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, runs: list[str]) -> None:
    problem = LoraProblem(name, device, dtype, parameter_dtype)
    exact = problem.run(by_ops, double=True)
    plain = problem.run(by_ops)
    found = problem.run(stack.run_stack)
    assert runs == ["forward", "backward"]
    for each in range(2):
        assert_as_accurate(found[each], plain[each], exact[each])
    results, _ = problem.run(stack.run_stack, gradient=False)
    assert runs[2:] == ["forward"]
    assert_as_accurate(results, plain[0], exact[0])


@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "LLaMA", "Qwen3"])
@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_many_rows(
    name: str, rank: int, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, runs: list[str]
) -> None:
    """On Hopper, one GEMM adds both products."""
    sequences = LONG if device == "cuda" else LONG_ON_CPU
    problem = LoraProblem(name, device, dtype, parameter_dtype, rank=rank, sequences=sequences)
    exact = problem.run(by_ops, double=True)
    plain = problem.run(by_ops)
    found = problem.run(stack.run_stack)
    assert runs == ["forward", "backward"]
    for each in range(2):
        assert_as_accurate(found[each], plain[each], exact[each])


@pytest.mark.parametrize("name", TRAINED)
def test_a_fused_gemm_computes_both_products(name: str) -> None:
    """The steps of Hopper by torch's ops, and their memory."""
    problem = LoraProblem(name, "cpu", torch.float32, torch.float32, rank=8)
    situation = Situation("cuda", True, 4, 4, rules=frozenset(("adapted_gemm",)), frozen=FROZEN)
    made = plan(problem.specs, situation)
    linears = len(problem.specs) * len(lora.LINEARS)
    for sequence, count in ((made.forward, linears), (made.backward, linears - 1)):
        assert sum(isinstance(step, steps.AdaptedGemm) for step in sequence) == count
    assert made.kept <= plan(problem.specs, situation._replace(rules=frozenset())).kept

    def fused(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
        return torch_executor.run(made.forward, inputs, parameters, lora.differentiable(specs, inputs))

    exact = problem.run(by_ops, double=True)
    found = problem.run(fused, double=True)
    for each in range(2):
        for got, true in zip(found[each], exact[each], strict=True):
            torch.testing.assert_close(got, true, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_an_adapter_for_each_token(
    name: str, long: bool, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, runs: list[str]
) -> None:
    sequences = {"sequences": LONG if device == "cuda" else LONG_ON_CPU} if long else {}
    problem = LoraProblem(name, device, dtype, dtype, rank=16, selected=True, **sequences)
    exact, _ = problem.run(by_ops, double=True, gradient=False)
    plain, _ = problem.run(by_ops, gradient=False)
    found, _ = problem.run(stack.run_stack, gradient=False)
    assert runs == ["forward"]
    assert_as_accurate(found, plain, exact)


@takes_cpu
def test_an_adapter_of_all_tokens_is_one_of_several() -> None:
    """The tokens of an adapter get the results that this adapter gives alone."""
    problem = LoraProblem("BERT", "cpu", torch.float32, torch.float32, selected=True)
    assert problem.adapters is not None
    mixed, _ = problem.run(stack.run_stack, gradient=False)
    boundaries = problem.rest[0].tolist()
    problem.adapters = torch.tensor([0, 0, 1, -1, 2]).repeat_interleave(problem.rest[0].diff()).int()
    mixed, _ = problem.run(stack.run_stack, gradient=False)
    chosen = problem.adapters
    for index in (-1, 0, 1, 2):
        problem.adapters = torch.full_like(chosen, index)
        alone, _ = problem.run(stack.run_stack, gradient=False)
        own = chosen == index
        assert own.any(), boundaries
        torch.testing.assert_close(mixed[0][own], alone[0][own], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(mixed[0][~own], alone[0][~own], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "Qwen3"])
def test_frozen_weights_cost_nothing(name: str) -> None:
    """No gradient of a weight, of a norm or of the inputs is computed, and what only these read is not kept."""
    adapted = Specs.of(replace(spec, adapters=adapters_of(spec, 4)) for spec in STACKS[name])
    situation = Situation("cpu", True, 4, 4)
    frozen = plan(adapted, situation._replace(frozen=FROZEN))
    linears = len(adapted) * len(lora.LINEARS)
    gradients = [step for step in frozen.backward if isinstance(step, steps.WeightGradient)]
    assert len(gradients) == 2 * linears
    assert all(step.d.startswith("d lora") for step in gradients)
    gemms = [step for step in frozen.backward if isinstance(step, steps.Gemm)]
    assert len(gemms) == 3 * linears - 2  # but for the gradient of x, of the first layer's W and A
    for step in frozen.backward:
        assert not [value for value in step if isinstance(value, str) and value.startswith("d ") and "_" in value]
    # With an adapter of down only, the input of up is not kept.
    few = Specs.of(replace(spec, adapters=adapters_of(spec, 4)[-1:]) for spec in STACKS[name])
    assert plan(few, situation._replace(frozen=FROZEN)).kept < frozen.kept < plan(adapted, situation).kept + 1


def test_ranks_of_gpus_are_multiples_of_eight() -> None:
    """Rows of 16 bytes, of which the last columns are 0."""
    problem = LoraProblem("BERT", "cpu", torch.float32, torch.float32, rank=3)
    adapter = problem.specs[0].adapters[0]
    assert lora.columns_of(adapter, "cpu") == 6
    assert lora.columns_of(adapter, "cuda") == 8
    made = plan(problem.specs, Situation("cuda", False, 2, 4))
    assert {step.columns for step in made.forward if isinstance(step, steps.Gemm) and step.b.endswith(".a")} == {8}


@takes_cpu
def test_an_adapter_that_changes_before_the_backward_raises() -> None:
    problem = LoraProblem("BERT", "cpu", torch.float32, torch.float32)

    def change(specs: Any, inputs: Inputs, parameters: list[Any]) -> Any:
        found = stack.run_stack(specs, inputs, parameters)
        with torch.no_grad():
            inputs.pairs[0][0].b.add_(1)
        return found

    with pytest.raises(RuntimeError, match="has changed between forward and backward"):
        problem.run(change)
