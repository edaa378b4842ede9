"""LayerNorms that are folded into GEMMs: the folded weights, which calls use them, and the kernels' results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from described_layers import native_layers, run, specs_of
from torch import Tensor
from torch.nn import functional

from fasttfm import _native, models
from fasttfm.inference import Session
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.transformer_block import reference
from fasttfm.ops.layers import core_executor, few_tokens, rules
from fasttfm.ops.layers.few_tokens import FewTokens
from fasttfm.ops.layers.folded import FoldedNorms, FoldedWeights, fold_both, fold_first, fold_norm
from fasttfm.ops.layers.parameters import Layers
from fasttfm.ops.layers.rules import Situation, Sizes
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

HOPPER = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
CORE = pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
BOTH = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
OPTIONS = BlockOptions(2, 4096, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-12, 1e-5, False, False, None)
WIDTH, INNER = 128, 320


def layer_of(
    width: int = WIDTH, inner: int = INNER, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> BlockParameters:
    def weight(outputs: int, inputs: int) -> Tensor:
        return (inputs**-0.5 * torch.randn(outputs, inputs, device=device)).to(dtype)

    def vector(size: int, mean: float = 0.0) -> Tensor:
        return (mean + 0.2 * torch.randn(size, device=device)).to(dtype)

    return BlockParameters(
        *(weight(3 * width, width), vector(3 * width), weight(width, width), vector(width), vector(width, 1.0)),
        *(vector(width), weight(inner, width), vector(inner), weight(width, inner), vector(width)),
        *(vector(width, 1.0), vector(width)),
    )


def boundaries(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


# ---- folded weights --------------------------------------------------------------------------------------------------


def test_folded_layers_compute_the_same_in_fp64() -> None:
    torch.manual_seed(0)
    layers = [layer_of(dtype=torch.float64) for _ in range(3)]
    x, places = torch.randn(37, WIDTH, dtype=torch.float64), boundaries([20, 0, 1, 16])
    expected = x
    for layer in layers:
        expected, _ = reference.transformer_block(expected, None, places, OPTIONS, layer)
    both = [fold_both(own, before) for before, own in zip([None, *layers], layers, strict=False)]
    found = reference.folded_layers(x, places, OPTIONS, layers, both)
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()
    found = reference.layers_with_first_norm_folded(x, places, OPTIONS, layers, list(map(fold_first, layers)))
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def test_a_large_mean_drops_out() -> None:
    """The rows of a folded weight sum to 0 before they are rounded."""
    torch.manual_seed(0)
    weight, bias, scale, shift = (torch.randn(size, dtype=torch.float64) for size in ((48, 64), (48,), (64,), (64,)))
    z = 1000 + torch.randn(9, 64, dtype=torch.float64)
    folded_weight, folded_bias = fold_norm(weight, bias, scale, shift)
    rstd = (z.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()
    expected = functional.linear(functional.layer_norm(z, (64,), scale, shift, 1e-5), weight, bias)
    found = rstd * functional.linear(z, folded_weight) + folded_bias
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


def layers_in(*layers: BlockParameters) -> Layers:
    return native_layers(layers)


@CORE
def test_folded_weights_stay_in_their_memory() -> None:
    torch.manual_seed(0)
    given, others = [layer_of() for _ in range(3)], [layer_of() for _ in range(3)]
    layers, weights = layers_in(*given), FoldedWeights()
    half = weights.of(layers, FoldedNorms.FIRST)
    assert half is not None
    assert all(each[2:] == (None,) * 6 for each in half.folded)
    assert list(half.table) == [0 if each is None else each.data_ptr() for each in chain.from_iterable(half.folded)]
    first = weights.of(layers, FoldedNorms.BOTH)
    assert first is not None
    assert weights.of(layers_in(*given), FoldedNorms.BOTH) is first
    assert weights.of(layers_in(*given), FoldedNorms.FIRST) is first
    assert weights.of(layers_in(*others), FoldedNorms.BOTH) is not first
    assert all(
        own.up_weight is old.up_weight and own.up_bias is old.up_bias
        for own, old in zip(first.folded, half.folded, strict=True)
    )
    tensors = list(chain.from_iterable(first.folded))
    assert list(first.table) == [each.data_ptr() for each in tensors]
    assert first.folded[0].qkv_weight is given[0].qkv_weight
    for own, other in zip(chain.from_iterable(given), chain.from_iterable(others), strict=True):
        own.copy_(other)
    weights.refresh()
    assert list(first.table) == [each.data_ptr() for each in tensors]
    expected = weights.of(layers_in(*others), FoldedNorms.BOTH)
    assert expected is not None
    assert all(torch.equal(*pair) for pair in zip(tensors, chain.from_iterable(expected.folded), strict=True))


@CORE
def test_layers_that_share_parameters_share_the_folded_ones() -> None:
    layer = layer_of()
    layers = layers_in(layer, layer, layer)
    half, found = FoldedWeights().of(layers, FoldedNorms.FIRST), FoldedWeights().of(layers, FoldedNorms.BOTH)
    assert half is not None
    assert found is not None
    assert len(set(map(id, half.folded))) == 1
    first, second, third = found.folded
    assert second is third
    assert first is not second
    assert {each.dtype for each in (first.qkv_bias, first.residual_a, second.out_bias)} == {torch.float32}
    assert torch.equal(first.residual_a, torch.ones(WIDTH))


@CORE
def test_a_capture_does_not_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layers = layers_in(layer_of(), layer_of())
    for norms in (FoldedNorms.FIRST, FoldedNorms.BOTH):
        assert FoldedWeights().of(layers._replace(device=torch.device("cuda")), norms) is None


# ---- which calls use them --------------------------------------------------------------------------------------------


SITUATION = Situation("cuda", False, 2, 2, "", torch.bfloat16, torch.bfloat16, is_session=True)
RULES = {"folded_norms": FoldedNorms.BOTH, "folded_first_norm": FoldedNorms.FIRST}


def chosen(layer: BlockParameters, *, depth: int = 2, rows: int = 64, **given: Any) -> FoldedNorms:
    """Which LayerNorms the rules fold, on a GPU of 132 SMs."""
    pre_norm, options = given.pop("pre_norm", False), OPTIONS._replace(**given.pop("options", {}))
    specs = specs_of(options, [layer] * depth, pre_norm=pre_norm)
    names = rules.with_rules(SITUATION._replace(**given), specs, Sizes(rows, 1, rows, depth, False, 132)).rules
    (found,) = {RULES[name] for name in RULES.keys() & names} or {FoldedNorms.NONE}
    return found


@CORE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_types(dtype: torch.dtype) -> None:
    assert chosen(layer_of(dtype=dtype), dtype=dtype, parameter_dtype=dtype) == FoldedNorms.BOTH


@CORE
@pytest.mark.parametrize(
    "given",
    [
        {"parameter_dtype": torch.float32},
        {"is_session": False},
        {"training": True},
        {"depth": 1},
        {"pre_norm": True},
        {"options": {"p_a": 0.1}},
    ],
)
def test_refusals(given: dict[str, Any]) -> None:
    assert chosen(layer_of(), **given) == FoldedNorms.NONE


@CORE
def test_a_width_that_groups_do_not_fill() -> None:
    assert chosen(layer_of(96, 320)) == FoldedNorms.NONE


@CORE
@pytest.mark.parametrize("name", ["qkv_bias", "norm_a_weight", "norm_b_bias"])
def test_layers_without_a_vector_are_refused(name: str) -> None:
    assert chosen(layer_of()._replace(**{name: None})) == FoldedNorms.NONE


@CORE
@pytest.mark.parametrize("tokens", [32, 33, 128, 129, 192, 193, 256, 257, 320, 321, 1280])
def test_numbers_of_tokens(tokens: int) -> None:
    """kernels/few_rows/plan.h decides (tests/native/test_few_rows.py)."""
    assert chosen(layer_of(), rows=tokens) == folds(tokens)


def folds(tokens: int, width: int = WIDTH) -> FoldedNorms:
    if 33 <= tokens <= 320 if width <= 512 else (33 <= tokens <= 128 or 193 <= tokens <= 256):
        return FoldedNorms.BOTH
    first = range(257, 1025) if width >= 1024 else range(321, 1281)
    return FoldedNorms.FIRST if tokens in first else FoldedNorms.NONE


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The numbers of tokens of the calls with folded LayerNorms, and which are folded."""
    found: list[tuple[int, int]] = []
    forward = core_executor.forward

    def spy(plan: Any, inputs: Any, *call: Any) -> Any:
        if plan.owner in RULES:
            found.append((len(inputs.x), RULES[plan.owner]))
        return forward(plan, inputs, *call)

    monkeypatch.setattr(core_executor, "forward", spy)
    return found


