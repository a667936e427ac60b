"""A control plane and workers whose every step a test decides, speaking the real protos over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc.aio

from omni.v1 import (
    output_pb2,
    pipeline_pb2,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    stage_service_pb2,
    stage_service_pb2_grpc,
    types_pb2,
)
from omnicore import errors, rpc
from tests.support.ports import reserved_port

Script = Callable[["Call"], Awaitable[None]]

# As control planes do: a gateway takes a watch that is silent for longer for one that hangs.
BOOKMARK_S = 1.0


@dataclasses.dataclass(slots=True)
class Call:
    """One stage call at a scripted worker."""

    request: stage_service_pb2.StageCall
    worker: ScriptedWorker
    _frames: asyncio.Queue[stage_service_pb2.SessionResponse]

    def send(self, *events: stage_service_pb2.StageEvent) -> None:
        """Send events of this call in one frame."""
        for event in events:
            event.call_id = self.request.call_id
        self._frames.put_nowait(stage_service_pb2.SessionResponse(events=events))

    def text(self, text: str) -> None:
        """Some text."""
        self.send(stage_service_pb2.StageEvent(text=text))

    def audio(self, data: bytes, rate: int = 24000) -> None:
        """Some PCM, with its format."""
        info = output_pb2.MediaInfo(mime_type="audio/pcm", sample_rate_hz=rate, channels=1)
        self.send(stage_service_pb2.StageEvent(media=data, media_info=info))

    def finish(self, reason: str = "stop", prompt: int = 0, completion: int = 0) -> None:
        """The end."""
        finish = output_pb2.CallFinish(reason=reason, prompt_tokens=prompt, completion_tokens=completion)
        self.send(stage_service_pb2.StageEvent(finish=finish))

    def fail(self, error: errors.OmniError) -> None:
        """The end, by an error."""
        self.send(stage_service_pb2.StageEvent(error=error.to_status()))


class ScriptedWorker(stage_service_pb2_grpc.StageServiceServicer):
    """A StageService that runs ``script`` for each call."""

    def __init__(self, pipeline: str, stage_id: int, replica_id: int, script: Script, epoch: int) -> None:
        self.ref = types_pb2.ReplicaRef(
            stage=types_pb2.StageRef(pipeline=pipeline, stage_id=stage_id), replica_id=replica_id, epoch=epoch
        )
        self.script = script
        self.calls: list[stage_service_pb2.StageCall] = []
        self.sources: list[stage_service_pb2.NewSource] = []
        self.repeats = self.takes_sources = False
        """What it says of itself."""
        self.aborts: list[int] = []
        self.released: list[int] = []
        """Those of calls that had ended, whose data was kept."""
        self.aborted_requests: list[str] = []
        self.drain_heard = 0
        """How often a gateway said that it has heard of a drain."""
        self.tokenizing = 0
        self.running: dict[int, asyncio.Task[None]] = {}
        self.sessions: set[asyncio.Queue[stage_service_pb2.SessionResponse]] = set()
        self.answers_aborts = True
        self._sessions_of: dict[int, asyncio.Queue[stage_service_pb2.SessionResponse]] = {}
        self._awake = asyncio.Event()
        self._awake.set()
        self.endpoint = ""
        self._server: rpc.RunningServer | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await rpc.serve(
            lambda server: stage_service_pb2_grpc.add_StageServiceServicer_to_server(self, server),
            ["omni.v1.StageService"],
            host="127.0.0.1",
            port=port,
        )
        self.endpoint = f"127.0.0.1:{self._server.port}"

    @property
    def alive(self) -> bool:
        """True from ``start`` to ``kill``."""
        return self._server is not None

    async def kill(self) -> None:
        """As SIGKILL looks from outside: connections break, the port is closed. Its record stays: leases outlive."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.server.stop(None)
        for task in self.running.values():
            task.cancel()
        await asyncio.gather(*self.running.values(), return_exceptions=True)
        self.running.clear()

    def freeze(self) -> None:
        """As SIGSTOP looks from outside: connections stand, nothing is read or sent."""
        self._awake.clear()

    def wake(self) -> None:
        """Go on."""
        self._awake.set()

    @property
    def session_endpoint(self) -> str:
        """The same server, by another name."""
        return self.endpoint.replace("127.0.0.1", "localhost")

    def record(self) -> types_pb2.Replica:
        return types_pb2.Replica(
            ref=self.ref,
            endpoint=self.endpoint,
            session_endpoint=self.session_endpoint,
            state=types_pb2.REPLICA_STATE_READY,
            engine="sim",
        )

    def broadcast(self, frame: stage_service_pb2.SessionResponse) -> None:
        """Send a frame to every session."""
        for frames in self.sessions:
            frames.put_nowait(frame)

    async def Session(  # noqa: N802
        self, request_iterator: AsyncIterator[stage_service_pb2.SessionRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[stage_service_pb2.SessionResponse]:
        first = await anext(request_iterator)
        await self._awake.wait()
        if first.hello.replica.epoch != self.ref.epoch:
            raise errors.FailedPreconditionError(f"epoch is {self.ref.epoch}, not {first.hello.replica.epoch}")
        frames: asyncio.Queue[stage_service_pb2.SessionResponse] = asyncio.Queue()
        # Before the welcome leaves: who has it may rely on getting every broadcast from then on.
        welcome = stage_service_pb2.SessionWelcome(
            replica=self.ref, repeats=self.repeats, takes_sources=self.takes_sources
        )
        frames.put_nowait(stage_service_pb2.SessionResponse(welcome=welcome))
        self.sessions.add(frames)
        tasks = [asyncio.create_task(self._read(request_iterator, frames))]
        if first.hello.HasField("beat_interval"):
            tasks.append(asyncio.create_task(self._beat(first.hello.beat_interval.ToNanoseconds() / 1e9, frames)))
        try:
            while True:
                frame = await frames.get()
                await self._awake.wait()
                yield frame
        finally:
            self.sessions.discard(frames)
            for task in tasks:
                task.cancel()
            for call_id in [call_id for call_id, of in self._sessions_of.items() if of is frames]:
                del self._sessions_of[call_id]
                if (running := self.running.pop(call_id, None)) is not None:
                    running.cancel()  # as workers do when a session breaks
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self, interval_s: float, frames: asyncio.Queue[stage_service_pb2.SessionResponse]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if (self.running or not self.answers_aborts) and self._awake.is_set():
                frames.put_nowait(stage_service_pb2.SessionResponse())

    async def _read(
        self,
        requests: AsyncIterator[stage_service_pb2.SessionRequest],
        frames: asyncio.Queue[stage_service_pb2.SessionResponse],
    ) -> None:
        async for frame in requests:
            await self._awake.wait()
            self.drain_heard += frame.drain_heard
            for call_id in frame.aborts:
                self.aborts.append(call_id)
                if (task := self.running.pop(call_id, None)) is None:
                    self.released.append(call_id)
                    continue
                task.cancel()
                if self.answers_aborts:
                    error = errors.RequestCancelledError("aborted by the gateway", reason="ABORTED").to_status()
                    end = stage_service_pb2.StageEvent(call_id=call_id, error=error)
                    frames.put_nowait(stage_service_pb2.SessionResponse(events=[end]))
            self.sources += frame.sources
            for call in frame.calls:
                self.calls.append(call)
                self._sessions_of[call.call_id] = frames
                task = asyncio.create_task(self._run(Call(call, self, frames)))
                self.running[call.call_id] = task

    async def _run(self, call: Call) -> None:
        await self.script(call)
        self.running.pop(call.request.call_id, None)

    async def Abort(  # noqa: N802
        self, request: stage_service_pb2.StageServiceAbortRequest, context: rpc.ServicerContext
    ) -> stage_service_pb2.StageServiceAbortResponse:
        self.aborted_requests.append(request.request_id)
        return stage_service_pb2.StageServiceAbortResponse(found=True)

    async def Tokenize(  # noqa: N802
        self, request: stage_service_pb2.TokenizeRequest, context: rpc.ServicerContext
    ) -> stage_service_pb2.TokenizeResponse:
        """Never answers."""
        self.tokenizing += 1
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class ScriptedControlPlane(
    registry_service_pb2_grpc.RegistryServiceServicer, pipeline_service_pb2_grpc.PipelineServiceServicer
):
    """Both watches, with a revision that grows with every change."""

    def __init__(self, pipelines: Sequence[pipeline_pb2.Pipeline] = ()) -> None:
        self.pipelines = {pipeline.name: pipeline for pipeline in pipelines}
        self.replicas: dict[tuple[str, int, int], types_pb2.Replica] = {}
        self.revision = 1
        self.resumed_from: list[int] = []
        self.address = ""
        self._watchers: set[asyncio.Queue[registry_service_pb2.WatchReplicasResponse]] = set()
        self._server: rpc.RunningServer | None = None

    async def start(self, port: int = 0) -> None:
        def add(server: grpc.aio.Server) -> None:
            registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(self, server)
            pipeline_service_pb2_grpc.add_PipelineServiceServicer_to_server(self, server)

        self._server = await rpc.serve(add, [], host="127.0.0.1", port=port)
        self.address = f"127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.server.stop(None)

    @property
    def watchers(self) -> int:
        """Open WatchReplicas streams."""
        return len(self._watchers)

    def put(self, replica: types_pb2.Replica) -> None:
        """Register or change a replica."""
        ref = replica.ref
        self.replicas[ref.stage.pipeline, ref.stage.stage_id, ref.replica_id] = replica
        self.revision += 1
        self._push(registry_service_pb2.WatchReplicasResponse(revision=self.revision, changed=[replica]))

    def remove(self, ref: types_pb2.ReplicaRef, *, lapsed: bool = False) -> None:
        """Take a replica away. ``lapsed``: not by an operator's wish."""
        self.replicas.pop((ref.stage.pipeline, ref.stage.stage_id, ref.replica_id), None)
        self.revision += 1
        self._push(
            registry_service_pb2.WatchReplicasResponse(
                revision=self.revision, removed=[ref], lapsed=[ref] if lapsed else []
            )
        )

    def _push(self, message: registry_service_pb2.WatchReplicasResponse) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(message)

    async def WatchReplicas(  # noqa: N802
        self, request: registry_service_pb2.WatchReplicasRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[registry_service_pb2.WatchReplicasResponse]:
        self.resumed_from.append(request.resume_revision)
        messages: asyncio.Queue[registry_service_pb2.WatchReplicasResponse] = asyncio.Queue()
        self._watchers.add(messages)
        try:
            yield registry_service_pb2.WatchReplicasResponse(
                revision=self.revision, snapshot=True, changed=self.replicas.values()
            )
            while True:
                try:
                    # Not wait_for: that of Python 3.11 forgets a cancellation that meets an arriving message.
                    async with asyncio.timeout(BOOKMARK_S):
                        message = await messages.get()
                except TimeoutError:
                    message = registry_service_pb2.WatchReplicasResponse(revision=self.revision)
                yield message
        finally:
            self._watchers.discard(messages)

    async def WatchPipelines(  # noqa: N802
        self, request: pipeline_service_pb2.WatchPipelinesRequest, context: rpc.ServicerContext
    ) -> AsyncIterator[pipeline_service_pb2.WatchPipelinesResponse]:
        yield pipeline_service_pb2.WatchPipelinesResponse(
            revision=self.revision, snapshot=True, changed=self.pipelines.values()
        )
        while True:
            await asyncio.sleep(BOOKMARK_S)
            yield pipeline_service_pb2.WatchPipelinesResponse(revision=self.revision)


@dataclasses.dataclass(slots=True)
class Cluster:
    """A scripted control plane with its workers."""

    control_plane: ScriptedControlPlane
    workers: list[ScriptedWorker] = dataclasses.field(default_factory=list)

    async def add(
        self,
        pipeline: str,
        stage_id: int,
        script: Script,
        replica_id: int = 0,
        port: int = 0,
        *,
        repeats: bool = False,
        takes_sources: bool = False,
    ) -> ScriptedWorker:
        """Start a worker and register it. ``port``: one to come back to; 0 takes any."""
        epoch = 100 + len(self.workers)
        worker = ScriptedWorker(pipeline, stage_id, replica_id, script, epoch)  # type: ignore[abstract]
        worker.repeats, worker.takes_sources = repeats, takes_sources
        await worker.start(port)
        self.workers.append(worker)
        self.control_plane.put(worker.record())
        return worker

    def claims(self) -> list[tuple[str, int, int, int]]:
        """Pipeline, stage, replica and epoch of every worker that lives and whose record is the current one."""
        found = []
        for worker in self.workers:
            ref = worker.ref
            key = (ref.stage.pipeline, ref.stage.stage_id, ref.replica_id)
            record = self.control_plane.replicas.get(key)
            if worker.alive and record is not None and record.ref.epoch == ref.epoch:
                found.append((*key, ref.epoch))
        return found


@contextlib.asynccontextmanager
async def cluster(*pipelines: pipeline_pb2.Pipeline) -> AsyncIterator[Cluster]:
    """A running control plane that knows ``pipelines``; all ends with the context."""
    control_plane = ScriptedControlPlane(pipelines)  # type: ignore[abstract]
    await control_plane.start(reserved_port())
    running = Cluster(control_plane)
    try:
        yield running
    finally:
        for worker in running.workers:
            await worker.kill()
        await control_plane.stop()
