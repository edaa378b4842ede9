"""The GPTs against transformers: the same checkpoint, the same outputs and gradients, padded and packed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import GPT_SIZES, IDS, MASKS, PAD, SEGMENTS, B, S, config_of, pair, same_tensors, tensors, theirs_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm import models
from fasttfm.models import CheckpointError
from fasttfm.models.openai_gpt import task_sequence
from fasttfm.testing.modules import check_modules

LENGTHS = [4, 9, 1]
WORDS = torch.where(torch.rand(B, S, generator=torch.Generator().manual_seed(0)) < 0.7, IDS, -100)


def config(family: str, **changes: Any) -> Any:
    return config_of(models, family, {**GPT_SIZES, **changes})


FAMILIES = ["GPT2", "OpenAIGPT"]


# ---- the same numbers ------------------------------------------------------------------------------------------------

CLASSES = [f"{family}{head}" for family in FAMILIES for head in ("Model", "LMHeadModel", "ForSequenceClassification")]
# With padding before a token, transformers' loss predicts the token from the padding, so that loss is not compared.
LAYOUTS = [(name, mask) for name in CLASSES for mask in ("right", "full")] + [
    (f"{family}Model", "anywhere") for family in FAMILIES
]


@pytest.mark.parametrize(("name", "kind"), LAYOUTS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_same_numbers_as_transformers(name: str, kind: str, packed: bool, tmp_path: Path) -> None:
    ours, theirs = pair(name, tmp_path)
    mask = MASKS[kind]
    there = mask.bool()
    ids = torch.where(there, IDS, PAD)
    given = {"token_type_ids": SEGMENTS}
    if "LMHead" in name:
        given["labels"] = torch.where(there, WORDS, -100)
    elif "Classification" in name:
        given["labels"] = torch.tensor([2, 0, 1])

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        options: dict[str, Any] = {"output_hidden_states": True}
        if module is ours and "LMHead" in name:
            options["output_logits"] = True
        if module is not ours or not packed:
            return tensors(module(ids, attention_mask=mask, **given, **options), mask)
        own = {key: value[there] if value.shape == mask.shape else value for key, value in given.items()}
        if kind == "anywhere":  # the position of a packed token is not known
            own["position_ids"] = torch.arange(S).expand(B, S)[there]
        cu_seqlens = torch.nn.functional.pad(there.sum(1).cumsum(0), (1, 0)).int()
        return tensors(module(ids[there], cu_seqlens=cu_seqlens, max_seqlen=S, **own, **options))

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


@pytest.mark.parametrize("changes", [{}, {"summary_activation": "tanh"}], ids=["plain", "tanh"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_heads(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = pair(f"{family}DoubleHeadsModel", tmp_path, **changes)
    ids = torch.stack([IDS[:2], IDS[:2].flip(-1)])
    mask = MASKS["right"][:2].repeat(2, 1, 1).int()
    given = {
        "labels": ids.where(mask.bool(), -100),
        "mc_token_ids": torch.tensor([[2, 8], [3, 5]]),
        "mc_labels": torch.tensor([1, 0]),
    }

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        options = {"output_logits": True} if module is ours else {}
        return tensors(module(ids, attention_mask=mask.flatten(0, 1), **given, **options), mask)

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def test_choices_are_read_from_the_same_tokens_in_every_layout() -> None:
    module = models.GPT2DoubleHeadsModel(config("GPT2")).eval()
    there = MASKS["anywhere"].bool()[:2]
    columns = torch.tensor([[4, 1]])
    shape = (1, 2, S)
    padded = module(IDS[:2].view(shape), there.view(shape), mc_token_ids=columns)
    numbers = (there.cumsum(1) - 1).gather(1, columns.view(2, 1)).view(1, 2)
    cu_seqlens = torch.tensor([0, 7, 11], dtype=torch.int32)
    positions = torch.arange(S).expand(2, S)[there]
    packed = module(IDS[:2][there], position_ids=positions, cu_seqlens=cu_seqlens, mc_token_ids=numbers, num_choices=2)
    assert torch.equal(padded.mc_logits, packed.mc_logits)
    with pytest.raises(ValueError, match=r"GPT2DoubleHeadsModel: input_ids: expected shape \[B, choices, S\]"):
        module(IDS)


@pytest.mark.parametrize("kind", ["full", "right", "anywhere"])
@pytest.mark.parametrize("column", [-1, S, 2**40])
def test_a_choice_is_read_from_a_token_of_its_own_sequence(kind: str, column: int) -> None:
    module = models.GPT2DoubleHeadsModel(config("GPT2")).eval()
    there = MASKS[kind].bool()[:2]
    first = there.int().argmax(1)
    ids = IDS[:2].view(1, 2, S)
    module(ids, there.view(1, 2, S), mc_token_ids=first.view(1, 2))
    with pytest.raises(ValueError, match=rf"mc_token_ids: expected indices in \[0, \d\), got {column} at sequence 0"):
        module(ids, there.view(1, 2, S), mc_token_ids=torch.tensor([[column, int(first[1])]]))
    if not there.all():  # padding is no token
        row = int((~there).any(1).int().argmax())
        columns = first.clone()
        columns[row] = (~there[row]).int().argmax()
        with pytest.raises(ValueError, match=rf"mc_token_ids: expected .* at sequence {row} in this call"):
            module(ids, there.view(1, 2, S), mc_token_ids=columns.view(1, 2))


def test_a_packed_choice_is_read_from_its_own_sequence() -> None:
    module = models.GPT2DoubleHeadsModel(config("GPT2")).eval()
    cu_seqlens = torch.tensor([0, 4, 11], dtype=torch.int32)
    call = {"cu_seqlens": cu_seqlens, "num_choices": 2}
    module(IDS.flatten()[:11], mc_token_ids=torch.tensor([[3, 6]]), **call)
    with pytest.raises(ValueError, match=r"mc_token_ids: expected indices in \[0, 4\), got 4 at sequence 0"):
        module(IDS.flatten()[:11], mc_token_ids=torch.tensor([[4, 6]]), **call)
    with pytest.raises(ValueError, match=r"columns: expected 2 numbers, got \(3,\)"):
        module(IDS.flatten()[:11], mc_token_ids=torch.tensor([1, 2, 3]), **call)


def test_attentions(tmp_path: Path) -> None:
    ours, theirs = pair("GPT2Model", tmp_path, attn_implementation="eager")
    found = ours(IDS, lengths=LENGTHS, output_attentions=True).attentions
    expected = theirs.double()(IDS, attention_mask=MASKS["right"], output_attentions=True).attentions
    assert len(found) == len(expected) == 2
    for a, b in zip(found, expected, strict=True):
        rows = MASKS["right"][:, None, :, None].expand_as(b)
        assert (a.double() - b)[rows].abs().max() < torch.finfo(torch.float32).eps * 100
        assert not a[~rows].any()


def test_the_last_token_is_read() -> None:
    """Padding is found by its id if the mask does not exclude it; without a padding id, the last token is read."""
    module = models.GPT2ForSequenceClassification(config("GPT2")).eval()
    ids = torch.where(MASKS["right"], IDS, PAD)
    by_mask = module(ids, MASKS["right"]).logits
    torch.testing.assert_close(module(ids).logits, by_mask)  # GEMMs of fewer rows round differently
    module.config.pad_token_id = None
    assert torch.equal(module(ids, lengths=LENGTHS).logits, by_mask)
    assert not torch.allclose(module(ids).logits, by_mask)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def made(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    module = getattr(models, name)(config(name, **changes))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


STORED = [name for name in models.__all__ if name.startswith(tuple(FAMILIES)) and not name.endswith("Config")]


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in STORED), ("GPT2LMHeadModel", False)])
def test_transformers_reads_ours_and_we_read_theirs(name: str, tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = made(name, tie_word_embeddings=tied)
    ours.save_pretrained(tmp_path / "ours")
    theirs, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.num_labels == ours.config.num_labels
    theirs.save_pretrained(tmp_path / "theirs")
    written, kept = (load_file(tmp_path / who / "model.safetensors") for who in ("theirs", "ours"))
    if name == "OpenAIGPTDoubleHeadsModel":  # transformers keeps the other name of the tied weight
        written["transformer.tokens_embed.weight"] = written.pop("lm_head.weight")
    assert same_tensors(written, kept)
    again = getattr(models, name).from_pretrained(tmp_path / "theirs")
    assert same_tensors(again.state_dict(), ours.state_dict())
    assert dataclasses.replace(again.config, extra={}) == dataclasses.replace(ours.config, extra={})


def test_published_files_are_read(tmp_path: Path) -> None:
    """They have no prefix, no head, and the causal mask of every layer."""
    module = made("GPT2LMHeadModel")
    module.transformer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 21, 21) for layer in range(2)}
    save_file({**load_file(path), **masks}, path)
    again = models.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert same_tensors(again.state_dict(), module.state_dict())
    assert again.lm_head.decoder.weight is again.transformer.embeddings.word.weight


def test_a_matrix_that_is_not_transposed_is_named(tmp_path: Path) -> None:
    made("GPT2Model").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["h.1.attn.c_attn.weight"] = stored["h.1.attn.c_attn.weight"].t().contiguous()
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn\.weight: expected shape \(48, 144\), got \(144, 48"):
        models.GPT2Model.from_pretrained(tmp_path)


def test_gpt1_has_no_fields_of_gpt2(tmp_path: Path) -> None:
    models.OpenAIGPTConfig().save_pretrained(tmp_path)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.OpenAIGPTConfig.from_pretrained(tmp_path).to_dict()
    ours_alone = {"recompute", "keep_activation", "auxiliary_loss_weight"}
    assert theirs.keys() - transformers.OpenAIGPTConfig().to_dict().keys() <= ours_alone


# ---- GPT-1's fine-tuning ---------------------------------------------------------------------------------------------


def test_the_auxiliary_loss_is_the_causal_lm_loss(tmp_path: Path) -> None:
    """Against transformers' two models on one set of weights."""
    ours, theirs = pair("OpenAIGPTForSequenceClassification", tmp_path, auxiliary_loss_weight=0.25)
    transformers = pytest.importorskip("transformers")
    labels, mask = torch.tensor([2, 0, 1]), MASKS["right"]
    ids = torch.where(mask, IDS, PAD)
    words = torch.where(mask, IDS, -100)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            return {"loss": module(ids, mask, labels=labels, lm_labels=words).loss}
        states = module.transformer(ids, attention_mask=mask).last_hidden_state
        logits = (states @ module.transformer.tokens_embed.weight.t())[:, :-1]
        auxiliary = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        return {"loss": module(ids, attention_mask=mask, labels=labels).loss + 0.25 * auxiliary}

    assert isinstance(theirs, transformers.OpenAIGPTForSequenceClassification)
    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def test_tasks_are_one_sequence() -> None:
    marks = {"start": 90, "delimiter": 91, "extract": 92}
    assert task_sequence([1, 2], **marks) == [90, 1, 2, 92]
    assert task_sequence([1, 2], [3], [4], **marks) == [90, 1, 2, 91, 3, 91, 4, 92]


# ---- GPT-3's local layers --------------------------------------------------------------------------------------------


def test_every_second_layer_is_local() -> None:
    """Against transformers' GPT-2, a layer at a time, with a band as the mask of every second one."""
    theirs = theirs_of("GPT2LMHeadModel", n_layer=4)
    ours = models.GPT3LMHeadModel(config("GPT3", n_layer=4, local_window=4)).eval()
    ours.load_state_dict(ours.own_tensors(theirs.state_dict()), strict=False)
    there = MASKS["right"]
    distance = torch.arange(S)[:, None] - torch.arange(S)

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            return {"logits": module(IDS, there).logits[there]}
        model = module.transformer
        x = model.wte(IDS) + model.wpe(torch.arange(S))
        for index, layer in enumerate(model.h):
            seen = (distance >= 0) & (distance < (4 if index % 2 else S))
            x = layer(x, attention_mask=x.new_zeros(1, 1, S, S).masked_fill(~seen, float("-inf")))
        return {"logits": module.lm_head(model.ln_f(x))[there]}

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def test_gpt3_is_not_read_as_gpt2(tmp_path: Path) -> None:
    module = made("GPT3LMHeadModel", local_window=5)
    module.save_pretrained(tmp_path)
    again = models.GPT3LMHeadModel.from_pretrained(tmp_path)
    assert same_tensors(again.state_dict(), module.state_dict())
    assert again.transformer.encoder.in_order()[1].window == (4, 0)
    with pytest.raises(CheckpointError, match="model_type: expected 'gpt2', got 'gpt3'"):
        models.GPT2LMHeadModel.from_pretrained(tmp_path)


