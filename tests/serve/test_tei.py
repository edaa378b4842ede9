"""TEI's routes: bodies, and numbers against those of sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttfm.inference import Session

TEXTS = ["The people of the United States.", "Peace and commerce.", "The army and the navy of this country are large."]


@pytest.fixture(scope="module")
def embedder(folders: dict[str, Path]) -> Session:
    return Session(folders["embedder"], device="cpu")


def test_embed_returns_the_sessions_vectors(served: Any, embedder: Session) -> None:
    expected = embedder.encode(TEXTS)  # the folder has a Normalize module
    np.testing.assert_allclose(served.post("/embed", {"inputs": TEXTS}), expected, atol=1e-5)
    np.testing.assert_allclose(served.post("/embed", {"inputs": TEXTS[0]}), expected[:1], atol=1e-5)
    np.testing.assert_allclose(served.post("/", {"inputs": TEXTS}), expected, atol=1e-5)
    raw = np.array(served.post("/embed", {"inputs": TEXTS, "normalize": False}))
    norms = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (np.abs(norms - 1) > 0.1).all()
    np.testing.assert_allclose(raw / norms, expected, atol=1e-5)


def test_dimensions_are_cut_before_the_norm(served: Any) -> None:
    whole = np.array(served.post("/embed", {"inputs": TEXTS, "normalize": False}))
    short = np.array(served.post("/embed", {"inputs": TEXTS, "dimensions": 8}))
    cut = whole[:, :8]
    np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5)
    assert "64" in served.refused("/embed", {"inputs": "a", "dimensions": 65}, 422)["error"]


def test_prompts(served: Any) -> None:
    by_name = served.post("/embed", {"inputs": TEXTS[0], "prompt_name": "query"})
    by_hand = served.post("/embed", {"inputs": "the people: " + TEXTS[0]})
    np.testing.assert_allclose(by_name, by_hand, atol=1e-6)
    error = served.refused("/embed", {"inputs": "a", "prompt_name": "nothing"}, 422)
    assert "query, passage" in error["error"]


def test_ids_are_those_of_the_text(served: Any) -> None:
    (tokens,) = served.post("/tokenize", {"inputs": TEXTS[1]})
    complete = [token["id"] for token in tokens]
    expected = served.post("/embed", {"inputs": TEXTS[1]})
    np.testing.assert_allclose(served.post("/embed", {"inputs": complete}), expected, atol=1e-6)
    np.testing.assert_allclose(served.post("/embed", {"inputs": complete[1:-1]}), expected, atol=1e-6)
    assert served.post("/decode", {"ids": complete})[0].startswith("peace and commerce")
    assert served.refused("/embed", {"inputs": [10**6]}, 422)


def test_tokens_have_offsets(served: Any) -> None:
    (tokens,) = served.post("/tokenize", {"inputs": TEXTS[1]})
    assert tokens[0] == {"id": tokens[0]["id"], "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert [token["text"] for token in tokens[1:4]] == ["Peace", "and", "commerce"]
    assert all(TEXTS[1][token["start"] : token["stop"]] == token["text"] for token in tokens[1:-1])
    (plain,) = served.post("/tokenize", {"inputs": TEXTS[1], "add_special_tokens": False})
    assert plain == tokens[1:-1]


def test_truncation(served: Any) -> None:
    text = "people " * 200 + "navy"
    last, first = (served.post("/embed", {"inputs": text, "truncation_direction": each}) for each in ("left", "right"))
    assert not np.allclose(last, first)
    error = served.refused("/embed", {"inputs": text, "truncate": False}, 413)
    assert error["error_type"] == "Validation"
    assert "must have less than 128 tokens. Given: 203" in error["error"]


def test_embed_all_has_a_row_for_each_token(served: Any, embedder: Session) -> None:
    found = served.post("/embed_all", {"inputs": TEXTS})
    for rows, expected in zip(found, embedder.encode(TEXTS, output="states"), strict=True):
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_sparse_vectors(served: Any, folders: dict[str, Path]) -> None:
    with Session(folders["masked"], device="cpu") as session:
        logits = session.encode(TEXTS, output="logits")
    found = served.post("/embed_sparse", {"inputs": TEXTS})
    for pairs, rows in zip(found, logits, strict=True):
        expected = np.log1p(np.maximum(rows.max(0), 0))
        dense = np.zeros_like(expected)
        dense[[pair["index"] for pair in pairs]] = [pair["value"] for pair in pairs]
        np.testing.assert_allclose(dense, expected, atol=1e-4)
        assert all(pair["value"] > 0 for pair in pairs)


def test_predict(served: Any, folders: dict[str, Path]) -> None:
    with Session(folders["classifier"], device="cpu") as session:
        logits = session.encode([TEXTS[0], (TEXTS[0], TEXTS[1])], output="logits")
    body = {"inputs": [[TEXTS[0]], [TEXTS[0], TEXTS[1]]], "model": "classifier"}
    for found, row in zip(served.post("/predict", body), logits, strict=True):
        expected = np.exp(row) / np.exp(row).sum()
        assert [each["label"] for each in found] == [f"LABEL_{index}" for index in np.argsort(-expected)]
        np.testing.assert_allclose([each["score"] for each in found], np.sort(expected)[::-1], atol=1e-5)
    single = served.post("/predict", {"inputs": TEXTS[0], "model": "classifier", "raw_scores": True})
    np.testing.assert_allclose([each["score"] for each in single], np.sort(logits[0])[::-1], atol=1e-4)
    tokens = served.post("/predict", {"inputs": TEXTS[1], "model": "tagger"})
    assert tokens[0]["token"] == "[CLS]"
    assert {each["label"] for each in tokens} <= {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"}


def test_rerank(served: Any, folders: dict[str, Path]) -> None:
    with Session(folders["reranker"], device="cpu") as session:
        logits = session.encode([("peace", text) for text in TEXTS], output="logits")[:, 0]
    found = served.post("/rerank", {"query": "peace", "texts": TEXTS, "return_text": True})
    assert [each["index"] for each in found] == np.argsort(-logits).tolist()
    assert [each["text"] for each in found] == [TEXTS[each["index"]] for each in found]
    expected = np.sort(1 / (1 + np.exp(-logits)))[::-1]
    np.testing.assert_allclose([each["score"] for each in found], expected, atol=1e-5)
    raw = served.post("/rerank", {"query": "peace", "texts": TEXTS, "raw_scores": True})
    np.testing.assert_allclose([each["score"] for each in raw], np.sort(logits)[::-1], atol=1e-4)
    assert "text" not in raw[0]


def test_similarity(served: Any, embedder: Session) -> None:
    vectors = embedder.encode(TEXTS)
    found = served.post("/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}})
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], atol=1e-5)


def test_info_has_teis_fields(served: Any) -> None:
    info = served.client.get("/info").json()
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_client_batch_size"]) == (128, 32)
    kinds = [next(iter(each["model_type"])) for each in info["models"]]
    assert kinds == [
        *("embedding", "reranker", "classifier", "token-classification", "question-answering", "embedding"),
        "text-generation",
    ]


def test_headers_say_what_was_computed(served: Any) -> None:
    headers = served.client.post("/embed", json={"inputs": TEXTS[1]}).headers
    assert headers["x-compute-characters"] == str(len(TEXTS[1]))
    assert int(headers["x-compute-tokens"]) > 4
    assert {"x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"} <= set(headers)


def test_a_model_without_the_head_is_refused(served: Any) -> None:
    for path, body in (
        ("/embed", {"inputs": "a", "model": "reranker"}),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "embedder"}),
        ("/predict", {"inputs": "a", "model": "embedder"}),
        ("/embed_sparse", {"inputs": "a", "model": "embedder"}),
    ):
        error = served.refused(path, body, 424)
        assert error["error_type"] == "Backend"


def test_metrics_have_teis_names(served: Any) -> None:
    served.post("/embed", {"inputs": TEXTS})
    text = served.client.get("/metrics").text
    for name in (
        'te_request_count{method="batch"}',
        'te_request_success{method="batch"}',
        *("te_request_duration_bucket", "te_request_tokenization_duration_sum", "te_request_queue_duration_count"),
        *("te_request_inference_duration_sum", "te_queue_size", "te_batch_next_size_count", "te_batch_next_tokens_sum"),
        *("te_request_input_length_count", "fasttfm_graphs_captured", "fasttfm_requests_in_flight"),
    ):
        assert name in text, name
