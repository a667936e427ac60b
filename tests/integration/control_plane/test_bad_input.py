"""Whatever comes in, the answer is the right code, at once, and the service lives on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni.v1 import admin_service_pb2 as admin_pb
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import registry_service_pb2_grpc, types_pb2
from tests.integration.control_plane.harness import Client, Worker, cluster, error_of

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
HUGE = "x" * 10_000_000
BROKEN = duration_pb2.Duration(seconds=1, nanos=2_000_000_000)
SLEEP = types_pb2.CONTROL_METHOD_SLEEP


def ref(pipeline: str = HUGE) -> types_pb2.ReplicaRef:
    return types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline=pipeline))


UNARY: list[tuple[str, str, Message]] = [
    ("registry", "Register", pb.RegisterRequest()),
    ("registry", "Register", pb.RegisterRequest(instance_uuid=HUGE, state=types_pb2.ReplicaState.ValueType(99))),
    ("registry", "Register", pb.RegisterRequest(stage=types_pb2.StageRef(pipeline=HUGE))),
    ("registry", "Deregister", pb.DeregisterRequest()),
    ("registry", "Deregister", pb.DeregisterRequest(replica=ref())),
    ("registry", "ListReplicas", pb.ListReplicasRequest(pipeline=HUGE)),
    ("registry", "ListReplicas", pb.ListReplicasRequest(page_token=HUGE)),
    ("registry", "ListReplicas", pb.ListReplicasRequest(stage_id=1)),
    ("pipelines", "ApplyPipeline", pipeline_pb.ApplyPipelineRequest()),
    ("pipelines", "ApplyPipeline", pipeline_pb.ApplyPipelineRequest(deploy_yaml=HUGE)),
    ("pipelines", "ApplyPipeline", pipeline_pb.ApplyPipelineRequest(deploy_yaml="a: [", name=HUGE)),
    ("pipelines", "ApplyPipeline", pipeline_pb.ApplyPipelineRequest(deploy_yaml="\x00")),
    ("pipelines", "GetPipeline", pipeline_pb.GetPipelineRequest()),
    ("pipelines", "GetPipeline", pipeline_pb.GetPipelineRequest(name=HUGE)),
    ("pipelines", "ListPipelines", pipeline_pb.ListPipelinesRequest(page_token="?")),
    ("pipelines", "DeletePipeline", pipeline_pb.DeletePipelineRequest(name=HUGE)),
    ("admin", "CordonReplica", admin_pb.CordonReplicaRequest()),
    ("admin", "CordonReplica", admin_pb.CordonReplicaRequest(replica=ref())),
    ("admin", "UncordonReplica", admin_pb.UncordonReplicaRequest(replica=types_pb2.ReplicaRef())),
    ("admin", "DrainReplica", admin_pb.DrainReplicaRequest(replica=ref())),
    ("admin", "EvictReplica", admin_pb.EvictReplicaRequest(replica=ref())),
    # No length of time: more nanoseconds than a second has.
    ("admin", "DrainReplica", admin_pb.DrainReplicaRequest(replica=ref("demo"), deadline=BROKEN)),
    ("admin", "CollectiveRpc", admin_pb.CollectiveRpcRequest(pipeline="demo", method=SLEEP, timeout=BROKEN)),
    ("admin", "CollectiveRpc", admin_pb.CollectiveRpcRequest(pipeline="demo", method=SLEEP, request_id=HUGE)),
    ("admin", "CollectiveRpc", admin_pb.CollectiveRpcRequest()),
    ("admin", "CollectiveRpc", admin_pb.CollectiveRpcRequest(pipeline=HUGE)),
]


async def alive(client: Client) -> None:
    worker = Worker(await client.apply())
    await worker.register(client)
    await client.registry.Deregister(pb.DeregisterRequest(replica=worker.claim.replica))


async def test_every_call_refuses_nonsense_at_once() -> None:
    async with cluster() as c:
        client = await c.start()
        for service, method, request in UNARY:
            call = getattr(getattr(client, service), method)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, timeout=30)
            shown = f"{method}({str(request)[:60]})"
            assert caught.value.code() == INVALID, f"{shown}: {caught.value.code()} {caught.value.details()}"
            error = error_of(caught.value)
            assert error.violations, shown
            assert len(error.message) < 2000, shown
        await alive(client)


async def test_streams_refuse_nonsense_too() -> None:
    async with cluster() as c:
        client = await c.start()
        for request in (
            pb.WatchReplicasRequest(pipelines=[HUGE]),
            pb.WatchReplicasRequest(pipelines=[""]),
            pb.WatchReplicasRequest(pipelines=["a"] * 1001),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(client.registry.WatchReplicas(request)))
            assert caught.value.code() == INVALID

        async def beats(*given: pb.HeartbeatRequest) -> AsyncIterator[pb.HeartbeatRequest]:
            for beat in given:
                yield beat

        for beat in (pb.HeartbeatRequest(), pb.HeartbeatRequest(replica=ref())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(client.registry.Heartbeat(beats(beat))))
            assert caught.value.code() == INVALID
        await alive(client)


async def test_messages_beyond_the_limit_are_refused_before_they_are_read() -> None:
    async with cluster() as c:
        client = await c.start()
        unlimited = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(client.address, options=unlimited) as channel:
            stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Register(pb.RegisterRequest(engine="x" * (17 * 1024 * 1024)))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await alive(client)


async def test_random_bytes_as_messages_and_on_the_port() -> None:
    rng = random.Random(7)
    async with cluster() as c:
        client = await c.start()
        methods = [
            (f"/omni.v1.{service}/{method.name}", method.server_streaming, method.client_streaming)
            for module, service in (
                (pb, "RegistryService"),
                (pipeline_pb, "PipelineService"),
                (admin_pb, "AdminService"),
            )
            for method in module.DESCRIPTOR.services_by_name[service].methods
        ]
        for path, response_streaming, request_streaming in methods:
            for _ in range(5):
                await _call(client, path, response_streaming, request_streaming, rng.randbytes(rng.randrange(1, 200)))
        host, _, port = client.address.rpartition(":")
        for _ in range(20):
            _, writer = await asyncio.open_connection(host, int(port))
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if rng.random() < 0.5 else b""
            writer.write(preface + rng.randbytes(rng.randrange(0, 5000)))
            writer.close()
        await alive(client)


async def _call(client: Client, path: str, response_streaming: bool, request_streaming: bool, body: bytes) -> None:
    make: Callable[..., Any] = {
        (False, False): client.channel.unary_unary,
        (False, True): client.channel.unary_stream,
        (True, True): client.channel.stream_stream,
    }[request_streaming, response_streaming]
    call = make(path)(iter([body]) if request_streaming else body, timeout=30)
    try:
        if response_streaming:
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            pytest.fail(f"{path} with {body!r}: {error.code()} {error.details()}")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    uuid=st.text(max_size=40),
    pipeline=st.sampled_from(["demo", "", "nope", "a/b"]),
    stage_id=st.integers(0, 2**32 - 1),
    endpoint=st.one_of(st.text(max_size=30), st.just("127.0.0.1:5")),
    state=st.integers(-5, 100),
    tensor_parallel=st.integers(0, 2**32 - 1),
)
def test_register_never_fails_inside(
    uuid: str, pipeline: str, stage_id: int, endpoint: str, state: int, tensor_parallel: int
) -> None:
    """The pure door only: what passes it is covered above."""
    from control_plane import validate
    from omnicore.errors import InvalidRequestError

    request = pb.RegisterRequest(
        instance_uuid=uuid,
        stage=types_pb2.StageRef(pipeline=pipeline, stage_id=stage_id),
        endpoint=endpoint,
        fingerprint=types_pb2.StageFingerprint(tensor_parallel_size=tensor_parallel),
        state=types_pb2.ReplicaState.ValueType(state),
    )
    with pytest.raises(InvalidRequestError):
        validate.register_request(request)
