"""A tokenizer of the shipped texts and small models with drawn parameters, saved as directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm import models
from fasttfm.data import Tokenizer, read_documents, shipped_corpus, train_tokenizer

WIDE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.05}


def addresses() -> Any:
    return read_documents(shipped_corpus() / "state-of-the-union.txt.gz")


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    return train_tokenizer("wordpiece", addresses(), 2000)


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train_tokenizer("bpe", (document for document, _ in zip(addresses(), range(20), strict=False)), 1000)


@pytest.fixture(scope="session")
def bert_directory(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of one layer."""
    return save_bert(wordpiece, tmp_path_factory.mktemp("bert"), num_hidden_layers=1)


@pytest.fixture(scope="session")
def gpt_directory(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-1 of one layer."""
    directory = tmp_path_factory.mktemp("gpt")
    torch.manual_seed(0)
    config = models.OpenAIGPTConfig(
        vocab_size=bpe.vocab_size,
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
    bpe.save(directory)
    return directory


def save_bert(tokenizer: Tokenizer, directory: Path, **sizes: Any) -> Path:
    torch.manual_seed(0)
    fields = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128}
    config = models.BertConfig(vocab_size=tokenizer.vocab_size, **{**WIDE, **fields, **sizes})
    models.BertForMaskedLM(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory
