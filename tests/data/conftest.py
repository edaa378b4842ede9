"""Corpora that several test files use."""

from __future__ import annotations

import numpy as np
import pytest
from traced_corpus import Traced, trace

from fasttfm import data


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """40 documents of 2 to 60 sentences of 1 to 40 words, in several shards."""
    random = np.random.default_rng(0)
    documents = [random.integers(1, 40, random.integers(2, 60)).tolist() for _ in range(40)]
    return trace(tmp_path_factory.mktemp("traced"), documents, shard_characters=20_000)


@pytest.fixture(scope="session")
def novel(tmp_path_factory: pytest.TempPathFactory) -> data.TokenShards:
    """The shipped chapters of Moby-Dick."""
    source = data.shipped_corpus() / "moby-dick.txt.gz"
    tokenizer = data.train_tokenizer("wordpiece", data.read_documents(source), 2000)
    return data.prepare(source, tokenizer, tmp_path_factory.mktemp("novel"), progress=False)
