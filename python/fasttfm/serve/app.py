"""``Application``: finds a request's handler, checks its key, and writes errors in its dialect."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fasttfm.serve import cohere, errors, fields, heads, openai, openapi, tei, tracing
from fasttfm.serve.answers import Answer, json_answer
from fasttfm.serve.calls import Call, Server
from fasttfm.serve.metrics import Metrics

_LOG = logging.getLogger("fasttfm.serve")
_HTML = b"text/html; charset=utf-8"
_PAGE_TYPES = {
    "index.html": _HTML,
    "app.js": b"text/javascript; charset=utf-8",
    "style.css": b"text/css; charset=utf-8",
}
_MAX_LOGGED = 200  # characters of a path
_ERROR_HEADERS = {
    401: [(b"www-authenticate", b"Bearer")],
    429: [(b"retry-after", b"1")],
    503: [(b"retry-after", b"1")],
}


@dataclass(frozen=True)
class Dialect:
    """Whose bodies a route has."""

    name: str
    body: Callable[[errors.RequestError], tuple[int, dict[str, Any]]]


TEI = Dialect("TEI", errors.tei_body)
OPENAI = Dialect("OpenAI", errors.openai_body)
COHERE = Dialect("Cohere, Jina", errors.cohere_body)
HUGGING_FACE = Dialect("Hugging Face", errors.tei_body)


@dataclass(frozen=True)
class Endpoint:
    """A route.

    Args:
        public: Whether it needs no key.
    """

    method: str
    path: str
    handler: Callable[[Call], Any]
    dialect: Dialect
    about: str
    body: fields.Body | None = None
    public: bool = False


def default_route(call: Call) -> Any:
    """``POST /``: the route of the first model's head, as TEI and Hugging Face's clients use it."""
    model = next(iter(call.server.ready().models.values()))
    inputs = call.body.get("inputs") if isinstance(call.body, dict) else None
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        return tei.similarity(call)
    order = {
        "rerank": tei.rerank,
        "label_tokens": heads.label_tokens,
        "predict": tei.predict,
        "answer": heads.answer,
        "fill_mask": heads.fill_mask,
        "embed": tei.embed,
        "complete": openai.completions,
    }
    return next(handler for ability, handler in order.items() if ability in model.abilities)(call)


async def health(call: Call) -> Answer:
    reason = _reason(await call.server.states())
    if reason is None:
        return Answer(b"", content_type=b"text/plain")
    raise errors.unavailable(f"unhealthy: {reason}")


def _reason(states: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a process cannot compute; None if all can."""
    return next((state["reason"] for state in states if state["reason"] is not None), None)


async def metrics(call: Call) -> Answer:
    states = await call.server.states()
    content = Metrics.total([state["metrics"] for state in states if "metrics" in state]).exposition()
    return Answer(content, content_type=b"text/plain; version=0.0.4; charset=utf-8")


async def stats(call: Call) -> Answer:
    """What the page shows."""
    server = call.server
    loaded = [] if server.loaded is None else list(server.loaded.models.values())
    states = await server.states()
    answered = [state for state in states if "metrics" in state]
    reason = _reason(states)
    return json_answer(
        {
            "healthy": reason is None,
            "reason": reason,
            "models": [
                {
                    "name": model.name,
                    "kind": next(iter(model.kind())),
                    "head": model.head.value,
                    "abilities": sorted(model.abilities),
                    "dtype": model.dtype,
                    "devices": [str(device) for device in model.devices],
                    "max_length": model.max_length,
                    "mask": _mask(model),
                }
                for model in loaded
            ],
            "processes": len(states),
            "requests": sum(state["requests"] for state in answered),
            "waiting": sum(state["waiting"] for state in answered),
            **Metrics.total([state["metrics"] for state in answered]).recent(),
        }
    )


def _mask(model: Any) -> str | None:
    tokenizer = model.reader.tokenizer
    return None if tokenizer.special.mask is None else tokenizer.token(tokenizer.special.mask)


def _page_file(name: str) -> Callable[[Call], Answer]:
    content = (resources.files("fasttfm.serve") / "page" / name).read_bytes()
    return lambda call: Answer(content, 200, [(b"cache-control", b"no-cache")], _PAGE_TYPES[name])


