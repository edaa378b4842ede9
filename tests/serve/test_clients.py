"""Clients that are heavy to install (tests/serve/clients.txt), over the routes that they call by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.slow
DOCUMENTS = ["The people of the United States.", "Peace and commerce.", "The army and the navy."]


def test_cohere(served: Any) -> None:
    cohere = pytest.importorskip("cohere", reason="cohere is not installed")
    client = cohere.ClientV2(api_key="none", base_url=served.url)
    ranked = client.rerank(model="reranker", query="peace", documents=DOCUMENTS, top_n=2)
    expected = served.post("/rerank", {"query": "peace", "texts": DOCUMENTS})
    assert [each.index for each in ranked.results] == [each["index"] for each in expected[:2]]
    kinds = ["float", "int8", "ubinary"]
    found = client.embed(model="embedder", texts=DOCUMENTS, input_type="search_query", embedding_types=kinds)
    wanted = served.post("/embed", {"inputs": DOCUMENTS, "prompt_name": "query"})
    np.testing.assert_allclose(found.embeddings.float_, wanted, atol=1e-6)
    assert len(found.embeddings.ubinary[0]) == 8
    with pytest.raises(cohere.NotFoundError, match="does not exist"):
        client.rerank(model="unknown", query="a", documents=["b"])


def test_langchain(served: Any) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    embeddings = langchain.OpenAIEmbeddings(
        model="embedder",
        base_url=f"{served.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
        chunk_size=2,
    )
    np.testing.assert_allclose(
        embeddings.embed_documents(DOCUMENTS), served.post("/embed", {"inputs": DOCUMENTS}), atol=1e-6
    )
    model = langchain.OpenAI(model="gpt", base_url=f"{served.url}/v1", api_key="none", max_tokens=8, temperature=0)
    assert "".join(model.stream("The people of the")) == model.invoke("The people of the")


def test_llama_index(served: Any) -> None:
    module = pytest.importorskip(
        "llama_index.embeddings.text_embeddings_inference", reason="llama-index is not installed"
    )
    embedding = module.TextEmbeddingsInference(model_name="embedder", base_url=served.url)
    expected = served.post("/embed", {"inputs": DOCUMENTS})
    np.testing.assert_allclose(embedding.get_text_embedding_batch(DOCUMENTS), expected, atol=1e-6)


def test_llama_index_reranks(served: Any) -> None:
    module = pytest.importorskip("llama_index.postprocessor.tei_rerank", reason="llama-index is not installed")
    schema = pytest.importorskip("llama_index.core.schema")
    nodes = [schema.NodeWithScore(node=schema.TextNode(text=text)) for text in DOCUMENTS]
    ranked = module.TextEmbeddingInference(top_n=2, base_url=served.url).postprocess_nodes(nodes, query_str="peace")
    expected = served.post("/rerank", {"query": "peace", "texts": DOCUMENTS})
    assert [each.node.text for each in ranked] == [DOCUMENTS[each["index"]] for each in expected[:2]]
