"""The OpenAPI document: up to date, complete, and fit for generators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from google.api import annotations_pb2

from gateway.rest.openapi import document, document_json
from gateway.rest.page import page
from gateway.rest.routes import SERVICES, RestRoutes

ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = orjson.loads(document_json())


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in DOCUMENT["paths"].items():
        for verb, operation in item.items():
            yield verb.upper(), path, operation


def test_the_committed_document_is_the_generated_one() -> None:
    committed = (ROOT / "docs" / "openapi.json").read_bytes()
    assert committed == document_json(), "run python -m gateway.rest.openapi > docs/openapi.json"


def test_every_annotated_rpc_is_there_once() -> None:
    annotated = {
        f"/{service.full_name}/{method.name}"
        for service in SERVICES
        for method in service.methods
        if method.GetOptions().HasExtension(annotations_pb2.http)
    }
    assert {route.full_name for route in RestRoutes(SERVICES).routes} == annotated
    described = [
        match[1] for _, _, o in operations() if (match := re.search(r"RPC: `(\S+)`", o.get("description", "")))
    ]
    assert sorted(described) == sorted(annotated)


def test_every_endpoint_is_there() -> None:
    source = (ROOT / "gateway" / "http" / "endpoints.py").read_text()
    served = {(verb, path.replace(":path}", "}")) for verb, path in re.findall(r'yield "([A-Z]+)", "([^"]+)"', source)}
    assert len(served) >= 11
    assert served <= {(verb, path) for verb, path, _ in operations()}


def test_services_with_annotations_are_all_served() -> None:
    served = {service.full_name for service in SERVICES}
    for proto in (ROOT / "protos" / "omni" / "v1").glob("*.proto"):
        if "google.api.http" in (text := proto.read_text()):
            (name,) = re.findall(r"^service (\w+)", text, re.MULTILINE)
            assert f"omni.v1.{name}" in served


def test_operations_are_named_and_described() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    for _, path, operation in operations():
        assert operation["summary"], path
        assert set(operation["tags"]) <= tags
        assert "default" in operation["responses"]
        inside = set(re.findall(r"\{(\w+)\}", path))
        given = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert inside == given, path


def test_every_reference_leads_somewhere_and_every_schema_is_used() -> None:
    text = document_json().decode()
    used = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert used == set(DOCUMENT["components"]["schemas"])


def test_no_streamed_message_can_be_taken_for_an_error() -> None:
    for route in RestRoutes(SERVICES).routes:
        if route.method.server_streaming:
            assert "error" not in route.method.output_type.fields_by_name


@pytest.mark.parametrize("name", ["GenerateRequest", "StageRefInput", "ReplicaRef", "SamplingParamsInput", "Error"])
def test_schemas_say_what_is_taken_and_given(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    expected = {
        "GenerateRequest": {"required": ["model", "prompt"], "additionalProperties": False},
        "StageRefInput": {"required": ["pipeline"], "additionalProperties": False},
        "ReplicaRef": {"required": ["replicaId", "epoch"]},
        "SamplingParamsInput": {"additionalProperties": False},
        "Error": {"required": ["error"]},
    }[name]
    assert {key: schema[key] for key in ("required", "additionalProperties") if key in schema} == expected


def test_the_page_shows_all_of_it_and_fetches_nothing() -> None:
    text = page().decode()
    for _, path, operation in operations():
        assert path in text
        assert f'id="{operation["operationId"]}"' in text
    for name in document()["components"]["schemas"]:
        assert f'id="schema-{name}"' in text
    assert not re.search(r"<script|<link|<img|@import|src=|url\(", text)