def endpoints() -> list[Endpoint]:
    """All routes."""
    routes = [
        Endpoint("POST", "/embed", tei.embed, TEI, "Vectors of texts.", tei.EMBED),
        Endpoint("POST", "/embed_all", tei.embed_all, TEI, "Hidden states of all tokens.", tei.EMBED_ALL),
        Endpoint("POST", "/embed_sparse", tei.embed_sparse, TEI, "SPLADE's sparse vectors.", tei.EMBED_ALL),
        Endpoint("POST", "/predict", tei.predict, TEI, "Labels of texts, pairs or tokens.", tei.PREDICT),
        Endpoint("POST", "/rerank", tei.rerank, TEI, "Texts by their relevance to a query.", tei.RERANK),
        Endpoint("POST", "/similarity", tei.similarity, TEI, "Cosines of a sentence and others.", tei.SIMILARITY),
        Endpoint("POST", "/tokenize", tei.tokenize, TEI, "Tokens with their offsets.", tei.TOKENIZE),
        Endpoint("POST", "/decode", tei.decode, TEI, "Texts of ids.", tei.DECODE),
        Endpoint("GET", "/info", tei.info, TEI, "The models and the limits."),
        Endpoint("POST", "/v1/embeddings", openai.embeddings, OPENAI, "Vectors of texts.", openai.EMBEDDINGS),
        Endpoint("POST", "/embeddings", openai.embeddings, OPENAI, "Vectors of texts.", openai.EMBEDDINGS),
        Endpoint("POST", "/v1/completions", openai.completions, OPENAI, "Continued prompts.", openai.COMPLETIONS),
        Endpoint("GET", "/v1/models", openai.models, OPENAI, "The models."),
        Endpoint("GET", "/v1/models/{name}", openai.model, OPENAI, "One model."),
        Endpoint("POST", "/v1/rerank", cohere.rerank, COHERE, "Documents by relevance.", cohere.RERANK),
        Endpoint("POST", "/v2/rerank", cohere.rerank, COHERE, "Documents by relevance.", cohere.RERANK),
        Endpoint("POST", "/v2/embed", cohere.embed, COHERE, "Vectors of texts.", cohere.EMBED),
        Endpoint(
            "POST", "/question-answering", heads.answer, HUGGING_FACE, "Spans that answer questions.", heads.ANSWER
        ),
        Endpoint("POST", "/fill-mask", heads.fill_mask, HUGGING_FACE, "Guesses for masks.", heads.FILL_MASK),
        Endpoint("POST", "/token-classification", heads.label_tokens, HUGGING_FACE, "Entities.", heads.LABEL_TOKENS),
        Endpoint("POST", "/", default_route, TEI, "The route of the first model's head.", tei.EMBED),
        Endpoint("POST", "/invocations", default_route, TEI, "The route of the first model's head.", tei.EMBED),
        Endpoint("GET", "/health", health, TEI, "200 once the models compute, otherwise 503.", public=True),
        Endpoint("GET", "/ping", health, TEI, "The same.", public=True),
        Endpoint("GET", "/metrics", metrics, TEI, "Metrics for Prometheus.", public=True),
        Endpoint("GET", "/stats", stats, TEI, "The numbers of the page.", public=True),
        Endpoint("GET", "/", _page_file("index.html"), TEI, "The page.", public=True),
    ]
    described = openapi.document(routes)
    shown = openapi.page(described)
    routes += [
        Endpoint("GET", "/docs", lambda call: Answer(shown, content_type=_HTML), TEI, "This list.", public=True),
        *(Endpoint("GET", f"/page/{name}", _page_file(name), TEI, "", public=True) for name in _PAGE_TYPES),
        *(
            Endpoint("GET", path, lambda call: json_answer(described), TEI, "OpenAPI.", public=True)
            for path in ("/api-doc/openapi.json", "/openapi.json")
        ),
    ]
    return routes


