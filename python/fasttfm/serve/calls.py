"""``Call``: one request, from its body to its answer; ``Server``: what all requests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
from starlette.types import Receive, Scope

from fasttfm.inference.formats import Tokens
from fasttfm.serve import errors
from fasttfm.serve.answers import Answer, json_answer
from fasttfm.serve.engine import Arrivals, Engine, Job
from fasttfm.serve.generation import Generator
from fasttfm.serve.limits import Admission, Deadline, Limits
from fasttfm.serve.metrics import Metrics
from fasttfm.serve.models import ServedModel
from fasttfm.serve.peers import Peers
from fasttfm.serve.tokenization import Tokenization, characters_of

_LOOK_SECONDS = 0.1  # between two looks for requests that are late or whose client has disconnected


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
        self.tokenization_workers = tokenization_workers
        self.pool = ThreadPoolExecutor(tokenization_workers, thread_name_prefix="fasttfm-tokenize")
        self.tokenization = Tokenization(self.pool)
        self.in_flight = InFlight()
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


class InFlight:
    """The requests that are computed, which a timer looks at: one timer costs less than several of each request."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._is_scheduled = False

    def add(self, call: Call) -> None:
        self._calls.add(call)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def discard(self, call: Call) -> None:
        self._calls.discard(call)

    def _look(self) -> None:
        self._is_scheduled = bool(self._calls)
        if self._is_scheduled:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        now = time.perf_counter()
        for call in tuple(self._calls):
            if now - call.begun > _LOOK_SECONDS:
                call.look(now)


