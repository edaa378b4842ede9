"""fasttfm.nn.PackedLayer and PackedTransformer against torch.nn's layers on single sequences, and against each
other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fasttfm
from fasttfm import ops
from fasttfm.ops import gelu_gemm
from fasttfm.ops.layers import stack, support
from fasttfm.ops.layers.spec import FIELDS, Specs
from fasttfm.testing.alterations import (
    alterations_of,
    check_altered,
    check_equal,
    checkpointed,
    compiled,
    forward_hook,
    full_backward_hook,
    low_rank,
    own_forward,
    subclass,
)
from fasttfm.testing.modules import check_modules, compare_modules, run_module
from fasttfm.testing.saved import saved_bytes

C, H, I, LAYERS = 32, 2, 48, 2
LENGTHS = (5, 1, 9)
T = sum(LENGTHS)
CU_SEQLENS = ops.cu_seqlens_from_lengths(LENGTHS)
MEMORY = ({}, {"recompute": True}, {"keep_activation": True})  # how much is kept for the backward


def encoder(norm_first: bool, layers: int = LAYERS, **options: Any) -> fasttfm.nn.PackedTransformer:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "attention_dropout": 0.0, "eps": 1e-5, **options}
    stack = [fasttfm.nn.PackedLayer(C, H, I, norm_first=norm_first, **options) for _ in range(layers)]
    module = fasttfm.nn.PackedTransformer(stack, nn.LayerNorm(C) if norm_first else None)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


class Plain(nn.Module):
    """The same model built from torch.nn's layers, run on one sequence at a time."""

    def __init__(self, source: fasttfm.nn.PackedTransformer, norm_first: bool, causal: bool) -> None:
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": norm_first}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(C, H, I, **options) for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(C) if norm_first else None
        self.causal = causal
        self.load_state_dict(translate(source.state_dict()))

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        sequences = []
        for sequence in x.split(cu_seqlens.diff().tolist()):
            y = sequence[None]
            mask = torch.ones(len(sequence), len(sequence), dtype=torch.bool).triu(1) if self.causal else None
            for layer in self.layers:
                y = layer(y, src_mask=mask, is_causal=self.causal)
            sequences.append(y[0])
        y = torch.cat(sequences)
        return y if self.final_norm is None else self.final_norm(y)


NAMES = {
    "qkv.weight": "self_attn.in_proj_weight",
    "qkv.bias": "self_attn.in_proj_bias",
    "out.weight": "self_attn.out_proj.weight",
    "out.bias": "self_attn.out_proj.bias",
    "up.weight": "linear1.weight",
    "up.bias": "linear1.bias",
    "down.weight": "linear2.weight",
    "down.bias": "linear2.bias",
}


def translate(tensors: dict[str, Tensor], names: dict[str, str] = NAMES) -> dict[str, Tensor]:
    translated = {}
    for name, tensor in tensors.items():
        for ours, theirs in names.items():
            if name.endswith(f".{ours}"):
                name = name.removesuffix(ours) + theirs
                break
        translated[name] = tensor
    return translated


