"""The public surface of the protos, pinned: a change here is a change for every client and must be meant."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from google.api import annotations_pb2

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).parent / "proto_surface.txt"


def _modules() -> list[str]:
    return sorted("omni.v1." + path.stem + "_pb2" for path in (ROOT / "protos" / "omni" / "v1").glob("*.proto"))


def _surface() -> str:
    lines: list[str] = []
    for name in _modules():
        file = importlib.import_module(name).DESCRIPTOR
        for service in file.services_by_name.values():
            for method in service.methods:
                request = ("stream " if method.client_streaming else "") + method.input_type.name
                response = ("stream " if method.server_streaming else "") + method.output_type.name
                rule = method.GetOptions().Extensions[annotations_pb2.http]
                verb = rule.WhichOneof("pattern")
                http = f"  {verb.upper()} {getattr(rule, verb)}" if verb else ""
                lines.append(f"rpc {service.full_name}/{method.name}({request}) → {response}{http}")
        for message in file.message_types_by_name.values():
            for field in message.fields:
                kind = field.message_type or field.enum_type
                type_name = kind.name if kind else str(field.type)
                lines.append(f"field {message.name}.{field.name} = {field.number} {type_name}")
        for enum in file.enum_types_by_name.values():
            lines += [f"enum {value.name} = {value.number}" for value in enum.values]
    return "\n".join(lines) + "\n"


def test_surface_is_as_pinned(request: pytest.FixtureRequest) -> None:
    surface = _surface()
    if request.config.getoption("--update-surface"):
        SURFACE.write_text(surface)
    assert surface == SURFACE.read_text(), "if the change is meant: pytest tests/contract --update-surface"


def test_every_enum_has_an_unspecified_zero() -> None:
    for name in _modules():
        for enum in importlib.import_module(name).DESCRIPTOR.enum_types_by_name.values():
            assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
