"""JSON schemas of messages, for the OpenAPI document. Pure.

A message has up to two schemas: as it is written in responses, where fields without presence are always there, and as
it is taken in requests, where nothing but what the protos call "Required." must be there and unknown fields are
refused. A message that goes both ways has "Input" added to the name of the latter.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import orjson
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor

Schema = dict[str, Any]

_COMPONENTS = "#/components/schemas/"
_INTEGERS: Final[Mapping[int, Schema]] = {
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer", "format": "int32"},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
_LONG: Final[Mapping[int, Schema]] = {
    FieldDescriptor.CPPTYPE_INT64: {"type": "string", "format": "int64", "pattern": "^-?[0-9]{1,19}$"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "string", "format": "uint64", "pattern": "^[0-9]{1,20}$"},
}
_DOUBLE: Final[Schema] = {"type": "number"}
_BYTES: Final[Schema] = {"type": "string", "contentEncoding": "base64", "pattern": "^[A-Za-z0-9+/]*={0,2}$"}
_ANY: Final[Schema] = {"type": "object", "properties": {"@type": {"type": "string"}}, "required": ["@type"]}
_WELL_KNOWN: Final[Mapping[str, Schema]] = {
    "google.protobuf.Duration": {"type": "string", "pattern": r"^-?[0-9]{1,12}(\.[0-9]{1,9})?s$", "examples": ["1.5s"]},
    "google.protobuf.Timestamp": {"type": "string", "format": "date-time"},
    "google.protobuf.FieldMask": {"type": "string"},
    "google.protobuf.Struct": {"type": "object"},
    "google.protobuf.ListValue": {"type": "array"},
    "google.protobuf.Value": {},
    "google.protobuf.Any": _ANY,
    "google.rpc.Status": {
        "type": "object",
        "properties": {
            "code": {"type": "integer", "description": "Number of a google.rpc.Code; 0 is OK."},
            "message": {"type": "string"},
            "details": {"type": "array", "items": _ANY},
        },
    },
}
_WRAPPED = "google.protobuf."


@functools.cache
def comments() -> Mapping[str, str]:
    """The protos' comments by full name, as scripts/gen found them."""
    data = importlib.resources.files("omni.v1").joinpath("comments.json").read_bytes()
    found: dict[str, str] = orjson.loads(data)
    return found


def comment(descriptor: Descriptor | FieldDescriptor | EnumDescriptor | MethodDescriptor) -> str:
    """The comment of one thing; empty if it has none."""
    return comments().get(descriptor.full_name, "")


class Schemas:
    """The components of a document, found from its methods."""

    def __init__(self, methods: Iterable[MethodDescriptor]) -> None:
        methods = list(methods)
        self._inputs = _reachable(method.input_type for method in methods)
        self._outputs = _reachable(method.output_type for method in methods)
        self.components: dict[str, Schema] = {}
        names = [d.full_name for d in {**self._inputs, **self._outputs}.values()]
        if len({name.rpartition(".")[2] for name in names}) < len(names):
            raise ValueError("two messages have the same short name")

    def reference(self, message: Descriptor, *, given: bool) -> Schema:
        """A schema for ``message``: as it is ``given`` by clients, or as they get it."""
        if (known := _WELL_KNOWN.get(message.full_name)) is not None:
            return dict(known)
        if message.full_name.startswith(_WRAPPED):
            return self._scalar(message.fields_by_name["value"], given=given)
        name = message.name + ("Input" if given and message.full_name in self._outputs else "")
        if name not in self.components:
            self.components[name] = {}  # against endless recursion
            self.components[name] = self.message(message, given=given)
        return {"$ref": _COMPONENTS + name}

    def message(self, message: Descriptor, *, given: bool, without: Collection[str] = ()) -> Schema:
        """The schema itself; ``without`` are proto names of fields that stand elsewhere."""
        fields = [field for field in message.fields if field.name not in without]
        required = [
            field.json_name for field in fields if ("Required." in comment(field) if given else not field.has_presence)
        ]
        schema: Schema = {"type": "object", "properties": {f.json_name: self.field(f, given=given) for f in fields}}
        if text := comment(message):
            schema["description"] = text
        if required:
            schema["required"] = required
        if given:
            schema["additionalProperties"] = False
        return schema

    def field(self, field: FieldDescriptor, *, given: bool) -> Schema:
        """The schema of one field."""
        if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            schema: Schema = {
                "type": "object",
                "additionalProperties": self.single(field.message_type.fields_by_name["value"], given=given),
            }
        elif field.is_repeated:
            schema = {"type": "array", "items": self.single(field, given=given)}
        else:
            schema = self.single(field, given=given)
        text = comment(field)
        oneof = field.containing_oneof
        if oneof is not None and len(oneof.fields) > 1:
            names = ", ".join(member.json_name for member in oneof.fields)
            text = f"{text} At most one of: {names}.".strip()
        return {**schema, "description": text} if text else schema

    def single(self, field: FieldDescriptor, *, given: bool) -> Schema:
        """The schema of one value of a field."""
        if field.message_type is not None:
            return self.reference(field.message_type, given=given)
        return self._scalar(field, given=given)

    def _scalar(self, field: FieldDescriptor, *, given: bool) -> Schema:
        cpp_type = field.cpp_type
        if cpp_type in _INTEGERS:
            return dict(_INTEGERS[cpp_type])
        if cpp_type in _LONG:
            schema = dict(_LONG[cpp_type])
            if given:
                schema["type"] = ["string", "integer"]
                if cpp_type == FieldDescriptor.CPPTYPE_UINT64:
                    schema["minimum"] = 0
            return schema
        if cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return {"type": "boolean"}
        if cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return dict(_DOUBLE)
        if field.enum_type is not None:
            return self._enum(field.enum_type)
        return dict(_BYTES) if field.type == FieldDescriptor.TYPE_BYTES else {"type": "string"}

    def _enum(self, enum: EnumDescriptor) -> Schema:
        if enum.name not in self.components:
            lines = [
                comment(enum),
                *(f"- `{v.name}`: {comments().get(f'{enum.full_name}.{v.name}', '')}" for v in enum.values),
            ]
            self.components[enum.name] = {
                "type": "string",
                "enum": [value.name for value in enum.values],
                "description": "\n".join(line for line in lines if line),
            }
        return {"$ref": _COMPONENTS + enum.name}


def _reachable(messages: Iterable[Descriptor]) -> dict[str, Descriptor]:
    """Messages of ours that these consist of, themselves included, by full name."""
    found: dict[str, Descriptor] = {}
    left = list(messages)
    while left:
        message = left.pop()
        if message.full_name in found or message.full_name.startswith("google."):
            continue
        found[message.full_name] = message
        left += [field.message_type for field in message.fields if field.message_type is not None]
    return {name: message for name, message in found.items() if not message.GetOptions().map_entry}
