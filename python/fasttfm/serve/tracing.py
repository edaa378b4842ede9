"""Optional traces: one OpenTelemetry span for each request, where ``--otlp-endpoint`` is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_tracer: Any = None


class _NoSpan:
    def set_status(self, status: int) -> None:
        pass


class _Span:
    def __init__(self, span: Any) -> None:
        self._span = span

    def set_status(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)


_NO_SPAN = _NoSpan()


def start(endpoint: str, service: str) -> None:
    """Sends spans to a collector, as OTLP over HTTP."""
    global _tracer
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message = "--otlp-endpoint needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        raise ImportError(f"{message}: pip install both") from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    _tracer = provider.get_tracer("fasttfm.serve")


@contextlib.contextmanager
def _traced(endpoint: Any, scope: Any) -> Iterator[_Span]:
    from opentelemetry.propagate import extract

    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    route = getattr(endpoint, "path", "unknown")
    with _tracer.start_as_current_span(f"{scope['method']} {route}", context=extract(headers)) as span:
        span.set_attribute("http.request.method", scope["method"])
        span.set_attribute("http.route", route)
        yield _Span(span)


def span(endpoint: Any, scope: Any) -> Any:
    """The span of a request; without a collector, one that does nothing."""
    return contextlib.nullcontext(_NO_SPAN) if _tracer is None else _traced(endpoint, scope)