class Call:
    """A request: its body, and what has been measured of it."""

    __slots__ = (
        "_job", "_watch", "begun", "body", "characters", "headers", "inference", "method", "path", "queue", "receive",
        "server", "texts", "tokenization", "tokens",
    )  # fmt: skip

    def __init__(self, server: Server, scope: Scope, receive: Receive) -> None:
        self.server, self.receive = server, receive
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])  # names are in lower case
        self.begun = time.perf_counter()
        self.body: Any = None
        self.method = "single"  # TEI's label: single or batch
        self.texts = self.characters = self.tokens = 0
        self.tokenization = self.queue = self.inference = 0.0
        self._job: Job | None = None  # the last one
        self._watch: asyncio.Task[None] | None = None  # for a disconnection

    # ---- the body ----------------------------------------------------------------------------------------------------

    async def read_body(self) -> None:
        """Reads and decodes the body, within the limits of its size and of the time for it to arrive."""
        limits, headers = self.server.limits, self.headers
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            message = "Expected request with `Content-Type: application/json`"
            raise errors.RequestError(415, "Validation", message)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise errors.RequestError(415, "Validation", "Expected a body without Content-Encoding")
        length = headers.get(b"content-length", b"")
        if length.isdigit():
            limits.check_bytes(int(length[:20]))
        parts, size = [], 0
        try:
            with Deadline(limits.read_timeout):
                while True:
                    event = await self.receive()
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

    async def sequences(self, model: ServedModel, items: Sequence[Any], **options: Any) -> list[Tokens]:
        """The sequences of texts, pairs and ids (``TextReader.read``)."""
        waiter: asyncio.Future[list[Tokens]] = asyncio.get_running_loop().create_future()

        def done(sequences: list[Tokens]) -> None:
            if not waiter.done():
                waiter.set_result(sequences)

        def failed(error: Exception) -> None:
            if not waiter.done():
                waiter.set_exception(error)

        self._read(model, items, done, failed, options)
        return await waiter

    async def read_and_compute(
        self, model: ServedModel, items: Sequence[Any], output: str = "vectors", **options: Any
    ) -> Any:
        """``compute`` of the ``sequences`` of inputs. The request's task runs again only when it has the results."""
        job = Job(model.engine, output)
        self._read(model, items, job.submit, job.refuse, options)
        return await self._results(job)

    def _read(
        self,
        model: ServedModel,
        items: Sequence[Any],
        done: Callable[[list[Tokens]], None],
        failed: Callable[[Exception], None],
        options: dict[str, Any],
    ) -> None:
        begun, only = time.perf_counter(), self.server.admission.requests == 1

        def check(sequences: list[Tokens] | Exception) -> None:
            try:
                if isinstance(sequences, Exception):
                    raise sequences
                done(self.count_tokens(sequences, characters_of(items), time.perf_counter() - begun))
            except Exception as error:
                failed(error)

        self.server.tokenization.add(model.reader, items, check, only=only, **options)

    async def tokenize(self, read: Callable[[], list[Tokens]], characters: int) -> list[Tokens]:
        """The sequences that ``read`` returns, which is called in the pool."""
        begun = time.perf_counter()
        return self.count_tokens(await self.in_pool(read), characters, time.perf_counter() - begun)

    def count_tokens(self, sequences: list[Tokens], characters: int, seconds: float) -> list[Tokens]:
        """Checks the number of tokens, and counts them."""
        lengths = [len(sequence.ids) for sequence in sequences]
        self.tokenization += seconds
        self.characters += characters
        self.tokens += sum(lengths)
        self.server.metrics.read(lengths)
        self.server.limits.check_tokens(self.tokens)
        return sequences

    async def compute(self, model: ServedModel, sequences: Sequence[Tokens], output: str = "vectors") -> Any:
        """The results of sequences, in the form of ``Session.encode``."""
        job = Job(model.engine, output)
        job.submit(sequences)
        return await self._results(job)

    async def _results(self, job: Job) -> Any:
        self._job = job
        self.server.in_flight.add(self)
        try:
            result = await job.waiter
        except asyncio.CancelledError:
            job.cancel()
            raise
        finally:
            self.server.in_flight.discard(self)
            if self._watch is not None:
                self._watch.cancel()
        self.queue += job.queue_seconds
        self.inference += job.inference_seconds
        return result

    def look(self, now: float) -> None:
        """Ends the computation if it is late, or if the client has disconnected."""
        limits, seconds, job = self.server.limits, now - self.begun, self._job
        if job is None or job.waiter.done():
            return
        if seconds > limits.request_timeout:
            job.refuse(errors.late(limits.request_timeout))
        elif self._watch is None or self._watch.cancelled():
            self._watch = asyncio.ensure_future(self.disconnection())
        elif self._watch.done():
            job.refuse(errors.Disconnected())

    async def disconnection(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def cancel(self) -> None:
        if self._job is not None:
            self._job.cancel()

    # ---- the answer --------------------------------------------------------------------------------------------------

    def answer(self, content: Any) -> Answer:
        """The answer to a request that was computed, with TEI's headers."""
        seconds = time.perf_counter() - self.begun
        durations = (seconds, self.tokenization, self.queue, self.inference)
        self.server.metrics.answered(self.method, durations, self.texts, self.tokens)
        total = b"%.0f" % (seconds * 1e3)
        headers = [
            (b"x-compute-type", b"fasttfm"),
            (b"x-compute-time", total),
            (b"x-compute-characters", b"%d" % self.characters),
            (b"x-compute-tokens", b"%d" % self.tokens),
            (b"x-total-time", total),
            (b"x-tokenization-time", b"%.0f" % (self.tokenization * 1e3)),
            (b"x-queue-time", b"%.0f" % (self.queue * 1e3)),
            (b"x-inference-time", b"%.0f" % (self.inference * 1e3)),
        ]
        return json_answer(content, headers=headers)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Vectors divided by their L2 norm; a vector of zeros stays zero."""
    return vectors / np.maximum(np.sqrt((vectors * vectors).sum(-1, keepdims=True)), 1e-12)


def shortened(model: ServedModel, vectors: np.ndarray, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """The first ``dimensions`` elements of vectors, normalized afterwards."""
    if dimensions is not None:
        width = vectors.shape[-1]
        if not 1 <= dimensions <= width:
            raise errors.invalid("dimensions", f"a whole number from 1 to {model.name}'s {width}", dimensions)
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
    return unit_vectors(vectors) if normalize else vectors
