"""Our cluster under bench.faults: real processes, each of which can be killed, hung and started again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc.aio

from bench.gateway_processes import Process, free_port
from bench.harness import Service, cpu_seconds
from omni.v1 import (
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
    types_pb2,
)
from omnicore import rpc

TEXT = "text"
SPEECH = "speech"
SPEECH_TWO = "speech-two"
"""As speech, with two thinkers."""
_DEPLOY_TEXT = """
pipeline: {name}
stages:
  - stage_id: 0
    engine: sim
    num_replicas: 2
    max_num_seqs: 256
    sim: {{output: text, ttft_ms: {ttft_ms}, tpot_ms: {itl_ms}, tokens: 64}}
    final_output: true
    final_output_type: text
"""
_DEPLOY_SPEECH = """
pipeline: {name}
async_chunk: true
stages:
  - stage_id: 0
    name: thinker
    engine: sim
    max_num_seqs: 256
    sim: {{output: text, ttft_ms: {ttft_ms}, tpot_ms: {itl_ms}, tokens: 64}}
    final_output: true
    final_output_type: text
    output_connectors: {{to_stage_1: shm}}
  - stage_id: 1
    name: talker
    engine: sim
    num_replicas: 2
    max_num_seqs: 256
    sim: {{output: tensor, ttft_ms: 2, tpot_ms: 2, chunks: 4, chunk_bytes: 131072}}
    input_connectors: {{from_stage_0: shm}}
    output_connectors: {{to_stage_2: shm}}
  - stage_id: 2
    name: code2wav
    engine: sim
    num_replicas: 2
    max_num_seqs: 256
    sim: {{output: audio, ttft_ms: 2, seconds_per_chunk: 0.1}}
    input_connectors: {{from_stage_1: shm}}
    final_output: true
    final_output_type: audio
edges:
  - {{from: 0, to: 1, chunk_by: sentence, window_size: 4}}
  - {{from: 1, to: 2, window_size: 4}}
connectors: {{shm: {{name: shm}}}}
entrypoints: {{chat: 0}}
"""
DEPLOYS = {
    TEXT: _DEPLOY_TEXT,
    SPEECH: _DEPLOY_SPEECH,
    SPEECH_TWO: _DEPLOY_SPEECH.replace("name: thinker\n", "name: thinker\n    num_replicas: 2\n"),
}
STAGES = {TEXT: {0: 2}, SPEECH: {0: 1, 1: 2, 2: 2}, SPEECH_TWO: {0: 2, 1: 2, 2: 2}}
"""Replicas of each stage."""
_READY_S = 60.0
_LEAST_PRIORITY = 19


@dataclasses.dataclass(slots=True)
class Unit:
    """One process and how to start it again."""

    name: str
    service: str
    flags: Sequence[str]
    stage_id: int = -1
    metrics_port: int = 0
    generation: int = 0
    process: Service | None = None
    replica: tuple[int, int] = (-1, -1)
    """Replica id and epoch, of a worker that is ready."""

    @property
    def running(self) -> Service:
        """Its process."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process


