"""``Answer``: a response whose body is complete when it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

Headers = Sequence[tuple[bytes, bytes]]

_JSON = b"application/json"


class Answer:
    """A response as ASGI sends it. It costs less than Starlette's, which converts headers of any type."""

    __slots__ = ("_content_type", "body", "headers", "status_code")

    def __init__(self, body: bytes, status_code: int = 200, headers: Headers = (), content_type: bytes = _JSON) -> None:
        self.body, self.status_code, self.headers = body, status_code, headers
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", self._content_type), (b"content-length", b"%d" % len(self.body)), *self.headers,
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def json_answer(content: Any, status_code: int = 200, headers: Headers = ()) -> Answer:
    return Answer(json_bytes(content), status_code, headers)


def json_bytes(content: Any) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
