"""Folders of XLM-RoBERTa and CamemBERT as transformers and sentence-transformers save them: vectors and pair scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fasttfm import models, tasks
from fasttfm.data import Tokenizer, load_tokenizer
from fasttfm.inference import Session

transformers = pytest.importorskip("transformers")
pytest.importorskip("sentence_transformers", reason="the scores are compared with its own")

TEXTS = ["Peace and commerce with all nations.", "the army and the navy of  this union", "war", "a people " * 20]
PAIRS = [(text, TEXTS[index - 2]) for index, text in enumerate(TEXTS)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
# fp32 sums of at most 48 terms in another order, through two layers.
CLOSE: dict[str, float] = {"rtol": 0, "atol": 2e-5}


def saved(family: str, head: str, unigram: Tokenizer, directory: Path) -> Path:
    """A random model and its tokenizer with SentencePiece's pieces, both written by transformers."""
    pieces = [(name, score) for name, score in json.loads(unigram.backend.to_str())["model"]["vocab"]]
    tokenizer = getattr(transformers, f"{family}Tokenizer")(vocab=pieces, model_max_length=64)
    tokenizer.save_pretrained(directory)
    labels = {"num_labels": 1} if head == "ForSequenceClassification" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), max_position_embeddings=66, type_vocab_size=1, **SIZES, **labels
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(params=["XLMRoberta", "Camembert"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_scores_of_pairs(family: str, unigram: Tokenizer, tmp_path: Path) -> None:
    """bge-reranker's kind of model: one label over pairs."""
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(saved(family, "ForSequenceClassification", unigram, tmp_path / "model")), device="cpu")
    theirs.save_pretrained(str(tmp_path / "cross"))
    expected = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
    assert expected.std() > 0.1
    for folder in ("model", "cross"):
        with Session(tmp_path / folder, device="cpu") as session:
            assert isinstance(session.network.model, getattr(models, f"{family}ForSequenceClassification"))
            logits = session.encode(PAIRS, output="logits")
        np.testing.assert_allclose(logits[:, 0], expected, **CLOSE)
    with pytest.warns(UserWarning, match="does not state its task: .* is taken for classify with numbers"):
        predictor = tasks.load(tmp_path / "cross", device="cpu")
    np.testing.assert_allclose([result.value for result in predictor(PAIRS)], expected, **CLOSE)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors(family: str, pooling: str, unigram: Tokenizer, tmp_path: Path) -> None:
    """bge-m3 (the first token) and multilingual-e5 (the mean)."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    transformer = Transformer(str(saved(family, "Model", unigram, tmp_path / "model")), max_seq_length=20)
    theirs = SentenceTransformer(modules=[transformer, Pooling(32, pooling), Normalize()], device="cpu")
    theirs.save(str(tmp_path / "sentences"))
    with Session(tmp_path / "sentences", device="cpu") as session, pytest.warns(UserWarning, match="truncated to 20"):
        np.testing.assert_allclose(session.encode(TEXTS), theirs.encode(TEXTS), **CLOSE)


def test_a_bert_with_the_tokenizer_of_xlm_roberta(unigram: Tokenizer, tmp_path: Path) -> None:
    """multilingual-e5-small's kind of folder: pairs have two separators and no segments, as the tokenizer says."""
    saved("XLMRoberta", "Model", unigram, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    torch.manual_seed(0)
    model: Any = transformers.BertModel(transformers.BertConfig(vocab_size=tokenizer.vocab_size, **SIZES)).eval()
    model.save_pretrained(tmp_path)
    encoded = transformers.AutoTokenizer.from_pretrained(tmp_path)(*PAIRS[0], return_tensors="pt")
    with Session(tmp_path, device="cpu") as session:
        states = session.encode(PAIRS[0], output="states")
    np.testing.assert_allclose(states, model(**encoded).last_hidden_state[0].detach(), **CLOSE)
