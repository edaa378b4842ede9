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
from fasttfm.nn import RotaryLayer, RotaryTransformer
from fasttfm.nn.rotary_layer import rotary_norm
from fasttfm.ops.layers import stack, support

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


# ---- all layers by one plan ------------------------------------------------------------------------------------------


def _count_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers of the calls that run a plan."""
    calls: list[int] = []
    run = stack.run_stack

    def record(specs: Any, *others: Any) -> Any:
        calls.append(len(specs))
        return run(specs, *others)

    monkeypatch.setattr(stack, "run_stack", record)
    return calls


def _small_stack(**options: Any) -> RotaryTransformer:
    torch.manual_seed(0)
    pre_norm = options.get("norm_first", True)
    layers = [
        RotaryLayer(64, 2, 48, theta=theta, window=window, first=pre_norm and number == 0, **options)
        for number, (theta, window) in enumerate(((1e4, None), (1e3, (4, 4)), (1e3, (4, 4))))
    ]
    final_norm = rotary_norm(options.get("norm", "layer"), 64, 1e-5, bias=False) if pre_norm else None
    return RotaryTransformer(layers, final_norm, 16)


POST_LN = {"norm_first": False, "norm_bias": True}
QWEN3 = {"norm": "rms", "kv_heads": 1, "head_dim": 48, "head_norm": True, "activation": "silu"}


@pytest.mark.parametrize(
    "options", [{}, POST_LN, {"norm": "rms"}, {"kv_heads": 1}, {"head_norm": True}, QWEN3], ids=str
)
def test_layers_run_by_one_plan(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's results and gradients are those of the layers one by one."""
    module, x = _small_stack(**options), torch.randn(20, 64, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, 12, 20], dtype=torch.int32)
    calls = _count_plans(monkeypatch)
    states: list[Tensor] = []
    expected = module(x, cu_seqlens, 12, hidden_states=states)  # one by one, because it collects states
    assert not calls
    found = module(x, cu_seqlens, 12)
    assert calls == [3]
    torch.testing.assert_close(found, expected)
    of_plan = torch.autograd.grad(found.square().sum(), list(module.parameters()))
    of_layers = torch.autograd.grad(expected.square().sum(), list(module.parameters()))
    for got, true in zip(of_plan, of_layers, strict=True):
        torch.testing.assert_close(got, true, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_same_seeds_drop_the_same_elements(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan and in the layers one by one."""
    rates = {"dropout": 0.2, "attention_dropout": 0.3, "feed_forward_dropout": 0.4}
    module, x = _small_stack(norm_first=norm_first, **rates), torch.randn(20, 64)
    cu_seqlens = torch.tensor([0, 12, 20], dtype=torch.int32)
    calls, results = _count_plans(monkeypatch), []
    for options in ({}, {"hidden_states": []}):
        torch.manual_seed(5)
        results.append(module(x, cu_seqlens, 12, **options))
    assert calls == [3]
    torch.testing.assert_close(*results)
    assert not torch.allclose(results[0], module(x, cu_seqlens, 12))


@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"feed_forward_bias": True}, {"dropout": 0.3}, {"feed_forward_dropout": 0.3}]
)
def test_sums_before_rms_norms_keep_their_biases_and_dropout(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans add them in the GEMM, without either: these layers run one by one."""
    module, x = _small_stack(norm="rms", **options), torch.randn(20, 64)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    cu_seqlens = torch.tensor([0, 12, 20], dtype=torch.int32)
    calls, results = _count_plans(monkeypatch), []
    for inputs in ({}, {"hidden_states": []}):
        torch.manual_seed(5)
        results.append(module(x, cu_seqlens, 12, **inputs))
    torch.testing.assert_close(*results)
    assert calls == []
    module.eval()(x, cu_seqlens, 12)
    assert calls == ([] if any("bias" in name for name in options) else [3])


def test_dropout_and_settings_are_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = _small_stack(dropout=0.3), torch.randn(12, 64)
    cu_seqlens = torch.tensor([0, 12], dtype=torch.int32)
    calls = _count_plans(monkeypatch)
    dropped = module(x, cu_seqlens, 12)
    module.eval()
    kept = module(x, cu_seqlens, 12)
    module.layers[1].window = (0, 0)
    narrow = module(x, cu_seqlens, 12)
    assert calls == [3, 3, 3]
    assert not torch.allclose(dropped, kept)
    assert not torch.allclose(kept, narrow)


def test_an_epsilon_that_changes_is_read_at_the_call() -> None:
    module, x = _small_stack(**QWEN3), torch.randn(12, 64)
    cu_seqlens = torch.tensor([0, 12], dtype=torch.int32)
    before = module(x, cu_seqlens, 12)
    for norm in (module.layers[1].norm1, module.layers[1].q_norm, module.final_norm):
        norm.eps = 1.0
        after = module(x, cu_seqlens, 12)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, module(x, cu_seqlens, 12, hidden_states=[]))
        before = after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 3}, "kv_heads: expected a divisor of the 2 heads, got 3"),
        ({"head_dim": 7}, "head_dim: expected an even number, got 7"),
        ({"norm": "batch"}, "norm: expected one of layer, rms, offset_rms, got 'batch'"),
    ],
)
def test_what_a_layer_cannot_have_is_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryLayer(64, 2, 48, **options)


def test_what_has_to_be_called_runs_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = _small_stack(), torch.randn(12, 64)
    cu_seqlens = torch.tensor([0, 12], dtype=torch.int32)
    calls = _count_plans(monkeypatch)
    expected = module(x, cu_seqlens, 12)
    seen: list[Tensor] = []
    handle = module.layers[1].up.register_forward_hook(lambda *call: seen.append(call[2]))
    assert str(module.explain(x, 12)).startswith("transformer_layers: modules")
    torch.testing.assert_close(module(x, cu_seqlens, 12), expected)
    assert [each.shape for each in seen] == [(12, 96)]
    handle.remove()
    module.layers[1].intermediate_dropout = 0.5
    module(x, cu_seqlens, 12)  # dropout inside of the feed-forward block
    module.checkpointing = True
    module(x, cu_seqlens, 12)
    assert calls == [3]


def test_the_plan_is_explained() -> None:
    module, x = _small_stack(), torch.randn(12, 64)
    found = module.explain(x, 12)
    expected = "core" if support.missing_cpu() is None else "ops"
    assert found.chosen == expected
    assert found.forward.count("Attention") == found.backward.count("AttentionBackward") == 3
    assert "rotary_projection: no: is Hopper's" in str(found)
    assert module.double().explain(x.double(), 12).chosen == "ops"