class Problem:
    def __init__(
        self,
        lengths: Sequence[int],
        dtype: torch.dtype,
        depth: int = 6,
        sizes: tuple[int, int] = (WIDTH, INNER),
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.layers = [layer_of(*sizes, dtype=dtype, device="cuda") for _ in range(depth)]
        self.options = OPTIONS._replace(max_seqlen=max(lengths), **options)
        self.x = torch.randn(sum(lengths), sizes[0], device="cuda").to(dtype)
        self.places, self.kept = boundaries(lengths, "cuda"), FewTokens()

    @torch.inference_mode()
    def run(self) -> Tensor:
        with few_tokens.using(self.kept):
            return run(self.x, None, self.places, None, self.options, self.layers)[0]

    def expected(self, dtype: torch.dtype) -> Tensor:
        state = self.x.to(dtype)
        for layer in self.layers:
            own: Any = BlockParameters(*(each.to(dtype) for each in layer))  # type: ignore[union-attr]
            state, _ = reference.transformer_block(state, None, self.places, self.options, own)
        return state


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("sequences", [3, 12], ids=["both", "first"])
def test_layers_in_a_graph_follow_their_weights(sequences: int, launches: list[tuple[int, int]]) -> None:
    problem, other = (Problem([30] * sequences, torch.bfloat16, depth=depth) for depth in (3, 4))
    problem.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.run()
    graph.replay()
    assert same_bits(captured, problem.run())
    for own, given in zip(chain.from_iterable(problem.layers), chain.from_iterable(other.layers[1:]), strict=True):
        own.copy_(given)
    problem.kept.folded.refresh()
    graph.replay()
    problem.kept = FewTokens()
    assert same_bits(captured, problem.run())
    assert len(launches) == 4


# Width, columns of the feed-forward block, and heads: of 64, of 32 as MiniLM's, BERT-base's and BERT-large's layers.
LAYER_SIZES = [(128, 320, 2), (384, 1536, 12), (768, 3072, 12), (1024, 4096, 16)]


@pytest.mark.gpu
@HOPPER
@BOTH
@pytest.mark.parametrize(("width", "inner", "heads"), LAYER_SIZES)
def test_layers_against_fp64(
    width: int, inner: int, heads: int, dtype: torch.dtype, launches: list[tuple[int, int]]
) -> None:
    """With each tile, all or some of whose rows have tokens; an empty sequence and one of a single token."""
    few = (
        *([20, 0, 1, 12], [64], [65], [100, 28], [129], [1, 192], [200, 56], [257]),
        *([128, 0, 128, 65], [200, 376], [*[128] * 6, 3], [128] * 9),
    )
    for lengths in few:
        problem = Problem(lengths, dtype, 3, (width, inner), heads=heads)
        found = problem.run()
        comparison = compare("y", found, problem.expected(dtype), problem.expected(torch.float64), OUTPUT_FACTOR)
        assert comparison.ok, (lengths, comparison)
        assert all(same_bits(problem.run(), found) for _ in range(10))
    calls = [(sum(lengths), folds(sum(lengths), width)) for lengths in few]
    assert launches == [call for call in calls for _ in range(11) if call[1] != FoldedNorms.NONE]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("options", [{"window_left": 20, "window_right": 3}, {"window_right": 0}], ids=str)
@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("lengths", [[70, 50], [70, 50, 230]], ids=["both", "first"])
def test_windows_and_activations(
    lengths: list[int], options: dict[str, Any], kind: str, launches: list[tuple[int, int]]
) -> None:
    problem = Problem(lengths, torch.bfloat16, 3, activation=kind, **options)
    comparison = compare(
        "y", problem.run(), problem.expected(torch.bfloat16), problem.expected(torch.float64), OUTPUT_FACTOR
    )
    assert comparison.ok, comparison
    assert launches == [(sum(lengths), folds(sum(lengths)))]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("last", [130, 430], ids=["both", "first"])
def test_a_number_that_is_not_finite_stays_in_its_sequence(last: int, value: float) -> None:
    problem = Problem([70, 20, last], torch.bfloat16)
    wanted = problem.run()
    problem.x[75, 3] = value
    found = problem.run()
    assert found[70:90].isnan().all()
    assert same_bits(found[:70], wanted[:70])
    assert same_bits(found[90:], wanted[90:])


# ---- sessions --------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}


def check_vectors(model: models.BertModel, texts: list[list[int]], found: np.ndarray) -> None:
    """The means of the model's states, by the tolerance rule."""

    @torch.no_grad()
    def expected(device: str, dtype: torch.dtype) -> Tensor:
        own = model.to(device=device, dtype=dtype)
        states = [own(torch.tensor([text], device=device)).last_hidden_state for text in texts]
        model.to(device="cpu", dtype=torch.float32)
        return torch.cat([each.double().mean(1) for each in states]).cpu()

    naive, exact = expected("cuda", torch.bfloat16).float(), expected("cpu", torch.float64)
    comparison = compare("vectors", torch.from_numpy(found), naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, comparison


def scale_weights(model: models.BertModel) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.25)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("lengths", [[48], [90, 60, 100], [110] * 5], ids=["one", "three", "five"])
def test_a_session_folds_and_follows_the_model(
    lengths: list[int], graphs: int, launches: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(vocab_size=300, max_position_embeddings=128, **SIZES)).eval()
    texts = [list(range(first, first + length)) for first, length in enumerate(lengths, 3)]
    with Session(model, device="cuda", dtype=torch.bfloat16, max_graphs=graphs) as session:
        first = [session.encode(texts) for _ in range(4)]
        assert all(np.array_equal(each, first[0]) for each in first)
        assert launches
        check_vectors(model, texts, first[0])
        scale_weights(model)
        assert session.take_weights(model)
        second = session.encode(texts)
        assert not np.array_equal(second, first[0])
        check_vectors(model, texts, second)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("graphs", [0, 8])
def test_a_session_folds_few_tokens(graphs: int, launches: list[tuple[int, int]]) -> None:
    """Alone and among others, a text has the model's vector."""
    torch.manual_seed(0)
    model = models.BertModel(models.BertConfig(vocab_size=400, max_position_embeddings=384, **SIZES)).eval()
    with Session(model, device="cuda", dtype=torch.bfloat16, max_graphs=graphs) as session:
        for tokens in (33, 64, 128, 129, 193, 256, 257, 321):
            launches.clear()
            text, others = list(range(3, 3 + tokens)), [list(range(5, 60)), list(range(80, 200))]
            alone = [session.encode([text]) for _ in range(4)]
            assert all(np.array_equal(each, alone[0]) for each in alone)
            check_vectors(model, [text], alone[0])
            if graphs == 0:
                assert launches == ([(tokens, folds(tokens))] * 4 if folds(tokens) else [])
            check_vectors(model, [text, *others], session.encode([text, *others]))
