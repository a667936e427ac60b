"""Control planes in this process over a real etcd, and workers that speak to them as real ones do.

What one control plane has done another one hears of later: ``Cluster.caught_up`` waits for that. Unless a test says
otherwise nothing ends by time: leases outlast the test, and beats that are late on a busy machine make nobody suspect.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
import uuid
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from control_plane.app import ControlPlane
from control_plane.config import ControlPlaneConfig
from control_plane.etcd import EtcdClient
from omni.v1 import (
    admin_service_pb2_grpc,
    pipeline_pb2,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2_grpc,
    types_pb2,
)
from omni.v1 import registry_service_pb2 as pb
from omnicore import errors, protocol, rpc
from omnicore.clock import SYSTEM_CLOCK, Clock
from tests.support.etcd import EtcdNode, etcd_server
from tests.support.processes import wait_until

DEPLOY = """
pipeline: demo
stages:
  - {stage_id: 0, name: thinker, engine: sim, final_output: true, final_output_type: text}
  - {stage_id: 1, name: talker, engine: sim, num_replicas: 2, final_output: true, final_output_type: audio}
edges:
  - {from: 0, to: 1}
"""

# No key of ours: a change of it moves the revision of tables, and nothing else.
_MARK = "pipelines/.."
# Names only: nobody listens there.
_ports = itertools.count(10_000)

STARTING, READY = types_pb2.REPLICA_STATE_STARTING, types_pb2.REPLICA_STATE_READY
ASLEEP, DRAINING = types_pb2.REPLICA_STATE_ASLEEP, types_pb2.REPLICA_STATE_DRAINING


class Client:
    """A connection to one control plane."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = rpc.channel(address)
        self.registry = registry_service_pb2_grpc.RegistryServiceStub(self.channel)
        self.pipelines = pipeline_service_pb2_grpc.PipelineServiceStub(self.channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(self.channel)

    async def apply(self, text: str = DEPLOY, **fields: str) -> pipeline_pb2.Pipeline:
        """Apply a deploy file."""
        request = pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=text, **fields)  # type: ignore[arg-type]
        response = await self.pipelines.ApplyPipeline(request)
        return response.pipeline

    async def replicas(self) -> dict[int, types_pb2.Replica]:
        """The table, by replica id; for tests with one stage."""
        response = await self.registry.ListReplicas(pb.ListReplicasRequest())
        return {replica.ref.replica_id: replica for replica in response.replicas}


@dataclasses.dataclass(slots=True)
class Watcher:
    """Follows the replicas in the background and remembers all frames."""

    call: grpc.aio.UnaryStreamCall[pb.WatchReplicasRequest, pb.WatchReplicasResponse]
    frames: list[pb.WatchReplicasResponse] = dataclasses.field(default_factory=list)
    table: dict[tuple[str, int, int], types_pb2.Replica] = dataclasses.field(default_factory=dict)
    revision: int = 0
    stale: bool = False
    error: errors.OmniError | None = None
    ended: dict[tuple[str, int, int], int] = dataclasses.field(default_factory=dict)
    """The epochs of claims that were removed: a frame may also name claims that came and went before it."""

    async def run(self) -> None:
        try:
            async for frame in self.call:
                self._take(frame)
        except grpc.aio.AioRpcError as error:
            self.error = errors.from_rpc_error(error)

    def _take(self, frame: pb.WatchReplicasResponse) -> None:
        self.frames.append(frame)
        if frame.snapshot:
            self.table.clear()
        else:
            assert frame.revision >= self.revision, "revisions never go back"
        self.revision, self.stale = frame.revision, frame.stale
        for replica in frame.changed:
            key = _key(replica.ref)
            assert replica.ref.epoch > self.ended.get(key, 0), "a claim that was removed does not come back"
            self.table[key] = replica
        for ref in frame.removed:
            self.table.pop(_key(ref), None)
            self.ended[_key(ref)] = ref.epoch

    def ids(self, stage_id: int = 1) -> set[int]:
        return {replica_id for _, stage, replica_id in self.table if stage == stage_id}

    def one(self, replica_id: int = 0, stage_id: int = 1) -> types_pb2.Replica | None:
        return self.table.get(("demo", stage_id, replica_id))

    def suspicions(self) -> int:
        """How often a replica has become suspect."""
        count, suspect = 0, set[tuple[str, int, int]]()
        for replica in (replica for frame in self.frames for replica in frame.changed):
            key = _key(replica.ref)
            count += replica.suspect and key not in suspect
            (suspect.add if replica.suspect else suspect.discard)(key)
        return count


