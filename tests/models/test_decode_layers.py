"""Decoding by one kernel for all layers (ops/layers/decode_layers.py): which decoders it supports, and its steps
against fp64 and the kernels for few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import _native, models
from fasttfm.generate import CachedDecoder, GenerationSession
from fasttfm.nn import PackedBatch
from fasttfm.ops.layers import decode_layers
from fasttfm.ops.layers.decode_layers import MOST_ROWS, DecodeLayers, DecoderLayers, refuse
from fasttfm.testing.harness import same_bits
from fasttfm.testing.tolerance import OUTPUT_FACTOR, compare

HOPPER = pytest.mark.skipif(_native.missing_hopper() is not None, reason=f"Hopper: {_native.missing_hopper()}")
CORE = pytest.mark.skipif(_native.missing() is not None, reason=f"{_native.missing()}")
CAPACITY = 300


def model(layers: int = 6, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = models.GPT2Config(vocab_size=1000, n_embd=768, n_head=12, n_layer=layers, n_positions=CAPACITY, **changes)
    return models.GPT2LMHeadModel(config).eval().bfloat16()


def layers_of(module: Any) -> DecoderLayers | str:
    encoder = module.transformer.encoder
    return DecoderLayers.of(encoder.in_order(), encoder.final_norm)


def cache(
    *, layers: int = 6, sequences: int = 4, capacity: int = CAPACITY, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return torch.empty(layers, sequences, 12, capacity, 64, dtype=dtype)


# ---- which decoders the kernel supports ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers() -> DecoderLayers:
    found = layers_of(model())
    assert isinstance(found, DecoderLayers)
    return found


@CORE
def test_a_step_that_only_misses_a_gpu(layers: DecoderLayers) -> None:
    assert layers.activation == "gelu_tanh"
    for rows in (1, 4):
        reason = refuse(layers, rows, cache())
        assert reason is not None
        assert "CUDA" in reason or "GPU" in reason or "cpu" in reason


@CORE
@pytest.mark.parametrize(
    ("change", "rows", "keys", "reason"),
    [
        ({}, 0, {}, "1 to 16 tokens"),
        ({}, 5, {}, "1 to 16 tokens"),
        ({}, MOST_ROWS + 1, {"sequences": 32}, "1 to 16 tokens"),
        ({}, 16, {"sequences": 16, "capacity": 700}, "up to 10240 tokens"),
        ({}, 1, {"layers": 5}, "6 to 24 layers"),
        ({}, 1, {"dtype": torch.float32}, "takes parameters and a cache in bfloat16"),
        ({"windows": frozenset([(-1, 0), (20, 0)])}, 1, {}, "all cached tokens"),
        ({"activation": "relu"}, 1, {}, "gelu and gelu_tanh"),
        ({"first_norm": (None, None)}, 1, {}, "all biases"),
        ({"heads": 6}, 1, {}, "GPT-2's sizes"),
    ],
)
def test_refusals(layers: DecoderLayers, change: dict[str, Any], rows: int, keys: dict[str, Any], reason: str) -> None:
    refusal = refuse(layers._replace(**change), rows, cache(**keys))
    assert refusal is not None
    assert reason in refusal


def test_layers_that_differ() -> None:
    module = model(2)
    module.transformer.encoder.layers[1].norm2.eps = 0.5
    assert layers_of(module) == "takes layers with the same eps, activation and heads"


# ---- steps -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the kernel's launches."""
    core = _native.core()
    rows: list[int] = []
    launch = core.few_rows_decode_layers_cuda

    def spy(*call: Any) -> None:
        rows.append(len(call[1]))
        launch(*call)

    monkeypatch.setattr(core, "few_rows_decode_layers_cuda", spy)
    return rows


