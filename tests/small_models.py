"""Small models with random parameters, saved as directories with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from fasttfm import models
from fasttfm.data import Tokenizer, read_documents, shipped_corpus


def addresses(count: int | None = None) -> Iterator[str]:
    """Documents of the shipped corpus."""
    return islice(read_documents(shipped_corpus() / "state-of-the-union.txt.gz"), count)


VOCABULARY = 300  # of small_bert


def small_bert(kind: str = "BertForSequenceClassification", **changes: Any) -> Any:
    torch.manual_seed(0)
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    }
    return getattr(models, kind)(models.BertConfig(**{**fields, **changes})).eval()


def save_bert(tokenizer: Tokenizer, directory: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.05,
    }
    config = models.BertConfig(vocab_size=tokenizer.vocab_size, **{**fields, **changes})
    models.BertForMaskedLM(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def save_gpt(tokenizer: Tokenizer, directory: Path) -> Path:
    """A GPT-1."""
    torch.manual_seed(0)
    config = models.OpenAIGPTConfig(
        vocab_size=tokenizer.vocab_size,
        n_positions=128,
        n_embd=64,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        initializer_range=0.05,
    )
    models.OpenAIGPTLMHeadModel(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory
