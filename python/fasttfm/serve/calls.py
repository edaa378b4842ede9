"""``Call``: one request, from its body to its answer; ``Server``: what all requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from fasttfm.inference.formats import Tokens
from fasttfm.serve import errors
from fasttfm.serve.engine import Arrivals, Engine, Job
from fasttfm.serve.generation import Generator
from fasttfm.serve.limits import Admission, Deadline, Limits
from fasttfm.serve.metrics import Metrics
from fasttfm.serve.models import ServedModel
from fasttfm.serve.peers import Peers

_INLINE_CHARACTERS = 2048  # fewer are tokenized in less time than another thread needs to start
_WATCH_AFTER = 0.02  # seconds after which a request is watched for a disconnection


class Loaded:
    """The models that are served, with what computes them. A reload replaces the whole."""

    def __init__(
        self, models: Sequence[ServedModel], admission: Admission, metrics: Metrics, arrivals: Arrivals
    ) -> None:
        self.models = {model.name: model for model in models}
        for model in models:
            model.engine = Engine(model, admission, metrics, arrivals)
            model.generators = [Generator(session, admission, arrivals) for session in model.generations]

    def select(self, ability: str, name: str | None = None) -> ServedModel:
        """The model of that name, or the first one that has the ability."""
        if name is not None:
            model = self.models.get(name)
            if model is None:
                message = f"The model `{name[:100]}` does not exist; this server has {', '.join(self.models)}"
                raise errors.RequestError(404, "Validation", message, param="model", code="model_not_found")
            if ability in model.abilities:
                return model
        else:
            for model in self.models.values():
                if ability in model.abilities:
                    return model
        raise errors.wrong_model(_REFUSALS[ability])

    def close(self) -> None:
        """Computes what is submitted."""
        for model in self.models.values():
            for generator in model.generators:
                generator.close()
            model.close()


_REFUSALS = {  # the first two are TEI's sentences
    "embed": "Model is not an embedding model",
    "rerank": "model is not a re-ranker model",
    "embed_sparse": "Model is not an embedding model with SPLADE pooling",
    "predict": "Model is not a classifier model",
    "label_tokens": "model has no head for token classification",
    "answer": "model has no head for question answering",
    "fill_mask": "model has no head for masked tokens",
    "complete": "model is not a causal language model",
}


class Server:
    """What requests share: limits, metrics, the pool that tokenizes, and the models once they are loaded."""

    def __init__(self, limits: Limits, *, tokenization_workers: int = 4) -> None:
        self.limits, self.metrics = limits, Metrics()
        self.admission = Admission(limits)
        self.loaded: Loaded | None = None
        self.failure: str | None = None  # why no model could be loaded
        self.draining = False
        self.tokenization_workers = tokenization_workers
        self.pool = ThreadPoolExecutor(tokenization_workers, thread_name_prefix="fasttfm-tokenize")
        self.peers: Peers | None = None  # the other processes that serve the port

    def ready(self) -> Loaded:
        """The models; raises RequestError while they are loaded and after a fault."""
        reason = self.unhealthy()
        if reason is not None or self.loaded is None:
            raise errors.unavailable(reason or "the models are being loaded")
        return self.loaded

    def unhealthy(self) -> str | None:
        """Why the server cannot compute; None if it can."""
        if self.loaded is None:
            return self.failure or "the models are being loaded"
        for model in self.loaded.models.values():
            fault = model.fault()
            if fault is not None:
                return f"{model.name}: {fault}"
        return None

    def state(self) -> dict[str, Any]:
        """What the process knows of itself, for ``/health``, ``/metrics`` and the page."""
        return {
            "reason": self.unhealthy(),
            "requests": self.admission.requests,
            "waiting": self.admission.waiting,
            "metrics": self.metrics.state(),
        }

    async def states(self) -> list[dict[str, Any]]:
        """The states of all processes."""
        return [self.state(), *([] if self.peers is None else await self.peers.states())]


class Call:
    """A request: its body, and what has been measured of it."""

    __slots__ = (
        "_jobs", "_streams", "begun", "body", "characters", "inference", "method", "queue", "request", "server",
        "texts", "tokenization", "tokens",
    )  # fmt: skip

    def __init__(self, server: Server, request: Request) -> None:
        self.server, self.request = server, request
        self.begun = time.perf_counter()
        self.body: Any = None
        self.method = "single"  # TEI's label: single or batch
        self.texts = self.characters = self.tokens = 0
        self.tokenization = self.queue = self.inference = 0.0
        self._jobs: list[tuple[Engine, Job]] = []
        self._streams: list[Any] = []

    # ---- the body ----------------------------------------------------------------------------------------------------

    async def read_body(self) -> None:
        """Reads and decodes the body, within the limits of its size and of the time for it to arrive."""
        limits, headers = self.server.limits, self.request.headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            message = "Expected request with `Content-Type: application/json`"
            raise errors.RequestError(415, "Validation", message)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise errors.RequestError(415, "Validation", "Expected a body without Content-Encoding")
        length = headers.get("content-length", "")
        if length.isdigit():
            limits.check_bytes(int(length[:20]))
        parts, size = [], 0
        try:
            with Deadline(limits.read_timeout):
                while True:
                    event = await self.request.receive()
                    if event["type"] == "http.disconnect":
                        raise errors.Disconnected
                    part = event.get("body", b"")
                    size += len(part)
                    limits.check_bytes(size)
                    parts.append(part)
                    if not event.get("more_body", False):
                        break
        except TimeoutError:
            message = f"the body did not arrive within {limits.read_timeout:g} seconds (--read-timeout)"
            raise errors.RequestError(408, "Validation", message) from None
        try:
            self.body = orjson.loads(b"".join(parts))
        except orjson.JSONDecodeError as error:
            raise errors.malformed(f"Failed to parse the request body as JSON: {error}") from None

    def count_inputs(self, count: int, *, single: bool = False, name: str = "inputs") -> None:
        """Checks the number of inputs, and counts the request."""
        self.method = "single" if single else "batch"
        self.server.metrics.count("te_request_count", "method", self.method)
        if count == 0:
            raise errors.empty(name)
        self.server.limits.check_texts(count)
        self.texts = count

    # ---- computing ---------------------------------------------------------------------------------------------------

    async def in_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in the pool of threads."""
        return await asyncio.get_running_loop().run_in_executor(self.server.pool, function, *arguments)

    async def tokenize(self, read: Callable[[], list[Tokens]], characters: int) -> list[Tokens]:
        """The sequences that ``read`` returns; long texts are read in the pool."""
        begun = time.perf_counter()
        sequences = read() if characters <= _INLINE_CHARACTERS else await self.in_pool(read)
        self.tokenization += time.perf_counter() - begun
        self.characters += characters
        lengths = [len(sequence.ids) for sequence in sequences]
        self.server.metrics.read(lengths)
        self.tokens += sum(lengths)
        self.server.limits.check_tokens(self.tokens)
        return sequences

    async def sequences(self, model: ServedModel, items: Sequence[Any], **options: Any) -> list[Tokens]:
        """The sequences of texts, pairs and ids (``TextReader.read``)."""
        return await self.tokenize(lambda: model.reader.read(items, **options), characters_of(items))

    async def compute(self, model: ServedModel, sequences: Sequence[Tokens], output: str = "vectors") -> Any:
        """The results of sequences, in the form of ``Session.encode``."""
        engine: Engine = model.engine
        job = engine.submit(sequences, output)
        self._jobs.append((engine, job))
        loop = asyncio.get_running_loop()
        elapsed = time.perf_counter() - self.begun
        deadline = loop.call_later(max(0.0, self.server.limits.request_timeout - elapsed), self._expire, job)
        watch = loop.call_later(_WATCH_AFTER, self._watch)
        try:
            result = await job.waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            deadline.cancel()
            watch.cancel()
        self.queue += job.queue_seconds
        self.inference += job.inference_seconds
        return result

    def _expire(self, job: Job) -> None:
        self._refuse(job, errors.late(self.server.limits.request_timeout))

    def _watch(self) -> None:
        """Ends the computation when the client disconnects."""
        jobs = [job for _, job in self._jobs if not job.waiter.done()]
        task = asyncio.ensure_future(self.disconnection())

        def ended(_: Any) -> None:
            if not task.cancelled() and task.exception() is None:
                for job in jobs:
                    self._refuse(job, errors.Disconnected())

        task.add_done_callback(ended)
        for job in jobs:
            job.waiter.add_done_callback(lambda _: task.cancel())

    async def disconnection(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass

    def _refuse(self, job: Job, error: Exception) -> None:
        if not job.waiter.done():
            job.waiter.set_exception(error)
        for engine, submitted in self._jobs:
            if submitted is job:
                engine.cancel(job)

    def cancel(self) -> None:
        for engine, job in self._jobs:
            engine.cancel(job)

    # ---- the answer --------------------------------------------------------------------------------------------------

    def answer(self, content: Any) -> Response:
        """The response to a request that was computed, with TEI's headers."""
        seconds = time.perf_counter() - self.begun
        durations = (seconds, self.tokenization, self.queue, self.inference)
        self.server.metrics.answered(self.method, durations, self.texts, self.tokens)
        total = str(round(seconds * 1e3))
        return json_response(
            content,
            headers={
                "x-compute-type": "fasttfm",
                "x-compute-time": total,
                "x-compute-characters": str(self.characters),
                "x-compute-tokens": str(self.tokens),
                "x-total-time": total,
                "x-tokenization-time": str(round(self.tokenization * 1e3)),
                "x-queue-time": str(round(self.queue * 1e3)),
                "x-inference-time": str(round(self.inference * 1e3)),
            },
        )


def characters_of(items: Sequence[Any]) -> int:
    """The characters of texts and pairs; ids count one each."""
    return sum(sum(map(len, item)) if isinstance(item, tuple) else len(item) for item in items)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, "application/json")


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Vectors divided by their L2 norm; a vector of zeros stays zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def shortened(model: ServedModel, vectors: np.ndarray, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """The first ``dimensions`` elements of vectors, normalized afterwards."""
    if dimensions is not None:
        width = vectors.shape[-1]
        if not 1 <= dimensions <= width:
            raise errors.invalid("dimensions", f"a whole number from 1 to {model.name}'s {width}", dimensions)
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
    return unit_vectors(vectors) if normalize else vectors
