"""Workers of a three-stage pipeline in this process, over real sockets, and a tiny gateway to drive them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio

from omni.v1 import pipeline_pb2, prompt_pb2, types_pb2
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import rpc
from omnicore.clock import SYSTEM_CLOCK
from omnicore.errors import OmniError, from_status
from omnicore.security import Security
from stage_worker.config import StageWorkerConfig
from stage_worker.control_plane_client import ControlPlaneClient
from stage_worker.worker import Worker
from tests.support.processes import wait_until

_epochs = itertools.count(100)


def pipeline(*sim: dict[str, Any], max_num_seqs: int = 0, chunk_by: str = "SENTENCE") -> pipeline_pb2.Pipeline:
    """Text → tensors → audio; ``sim`` has the options of each stage."""
    outputs = ("text", "tensor", "audio")
    plan = pipeline_pb2.Pipeline(name="demo", async_chunk=True, entrypoints={"chat": 0, "speech": 1})
    for stage_id, output in enumerate(outputs):
        stage = plan.stages.add(
            stage_id=stage_id,
            name=("thinker", "talker", "vocoder")[stage_id],
            engine="sim",
            model="none",
            config_sha256="0" * 64,
            tensor_parallel_size=1,
            max_num_seqs=max_num_seqs,
        )
        options = sim[stage_id] if stage_id < len(sim) else {}
        stage.engine_args.update({"sim": {"output": output, "seconds_per_chunk": 0.01, **options}})
    for from_stage in (0, 1):
        plan.edges.add(
            from_stage=from_stage,
            to_stage=from_stage + 1,
            window_size=4,
            connector="shm",
            chunk_by=pipeline_pb2.ChunkBy.Value(f"CHUNK_BY_{chunk_by}"),
        )
    # No test is about a pool that stays full, as one does for long that many calls share on a busy machine.
    plan.connectors.add(name="shm", kind="shm").extra.update({"put_wait_s": 60})
    return plan


@contextlib.asynccontextmanager
async def local_worker(plan: pipeline_pb2.Pipeline, stage_id: int, **config: Any) -> AsyncIterator[Worker]:
    """A serving worker that no control plane knows; ``config`` may have a ``security``, too."""
    security: Security | None = config.pop("security", None)
    settings = StageWorkerConfig(
        pipeline=plan.name,
        stage_id=stage_id,
        control_plane=("127.0.0.1:1",),
        **{"listen": "127.0.0.1:0", "pool_bytes": 8 * 1024 * 1024, **config},
    )
    client = ControlPlaneClient(settings.control_plane, SYSTEM_CLOCK)
    worker = Worker(settings, plan, plan.stages[stage_id], client, security=security)
    try:
        await worker.listen()
        stage = types_pb2.StageRef(pipeline=plan.name, stage_id=stage_id)
        worker.identity.adopt(types_pb2.ReplicaRef(stage=stage, replica_id=0, epoch=next(_epochs)))
        await worker.start_engine()
        yield worker
    finally:
        await worker.close()


@contextlib.asynccontextmanager
async def local_workers(plan: pipeline_pb2.Pipeline, **config: Any) -> AsyncIterator[list[Worker]]:
    """One worker per stage."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(local_worker(plan, stage.stage_id, **config)) for stage in plan.stages]


class Call:
    """What came back for one call."""

    def __init__(self) -> None:
        self.events: list[pb.StageEvent] = []
        self.done = asyncio.Event()
        self.first = asyncio.Event()

    def take(self, event: pb.StageEvent) -> None:
        assert not self.done.is_set(), "an event after the last one"
        self.events.append(event)
        self.first.set()
        if event.HasField("finish") or event.HasField("error"):
            self.done.set()

    async def wait(self) -> Call:
        """Wait for the end."""
        async with asyncio.timeout(30):
            await self.done.wait()
        return self

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def media(self) -> bytes:
        return b"".join(event.media for event in self.events)

    @property
    def error(self) -> OmniError | None:
        return from_status(self.events[-1].error) if self.events[-1].HasField("error") else None


