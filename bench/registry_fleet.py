"""The load of bench.registry: replicas as connections of this process, and victims as processes of their own.

    python -m bench.registry_fleet SETTINGS_JSON

Answers each line of JSON on stdin with one on stdout:

* ``{"do": "grow", "count": N, "in_flight": C}``: N more replicas register, C at a time, and beat from then on;
* ``{"do": "victim"}``: one more process registers and beats (it was forked at the start, so that it costs nothing now);
* ``{"do": "beats"}``: how many beats were answered so far, and what went wrong.

Times are of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import signal
import sys
import time
from typing import Any

import uvloop

from bench.harness import serve_lines
from bench.registry_wire import WireReplica, registration
from omni.v1 import registry_service_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Whom to call, as what."""

    control_plane: str
    pipeline: str
    config_sha256: str
    protocol_version: str
    first_port: int
    victims: int

    async def replica(self, port: int) -> WireReplica:
        """Register one replica that claims to serve at ``port``, and let it beat. Raises if it is refused."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        request = registration(self.pipeline, self.config_sha256, f"127.0.0.1:{port}", self.protocol_version)
        host, _, control_port = self.control_plane.rpartition(":")
        _, replica = await loop.create_connection(
            lambda: WireReplica(request, lambda _: done.set_result(None)), host, int(control_port)
        )
        while not done.done():
            if replica.fault:
                raise RuntimeError(f"replica at port {port}: {replica.fault}")
            await asyncio.wait({done}, timeout=1.0)
        return replica


def _fork_victim(settings: Settings, port: int) -> tuple[int, int, int]:
    """A process that waits for a byte, then is one replica until killed. Its pid and the two ends to talk to it."""
    go_read, go_write = os.pipe()
    told_read, told_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(go_read)
        os.close(told_write)
        return pid, go_write, told_read
    # SIGKILL must end exactly what a worker's death ends: its own sockets.
    os.close(go_write)
    os.close(told_read)
    if not os.read(go_read, 1):
        os._exit(0)  # the parent went first

    async def live() -> None:
        replica = await settings.replica(port)
        line = {"uuid": replica.request.instance_uuid, "asked_s": replica.asked_s, "pid": os.getpid()}
        os.write(told_write, json.dumps(line).encode() + b"\n")
        await asyncio.get_running_loop().create_future()

    uvloop.run(live())
    os._exit(0)


class Fleet:
    """What the commands act on."""

    def __init__(self, settings: Settings, victims: list[tuple[int, int, int]]) -> None:
        self._settings = settings
        self._replicas: list[WireReplica] = []
        self._victims = victims

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""
        match command["do"]:
            case "grow":
                return await self._grow(command["count"], command["in_flight"])
            case "victim":
                return await self._victim()
            case "beats":
                faults = [replica.fault for replica in self._replicas if replica.fault]
                return {
                    "beats": sum(replica.beats for replica in self._replicas),
                    "faults": len(faults),
                    "fault": faults[0] if faults else "",
                    "reregister": sum(
                        registry_service_pb2.HEARTBEAT_DIRECTIVE_REREGISTER in replica.directives
                        for replica in self._replicas
                    ),
                    "directives": sorted({d for replica in self._replicas for d in replica.directives}),
                }
        raise ValueError(f"unknown command {command!r}")

    async def _grow(self, count: int, in_flight: int) -> dict[str, Any]:
        ports = iter(range(len(self._replicas), len(self._replicas) + count))
        asked: dict[str, float] = {}
        answered: list[float] = []
        started_s = time.monotonic()

        async def worker() -> None:
            for index in ports:
                replica = await self._settings.replica(self._settings.first_port + index)
                self._replicas.append(replica)
                asked[replica.request.instance_uuid] = replica.asked_s
                answered.append(time.monotonic() - replica.asked_s)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(worker())
        return {"seconds": time.monotonic() - started_s, "asked_s": asked, "answer_s": answered}

    async def _victim(self) -> dict[str, Any]:
        _, go, told = self._victims.pop()
        os.write(go, b".")
        line = await asyncio.to_thread(os.read, told, 4096)
        answer: dict[str, Any] = json.loads(line)
        return answer


def main(raw: str) -> None:
    """Serve until stdin ends."""
    settings = Settings(**json.loads(raw))
    gc.disable()  # a pause of the load is no pause of what is measured
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # victims are killed by others; nobody waits for them
    # Before there is a loop or a thread: a forked child must not inherit either.
    victims = [_fork_victim(settings, settings.first_port - 1 - index) for index in range(settings.victims)]
    try:
        uvloop.run(serve_lines(Fleet(settings, victims).answer))
    finally:
        for pid, _, _ in victims:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
