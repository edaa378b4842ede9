from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_fixtures import bert_directory, bpe, gpt_directory, wordpiece
from small_models import VOCABULARY, small_bert

__all__ = ["bert_directory", "bpe", "gpt_directory", "wordpiece"]


@pytest.fixture(scope="module")
def bert() -> Any:
    return small_bert()


@pytest.fixture(scope="module")
def sentences() -> list[list[int]]:
    """128 sequences of 1 to 128 ids, in random order."""
    generator = np.random.default_rng(0)
    lengths = generator.permutation(np.arange(1, 129))
    return [generator.integers(1, VOCABULARY, length).tolist() for length in lengths]
