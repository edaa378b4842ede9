"""The precision that a session on a CPU chooses by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import models
from fasttfm.data import Tokenizer
from fasttfm.inference import Session, precision
from fasttfm.inference.precision import BFLOAT16, INT8

SENTENCES = [list(range(5, 5 + length)) for length in (3, 17, 40, 1)]


@pytest.fixture
def model(wordpiece: Tokenizer) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    return models.BertModel(models.BertConfig(vocab_size=wordpiece.vocab_size, **sizes)).eval()


@pytest.mark.parametrize("with_texts", [False, True], ids=["ids", "texts"])
@pytest.mark.parametrize("least", [0.9, 1.0], ids=["accepted", "refused"])
def test_int8_is_chosen_by_its_cosine(
    model: Any, wordpiece: Tokenizer, with_texts: bool, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "candidates", lambda: [INT8])
    monkeypatch.setattr(precision, "LEAST_COSINE", least)
    with Session(model, wordpiece if with_texts else None, precision="auto") as session:
        found = session.encode(SENTENCES)
        chosen = session.precision
    reason = str(session.reason)
    count = len(precision.SAMPLE) if with_texts else 8
    assert reason.startswith(f"in int8 the smallest cosine of {count} sample texts to float32 is ")
    assert reason.endswith(f", above {least}" if least < 1 else f", not above {least}")
    assert chosen == ("int8" if least < 1 else None)
    assert session.dtype == torch.float32
    assert np.array_equal(found, Session(model, precision=chosen).encode(SENTENCES))


def test_a_slower_precision_is_chosen_where_the_fastest_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cosines = {False: 0.9999, True: 0.99}
    monkeypatch.setattr(precision, "candidates", lambda: [INT8, BFLOAT16])
    given: list[bool] = []
    make = precision.choose

    def choose(network: Any, reader: Any) -> Any:
        return make(lambda each: given.append(each.int8) or network(each), reader)

    monkeypatch.setattr("fasttfm.inference.session.choose", choose)
    monkeypatch.setattr(precision, "_smallest_cosine", lambda *_: cosines[given[-1]])
    with Session(model, precision="auto") as session:
        assert (session.precision, session.dtype) == (None, torch.bfloat16)
    assert "not above 0.9995; in bfloat16" in str(session.reason)


def test_vectors_that_are_not_finite_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "candidates", lambda: [INT8])
    with torch.no_grad():
        model.encoder.layers[0].up.bias[0] = float("nan")
    with Session(model, precision="auto") as session:
        assert session.precision is None
    assert "is nan, not above" in str(session.reason)


def test_float32_without_faster_instructions(model: Any) -> None:  # as tests/conftest.py states
    with Session(model, precision="auto") as session:
        assert (session.precision, session.dtype) == (None, torch.float32)
    assert session.reason == "this CPU has no instructions for faster GEMMs in 16 or 8 bits"


@pytest.mark.parametrize(("products", "names"), [("vnni", ["int8", "bfloat16"]), ("amx", ["bfloat16", "int8"])])
def test_the_fastest_precision_is_first(products: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "supported_products", lambda: ["generic", products])
    monkeypatch.setattr(precision, "has_bf16_instructions", lambda: True)
    assert [each.name for each in precision.candidates()] == names


def test_a_dtype_leaves_no_choice(model: Any) -> None:
    with pytest.raises(ValueError, match="dtype: expected None with precision='auto', which chooses it, got float32"):
        Session(model, precision="auto", dtype=torch.float32)
