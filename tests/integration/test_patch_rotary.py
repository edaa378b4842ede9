"""``fasttfm.patch`` of transformers' EuroBERT and NomicBERT: packed layers, calls that stay with transformers, and
``unpatch``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_parity import tensors
from patched_models import IDS, MASKS, SEGMENTS, B, S, batch, check_patched, pair
from torch import Tensor

import fasttfm

transformers = pytest.importorskip("transformers")
fasttfm.register_attention()
from fasttfm.patching import rotary_stack  # noqa: E402

SMALL: dict[str, dict[str, Any]] = {
    "EuroBert": {"num_key_value_heads": 1, "pad_token_id": 0},
    "NomicBert": {"pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
MODELS = tuple(f"{family}Model" for family in SMALL)
MASKED_LMS = tuple(f"{family}ForMaskedLM" for family in SMALL)


def twins(name: str, **changes: Any) -> tuple[Any, Any]:
    family = next(family for family in SMALL if name.startswith(family))
    return pair(name, **{**SMALL[family], **changes})


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each call of a stack that has run the layers."""
    rows: list[int] = []
    run = rotary_stack.RotaryStack.run

    def counted(self: Any, x: Tensor, *others: Any) -> Tensor | None:
        y = run(self, x, *others)
        rows.extend([] if y is None else [len(x)])
        return y

    monkeypatch.setattr(rotary_stack.RotaryStack, "run", counted)
    return rows


def states(model: Any, mask: str = "right", **options: Any) -> Tensor:
    tokens = MASKS[mask].bool()
    y: Tensor = model(IDS.where(tokens, 1), attention_mask=MASKS[mask], **options)[0][tokens]
    return y.detach()


def assert_same(ours: Any, theirs: Any, **options: Any) -> None:
    torch.testing.assert_close(states(ours, **options), states(theirs, **options), rtol=1e-4, atol=1e-4)


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        *((name, mask) for name in MODELS for mask in MASKS),
        *((name, "right") for name in MASKED_LMS),
        *((f"{family}ForTokenClassification", "right") for family in SMALL),
        *((f"{family}ForSequenceClassification", "full") for family in SMALL),
    ],
)
def test_training(name: str, mask: str, runs: list[int]) -> None:
    ours, theirs = (module.train() for module in twins(name))
    inputs = batch(name, mask)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs = tensors(module(**inputs), inputs.get("attention_mask"))
        return {key: value for key, value in outputs.items() if key.startswith(("loss", "last_hidden_state"))}

    check_patched(ours, theirs, call)
    assert set(runs) == ({int(MASKS[mask].sum())} if mask != "anywhere" else set())


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_pooling_of_eurobert(pooling: str) -> None:
    ours, theirs = twins("EuroBertForSequenceClassification", classifier_pooling=pooling)
    inputs = batch("EuroBertForSequenceClassification")
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_other_arguments(name: str, runs: list[int]) -> None:
    ours, theirs = twins(name)
    embedded, positions = torch.randn(B, S, 48), 2 * torch.arange(S)[None]
    segments = {"token_type_ids": SEGMENTS} if name.startswith("Nomic") else {}

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        by_id = module(IDS, position_ids=positions, **segments)
        rows = {"inputs_embeds": inputs["embedded"], "attention_mask": MASKS["right"], **segments}
        return {"by id": by_id.last_hidden_state, "rows": module(**rows).last_hidden_state[MASKS["right"].bool()]}

    check_patched(ours, theirs, call, {"embedded": embedded})
    assert len(runs) > 1
    collected = [model(IDS, output_hidden_states=True).hidden_states for model in (ours, theirs)]
    assert [len(layers) for layers in collected] == [3, 3]
    for ours_after, theirs_after in zip(*collected, strict=True):
        torch.testing.assert_close(ours_after, theirs_after, rtol=1e-4, atol=1e-4)
    assert isinstance(ours(IDS, return_dict=False), tuple)


BIASES = {"attention_bias": {"attention_bias": True}, "mlp_bias": {"mlp_bias": True}}