def _key(ref: types_pb2.ReplicaRef) -> tuple[str, int, int]:
    return ref.stage.pipeline, ref.stage.stage_id, ref.replica_id


@contextlib.asynccontextmanager
async def watching(client: Client, resume: int = 0) -> AsyncIterator[Watcher]:
    call = client.registry.WatchReplicas(pb.WatchReplicasRequest(resume_revision=resume))
    watcher = Watcher(call)
    task = asyncio.create_task(watcher.run())
    try:
        await wait_until(lambda: bool(watcher.frames) or task.done(), what="first frame")
        yield watcher
    finally:
        call.cancel()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class Worker:
    """One instance: registers, beats, follows directives. ``hang`` and ``break_stream`` make trouble."""

    def __init__(self, pipeline: pipeline_pb2.Pipeline, stage_id: int = 1) -> None:
        stage = next(stage for stage in pipeline.stages if stage.stage_id == stage_id)
        self.request = pb.RegisterRequest(
            instance_uuid=str(uuid.uuid4()),
            stage=types_pb2.StageRef(pipeline=pipeline.name, stage_id=stage_id),
            endpoint=f"127.0.0.1:{next(_ports)}",
            fingerprint=types_pb2.StageFingerprint(
                model=stage.model,
                config_sha256=stage.config_sha256,
                tensor_parallel_size=stage.tensor_parallel_size,
                protocol_version=protocol.VERSION,
            ),
            state=READY,
            engine="sim",
        )
        self.claim = pb.RegisterResponse()
        self.state = READY
        self.load = types_pb2.LoadReport()
        self.answers: list[pb.HeartbeatResponse] = []
        self.registrations = 0
        self.hung = False
        self.reregister = True
        self._call: grpc.aio.StreamStreamCall[pb.HeartbeatRequest, pb.HeartbeatResponse] | None = None

    @property
    def replica_id(self) -> int:
        return self.claim.replica.replica_id

    @property
    def last(self) -> pb.HeartbeatResponse:
        """The last answer; an empty one before the first."""
        return self.answers[-1] if self.answers else pb.HeartbeatResponse()

    async def register(self, client: Client) -> pb.RegisterResponse:
        self.claim = await client.registry.Register(self.request, timeout=120)
        self.request.preferred_replica_id = self.replica_id
        self.registrations += 1
        return self.claim

    def beat(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            replica=self.claim.replica,
            lease_id=self.claim.lease_id,
            instance_uuid=self.request.instance_uuid,
            state=self.state,
            load=self.load,
        )

    async def run(self, *clients: Client, interval_s: float = 0.05) -> None:
        """Beat for ever, going round the control planes when a stream fails."""
        for client in itertools.cycle(clients):
            try:
                await self._stream(client, interval_s)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():  # cancelling a call of ours raises this, too
                    raise
            await asyncio.sleep(0.02)

    async def _stream(self, client: Client, interval_s: float) -> None:
        answered = asyncio.Event()

        async def beats() -> AsyncIterator[pb.HeartbeatRequest]:
            while True:
                while self.hung:
                    await asyncio.sleep(0.01)
                yield self.beat()
                await answered.wait()
                answered.clear()
                await asyncio.sleep(interval_s)

        self._call = call = client.registry.Heartbeat(beats())
        try:
            async for answer in call:
                self.answers.append(answer)
                if answer.directive == pb.HEARTBEAT_DIRECTIVE_REREGISTER and self.reregister:
                    await self._register_again(client)
                answered.set()
        finally:
            call.cancel()

    async def _register_again(self, client: Client) -> None:
        try:
            await self.register(client)
        except grpc.aio.AioRpcError as error:
            if error_of(error).reason not in ("EVICTED", "DRAINED"):
                raise
            self.reregister = False  # it lost its lease first, and heard of that before it heard why

    def break_stream(self) -> None:
        assert self._call is not None
        self._call.cancel()


