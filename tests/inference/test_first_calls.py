"""The first calls of a session: what it prints, arrays of texts, truncated texts, and calls that go wrong."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm.inference import EmbedSettings, Session
from fasttfm.inference.opening import TASK_KEY, open_with_stated_head


def test_an_array_of_texts_is_a_list_of_texts(bert_directory: Path) -> None:
    texts = ["the state of the union", "a short text"]
    with Session(bert_directory) as session:
        expected = session.encode(texts)
        for array in (np.array(texts), np.array(texts, dtype=object)):
            assert np.array_equal(session.encode(array), expected)
            assert np.array_equal(np.stack(list(session.stream(array))), expected)


def test_the_first_truncated_text_is_a_warning(bert_directory: Path) -> None:
    settings = EmbedSettings(max_length=8)
    long = "the state of the union " * 10
    with Session(bert_directory, settings=settings) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.encode(["short"])
        assert caught == []
        session.encode([long])
        session.encode([long] * 300)
        session.submit(long).result()
    (only,) = caught
    assert str(only.message).startswith("Session: a text of ")
    assert "is truncated to 8; session.counts.truncated counts further ones" in str(only.message)
    assert session.counts.truncated == 302


def test_a_device_that_does_not_exist_is_named(bert: Any) -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=rf"Session: device: expected a device that torch sees, got {device}: torch"):
        Session(bert, device=device)


def test_submit_of_several_texts_says_what_to_do(bert_directory: Path) -> None:
    with Session(bert_directory) as session:
        for several in (["a", "b"], [("a", "b")], [[1, 2], [3]]):
            with pytest.raises(TypeError, match=r"expected one text, .* \(submit each of them, or encode all\), got"):
                session.submit(several)


def test_a_fine_tuned_model_is_read_as_it_was_trained(bert_directory: Path, tmp_path: Path) -> None:
    """``tasks.load`` truncates where the fine-tuning did."""
    model = open_with_stated_head(bert_directory)
    model.config.extra[TASK_KEY] = {"task": "classify", "max_length": 12}
    assert Session(model).max_length == 12
    assert Session(model, settings=EmbedSettings(max_length=20)).max_length == 20
    model.config.extra[TASK_KEY] = {"task": "classify", "max_length": 1000}
    assert Session(model).max_length == 128
