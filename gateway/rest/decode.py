"""Requests as messages: proto3 JSON bodies, queries and paths. Pure.

Names are taken in camelCase and as in the protos; null is absent. What is unknown, given twice or of another type is
refused with its path and what is accepted: a typo must not be silence. protobuf's own parser is not used for that: its
errors do not tell paths.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from google.protobuf import json_format, struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from gateway.rest import values
from gateway.rest.routes import Route, descriptor_of, field_at, message_class
from omnicore import errors

MAX_DEPTH = 64
"""Objects and lists inside each other; protobuf's own limit is 100."""

_STRUCTS: Mapping[str, str] = {
    struct_pb2.Struct.DESCRIPTOR.full_name: "an object",
    struct_pb2.ListValue.DESCRIPTOR.full_name: "a list",
    struct_pb2.Value.DESCRIPTOR.full_name: "a JSON value",
}


def request_message(
    route: Route, path_values: Mapping[str, str], query: Iterable[tuple[str, str]], body: object
) -> Message:
    """The request of a call. ``body`` is the JSON body, None if there is none or the route takes none.

    Raises ``InvalidRequestError``.
    """
    message = message_class(route.request)()
    if route.body == "*" and body is not None:
        read_object(message, body, "")
    elif route.body and body is not None:
        field = route.request.fields_by_name[route.body]
        set_field(message, field, body, route.body, 1)
    pairs = list(query)
    if route.body == "*" and pairs:
        raise errors.InvalidRequestError.field(
            pairs[0][0], "this method takes no query: its fields belong in the body", reason="UNKNOWN_FIELD"
        )
    read_query(message, pairs, {*path_values, *([route.body] if route.body else [])})
    for path, text in path_values.items():
        _set_path_value(message, path, text)
    return message


def read_object(message: Message, value: object, path: str, depth: int = 1) -> None:
    """Fill ``message`` from a JSON object that stands at ``path``. Raises ``InvalidRequestError``."""
    if not isinstance(value, dict):
        raise values.refuse(path or "body", "an object", value)
    if depth > MAX_DEPTH:
        raise errors.InvalidRequestError.field(path, f"nested deeper than {MAX_DEPTH}")
    seen: dict[str, str] = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else key
        field = field_named(descriptor_of(message), key, where)
        if field.name in seen:
            raise errors.InvalidRequestError.field(where, f"given twice: {seen[field.name]!r} is the same field")
        seen[field.name] = key
        if item is None and not _takes_null(field):
            continue
        set_field(message, field, item, where, depth)


def set_field(message: Message, field: FieldDescriptor, value: object, path: str, depth: int) -> None:
    """Set one field from JSON. Raises ``InvalidRequestError``."""
    _check_oneof(message, field, path)
    if _is_map(field):
        _read_map(message, field, value, path, depth)
        return
    if not field.is_repeated:
        _put(message, field, value, path, depth)
        return
    if not isinstance(value, list):
        raise values.refuse(path, "a list", value)
    items = getattr(message, field.name)
    for index, item in enumerate(value):
        _append(items, field, item, f"{path}[{index}]", depth)


def read_query(message: Message, query: Iterable[tuple[str, str]], bound: Collection[str]) -> None:
    """Set fields from query parameters; ``bound`` are the proto paths that something else gives.

    Raises ``InvalidRequestError``.
    """
    seen: set[str] = set()
    for name, text in query:
        target, field, path = _query_field(message, name)
        if any(path == other or path.startswith(other + ".") for other in bound):
            raise errors.InvalidRequestError.field(name, "the path or the body gives this field already")
        if field.is_repeated:
            _append(getattr(target, field.name), field, text, name, 1)
            continue
        if path in seen:
            raise errors.InvalidRequestError.field(name, "given twice; it takes one value")
        seen.add(path)
        _check_oneof(target, field, name)
        _put(target, field, text, name, 1)


def field_named(message: Descriptor, name: str, path: str) -> FieldDescriptor:
    """The field of that name, in camelCase or as in the proto. Raises ``InvalidRequestError`` with the nearest name."""
    field = message.fields_by_name.get(name) or message.fields_by_camelcase_name.get(name)
    if field is not None:
        return field
    known = [field.json_name for field in message.fields]
    near = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known) or 'none'}"
    raise errors.InvalidRequestError.field(path, f"unknown field; {hint}", reason="UNKNOWN_FIELD")


