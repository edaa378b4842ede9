"""Fixtures: tokenizers trained on the shipped texts, and small models saved with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import addresses, save_bert, save_gpt

from fasttfm.data import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def wordpiece() -> Tokenizer:
    return train_tokenizer("wordpiece", addresses(), 2000)


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train_tokenizer("bpe", addresses(20), 1000)


@pytest.fixture(scope="session")
def unigram() -> Tokenizer:
    return train_tokenizer("unigram", addresses(20), 1000)


@pytest.fixture(scope="session")
def bert_directory(wordpiece: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(wordpiece, tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def gpt_directory(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gpt(bpe, tmp_path_factory.mktemp("gpt"))
