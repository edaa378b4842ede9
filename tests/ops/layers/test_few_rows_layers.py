"""All layers over few tokens in one kernel (kernels/few_rows/cuda_layers.cu): which calls it takes, and its results
against fp64 and the chain of kernels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from described_layers import call_of, run, specs_of
from torch import Tensor

from fasttfm import _native, models
from fasttfm.inference import Session, session
from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.layers import core_executor, few_rows_forward, few_tokens, rules, stack
from fasttfm.ops.layers.few_tokens import FewTokens, Workspace
from fasttfm.ops.layers.parameters import layers_of
from fasttfm.ops.layers.plan import plan
from fasttfm.ops.layers.rules import RULES, Situation, Sizes, refused
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

HOPPER = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
CORE = pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
OPTIONS = BlockOptions(12, 32, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-12, 1e-5, False, False, None)
SIZES = {"BERT-base": (768, 3072), "MiniLM": (384, 1536)}  # width and intermediate, of 12 heads
# Lengths of sequences, and tokens after the last one.
BATCHES: list[tuple[list[int], int]] = [
    *(([tokens], 0) for tokens in (1, 5, 8, 16, 17, 31, 32)),
    *(([1] * 16, 0), ([3, 13], 0), ([9, 0, 1, 10], 0), ([1] * 32, 0), ([0, 7, 1, 12, 12, 0], 0)),
    *(([12], 4), ([2, 0, 3], 20), ([28], 4)),
]


def layer_of(width: int, inner: int, device: str) -> BlockParameters:
    def weight(outputs: int, inputs: int) -> Tensor:
        return (inputs**-0.5 * torch.randn(outputs, inputs, device=device)).bfloat16()

    def vector(size: int, mean: float = 0.0) -> Tensor:
        return (mean + 0.1 * torch.randn(size, device=device)).bfloat16()

    return BlockParameters(
        *(weight(3 * width, width), vector(3 * width), weight(width, width), vector(width), vector(width, 1.0)),
        *(vector(width), weight(inner, width), vector(inner), weight(width, inner), vector(width)),
        *(vector(width, 1.0), vector(width)),
    )


def boundaries(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


# ---- which calls the kernel takes ------------------------------------------------------------------------------------


MOST_ROWS = 32
RULE = next(rule for rule in RULES if rule.name == "one_kernel")
SITUATION = Situation("cuda", False, 2, 2, "", torch.bfloat16, torch.bfloat16, is_session=True)


def refusal(layer: BlockParameters, *, options: BlockOptions = OPTIONS, pre_norm: bool = False, **given: Any) -> Any:
    """Why the rule does not apply; None if it does."""
    sizes = Sizes(32, 1, 32, 6, False, 132)
    situation = SITUATION._replace(**{name: each for name, each in given.items() if name in Situation._fields})
    sizes = sizes._replace(**{name: each for name, each in given.items() if name in Sizes._fields})
    return refused(RULE, specs_of(options, [layer], pre_norm=pre_norm)[0], situation, sizes)


@pytest.fixture(scope="module")
def layer() -> BlockParameters:
    return layer_of(384, 1536, "cpu")


@CORE
def test_calls_that_the_rule_takes(layer: BlockParameters) -> None:
    for activation in ("gelu", "gelu_tanh"):
        for rows in (1, MOST_ROWS):
            for depth in (6, 24):
                options = OPTIONS._replace(activation=activation)
                assert refusal(layer, options=options, rows=rows, layers=depth) is None


@CORE
@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({"rows": MOST_ROWS + 1}, {}, "up to 32 rows"),
        ({"layers": 5}, {}, "6 to 24 layers"),
        ({"layers": 25}, {}, "6 to 24 layers"),
        ({"dtype": torch.float16, "parameter_dtype": torch.float16}, {}, "takes bfloat16"),
        ({"parameter_dtype": torch.float32}, {}, "x's type"),
        ({"pre_norm": True}, {}, "post-LN"),
        ({"is_session": False}, {}, "sessions"),
        ({"training": True}, {}, "without gradients"),
        ({"precision": "fp8"}, {}, "x's type"),
        ({"device": "cpu"}, {}, "Hopper's"),
        ({}, {"p_a": 0.1}, "without dropout"),
        ({}, {"window_right": 0}, "all keys"),
        ({}, {"window_left": 4, "window_right": 4}, "all keys"),
        ({}, {"activation": "relu"}, "takes gelu and gelu_tanh"),
        ({}, {"heads": 6}, "BERT-base's and MiniLM's"),
    ],
)
def test_refusals(layer: BlockParameters, given: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    assert reason in str(refusal(layer, options=OPTIONS._replace(**options), **given))


@CORE
def test_layers_that_are_refused(layer: BlockParameters) -> None:
    assert "all biases" in str(refusal(layer._replace(out_bias=None)))
    assert "BERT-base's and MiniLM's" in str(refusal(layer_of(384, 1024, "cpu")))


def test_what_is_kept_is_only_used_inside_of_its_context() -> None:
    kept = FewTokens()
    assert few_tokens.current() is None
    with few_tokens.using(kept):
        assert few_tokens.current() is kept
    assert few_tokens.current() is None


@CORE
def test_a_kernel_that_does_not_fit_is_not_tried_again(layer: BlockParameters, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers then run without it, in this call and in later ones."""
    owners: list[str | None] = []

    def forward(plan: Any, inputs: Any, *_: Any) -> Any:
        owners.append(plan.owner)
        if plan.owner == "one_kernel":
            raise _native.DoesNotFit("as under MPS")
        return inputs.x, None, inputs.x

    situation_of = core_executor.situation_of
    monkeypatch.setattr(core_executor, "forward", forward)
    monkeypatch.setattr(
        core_executor, "situation_of", lambda *call, **options: situation_of(*call, **options)._replace(device="cuda")
    )
    monkeypatch.setattr(core_executor, "sizes_of", lambda *call: Sizes(32, 1, 32, 6, False, 132))
    monkeypatch.setattr(stack, "_sessions_memory", lambda _: kept)
    kept, x = FewTokens(), torch.zeros(32, 384, dtype=torch.bfloat16)
    specs, inputs, parameters = call_of(x, None, boundaries([32], "cpu"), None, OPTIONS, [layer] * 6)
    layers = layers_of(parameters)
    assert not isinstance(layers, str)
    for _ in range(2):
        stack._run_inference(specs, inputs, layers)
    assert owners == ["one_kernel", None, None]


