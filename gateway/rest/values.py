"""Single values of proto3 JSON: scalars, enums and the well-known types that are written as scalars. Pure.

The same readers serve bodies and queries, since proto3 JSON takes numbers as text too. Every refusal names the path and
what is accepted.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf import duration_pb2, field_mask_pb2, message_factory, timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from omnicore import errors

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_DURATION = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,9})?s")
_FLOAT_MAX: Final = 3.4028234663852886e38
_SPECIAL: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_RANGES: Final[Mapping[int, tuple[int, int]]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_WRAPPERS: Final = frozenset(
    message.DESCRIPTOR.full_name
    for message in (
        wrappers_pb2.BoolValue, wrappers_pb2.BytesValue, wrappers_pb2.DoubleValue, wrappers_pb2.FloatValue,
        wrappers_pb2.Int32Value, wrappers_pb2.Int64Value, wrappers_pb2.StringValue, wrappers_pb2.UInt32Value,
        wrappers_pb2.UInt64Value,
    )
)  # fmt: skip


def kind(value: object) -> str:
    """What a JSON value is, for messages; never the value itself, which may be long or private."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value!r:.40}"
    if isinstance(value, str):
        return f"{value!r:.60}" if len(value) <= 40 else f"a text of {len(value)} characters"
    return {dict: "an object", list: "a list", type(None): "null"}.get(type(value), type(value).__name__)


def refuse(path: str, accepted: str, value: object) -> errors.InvalidRequestError:
    """The error for a value that is not what the field takes."""
    return errors.InvalidRequestError.field(path, f"must be {accepted}, got {kind(value)}")


def is_scalar(message: Descriptor) -> bool:
    """Whether this message is written as a scalar, and so may stand in a query."""
    return message.full_name in _WRAPPERS or message.full_name in _WELL_KNOWN


def scalar_message(message: Descriptor, value: object, path: str) -> Message:
    """A message that is written as a scalar. Raises ``InvalidRequestError``."""
    read = _WELL_KNOWN.get(message.full_name)
    if read is not None:
        return read(value, path)
    wrapper: Message = message_factory.GetMessageClass(message)()
    field = message.fields_by_name["value"]
    setattr(wrapper, field.name, scalar(field, value, path))
    return wrapper


def scalar(field: FieldDescriptor, value: object, path: str) -> Any:
    """A value of a field that is no message. Raises ``InvalidRequestError``."""
    cpp_type = field.cpp_type
    if cpp_type in _RANGES:
        return _integer(*_RANGES[cpp_type], value, path)
    if cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if isinstance(value, str) and value in ("true", "false"):
            return value == "true"
        if not isinstance(value, bool):
            raise refuse(path, "true or false", value)
        return value
    if cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _number(value, path, limit=_FLOAT_MAX if cpp_type == FieldDescriptor.CPPTYPE_FLOAT else None)
    if field.enum_type is not None:
        return _enum(field.enum_type, value, path)
    if not isinstance(value, str):
        raise refuse(path, "base64 text" if field.type == FieldDescriptor.TYPE_BYTES else "a string", value)
    return _bytes(value, path) if field.type == FieldDescriptor.TYPE_BYTES else value


def _integer(low: int, high: int, value: object, path: str) -> int:
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and _INTEGER.fullmatch(value)):
        number = int(value)
    if number is None or not low <= number <= high:
        raise refuse(path, f"a whole number from {low} to {high}", value)
    return number


def _number(value: object, path: str, *, limit: float | None) -> float:
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        number = _SPECIAL.get(value)
        if number is None and _NUMBER.fullmatch(value):
            number = float(value)
            if math.isinf(number):
                number = None
    if number is None or (limit is not None and math.isfinite(number) and abs(number) > limit):
        raise refuse(path, "a number", value)
    return number


def _enum(enum: EnumDescriptor, value: object, path: str) -> int:
    if isinstance(value, str) and (found := enum.values_by_name.get(value)) is not None:
        return found.number
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value in enum.values_by_number:
        return value
    raise refuse(path, f"one of: {', '.join(v.name for v in enum.values)}", value)


def _bytes(value: str, path: str) -> bytes:
    # Both alphabets, with or without padding.
    text = value.translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequestError.field(path, "must be base64 text") from None


def _duration(value: object, path: str) -> Message:
    duration = duration_pb2.Duration()
    accepted = 'a duration in seconds, such as "1.5s"'
    if not isinstance(value, str) or not _DURATION.fullmatch(value):
        raise refuse(path, accepted, value)
    try:
        duration.FromJsonString(value)
    except ValueError:
        raise refuse(path, accepted, value) from None
    return duration


def _timestamp(value: object, path: str) -> Message:
    timestamp = timestamp_pb2.Timestamp()
    accepted = 'a time, such as "2026-01-31T12:00:00Z"'
    if not isinstance(value, str) or not value.isascii():
        raise refuse(path, accepted, value)
    try:
        timestamp.FromJsonString(value)
    except (ValueError, OverflowError):
        raise refuse(path, accepted, value) from None
    return timestamp


def _field_mask(value: object, path: str) -> Message:
    mask = field_mask_pb2.FieldMask()
    accepted = "names of fields in camelCase, separated by commas"
    if not isinstance(value, str):
        raise refuse(path, accepted, value)
    try:
        mask.FromJsonString(value)
    except ValueError:
        raise refuse(path, accepted, value) from None
    return mask


_WELL_KNOWN: Final[Mapping[str, Callable[[object, str], Message]]] = {
    duration_pb2.Duration.DESCRIPTOR.full_name: _duration,
    timestamp_pb2.Timestamp.DESCRIPTOR.full_name: _timestamp,
    field_mask_pb2.FieldMask.DESCRIPTOR.full_name: _field_mask,
}
