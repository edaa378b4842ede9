"""Layers as data that write their keys and values to a KV cache: the core against torch's ops in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.ops.layers import stack, torch_executor
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import Situation
from fasttfm.ops.layers.torch_executor import Cache, Inputs
from tests.ops.layers.test_stack import DEVICES, SEQUENCES, STACKS, Problem, assert_as_accurate, takes_cpu

NAMES = ["GPT", "ModernBERT-biases", "grouped", "LLaMA", "Qwen3", "post-RMS"]
CAPACITY, SLOTS, UNUSED = 50, 5, 7.0


class Filled:
    """A way to run layers that fills a cache, which it keeps: sequence i has slot ``slots[i]``."""

    def __init__(self, run: Any, *, misplaced: int | None = None) -> None:
        self.run, self.misplaced = run, misplaced
        self.cache: Any = None

    def __call__(self, specs: Any, inputs: Inputs, parameters: list[Any]) -> tuple[Tensor, None]:
        attention, x = specs[0].attention, inputs.x
        shape = (len(specs), SLOTS, attention.kv_heads, CAPACITY, attention.head_dim)
        keys, values = (x.new_full(shape, UNUSED) for _ in range(2))
        slots = torch.tensor([3, 1, 0, 4, 2], device=x.device)
        owners = slots.repeat_interleave(inputs.cu_seqlens.diff(), output_size=x.shape[0])
        places = owners * (attention.kv_heads * CAPACITY) + inputs.positions
        if self.misplaced is not None:
            places[0] = self.misplaced
        self.cache = Cache(keys, values, places)
        return self.run(specs, inputs._replace(cache=self.cache), parameters), None

    def results(self, problem: Problem, **options: Any) -> list[Tensor]:
        (y,), _ = problem.call(self, gradient=False, **options)
        return [y, self.cache.keys.cpu(), self.cache.values.cpu()]


def by_ops(specs: Any, inputs: Inputs, parameters: list[Any]) -> Tensor:
    forward = plan(specs, Situation("cpu", False, 4, 4, cache="prompts")).forward
    return torch_executor.run(forward, inputs, parameters)[0]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("device", "dtype", "parameter_dtype"), DEVICES)
def test_core_and_ops(name: str, device: str, dtype: torch.dtype, parameter_dtype: torch.dtype, threads: int) -> None:
    """y, and all elements of the cache, also those that belong to no token."""
    if parameter_dtype != dtype:
        pytest.skip("a cache is in the parameters' type, unless autocast is on")
    problem = Problem(STACKS[name], device, dtype, parameter_dtype)
    exact, plain = Filled(by_ops).results(problem, double=True), Filled(by_ops).results(problem)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # several threads run the call in parts
    try:
        found = Filled(stack.run_cached).results(problem)
    finally:
        torch.set_num_threads(before)
    assert_as_accurate(found, plain, exact)
    written = SEQUENCES[-1] * exact[1].shape[2] * exact[1].shape[4] * len(STACKS[name])
    for kept in found[1:]:
        assert int((kept != UNUSED).sum()) == written


@takes_cpu
@pytest.mark.parametrize("place", [-1, -CAPACITY * 100, SLOTS * 2 * CAPACITY, 2**60])
def test_places_outside_of_the_cache_are_not_written(place: int) -> None:
    problem = Problem(STACKS["GPT"], "cpu", torch.float32, torch.float32)
    right = Filled(stack.run_cached).results(problem)
    wrong = Filled(stack.run_cached, misplaced=place).results(problem)
    assert torch.equal(wrong[0], right[0])
    differs = (wrong[1] != right[1]).any(-1)
    own, heads = (right[1] != UNUSED).all(-1), right[1].shape[2]
    assert bool((wrong[1][differs & own] == UNUSED).all())
    assert int(differs.sum()) <= 2 * heads * len(STACKS["GPT"])


@takes_cpu
def test_what_the_core_does_not_run() -> None:
    problem = Problem(STACKS["GPT"], "cpu", torch.float32, torch.float32)
    run = Filled(stack.run_cached)
    assert problem.call(run, gradient=False, double=True) == ([], [])  # None: fp64 has no plan on the core


# ---- one new token of each sequence ----------------------------------------------------------------------------------

LENGTHS = [30, 0, 49, 7, 70]  # the last one is clamped
WINDOWED = tuple(replace(spec, attention=replace(spec.attention, window_left=5)) for spec in STACKS["LLaMA"])
SCALED = tuple(replace(spec, attention=replace(spec.attention, scale=0.2)) for spec in STACKS["GPT"])
STEPS = {**{name: STACKS[name] for name in NAMES}, "window": WINDOWED, "scaled": SCALED}


def step(run: Any, kept: dict[str, Tensor]) -> Any:
    """Runs layers over a new token of each of the first slots of a random cache, of which ``kept`` gets a copy."""

    def call(specs: Any, inputs: Inputs, parameters: list[Any]) -> tuple[Tensor, None]:
        attention, x = specs[0].attention, inputs.x
        shape = (2, len(specs), SLOTS, attention.kv_heads, CAPACITY, attention.head_dim)
        keys, values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype).unbind()
        cache = Cache(keys.contiguous(), values.contiguous(), lengths=torch.tensor(LENGTHS, dtype=torch.int32))
        y = run(specs, inputs._replace(cache=cache), parameters)
        kept["keys"], kept["values"] = cache.keys, cache.values
        return y, None

    return call


def step_by_ops(specs: Any, inputs: Inputs, parameters: list[Any]) -> Tensor:
    forward = plan(specs, Situation("cpu", False, 4, 4, cache="tokens")).forward
    return torch_executor.run(forward, inputs, parameters)[0]


@takes_cpu
@pytest.mark.parametrize("name", STEPS)
def test_steps_of_core_and_ops(name: str) -> None:
    problem = Problem(STEPS[name], "cpu", torch.float32, torch.float32, [0, 1, 2, 3, 4, 5])
    found = []
    for run, double in ((stack.run_cached, False), (step_by_ops, False), (step_by_ops, True)):
        kept: dict[str, Tensor] = {}
        (y,), _ = problem.call(step(run, kept), double=double, gradient=False)
        found.append([y, kept["keys"], kept["values"]])
    assert_as_accurate(*found)
    before: dict[str, Tensor] = {}
    problem.call(step(lambda specs, inputs, parameters: inputs.x, before), gradient=False)
    rows = torch.arange(CAPACITY) == torch.tensor(LENGTHS).clamp(max=CAPACITY - 1)[:, None]
    for name, each in (("keys", found[0][1]), ("values", found[0][2])):
        changed = (each != before[name]).any(-1).any(2)
        assert torch.equal(changed, rows.expand_as(changed))


@takes_cpu
def test_a_step_has_the_same_bits_in_every_batch_and_with_any_threads() -> None:
    results = []
    for sequences, threads in ((5, 1), (5, 3), (2, 1)):
        problem = Problem(STACKS["LLaMA"], "cpu", torch.float32, torch.float32, list(range(6)))

        def call(specs: Any, inputs: Inputs, parameters: list[Any], count: int = sequences) -> Any:
            own = inputs._replace(
                x=inputs.x[:count],
                residual=inputs.residual[:count],  # type: ignore[index]
                positions=inputs.positions[:count],  # type: ignore[index]
                cu_seqlens=inputs.cu_seqlens[: count + 1],
            )
            lengths = own.cache.lengths[:count]  # type: ignore[union-attr]
            return stack.run_cached(specs, own._replace(cache=own.cache._replace(lengths=lengths)), parameters)

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            (y,), _ = problem.call(step(call, {}), gradient=False)
        finally:
            torch.set_num_threads(before)
        results.append(y[:2])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