class Cluster:
    """etcd, a control plane, a gateway, and the workers of one pipeline. Use as ``async with``."""

    def __init__(
        self,
        run_dir: Path,
        pipeline: str,
        *,
        ttft_ms: float = 0,
        itl_ms: float = 0,
        deploy: str = "",
        replicas: Mapping[int, int] | None = None,
    ) -> None:
        """One of ``DEPLOYS``, or a ``deploy`` file of one's own with the ``replicas`` of each stage."""
        self._run_dir = run_dir
        self.pipeline = pipeline
        self._deploy = deploy or DEPLOYS[pipeline].format(name=pipeline, ttft_ms=ttft_ms, itl_ms=itl_ms)
        self._replicas = replicas or STAGES[pipeline]
        self._services = contextlib.ExitStack()
        self.control_plane = Unit("control-plane", "control-plane", ())
        self.workers: list[Unit] = []
        self.port = 0
        self.grpc = ""

    def _start(self, unit: Unit) -> None:
        unit.generation += 1
        unit.process = Service.ours(f"{unit.name}-{unit.generation}", unit.service, self._run_dir, *unit.flags)
        self._services.callback(unit.process.stop)

    async def __aenter__(self) -> Cluster:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        etcd_flags = ("--data-dir", str(self._run_dir / "etcd"), "--client-listen", "127.0.0.1:0")
        etcd = Service.ours("etcd", "etcd", self._run_dir, *etcd_flags)
        self._services.callback(etcd.stop)
        endpoints = (await etcd.ready())["endpoints"]
        assert isinstance(endpoints, list)
        address = f"127.0.0.1:{free_port()}"  # a control plane that comes back is found where it was
        self.control_plane.flags = ("--listen", address, "--etcd", str(endpoints[0]))
        self._start(self.control_plane)
        await self.control_plane.running.ready()
        async with rpc.channel(address) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            await stub.ApplyPipeline(pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=self._deploy))
        self.address = address
        own = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", address)
        gateway = Service.ours("gateway", "gateway", self._run_dir, *own)
        self._services.callback(gateway.stop)
        for stage_id, count in self._replicas.items():
            for number in range(count):
                metrics_port = free_port()
                flags = ["--pipeline", self.pipeline, "--stage-id", str(stage_id), "--control-plane", address]
                flags += ["--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{metrics_port}"]
                name = f"stage-{stage_id}-{number}"
                self.workers.append(Unit(name, "stage-worker", flags, stage_id, metrics_port))
        for worker in self.workers:
            self._start(worker)
        ready = await gateway.ready()
        self.port, self.grpc = int(str(ready["http"]).rsplit(":", 1)[1]), str(ready["grpc"])
        for worker in self.workers:
            await self.ready(worker)
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._services.close)

    def of_stage(self, stage_id: int) -> list[Unit]:
        """Its workers."""
        return [worker for worker in self.workers if worker.stage_id == stage_id]

    async def ready(self, worker: Unit) -> None:
        """Wait until it has registered."""
        said = await worker.running.ready()
        worker.replica = (int(str(said["replica_id"])), int(str(said["epoch"])))

    def start(self, unit: Unit) -> None:
        """Start it again, without waiting."""
        self._start(unit)

    def kill(self, unit: Unit) -> None:
        """SIGKILL. Its end is not waited for: clients and their clocks go on."""
        unit.running.process.kill()

    def freeze(self, unit: Unit) -> None:
        """SIGSTOP: its connections stay open, nothing answers."""
        unit.running.process.send_signal(signal.SIGSTOP)

    def thaw(self, unit: Unit) -> None:
        """SIGCONT."""
        unit.running.process.send_signal(signal.SIGCONT)

    async def settled(self) -> None:
        """Wait until the gateway routes to every worker that runs, and to nothing else."""
        for stage_id in self._replicas:
            wanted = {worker.replica for worker in self.of_stage(stage_id)}
            async with Routes(self, stage_id) as routes:
                deadline_s = time.monotonic() + _READY_S
                while True:
                    await routes.spread(len(wanted))
                    if routes.recent(0.5) == wanted:
                        break
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(f"stage {stage_id}: routed to {routes.recent(0.5)}, not {wanted}")

    async def leftovers(self, within_s: float = 15.0) -> dict[str, float]:
        """Gauges that must be zero when nothing runs, and are not after some time."""
        deadline_s = time.monotonic() + within_s
        while True:
            found = await asyncio.to_thread(self._leftovers)
            if not found or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.2)

    def chunks(self, stage_id: int) -> float:
        """Chunks that the workers of a stage have published so far."""
        name = "omni_transfer_size_bytes_count"
        return sum(sum(_nonzero(worker.metrics_port, (name,)).values()) for worker in self.of_stage(stage_id))

    def _leftovers(self) -> dict[str, float]:
        gauges = ("inflight_requests", "queued_requests", "stage_inflight_calls", "edge_inflight_requests", "bindings")
        found = _nonzero(self.port, tuple(f"omni_gateway_{name}" for name in gauges))
        for worker in self.workers:
            if worker.running.process.poll() is None:
                found |= {
                    f"{worker.name} {name}": value
                    for name, value in _nonzero(worker.metrics_port, ("omni_transfer_handles",)).items()
                }
        return found


