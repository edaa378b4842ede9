"""The OpenAPI document of the routes, and a page that shows it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from fasttfm._version import __version__

_STATUSES = {
    "400": "The body is not JSON, or has no input.",
    "413": "More texts, tokens or bytes than a limit; the message has its name and value.",
    "422": "A field has another type or value.",
    "424": "The model has no head for the route, or the computation has failed.",
    "429": "The server is overloaded; the message has the limit and its value.",
    "503": "The models are being loaded, or a device fault ended a session, or the deadline has passed.",
}


def document(endpoints: Sequence[Any]) -> dict[str, Any]:
    """The document of the routes, which are ``app.Endpoint``."""
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        described: dict[str, Any] = {"summary": endpoint.about, "tags": [endpoint.dialect.name]}
        responses = {"200": {"description": "The answer."}}
        if endpoint.body is not None:
            content = {"application/json": {"schema": endpoint.body.schema()}}
            described["requestBody"] = {"required": True, "content": content}
            responses |= {status: {"description": about} for status, about in _STATUSES.items()}
        described["responses"] = responses
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = described
    return {"openapi": "3.1.0", "info": {"title": "fasttfm serve", "version": __version__}, "paths": paths}


def page(described: dict[str, Any]) -> bytes:
    """The document as HTML. It loads nothing from other servers."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        "<title>fasttfm serve: routes</title><link rel=stylesheet href=/page/style.css><main><h1>Routes</h1>",
        "<p><a href=/>Playground</a> · <a href=/api-doc/openapi.json>openapi.json</a></p>",
    ]
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            parts.append(f"<details class=route><summary><b>{method.upper()}</b> <code>{html.escape(path)}</code> ")
            parts.append(f"<span>{html.escape(about['summary'])}</span></summary>")
            if "requestBody" in about:
                schema = about["requestBody"]["content"]["application/json"]["schema"]
                parts.append("<table>")
                for name, field in schema["properties"].items():
                    needed = " (required)" if name in schema["required"] else ""
                    default = f"; default {json.dumps(field['default'])}" if "default" in field else ""
                    words = html.escape(f"{field['description']}{default}{needed}")
                    parts.append(f"<tr><td><code>{html.escape(name)}</code><td>{words}")
                parts.append("</table>")
            parts.append("</details>")
    return "".join([*parts, "</main>"]).encode()
