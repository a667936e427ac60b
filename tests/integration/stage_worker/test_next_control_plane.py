"""Going on to the next control plane while other tasks of the worker wait for the one that is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from omni.v1 import registry_service_pb2 as pb
from omni.v1 import registry_service_pb2_grpc as pb_grpc
from omni.v1 import types_pb2
from omnicore import rpc
from omnicore.clock import SYSTEM_CLOCK
from omnicore.errors import NotFoundError
from stage_worker.control_plane_client import ControlPlaneClient
from stage_worker.identity import Identity
from stage_worker.progress import Progress, Vitality
from stage_worker.registrar import Registrar
from tests.support.processes import wait_until

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=0)


class ControlPlane(pb_grpc.RegistryServiceServicer):
    """Answers, or keeps whoever asks waiting."""

    def __init__(self) -> None:
        self.address = ""
        self.hangs = False
        self.knows_pipeline = True
        self.asked: list[str] = []

    async def Register(self, request: pb.RegisterRequest, context: rpc.ServicerContext) -> pb.RegisterResponse:  # noqa: N802
        await self._take("register")
        if not self.knows_pipeline:
            raise NotFoundError("no pipeline 'demo'", reason="PIPELINE_NOT_FOUND")
        return pb.RegisterResponse(replica=types_pb2.ReplicaRef(stage=STAGE, epoch=7), lease_id=1)

    async def Heartbeat(  # noqa: N802
        self, requests: AsyncIterator[pb.HeartbeatRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[pb.HeartbeatResponse]:
        async for _ in requests:
            await self._take("beat")
            yield pb.HeartbeatResponse(directive=pb.HEARTBEAT_DIRECTIVE_CONTINUE)

    async def Deregister(self, request: pb.DeregisterRequest, context: rpc.ServicerContext) -> pb.DeregisterResponse:  # noqa: N802
        await self._take("deregister")
        return pb.DeregisterResponse()

    async def _take(self, what: str) -> None:
        self.asked.append(what)
        if self.hangs:
            await asyncio.get_running_loop().create_future()


class _Idle:
    """Load and directives of nobody in particular."""

    started = False

    def report(self) -> types_pb2.LoadReport:
        return types_pb2.LoadReport()

    def on_drain(self, detail: str) -> None:
        raise AssertionError(detail)

    def on_drain_order(self, order: types_pb2.DrainOrder) -> None:
        raise AssertionError(order)

    on_stop = on_drain


@contextlib.asynccontextmanager
async def control_planes(count: int) -> AsyncIterator[list[ControlPlane]]:
    async with contextlib.AsyncExitStack() as stack:
        made = [ControlPlane() for _ in range(count)]  # type: ignore[abstract]
        for one in made:
            server = await rpc.serve(
                lambda server, one=one: pb_grpc.add_RegistryServiceServicer_to_server(one, server),  # type: ignore[misc]
                [],
                host="127.0.0.1",
                port=0,
            )
            stack.push_async_callback(server.stop, 0)
            one.address = f"127.0.0.1:{server.port}"
        yield made


@contextlib.asynccontextmanager
async def registrar(*places: ControlPlane) -> AsyncIterator[tuple[ControlPlaneClient, Registrar]]:
    client = ControlPlaneClient([place.address for place in places], SYSTEM_CLOCK)
    idle = _Idle()

    async def probe() -> None:
        raise AssertionError("nothing has started")

    made = Registrar(
        client,
        Identity(STAGE, ""),
        describe=pb.RegisterRequest,
        vitality=Vitality(Progress(), idle, probe),  # type: ignore[arg-type]
        load=idle,  # type: ignore[arg-type]
        handler=idle,
        clock=SYSTEM_CLOCK,
        plan_wait_s=60.0,
    )
    try:
        yield client, made
    finally:
        await client.close()


async def test_calls_that_wait_go_on_to_the_next_one_and_only_to_the_next() -> None:
    async with control_planes(2) as (first, second), registrar(first, second) as (client, _):
        first.hangs = True

        async def attempt(channel: grpc.aio.Channel) -> pb.RegisterResponse:
            return await pb_grpc.RegistryServiceStub(channel).Register(pb.RegisterRequest())

        calls = [asyncio.create_task(client.call("register", attempt, deadline_s=None)) for _ in range(3)]
        await wait_until(lambda: len(first.asked) == 3, what="calls")
        await client.next_address()
        for call in calls:
            assert (await call).replica.epoch == 7
        assert (len(first.asked), len(second.asked)) == (3, 3)
        assert client.address == second.address


async def test_beats_go_on_while_a_repeated_registration_looks_for_a_control_plane() -> None:
    """A registration that waits for its pipeline goes from one to the next; it took the beats with it, for good."""
    async with control_planes(1) as (only,), registrar(only) as (_, worker):
        await worker.register(None)
        beats = asyncio.create_task(worker.run())
        only.hangs = True
        await wait_until(lambda: "beat" in only.asked, what="a beat under way")
        only.hangs = only.knows_pipeline = False
        again = asyncio.create_task(worker.register(None))
        await wait_until(lambda: only.asked.count("register") >= 3, what="registrations")
        only.knows_pipeline = True
        await again
        before = only.asked.count("beat")
        await wait_until(lambda: beats.done() or only.asked.count("beat") > before, what="beats")
        assert not beats.done()
        beats.cancel()
        await asyncio.wait([beats])


async def test_a_claim_is_given_back_although_its_control_plane_is_given_up_meanwhile() -> None:
    async with control_planes(2) as (first, second), registrar(first, second) as (client, worker):
        await worker.register(None)
        first.hangs = True
        leaving = asyncio.create_task(worker.deregister("shutdown"))
        await wait_until(lambda: "deregister" in first.asked, what="the attempt")
        await client.next_address()
        await leaving
        assert second.asked == ["deregister"]


async def test_who_is_told_to_end_while_it_waits_ends() -> None:
    async with control_planes(1) as (only,), registrar(only) as (_, worker):
        only.hangs = True
        waiting = asyncio.create_task(worker.register(None))
        await wait_until(lambda: "register" in only.asked, what="the attempt")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
