"""ELECTRA against transformers: single models, and generator and discriminator together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import (
    IDS,
    MASKS,
    SEGMENTS,
    SIZES,
    WORDS,
    B,
    S,
    V,
    check_layout,
    check_multiple_choice,
    check_question_answering,
    pair,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from fasttfm import models
from fasttfm.models import CheckpointError
from fasttfm.testing.modules import check_modules

transformers = pytest.importorskip("transformers")

LAYOUTS = [
    ("ElectraModel", "right", 20, True),
    ("ElectraModel", "anywhere", 48, False),
    ("ElectraForPreTraining", "right", 20, False),
    ("ElectraForPreTraining", "full", 48, True),
    ("ElectraForPreTraining", "anywhere", 20, True),
    ("ElectraForMaskedLM", "right", 20, True),
    ("ElectraForMaskedLM", "full", 48, False),
    ("ElectraForSequenceClassification", "right", 20, True),
    ("ElectraForTokenClassification", "anywhere", 20, False),
]


@pytest.mark.parametrize(("name", "kind", "embedding_size", "packed"), LAYOUTS)
def test_same_numbers_as_transformers(name: str, kind: str, embedding_size: int, packed: bool, tmp_path: Path) -> None:
    check_layout(name, *pair(name, tmp_path, embedding_size=embedding_size), kind, packed=packed)


def test_multiple_choice(tmp_path: Path) -> None:
    check_multiple_choice(*pair("ElectraForMultipleChoice", tmp_path, embedding_size=20))


def test_question_answering(tmp_path: Path) -> None:
    check_question_answering(*pair("ElectraForQuestionAnswering", tmp_path, embedding_size=20, num_labels=2))


# ---- generator and discriminator -------------------------------------------------------------------------------------


def joint(**changes: Any) -> Any:
    """With a generator of a third of the size: width 16, 1 head."""
    torch.manual_seed(0)
    sizes = {**SIZES, "embedding_size": 20, "generator_size": 1 / 3, **changes}
    made = models.ElectraForJointPreTraining(models.ElectraConfig(**sizes))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def run(module: Any, *args: Any, seed: int = 5, **options: Any) -> Any:
    torch.manual_seed(seed)
    return module(*args, **options)


@pytest.mark.parametrize(
    ("size", "sizes"), [("small", (64, 1, 256)), ("base", (256, 4, 1024)), ("large", (256, 4, 1024))]
)
def test_generator_sizes_are_fractions(size: str, sizes: tuple[int, ...]) -> None:
    config = models.ElectraConfig.named(size)
    smaller = config.generator()
    assert (smaller.hidden_size, smaller.num_attention_heads, smaller.intermediate_size) == sizes
    assert smaller.embedding_size == config.embedding_size
    assert smaller.num_hidden_layers == config.num_hidden_layers


def test_embeddings_are_shared() -> None:
    for made in (joint(), copy.deepcopy(joint())):
        inner, outer = made.generator.electra.embeddings, made.discriminator.electra.embeddings
        for part in ("word", "position", "segment", "norm"):
            assert getattr(inner, part).weight is getattr(outer, part).weight
        assert inner.norm.bias is outer.norm.bias
        assert made.generator.lm_head.decoder.weight is outer.word.weight
        assert inner.projection.weight is not outer.projection.weight
        alone = [made.generator, made.discriminator]
        counted = sum(parameter.numel() for module in alone for parameter in module.parameters())
        shared = sum(parameter.numel() for parameter in outer.parameters())
        shared -= sum(parameter.numel() for parameter in outer.projection.parameters())
        assert sum(parameter.numel() for parameter in made.parameters()) == counted - shared


def test_tokens_are_sampled_where_they_were_masked() -> None:
    module = joint().eval()
    output = run(module, IDS, MASKS["right"], labels=WORDS.where(MASKS["right"], -100))
    masked = (WORDS != -100) & MASKS["right"]
    assert torch.equal(output.sampled_ids[~masked & MASKS["right"]], IDS[~masked & MASKS["right"]])
    assert ((output.sampled_ids >= 0) & (output.sampled_ids < V)).all()
    assert torch.equal(output.replaced, masked & (output.sampled_ids != WORDS))
    assert output.replaced.any()
    others = run(module, IDS, MASKS["right"], labels=WORDS.where(MASKS["right"], -100), seed=6)
    assert not torch.equal(others.sampled_ids, output.sampled_ids)


def test_a_sample_that_equals_the_original_is_no_replacement() -> None:
    """A generator that predicts the original: the bias of one token is far above the others."""
    module = joint().eval()
    with torch.no_grad():
        module.generator.lm_head.decoder.bias[7] = 1e4
    labels = torch.full((B, S), -100)
    labels[:, 2], labels[:, 4] = 7, 8
    output = run(module, IDS, labels=labels)
    assert (output.sampled_ids[:, [2, 4]] == 7).all()
    assert torch.equal(output.replaced, labels == 8)


class TheirJoint(torch.nn.Module):
    """transformers' two models, on given tokens."""

    def __init__(self, generator: Any, discriminator: Any) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