def _query_field(message: Message, name: str) -> tuple[Message, FieldDescriptor, str]:
    """What a parameter's name leads to: the message that has the field, the field, its path in proto names."""
    *parents, last = name.split(".")
    path: list[str] = []
    target = message
    for parent in parents:
        field = field_named(descriptor_of(target), parent, name)
        if field.message_type is None or field.is_repeated or values.is_scalar(field.message_type):
            raise errors.InvalidRequestError.field(name, f"{parent!r} has no fields of its own")
        _check_oneof(target, field, name, besides=True)
        path.append(field.name)
        target = getattr(target, field.name)
    field = field_named(descriptor_of(target), last, name)
    path.append(field.name)
    if field.message_type is not None and not values.is_scalar(field.message_type):
        inner = [] if field.message_type.full_name in _STRUCTS else field.message_type.fields
        hint = f"; give its fields, such as {name}.{inner[0].json_name}" if inner and not field.is_repeated else ""
        raise errors.InvalidRequestError.field(name, f"is no single value and cannot stand in a query{hint}")
    return target, field, ".".join(path)


def _set_path_value(message: Message, path: str, text: str) -> None:
    *parents, _ = path.split(".")
    field = field_at(descriptor_of(message), path)
    target = message
    for parent in parents:
        target = getattr(target, parent)
    value = values.scalar(field, text, path)
    # A body may repeat what the path says, but not contradict it.
    given = getattr(target, field.name)
    is_given = target.HasField(field.name) if field.has_presence else given != field.default_value
    if is_given and given != value:
        raise errors.InvalidRequestError.field(path, "differs from the one in the path")
    setattr(target, field.name, value)


def _put(message: Message, field: FieldDescriptor, value: object, path: str, depth: int) -> None:
    if field.message_type is None:
        setattr(message, field.name, values.scalar(field, value, path))
        return
    target: Message = getattr(message, field.name)
    target.SetInParent()
    _fill(target, value, path, depth)


def _append(items: Any, field: FieldDescriptor, value: object, path: str, depth: int) -> None:
    if field.message_type is None:
        items.append(values.scalar(field, value, path))
        return
    _fill(items.add(), value, path, depth)


def _fill(target: Message, value: object, path: str, depth: int) -> None:
    descriptor = descriptor_of(target)
    if values.is_scalar(descriptor):
        target.CopyFrom(values.scalar_message(descriptor, value, path))
    elif descriptor.full_name in _STRUCTS:
        _check_depth(value, path, depth)
        try:
            json_format.ParseDict(cast("dict[str, Any]", value), target)
        except (json_format.ParseError, TypeError, ValueError):
            raise values.refuse(path, _STRUCTS[descriptor.full_name], value) from None
    else:
        read_object(target, value, path, depth + 1)


def _read_map(message: Message, field: FieldDescriptor, value: object, path: str, depth: int) -> None:
    if not isinstance(value, dict):
        raise values.refuse(path, "an object", value)
    assert field.message_type is not None, "maps are lists of messages"
    entries = getattr(message, field.name)
    key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for text, item in value.items():
        where = f"{path}[{text!r:.60}]"
        key = values.scalar(key_field, text, where)
        if value_field.message_type is None:
            entries[key] = values.scalar(value_field, item, where)
        else:
            _fill(entries[key], item, where, depth + 1)


def _check_oneof(message: Message, field: FieldDescriptor, path: str, *, besides: bool = False) -> None:
    """Refuse a second member of a oneof; ``besides`` allows the same one again."""
    oneof = field.containing_oneof
    if oneof is None or len(oneof.fields) == 1:
        return
    held = message.WhichOneof(oneof.name)
    if held is not None and not (besides and held == field.name):
        names = ", ".join(member.json_name for member in oneof.fields)
        raise errors.InvalidRequestError.field(path, f"only one of {names} may be given; {held!r} is there already")


def _check_depth(value: object, path: str, depth: int) -> None:
    level: list[object] = [value]
    while level:
        if depth > MAX_DEPTH:
            raise errors.InvalidRequestError.field(path, f"nested deeper than {MAX_DEPTH}")
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level, depth = [item for item in inner if isinstance(item, dict | list)], depth + 1


def _is_map(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry


def _takes_null(field: FieldDescriptor) -> bool:
    return (
        field.message_type is not None
        and not field.is_repeated
        and field.message_type.full_name == struct_pb2.Value.DESCRIPTOR.full_name
    )
