"""Fields of request bodies: one declaration checks a body and describes it in the OpenAPI document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fasttfm.serve import errors

REQUIRED: Any = object()
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class Field:
    """A field of a body.

    Args:
        expected: What error messages and the OpenAPI document call the type.
        read: Returns the value as handlers use it; raises ValueError or returns None where it has another type.
        schema: JSON schema.
        default: The value where the field is absent or null; a field without a default must be present.
    """

    expected: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any]
    default: Any = REQUIRED
    about: str = ""


class Body:
    """The fields of a body. Other fields are ignored, as the originals do."""

    def __init__(self, **fields: Field) -> None:
        self.fields = fields

    def parse(self, body: Any) -> dict[str, Any]:
        """The values of all fields; raises RequestError."""
        if not isinstance(body, dict):
            raise errors.invalid("body", "a JSON object", body)
        values = {}
        for name, field in self.fields.items():
            value = body.get(name)
            if value is None:
                if field.default is REQUIRED:
                    missing = "null" if name in body else "none"
                    message = (
                        f"Input validation error: missing field `{name}`: expected {field.expected}, got {missing}"
                    )
                    raise errors.RequestError(422, "Validation", message, param=name)
                values[name] = field.default
                continue
            read = field.read(value)
            if read is None:
                raise errors.invalid(name, field.expected, value)
            values[name] = read
        return values

    def schema(self) -> dict[str, Any]:
        properties = {}
        for name, field in self.fields.items():
            properties[name] = {**field.schema, "description": field.about or field.expected}
            if field.default not in (REQUIRED, None):
                properties[name]["default"] = field.default
        required = [name for name, field in self.fields.items() if field.default is REQUIRED]
        return {"type": "object", "properties": properties, "required": required}


# ---- types -----------------------------------------------------------------------------------------------------------


def text(default: Any = REQUIRED, about: str = "") -> Field:
    return Field(
        "a string", lambda value: value if isinstance(value, str) else None, {"type": "string"}, default, about
    )


def boolean(default: Any = REQUIRED, about: str = "") -> Field:
    return Field(
        "true or false", lambda value: value if isinstance(value, bool) else None, {"type": "boolean"}, default, about
    )


def integer(low: int, high: int, default: Any = REQUIRED, about: str = "") -> Field:
    def read(value: Any) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high else None

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Field(f"a whole number from {low} to {high}", read, schema, default, about)


def number(low: float, high: float, default: Any = REQUIRED, about: str = "") -> Field:
    def read(value: Any) -> float | None:
        known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if known and low <= value <= high else None

    schema = {"type": "number", "minimum": low, "maximum": high}
    return Field(f"a number from {low:g} to {high:g}", read, schema, default, about)


def choice(*names: str, default: Any = REQUIRED, about: str = "") -> Field:
    """One of some words, in lower or upper case."""

    def read(value: Any) -> str | None:
        word = value.lower() if isinstance(value, str) else None
        return word if word in names else None

    return Field(f"one of {', '.join(names)}", read, {"type": "string", "enum": list(names)}, default, about)


def choices(*names: str, default: Any = REQUIRED, about: str = "") -> Field:
    """A list of some words."""

    def read(value: Any) -> list[str] | None:
        known = isinstance(value, list) and value and all(isinstance(word, str) and word in names for word in value)
        return list(dict.fromkeys(value)) if known else None

    schema = {"type": "array", "items": {"type": "string", "enum": list(names)}}
    return Field(f"an array of {', '.join(names)}", read, schema, default, about)


def unsupported(reason: str, *allowed: Any) -> Field:
    """A field of the original that is refused, unless it has one of the values that change nothing."""

    def read(value: Any) -> Any:
        return value if any(value == option and type(value) is type(option) for option in allowed) else None

    expected = f"no value other than {', '.join(map(repr, (*allowed, None)))}, because {reason}"
    return Field(expected, read, {}, None, reason)


def nested(body: Body, default: Any = REQUIRED) -> Field:
    """An object with fields of its own, whose errors name them."""
    return Field(
        "an object", lambda value: body.parse(value) if isinstance(value, dict) else None, body.schema(), default
    )


def texts(default: Any = REQUIRED, about: str = "") -> Field:
    """An array of strings; an empty one is for handlers to refuse."""

    def read(value: Any) -> list[str] | None:
        return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else None

    return Field("an array of strings", read, {"type": "array", "items": {"type": "string"}}, default, about)


class Items(NamedTuple):
    """Inputs of a request, and whether the body had a single one."""

    values: list[Any]
    single: bool


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token <= _MAX_ID for token in value)


def texts_or_ids(about: str = "") -> Field:
    """A text, a list of ids, or an array of these."""

    def read(value: Any) -> Items | None:
        if isinstance(value, str) or (_is_ids(value) and value):
            return Items([value], True)
        if isinstance(value, list) and all(isinstance(item, str) or _is_ids(item) for item in value):
            return Items(value, False)
        return None

    single = [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
    schema = {"oneOf": [*single, {"type": "array", "items": {"oneOf": single}}]}
    return Field("a string, an array of ids, or an array of these", read, schema, REQUIRED, about)


def text_or_texts(about: str = "") -> Field:
    """A text, or an array of texts."""

    def read(value: Any) -> Items | None:
        if isinstance(value, str):
            return Items([value], True)
        known = isinstance(value, list) and all(isinstance(text, str) for text in value)
        return Items(value, False) if known else None

    schema = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return Field("a string or an array of strings", read, schema, REQUIRED, about)


def texts_or_pairs(about: str = "") -> Field:
    """TEI's input of ``/predict``: a string, a pair [string, string], or a batch [[string], [string, string], ...]."""

    def sequence(value: list[Any]) -> Any:
        if not 1 <= len(value) <= 2 or not all(isinstance(text, str) for text in value):
            raise ValueError
        return value[0] if len(value) == 1 else (value[0], value[1])

    def read(value: Any) -> Items | None:
        try:
            if isinstance(value, str):
                return Items([value], True)
            if isinstance(value, list) and value and isinstance(value[0], str):
                return Items([sequence(value)], True)
            if isinstance(value, list) and all(isinstance(item, list) for item in value):
                return Items([sequence(item) for item in value], False)
        except ValueError:
            pass
        return None

    strings = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
    schema = {"oneOf": [{"type": "string"}, strings, {"type": "array", "items": strings}]}
    expected = "a string, a pair of strings or a batch [[string], [string, string], ...]"
    return Field(expected, read, schema, REQUIRED, about)