def translate_back(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return translate(tensors, {theirs: ours for ours, theirs in NAMES.items()})


def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"], CU_SEQLENS, max(LENGTHS))}


def tokens(count: int = T) -> Tensor:
    return torch.randn(count, C, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_same_numbers_as_torch(norm_first: bool, causal: bool, memory: dict[str, bool]) -> None:
    ours = encoder(norm_first, causal=causal, **memory)
    theirs = Plain(ours, norm_first, causal)
    check_modules(ours, theirs, call, {"x": tokens()}, translate=translate_back)


def test_a_wrong_model_is_detected() -> None:
    ours = encoder(norm_first=False)
    theirs = Plain(ours, norm_first=False, causal=True)
    comparisons = compare_modules(ours, theirs, call, {"x": tokens()}, translate=translate_back)
    right = [comparison.name for comparison in comparisons if comparison.ok]
    assert right == ["dlayers.1.norm2.bias"]  # a sum of the incoming gradient, whatever the model


def gradients(module: nn.Module, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = module(x, CU_SEQLENS, max(LENGTHS))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_dropout_is_the_same_forward_and_backward(norm_first: bool, memory: dict[str, bool]) -> None:
    """Compares the gradient with finite differences: they agree only if both passes drop the same elements."""
    module = encoder(norm_first, dropout=0.3, attention_dropout=0.3, **memory).double()
    x = tokens().double().requires_grad_()

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return module(x, CU_SEQLENS, max(LENGTHS))

    assert not torch.equal(function(x), module(x, CU_SEQLENS, max(LENGTHS)))
    assert torch.autograd.gradcheck(function, [x], fast_mode=True)


def test_saved_bytes() -> None:
    x, cu_seqlens = tokens(64), torch.tensor([0, 64], dtype=torch.int32)
    modules = [encoder(norm_first=False, **memory) for memory in MEMORY]
    default, least, most = (saved_bytes(lambda module=module: module(x, cu_seqlens, 64)) for module in modules)
    assert default - least == LAYERS * 64 * C * 4  # the inner LayerNorm's output
    assert most - default == LAYERS * 64 * I * 4  # the activation


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("kept", [gelu_gemm.PRODUCT, gelu_gemm.DERIVATIVE])
def test_a_kept_activation_changes_no_gradient(norm_first: bool, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, in which rounding the derivative before the multiplication makes no visible difference."""
    monkeypatch.setattr(gelu_gemm, "kept_beside", lambda *_: kept)
    again, keeps = (encoder(norm_first, keep_activation=keep).double() for keep in (False, True))
    for found, expected in zip(*(gradients(module, tokens().double(), 0) for module in (keeps, again)), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_autocast_gives_gradients_in_the_parameters_type(norm_first: bool) -> None:
    module = encoder(norm_first, dropout=0.1)
    x = tokens().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x, CU_SEQLENS, max(LENGTHS))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.shape == parameter.shape, name
        assert parameter.grad.isfinite().all(), name


def test_frozen_parameters_get_no_gradient() -> None:
    module = encoder(norm_first=False)
    expected = gradients(module, tokens(), 0)
    frozen = [name for index, (name, _) in enumerate(module.named_parameters()) if index % 2]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = tokens().requires_grad_()
    y = module(x, CU_SEQLENS, max(LENGTHS))
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(x.grad, expected[1])
    for (name, parameter), gradient in zip(module.named_parameters(), expected[2:], strict=True):
        assert (parameter.grad is None) == (name in frozen), name
        assert parameter.grad is None or torch.equal(parameter.grad, gradient), name


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_all_layers_by_one_op_are_the_layers_one_by_one(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[int] = []
    run = stack.run_stack
    monkeypatch.setattr(stack, "run_stack", lambda *call: (stacks.append(len(call[0])), run(*call))[1])
    module = encoder(norm_first, layers=3, dropout=0.1)
    found = gradients(module, tokens(), 5)
    assert stacks == [3]
    module.layers[1].dropout = 0.2
    different = gradients(module, tokens(), 5)
    assert stacks == [3, 3]
    monkeypatch.setattr(type(module), "call_of", lambda *_: None)
    assert all(map(torch.equal, different, gradients(module, tokens(), 5)))
    module.layers[1].dropout = 0.1
    assert all(map(torch.equal, found, gradients(module, tokens(), 5)))


def test_descriptions_follow_the_call_and_the_layers() -> None:
    module = encoder(norm_first=False, layers=3, dropout=0.1).eval()

    def specs() -> Specs:
        call = module.call_of(tokens(), CU_SEQLENS, 9)
        assert call is not None
        assert len(call[2]) == 3 * len(FIELDS)
        return call[0]

    first = specs()
    assert specs() is first
    assert len(set(first)) == 1
    module.layers[2].norm2.eps = 0.5
    assert [each.norm_b.eps for each in specs()] == [1e-5, 1e-5, 0.5]
    module.layers[0].activation = "relu"
    assert [each.feed_forward.activation for each in specs()] == ["relu", "gelu", "gelu"]
    module.layers[1].keep_activation = True
    assert [each.recomputed for each in specs()] == [{"a"}, set(), {"a"}]
    module.train()
    assert all(each.dropout_a > 0 for each in specs())


def test_a_tensor_that_has_replaced_a_parameter_is_used() -> None:
    module, x = encoder(norm_first=False), tokens()
    module(x, CU_SEQLENS, 9)  # inspects its modules and caches the result
    expected = copy.deepcopy(module)
    for each in (module, expected):
        with torch.no_grad():
            each.layers[1].up.weight.mul_(2)
    weight = module.layers[1].up.weight.detach()
    del module.layers[1].up.weight
    module.layers[1].up.weight = weight
    torch.testing.assert_close(module(x, CU_SEQLENS, 9), expected(x, CU_SEQLENS, 9))


def test_explain_reports_how_layers_are_run() -> None:
    module = encoder(norm_first=True)
    reason = support.missing_cpu()
    assert module.explain(tokens(), 9).chosen == ("core" if reason is None else "ops")
    assert module.double().explain(tokens().double(), 9).chosen == "ops"
    module.layers[0].register_forward_hook(lambda *_: None)
    assert "hooks" in str(module.float().explain(tokens(), 9))


def test_a_layer_that_is_used_twice_has_one_set_of_parameters() -> None:
    layer = fasttfm.nn.PackedLayer(C, H, I, dropout=0.0, attention_dropout=0.0)
    shared = fasttfm.nn.PackedTransformer([layer, layer])
    assert len(list(shared.parameters())) == len(list(layer.parameters()))
    x = tokens()
    once = layer(x, CU_SEQLENS, 9)[0]
    assert torch.equal(shared(x, CU_SEQLENS, 9), layer(once, CU_SEQLENS, 9)[0])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_layers_can_be_removed_and_added(norm_first: bool) -> None:
    x, module = tokens(), encoder(norm_first, layers=3)
    module(x, CU_SEQLENS, 9)
    chosen = [module.layers[2], module.layers[0]]
    expected = fasttfm.nn.PackedTransformer(chosen, module.final_norm)(x, CU_SEQLENS, 9)
    module.layers = nn.ModuleList(chosen[:1])
    module(x, CU_SEQLENS, 9)
    module.layers.append(chosen[1])
    assert torch.equal(module(x, CU_SEQLENS, 9), expected)


def test_layers_that_run_twice_cannot_be_removed() -> None:
    layers = [fasttfm.nn.PackedLayer(C, H, I) for _ in range(2)]
    shared = fasttfm.nn.PackedTransformer([*layers, *layers])
    del shared.layers[1]
    with pytest.raises(ValueError, match="PackedTransformer: layers: expected 2, because some of them run more than"):
        shared(tokens(), CU_SEQLENS, 9)


def test_hidden_states_are_the_stream_before_each_layer() -> None:
    x = tokens()
    for norm_first in (False, True):
        module, found = encoder(norm_first), []
        module(x, CU_SEQLENS, 9, hidden_states=found)
        assert len(found) == LAYERS
        assert torch.equal(found[0], x)


def test_no_tokens() -> None:
    module = encoder(norm_first=False)
    x = torch.zeros(0, C, requires_grad=True)
    y = module(x, torch.zeros(2, dtype=torch.int32), 0)
    y.sum().backward()
    assert y.shape == (0, C)
    assert all(not parameter.grad.any() for parameter in module.parameters())


def test_wrong_arguments_are_reported() -> None:
    layer = fasttfm.nn.PackedLayer(C, H, I)
    with pytest.raises(ValueError, match=r"PackedLayer: x: expected a contiguous \[T, 32\], got shape \(15, 16\)"):
        layer(torch.zeros(T, 16), CU_SEQLENS, 9)
    with pytest.raises(ValueError, match="PackedLayer: residual: expected None in a post-LN model, got Tensor"):
        layer(tokens(), CU_SEQLENS, 9, residual=tokens())
    with pytest.raises(TypeError, match="PackedLayer: cu_seqlens: expected a tensor of int32"):
        layer(tokens(), CU_SEQLENS.long(), 9)
    with pytest.raises(ValueError, match="PackedLayer: heads: expected a divisor of the width 32, got 3"):
        fasttfm.nn.PackedLayer(C, 3, I)
    with pytest.raises(ValueError, match="PackedTransformer: layers: expected all pre-LN"):
        fasttfm.nn.PackedTransformer([layer], nn.LayerNorm(C))


@pytest.mark.usefixtures("torch_multiplies_by_blas")
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_compiled_in_one_graph(norm_first: bool) -> None:
    torch._dynamo.reset()
    module = encoder(norm_first, layers=1, dropout=0.1, attention_dropout=0.1, recompute=True, keep_activation=True)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(gradients(module, tokens(), 7), gradients(compiled, tokens(), 7), strict=True):
        assert torch.equal(a, b)


# ---- altered layers --------------------------------------------------------------------------------------------------

ONE = (torch.tensor([0, T], dtype=torch.int32), T)  # a batch of one sequence
PATHS = tuple(f"layers.1.{part}" for part in ("qkv", "out", "up", "down", "norm1", "norm2"))
ALTERATIONS = alterations_of(encoder(norm_first=False), PATHS)


def call_once(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"y": module(inputs["x"], *ONE)}


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str, norm_first: bool) -> None:
    ours = encoder(norm_first)
    check_altered(ours, Composed(copy.deepcopy(ours)), call_once, {"x": tokens()}, ALTERATIONS[name])


@pytest.mark.parametrize("alter", [forward_hook, subclass, own_forward, full_backward_hook])
def test_hooks_and_subclasses_of_a_layer(alter: Any) -> None:
    ours = encoder(norm_first=False).double()
    plain = copy.deepcopy(ours)
    events = alter(ours, "layers.0")

    def expected(_: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        if alter is full_backward_hook:  # doubles the gradient of the layer's input
            x = 2 * x - x.detach()
        y = plain.layers[0](x, *ONE)[0] * (1 if alter is full_backward_hook else 1.5)
        return {"y": plain.layers[1](y, *ONE)[0]}

    check_equal(run_module(ours, call_once, {"x": tokens()}), run_module(plain, expected, {"x": tokens()}))
    assert len(events) == 1


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("alter", [checkpointed, compiled])
def test_wrapped_layers_are_called(alter: Any, norm_first: bool) -> None:
    torch._dynamo.reset()
    ours = encoder(norm_first, dropout=0.2).double()
    expected = gradients(ours, tokens().double(), 5)
    alter(ours, "layers.1")
    for found, value in zip(gradients(ours, tokens().double(), 5), expected, strict=True):
        torch.testing.assert_close(found, value)
    assert [type(layer) for layer in ours.in_order()] == [fasttfm.nn.PackedLayer] * LAYERS


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("parts", [("qkv", "down", "norm1", "norm2"), ("",)], ids=["inside", "layer"])
def test_hooks_change_nothing_about_dropout(parts: tuple[str, ...], norm_first: bool) -> None:
    ours = encoder(norm_first, dropout=0.2, attention_dropout=0.2).double()
    expected = gradients(ours, tokens().double(), 5)
    for part in parts:
        ours.layers[1].get_submodule(part).register_forward_hook(lambda *_: None)
    for found, value in zip(gradients(ours, tokens().double(), 5), expected, strict=True):
        torch.testing.assert_close(found, value)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_sharded_layers(norm_first: bool) -> None:
    """FSDP gathers parameters only during the call of their own layer, so no other layer may read them."""
    from torch.distributed.fsdp import fully_shard

    ours = encoder(norm_first, dropout=0.2).double()
    expected = gradients(ours, tokens().double(), 5)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for layer in ours.layers:
            fully_shard(layer)
        fully_shard(ours)
        torch.manual_seed(5)
        x = tokens().double().requires_grad_()
        y = ours(x, CU_SEQLENS, max(LENGTHS))
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
        found = [y, x.grad, *(parameter.grad.full_tensor() for parameter in ours.parameters())]
    finally:
        torch.distributed.destroy_process_group()
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other)


def test_layers_with_their_own_dropout_are_recomputed_equally() -> None:
    """A replaced module may have its own dropout, which checkpointing has to repeat."""
    ours = encoder(norm_first=False, dropout=0.2).double()
    ours.layers[0].up = nn.Sequential(nn.Dropout(0.5), ours.layers[0].up)
    expected = gradients(ours, tokens().double(), 5)
    ours.checkpointing = True
    for found, value in zip(gradients(ours, tokens().double(), 5), expected, strict=True):
        torch.testing.assert_close(found, value)


def test_attention_weights_of_a_replaced_projection() -> None:
    ours = encoder(norm_first=False).double()
    layer, x = ours.layers[0], tokens().double()
    merged = copy.deepcopy(layer)
    low_rank(layer, "qkv")
    with torch.no_grad():
        merged.qkv.weight += layer.qkv.b @ layer.qkv.a
    torch.testing.assert_close(layer.attention_weights(x, *ONE), merged.attention_weights(x, *ONE))


def test_modules_that_are_no_layers_are_refused() -> None:
    ours = encoder(norm_first=False)
    ours.layers[1] = nn.Identity()
    with pytest.raises(
        TypeError, match="PackedTransformer: layers: expected a PackedLayer, or a module around one, got Ident"
    ):
        call_once(ours, {"x": tokens()})
    ours = encoder(norm_first=False)
    ours.layers[1].activation = torch.tanh
    with pytest.raises(ValueError, match="PackedLayer: activation: expected one of gelu"):
        call_once(ours, {"x": tokens()})


# ---- on a GPU --------------------------------------------------------------------------------------------------------

WIDE = {"width": 256, "heads": 4, "intermediate": 512}


class Composed(nn.Module):
    """Our layers in plain torch, sequence by sequence: the reference for results of a GPU."""

    def __init__(self, source: fasttfm.nn.PackedTransformer) -> None:
        super().__init__()
        self.layers, self.final_norm = source.layers, source.final_norm

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        sequences = x.split(cu_seqlens.diff().tolist())
        return torch.cat([self.sequence(sequence) for sequence in sequences])

    def sequence(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            pre = layer.norm_first
            q, k, v = layer.qkv(layer.norm1(x) if pre else x).view(len(x), 3, layer.heads, -1).permute(1, 2, 0, 3)
            causal = layer.window[1] == 0
            context = functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1).flatten(1)
            x = x + layer.out(context)
            x = x if pre else layer.norm1(x)
            x = x + layer.down(functional.gelu(layer.up(layer.norm2(x) if pre else x)))
            x = x if pre else layer.norm2(x)
        return x if self.final_norm is None else self.final_norm(x)


def wide_encoder(norm_first: bool, **options: Any) -> fasttfm.nn.PackedTransformer:
    torch.manual_seed(0)
    options = {"dropout": 0.0, "attention_dropout": 0.0, "eps": 1e-5, "norm_first": norm_first, **options}
    layers = [fasttfm.nn.PackedLayer(*WIDE.values(), **options) for _ in range(LAYERS)]
    return fasttfm.nn.PackedTransformer(layers, nn.LayerNorm(WIDE["width"]) if norm_first else None).cuda()


def wide_batch(lengths: tuple[int, ...] = (150, 1, 64, 200)) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), WIDE["width"], generator=generator)
    return x, ops.cu_seqlens_from_lengths(lengths).cuda(), max(lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_same_numbers_on_a_gpu(norm_first: bool, memory: dict[str, bool], dtype: torch.dtype) -> None:
    ours = wide_encoder(norm_first, causal=norm_first, **memory).to(dtype)
    theirs = Composed(copy.deepcopy(ours))
    x, cu_seqlens, longest = wide_batch()

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": module(inputs["x"], cu_seqlens, longest)}

    check_modules(ours, theirs, call, {"x": x.to(dtype)})


@pytest.mark.gpu
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_dropout_on_a_gpu_is_that_of_the_cpu(norm_first: bool) -> None:
    """Masks depend on seeds and not on devices: with the same seeds both drop the same elements."""
    module = wide_encoder(norm_first, dropout=0.2, attention_dropout=0.2)
    x, cu_seqlens, longest = wide_batch()
    layer, seeds = module.layers[0], torch.tensor([3, 4, 5])
    options = {"residual": x, "next_norm": layer.norm1} if norm_first else {}
    on_gpu = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
    y, _ = layer(x.cuda(), cu_seqlens, longest, seeds=seeds.cuda(), **on_gpu)
    layer.cpu()
    expected, _ = layer(x, cu_seqlens.cpu(), longest, seeds=seeds, **options)
    assert (y.cpu() - expected).abs().max() < 1e-2  # a single element with another mask differs by far more


@pytest.mark.gpu
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("memory", MEMORY[1:], ids=str)
def test_a_step_does_not_synchronize_and_can_be_captured(norm_first: bool, memory: dict[str, bool]) -> None:
    module = wide_encoder(norm_first, dropout=0.1, attention_dropout=0.1, **memory)
    x, cu_seqlens, longest = wide_batch()
    x = x.cuda().requires_grad_()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = module(x, cu_seqlens, longest)
        y.float().square().mean().backward()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for parameter in module.parameters():
        parameter.grad = None
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    first = x.grad.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(x.grad, first)  # accumulated, with a new dropout mask
