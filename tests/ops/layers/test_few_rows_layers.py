"""All layers over few tokens in one kernel (kernels/few_rows/cuda_layers.cu): which calls it takes, and its results
against fp64 and the chain of kernels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fasttfm import _native, models
from fasttfm.inference import Session, session
from fasttfm.kernels.transformer_block import reference
from fasttfm.ops import few_rows_layers, few_tokens, transformer_native, transformer_stack
from fasttfm.ops.few_rows_layers import MOST_ROWS, Workspace
from fasttfm.ops.few_tokens import FewTokens
from fasttfm.ops.transformer_block import BlockOptions, BlockParameters
from fasttfm.ops.transformer_native import Batch, Layers
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


def call_of(layer: BlockParameters, *, depth: int = 6, tokens: int = 32, **batch: Any) -> tuple[Batch, Layers]:
    layers = transformer_native.layers_of([each for _ in range(depth) for each in layer])
    assert isinstance(layers, Layers)
    x = torch.zeros(tokens, 384, dtype=torch.bfloat16)
    return Batch(x, None, boundaries([tokens], "cpu"), None)._replace(**batch), layers


@pytest.fixture(scope="module")
def layer() -> BlockParameters:
    return layer_of(384, 1536, "cpu")


@CORE
def test_a_call_that_only_misses_a_gpu(layer: BlockParameters) -> None:
    missing = transformer_native.missing_cuda(torch.device("cpu"))
    assert missing is not None
    for activation in ("gelu", "gelu_tanh"):
        for tokens in (1, MOST_ROWS):
            call = call_of(layer, tokens=tokens)
            assert few_rows_layers.refuse(*call, OPTIONS._replace(activation=activation)) == missing


@CORE
@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({"tokens": MOST_ROWS + 1}, {}, "1 to 32 tokens"),
        ({"depth": 5}, {}, "6 to 24 layers"),
        ({"depth": 25}, {}, "6 to 24 layers"),
        ({"x": torch.zeros(8, 384, dtype=torch.float16)}, {}, "takes bfloat16"),
        ({"residual_dtype": torch.float32}, {}, "post-LN"),
        ({"seeds": torch.zeros(6, 3, dtype=torch.int64)}, {}, "no dropout"),
        ({}, {"window_right": 0}, "all keys"),
        ({}, {"window_left": 4, "window_right": 4}, "all keys"),
        ({}, {"activation": "relu"}, "takes gelu and gelu_tanh"),
        ({}, {"heads": 6}, "BERT-base's and MiniLM's"),
        ({"x": torch.zeros(8, 256, dtype=torch.bfloat16)}, {}, "BERT-base's and MiniLM's"),
    ],
)
def test_refusals(layer: BlockParameters, given: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    refusal = few_rows_layers.refuse(*call_of(layer, **given), OPTIONS._replace(**options))
    assert refusal is not None
    assert reason in refusal


@CORE
def test_layers_that_are_refused(layer: BlockParameters) -> None:
    for other, reason in (
        (layer._replace(out_bias=None), "all biases"),
        (BlockParameters(*(None if each is None else each.float() for each in layer)), "takes bfloat16"),  # type: ignore[arg-type]
        (layer_of(384, 1024, "cpu"), "BERT-base's and MiniLM's"),
    ):
        refusal = few_rows_layers.refuse(*call_of(other), OPTIONS)
        assert refusal is not None
        assert reason in refusal


def test_what_is_kept_is_only_used_inside_of_its_context() -> None:
    kept = FewTokens()
    assert few_tokens.current() is None
    with few_tokens.using(kept):
        assert few_tokens.current() is kept
    assert few_tokens.current() is None


@CORE
def test_a_kernel_that_does_not_fit_is_not_tried_again(layer: BlockParameters, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Tensor] = []

    def refused(*call: Any) -> None:
        tried.append(call[5])
        raise _native.DoesNotFit("as under MPS")

    core = SimpleNamespace(few_rows_layers_workspace=lambda *_: 256, few_rows_layers_cuda=refused)
    (batch, layers), workspace = call_of(layer), Workspace()
    monkeypatch.setattr(_native, "core", lambda: core)
    assert few_rows_layers.run(workspace, batch, layers, OPTIONS) is None
    assert few_rows_layers.run(workspace, batch, layers, OPTIONS) is None
    assert len(tried) == 1
    assert not tried[0].any()


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
    core = _native.core()
    found: list[int] = []
    launch = core.few_rows_layers_cuda

    def spy(*call: Any) -> None:
        found.append(len(call[2]))
        launch(*call)

    monkeypatch.setattr(core, "few_rows_layers_cuda", spy)
    return found


class Problem:
    def __init__(self, name: str, activation: str, depth: int = few_rows_layers.LEAST_LAYERS) -> None:
        torch.manual_seed(0)
        self.width, inner = SIZES[name]
        self.layers = [layer_of(self.width, inner, "cuda") for _ in range(depth)]
        self.options, self.kept = OPTIONS._replace(activation=activation), FewTokens()

    def draw(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.width, device="cuda").bfloat16()

    @torch.inference_mode()
    def chain(self, x: Tensor, places: Tensor) -> Tensor:
        return transformer_stack.transformer_stack(x, None, places, None, self.options, self.layers)[0]

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
    monkeypatch.setattr(few_rows_layers, "POLLS", 1)
    spin(0.001, 1)  # compiles it
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        spin(1.0, programs)
    found = [problem.one_kernel(x, places) for _ in range(5)]
    torch.cuda.synchronize()
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
        y, _ = transformer_stack.transformer_stack(few, None, boundaries([8], "cuda"), None, options, layers)
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
    monkeypatch.setattr(few_rows_layers, "MOST_ROWS", 0)
    chain = vectors()
    assert launches == []
    cuda = copy.deepcopy(model).cuda().bfloat16()
    exact = torch.stack([pooled(copy.deepcopy(cuda).cpu().double(), ids) for ids in texts]).float()
    naive = torch.stack([pooled(cuda, ids) for ids in texts])
    for kind, given in (("one kernel", found[0]), ("one kernel, again", found[-1]), ("chain", chain[-1])):
        comparison = compare(kind, torch.from_numpy(given), naive, exact, OUTPUT_FACTOR)
        assert comparison.ok, comparison
