"""Random messages at every call of every service: each has an answer, and no answer is a failure of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from omni.v1 import (
    admin_service_pb2,
    inference_service_pb2,
    inspect_service_pb2,
    pipeline_service_pb2,
    registry_service_pb2,
    router_service_pb2,
    stage_service_pb2,
    transfer_service_pb2,
)
from omnicore import rpc
from tests.fuzz.conftest import Targets
from tests.fuzz.messages import fuzz, messages

WHERE = {
    "control plane": (registry_service_pb2, pipeline_service_pb2, admin_service_pb2, inspect_service_pb2),
    "worker": (stage_service_pb2, transfer_service_pb2),
    "gateway": (inference_service_pb2, router_service_pb2),
}
METHODS: list[tuple[str, MethodDescriptor]] = [
    (where, method)
    for where, modules in WHERE.items()
    for module in modules
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
# Waiting is bounded by the services' own limits, which the fixtures set to ten seconds at most.
TIMEOUT_S = 90.0
OURS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.fixture(scope="module")
def channels(targets: Targets) -> Iterator[dict[str, grpc.Channel]]:
    opened = {name: grpc.insecure_channel(targets.addresses[name], options=rpc.CHANNEL_OPTIONS) for name in WHERE}
    yield opened
    for channel in opened.values():
        channel.close()


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def answer(channel: grpc.Channel, method: MethodDescriptor, requests: list[bytes]) -> grpc.StatusCode:
    """Call it with raw requests; read one response for each of them."""
    path, stub = path_of(method), {}
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        stub[kind] = getattr(channel, kind)
    name = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    given: Any = iter(requests) if method.client_streaming else requests[0]
    try:
        if not method.server_streaming:
            stub[name](path)(given, timeout=TIMEOUT_S)
        else:
            call = stub[name](path)(given, timeout=TIMEOUT_S)
            for _ in zip(requests, call, strict=False):
                pass
            call.cancel()
    except grpc.RpcError as error:
        return checked(path, error)
    return grpc.StatusCode.OK


def checked(path: str, error: Any) -> grpc.StatusCode:
    """The code of an error, which must be one of the caller's, or one that we chose."""
    code: grpc.StatusCode = error.code()
    details = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    shown = f"{path}: {code} {error.details()}"
    assert code not in OURS, shown
    # Without details it is gRPC itself that speaks: of a connection that broke, say.
    assert details or code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED), shown
    assert len(error.details() or "") < 10_000, shown
    return code


@pytest.mark.parametrize(("where", "method"), METHODS, ids=lambda value: getattr(value, "full_name", value))
def test_any_message_has_an_answer(channels: dict[str, grpc.Channel], where: str, method: MethodDescriptor) -> None:
    @fuzz(12)
    @given(st.lists(messages(method.input_type), min_size=1, max_size=3 if method.client_streaming else 1))
    def check(requests: list[Message]) -> None:
        answer(channels[where], method, [request.SerializeToString() for request in requests])

    check()


@pytest.mark.parametrize("where", WHERE)
def test_any_bytes_in_place_of_a_message_have_an_answer(channels: dict[str, grpc.Channel], where: str) -> None:
    mine = [method for place, method in METHODS if place == where]

    @fuzz(60)
    @given(st.sampled_from(mine), st.binary(min_size=1, max_size=200))
    def check(method: MethodDescriptor, data: bytes) -> None:
        answer(channels[where], method, [data])

    check()
