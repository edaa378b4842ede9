"""``RequestError``: a request that is refused, and its body in each dialect.

Status codes are those of text-embeddings-inference (TEI): 400 for a body that is not JSON or has no input, 413 for more
than a limit, 422 for a field of another type, 424 for a model without the head or a failed computation, 429 for an
overloaded server, 503 for one that is not ready.
"""

from __future__ import annotations

from typing import Any

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: The HTTP status.
        kind: TEI's ``error_type``: Unhealthy, Backend, Overloaded, Validation, Tokenizer or Empty.
        message: What is wrong, in words; of a limit, its name and value.
        param: The field of the body that is wrong.
        code: OpenAI's ``code``.
        cause: The ``err`` label of ``te_request_failure``.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        cause: str = "validation",
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.param, self.code, self.cause = param, code, cause


class Disconnected(Exception):
    """The client has closed the connection and reads no answer."""


def malformed(message: str) -> RequestError:
    return RequestError(400, "Validation", message)


def empty(name: str) -> RequestError:
    return RequestError(400, "Empty", f"Input validation error: `{name}` cannot be empty", param=name)


def invalid(name: str, expected: str, value: Any) -> RequestError:
    """A field of another type or value than expected. Texts of the client are not repeated."""
    message = f"Input validation error: `{name}`: expected {expected}, got {described(value)}"
    return RequestError(422, "Validation", message, param=name)


def too_large(limit: str, message: str, *, cause: str = "batch_size") -> RequestError:
    """More than a limit, whose option is named."""
    return RequestError(413, "Validation", f"{message} (--{limit})", cause=cause)


def too_long(max_length: int, tokens: int, name: str = "inputs") -> RequestError:
    message = f"Input validation error: `{name}` must have less than {max_length} tokens. Given: {tokens}"
    return RequestError(413, "Validation", message, param=name)


def wrong_model(message: str) -> RequestError:
    return RequestError(424, "Backend", f"Backend error: {message}", cause="model_type")


def failed(error: BaseException) -> RequestError:
    """A computation that has failed. The message has the error's first line only."""
    line = str(error).strip().partition("\n")[0]
    return RequestError(424, "Backend", f"Backend error: {type(error).__name__}: {line}", cause="inference")


def overloaded(limit: str, value: int, got: str) -> RequestError:
    return RequestError(
        429, "Overloaded", f"Model is overloaded: {got}, the maximum is {value} (--{limit})", cause="overloaded"
    )


def late(seconds: float) -> RequestError:
    message = f"the request was not computed within {seconds:g} seconds (--request-timeout)"
    return RequestError(503, "Overloaded", message, cause="timeout")


def unavailable(reason: str) -> RequestError:
    return RequestError(503, "Unhealthy", reason, cause="unhealthy")


def described(value: Any) -> str:
    """A JSON value without its contents."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        text = repr(value)
        return text if len(text) <= 40 else f"a number of {len(text)} digits"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return f"an array of {len(value)}" if isinstance(value, list) else f"an object with {len(value)} keys"


# ---- bodies ----------------------------------------------------------------------------------------------------------


def tei_body(error: RequestError) -> tuple[int, dict[str, Any]]:
    return error.status, {"error": error.message, "error_type": error.kind}


def openai_body(error: RequestError) -> tuple[int, dict[str, Any]]:
    """OpenAI answers 400 where a field is wrong."""
    status = 400 if error.status == 422 else error.status
    kind = _OPENAI_TYPES.get(status, "server_error" if status in (424, 503) else "invalid_request_error")
    return status, {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def cohere_body(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Cohere's ``message`` and Jina's ``detail``; Cohere answers 400 where a field is wrong."""
    status = 400 if error.status == 422 else error.status
    return status, {"message": error.message, "detail": error.message}
