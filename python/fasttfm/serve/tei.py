"""The routes of text-embeddings-inference (TEI)."""

from __future__ import annotations

from typing import Any

import numpy as np
from orjson import Fragment

from fasttfm._version import __version__
from fasttfm.inference.formats import Tokens
from fasttfm.serve import errors, fields
from fasttfm.serve.answers import Answer, json_answer, json_bytes
from fasttfm.serve.calls import Call, shortened, unit_vectors
from fasttfm.serve.cohere import rerank as cohere_rerank
from fasttfm.serve.models import ServedModel
from fasttfm.serve.tokenization import characters_of

_MODEL = fields.text(None, "The model, where several are served; by default the first one that can.")
_TRUNCATION = {
    "truncate": fields.boolean(None, "Whether longer texts are truncated; by default as --auto-truncate says."),
    "truncation_direction": fields.choice("left", "right", default="right"),
}
_PROMPT = fields.text(None, "The name of one of the model's prompts.")
_INPUTS = fields.texts_or_ids("A text, or an array of texts; ids of the model's vocabulary instead of texts.")

EMBED = fields.Body(
    inputs=_INPUTS,
    **_TRUNCATION,
    prompt_name=_PROMPT,
    normalize=fields.boolean(True, "Whether vectors are divided by their L2 norm."),
    dimensions=fields.integer(1, 2**20, None, "How many of the first elements vectors keep."),
    model=_MODEL,
)
EMBED_ALL = fields.Body(inputs=_INPUTS, **_TRUNCATION, prompt_name=_PROMPT, model=_MODEL)
PREDICT = fields.Body(inputs=fields.texts_or_pairs(), **_TRUNCATION, raw_scores=fields.boolean(False), model=_MODEL)
RERANK = fields.Body(
    query=fields.text(),
    texts=fields.texts(),
    **_TRUNCATION,
    raw_scores=fields.boolean(False, "Logits instead of probabilities."),
    return_text=fields.boolean(False),
    model=_MODEL,
)
SIMILARITY = fields.Body(
    inputs=fields.nested(fields.Body(source_sentence=fields.text(), sentences=fields.texts())),
    parameters=fields.nested(fields.Body(**_TRUNCATION, prompt_name=_PROMPT), default={}),
    model=_MODEL,
)
TOKENIZE = fields.Body(
    inputs=fields.text_or_texts(), add_special_tokens=fields.boolean(True), prompt_name=_PROMPT, model=_MODEL
)
DECODE = fields.Body(
    ids=fields.texts_or_ids("An array of ids, or an array of these."),
    skip_special_tokens=fields.boolean(True),
    model=_MODEL,
)


def _options(call: Call, body: dict[str, Any]) -> dict[str, Any]:
    """The options of ``TextReader.read`` that all bodies have."""
    truncate = body.get("truncate")
    return {
        "truncate": call.server.limits.auto_truncate if truncate is None else truncate,
        "left": body.get("truncation_direction") == "left",
    }


async def _results(call: Call, model: ServedModel, body: dict[str, Any], output: str = "vectors") -> Any:
    values, single = body["inputs"]
    call.count_inputs(len(values), single=single)
    options = {"prompt": model.reader.prompt(body["prompt_name"]), **_options(call, body)}
    return await call.read_and_compute(model, values, output, **options)


async def embed(call: Call) -> Answer:
    body = EMBED.parse(call.body)
    model = call.server.ready().select("embed", body["model"])
    vectors = await _results(call, model, body)
    return call.answer(shortened(model, vectors, body["dimensions"], normalize=body["normalize"]))


async def embed_all(call: Call) -> Answer:
    """The hidden states of all tokens."""
    body = EMBED_ALL.parse(call.body)
    model = call.server.ready().select("embed", body["model"])
    states = await _results(call, model, body, "states")
    return call.answer(await call.in_pool(lambda: [Fragment(json_bytes(rows)) for rows in states]))


async def embed_sparse(call: Call) -> Answer:
    """SPLADE's vectors, or bge-m3's lexical weights, without zeros."""
    body = EMBED_ALL.parse(call.body)
    model = call.server.ready().select("embed_sparse", body["model"])
    vectors = await _results(call, model, body, "sparse")

    def sparse() -> list[list[dict[str, Any]]]:
        rows = []
        for vector in vectors:
            pairs = zip(vector.indices.tolist(), vector.values.tolist(), strict=True)
            rows.append([{"index": index, "value": value} for index, value in pairs])
        return rows

    return call.answer(await call.in_pool(sparse))


