"""CollectiveRpc over real sockets: whole or not at all, in parallel, one result for each replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import stage_service_pb2, stage_service_pb2_grpc, types_pb2
from omnicore import errors, rpc
from omnicore.rpc import ServicerContext
from tests.integration.control_plane.harness import STARTING, Client, Worker, beating, cluster, error_of, until

SLEEP = types_pb2.CONTROL_METHOD_SLEEP


class Engine(stage_service_pb2_grpc.StageServiceServicer):
    """A worker that does what it is told, unless it cannot; ``hangs`` answers nothing."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.able = True
        self.hangs = False
        self.calls: list[stage_service_pb2.ControlRequest] = []
        self.together: asyncio.Barrier | None = None

    async def GetStageInfo(  # noqa: N802
        self, request: stage_service_pb2.GetStageInfoRequest, context: ServicerContext
    ) -> stage_service_pb2.GetStageInfoResponse:
        if self.hangs:
            await asyncio.Event().wait()
        return stage_service_pb2.GetStageInfoResponse(replica=types_pb2.Replica(instance_uuid=self.uuid))

    async def Control(  # noqa: N802
        self, request: stage_service_pb2.ControlRequest, context: ServicerContext
    ) -> stage_service_pb2.ControlResponse:
        self.calls.append(request)
        if self.together is not None:
            await self.together.wait()
        if not self.able:
            raise errors.UnimplementedError("this engine does not sleep")
        response = stage_service_pb2.ControlResponse()
        response.result["slept"] = True
        return response


@contextlib.asynccontextmanager
async def engines(client: Client, count: int, stage_id: int = 1) -> AsyncIterator[list[tuple[Worker, Engine]]]:
    """Registered replicas whose engines can be called."""
    plan = await client.apply()
    made: list[tuple[Worker, Engine]] = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            worker = Worker(plan, stage_id)
            engine = Engine(worker.request.instance_uuid)  # type: ignore[abstract]

            def add(server: grpc.aio.Server, engine: Engine = engine) -> None:
                stage_service_pb2_grpc.add_StageServiceServicer_to_server(engine, server)

            server = await rpc.serve(add, ["omni.v1.StageService"], host="127.0.0.1", port=0)
            stack.push_async_callback(server.stop, 0)
            worker.request.endpoint = f"127.0.0.1:{server.port}"
            await worker.register(client)
            made.append((worker, engine))
        yield made


def sleeping(**fields: object) -> pb.CollectiveRpcRequest:
    given = {"pipeline": "demo", "method": SLEEP, "timeout": duration_pb2.Duration(seconds=20)}
    return pb.CollectiveRpcRequest(**(given | fields))  # type: ignore[arg-type]


async def refused(client: Client, request: pb.CollectiveRpcRequest) -> errors.OmniError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.admin.CollectiveRpc(request)
    return error_of(caught.value)


async def test_a_wrong_call_touches_nobody() -> None:
    async with cluster() as c:
        client = await c.start()
        async with engines(client, 2) as group:
            for wrong, code in (
                (sleeping(stage_ids=[1, 9]), grpc.StatusCode.NOT_FOUND),
                (sleeping(stage_ids=[99, 1]), grpc.StatusCode.NOT_FOUND),
                (sleeping(pipeline="nope"), grpc.StatusCode.NOT_FOUND),
                (sleeping(method=0), grpc.StatusCode.INVALID_ARGUMENT),
                (sleeping(method=77), grpc.StatusCode.INVALID_ARGUMENT),
                (sleeping(timeout=duration_pb2.Duration(seconds=-1)), grpc.StatusCode.INVALID_ARGUMENT),
            ):
                assert (await refused(client, wrong)).code == code
            assert [engine.calls for _, engine in group] == [[], []]


async def test_all_are_called_at_once_and_each_has_its_result() -> None:
    async with cluster() as c:
        client = await c.start()
        async with engines(client, 3) as group, engines(client, 1, stage_id=0) as other_stage:
            group[1][1].able = False
            together = asyncio.Barrier(3)  # nobody returns before all were called
            for _, engine in group:
                engine.together = together
            # Named twice, called once.
            answer = await client.admin.CollectiveRpc(sleeping(stage_ids=[1, 1]))
            assert [result.replica.replica_id for result in answer.results] == [0, 1, 2]
            unimplemented = grpc.StatusCode.UNIMPLEMENTED.value[0]
            assert [result.status.code for result in answer.results] == [0, unimplemented, 0]
            assert answer.results[0].result["slept"] is True
            assert [len(engine.calls) for _, engine in group] == [1, 1, 1]
            assert group[0][1].calls[0].replica == answer.results[0].replica
            assert other_stage[0][1].calls == []
            assert {result.replica.stage.stage_id for result in answer.results} == {1}


async def test_every_method_goes_through_and_no_stage_means_all() -> None:
    async with cluster() as c:
        client = await c.start()
        async with engines(client, 1) as one, engines(client, 1, stage_id=0) as other:
            for method in (number for number in types_pb2.ControlMethod.values() if number):
                answer = await client.admin.CollectiveRpc(sleeping(method=method))
                assert [result.status.code for result in answer.results] == [0, 0]
            seen = [[call.method for call in engine.calls] for _, engine in (*one, *other)]
            assert seen == [[1, 2, 3, 4, 5]] * 2


async def test_what_others_write_to_the_same_store_is_not_waited_for() -> None:
    async with cluster() as c:
        client = await c.start()
        async with engines(client, 1) as ((_, engine),):
            await c.etcd_client.put("/elsewhere", b"x")  # moves the revision of the store, of which no table hears
            answer = await client.admin.CollectiveRpc(sleeping(stage_ids=[1]))
            assert [result.status.code for result in answer.results] == [0]
            assert len(engine.calls) == 1
            unknown = types_pb2.StageRef(pipeline="demo", stage_id=9)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.admin.RestartStage(pb.RestartStageRequest(stage=unknown)).read()
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_one_sick_replica_of_a_group_refuses_all_unless_it_may_be_left_out() -> None:
    async with cluster() as c:
        client = await c.start()
        async with engines(client, 2) as group:
            nobody = Worker(await client.apply())  # nobody listens there
            await nobody.register(client)
            loading = Worker(await client.apply())
            loading.request.state = STARTING
            await loading.register(client)
            group[1][1].hangs = True

            error = await refused(client, sleeping(stage_ids=[1]))
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REPLICA_UNHEALTHY")
            assert error.metadata["unhealthy"] == "demo/1/1, demo/1/2, demo/1/3"
            assert "demo/1/3: it is STARTING" in error.message
            assert all(not engine.calls for _, engine in group)

            answer = await client.admin.CollectiveRpc(sleeping(stage_ids=[1], skip_unhealthy=True))
            unavailable = grpc.StatusCode.UNAVAILABLE.value[0]
            assert [result.status.code for result in answer.results] == [0, unavailable, unavailable, unavailable]
            assert [len(engine.calls) for _, engine in group] == [1, 0]


async def test_suspect_replicas_and_foreign_instances_count_as_sick() -> None:
    async with cluster() as c:
        client = await c.start()
        async with engines(client, 2) as group:
            (suspect, _), (_, foreign) = group
            foreign.uuid = "00000000-0000-0000-0000-000000000000"
            async with beating(suspect, client):
                await until(lambda: bool(suspect.answers), "beats")
            table = c.planes[0].table
            await until(lambda: any(row.replica.suspect for row in table.rows()), "suspect")
            error = await refused(client, sleeping(stage_ids=[1]))
            assert "demo/1/0: it is suspect" in error.message
            assert "demo/1/1: another instance answers" in error.message
