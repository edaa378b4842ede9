"""Shared by the tests of patched models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from model_parity import LABELS, PAD, theirs_of
from torch import Tensor

import fasttfm
from fasttfm.testing.modules import compare_modules
from fasttfm.testing.tolerance import OUTPUT_FACTOR, Comparison

CAUSAL = "GPT2LMHeadModel"
LANGUAGE_MODELS = (
    "BertForMaskedLM",
    "RobertaForMaskedLM",
    "AlbertForMaskedLM",
    "ElectraForMaskedLM",
    "DistilBertForMaskedLM",
    CAUSAL,
)

B, S = 16, 16
_generator = torch.Generator().manual_seed(0)
MASKS = {
    "full": torch.ones(B, S, dtype=torch.int64),
    "right": (torch.arange(S) < torch.tensor([16, 3, 9, 1, 12, 16, 5, 14] * 2)[:, None]).long(),
    "anywhere": (torch.rand(B, S, generator=_generator) < 0.7).long(),
}
IDS = torch.randint(5, PAD, (B, S), generator=_generator)
SEGMENTS = torch.randint(2, (B, S), generator=_generator)
WORDS = torch.where(torch.rand(B, S, generator=_generator) < 0.4, IDS, -100)


def with_dropout(module: Any, p: float) -> Any:
    for each in module.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = p
    return module


# Changes of the sizes for families that need them.
CHANGES: dict[str, dict[str, Any]] = {
    "ModernBert": {"pad_token_id": 0},
    "EuroBert": {"pad_token_id": 0, "num_key_value_heads": 1},
    "NomicBert": {"pad_token_id": 0},
}


def changes_of(name: str) -> dict[str, Any]:
    return next((changes for family, changes in CHANGES.items() if name.startswith(family)), {})


def pair(name: str, *, dropout: float = 0.0, **changes: Any) -> tuple[Any, Any]:
    """A patched model of transformers and an unpatched copy."""
    pytest.importorskip("transformers")
    pairs = name.endswith(("QuestionAnswering", "PreTraining"))
    theirs = with_dropout(theirs_of(name, **({"num_labels": 2} if pairs else {}), **changes), dropout)
    ours = copy.deepcopy(theirs)
    fasttfm.patch(ours)
    return ours, theirs


def batch(name: str, mask: str = "right") -> dict[str, Tensor]:
    """A model's arguments for a loss; padding has the ids and labels that tokenizers and collators give it."""
    tokens = MASKS[mask].bool()
    given = {"input_ids": IDS if tokens.all() else IDS.where(tokens, PAD if "GPT" in name else 1)}
    if mask != "full":
        given["attention_mask"] = MASKS[mask]
    if name == CAUSAL:
        # transformers predicts a token that follows padding from the row of the padding.
        follows = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=True)
        return given | {"labels": IDS.where(tokens & follows, -100)}
    if name.endswith("MultipleChoice"):
        choices = {key: value[:, None].repeat(1, 2, 1) for key, value in given.items()}
        choices["input_ids"][:, 1] = choices["input_ids"][:, 1].flip(0)
        return choices | {"labels": torch.arange(B) % 2}
    return given | _labels(name, tokens)


def _labels(name: str, tokens: Tensor) -> dict[str, Tensor]:
    words, pairs = WORDS.where(tokens, -100), torch.arange(B) % 2
    if name == "ElectraForPreTraining":
        return {"labels": IDS % 2}
    if name.endswith("PreTraining"):
        return {"labels": words, "sentence_order_label" if "Albert" in name else "next_sentence_label": pairs}
    if name.endswith("MaskedLM"):
        return {"labels": words}
    if name.endswith("TokenClassification"):
        return {"labels": words.clamp(max=LABELS - 1)}
    if name.endswith("QuestionAnswering"):
        return {"start_positions": torch.zeros(B, dtype=torch.int64), "end_positions": 3 * pairs}
    return {"labels": pairs} if "For" in name else {}


def check_patched(ours: Any, theirs: Any, call: Any, inputs: dict[str, Tensor] | None = None) -> None:
    """``check_modules`` with the gradients of all parameters as one vector: for some parameters a loss sums few
    numbers, and the ratio of two such errors varies widely."""
    found = compare_modules(ours, theirs, call, inputs or {}, draws=3)
    parameters = {f"d{name}" for name, _ in ours.named_parameters()}
    wrong = [str(each) for each in found if each.name not in parameters and not each.error <= _output_bound(each)]
    assert not wrong, "; ".join(wrong)
    bound = max(each.bound for each in found if each.name in parameters)
    wrong = [str(each) for each in found if each.name in parameters and not each.error <= bound]
    assert not wrong, f"bound of all {bound:.3e}; {'; '.join(wrong)}"


def _output_bound(comparison: Comparison) -> float:
    """The bound of the tolerance rule with an error of plain torch of at least one rounding step, because a loss is a
    single number that plain torch sometimes computes exactly."""
    step = comparison.bound - OUTPUT_FACTOR * comparison.naive_error
    return OUTPUT_FACTOR * max(comparison.naive_error, step) + step
