"""Question answering, fill-mask and token classification, with the bodies of Hugging Face's inference API."""

from __future__ import annotations

from typing import Any

import numpy as np

from fasttfm.inference.formats import Tokens
from fasttfm.serve import errors, fields
from fasttfm.serve.answers import Answer
from fasttfm.serve.calls import Call
from fasttfm.serve.models import ServedModel
from fasttfm.serve.tei import probabilities
from fasttfm.tasks.answers import Window, Windows, best_span

_MODEL = fields.text(None, "The model, where several are served; by default the first one that can.")
_MAX_QUESTION = 64


def _questions() -> fields.Field:
    """An object with a question and its context, or an array of these."""

    def known(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("question", "context"))

    def read(value: Any) -> fields.Items | None:
        if known(value):
            return fields.Items([value], True)
        return fields.Items(value, False) if isinstance(value, list) and all(map(known, value)) else None

    strings = {"question": {"type": "string"}, "context": {"type": "string"}}
    item = {"type": "object", "properties": strings, "required": ["question", "context"]}
    schema = {"oneOf": [item, {"type": "array", "items": item}]}
    return fields.Field("an object with the strings `question` and `context`, or an array of these", read, schema)


ANSWER = fields.Body(
    inputs=_questions(),
    parameters=fields.nested(
        fields.Body(
            max_answer_len=fields.integer(1, 512, 30, "The maximum number of tokens of an answer."),
            doc_stride=fields.integer(1, 2**20, 128, "Tokens between the starts of two windows over a long context."),
            handle_impossible_answer=fields.boolean(False, "Whether an empty answer is one."),
            top_k=fields.unsupported("one answer is returned", 1),
        ),
        default={},
    ),
    model=_MODEL,
)
FILL_MASK = fields.Body(
    inputs=fields.text_or_texts("A text with masks, written as in the model's vocabulary."),
    parameters=fields.nested(
        fields.Body(
            top_k=fields.integer(1, 1000, 5, "Guesses for each mask."),
            targets=fields.unsupported("guesses are drawn from the whole vocabulary", []),
        ),
        default={},
    ),
    model=_MODEL,
)
LABEL_TOKENS = fields.Body(
    inputs=fields.text_or_texts(),
    parameters=fields.nested(
        fields.Body(
            aggregation_strategy=fields.choice("none", "simple", default="simple"),
            ignore_labels=fields.texts(["O"], "Labels that are no entities."),
        ),
        default={},
    ),
    model=_MODEL,
)


# ---- questions -------------------------------------------------------------------------------------------------------


