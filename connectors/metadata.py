"""The small facts of a payload as a ``google.protobuf.Struct``.

A Struct knows one kind of number, the double: whole numbers come back as ``int`` whether they were ``2`` or ``2.0``,
and integers that a double cannot hold are refused instead of rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from google.protobuf import struct_pb2

from connectors.payload import JsonValue
from omnicore import errors

MAX_METADATA_BYTES = 64 * 1024
"""Metadata is for facts, data goes into tensors; the same bound as for inline data."""
_MAX_DEPTH = 16  # a Struct level is two messages deep, and protobuf parsers stop at 100
_MAX_EXACT_INT = 2**53


def to_struct(metadata: Mapping[str, JsonValue]) -> struct_pb2.Struct:
    """Encode. Raises ``InvalidRequestError`` that names the path of what is not JSON, too deep or too large."""
    struct = struct_pb2.Struct()
    for key, value in metadata.items():
        _fill(struct.fields[_key(key, "metadata")], value, f"metadata.{key}", 1)
    if struct.ByteSize() > MAX_METADATA_BYTES:
        raise errors.InvalidRequestError.field(
            "metadata", f"{struct.ByteSize()} bytes, at most {MAX_METADATA_BYTES} fit; put data into tensors"
        )
    return struct


def from_struct(struct: struct_pb2.Struct) -> dict[str, JsonValue]:
    """Decode; unknown kinds of value become None."""
    return {key: _value(value) for key, value in struct.fields.items()}


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise errors.InvalidRequestError.field(path, f"keys must be strings, got {key!r}")
    check_unicode(key, path)
    return key


def check_unicode(text: str, path: str) -> None:
    """Raises ``InvalidRequestError`` for text that cannot be sent: half of a surrogate pair is in Python's strings, not
    in protobuf's."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidRequestError.field(path, f"is not valid Unicode: {error}") from None


def _fill(target: struct_pb2.Value, value: object, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise errors.InvalidRequestError.field(path, f"nested deeper than {_MAX_DEPTH} levels")
    if value is None:
        target.null_value = struct_pb2.NULL_VALUE
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, str):
        check_unicode(value, path)
        target.string_value = value
    elif isinstance(value, int):
        if abs(value) > _MAX_EXACT_INT:
            raise errors.InvalidRequestError.field(path, f"integers go up to 2**53, got {value}")
        target.number_value = value
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise errors.InvalidRequestError.field(path, f"must be a finite number, got {value}")
        target.number_value = value
    elif isinstance(value, Mapping):
        target.struct_value.SetInParent()
        for key, item in value.items():
            _fill(target.struct_value.fields[_key(key, path)], item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        target.list_value.SetInParent()
        for index, item in enumerate(value):
            _fill(target.list_value.values.add(), item, f"{path}[{index}]", depth + 1)
    else:
        raise errors.InvalidRequestError.field(
            path, f"must be JSON (text, number, bool, null, list, object), got {type(value).__name__}"
        )


def _value(value: struct_pb2.Value) -> JsonValue:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() and abs(number) <= _MAX_EXACT_INT else number
    if kind == "string_value":
        return value.string_value
    if kind == "bool_value":
        return value.bool_value
    if kind == "struct_value":
        return from_struct(value.struct_value)
    if kind == "list_value":
        return [_value(item) for item in value.list_value.values]
    return None
