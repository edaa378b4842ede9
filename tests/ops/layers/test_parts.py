"""Inference on a CPU in parts: whole sequences, each of which one thread runs through all layers."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from fasttfm import _native
from fasttfm.nn import PackedLayer, PackedTransformer
from fasttfm.ops.layers import core_executor, stack
from fasttfm.ops.layers.parts import Parts, divided
from tests.ops.layers.test_stack import STACKS, Problem, assert_as_accurate, by_ops, takes_cpu

WITHOUT_DROPOUT = [name for name in STACKS if not name.endswith("dropout")]
SEQUENCES = [0, 9, 9, 10, 40, 77, 140, 150, 210, 210]  # two are empty, one of them the last


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.fixture
def divisions(monkeypatch: pytest.MonkeyPatch) -> list[Parts]:
    """The parts of the calls that ran in parts."""
    recorded: list[Parts] = []
    run = core_executor._run_parts

    def record(plan: Any, inputs: Any, layers: Any, parts: Parts, *rest: Any, **options: Any) -> None:
        recorded.append(parts)
        run(plan, inputs, layers, parts, *rest, **options)

    monkeypatch.setattr(core_executor, "_run_parts", record)
    return recorded


@pytest.mark.parametrize("name", WITHOUT_DROPOUT)
@takes_cpu
def test_results(name: str, threads: int, divisions: list[Parts]) -> None:
    problem = Problem(STACKS[name], "cpu", torch.float32, torch.float32, SEQUENCES)
    exact, _ = problem.call(by_ops, double=True, gradient=False)
    plain, _ = problem.call(by_ops, gradient=False)
    results, _ = problem.call(stack.run_stack, gradient=False)
    assert len(divisions) == 1
    assert_as_accurate(results, plain, exact)


@takes_cpu
def test_calls_that_run_whole(threads: int, divisions: list[Parts]) -> None:
    def without_positions(specs: Any, inputs: Any, parameters: Any) -> Any:
        return stack.run_stack(specs, inputs._replace(positions=None), parameters)

    rotary = Problem(STACKS["LLaMA"], "cpu", torch.float32, torch.float32, SEQUENCES)
    rotary.call(without_positions, gradient=False)  # rotated by the index among all tokens
    rotary.call(stack.run_stack)  # with gradients
    dropout = Problem(STACKS["BERT-dropout"], "cpu", torch.float32, torch.float32, SEQUENCES)
    dropout.call(stack.run_stack, gradient=False)  # its masks follow from the index among all tokens
    Problem(STACKS["BERT"], "cpu", torch.float32, torch.float32, [0, 90]).call(stack.run_stack, gradient=False)
    assert not divisions


@takes_cpu
def test_layers_of_bert(threads: int, divisions: list[Parts]) -> None:
    """An encoder's inference runs in parts, with the results that it has with a gradient, which runs whole."""
    torch.manual_seed(0)
    for norm_first in (False, True):
        layers = [PackedLayer(64, 4, 128, norm_first=norm_first) for _ in range(2)]
        encoder = PackedTransformer(layers, torch.nn.LayerNorm(64) if norm_first else None).eval()
        cu_seqlens = torch.tensor(SEQUENCES, dtype=torch.int32)
        x = torch.randn(SEQUENCES[-1], 64)
        whole = encoder(x, cu_seqlens, 63)
        assert not divisions
        with torch.no_grad():
            found = encoder(x, cu_seqlens, 63)
        assert divisions
        divisions.clear()
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


@takes_cpu
def test_a_part_without_enough_memory_is_refused(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        core_executor, "divided", lambda boundaries, threads: divided(boundaries, threads)._replace(rows=3)
    )
    problem = Problem(STACKS["BERT"], "cpu", torch.float32, torch.float32, SEQUENCES)
    with pytest.raises(ValueError, match="more tokens than its memory is for"):
        problem.call(stack.run_stack, gradient=False)


def test_each_sequence_is_in_one_part() -> None:
    draw = random.Random(0)
    in_parts = 0
    for _ in range(2000):
        threads = draw.randint(2, 8)
        longest = draw.choice((3, 40, 600))
        boundaries = [0]
        for _ in range(draw.randint(1, 60)):
            boundaries.append(boundaries[-1] + draw.randint(0, longest))
        parts = divided(boundaries, threads)
        if parts is None:
            continue
        in_parts += 1
        first = parts.first_sequences
        assert first[0] == 0
        assert first[-1] == len(boundaries) - 1
        assert all(before < after for before, after in pairwise(first))
        sizes = [boundaries[after] - boundaries[before] for before, after in pairwise(first)]
        assert min(sizes) > 0
        assert max(sizes) == parts.rows
        assert max(after - before for before, after in pairwise(first)) == parts.sequences
        assert max(sizes) * threads <= 1.25 * boundaries[-1]  # no thread has much more than its fraction
    assert in_parts > 1000


@pytest.mark.parametrize(
    ("boundaries", "threads"),
    [
        ([0, 10, 20], 1),  # one thread
        ([0, 40], 2),  # one sequence
        ([0, 10, 500], 2),  # a sequence that takes longer than all others
        ([3, 10, 20], 2),  # tokens before the first sequence
        ([0, 0, 0], 2),  # no tokens
    ],
)
def test_whole(boundaries: list[int], threads: int) -> None:
    assert divided(boundaries, threads) is None


@takes_cpu
def test_the_core_refuses_too_many_buffers() -> None:
    table = Parts((0, 1), 1, 1).table([0] * 65, (64, 64, 64))
    empty = torch.empty(0, dtype=torch.uint8)
    sizes = (1, 1, 1, 1, 0, 0, 0)
    boundaries = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="too many buffers"):
        _native.core().layers_run_parts_cpu(0, 0, *sizes, boundaries, empty, 0, 0, 0, table.buffer_info()[0])