# ---- initialisation and training -------------------------------------------------------------------------------------


def test_residual_projections_start_small() -> None:
    torch.manual_seed(0)
    module = models.GPT2LMHeadModel(config("GPT2", n_layer=8, n_embd=96))
    for layer in module.transformer.encoder.in_order():
        for product, std in ((layer.qkv, 0.02), (layer.up, 0.02), (layer.out, 0.005), (layer.down, 0.005)):
            count = product.weight.numel()
            assert abs(product.weight.std().item() / std - 1) < 5 / (2 * count) ** 0.5  # five standard deviations
            assert not product.bias.any()


def test_a_training_step_is_one_graph_and_can_be_checkpointed() -> None:
    """Compiled and with activation checkpointing it gives the same bits, including dropout."""
    module = models.GPT2LMHeadModel(config("GPT2"))
    cu_seqlens = torch.tensor([0, 11, B * S], dtype=torch.int32)

    def step(call: Any) -> list[Tensor]:
        torch.manual_seed(3)
        module.zero_grad()
        loss = call(IDS.flatten(), cu_seqlens=cu_seqlens, max_seqlen=16, labels=IDS.flatten()).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad.clone() for parameter in module.parameters())]

    expected = step(module)
    torch._dynamo.reset()
    compiled = step(torch.compile(module, fullgraph=True, backend="aot_eager"))
    module.gradient_checkpointing_enable()
    for found in (compiled, step(module)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_training_step_reaches_every_parameter() -> None:
    module = models.GPT2LMHeadModel(config("GPT2"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(IDS, MASKS["right"], labels=IDS).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())
