"""Dropout is applied where transformers applies it: with a probability of 1 the comparison is deterministic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_parity import IDS, MASKS, WORDS, pair
from torch import Tensor

from fasttfm.testing.modules import check_modules

BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
ENCODERS = ("Bert", "Albert", "Electra", "DistilBert")
GPT = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
CASES = [
    *(
        (f"{family}ForMaskedLM", BERT, field)
        for family in ("Bert", "Albert", "Electra", "DistilBert")
        for field in BERT
    ),
    *((name, GPT, field) for name in ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel") for field in GPT),
]


@pytest.mark.parametrize(("name", "fields", "dropped"), CASES)
def test_the_same_elements_are_dropped(name: str, fields: tuple[str, ...], dropped: str, tmp_path: Path) -> None:
    changes = {**dict.fromkeys(fields, 0.0), dropped: 1.0, "attn_implementation": "eager"}
    ours, theirs = (module.train() for module in pair(name, tmp_path, **changes))
    mask = MASKS["right"]

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": module(IDS, attention_mask=mask, labels=WORDS.where(mask, -100)).loss}

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)
