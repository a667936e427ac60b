"""The REST API in front of control planes: which one is asked, what travels, what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc.aio
import orjson
import pytest

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.rest.backends import ControlPlaneBackend
from gateway.rest.routes import RestRoutes
from omni.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    inspect_service_pb2,
    inspect_service_pb2_grpc,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from omnicore import errors, rpc
from omnicore.rpc import ServicerContext
from tests.integration.gateway.scripted import ScriptedControlPlane
from tests.support.ports import reserved_port
from tests.support.processes import wait_until

REPLICA = {"stage": {"pipeline": "text", "stageId": 1}, "replicaId": 2, "epoch": "18446744073709551615"}
NAMES = ("omni.v1.AdminService", "omni.v1.RegistryService", "omni.v1.InspectService")


class Plane(
    admin_service_pb2_grpc.AdminServiceServicer,
    inspect_service_pb2_grpc.InspectServiceServicer,
    ScriptedControlPlane,
):
    """A control plane that writes down what it is asked. It has no pipelines and no replicas."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.loaded = True
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.tokens: list[str | bytes] = []
        self.working = 0

    def _asked(self, request: Any, context: ServicerContext) -> None:
        self.calls.append(type(request).__name__.removesuffix("Request"))
        self.requests.append(request)
        self.tokens += [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if not self.loaded:
            raise errors.UnavailableError(f"{self.name} is loading", reason="NOT_LOADED")

    async def GetClusterStatus(  # noqa: N802
        self, request: admin_service_pb2.GetClusterStatusRequest, context: ServicerContext
    ) -> admin_service_pb2.GetClusterStatusResponse:
        self._asked(request, context)
        return admin_service_pb2.GetClusterStatusResponse(cluster=self.name, revision=5)

    async def CordonReplica(  # noqa: N802
        self, request: admin_service_pb2.CordonReplicaRequest, context: ServicerContext
    ) -> admin_service_pb2.CordonReplicaResponse:
        self._asked(request, context)
        return admin_service_pb2.CordonReplicaResponse(revision=7)

    async def CollectiveRpc(  # noqa: N802
        self, request: admin_service_pb2.CollectiveRpcRequest, context: ServicerContext
    ) -> admin_service_pb2.CollectiveRpcResponse:
        self._asked(request, context)
        self.working += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.working -= 1
        raise AssertionError

    async def RestartStage(  # noqa: N802
        self, request: admin_service_pb2.RestartStageRequest, context: ServicerContext
    ) -> AsyncIterator[admin_service_pb2.RestartStageResponse]:
        self._asked(request, context)
        yield admin_service_pb2.RestartStageResponse(step=admin_service_pb2.RESTART_STEP_PLANNED, total=2)
        raise errors.DeadlineExceededError("not back", reason="RESTART_NOT_BACK", metadata={"replica": "text/1/0"})

    async def ListReplicas(  # noqa: N802
        self, request: registry_service_pb2.ListReplicasRequest, context: ServicerContext
    ) -> registry_service_pb2.ListReplicasResponse:
        self._asked(request, context)
        response = registry_service_pb2.ListReplicasResponse(next_page_token=request.page_token + "+")
        response.replicas.add().ref.stage.pipeline = request.pipeline
        return response

    async def WatchKeys(  # noqa: N802
        self, request: inspect_service_pb2.WatchKeysRequest, context: ServicerContext
    ) -> AsyncIterator[inspect_service_pb2.WatchKeysResponse]:
        self._asked(request, context)
        self.working += 1
        try:
            while True:
                yield inspect_service_pb2.WatchKeysResponse(revision=1)
                await asyncio.sleep(0.01)
        finally:
            self.working -= 1


@contextlib.asynccontextmanager
async def running(plane: Plane) -> AsyncIterator[str]:
    def add(server: grpc.aio.Server) -> None:
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(plane, server)
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(plane, server)
        pipeline_service_pb2_grpc.add_PipelineServiceServicer_to_server(plane, server)
        inspect_service_pb2_grpc.add_InspectServiceServicer_to_server(plane, server)

    server = await rpc.serve(add, NAMES, host="127.0.0.1", port=0)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(grace_s=0)


@pytest.fixture
def planes() -> list[Plane]:
    return [Plane("first"), Plane("second")]  # type: ignore[abstract]


@pytest.fixture
async def http(planes: list[Plane]) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a gateway that knows a dead control plane, then both."""
    async with running(planes[0]) as first, running(planes[1]) as second:
        addresses = (f"127.0.0.1:{reserved_port()}", first, second)
        gateway = Gateway(GatewayConfig(control_plane=addresses, http="127.0.0.1:0", grpc="127.0.0.1:0"))
        try:
            listening = await gateway.start()
            async with aiohttp.ClientSession(f"http://{listening['http']}") as client:
                yield client
        finally:
            await gateway.close()


async def test_the_next_control_plane_is_asked(planes: list[Plane], http: aiohttp.ClientSession) -> None:
    first, second = planes
    async with http.get("/api/v1/status") as response:
        assert response.status == 200
        assert (await response.json())["cluster"] == "first"
    first.loaded = False
    async with http.get("/api/v1/status") as response:
        assert (await response.json())["cluster"] == "second"
    async with http.get("/api/v1/status") as response:
        assert (await response.json())["cluster"] == "second", "the last one that answered comes first"
    assert len(first.calls) == 2
    second.loaded = False
    async with http.get("/api/v1/status") as response:
        assert response.status == 503
        error = (await response.json())["error"]
    assert (error["code"], error["status"]) == ("not_loaded", "UNAVAILABLE"), "the reason of one that could be asked"


@pytest.mark.parametrize("addresses", [1, 2])
async def test_a_call_that_is_refused_leaves_no_connection(planes: list[Plane], addresses: int) -> None:
    """gRPC closes a connection when its channel is freed: an error in a cycle with it would keep it open."""
    made: list[weakref.ref[grpc.aio.Channel]] = []

    def connect(address: str) -> grpc.aio.Channel:
        channel = rpc.channel(address)
        made.append(weakref.ref(channel))
        return channel

    found = RestRoutes(admin_service_pb2.DESCRIPTOR.services_by_name.values()).find("GET", "/api/v1/status")
    assert found is not None
    gc.disable()
    try:
        async with running(planes[0]) as first:
            planes[0].loaded = False
            backend = ControlPlaneBackend([first] * addresses, connect, 30.0)
            with pytest.raises(errors.UnavailableError, match="is loading"):
                await backend.unary(found[0], admin_service_pb2.GetClusterStatusRequest(), ())
            assert len(made) == addresses
            await wait_until(lambda: all(channel() is None for channel in made), 30.0, what="the channels are freed")
    finally:
        gc.enable()


async def test_a_change_that_is_repeated_has_one_name(planes: list[Plane], http: aiohttp.ClientSession) -> None:
    first, second = planes
    first.loaded = False
    headers = {"x-control-plane-token": "t" * 20, "authorization": "Bearer of-the-gateway-alone"}
    async with http.post("/api/v1/replicas:cordon", json={"replica": REPLICA}, headers=headers) as response:
        assert response.status == 200
        assert await response.json() == {"revision": "7"}
    (asked,), (again,) = first.requests, second.requests
    assert asked == again
    assert asked.replica.epoch == 2**64 - 1
    assert asked.request_id.startswith("rest-")
    assert second.tokens == [f"Bearer {'t' * 20}"], "and no key of the gateway's"
    body = {"replica": REPLICA, "requestId": "mine"}
    async with http.post("/api/v1/replicas:cordon", json=body) as response:
        assert response.status == 200
    assert second.requests[-1].request_id == "mine"


async def test_a_collective_call_is_not_repeated_and_ends_with_its_client(
    planes: list[Plane], http: aiohttp.ClientSession
) -> None:
    first, second = planes
    body = {"pipeline": "text", "method": "CONTROL_METHOD_SLEEP"}
    first.loaded = False
    async with http.post("/api/v1/stages:collective", json=body) as response:
        assert response.status == 503, "engines may have begun"
    assert second.calls == []
    first.loaded = True
    call = asyncio.create_task(http.post("/api/v1/stages:collective", json=body).__aenter__())
    await wait_until(lambda: first.working == 1, what="the call is made")
    call.cancel()
    await wait_until(lambda: first.working == 0, what="the call is cancelled")


async def test_a_stream_that_fails_says_so_at_its_end(planes: list[Plane], http: aiohttp.ClientSession) -> None:
    planes[0].loaded = False
    body = {"stage": {"pipeline": "text"}, "drainDeadline": "1.5s"}
    async with http.post("/api/v1/stages:restart", json=body) as response:
        assert response.status == 200
        first, last = [orjson.loads(line) async for line in response.content]
    assert (first["step"], first["total"]) == ("RESTART_STEP_PLANNED", 2)
    assert (last["error"]["status"], last["error"]["code"]) == ("DEADLINE_EXCEEDED", "restart_not_back")
    assert last["error"]["details"][0]["metadata"] == {"replica": "text/1/0"}
    (request,) = planes[1].requests
    assert (request.drain_deadline.seconds, request.drain_deadline.nanos) == (1, 500_000_000)


async def test_queries_and_pages(planes: list[Plane], http: aiohttp.ClientSession) -> None:
    async with http.get("/api/v1/replicas", params={"pipeline": "é&x", "pageToken": "a+b"}) as response:
        page = await response.json()
    assert page["replicas"][0]["ref"]["stage"]["pipeline"] == "é&x"
    assert page["nextPageToken"] == "a+b+"
    async with http.get("/api/v1/replicas?stageId=x") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "stageId"


async def test_a_watch_is_cancelled_when_its_client_leaves(planes: list[Plane], http: aiohttp.ClientSession) -> None:
    async with http.get("/api/v1/store/keys:watch", params={"prefix": "/"}) as response:
        assert orjson.loads(await response.content.readline()) == {"revision": "1", "events": []}
        assert planes[0].working == 1
        response.close()
    await wait_until(lambda: planes[0].working == 0, what="the watch has ended")
