"""The routes of OpenAI: ``/v1/models``, ``/v1/embeddings`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.responses import StreamingResponse

from fasttfm.generate.sampling import Sampling, end_tokens
from fasttfm.serve import errors, fields
from fasttfm.serve.answers import Answer, json_answer
from fasttfm.serve.calls import Call, shortened
from fasttfm.serve.cohere import EMBEDDING_TYPES, encoded
from fasttfm.serve.generation import Decoding, Generator, Stream
from fasttfm.serve.models import ServedModel

_STARTED = int(time.time())
_MAX_STOPS = 4


def _stops() -> fields.Field:
    def read(value: Any) -> list[str] | None:
        stops = [value] if isinstance(value, str) else value
        known = isinstance(stops, list) and len(stops) <= _MAX_STOPS
        return stops if known and all(isinstance(stop, str) and stop for stop in stops) else None

    return fields.Field(f"a string or an array of up to {_MAX_STOPS} strings", read, {}, [])


EMBEDDINGS = fields.Body(
    input=fields.texts_or_ids("A text, ids of the model's vocabulary, or an array of these."),
    model=fields.text(None, "The model, by its served name."),
    encoding_format=fields.choice(*EMBEDDING_TYPES, default="float"),
    dimensions=fields.integer(1, 2**20, None),
    user=fields.text(None),
)
COMPLETIONS = fields.Body(
    model=fields.text(None, "The model, by its served name."),
    prompt=fields.texts_or_ids("A text, ids of the model's vocabulary, or an array of these."),
    max_tokens=fields.integer(1, 2**31 - 1, 16),
    temperature=fields.number(0, 2, 1.0),
    top_p=fields.number(1e-6, 1, 1.0),
    top_k=fields.integer(1, 2**31 - 1, None, "How many of the most likely tokens are drawn from."),
    n=fields.integer(1, 128, 1),
    stream=fields.boolean(False),
    stream_options=fields.nested(fields.Body(include_usage=fields.boolean(False)), default={}),
    stop=_stops(),
    seed=fields.integer(-(2**63), 2**63 - 1, None),
    echo=fields.boolean(False),
    user=fields.text(None),
    logprobs=fields.unsupported("log-probabilities are not computed"),
    suffix=fields.unsupported("causal models do not insert", ""),
    best_of=fields.unsupported("completions are not compared", 1),
    presence_penalty=fields.unsupported("penalties are not computed", 0, 0.0),
    frequency_penalty=fields.unsupported("penalties are not computed", 0, 0.0),
    logit_bias=fields.unsupported("logits are not changed", {}),
)


def models(call: Call) -> Answer:
    listed = [_described(model) for model in call.server.ready().models.values()]
    return json_answer({"object": "list", "data": listed})


def model(call: Call) -> Answer:
    """One model, by its name."""
    name, known = call.path.removeprefix("/v1/models/"), call.server.ready().models
    if name not in known:
        message = f"The model `{name[:100]}` does not exist"
        raise errors.RequestError(404, "Validation", message, param="model", code="model_not_found")
    return json_answer(_described(known[name]))


def _described(model: ServedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": _STARTED, "owned_by": "fasttfm"}


async def embeddings(call: Call) -> Answer:
    body = EMBEDDINGS.parse(call.body)
    model = call.server.ready().select("embed", body["model"])
    values, single = body["input"]
    call.count_inputs(len(values), single=single, name="input")
    prompt, truncate = model.reader.default_prompt, call.server.limits.auto_truncate
    vectors = await call.read_and_compute(model, values, prompt=prompt, truncate=truncate)
    vectors = shortened(model, vectors, body["dimensions"], normalize=True)
    rows = encoded(vectors, body["encoding_format"])
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": call.tokens, "total_tokens": call.tokens}
    return call.answer({"object": "list", "data": data, "model": model.name, "usage": usage})


# ---- completions -----------------------------------------------------------------------------------------------------


class _Choice:
    """One completion: its tokens as they come, and their text."""

    def __init__(self, index: int, echo: str, stream: Stream, decoding: Decoding) -> None:
        self.index, self.echo, self.stream, self.decoding = index, echo, stream, decoding

    async def texts(self, deadline: float) -> AsyncIterator[str]:
        if self.echo:
            yield self.echo
        async for tokens in self.stream.read(deadline):
            text = self.decoding.add(tokens)
            if text:
                yield text
            if self.decoding.stopped:
                break
        if rest := self.decoding.finish():
            yield rest

    @property
    def reason(self) -> str:
        return "stop" if self.decoding.stopped else "length"


async def completions(call: Call) -> Answer | StreamingResponse:
    body = COMPLETIONS.parse(call.body)
    model = call.server.ready().select("complete", body["model"])
    values, single = body["prompt"]
    call.count_inputs(len(values) * body["n"], single=single and body["n"] == 1, name="prompt")
    sequences = await call.sequences(model, values, truncate=False)
    choices = _start(call, model, body, values, [list(sequence.ids) for sequence in sequences])
    head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
    head["model"] = model.name
    deadline = call.begun + call.server.limits.request_timeout
    if body["stream"]:
        usage = bool(body["stream_options"].get("include_usage"))
        events = _events(call, head, choices, deadline, usage)
        first = await anext(events)  # an error before the first token is a status, not an event
        return StreamingResponse(_with_first(first, events), media_type="text/event-stream")
    texts = await _gather(call, [_whole(choice, deadline) for choice in choices], choices)
    listed = [
        {"text": text, "index": choice.index, "logprobs": None, "finish_reason": choice.reason}
        for choice, text in zip(choices, texts, strict=True)
    ]
    return call.answer({**head, "choices": listed, "usage": _usage(call, choices)})


def _start(
    call: Call, model: ServedModel, body: dict[str, Any], values: list[Any], prompts: list[list[int]]
) -> list[_Choice]:
    """Submits the sequences of all choices to the generator with the fewest."""
    generators: list[Generator] = model.generators
    ends = end_tokens(model.config, None)
    is_greedy = body["temperature"] == 0
    sampling = Sampling(
        do_sample=not is_greedy,
        temperature=1.0 if is_greedy else body["temperature"],
        top_k=body["top_k"],
        top_p=body["top_p"],
    )
    choices: list[_Choice] = []
    for number, (value, prompt) in enumerate(zip(values, prompts, strict=True)):
        for copy in range(body["n"]):
            generator = min(generators, key=lambda candidate: candidate.running)
            if len(prompt) + body["max_tokens"] > generator.capacity:
                got = f"{len(prompt)} in the prompt and {body['max_tokens']} to complete"
                message = f"This model's maximum context length is {generator.capacity} tokens; got {got}"
                raise errors.RequestError(
                    400, "Validation", message, param="max_tokens", code="context_length_exceeded"
                )
            seed = None if body["seed"] is None else (body["seed"] + copy + 2**63) % 2**64 - 2**63
            options = {"max_new_tokens": body["max_tokens"], "seed": seed, "sampling": sampling}
            echo = value if isinstance(value, str) else model.reader.tokenizer.decode(value)
            decoding = Decoding(model.reader.tokenizer, body["stop"], set(ends))
            stream = generator.submit(prompt, options)
            choices.append(_Choice(number * body["n"] + copy, echo if body["echo"] else "", stream, decoding))
    return choices


def _usage(call: Call, choices: list[_Choice]) -> dict[str, int]:
    new = sum(choice.decoding.tokens for choice in choices)
    return {"prompt_tokens": call.tokens, "completion_tokens": new, "total_tokens": call.tokens + new}


async def _whole(choice: _Choice, deadline: float) -> str:
    return "".join([text async for text in choice.texts(deadline)])


async def _gather(call: Call, coroutines: list[Any], choices: list[_Choice]) -> list[str]:
    """The texts of all choices. A client that disconnects, and a deadline, end their sequences."""
    work = asyncio.ensure_future(asyncio.gather(*coroutines))
    gone = asyncio.ensure_future(call.disconnection())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise errors.Disconnected
        return await work
    except TimeoutError:
        raise errors.late(call.server.limits.request_timeout) from None
    finally:
        work.cancel()
        gone.cancel()
        for choice in choices:
            choice.stream.cancelled = True


async def _events(
    call: Call, head: dict[str, Any], choices: list[_Choice], deadline: float, with_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events: a chunk for each piece of text, the usage, and [DONE]."""
    pieces: asyncio.Queue[tuple[_Choice, str | None]] = asyncio.Queue()

    async def follow(choice: _Choice) -> None:
        async for text in choice.texts(deadline):
            pieces.put_nowait((choice, text))
        pieces.put_nowait((choice, None))

    tasks = [asyncio.ensure_future(follow(choice)) for choice in choices]
    for task in tasks:
        task.add_done_callback(lambda task: None if _succeeded(task) else pieces.put_nowait((choices[0], None)))
    open_choices, none = len(choices), {"usage": None} if with_usage else {}
    is_first = True
    try:
        while open_choices:
            choice, text = await pieces.get()
            for task in tasks:
                if task.done() and not _succeeded(task):
                    task.result()
            if is_first:
                call.server.metrics.first_tokens.observe(time.perf_counter() - call.begun)
                is_first = False
            open_choices -= text is None
            reason = choice.reason if text is None else None
            listed = [{"text": text or "", "index": choice.index, "logprobs": None, "finish_reason": reason}]
            yield _event({**head, "choices": listed, **none})
        if with_usage:
            yield _event({**head, "choices": [], "usage": _usage(call, choices)})
        yield b"data: [DONE]\n\n"
        call.answer(None)
    except TimeoutError:
        error = errors.late(call.server.limits.request_timeout)
        if is_first:
            raise error from None
        yield _event(errors.openai_body(error)[1])
    except errors.RequestError as error:
        if is_first:
            raise
        yield _event(errors.openai_body(error)[1])
    finally:
        for task, choice in zip(tasks, choices, strict=True):
            task.cancel()
            choice.stream.cancelled = True


def _succeeded(task: asyncio.Task[None]) -> bool:
    return not task.done() or task.cancelled() or task.exception() is None


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


async def _with_first(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]