class Session:
    """A gateway's session with one worker."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel | None = None) -> None:
        self.worker = worker
        self.calls: dict[int, Call] = {}
        self.frames: list[pb.SessionResponse] = []
        self.ids = itertools.count(1)
        self.ended = asyncio.Event()
        self.failure: grpc.aio.AioRpcError | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self._channel = channel or rpc.channel(worker.identity.endpoint)
        self._writing = asyncio.Lock()
        self.stream = pb_grpc.StageServiceStub(self._channel).Session(None)

    async def open(self, replica: types_pb2.ReplicaRef | None = None, beat_s: float = 0.0) -> None:
        hello = pb.SessionHello(gateway_id="test", replica=replica or self.worker.identity.current)
        if beat_s:
            hello.beat_interval.FromNanoseconds(int(beat_s * 1e9))
        await self.stream.write(pb.SessionRequest(hello=hello))
        self._reader = asyncio.create_task(self._read())

    async def begin(self, *calls: pb.StageCall) -> list[Call]:
        """Send calls in one frame."""
        made = []
        for call in calls:
            call.call_id = call.call_id or next(self.ids)
            self.calls[call.call_id] = Call()
            made.append(self.calls[call.call_id])
        await self.send(pb.SessionRequest(calls=calls))
        return made

    async def run(self, call: pb.StageCall) -> Call:
        """One call to its end."""
        (made,) = await self.begin(call)
        return await made.wait()

    async def abort(self, *call_ids: int) -> None:
        await self.send(pb.SessionRequest(aborts=call_ids))

    async def send(self, request: pb.SessionRequest) -> None:
        async with self._writing:
            await self.stream.write(request)

    async def close(self) -> None:
        self.stream.cancel()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._channel.close(None)

    async def _read(self) -> None:
        try:
            while True:
                await self.reading.wait()
                frame = await self.stream.read()
                if not isinstance(frame, pb.SessionResponse):
                    break
                self.frames.append(frame)
                for event in frame.events:
                    if event.call_id in self.calls:
                        self.calls[event.call_id].take(event)
        except grpc.aio.AioRpcError as error:
            self.failure = error
        self.ended.set()


@contextlib.asynccontextmanager
async def sessions(workers: Sequence[Worker]) -> AsyncIterator[list[Session]]:
    """A session with each worker."""
    opened: list[Session] = []
    try:
        for worker in workers:
            opened.append(Session(worker))
            await opened[-1].open()
        yield opened
    finally:
        for session in opened:
            await session.close()


def call(request_id: str, text: str | None = None, emit: bool = True, **fields: Any) -> pb.StageCall:
    """A call of one stage; ``text`` makes it the one where the request enters."""
    made = pb.StageCall(request_id=request_id, emit_output=emit, **fields)
    if text is not None:
        made.prompt.CopyFrom(prompt_pb2.Prompt(text=text))
    return made


def flow_out(to_stage: int, chunk_by: str = "SENTENCE", connector: str = "auto", retain: bool = False) -> pb.EdgeOutput:
    """Output that flows."""
    by = pipeline_pb2.ChunkBy.Value(f"CHUNK_BY_{chunk_by}")
    return pb.EdgeOutput(to_stage=to_stage, flow=True, chunk_by=by, connector=connector, consumers=1, retain=retain)


def flow_in(producer: Worker, window: int = 4, attempt: int | None = None) -> pb.EdgeInput:
    """Input that flows from ``producer``; ``attempt``: of its call, if that is an earlier one."""
    identity = producer.identity
    ref, endpoint, cheaper = identity.current, identity.endpoint, identity.session_endpoint
    return pb.EdgeInput(
        from_stage=producer.parts.stage.stage_id,
        flow=pb.FlowSource(replica=ref, endpoint=endpoint, session_endpoint=cheaper, window=window, attempt=attempt),
    )


def speech_calls(
    workers: Sequence[Worker], request_id: str, text: str, chunk_by: str = "SENTENCE", connector: str = "auto"
) -> Iterator[pb.StageCall]:
    """The three calls of one spoken answer."""
    yield call(request_id, text, outputs=[flow_out(1, chunk_by, connector)])
    yield call(request_id, emit=False, inputs=[flow_in(workers[0])], outputs=[flow_out(2, connector=connector)])
    yield call(request_id, inputs=[flow_in(workers[1])])


async def assert_empty(workers: Sequence[Worker], timeout_s: float = 30.0) -> None:
    """Every worker lets go of everything soon."""
    for worker in workers:
        await wait_until(_Held(worker).nothing, timeout_s, f"stage {worker.parts.stage.stage_id} holds nothing")
    await wait_until(lambda: not _call_tasks(), timeout_s, "call tasks")


class _Held:
    """What a worker holds."""

    def __init__(self, worker: Worker) -> None:
        self._parts = worker.parts

    def nothing(self) -> bool:
        parts = self._parts
        held = {
            "calls": len(parts.calls),
            "flows": len(parts.flows),
            "handles": parts.connectors.usage().handles,
            "engine": parts.engine.load().queue_length,
        }
        return not any(held.values())


def _call_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith(("call-", "execute-"))]
