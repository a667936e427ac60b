"""Responses and errors as JSON. Pure.

Messages are proto3 JSON: camelCase, 64-bit integers as text, bytes in base64, enums by name; fields that have no
presence are always there, so clients need no defaults. Errors are those of the OpenAI endpoints with two more fields:
``status``, the gRPC code, and ``details``, those of the ``google.rpc.Status``.
"""

from __future__ import annotations

from typing import Any

import orjson
from google.protobuf import json_format
from google.protobuf.message import Message

from gateway.http.responses import error_body
from gateway.rest.routes import Route
from omnicore import errors


def message_json(message: Message) -> bytes:
    """A message. Raises ``InternalError`` for what JSON cannot say, such as an unknown message in an ``Any``."""
    try:
        return orjson.dumps(json_format.MessageToDict(message, always_print_fields_with_no_presence=True))
    except (TypeError, ValueError, json_format.SerializeToJsonError) as error:
        raise errors.InternalError(f"{message.DESCRIPTOR.full_name} has no JSON form: {error}") from error


def response_json(route: Route, message: Message) -> bytes:
    """The response of a call: the message, or the field of it that the route names."""
    if not route.response_body:
        return message_json(message)
    field = message.DESCRIPTOR.fields_by_name[route.response_body]
    whole = json_format.MessageToDict(message, always_print_fields_with_no_presence=True)
    return orjson.dumps(whole.get(field.json_name))


def status_body(error: errors.OmniError) -> dict[str, Any]:
    """The body, last line or last event that is an error."""
    body = error_body(error)
    details = json_format.MessageToDict(error.to_status()).get("details", [])
    body["error"] |= {"status": error.code.name, "details": details}
    return body
