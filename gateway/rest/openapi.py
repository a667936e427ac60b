"""The OpenAPI 3.1 document of the whole HTTP surface.

``python -m gateway.rest.openapi > docs/openapi.json`` writes it; tests/contract/test_openapi.py holds the committed one
against it. RPCs come from the protos, with their comments; the other endpoints from ``gateway.rest.endpoints``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gateway.rest import values
from gateway.rest.components import COMPONENTS
from gateway.rest.endpoints import ENDPOINTS, TAGS, Endpoint
from gateway.rest.routes import SERVICES, RestRoutes, Route
from gateway.rest.schemas import Schema, Schemas, comment, comments
from omnicore import access

VERSION = "1"
"""Of the API: the "v1" in its paths."""

_DESCRIPTION = """\
The gateway's HTTP API: OpenAI's endpoints, and every RPC that its protos give an HTTP form.

RPCs are written as proto3 JSON: camelCase (snake_case is taken, too), 64-bit integers as text, bytes in base64, null as
absent. Unknown fields and parameters are refused. An RPC that streams answers with one JSON message a line
(`application/x-ndjson`), or with server-sent events if asked to (`Accept: text/event-stream`).

Errors have one shape everywhere: `{"error": {"message", "type", "param", "code"}}`, and for RPCs also `status` (the
gRPC code) and `details` (those of the `google.rpc.Status`).
"""
_ERROR = {"$ref": "#/components/responses/Error"}


@functools.cache
def document() -> Mapping[str, Any]:
    """The whole document."""
    table = RestRoutes(SERVICES)
    schemas = Schemas(route.method for route in table.routes)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.verb.lower()] = _endpoint(endpoint)
    for route in table.routes:
        paths.setdefault(route.template.openapi, {})[route.verb.lower()] = _operation(route, schemas)
    tags = [{"name": name, "description": text} for name, text in TAGS.items()]
    tags += [{"name": s.name, "description": comments().get(s.full_name, "")} for s in SERVICES]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Omniplane",
            "version": VERSION,
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        # With --api-keys a key is required; without, none is looked at.
        "security": [{"bearer": []}, {"key": []}, {}],
        "tags": tags,
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "responses": {
                "Error": {
                    "description": "What went wrong.",
                    "headers": {
                        **_HEADERS,
                        "Retry-After": {
                            "description": "Seconds after which it may go better, where waiting helps.",
                            "schema": {"type": "string"},
                        },
                    },
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
            },
            "schemas": {**COMPONENTS, **dict(sorted(schemas.components.items()))},
        },
    }


@functools.cache
def document_json() -> bytes:
    """The document as it is committed and served."""
    return orjson.dumps(document(), option=orjson.OPT_INDENT_2) + b"\n"


_HEADERS: Mapping[str, Schema] = {
    "x-request-id": {
        "description": "The request's, if it had one of at most 256 printable characters.",
        "schema": {"type": "string"},
    }
}


def _endpoint(endpoint: Endpoint) -> Schema:
    operation: Schema = {
        "operationId": endpoint.name,
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        **({"description": endpoint.description} if endpoint.description else {}),
        **({"parameters": list(endpoint.parameters)} if endpoint.parameters else {}),
    }
    if endpoint.request:
        content = {media: {"schema": schema} for media, schema in endpoint.request.items()}
        operation["requestBody"] = {"required": True, "content": content}
    operation["responses"] = {
        str(status): {
            "description": text,
            "headers": _HEADERS,
            "content": {media: {"schema": schema} for media, schema in content.items()},
        }
        for status, (text, content) in endpoint.responses.items()
    } | {"default": _ERROR}
    if endpoint.open:
        operation["security"] = [{}]
    return operation


def _operation(route: Route, schemas: Schemas) -> Schema:
    text = comment(route.method)
    summary = text.replace("\n", " ").partition(". ")[0].rstrip(".:")
    operation: Schema = {
        "operationId": f"{route.method.containing_service.name}_{route.method.name}" + ("" if route.primary else "_2"),
        "tags": [route.method.containing_service.name],
        "summary": summary,
        "description": f"{text}\n\nRPC: `{route.full_name}`. Roles: {_roles(route)}.",
    }
    bound = set(route.template.fields)
    if parameters := list(_parameters(route, schemas, bound)):
        operation["parameters"] = parameters
    if route.body:
        if route.body == "*":
            schema = schemas.message(route.request, given=True, without=bound) if bound else None
            schema = schema or schemas.reference(route.request, given=True)
        else:
            schema = schemas.field(route.request.fields_by_name[route.body], given=True)
        needed = bool(schemas.message(route.request, given=True, without=bound).get("required"))
        operation["requestBody"] = {"required": needed, "content": {"application/json": {"schema": schema}}}
    operation["responses"] = {"200": _response(route, schemas), "default": _ERROR}
    return operation


def _response(route: Route, schemas: Schemas) -> Schema:
    output = route.method.output_type
    if route.response_body:
        schema = schemas.field(output.fields_by_name[route.response_body], given=False)
    else:
        schema = schemas.reference(output, given=False)
    description = comment(output)
    content: Schema = {"application/json": {"schema": schema}}
    if route.method.server_streaming:
        description += "\n\nOne such message a line or event; after an error the last one is an Error instead."
        content = {"application/x-ndjson": {"schema": schema}, "text/event-stream": {"schema": {"type": "string"}}}
    return {"description": description, "headers": _HEADERS, "content": content}


def _parameters(route: Route, schemas: Schemas, bound: set[str]) -> Iterator[Schema]:
    taken = bound | ({route.body} if route.body else set())
    for path, name, field in _leaves(route.request, "", ""):
        schema = schemas.field(field, given=True)
        text = schema.pop("description", "")
        described = {"description": text} if text else {}
        if path in bound:
            yield {"name": path, "in": "path", "required": True, **described, "schema": _not_empty(schema)}
        elif route.body != "*" and not any(path == other or path.startswith(f"{other}.") for other in taken):
            required = {"required": True} if "Required." in comment(field) and path == field.name else {}
            yield {"name": name, "in": "query", **required, **described, "schema": schema}


def _not_empty(schema: Schema) -> Schema:
    return {**schema, "minLength": 1} if schema.get("type") == "string" else schema


def _leaves(message: Descriptor, path: str, name: str) -> Iterator[tuple[str, str, FieldDescriptor]]:
    """Fields that may stand in a query: their path in proto names, their name in the query."""
    for field in message.fields:
        here, shown = path + field.name, name + field.json_name
        if field.message_type is None or values.is_scalar(field.message_type):
            yield here, shown, field
        elif not field.is_repeated and not field.message_type.full_name.startswith("google."):
            yield from _leaves(field.message_type, f"{here}.", f"{shown}.")


def _roles(route: Route) -> str:
    roles = access.allowed(route.full_name)
    return "any" if roles == access.EVERYONE else ", ".join(sorted(roles))


if __name__ == "__main__":
    sys.stdout.buffer.write(document_json())
