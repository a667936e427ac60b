"""The table of routes, built once from the descriptors of annotated services. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from google.api import annotations_pb2, http_pb2
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from gateway.rest import templates
from gateway.rest.templates import Template
from omni.v1 import (
    admin_service_pb2,
    inference_service_pb2,
    inspect_service_pb2,
    pipeline_service_pb2,
    registry_service_pb2,
    router_service_pb2,
)

LOCAL_SERVICES: tuple[ServiceDescriptor, ...] = (
    inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    router_service_pb2.DESCRIPTOR.services_by_name["RouterService"],
)
"""Of this gateway."""
CONTROL_SERVICES: tuple[ServiceDescriptor, ...] = (
    pipeline_service_pb2.DESCRIPTOR.services_by_name["PipelineService"],
    registry_service_pb2.DESCRIPTOR.services_by_name["RegistryService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
    inspect_service_pb2.DESCRIPTOR.services_by_name["InspectService"],
)
"""Of the control planes."""
SERVICES = LOCAL_SERVICES + CONTROL_SERVICES


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One way to call one RPC."""

    verb: str
    """HTTP method, upper case."""
    template: Template
    method: MethodDescriptor
    body: str
    """"*": the body is the rest of the request message; a field's name: the body is that field; "": no body."""
    response_body: str
    """The field that is the response; "": the whole message."""
    primary: bool
    """False for what ``additional_bindings`` add."""

    @property
    def full_name(self) -> str:
        """gRPC's name: "/package.Service/Method"."""
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    @property
    def request(self) -> Descriptor:
        """The request message."""
        return self.method.input_type


class RestRoutes:
    """All routes; the more literal ones come first."""

    def __init__(self, services: Iterable[ServiceDescriptor]) -> None:
        """Raises ``ValueError`` for an annotation that does not fit its messages, and for two that are the same."""
        self.routes = tuple(route for service in services for method in service.methods for route in _routes(method))
        seen: dict[tuple[str, str], Route] = {}
        for route in self.routes:
            key = (route.verb, route.template.text)
            if key in seen:
                raise ValueError(f"{route.full_name} and {seen[key].full_name} have the same path")
            seen[key] = route
        self._ordered = sorted(self.routes, key=lambda route: route.template.rank, reverse=True)

    def find(self, verb: str, path: str) -> tuple[Route, Mapping[str, str]] | None:
        """The route of a request and what its path says; None if there is none."""
        for route in self._ordered:
            if route.verb == verb and (found := route.template.match(path)) is not None:
                return route, found
        return None

    def verbs(self, path: str) -> list[str]:
        """The methods that ``path`` takes; none if there is no such path."""
        return sorted({route.verb for route in self._ordered if route.template.match(path) is not None})


def _routes(method: MethodDescriptor) -> Iterator[Route]:
    options = method.GetOptions()
    if not options.HasExtension(annotations_pb2.http):
        return
    if method.client_streaming:
        raise ValueError(f"{method.full_name}: a stream of requests has no HTTP form")
    rule: http_pb2.HttpRule = options.Extensions[annotations_pb2.http]
    yield _route(method, rule, primary=True)
    for extra in rule.additional_bindings:
        yield _route(method, extra, primary=False)


def _route(method: MethodDescriptor, rule: http_pb2.HttpRule, *, primary: bool) -> Route:
    kind = rule.WhichOneof("pattern")
    if kind is None:
        raise ValueError(f"{method.full_name}: an HTTP rule without a path")
    verb, path = (rule.custom.kind, rule.custom.path) if kind == "custom" else (kind.upper(), getattr(rule, kind))
    template = templates.parse(path)
    for field in template.fields:
        bound = field_at(method.input_type, field)
        if bound.is_repeated or bound.message_type is not None:
            raise ValueError(f"{method.full_name}: {field} cannot stand in a path")
    if rule.body not in ("", "*"):
        field_at(method.input_type, rule.body)
    if rule.response_body:
        field_at(method.output_type, rule.response_body)
    return Route(verb, template, method, rule.body, rule.response_body, primary)


def message_class(descriptor: Descriptor) -> type[Message]:
    """The class of a message."""
    return message_factory.GetMessageClass(descriptor)


def descriptor_of(message: Message) -> Descriptor:
    """The descriptor of a message; the stubs know two kinds of them, which are one."""
    return cast("Descriptor", message.DESCRIPTOR)


def field_at(message: Descriptor, path: str) -> FieldDescriptor:
    """The field at a dotted path of proto names. Raises ``ValueError`` if there is none."""
    *parents, last = path.split(".")
    for name in parents:
        parent = message.fields_by_name.get(name)
        if parent is None or parent.message_type is None or parent.is_repeated:
            raise ValueError(f"{message.full_name} has no message field {name!r}")
        message = parent.message_type
    field = message.fields_by_name.get(last)
    if field is None:
        raise ValueError(f"{message.full_name} has no field {last!r}")
    return field