async def answer(call: Call) -> Answer:
    """The span of a context that answers a question, with its probability and its place."""
    body = ANSWER.parse(call.body)
    model = call.server.ready().select("answer", body["model"])
    values, single = body["inputs"]
    call.count_inputs(len(values), single=single)
    parameters = {"max_answer_len": 30, "doc_stride": 128, "handle_impossible_answer": False, **body["parameters"]}
    if not all(value["question"] and value["context"] for value in values):
        raise errors.empty("inputs")
    windows: list[list[Window]] = []
    offsets: list[Any] = []

    def read() -> list[Tokens]:
        form, tokenizer = model.reader.form, model.reader.tokenizer
        room = form.room - min(_MAX_QUESTION, form.room // 4)
        splitter = Windows(form, min(parameters["doc_stride"], max(1, room // 2)), form.room - room)
        for value in values:
            ids, places = tokenizer.encode_with_offsets(value["context"])
            windows.append(splitter.split(tokenizer.encode(value["question"]), ids))
            offsets.append(places)
        return [window.tokens for question in windows for window in question]

    sequences = await call.tokenize(read, sum(len(value["question"]) + len(value["context"]) for value in values))
    logits = await call.compute(model, sequences, "logits")

    def choose() -> list[dict[str, Any]]:
        rows = iter(logits)
        return [
            _best(value["context"], question, [next(rows) for _ in question], places, parameters)
            for value, question, places in zip(values, windows, offsets, strict=True)
        ]

    answers = await call.in_pool(choose)
    return call.answer(answers[0] if single else answers)


def _best(
    context: str, windows: list[Window], rows: list[np.ndarray], places: Any, parameters: dict[str, Any]
) -> dict[str, Any]:
    """The best span of all windows. Its score is the product of the probabilities of its first and last token."""
    best, score, none = None, 0.0, 1.0
    for window, logits in zip(windows, rows, strict=True):
        start, end = logits[:, 0], logits[:, 1]
        span = best_span(window, start, end, parameters["max_answer_len"])
        inside = [0, *range(window.first, window.first + window.size)]
        norm = np.logaddexp.reduce(start[inside]) + np.logaddexp.reduce(end[inside])
        none = min(none, float(np.exp(start[0] + end[0] - norm)))
        if span is not None and (best is None or span.score > best.score):
            best, score = span, float(np.exp(span.score - norm))
    if best is None or (parameters["handle_impossible_answer"] and none > score):
        return {"score": none, "start": 0, "end": 0, "answer": ""}
    begin, stop = places[best.start][0], places[best.end][1]
    return {"score": score, "start": begin, "end": stop, "answer": context[begin:stop]}


# ---- masks -----------------------------------------------------------------------------------------------------------


async def fill_mask(call: Call) -> Answer:
    """Guesses for a text's mask, the most likely first; of several masks, an array for each."""
    body = FILL_MASK.parse(call.body)
    model = call.server.ready().select("fill_mask", body["model"])
    values, single = body["inputs"]
    call.count_inputs(len(values), single=single)
    count = body["parameters"].get("top_k") or 5
    sequences = await call.sequences(model, values)
    mask = model.reader.tokenizer.special.mask
    masks = [[place for place, id in enumerate(sequence.ids) if id == mask] for sequence in sequences]
    if mask is None or not all(masks):
        name = "a mask token" if mask is None else model.reader.tokenizer.token(mask)
        raise errors.RequestError(
            422, "Validation", f"Input validation error: `inputs`: expected {name} in each text", param="inputs"
        )
    logits = await call.compute(model, sequences, "logits")

    def guess() -> list[Any]:
        answers = []
        for tokens, places, rows in zip(sequences, masks, logits, strict=True):
            guesses = [_guesses(model, tokens, place, rows[place], count) for place in places]
            answers.append(guesses[0] if len(guesses) == 1 else guesses)
        return answers

    answers = await call.in_pool(guess)
    return call.answer(answers[0] if single else answers)


def _guesses(model: ServedModel, tokens: Tokens, place: int, logits: np.ndarray, count: int) -> list[dict[str, Any]]:
    tokenizer, scores = model.reader.tokenizer, probabilities(logits)
    best = np.argsort(-scores, kind="stable")[:count].tolist()
    first, last = len(model.reader.form.first), len(model.reader.form.last)
    guesses = []
    for id in best:
        ids = [*tokens.ids[:place], id, *tokens.ids[place + 1 :]]
        text = tokenizer.decode(ids[first : len(ids) - last], skip_special_tokens=False)
        word = tokenizer.decode([id]).strip()
        guesses.append({"score": float(scores[id]), "token": id, "token_str": word, "sequence": text})
    return guesses


# ---- tokens ----------------------------------------------------------------------------------------------------------


async def label_tokens(call: Call) -> Answer:
    """The entities of a text with their offsets."""
    body = LABEL_TOKENS.parse(call.body)
    model = call.server.ready().select("label_tokens", body["model"])
    values, single = body["inputs"]
    call.count_inputs(len(values), single=single)
    offsets: list[Any] = []
    if not all(values):
        raise errors.empty("inputs")

    def read() -> list[Tokens]:
        encoded = [model.reader.tokenizer.encode_with_offsets(text) for text in values]
        offsets.extend(places for _, places in encoded)
        return [model.reader.form.one(ids) for ids, _ in encoded]

    sequences = await call.tokenize(read, sum(map(len, values)))
    logits = await call.compute(model, sequences, "logits")
    strategy = body["parameters"].get("aggregation_strategy") or "simple"
    ignored = set(body["parameters"].get("ignore_labels") or ["O"])
    key = "entity_group" if strategy == "simple" else "entity"

    def find() -> list[list[dict[str, Any]]]:
        entities = []
        for text, tokens, rows, places in zip(values, sequences, logits, offsets, strict=True):
            labelled = _labelled(model, text, tokens, rows, places)
            shown = _joined(text, labelled) if strategy == "simple" else labelled
            entities.append([entity for entity in shown if entity[key] not in ignored])
        return entities

    entities = await call.in_pool(find)
    return call.answer(entities[0] if single else entities)


def _labelled(model: ServedModel, text: str, tokens: Tokens, logits: np.ndarray, places: Any) -> list[dict[str, Any]]:
    """The most likely label of each token of the text, special tokens left out."""
    first, last = len(model.reader.form.first), len(model.reader.form.last)
    scores = probabilities(logits[first : len(tokens.ids) - last])
    best = scores.argmax(-1).tolist()
    return [
        {
            "entity": model.labels[label],
            "score": float(row[label]),
            "index": number + first,
            "word": text[begin:end],
            "start": begin,
            "end": end,
        }
        for number, (label, row, (begin, end)) in enumerate(zip(best, scores, places, strict=False))
    ]


def _joined(text: str, labelled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entities: tokens one after the other with the same label, up to the next ``B-``."""
    groups: list[dict[str, Any]] = []
    for token in labelled:
        prefix, sign, name = token["entity"].partition("-")
        kind = name if sign and prefix in ("B", "I") else token["entity"]
        previous = groups[-1] if groups else None
        continues = previous is not None and previous["entity_group"] == kind and not (sign and prefix == "B")
        if continues and previous is not None:
            previous["scores"].append(token["score"])
            previous["end"] = token["end"]
        else:
            groups.append(
                {"entity_group": kind, "scores": [token["score"]], "start": token["start"], "end": token["end"]}
            )
    return [
        {
            "entity_group": group["entity_group"],
            "score": float(np.mean(group["scores"])),
            "word": text[group["start"] : group["end"]],
            "start": group["start"],
            "end": group["end"],
        }
        for group in groups
    ]