def _nonzero(port: int, names: tuple[str, ...]) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith(names) and float(line.rsplit(" ", 1)[1]) != 0:
            found[line.rsplit(" ", 1)[0]] = float(line.rsplit(" ", 1)[1])
    return found


class Routes:
    """Asks the gateway's RouterService all the time where it would send a request: who is picked, and when."""

    def __init__(self, cluster: Cluster, stage_id: int) -> None:
        self._channel = rpc.channel(cluster.grpc)
        self._stub = router_service_pb2_grpc.RouterServiceStub(self._channel)
        self._stage = types_pb2.StageRef(pipeline=cluster.pipeline, stage_id=stage_id)
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self.last_s: dict[tuple[int, int], float] = {}
        """Replica id and epoch → when it was picked last (monotonic)."""
        self.first_s: dict[tuple[int, int], float] = {}

    async def __aenter__(self) -> Routes:
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    async def _ask(self) -> None:
        while True:
            self._number += 1
            request_id = f"probe-{self._number}"
            request = router_service_pb2.RouteRequest(request_id=request_id, stage=self._stage)
            request.max_wait.SetInParent()
            asked_s = time.monotonic()
            try:
                ref = (await self._stub.Route(request, timeout=10)).replica
                await self._stub.Release(router_service_pb2.RouterServiceReleaseRequest(request_id=request_id))
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
                continue
            picked = (ref.replica_id, ref.epoch)
            self.last_s[picked] = asked_s
            self.first_s.setdefault(picked, asked_s)
            await asyncio.sleep(0.02)

    def recent(self, seconds: float) -> set[tuple[int, int]]:
        """Who was picked within this time."""
        now_s = time.monotonic()
        return {picked for picked, at_s in self.last_s.items() if at_s > now_s - seconds}

    async def spread(self, count: int, timeout_s: float = 5.0) -> None:
        """Wait until so many were picked lately."""
        await until(lambda: len(self.recent(0.5)) == count, timeout_s)


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; whether it came true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(0.005)
    return True


class Launcher:
    """Starts a worker again when it has ended by itself, as a supervisor does: for rolling restarts. ``async with``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._task: asyncio.Task[None] | None = None
        self._starting: list[Service] = []
        self.restarts = 0
        self.starts_cpu_s: list[float] = []
        """Processor time of each start, from nothing to READY."""

    async def __aenter__(self) -> Launcher:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            for worker in self._cluster.workers:
                if worker.running.process.poll() is not None:
                    self._cluster.start(worker)
                    self._starting.append(worker.running)
                    self.restarts += 1
            for service in [service for service in self._starting if service.serves]:
                self._starting.remove(service)
                self.starts_cpu_s.append(cpu_seconds(service.process.pid))
            await asyncio.sleep(0.02)


def omnictl(run_dir: Path, address: str, *arguments: str) -> Process:
    """The operator's command line, as an operator uses it. Operators sit elsewhere: here it gets the processor time
    that nobody else wants, since its start takes half a second of it."""
    argv = [sys.executable, "-m", "omnictl", "--server", address, *arguments]
    command = Process("omnictl", argv, run_dir)
    os.setpriority(os.PRIO_PROCESS, command.pid, _LEAST_PRIORITY)
    # A process with a session of its own is scheduled as a group beside all others together: it would have its half.
    group = Path(f"/proc/{command.pid}/autogroup")
    if group.exists():
        group.write_text(str(_LEAST_PRIORITY))
    return command
