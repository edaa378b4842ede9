"""Tables of rotary positions: they are kept only from plain calls, and stay where a CUDA graph may read them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fasttfm.models import ModernBertConfig, ModernBertModel

POSITIONS = 16
gpu = pytest.mark.gpu
IDS = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))


def model(width: int = 32) -> ModernBertModel:
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
    )
    return ModernBertModel(config).eval()


def kept(module: Any) -> list[Tensor]:
    return [each for tables in module.encoder._tables._tables.values() for table in tables for each in table]


def states(module: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = module(ids).last_hidden_state
    return found


def test_tables_of_fake_tensors_are_not_kept() -> None:
    module, expected = model(), states(model())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module(mode.from_tensor(IDS))
    assert not kept(module)
    assert torch.equal(states(module), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # the tables of a real call
        module(mode.from_tensor(IDS))
    assert torch.equal(states(module), expected)


TRANSFORMS: dict[str, Any] = {
    "make_fx": lambda run, x: make_fx(run)(x),
    "functionalize": lambda run, x: torch.func.functionalize(run)(x),
    "vmap": lambda run, x: torch.func.vmap(run)(x),
    "jvp": lambda run, x: torch.func.jvp(run, (x,), (x,)),
    "meta": lambda run, x: run(x.to("meta")),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_tables_of_traced_and_transformed_calls_are_not_kept(transform: Any) -> None:
    module, expected = model(), states(model())
    (theta, *_) = module.encoder.tables(torch.zeros(1, device="meta"), 3)
    transform(lambda x: module.encoder.tables(x, 3)[theta][0] * x.sum(), torch.randn(2, 5))
    assert not kept(module)
    assert torch.equal(states(module), expected)


def test_tables_made_in_inference_mode_or_under_other_defaults_serve_training() -> None:
    module, expected = model(), states(model())
    with torch.inference_mode():
        module(IDS)
    module.train()(IDS).last_hidden_state.sum().backward()
    other = model()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            other.encoder.tables(torch.randn(2, 32, device="cpu", dtype=torch.float32), 3)
    finally:
        torch.set_default_dtype(before)
    assert {(each.dtype, each.device.type) for each in kept(other)} == {(torch.float32, "cpu")}
    assert torch.equal(states(other), expected)


def test_copies_and_pickles_have_no_tables() -> None:
    module = model()
    expected = states(module)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False))
    for other in copies:
        assert not kept(other)
        assert torch.equal(states(other), expected)
    moved = module.double()
    assert {each.dtype for each in kept(moved)} == {torch.float32}
    states(moved)
    assert {each.dtype for each in kept(moved)} == {torch.float32, torch.float64}


def test_tables_grow_by_doubling_and_the_shorter_ones_stay() -> None:
    module = model()
    states(module)
    first = [each.data_ptr() for each in kept(module)]
    for length in (POSITIONS + 1, 2 * POSITIONS, 3 * POSITIONS, 4 * POSITIONS):
        states(module, torch.ones(1, length, dtype=torch.int64))
    rows = {len(each) for each in kept(module)}
    assert rows == {POSITIONS, 2 * POSITIONS, 4 * POSITIONS}
    assert {*first} <= {each.data_ptr() for each in kept(module)}


def test_a_theta_that_changes_after_a_call() -> None:
    found = []
    for called_before in (False, True):
        module = model()
        if called_before:
            states(module)
        for layer in module.encoder.layers:
            layer.theta = 77.0
        found.append(states(module))
    assert torch.equal(*found)


@gpu
def test_a_graph_reads_its_tables_after_a_longer_call() -> None:
    module = model(width=128).cuda()
    ids = torch.randint(1, 50, (POSITIONS,), device="cuda")
    bounds = torch.tensor([0, POSITIONS], dtype=torch.int32, device="cuda")

    def run() -> Tensor:
        found: Tensor = module(ids, cu_seqlens=bounds, max_seqlen=POSITIONS).last_hidden_state
        return found

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                expected = run().clone()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        module(torch.randint(1, 50, (1, 4000), device="cuda"))
        junk = [
            torch.full((size,), float("nan"), device="cuda") for size in (512, 1024, 2048, 4096) for _ in range(200)
        ]
        graph.replay()
        torch.cuda.synchronize()
    assert len(junk) == 800
    torch.testing.assert_close(y, expected)


@gpu
def test_a_graph_that_is_captured_first_makes_its_own_tables() -> None:
    module = model(width=128).cuda()
    x = torch.randn(POSITIONS, 128, device="cuda")
    expected = copy.deepcopy(module).encoder.tables(x, POSITIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module.encoder.tables(x, POSITIONS)
    assert not kept(module)
    graph.replay()
    torch.cuda.synchronize()
    for theta, tables in expected.items():
        torch.testing.assert_close(found[theta], tables)