def test_a_reset_workspace_is_zero_in_the_same_memory() -> None:
    workspace = Workspace()
    memory = workspace.memory(64, torch.device("cpu"))
    assert memory is not None
    memory.fill_(1)
    workspace.reset()
    assert workspace.memory(64, torch.device("cpu")) is memory
    assert not memory.any()


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of the kernel's launches."""
    found: list[int] = []
    forward = core_executor.forward

    def spy(plan: Any, inputs: Any, *call: Any) -> Any:
        if plan.owner == "one_kernel":
            found.append(len(inputs.x))
        return forward(plan, inputs, *call)

    monkeypatch.setattr(core_executor, "forward", spy)
    return found


class Problem:
    def __init__(self, name: str, activation: str, depth: int = 6) -> None:
        torch.manual_seed(0)
        self.width, inner = SIZES[name]
        self.layers = [layer_of(self.width, inner, "cuda") for _ in range(depth)]
        self.options, self.kept = OPTIONS._replace(activation=activation), FewTokens()

    def draw(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.width, device="cuda").bfloat16()

    @torch.inference_mode()
    def chain(self, x: Tensor, places: Tensor) -> Tensor:
        return run(x, None, places, None, self.options, self.layers)[0]

    def one_kernel(self, x: Tensor, places: Tensor) -> Tensor:
        with few_tokens.using(self.kept):
            return self.chain(x, places)

    def expected(self, x: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
        state = x.to(dtype)
        for layer in self.layers:
            own: Any = BlockParameters(*(each.to(dtype) for each in layer))  # type: ignore[union-attr]
            state, _ = reference.transformer_block(state, None, places, self.options, own)
        return state


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", SIZES)
def test_against_fp64(name: str, activation: str, launches: list[int]) -> None:
    """By the tolerance rule, as the chain. Calls with different numbers of tokens, of both tiles, share a workspace."""
    problem = Problem(name, activation)
    for lengths, after in BATCHES:
        end = sum(lengths)
        x, places = problem.draw(end + after), boundaries(lengths, "cuda")
        found, chain = problem.one_kernel(x, places), problem.chain(x, places)
        naive, exact = (problem.expected(x[:end], places, dtype) for dtype in (torch.bfloat16, torch.float64))
        for kind, y in (("one kernel", found), ("chain", chain)):
            comparison = compare(f"{kind} {lengths}", y[:end], naive, exact, OUTPUT_FACTOR)
            assert comparison.ok, comparison
        assert found.isfinite().all(), f"{lengths}, {after} tokens after them"
    assert launches == [sum(lengths) + after for lengths, after in BATCHES]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tokens", [13, 30])
@pytest.mark.parametrize("name", SIZES)
def test_the_same_bits_in_every_call(name: str, tokens: int, launches: list[int]) -> None:
    """Also while another stream's kernels occupy SMs and the memory, and in a CUDA graph."""
    problem = Problem(name, "gelu", depth=12)
    x, places = problem.draw(tokens), boundaries([tokens - 4, 2], "cuda")
    first, other = problem.one_kernel(x, places), torch.cuda.Stream()
    memory = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    for index in range(200):
        if index % 4 == 0:
            with torch.cuda.stream(other):
                memory.fill_(index)
        assert same_bits(problem.one_kernel(x, places), first), f"call {index}"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.one_kernel(x, places)
    for _ in range(3):
        with torch.inference_mode():
            captured.zero_()
        graph.replay()
        assert same_bits(captured, first)
    assert len(launches) == 202


@pytest.mark.gpu
@HOPPER
def test_two_workspaces_on_two_streams(launches: list[int]) -> None:
    problem = Problem("BERT-base", "gelu")
    x, places = problem.draw(32), boundaries([20, 12], "cuda")
    wanted = problem.one_kernel(x, places)
    others = [(FewTokens(), torch.cuda.Stream()) for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for kept, stream in others:
            with torch.cuda.stream(stream), few_tokens.using(kept):
                found.append(problem.chain(x, places))
    torch.cuda.synchronize()
    assert len(launches) == 101
    assert all(same_bits(each, wanted) for each in found)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("programs", [160, 200, 264])  # some SMs are free, or none
def test_a_long_kernel_on_another_stream_only_delays_it(
    programs: int, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are resident before any of them starts: with a limit of 20 ms, none gives up in a second."""
    pytest.importorskip("triton")
    from spinning_kernel import spin

    problem = Problem("BERT-base", "gelu")
    x, places = problem.draw(32), boundaries([20, 12], "cuda")
    wanted = problem.one_kernel(x, places)
    monkeypatch.setattr(few_rows_forward, "POLLS", 1)
    plan.cache_clear()  # which has the former limit
    spin(0.001, 1)  # compiles it
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        spin(1.0, programs)
    found = [problem.one_kernel(x, places) for _ in range(5)]
    torch.cuda.synchronize()
    plan.cache_clear()
    problem.kept.workspace.raise_if_any()
    assert len(launches) == 6
    assert all(same_bits(each, wanted) for each in found)


def test_a_launch_that_gave_up_is_an_error_in_words() -> None:
    workspace = Workspace()
    memory = workspace.memory(256, torch.device("cpu"))
    assert memory is not None
    memory.view(torch.int32)[0] = 12  # the last tag
    workspace.raise_if_any()
    memory.view(torch.int32)[1] = 1
    with pytest.raises(RuntimeError, match=r"few_rows_layers: expected all blocks .* results of that launch are NaN"):
        workspace.raise_if_any()
    workspace.raise_if_any()
    assert memory.view(torch.int32)[:2].tolist() == [12, 0]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("lengths", [[5, 7, 3], [9, 1, 12, 8]], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_a_number_that_is_not_finite_stays_in_its_sequence(name: str, lengths: list[int], value: float) -> None:
    problem = Problem(name, "gelu")
    x, places = problem.draw(sum(lengths)), boundaries(lengths, "cuda")
    wanted = problem.one_kernel(x, places)
    first, end = places[1:3].tolist()
    x[first, 3] = value
    found = problem.one_kernel(x, places)
    assert found[first:end].isnan().all()
    assert same_bits(found[:first], wanted[:first])
    assert same_bits(found[end:], wanted[end:])


@pytest.mark.gpu
@HOPPER
def test_calls_that_the_kernel_leaves_to_the_chain(launches: list[int]) -> None:
    problem = Problem("MiniLM", "gelu")
    x = problem.draw(MOST_ROWS)
    places, options = boundaries([len(x)], "cuda"), problem.options
    problem.options = options._replace(window_right=0)
    assert same_bits(problem.one_kernel(x, places), problem.chain(x, places))
    few = x[:8].requires_grad_()
    with few_tokens.using(problem.kept):
        layers = problem.layers
        y, _ = run(few, None, boundaries([8], "cuda"), None, options, layers)
    assert y.requires_grad
    assert launches == []


# ---- sessions --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def pooled(model: Any, ids: Sequence[int]) -> Tensor:
    found: Tensor = model(torch.tensor([ids]).to(next(model.parameters()).device)).last_hidden_state[0].float()
    return found.mean(0).cpu()


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("name", SIZES)
def test_a_session_uses_the_kernel(
    name: str, graphs: int, launches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    width, inner = SIZES[name]
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": 12,
        "num_hidden_layers": 6,
    }
    model = models.BertModel(models.BertConfig(vocab_size=300, max_position_embeddings=64, **sizes)).eval()
    texts = [list(range(first, first + length)) for first, length in ((5, 3), (40, 9), (7, 16), (100, 30), (60, 50))]
    monkeypatch.setattr(session, "_RESET_INTERVAL", 7)

    def vectors(**options: Any) -> list[np.ndarray]:
        with Session(model, device="cuda", dtype=torch.bfloat16, max_graphs=graphs, **options) as own:
            return [np.concatenate([own.encode([ids]) for ids in texts]) for _ in range(4)]

    found = vectors()
    assert launches
    assert max(launches) <= MOST_ROWS
    assert all(np.array_equal(each, found[-1]) for each in found[-2:])
    launches.clear()
    monkeypatch.setattr(rules, "_MOST_ROWS_OF_ONE_KERNEL", 0)
    rules._rules_for.cache_clear()
    chain = vectors()
    rules._rules_for.cache_clear()
    assert launches == []
    cuda = copy.deepcopy(model).cuda().bfloat16()
    exact = torch.stack([pooled(copy.deepcopy(cuda).cpu().double(), ids) for ids in texts]).float()
    naive = torch.stack([pooled(cuda, ids) for ids in texts])
    for kind, given in (("one kernel", found[0]), ("one kernel, again", found[-1]), ("chain", chain[-1])):
        comparison = compare(kind, torch.from_numpy(given), naive, exact, OUTPUT_FACTOR)
        assert comparison.ok, comparison