@pytest.mark.parametrize("biases", BIASES.values(), ids=BIASES)
def test_biases_of_eurobert_are_left_to_its_layers(biases: dict[str, bool], runs: list[int]) -> None:
    """A plan adds no bias in front of an RMSNorm."""
    assert_same(*twins("EuroBertForMaskedLM", **biases))
    assert not runs


def test_all_heads_of_keys_and_another_head_size(runs: list[int]) -> None:
    assert_same(*twins("EuroBertModel", num_key_value_heads=3))
    assert_same(*twins("EuroBertModel", head_dim=32))
    assert_same(*twins("NomicBertModel", head_dim=8))
    assert len(runs) == 3


def test_the_pooler_of_nomicbert(runs: list[int]) -> None:
    ours, theirs = twins("NomicBertForSequenceClassification")
    inputs = batch("NomicBertForSequenceClassification")
    torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-4, atol=1e-4)
    assert len(runs) == 1


@pytest.mark.parametrize("name", MASKED_LMS)
def test_loss_divided_by_the_count_of_a_larger_batch(name: str) -> None:
    ours, theirs = (module.train() for module in twins(name))
    for count in (torch.tensor(77), 77):
        losses = [module(IDS, labels=IDS, num_items_in_batch=count).loss for module in (ours, theirs)]
        torch.testing.assert_close(*losses)


@pytest.mark.parametrize("name", MODELS)
def test_flattened_inputs(name: str, runs: list[int]) -> None:
    ours, theirs = twins(name)
    lengths, tokens = MASKS["right"].sum(1), MASKS["right"].bool()
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    positions = torch.cat([torch.arange(int(length)) for length in lengths])[None]
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": S, "max_length_k": S}
    y = ours(IDS[tokens][None], position_ids=positions, **packed).last_hidden_state[0]
    torch.testing.assert_close(y.detach(), states(theirs), rtol=1e-4, atol=1e-4)
    assert runs == [int(tokens.sum())]


@pytest.mark.parametrize("name", MODELS)
def test_without_gradients_a_cpu_calls_the_layers_with_packed_tokens(name: str, runs: list[int]) -> None:
    """It need not concatenate the weights then."""
    ours, theirs = twins(name)
    seen: list[tuple[int, ...]] = []
    forward = torch.nn.Linear.forward

    def noted(self: Any, x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return forward(self, x)

    positions = 2 * torch.arange(S)[None]
    for options in ({}, {"position_ids": positions}):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Linear, "forward", noted)
            y = states(ours, **options)
        torch.testing.assert_close(y, states(theirs, **options), rtol=1e-4, atol=1e-4)
    assert {shape[:2] for shape in seen} == {(1, int(MASKS["right"].sum()))}
    assert not runs


@pytest.mark.parametrize("name", MODELS)
def test_dropout(name: str, runs: list[int]) -> None:
    ours, _ = twins(name)
    for module in ours.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    ours.train()
    torch.manual_seed(1)
    first, second = ours(IDS).last_hidden_state, ours(IDS).last_hidden_state
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(ours(IDS).last_hidden_state, first)
    ours.eval()
    assert torch.equal(ours(IDS).last_hidden_state, ours(IDS).last_hidden_state)
    assert len(runs) == 5


# ---- what is set after a call ----------------------------------------------------------------------------------------