class Application:
    """Handles requests.

    Args:
        keys: The API keys, any of which a request must have; none for a server that answers everybody.
    """

    def __init__(self, server: Server, keys: Sequence[str] = (), *, access_log: bool = False) -> None:
        self.server, self.keys, self._access_log = server, [key.encode() for key in keys], access_log
        self._endpoints = {(endpoint.method, endpoint.path): endpoint for endpoint in endpoints()}
        self._paths = {endpoint.path for endpoint in self._endpoints.values()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        call = Call(self.server, scope, receive)
        endpoint = self._endpoints.get((scope["method"], scope["path"])) or self._other(scope)
        with tracing.span(endpoint, scope) as span:
            response = await self._respond(call, endpoint)
            status = 499 if response is None else response.status_code
            span.set_status(status)
        if self._access_log:
            _LOG.info("%s %s %d", scope["method"], ascii(scope["path"])[:_MAX_LOGGED], status)
        if response is not None:
            await response(scope, receive, send)

    def _other(self, scope: Scope) -> Endpoint | errors.RequestError:
        """A route with a parameter, or the error of an unknown one."""
        method, path = scope["method"], scope["path"]
        if method == "HEAD" and ("GET", path) in self._endpoints:
            return self._endpoints["GET", path]
        if path.startswith("/v1/models/"):
            path = "/v1/models/{name}"
        if (method, path) in self._endpoints:
            return self._endpoints[method, path]
        if path in self._paths:
            allowed = ", ".join(sorted(method for method, known in self._endpoints if known == path))
            return errors.RequestError(405, "Validation", f"Method not allowed: expected {allowed}, got {method[:20]}")
        return errors.RequestError(404, "Validation", "There is no such route; /docs lists the routes")

    async def _respond(self, call: Call, endpoint: Endpoint | errors.RequestError) -> Any:
        """The response, None for a client that has gone."""
        dialect = _dialect_of(call.path) if isinstance(endpoint, errors.RequestError) else endpoint.dialect
        admitted = False
        try:
            if isinstance(endpoint, errors.RequestError):
                raise endpoint
            if not endpoint.public:
                self._check_key(call)
            if endpoint.body is not None:
                await call.read_body()  # before it counts as a request: slow clients take no place from others
                self.server.admission.enter_request()
                admitted = True
                if endpoint.path == "/rerank" and isinstance(call.body, dict) and "documents" in call.body:
                    dialect = COHERE
            answer = endpoint.handler(call)
            return await answer if inspect.iscoroutine(answer) else answer
        except errors.Disconnected:
            call.cancel()
            self.server.metrics.count("te_request_failure", "err", "disconnected")
            return None
        except errors.RequestError as error:
            if isinstance(endpoint, errors.RequestError) or not endpoint.public:
                self.server.metrics.count("te_request_failure", "err", error.cause)
            return _error_answer(error, dialect)
        except asyncio.CancelledError:
            call.cancel()
            raise
        except Exception as error:
            # An error's message may repeat a text: only its type and place are logged.
            place = "".join(traceback.format_tb(error.__traceback__))
            _LOG.error("%s in a request\n%s", type(error).__name__, place)
            self.server.metrics.count("te_request_failure", "err", "internal")
            message = f"Backend error: {type(error).__name__}"
            return _error_answer(errors.RequestError(424, "Backend", message, cause="internal"), dialect)
        finally:
            if admitted:
                self.server.admission.leave_request()

    def _check_key(self, call: Call) -> None:
        """Compares with every key, in a time that does not depend on where they differ."""
        if not self.keys:
            return
        scheme, _, key = call.headers.get(b"authorization", b"").partition(b" ")
        known = False
        for valid in self.keys:
            known |= hmac.compare_digest(key.strip(), valid)
        if not known or scheme.lower() != b"bearer":
            message = "Incorrect API key: expected the header `Authorization: Bearer` with one of the server's keys"
            raise errors.RequestError(401, "Validation", message, code="invalid_api_key", cause="unauthorized")


def _dialect_of(path: str) -> Dialect:
    if path.startswith(("/v1/rerank", "/v2/")):
        return COHERE
    return OPENAI if path.startswith("/v1/") else TEI


def _error_answer(error: errors.RequestError, dialect: Dialect) -> Answer:
    status, body = dialect.body(error)
    return json_answer(body, status, _ERROR_HEADERS.get(status, ()))


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def application(
    server: Server, keys: Sequence[str] = (), *, origins: Sequence[str] = ("*",), access_log: bool = False
) -> tuple[Application, ASGIApp]:
    """The application, and one that passes requests of other origins' pages, which have an ``Origin``, through the
    middleware for them."""
    inner = Application(server, keys, access_log=access_log)
    if not origins:
        return inner, inner
    outer = CORSMiddleware(inner, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])

    def choose(scope: Scope, receive: Receive, send: Send) -> Any:
        from_page = scope["type"] == "http" and b"origin" in dict(scope["headers"])
        return (outer if from_page else inner)(scope, receive, send)

    return inner, choose


def add_gauges(server: Server) -> None:
    """The queue, the requests in flight, captured graphs and the memory of GPUs."""
    gauges = server.metrics.gauges
    gauges["te_queue_size"] = ("Sequences in the queue.", lambda: iter([({}, float(server.admission.waiting))]))
    gauges["fasttfm_requests_in_flight"] = (
        "Requests in flight.",
        lambda: iter([({}, float(server.admission.requests))]),
    )

    def sessions() -> list[tuple[str, Any]]:
        if server.loaded is None:
            return []
        return [(model.name, session) for model in server.loaded.models.values() for session in model.sessions]

    for kind, about in (("captured", "CUDA graphs captured."), ("replayed", "CUDA graphs replayed.")):
        gauges[f"fasttfm_graphs_{kind}"] = (
            about,
            lambda kind=kind: iter(  # type: ignore[misc]
                ({"model": name, "device": str(session.device)}, float(getattr(session.graph_counts, kind)))
                for name, session in sessions()
            ),
        )
    for kind, about in (("allocated", "Bytes of tensors."), ("reserved", "Bytes that torch has reserved.")):
        gauges[f"fasttfm_gpu_memory_{kind}_bytes"] = (
            about,
            lambda kind=kind: iter(  # type: ignore[misc]
                ({"device": f"cuda:{index}"}, float(getattr(torch.cuda, f"memory_{kind}")(index)))
                for index in range(torch.cuda.device_count())
                if torch.cuda.is_available() and torch.cuda.is_initialized()
            ),
        )