class Decoding:
    """Sequences whose cache has their prompts."""

    def __init__(self, module: Any, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.module, self.lengths = module, lengths
        self.prompts = [torch.randint(0, 1000, (length,), generator=generator).cuda() for length in lengths]
        self.following = torch.randint(0, 1000, (len(lengths), 3), generator=generator).cuda()

    def steps(self) -> tuple[Tensor, CachedDecoder]:
        """The logits [n, 3, V] of three steps."""
        decoder = CachedDecoder(self.module.transformer, CAPACITY, len(self.lengths), fused=True)
        bounds = torch.tensor([0, *self.lengths], device="cuda").cumsum(0).int()
        decoder.read(torch.cat(self.prompts), PackedBatch(bounds, max(self.lengths), sum(self.lengths)))
        columns = self.following.unbind(1)
        return torch.stack([decoder.next_logits(self.module.lm_head, column) for column in columns], 1), decoder

    @torch.no_grad()
    def whole(self, row: int) -> Tensor:
        """The logits of the last three tokens of a sequence, without a cache."""
        sequence = torch.cat([self.prompts[row], self.following[row]])[None]
        logits: Tensor = self.module(sequence).logits[0, -3:]
        return logits


def spread(rows: int) -> list[int]:
    return [1 + 53 * index % 290 for index in range(rows)]


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("length", [None, 2, 3, 4, 255, 296], ids=str)
def test_against_fp64(rows: int, length: int | None, launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits by the tolerance rule, and the cache against that of the other kernels."""
    module = model().cuda()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.04)
    decoding = Decoding(module, spread(rows) if length is None else [length] * rows)
    logits, decoder = decoding.steps()
    assert launches == [rows] * 3
    monkeypatch.setattr(decode_layers, "MOST_ROWS", 0)
    others, other = decoding.steps()
    assert len(launches) == 3
    for one, another in ((decoder.keys, other.keys), (decoder.values, other.values)):
        torch.testing.assert_close(one, another, atol=0.05, rtol=0.05)
    for row in {0, rows // 2, rows - 1}:
        naive = decoding.whole(row)
        exact = (module.double(), decoding.whole(row))[1]
        module.bfloat16()
        for kind, steps in (("one kernel", logits), ("few rows", others)):
            comparison = compare(kind, steps[row].to(torch.bfloat16), naive, exact, OUTPUT_FACTOR)
            assert comparison.ok, comparison


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_the_same_bits_in_every_step(rows: int, launches: list[int]) -> None:
    """Also while another stream's kernels occupy SMs and the memory."""
    module, other = model(12).cuda(), torch.cuda.Stream()
    decoding = Decoding(module, spread(rows))
    _, decoder = decoding.steps()
    memory = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    ids, kept = decoding.following[:, 0], torch.zeros(rows, dtype=torch.bool, device="cuda")
    first = decoder.next_logits(module.lm_head, ids, kept)
    for index in range(200):
        if index % 4 == 0:
            with torch.cuda.stream(other):
                memory.fill_(index)
        assert same_bits(decoder.next_logits(module.lm_head, ids, kept), first), f"step {index}"
    assert len(launches) == 204


@pytest.mark.gpu
@HOPPER
def test_lengths_that_are_wrong_stay_inside_of_the_cache() -> None:
    layers = layers_of(model().cuda())
    assert isinstance(layers, DecoderLayers)
    keys, values = (torch.randn(6, 3, 12, CAPACITY, 64, device="cuda").bfloat16() for _ in range(2))
    lengths = torch.tensor([-5, 10**6, CAPACITY], dtype=torch.int32, device="cuda")
    before = keys.clone(), values.clone()
    y = DecodeLayers().run(torch.randn(3, 768, device="cuda").bfloat16(), layers, keys, values, lengths)
    assert y is not None
    assert y.isfinite().all()
    for cached, unchanged in zip((keys, values), before, strict=True):
        changed = (cached != unchanged).any(-1).nonzero()
        slots = {(row, slot) for _, row, _, slot in changed.tolist()}
        assert slots == {(0, 0), (1, CAPACITY - 1), (2, CAPACITY - 1)}


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("change", [lambda module: module, lambda module: module.float()], ids=["bf16", "fp32"])
def test_sessions_use_it_in_graphs(change: Callable[[Any], Any], launches: list[int]) -> None:
    module = change(model().cuda())
    prompts = [[1, 2, 3], [4] * 30, [5]]

    def tokens(session: GenerationSession) -> list[list[int]]:
        options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": []}
        return [generation.result() for generation in [session.submit(prompt, **options) for prompt in prompts]]

    graphs, eager = (GenerationSession(module, max_batch=4, graphs=graphs) for graphs in (True, False))
    assert tokens(graphs) == tokens(eager)
    assert bool(launches) == (next(module.parameters()).dtype == torch.bfloat16)
