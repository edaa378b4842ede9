"""200 training steps of small models on real text, with dropout: our losses follow those of transformers.

Every run starts with the same weights and reads the same batches; seeds only change dropout. Curves are compared by the
tolerance rule: the mean of our three seeds against the mean of transformers' three, where plain torch's error is the
largest distance of one of these from the mean of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fasttfm import models
from fasttfm.testing import compare
from fasttfm.testing.tolerance import OUTPUT_FACTOR, Comparison

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

STEPS, B, S = 200, 4, 16
WINDOW = 20  # steps that are averaged
SEEDS = (1, 2, 3)
PAD, MASK, V = 128, 129, 130  # tokens are bytes
ENCODER = {
    "vocab_size": V,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": S,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "pad_token_id": PAD,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Bert": ENCODER,
    "Albert": {**ENCODER, "embedding_size": 32},
    "Electra": {**ENCODER, "embedding_size": 32},
    "GPT2": {"vocab_size": V, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_inner": 128, "n_positions": S}
    | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), PAD),
}


class Batches(NamedTuple):
    ids: Tensor  # [STEPS, B, S]
    mask: Tensor
    labels: Tensor


@pytest.fixture(scope="module", autouse=True)
def plain_products() -> Iterator[None]:
    """One thread, and no oneDNN, whose setup of each GEMM takes longer than these small GEMMs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield
    torch.set_num_threads(threads)


# ---- batches ---------------------------------------------------------------------------------------------------------


def text() -> tuple[Tensor, Tensor, torch.Generator]:
    """Pieces of this project's licence [STEPS, B, S] of different lengths, their mask, and a random generator."""
    words = torch.tensor(list((Path(__file__).parents[2] / "LICENSE").read_bytes()))
    dice = torch.Generator().manual_seed(0)
    starts = torch.randint(len(words) - S, (STEPS, B, 1), generator=dice)
    there = torch.arange(S) < torch.randint(S // 2, S + 1, (STEPS, B, 1), generator=dice)
    return words[starts + torch.arange(S)].where(there, PAD), there, dice


def causal_lm() -> Batches:
    ids, there, _ = text()
    return Batches(ids, there.long(), ids.where(there, -100))


def masked_lm(predicted: float = 0.3, kept: float = 0.5) -> Batches:
    """A fraction of the tokens is predicted, and of these a fraction is not masked, so that 200 steps learn much."""
    ids, there, dice = text()
    chosen = (torch.rand(ids.shape, generator=dice) < predicted) & there
    masked = chosen & (torch.rand(ids.shape, generator=dice) >= kept)
    return Batches(ids.where(~masked, MASK), there.long(), ids.where(chosen, -100))


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(module: Any, batches: Batches, seed: int) -> list[Any]:
    """The output of every step."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(seed)
    outputs = []
    for ids, mask, labels in zip(*batches, strict=True):
        output = module(ids, attention_mask=mask, labels=labels)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output)
    return outputs


def curve(losses: list[Tensor]) -> Tensor:
    """[STEPS / WINDOW]"""
    return torch.stack(losses).detach().view(-1, WINDOW).mean(1)


def curves(
    package: Any, name: str, directory: Path, batches: Batches, seeds: tuple[int, ...] = SEEDS, **changes: Any
) -> Tensor:
    """[seeds, STEPS / WINDOW]: runs from a checkpoint."""
    found = []
    for seed in seeds:
        module = getattr(package, name).from_pretrained(directory, **changes)
        found.append(curve([output.loss for output in train(module, batches, seed)]))
    return torch.stack(found)


def begin(name: str, directory: Path) -> None:
    """Writes the initial checkpoint of all runs."""
    family = next(family for family in CONFIGS if name.startswith(family))
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    getattr(transformers, name)(config).save_pretrained(directory)


def compare_curves(ours: Tensor, theirs: Tensor) -> Comparison:
    exact = theirs.double().mean(0)
    others = (theirs.sum(0) - theirs) / (len(theirs) - 1)
    held_out = (exact + (theirs - others)).float()  # as far from the mean as each seed is from the others
    comparison = compare("loss", ours.mean(0), held_out, exact, OUTPUT_FACTOR)
    assert exact[0] - exact[-1] > 5 * comparison.bound  # the loss decreases by much more than the noise
    return comparison


def check_family(name: str, directory: Path, batches: Batches) -> Tensor:
    """Returns transformers' curves."""
    begin(name, directory)
    theirs = curves(transformers, name, directory, batches)
    comparison = compare_curves(curves(models, name, directory, batches), theirs)
    assert comparison.ok, str(comparison)
    return theirs


# ---- the families ----------------------------------------------------------------------------------------------------


def test_bert(tmp_path: Path) -> None:
    name, batches = "BertForMaskedLM", masked_lm()
    theirs = check_family(name, tmp_path, batches)
    others = curves(models, name, tmp_path, batches, SEEDS[:1], hidden_dropout_prob=0.0)
    assert not compare_curves(others, theirs).ok  # the bound is small enough to detect missing dropout


def test_albert(tmp_path: Path) -> None:
    check_family("AlbertForMaskedLM", tmp_path, masked_lm())


def test_gpt2(tmp_path: Path) -> None:
    check_family("GPT2LMHeadModel", tmp_path, causal_lm())


def test_electra(tmp_path: Path) -> None:
    """Both models together, and then only the discriminator on the tokens that the generator has sampled."""
    torch.manual_seed(0)
    batches = masked_lm(0.15, kept=0.0)
    joint = models.ElectraForJointPreTraining(models.ElectraConfig(**CONFIGS["Electra"], generator_size=0.5))
    outputs = train(joint, batches, seed=1)
    for losses in ([each.generator_loss for each in outputs], [each.discriminator_loss for each in outputs]):
        first, last = torch.stack(losses).detach().view(-1, WINDOW)[[0, -1]]
        noise = ((first.var() + last.var()) / WINDOW).sqrt()
        assert first.mean() - last.mean() > 5 * noise
    there = batches.mask.bool()
    drawn = torch.stack([each.sampled_ids for each in outputs]).where(there, PAD)
    replaced = Batches(drawn, batches.mask, torch.stack([each.replaced for each in outputs]).long())
    check_family("ElectraForPreTraining", tmp_path, replaced)
