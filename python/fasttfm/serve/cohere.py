"""The routes of Cohere and Jina: ``/rerank``, ``/v1/rerank``, ``/v2/rerank`` and ``/v2/embed``."""

from __future__ import annotations

import base64
import uuid
from typing import Any

import numpy as np

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.serve import errors, fields
from fasttfm.serve.answers import Answer
from fasttfm.serve.calls import Call, unit_vectors

EMBEDDING_TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")


def _documents() -> fields.Field:
    """Strings, or objects with a ``text``."""

    def read(value: Any) -> list[str] | None:
        if not isinstance(value, list):
            return None
        texts: list[Any] = [document.get("text") if isinstance(document, dict) else document for document in value]
        return texts if all(isinstance(text, str) for text in texts) else None

    item = {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}}]}
    return fields.Field(
        "an array of strings, or of objects with a string `text`", read, {"type": "array", "items": item}
    )


RERANK = fields.Body(
    model=fields.text(None, "The model, by its served name."),
    query=fields.text(),
    documents=_documents(),
    top_n=fields.integer(1, 2**31 - 1, None, "How many of the best documents are returned."),
    return_documents=fields.boolean(False),
    max_tokens_per_doc=fields.integer(1, 2**31 - 1, None, "Longer documents are truncated."),
)
EMBED = fields.Body(
    model=fields.text(None, "The model, by its served name."),
    texts=fields.texts(),
    input_type=fields.choice(
        "search_document", "search_query", "classification", "clustering", default=None,
        about="The prompt of this kind, where the model has one: a query or a document.",
    ),
    embedding_types=fields.choices(*EMBEDDING_TYPES, default=["float"]),
    truncate=fields.choice("none", "start", "end", default="end"),
    output_dimension=fields.integer(1, 2**20, None),
    images=fields.unsupported("the models read text", []),
)  # fmt: skip
_PROMPTS = {"search_query": ("query", "search_query"), "search_document": ("document", "passage", "search_document")}


async def rerank(call: Call) -> Answer:
    """The answer has the fields of Cohere (``id``, ``meta``) and of Jina (``model``, ``usage``)."""
    body = RERANK.parse(call.body)
    model = call.server.ready().select("rerank", body["model"])
    documents = body["documents"]
    call.count_inputs(len(documents), name="documents")
    reader, most = model.reader, body["max_tokens_per_doc"]
    if most is not None:
        documents = await call.in_pool(_shortened, reader.tokenizer, documents, most)
    pairs = [(body["query"], text) for text in documents]
    logits = (await call.read_and_compute(model, pairs, "logits"))[:, 0]
    scores = 0.5 * (1.0 + np.tanh(0.5 * logits))
    results = []
    for index in np.argsort(-scores, kind="stable").tolist()[: body["top_n"]]:
        document = {"document": {"text": body["documents"][index]}} if body["return_documents"] else {}
        results.append({"index": index, "relevance_score": float(scores[index]), **document})
    return call.answer(
        {
            "id": str(uuid.uuid4()),
            "model": model.name,
            "results": results,
            "usage": {"total_tokens": call.tokens, "prompt_tokens": call.tokens},
            "meta": {
                "api_version": {"version": _version(call)},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": call.tokens},
            },
        }
    )


def _shortened(tokenizer: Tokenizer, texts: list[str], most: int) -> list[str]:
    """Texts of at most ``most`` tokens."""
    ids = [tokenizer.encode(text) for text in texts]
    pairs = zip(texts, ids, strict=True)
    return [text if len(ids) <= most else tokenizer.decode(ids[:most]) for text, ids in pairs]


async def embed(call: Call) -> Answer:
    body = EMBED.parse(call.body)
    model = call.server.ready().select("embed", body["model"])
    call.count_inputs(len(body["texts"]), name="texts")
    names = _PROMPTS.get(body["input_type"], ())
    prompt = next((model.reader.prompts[name] for name in names if name in model.reader.prompts), None)
    options = {"truncate": body["truncate"] != "none", "left": body["truncate"] == "start"}
    prompt = model.reader.default_prompt if prompt is None else prompt
    vectors = await call.read_and_compute(model, body["texts"], prompt=prompt, **options)
    dimensions = body["output_dimension"]
    if dimensions is not None and dimensions > vectors.shape[1]:
        raise errors.invalid("output_dimension", f"a whole number from 1 to {vectors.shape[1]}", dimensions)
    vectors = unit_vectors(vectors[:, :dimensions])
    return call.answer(
        {
            "id": str(uuid.uuid4()),
            "response_type": "embeddings_by_type",
            "embeddings": {kind: encoded(vectors, kind) for kind in body["embedding_types"]},
            "texts": body["texts"],
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": call.tokens}},
        }
    )


def encoded(vectors: np.ndarray, kind: str) -> Any:
    """Vectors in one of Cohere's types.

    ``int8`` and ``uint8`` divide a vector by its largest magnitude, which leaves cosines as they are; ``uint8`` adds
    128. ``binary`` and ``ubinary`` have the signs, eight to a byte, the first in the highest bit; ``binary`` subtracts
    128 from it.
    """
    if kind == "float":
        return np.ascontiguousarray(vectors)
    if kind == "base64":
        return [base64.b64encode(row.tobytes()).decode() for row in vectors.astype("<f4")]
    if kind in ("int8", "uint8"):
        largest = np.maximum(np.abs(vectors).max(-1, keepdims=True), 1e-12)
        rounded = np.rint(vectors / largest * 127.0).astype(np.int16)
        return rounded.astype(np.int8) if kind == "int8" else (rounded + 128).astype(np.uint8)
    bits = np.packbits(vectors > 0, axis=-1)
    return bits if kind == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)


def _version(call: Call) -> str:
    return "2" if call.path.startswith("/v2") else "1"