async def predict(call: Call) -> Answer:
    """The labels of sequences, the most likely first; of a model for tokens, the most likely label of each token."""
    body = PREDICT.parse(call.body)
    model = call.server.ready().select("predict", body["model"])
    values, single = body["inputs"]
    call.count_inputs(len(values), single=single)
    sequences = await call.sequences(model, values, **_options(call, body))
    logits = await call.compute(model, sequences, "logits")
    raw = body["raw_scores"]
    if "label_tokens" in model.abilities:
        pairs = list(zip(sequences, logits, strict=True))
        labels = await call.in_pool(lambda: [_token_labels(model, tokens, rows, raw) for tokens, rows in pairs])
    else:
        labels = [_labels(model, row, raw) for row in logits]
    return call.answer(labels[0] if single else labels)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last dimension; of a single label, the sigmoid."""
    if logits.shape[-1] == 1:
        return sigmoid(logits)
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def _labels(model: ServedModel, logits: np.ndarray, raw: bool) -> list[dict[str, Any]]:
    scores = logits if raw else probabilities(logits)
    return [
        {"score": float(scores[index]), "label": model.labels[index]} for index in np.argsort(-scores, kind="stable")
    ]


def _token_labels(model: ServedModel, tokens: Tokens, logits: np.ndarray, raw: bool) -> list[dict[str, Any]]:
    scores = logits if raw else probabilities(logits)
    best = scores.argmax(-1)
    return [
        {"token": model.reader.tokenizer.token(id), "label": model.labels[index], "score": float(row[index])}
        for id, index, row in zip(tokens.ids, best.tolist(), scores, strict=True)
    ]


async def rerank(call: Call) -> Answer:
    """TEI's body has ``texts``; one with ``documents`` is Cohere's and Jina's."""
    if isinstance(call.body, dict) and "documents" in call.body and "texts" not in call.body:
        return await cohere_rerank(call)
    body = RERANK.parse(call.body)
    model = call.server.ready().select("rerank", body["model"])
    texts = body["texts"]
    call.count_inputs(len(texts), name="texts")
    pairs = [(body["query"], text) for text in texts]
    logits = (await call.read_and_compute(model, pairs, "logits", **_options(call, body)))[:, 0]
    scores = logits if body["raw_scores"] else sigmoid(logits)
    ranks = []
    for index in np.argsort(-scores, kind="stable").tolist():
        text = {"text": texts[index]} if body["return_text"] else {}
        ranks.append({"index": index, **text, "score": float(scores[index])})
    return call.answer(ranks)


async def similarity(call: Call) -> Answer:
    """The cosines of one sentence and others."""
    body = SIMILARITY.parse(call.body)
    model = call.server.ready().select("embed", body["model"])
    inputs, parameters = body["inputs"], body["parameters"]
    if not inputs["sentences"]:
        raise errors.empty("inputs.sentences")
    values = [inputs["source_sentence"], *inputs["sentences"]]
    call.count_inputs(len(values))
    prompt = model.reader.prompt(parameters.get("prompt_name"))
    vectors = unit_vectors(await call.read_and_compute(model, values, prompt=prompt, **_options(call, parameters)))
    return call.answer(vectors[1:] @ vectors[0])


async def tokenize(call: Call) -> Answer:
    body = TOKENIZE.parse(call.body)
    model = _first(call, body["model"])
    values, single = body["inputs"]
    call.count_inputs(len(values), single=single)
    prompt = model.reader.prompt(body["prompt_name"]) if body["prompt_name"] is not None else ""
    if not all(values):
        raise errors.empty("inputs")
    special = body["add_special_tokens"]

    def read() -> list[list[dict[str, Any]]]:
        return [model.reader.describe(prompt + text, special=special) for text in values]

    call.characters = characters_of(values)
    described = await call.in_pool(read)
    call.tokens = sum(map(len, described))
    return call.answer(described)


async def decode(call: Call) -> Answer:
    body = DECODE.parse(call.body)
    model = _first(call, body["model"])
    values, single = body["ids"]
    if any(isinstance(value, str) for value in values):
        raise errors.invalid("ids", "an array of ids, or an array of these", "")
    call.count_inputs(len(values), single=single, name="ids")
    tokenizer = model.reader.tokenizer
    if any(id >= tokenizer.vocab_size for sequence in values for id in sequence):
        raise errors.invalid("ids", f"ids from 0 to {tokenizer.vocab_size - 1}", max(map(max, values)))
    call.tokens = sum(map(len, values))
    call.server.limits.check_tokens(call.tokens)

    def read() -> list[str]:
        return [tokenizer.decode(sequence, skip_special_tokens=body["skip_special_tokens"]) for sequence in values]

    return call.answer(await call.in_pool(read))


def _first(call: Call, name: str | None) -> ServedModel:
    """The model of that name, or the first one."""
    models = call.server.ready().models
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        raise errors.RequestError(404, "Validation", f"The model `{name[:100]}` does not exist", param="model")
    return models[name]


def info(call: Call) -> Answer:
    """TEI's fields of the first model, and those of the others under ``models``."""
    models = call.server.ready().models.values()
    described = [_info(call, model) for model in models]
    return json_answer({**described[0], "models": described} if len(described) > 1 else described[0])


def _info(call: Call, model: ServedModel) -> dict[str, Any]:
    limits = call.server.limits
    batch = model.sessions[0].max_tokens if model.sessions else model.generations[0].capacity
    return {
        "model_id": model.source.directory,
        "model_sha": None,
        "model_dtype": model.dtype,
        "served_model_name": model.name,
        "model_type": model.kind(),
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_input_length": model.max_length,
        "max_batch_tokens": batch,
        "max_batch_requests": None,
        "max_client_batch_size": limits.max_client_batch_size,
        "auto_truncate": limits.auto_truncate,
        "tokenization_workers": call.server.tokenization_workers,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }
