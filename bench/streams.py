"""What one message of a session costs its client: by gRPC's own client, and by ``omnicore.grpc_stream``.

    python -m bench.streams [--quick]

The server is gRPC's, in a process and on a core of its own; a message is a frame with the events of an engine step for
32 requests. CPU is that of the client's process with all its threads, parsing included. Both clients take turns:

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


async def _serve() -> None:
    def add(server: Any) -> None:
        pb_grpc.add_StageServiceServicer_to_server(_Server(), server)  # type: ignore[abstract]

    running = await rpc.serve(add, (), host="127.0.0.1", port=0)

    async def answer(_: dict[str, Any]) -> dict[str, Any]:
        return {"port": running.port}

    await harness.serve_lines(answer)
    await running.stop(0)


# -- the clients --

_PING = pb.SessionRequest(aborts=[1])
Times = dict[str, tuple[float, float]]
"""By what was done: CPU and wall time of one frame, in µs."""


async def _timed(frames: int, work: Awaitable[int]) -> tuple[float, float]:
    cpu_s, wall_s = time.process_time(), time.monotonic()
    done = await work
    assert done == frames, f"{done} of {frames} frames came"
    return (time.process_time() - cpu_s) / frames * 1e6, (time.monotonic() - wall_s) / frames * 1e6


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


async def _round(way: type[_ByGrpc | _ByOwn], address: str, effort: Effort) -> Times:
    times: Times = {}
    for name, frames, period_s in (("fast", effort.fast, 0.0), ("paced", effort.paced, PERIOD_S)):
        greeting = pb.SessionRequest(hello=pb.SessionHello(gateway_id=f"{frames} {period_s}"))
        async with way.opened(address) as client:
            await client.pings(_WARM)
            if not times:
                times["ping"] = await _timed(effort.pings, client.pings(effort.pings))
            times[name] = await _timed(frames, client.stream(greeting))
    return times


async def measure(effort: Effort) -> dict[str, float]:
    """Medians of all rounds, and of the ratio in each."""
    ways: dict[str, type[_ByGrpc | _ByOwn]] = {"grpc": _ByGrpc, "own": _ByOwn}
    rounds: list[dict[str, Times]] = []
    cores = sorted(os.sched_getaffinity(0))
    async with harness.Helper("server", [sys.executable, "-m", "bench.streams", "--serve"]) as server:
        address = f"127.0.0.1:{(await server.ask('port'))['port']}"
        if len(cores) > 1:
            harness.pin(server.pid, {cores[0]})
            os.sched_setaffinity(0, {cores[1]})
        for number in range(effort.rounds):
            order = list(ways) if number % 2 else list(reversed(ways))
            rounds.append({way: await _round(ways[way], address, effort) for way in order})
    figures: dict[str, float] = {}
    for what in ("fast", "paced", "ping"):
        for index, unit in enumerate(("cpu_us", "wall_us")):
            for way in ways:
                figures[f"{what}_{way}_{unit}"] = statistics.median(times[way][what][index] for times in rounds)
            ratios = [times["own"][what][index] / times["grpc"][what][index] for times in rounds]
            figures[f"{what}_{unit}_ratio"] = statistics.median(ratios)
    return figures


def _report(figures: dict[str, float]) -> None:
    titles = {"fast": "as fast as it can", "paced": f"one every {PERIOD_S * 1e3:g} ms", "ping": "ping-pong"}
    rows = [
        [title, *(figures[f"{what}_{key}"] for key in ("grpc_cpu_us", "own_cpu_us", "cpu_us_ratio")),
         *(figures[f"{what}_{key}"] for key in ("grpc_wall_us", "own_wall_us"))]
        for what, title in titles.items()
    ]  # fmt: skip
    columns = ["frames of 32 events", *(f"{name}: CPU µs" for name in CLIENTS.values()), "ratio"]
    columns += [f"{name}: wall µs" for name in CLIENTS.values()]
    harness.report("streams", "what a frame costs the client", columns, rows)


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