def of_layers(path: str, value: Any) -> Callable[[Any], None]:
    """Sets an attribute in the second layer."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.layers[1].get_submodule(parent), name, value)


def rotary(change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    return lambda model: change(model.rotary_emb.inv_freq)


SETTINGS: dict[str, Callable[[Any], Any]] = {
    "scale of attention": of_layers("self_attn.scaling", 1.0),
    "activation": of_layers("mlp.act_fn", torch.nn.GELU("tanh")),
    "rotary buffer": rotary(lambda buffer: buffer.mul_(0.25)),
    "data of the rotary buffer": rotary(lambda buffer: buffer.data.mul_(3)),
    "scale of the rotation": lambda model: setattr(model.rotary_emb, "attention_scaling", 1.5),
    "fewer layers of the configuration": lambda model: setattr(model.config, "num_hidden_layers", 1),
    "fewer layers": lambda model: model.layers.pop(1),
    "weight": lambda model: setattr(model.layers[0].mlp.up_proj, "weight", model.layers[1].mlp.up_proj.weight),
    "data of a weight": lambda model: model.layers[0].self_attn.k_proj.weight.data.mul_(2),
    "bias": of_layers("mlp.up_proj.bias", torch.nn.Parameter(torch.linspace(-1, 1, 56))),
}
EPSILONS = {
    "EuroBertModel": ("variance_epsilon", "post_attention_layernorm"),
    "NomicBertModel": ("eps", "post_mlp_layernorm"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_setting_that_changes_after_a_call(name: str, setting: str) -> None:
    ours, theirs = twins(name)
    assert_same(ours, theirs)
    before = states(ours)
    for model in (ours, theirs):
        SETTINGS[setting](model)
    assert_same(ours, theirs)
    assert not torch.allclose(states(ours), before, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_epsilons_and_a_norm_that_is_replaced(name: str) -> None:
    ours, theirs = twins(name)
    assert_same(ours, theirs)
    attribute, norm = EPSILONS[name]
    for model in (ours, theirs):
        setattr(getattr(model.layers[1], norm), attribute, 0.5)
    assert_same(ours, theirs)
    other = torch.nn.LayerNorm(48)
    torch.nn.init.normal_(other.weight)
    for model in (ours, theirs):
        setattr(model.layers[0], norm, copy.deepcopy(other))
        if name.startswith("Euro"):
            model.norm = copy.deepcopy(other)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_scaled_rotations(kind: str, runs: list[int]) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 8
    ours, theirs = twins("EuroBertModel", rope_parameters=rope)
    assert_same(ours, theirs)
    assert bool(runs) == (kind != "dynamic")  # whose buffer depends on the length


# ---- checkpointing, hooks, unpatch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKED_LMS)
def test_checkpointing_hooks_and_unpatch(name: str, runs: list[int]) -> None:
    ours, theirs = twins(name)
    inputs, losses = batch(name), []
    for model in (ours, theirs):
        model.train()
        model.gradient_checkpointing_enable()
        loss = model(**inputs).loss
        loss.backward()
        losses.append((float(loss.detach()), model.base_model.layers[1].mlp.gate_proj.weight.grad))
    assert len(runs) == 1
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-6)
    handle = ours.base_model.layers[1].register_forward_hook(lambda module, inputs, output: output * 0)
    with torch.no_grad():  # hooks of layers are called
        assert not ours.eval()(IDS).logits.allclose(theirs.eval()(IDS).logits, atol=1e-3)
    assert len(runs) == 1
    handle.remove()
    twin = copy.deepcopy(ours)
    fasttfm.unpatch(twin)
    assert {type(module) for module in twin.modules()} == {type(module) for module in theirs.modules()}
    assert twin.config._attn_implementation == theirs.config._attn_implementation
    with torch.no_grad():
        assert torch.equal(twin.eval()(IDS).logits, theirs(IDS).logits)
    report = str(fasttfm.patch(twin))
    assert "layers: one call" in report
    assert "masked-LM loss" in report


@pytest.mark.parametrize("name", MODELS)
def test_types(name: str, runs: list[int]) -> None:
    """In bf16 and under autocast, as near to fp32 as transformers."""
    ours, theirs = twins(name)
    exact = states(theirs)
    with torch.autocast("cpu", torch.bfloat16):
        errors = [(states(model).float() - exact).abs().max() for model in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]
    errors = [(states(model.bfloat16()).float() - exact).abs().max() for model in (ours, theirs)]
    assert errors[0] <= 2 * errors[1]
    assert len(runs) == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    ours, theirs = twins(name)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        y, expected = compiled(IDS).last_hidden_state, theirs(IDS).last_hidden_state
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
