from __future__ import annotations

from pathlib import Path

import pytest
import train_runs
from model_fixtures import bert_directory, bpe, gpt_directory, wordpiece

__all__ = ["bert_directory", "bpe", "corpus", "gpt_directory", "wordpiece"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return train_runs.write_corpus(tmp_path_factory.mktemp("corpus"))
