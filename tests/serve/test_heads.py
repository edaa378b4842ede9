"""Cohere's and Jina's routes; question answering, fill-mask and token classification with Hugging Face's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fasttfm.inference import Session
from fasttfm.serve.cohere import encoded

DOCUMENTS = ["The people of the United States.", "Peace and commerce.", "The army and the navy."]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_texts(served: Any, path: str) -> None:
    """A body with ``documents`` is Cohere's and Jina's, on ``/rerank`` too."""
    expected = served.post("/rerank", {"query": "peace", "texts": DOCUMENTS})
    found = served.post(path, {"model": "reranker", "query": "peace", "documents": DOCUMENTS, "top_n": 2})
    assert [each["index"] for each in found["results"]] == [each["index"] for each in expected[:2]]
    np.testing.assert_allclose(
        [each["relevance_score"] for each in found["results"]], [each["score"] for each in expected[:2]], atol=1e-6
    )
    assert found["usage"]["total_tokens"] > 0
    assert found["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")
    body = {"query": "peace", "documents": [{"text": text} for text in DOCUMENTS], "return_documents": True}
    for each in served.post(path, body)["results"]:
        assert each["document"]["text"] == DOCUMENTS[each["index"]]


def test_errors_have_coheres_body(served: Any) -> None:
    assert "query" in served.refused("/v2/rerank", {"documents": DOCUMENTS}, 400)["message"]
    assert "documents" in served.refused("/v1/rerank", {"query": "a"}, 400)["detail"]
    assert "cannot be empty" in served.refused("/rerank", {"query": "a", "documents": []}, 400)["message"]


def test_types_of_embeddings(served: Any) -> None:
    kinds = ["float", "int8", "uint8", "binary", "ubinary"]
    body = {"model": "embedder", "texts": DOCUMENTS, "input_type": "search_query", "embedding_types": kinds}
    found = served.post("/v2/embed", body)["embeddings"]
    floats = np.array(found["float"])
    np.testing.assert_allclose(floats, served.post("/embed", {"inputs": DOCUMENTS, "prompt_name": "query"}), atol=1e-6)
    small = np.array(found["int8"], float)
    cosines = (floats * small).sum(1) / np.linalg.norm(small, axis=1)
    assert (cosines > 0.999).all()
    assert np.abs(small).max() == 127
    np.testing.assert_array_equal(np.array(found["uint8"]) - 128, found["int8"])
    np.testing.assert_array_equal(np.unpackbits(np.array(found["ubinary"], np.uint8), axis=1), floats > 0)
    np.testing.assert_array_equal(np.array(found["binary"]) + 128, found["ubinary"])


def test_bits_are_in_the_order_of_elements() -> None:
    assert encoded(np.array([[1.0, -1, 1, -1, -1, -1, -1, 1]], np.float32), "ubinary").tolist() == [[0b10100001]]


# ---- heads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client refuses every server while tests are offline."""
    found = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return found


def test_the_hubs_client_embeds(hub: Any, served: Any) -> None:
    found = hub.InferenceClient(model=served.url).feature_extraction("Peace and commerce.")
    np.testing.assert_allclose(found, served.post("/embed", {"inputs": "Peace and commerce."}), atol=1e-6)
    expected = served.post("/similarity", {"inputs": {"source_sentence": "Peace.", "sentences": DOCUMENTS}})
    found = hub.InferenceClient(model=served.url).sentence_similarity("Peace.", other_sentences=DOCUMENTS)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_hubs_client_answers_questions(hub: Any, served: Any, folders: dict[str, Path]) -> None:
    question, context = "Who commands the army?", "The president commands the army. " * 30
    client = hub.InferenceClient(model=f"{served.url}/question-answering")
    found = client.question_answering(question=question, context=context)
    assert context[found.start : found.end] == found.answer
    assert found.answer
    assert 0 < found.score <= 1
    from fasttfm import tasks

    with pytest.warns(UserWarning, match="task"):
        predictor = tasks.load(folders["reader"], device="cpu")
    assert predictor((question, context)).answer == found.answer


def test_the_hubs_client_fills_masks(hub: Any, served: Any, folders: dict[str, Path]) -> None:
    text = "The [MASK] of the United States."
    found = hub.InferenceClient(model=f"{served.url}/fill-mask").fill_mask(text, top_k=3)
    with Session(folders["masked"], device="cpu") as session:
        rows = session.encode(text, output="logits")
        place = session.tokenizer.encode(text).index(session.tokenizer.special.mask) + 1
    expected = np.exp(rows[place]) / np.exp(rows[place]).sum()
    assert [each.token for each in found] == np.argsort(-expected)[:3].tolist()
    np.testing.assert_allclose([each.score for each in found], np.sort(expected)[::-1][:3], atol=1e-5)
    assert found[0].token_str.removeprefix("##") in found[0].sequence
    assert "[MASK]" in served.refused("/fill-mask", {"inputs": "no mask"}, 422)["error"]
    assert len(served.post("/fill-mask", {"inputs": "The [MASK] of the [MASK]."})) == 2


def test_the_hubs_client_labels_tokens(hub: Any, served: Any) -> None:
    text = "Ada Lovelace was born in London."
    found = hub.InferenceClient(model=f"{served.url}/token-classification").token_classification(text)
    assert all(text[each.start : each.end] == each.word for each in found)
    assert {each.entity_group for each in found} <= {"PER", "LOC"}
    body = {"inputs": text, "parameters": {"aggregation_strategy": "none", "ignore_labels": ["nothing"]}}
    tokens = served.post("/token-classification", body)
    assert tokens[0]["start"] == 0
    assert tokens[-1]["end"] == len(text)
    assert sum(each["entity"] != "O" for each in tokens) >= len(found)


def test_entities_end_at_the_next_beginning() -> None:
    from fasttfm.serve.heads import _joined

    labels = ["B-PER", "I-PER", "B-PER", "O", "I-LOC"]
    places = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    tokens = [
        {"entity": label, "score": 0.5, "start": begin, "end": end}
        for label, (begin, end) in zip(labels, places, strict=True)
    ]
    found = [(each["entity_group"], each["word"]) for each in _joined("a b c d e", tokens)]
    assert found == [("PER", "a b"), ("PER", "c"), ("O", "d"), ("LOC", "e")]
