"""JSON schemas in few words, for the endpoints that are no RPCs."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """A component."""
    return {"$ref": f"#/components/schemas/{name}"}


def text(description: str = "", *accepted: str, **more: Any) -> Schema:
    """A string, perhaps one of a few."""
    return _described({"type": "string", **({"enum": list(accepted)} if accepted else {}), **more}, description)


def whole(description: str = "", low: int | None = None, high: int | None = None) -> Schema:
    """A whole number."""
    return _described({"type": "integer", **_bounds(low, high)}, description)


def number(description: str = "", low: float | None = None, high: float | None = None) -> Schema:
    """A number."""
    return _described({"type": "number", **_bounds(low, high)}, description)


def flag(description: str = "") -> Schema:
    """true or false."""
    return _described({"type": "boolean"}, description)


def several(items: Schema, description: str = "", **more: Any) -> Schema:
    """A list."""
    return _described({"type": "array", "items": items, **more}, description)


def anything(description: str = "") -> Schema:
    """Any value."""
    return _described({}, description)


def either(*schemas: Schema, description: str = "") -> Schema:
    """One of several."""
    return _described({"anyOf": list(schemas)}, description)


def given(required: str, description: str = "", /, **fields: Schema) -> Schema:
    """An object that clients send: other fields are refused. ``required`` are names, separated by blanks."""
    return {**got(required, description, **fields), "additionalProperties": False}


def got(required: str, description: str = "", /, **fields: Schema) -> Schema:
    """An object that clients get; newer servers may add fields."""
    return _described(
        {"type": "object", "properties": fields, **({"required": required.split()} if required else {})}, description
    )


def or_null(schema: Schema) -> Schema:
    """``schema``, or null."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description} if description else schema


def _bounds(low: float | None, high: float | None) -> Schema:
    return {
        **({"minimum": low} if low is not None else {}),
        **({"maximum": high} if high is not None else {}),
    }
