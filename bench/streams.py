"""What one message of a session costs its two ends: by gRPC's own client and server, and by ours
(``omnicore.grpc_stream``, ``omnicore.grpc_stream_server``).

    python -m bench.streams [--quick]

Client and server have a process and a core each; a message is a frame with the events of an engine step for 32
requests. CPU is that of a process with all its threads, coding of messages included. Clients are measured at gRPC's
server, servers with our client, and all take turns:

* **as fast as it can**: the server writes frame after frame, which arrive several at a time;
* **one every 10 ms**: as an engine does;
* **ping-pong**: one frame there, one back, nothing else under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import uvloop

from bench import harness
from omni.v1 import stage_service_pb2 as pb
from omni.v1 import stage_service_pb2_grpc as pb_grpc
from omnicore import rpc
from omnicore.grpc_stream import Dial, GrpcStream, open_stream
from omnicore.grpc_stream_server import ServedStream, StreamMethod, StreamServer

EVENTS = 32
PERIOD_S = 0.01
CLIENTS = {"grpc": "grpc.aio", "own": "our own"}
_METHOD = "/omni.v1.StageService/Session"
_WARM = 50
"""Round trips before anything is measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much is done in one round by one client."""

    rounds: int = 7
    fast: int = 5000
    paced: int = 150
    pings: int = 1500


# -- the server's process --


def _frame() -> pb.SessionResponse:
    events = [pb.StageEvent(call_id=i + 1, text=f" token{i}", token_ids=[i]) for i in range(EVENTS)]
    return pb.SessionResponse(events=events)


class _Server(pb_grpc.StageServiceServicer):
    """Answers an abort with one frame, and a greeting, "FRAMES PERIOD_S" in place of a name, with frames; then ends."""

    async def Session(  # noqa: N802 -- the proto's name
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[pb.SessionResponse]:
        frame = _frame()
        async for request in request_iterator:
            if request.aborts:
                yield frame
                continue
            frames, period_s = request.hello.gateway_id.split()
            for _ in range(int(frames)):
                yield frame
                if float(period_s):
                    await asyncio.sleep(float(period_s))
            return


class _Handler:
    """The same on a stream of our own."""

    def __init__(self, stream: ServedStream) -> None:
        self._stream = stream
        self._frame = _frame()
        self._room = asyncio.Event()
        self._frames: asyncio.Task[None] | None = None

    def on_message(self, message: bytes) -> None:
        request = pb.SessionRequest.FromString(message)
        if request.aborts:
            self._stream.write(self._frame.SerializeToString())
        else:
            frames, period_s = request.hello.gateway_id.split()
            self._frames = asyncio.create_task(self._send(int(frames), float(period_s)))

    async def _send(self, frames: int, period_s: float) -> None:
        for _ in range(frames):
            self._stream.write(self._frame.SerializeToString())
            if self._stream.full:
                self._room.clear()
                await self._room.wait()
            if period_s:
                await asyncio.sleep(period_s)
        self._stream.finish()

    def on_room(self) -> None:
        self._room.set()

    def on_half_close(self) -> None:
        self._stream.finish()

    def on_end(self) -> None:
        self._room.set()


async def _serve() -> None:
    def add(server: Any) -> None:
        pb_grpc.add_StageServiceServicer_to_server(_Server(), server)  # type: ignore[abstract]

    running = await rpc.serve(add, (), host="127.0.0.1", port=0)

    own = StreamServer({_METHOD: StreamMethod(_Handler)})
    ports = {"grpc": running.port, "own": await own.start("127.0.0.1", 0)}

    async def answer(_: dict[str, Any]) -> dict[str, Any]:
        return {"ports": ports, "cpu_s": time.process_time()}

    await harness.serve_lines(answer)
    await own.close()
    await running.stop(0)


# -- the clients --

_PING = pb.SessionRequest(aborts=[1])
Times = dict[str, tuple[float, float, float]]
"""By what was done: CPU of the client, of the server, and wall time of one frame, in µs."""


async def _timed(server: harness.Helper, frames: int, work: Awaitable[int]) -> tuple[float, float, float]:
    begin = time.process_time(), float((await server.ask("cpu"))["cpu_s"]), time.monotonic()
    done = await work
    wall_s = time.monotonic()
    end = time.process_time(), float((await server.ask("cpu"))["cpu_s"]), wall_s
    assert done == frames, f"{done} of {frames} frames came"
    client, served, wall = ((after - before) / frames * 1e6 for before, after in zip(begin, end, strict=True))
    return client, served, wall


def _take(frame: pb.SessionResponse) -> None:
    for _ in frame.events:
        pass


class _ByGrpc:
    def __init__(self, call: Any) -> None:
        self._call = call

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, address: str) -> AsyncIterator[_ByGrpc]:
        async with rpc.channel(address) as channel:
            stub: Any = pb_grpc.StageServiceStub(channel)
            yield cls(stub.Session())

    async def pings(self, count: int) -> int:
        for _ in range(count):
            await self._call.write(_PING)
            _take(await self._call.read())
        return count

    async def stream(self, greeting: pb.SessionRequest) -> int:
        await self._call.write(greeting)
        count = 0
        while isinstance(frame := await self._call.read(), pb.SessionResponse):
            _take(frame)
            count += 1
        return count


class _ByOwn:
    def __init__(self) -> None:
        self._stream: GrpcStream | None = None
        self._count = 0
        self._answer: asyncio.Future[None] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, address: str) -> AsyncIterator[_ByOwn]:
        client = cls()
        async with open_stream(Dial(address), _METHOD, client._on_message) as client._stream:
            yield client

    def _on_message(self, message: bytes) -> None:
        _take(pb.SessionResponse.FromString(message))
        self._count += 1
        if self._answer is not None:
            self._answer.set_result(None)

    async def pings(self, count: int) -> int:
        assert self._stream is not None
        loop = asyncio.get_running_loop()
        for _ in range(count):
            self._answer = loop.create_future()
            self._stream.write(_PING.SerializeToString())
            await self._answer
        self._answer = None
        return count

    async def stream(self, greeting: pb.SessionRequest) -> int:
        assert self._stream is not None
        self._count = 0
        self._stream.write(greeting.SerializeToString())
        await self._stream.ended()
        return self._count


async def _round(server: harness.Helper, way: type[_ByGrpc | _ByOwn], address: str, effort: Effort) -> Times:
    times: Times = {}
    for name, frames, period_s in (("fast", effort.fast, 0.0), ("paced", effort.paced, PERIOD_S)):
        greeting = pb.SessionRequest(hello=pb.SessionHello(gateway_id=f"{frames} {period_s}"))
        async with way.opened(address) as client:
            await client.pings(_WARM)
            if not times:
                times["ping"] = await _timed(server, effort.pings, client.pings(effort.pings))
            times[name] = await _timed(server, frames, client.stream(greeting))
    return times


async def measure(effort: Effort) -> dict[str, float]:
    """Medians of all rounds, and of the ratio in each."""
    pairs: dict[str, tuple[type[_ByGrpc | _ByOwn], str]] = {
        "client_grpc": (_ByGrpc, "grpc"),
        "client_own": (_ByOwn, "grpc"),
        "server_own": (_ByOwn, "own"),
    }
    rounds: list[dict[str, Times]] = []
    cores = sorted(os.sched_getaffinity(0))
    async with harness.Helper("server", [sys.executable, "-m", "bench.streams", "--serve"]) as server:
        ports = (await server.ask("ports"))["ports"]
        if len(cores) > 1:
            harness.pin(server.pid, {cores[0]})
            os.sched_setaffinity(0, {cores[1]})
        for number in range(effort.rounds):
            order = list(pairs) if number % 2 else list(reversed(pairs))
            of_round = {}
            for name in order:
                way, port = pairs[name]
                of_round[name] = await _round(server, way, f"127.0.0.1:{ports[port]}", effort)
            # gRPC's server with our client is what our server is held against.
            rounds.append({**of_round, "server_grpc": of_round["client_own"]})
    figures: dict[str, float] = {}
    for what in ("fast", "paced", "ping"):
        for end, index in (("client", 0), ("server", 1)):
            for unit, at in (("cpu_us", index), ("wall_us", 2)):
                for library in CLIENTS:
                    key = f"{what}_{end}_{library}_{unit}"
                    figures[key] = statistics.median(times[f"{end}_{library}"][what][at] for times in rounds)
                ratios = [times[f"{end}_own"][what][at] / times[f"{end}_grpc"][what][at] for times in rounds]
                figures[f"{what}_{end}_{unit}_ratio"] = statistics.median(ratios)
    return figures


def _report(figures: dict[str, float]) -> None:
    titles = {"fast": "as fast as it can", "paced": f"one every {PERIOD_S * 1e3:g} ms", "ping": "ping-pong"}
    columns = ["frames of 32 events", *(f"{name}: CPU µs" for name in CLIENTS.values()), "ratio"]
    columns += [f"{name}: wall µs" for name in CLIENTS.values()]
    keys = ("grpc_cpu_us", "own_cpu_us", "cpu_us_ratio", "grpc_wall_us", "own_wall_us")
    for end in ("client", "server"):
        rows = [[title, *(figures[f"{what}_{end}_{key}"] for key in keys)] for what, title in titles.items()]
        harness.report("streams", f"what a frame costs the {end}", columns, rows)


def main() -> None:
    parser = harness.parser(__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="be the server of another one, which asks on stdin")
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(_serve())
        return
    effort = Effort(rounds=2, fast=500, paced=20, pings=200) if arguments.quick else Effort()
    figures = uvloop.run(measure(effort))
    _report(figures)
    harness.store("streams", figures, arguments.quick)


if __name__ == "__main__":
    main()