@contextlib.asynccontextmanager
async def beating(worker: Worker, *clients: Client) -> AsyncIterator[None]:
    task = asyncio.create_task(worker.run(*clients))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


@dataclasses.dataclass(slots=True)
class Cluster:
    """An etcd and the control planes on it."""

    etcd: EtcdNode
    etcd_client: EtcdClient
    stack: contextlib.AsyncExitStack
    ttl_s: int
    heartbeat_interval_s: float
    etcd_timeout_s: float
    planes: list[ControlPlane] = dataclasses.field(default_factory=list)

    async def control_plane(
        self,
        *,
        loaded: bool = True,
        endpoint: str = "",
        listen: str = "127.0.0.1:0",
        etcd_client: EtcdClient | None = None,
        name: str = "default",
        clock: Clock = SYSTEM_CLOCK,
    ) -> tuple[ControlPlane, Client]:
        """Start another one. ``endpoint``: the way to etcd, if not the usual one; ``etcd_client`` instead: its whole
        connection. ``name``: of the cluster. With a ``clock`` that stands still nobody misses a beat."""
        settings = ControlPlaneConfig(
            listen=listen,
            etcd=(self.etcd.endpoint,),
            cluster=name,
            lease_ttl_s=self.ttl_s,
            heartbeat_interval_s=self.heartbeat_interval_s,
            drain_s=5.0,
        )
        if etcd_client is None:
            etcd_client = EtcdClient([endpoint or self.etcd.endpoint], timeout_s=self.etcd_timeout_s)
        await self.stack.enter_async_context(etcd_client)
        plane = await self.stack.enter_async_context(ControlPlane(settings, etcd_client, clock))
        client = Client(plane.address)
        await self.stack.enter_async_context(client.channel)
        if loaded:
            async with asyncio.timeout(30):
                await plane.loaded()
        self.planes.append(plane)
        return plane, client

    async def start(self) -> Client:
        """The first control plane, with the demo pipeline applied."""
        _, client = await self.control_plane()
        await client.apply()
        return client

    async def caught_up(self) -> None:
        """Wait until every control plane, all of which must run, knows what was written before this call."""
        for plane in self.planes:
            mark = f"{plane.table.keys.root}{_MARK}"
            revision = await self.etcd_client.put(mark, b"")
            await until(lambda r=revision, p=plane: p.table.revision >= r, "its watch")  # type: ignore[misc]
            await self.etcd_client.delete(mark)


@contextlib.asynccontextmanager
async def cluster(
    ttl_s: int = 300, heartbeat_interval_s: float = 2.0, etcd_timeout_s: float = 10.0
) -> AsyncIterator[Cluster]:
    """An etcd, and no control plane yet. Claims of workers that do not beat end after ``ttl_s``, whole seconds; those
    of workers that fall silent are suspect after ``heartbeat_interval_s`` and 1.5 s, or after three times as much if
    that is less. ``etcd_timeout_s``: what control planes wait for etcd."""
    async with (
        etcd_server() as node,
        EtcdClient([node.endpoint], timeout_s=10.0) as etcd_client,
        contextlib.AsyncExitStack() as stack,
    ):
        yield Cluster(node, etcd_client, stack, ttl_s, heartbeat_interval_s, etcd_timeout_s)


def error_of(error: grpc.aio.AioRpcError) -> errors.OmniError:
    return errors.from_rpc_error(error)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    await wait_until(condition, timeout_s, what)


async def _lone_worker(address: str) -> None:
    client = Client(address)
    async with client.channel:
        worker = Worker(await client.apply())
        worker.load.queue_length = 1
        await worker.register(client)
        await worker.run(client)


if __name__ == "__main__":
    asyncio.run(_lone_worker(sys.argv[1]))