@pytest.mark.parametrize("kind", ["right", "anywhere"])
def test_same_losses_and_gradients_as_transformers(kind: str, tmp_path: Path) -> None:
    """On the tokens that ours has sampled. The gradient of a shared parameter is the sum over both models."""
    ours = joint().eval()
    ours.save_pretrained(tmp_path)
    theirs = TheirJoint(
        transformers.ElectraForMaskedLM.from_pretrained(tmp_path / "generator"),
        transformers.ElectraForPreTraining.from_pretrained(tmp_path / "discriminator"),
    ).eval()
    mask = MASKS[kind].bool()
    labels = WORDS.where(mask, -100)
    drawn: dict[str, Tensor] = {}

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is ours:
            output = run(ours, IDS, mask, SEGMENTS, labels=labels)
            drawn.update(ids=output.sampled_ids, replaced=output.replaced)
            assert torch.equal(output.loss, output.generator_loss + 50 * output.discriminator_loss)
            return {"generator": output.generator_loss, "discriminator": output.discriminator_loss}
        options = {"attention_mask": mask.long(), "token_type_ids": SEGMENTS}
        generator_loss = module.generator(IDS, labels=labels, **options).loss
        discriminator_loss = module.discriminator(drawn["ids"], labels=drawn["replaced"].long(), **options).loss
        return {"generator": generator_loss, "discriminator": discriminator_loss}

    def translate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for part in ("discriminator", "generator"):
            prefix = f"{part}."
            own = {name.removeprefix(prefix): value for name, value in gradients.items() if name.startswith(prefix)}
            for name, value in getattr(ours, part).own_tensors(own).items():
                target = ours.tied().get(prefix + name, prefix + name)
                found[target] = found[target] + value if target in found else value
        return found

    check_modules(ours, theirs, call, {}, translate=translate)


def test_padded_packed_and_selected_rows_are_the_same() -> None:
    """With dropout: the same seed samples the same tokens and drops the same elements."""
    module = joint()
    mask = MASKS["right"]
    labels = WORDS.where(mask, -100)
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    packed = {"cu_seqlens": cu_seqlens, "max_seqlen": S}
    rows = (labels[mask] != -100).nonzero().squeeze(1)
    filled = torch.cat([rows, rows[:1], torch.tensor([0])])
    words = torch.cat([labels[mask][rows], torch.tensor([-100, -100])])
    expected = run(module, IDS, mask, labels=labels)
    for found in (
        run(module, IDS, lengths=[4, 9, 1], labels=labels),
        run(module, IDS, mask, labels=labels, max_predictions=20),
        run(module, IDS[mask], labels=labels[mask], **packed),
        run(module, IDS[mask], labels=words, positions=filled, **packed),
    ):
        assert torch.equal(found.loss, expected.loss)
        ids = found.sampled_ids if found.sampled_ids.dim() == 1 else found.sampled_ids[mask]
        assert torch.equal(ids, expected.sampled_ids[mask])


def test_training_step_reaches_every_parameter() -> None:
    module = joint()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = module(IDS, MASKS["right"], SEGMENTS, labels=WORDS.where(MASKS["right"], -100))
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())


def test_checkpoints_of_both(tmp_path: Path) -> None:
    made = joint(generator_size=0.5, num_attention_heads=4)
    made.save_pretrained(tmp_path)
    read = models.ElectraForJointPreTraining.from_pretrained(tmp_path)
    assert read.generator.electra.embeddings.word.weight is read.discriminator.electra.embeddings.word.weight
    assert made.state_dict().keys() == read.state_dict().keys()
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in made.state_dict().items())
    assert not read.training
    path = tmp_path / "generator" / "model.safetensors"
    stored = load_file(path)
    stored["electra.embeddings.LayerNorm.bias"] += 1
    save_file(stored, path)
    with pytest.raises(CheckpointError, match=r"generator\.electra\.embeddings\.norm\.bias: expected the values of"):
        models.ElectraForJointPreTraining.from_pretrained(tmp_path)


def test_a_generator_with_other_tables_is_refused() -> None:
    config = models.ElectraConfig(**SIZES)
    other = models.ElectraConfig(**{**SIZES, "vocab_size": V + 1})
    with pytest.raises(
        ValueError, match=rf"generator_config\.vocab_size: expected the discriminator's {V}, got {V + 1}"
    ):
        models.ElectraForJointPreTraining(config, other)
