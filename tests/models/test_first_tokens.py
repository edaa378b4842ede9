"""Heads that read only the first token of each sequence: the last layer leaves out the other tokens' states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import SMALL_FAMILIES
from torch import Tensor, nn

from fasttfm import models, ops
from fasttfm.nn import PackedLayer, PackedTransformer, packed_transformer
from fasttfm.testing.modules import check_modules

C, H, I = 32, 2, 48
LENGTHS = (5, 1, 9)
CU_SEQLENS = ops.cu_seqlens_from_lengths(LENGTHS)
FAMILIES = ("bert", "roberta", "albert", "electra", "distilbert")
HEADS = ("ForSequenceClassification", "ForMultipleChoice")


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_transformer, "_SIZABLE", 0)


def stack(layers: int, *, p: float = 0.0, **options: Any) -> PackedTransformer:
    torch.manual_seed(0)
    module = PackedTransformer(
        [PackedLayer(C, H, I, dropout=p, attention_dropout=p, eps=1e-5, **options) for _ in range(layers)]
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens() -> Tensor:
    return torch.randn(sum(LENGTHS), C, generator=torch.Generator().manual_seed(1))


def gradients(module: PackedTransformer, run: Any) -> list[Tensor]:
    """The result of ``run`` for fp64 tokens, and the gradients of tokens and parameters."""
    torch.manual_seed(3)
    x = tokens().double().requires_grad_()
    y = run(x, CU_SEQLENS, max(LENGTHS))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"recompute": True}], ids=str)
def test_rows_and_gradients_are_those_of_the_whole_result(layers: int, p: float, options: dict[str, Any]) -> None:
    """With dropout too, because the same seeds drop the same elements. In fp64, where no rounding hides an error."""
    module = stack(layers, p=p, **options).double()
    found = gradients(module, module.first_tokens)
    expected = gradients(module, lambda x, cu_seqlens, longest: module(x, cu_seqlens, longest)[cu_seqlens[:-1]])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_a_layer_that_runs_twice() -> None:
    layer = stack(1).layers[0]
    module = PackedTransformer([layer, layer]).double()
    found = gradients(module, module.first_tokens)
    expected = gradients(module, lambda x, cu_seqlens, longest: module(x, cu_seqlens, longest)[cu_seqlens[:-1]])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


class Plain(nn.Module):
    """torch's layers, one sequence at a time."""

    def __init__(self, source: PackedTransformer) -> None:
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(C, H, I, **options) for _ in source.layers)
        for own, given in zip(self.layers, source.layers, strict=True):
            own.load_state_dict({THEIRS.get(name, name): value for name, value in given.state_dict().items()})

    def first_tokens(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        rows = []
        for sequence in x.split(cu_seqlens.diff().tolist()):
            y = sequence[None]
            for layer in self.layers:
                y = layer(y)
            rows.append(y[0, 0])
        return torch.stack(rows)


THEIRS = {
    **{f"qkv.{kind}": f"self_attn.in_proj_{kind}" for kind in ("weight", "bias")},
    **{f"out.{kind}": f"self_attn.out_proj.{kind}" for kind in ("weight", "bias")},
    **{f"up.{kind}": f"linear1.{kind}" for kind in ("weight", "bias")},
    **{f"down.{kind}": f"linear2.{kind}" for kind in ("weight", "bias")},
}


def translate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {theirs: own for own, theirs in THEIRS.items()}
    found = {}
    for name, tensor in tensors.items():
        part = ".".join(name.split(".")[2:])
        found[name.removesuffix(part) + ours.get(part, part)] = tensor
    return found


def test_same_numbers_as_torch() -> None:
    module = stack(2)

    def call(either: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": either.first_tokens(inputs["x"], CU_SEQLENS, max(LENGTHS))}

    check_modules(module, Plain(module), call, {"x": tokens()}, translate=translate)


def test_all_rows_are_computed_where_they_are_needed() -> None:
    call = (tokens(), CU_SEQLENS, max(LENGTHS))
    assert stack(2).first_tokens(*call) is not None
    assert stack(2, window=(2, 2)).first_tokens(*call) is None
    pre_norm = PackedTransformer([PackedLayer(C, H, I, norm_first=True)], nn.LayerNorm(C))
    assert pre_norm.first_tokens(*call) is None
    hooked = stack(2)
    hooked.layers[1].down.register_forward_hook(lambda *_: None)
    assert hooked.first_tokens(*call) is None
    checkpointed = stack(2)
    checkpointed.checkpointing = True
    assert checkpointed.first_tokens(*call) is None


def test_few_tokens_run_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_transformer, "_SIZABLE", 1 + sum(LENGTHS) * C * C)
    assert stack(2).first_tokens(tokens(), CU_SEQLENS, max(LENGTHS)) is None


def model_of(family: str, head: str) -> Any:
    name, sizes, _ = SMALL_FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(models, f"{name}Config")(vocab_size=50, initializer_range=0.3, num_labels=3, **sizes)
    return getattr(models, f"{name}{head}")(config).double().train()


def run(model: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    """The output and the parameters' gradients of a padded batch, with dropout."""
    generator = torch.Generator().manual_seed(1)
    choices = (2,) if "MultipleChoice" in type(model).__name__ else ()
    ids = torch.randint(5, 50, (3, *choices, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, ..., 5:] = mask[2, ..., :3] = 0
    torch.manual_seed(2)
    output = model(ids, mask, labels=torch.tensor([0, 1, 1]), **options)
    used = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(output.loss, used, allow_unused=True)
    return output, [torch.zeros(()) if each is None else each for each in found]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS)
def test_models_with_such_a_head(family: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    first_tokens = PackedLayer.first_tokens

    def counted(self: PackedLayer, *call: Any) -> Tensor:
        calls.append(1)
        return first_tokens(self, *call)

    monkeypatch.setattr(PackedLayer, "first_tokens", counted)
    model = model_of(family, head)
    output, found = run(model)
    assert calls == [1]
    whole, expected = run(model, output_hidden_states=True)
    assert calls == [1]
    assert output.hidden_states is None
    assert len(whole.hidden_states) == 3
    for one, other in zip([output.logits, output.loss, *found], [whole.logits, whole.loss, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("part", ["bert", "bert.encoder", "bert.encoder.layers.1"])
def test_a_hook_sees_all_tokens(part: str) -> None:
    model = model_of("bert", "ForSequenceClassification")
    rows: list[int] = []

    def hook(_: Any, inputs: Any, output: Any) -> None:
        states = output.last_hidden_state[0] if part == "bert" else output if part.endswith("encoder") else output[0]
        rows.append(len(states))

    model.get_submodule(part).register_forward_hook(hook)
    run(model)
    assert rows == [9 if part == "bert" else 5 + 9 + 6]
