"""Messages of any type from its descriptor: now sensible, now extreme, now wrong."""

from __future__ import annotations

import os
from typing import Any

from google.protobuf import descriptor, message, message_factory
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

Field = descriptor.FieldDescriptor
# Names that lead past the first check, so that what lies behind it is tried as well.
_NAMES = ("demo", "thinker", "talker", "sim", "shm", "grpc", "auto", "round-robin", "127.0.0.1:9", "127.0.0.1:0", "a/b")
_UUIDS = ("6e1a9c3e-52a4-4b37-9d0c-0a5f2f6f9f01", "6e1a9c3e-52a4-4b37-9d0c-0a5f2f6f9f02")
_DEPLOY = (
    "pipeline: demo\nstages: [{stage_id: 0, engine: sim, final_output_type: text}]",
    "pipeline: demo\nstages: [{stage_id: 0, engine: sim, num_replicas: -1}]",
    "stages: [{stage_id: 0}, {stage_id: 0}]",
    "a: [",
    "&a [*a, *a]",
)
_LONG = ("x" * 100_000, "\x00" * 1000, "ü" * 50_000, "../" * 500)
_DEPTH = 4

_TEXT = st.one_of(st.sampled_from((*_NAMES, *_UUIDS, *_DEPLOY)), st.text(max_size=30), st.sampled_from(("", *_LONG)))
_BITS32, _BITS64 = (1 << 32) - 1, (1 << 64) - 1
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    Field.TYPE_BOOL: st.booleans(),
    Field.TYPE_STRING: _TEXT,
    Field.TYPE_BYTES: st.one_of(st.binary(max_size=64), st.just(b"\xff" * 70_000)),
    Field.TYPE_DOUBLE: st.floats(),
    Field.TYPE_FLOAT: st.floats(width=32),
    Field.TYPE_ENUM: st.one_of(st.integers(0, 8), st.sampled_from((-1, 99, (1 << 31) - 1))),
}
for _types, _low, _high in (
    ((Field.TYPE_UINT32, Field.TYPE_FIXED32), 0, _BITS32),
    ((Field.TYPE_UINT64, Field.TYPE_FIXED64), 0, _BITS64),
    ((Field.TYPE_INT32, Field.TYPE_SINT32, Field.TYPE_SFIXED32), -(1 << 31), (1 << 31) - 1),
    ((Field.TYPE_INT64, Field.TYPE_SINT64, Field.TYPE_SFIXED64), -(1 << 63), (1 << 63) - 1),
):
    for _type in _types:
        _SCALARS[_type] = st.one_of(st.integers(0, 3), st.sampled_from((_low, _high)), st.integers(_low, _high))


@st.composite
def messages(draw: st.DrawFn, kind: descriptor.Descriptor, depth: int = _DEPTH) -> message.Message:
    """Any message of this type, nested up to ``depth`` levels."""
    made = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if field.message_type is not None and depth == 0:
            continue
        if draw(st.integers(0, 3)) == 0:
            continue
        _set(draw, made, field, depth)
    return made


def _set(draw: st.DrawFn, made: message.Message, field: Any, depth: int) -> None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        for _ in range(draw(st.integers(0, 2))):
            entry = draw(_SCALARS[key.type])
            if value.message_type is not None:
                getattr(made, field.name)[entry].CopyFrom(draw(messages(value.message_type, depth - 1)))
            else:
                getattr(made, field.name)[entry] = draw(_SCALARS[value.type])
    elif field.is_repeated:
        count = draw(st.integers(0, 2))
        if kind is not None:
            getattr(made, field.name).extend(draw(messages(kind, depth - 1)) for _ in range(count))
        else:
            getattr(made, field.name).extend(draw(_SCALARS[field.type]) for _ in range(count))
    elif kind is not None:
        getattr(made, field.name).CopyFrom(draw(messages(kind, depth - 1)))
    else:
        setattr(made, field.name, draw(_SCALARS[field.type]))


def fuzz(examples: int) -> settings:
    """Settings: the same examples in every run, or ``OMNI_FUZZ`` times as many, and other ones each time."""
    more = int(os.environ.get("OMNI_FUZZ", "0"))
    return settings(
        max_examples=examples * (more or 1),
        derandomize=not more,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
