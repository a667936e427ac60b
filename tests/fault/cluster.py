"""A whole cluster of real processes whose every wire can be cut.

Two control planes over a real etcd, two gateways, two workers of one simulated stage. Between any two of them, and
between clients and gateways, is a proxy::

    client ──► gateway ──► worker          gateway, worker ──► control plane ──► etcd

``partition`` cuts all wires of one process. Ports are chosen once, so that what is restarted is found where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import grpc.aio

from omni.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    inspect_service_pb2,
    inspect_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
    types_pb2,
)
from omnicore import rpc
from tests.support.etcd import EtcdNode, etcd_server
from tests.support.ports import reserved_port
from tests.support.processes import ServiceProcess, Services
from tests.support.proxy import TcpProxy

PIPELINE = "faults"
DEPLOY = """
pipeline: faults
entrypoints: {chat: 0}
stages:
  - stage_id: 0
    name: lm
    engine: sim
    num_replicas: 2
    sim: {output: text, ttft_ms: 60, tpot_ms: 10, tokens: 40}
    final_output: true
    final_output_type: text
"""
TTL_S = 4
"""Life of a lease here: the default is 10 s."""
GUARD_S = 60.0
"""No wait may take longer; not a measurement."""
CALL_S = 10.0
"""No call may take longer; not a measurement either."""
POLL_S = 0.02


@dataclasses.dataclass(slots=True)
class Unit:
    """One process of ours: how to start it, again and again, and the wires that it has."""

    name: str
    service: str
    flags: list[str]
    wires: list[TcpProxy]
    address: str = ""
    """Where it listens for gRPC."""
    http: str = ""
    """Where clients reach it: a proxy."""
    process: ServiceProcess | None = None

    @property
    def running(self) -> ServiceProcess:
        """Its process."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process


class Cluster:
    """Made by ``cluster()``."""

    def __init__(self, services: Services, etcd: Sequence[EtcdNode]) -> None:
        self.etcd = etcd
        self.control_planes: list[Unit] = []
        self.gateways: list[Unit] = []
        self.workers: list[Unit] = []
        self.etcd_wires: list[TcpProxy] = []
        """From every control plane to every etcd member, in this order."""
        self._services = services

    # -- processes --

    @property
    def units(self) -> list[Unit]:
        """All processes but etcd."""
        return [*self.control_planes, *self.gateways, *self.workers]

    def spawn(self, unit: Unit) -> None:
        """Start it, or start it again, without waiting."""
        unit.process = self._services.spawn(unit.service, *unit.flags)

    async def start(self, unit: Unit) -> None:
        """Start it, or start it again, and wait until it serves."""
        self.spawn(unit)
        await unit.running.wait_ready(GUARD_S)

    async def heal(self) -> None:
        """End every fault and wait until all is as it was: what was killed runs again, everybody knows everybody."""
        for wire in {id(wire): wire for unit in self.units for wire in unit.wires}.values():
            wire.heal()
        for node in self.etcd:
            if not node.running:
                await node.restart()
            node.thaw()
        for unit in self.units:
            if unit.process is None or not unit.process.running:
                self.spawn(unit)
            else:
                unit.process.thaw()
        for unit in self.units:
            await unit.running.wait_ready(GUARD_S)
        await self.settled()

    async def settled(self, timeout_s: float = GUARD_S) -> float:
        """Wait until both control planes list both workers as healthy and both gateways route to both of them and to
        nothing else. Returns the seconds it took."""
        begin_s = time.monotonic()
        while True:
            state = [await self.epochs(unit) for unit in self.control_planes]
            state += [await self.routable(unit) for unit in self.gateways]
            if len(state[0]) == len(self.workers) and all(view == state[0] for view in state):
                return time.monotonic() - begin_s
            assert time.monotonic() < begin_s + timeout_s, f"not settled: {state}"
            await asyncio.sleep(POLL_S)

    async def settled_at(self, plane: Unit, epochs: Mapping[int, int], timeout_s: float = GUARD_S) -> None:
        """Wait until one control plane lists exactly these claims as healthy."""
        begin_s = time.monotonic()
        while (found := await self.epochs(plane)) != epochs:
            assert time.monotonic() < begin_s + timeout_s, f"{plane.name} has {found}, not {epochs}"
            await asyncio.sleep(POLL_S)

    # -- wires --

    def partition(self, unit: Unit, how: str = "blackhole") -> None:
        """Cut every wire of a process: "blackhole" or "reset"."""
        for wire in unit.wires:
            getattr(wire, how)()

    def partition_etcd(self, how: str = "blackhole") -> None:
        """Cut etcd off from every control plane."""
        for wire in self.etcd_wires:
            getattr(wire, how)()

    # -- what is known --

    async def replicas(self, unit: Unit) -> dict[int, types_pb2.Replica]:
        """Replica id → record, as one control plane lists them; nothing if it does not answer."""
        try:
            async with rpc.channel(unit.address) as channel:
                stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
                answer = await stub.ListReplicas(registry_service_pb2.ListReplicasRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError:
            return {}
        return {replica.ref.replica_id: replica for replica in answer.replicas}

    async def epochs(self, unit: Unit) -> dict[int, int]:
        """Replica id → epoch of the healthy replicas, as one control plane lists them."""
        return {
            number: replica.ref.epoch
            for number, replica in (await self.replicas(unit)).items()
            if replica.state == types_pb2.REPLICA_STATE_READY and not replica.suspect
        }

    async def claims(self, unit: Unit) -> dict[int, int]:
        """Replica id → epoch of all replicas, as one control plane lists them: a suspicion may come and go."""
        return {number: replica.ref.epoch for number, replica in (await self.replicas(unit)).items()}

    async def routable(self, gateway: Unit) -> dict[int, int]:
        """Replica id → epoch of what one gateway routes to now: as many decisions as it takes to see all."""
        seen: dict[int, int] = {}
        async with Routes(gateway) as routes:
            for _ in range(3 * len(self.workers)):
                if (ref := await routes.route()) is not None:
                    seen[ref.replica_id] = ref.epoch
        return seen

    async def audience(self, plane: Unit) -> tuple[int, int]:
        """How many workers beat at a control plane (twice in the last second) and how many gateways watch it."""
        try:
            async with rpc.channel(plane.address) as channel:
                inspect = inspect_service_pb2_grpc.InspectServiceStub(channel)
                pulses = await inspect.ListPulses(inspect_service_pb2.ListPulsesRequest(), timeout=CALL_S)
                admin = admin_service_pb2_grpc.AdminServiceStub(channel)
                status = await admin.GetClusterStatus(admin_service_pb2.GetClusterStatusRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError:
            return 0, 0
        fresh = [pulse for pulse in pulses.pulses if pulse.beat_age.ToMilliseconds() < 500]
        return len(fresh), status.watchers

    def replica_of(self, worker: Unit) -> int:
        """The replica id that a worker had when it became ready."""
        return int(worker.running.ready["replica_id"])


class Rounds:
    """Watches where every gateway would route, all the time: ``async with rounds(cluster) as watch``."""

    def __init__(self, gateways: list[Unit]) -> None:
        self._gateways = gateways
        self._seen: dict[str, dict[int, float]] = {gateway.name: {} for gateway in gateways}

    async def follow(self, gateway: Unit) -> None:
        """One gateway, until cancelled."""
        seen = self._seen[gateway.name]
        async with Routes(gateway) as routes:
            while True:
                asked_s = time.monotonic()
                if (ref := await routes.route()) is not None:
                    seen[ref.replica_id] = asked_s
                await asyncio.sleep(0.01)  # less would be a load of its own

    async def unrouted(self, replica_id: int, since_s: float, *, quiet_s: float = 0.5) -> float:
        """Seconds from ``since_s`` (monotonic) until the last gateway routed to this replica for the last time. They
        take turns, so ``quiet_s`` of other answers mean that it is out of the round."""

        def last_s() -> float:
            return max(seen.get(replica_id, since_s) for seen in self._seen.values())

        def others_s() -> float:
            return min(
                max((s for n, s in seen.items() if n != replica_id), default=0.0) for seen in self._seen.values()
            )

        await eventually(lambda: others_s() > max(last_s(), since_s) + quiet_s, f"replica {replica_id} unrouted")
        return max(last_s() - since_s, 0.0)

    async def routed(self, replica_id: int, since_s: float) -> float:
        """Seconds from ``since_s`` until every gateway has routed to this replica."""
        await eventually(
            lambda: all(seen.get(replica_id, 0.0) > since_s for seen in self._seen.values()),
            f"replica {replica_id} routed",
        )
        return max(seen[replica_id] for seen in self._seen.values()) - since_s


@contextlib.asynccontextmanager
async def rounds(cluster: Cluster) -> AsyncIterator[Rounds]:
    """For the length of the block."""
    watch = Rounds(cluster.gateways)
    tasks = [asyncio.create_task(watch.follow(gateway)) for gateway in cluster.gateways]
    try:
        for number in range(len(cluster.workers)):
            await watch.routed(number, 0.0)
        yield watch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Routes:
    """Routing decisions of one gateway, by its own RouterService; past every proxy."""

    def __init__(self, gateway: Unit) -> None:
        self._channel = rpc.channel(gateway.address)
        self._stub = router_service_pb2_grpc.RouterServiceStub(self._channel)
        self._stage = types_pb2.StageRef(pipeline=PIPELINE, stage_id=0)
        self._number = 0

    async def __aenter__(self) -> Routes:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close(None)

    async def route(self, session_id: str = "") -> types_pb2.ReplicaRef | None:
        """Who would get a request now, of a session; None if nobody, or if the gateway does not answer."""
        self._number += 1
        request_id = f"probe-{self._number}"
        request = router_service_pb2.RouteRequest(request_id=request_id, stage=self._stage, session_id=session_id)
        request.max_wait.SetInParent()
        try:
            answer = await self._stub.Route(request, timeout=CALL_S)
            await self._stub.Release(
                router_service_pb2.RouterServiceReleaseRequest(request_id=request_id), timeout=CALL_S
            )
        except grpc.aio.AioRpcError:
            return None
        return answer.replica


async def apply(address: str, deploy_yaml: str = DEPLOY) -> None:
    """Store the plan."""
    async with rpc.channel(address) as channel:
        stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
        await stub.ApplyPipeline(pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=deploy_yaml), timeout=GUARD_S)


async def eventually(condition: Callable[[], bool], what: str, timeout_s: float = GUARD_S) -> float:
    """Wait until ``condition()``; the seconds it took."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() < begin_s + timeout_s, f"{what}: not within {timeout_s:g} s"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - begin_s


@contextlib.asynccontextmanager
async def cluster(
    directory: Path,
    *,
    control_planes: int = 2,
    gateways: int = 2,
    workers: int = 2,
    ttl_s: int = TTL_S,
    etcd: Sequence[EtcdNode] = (),
    etcd_flags: Mapping[str, str] | None = None,
    gateway_flags: Mapping[str, str] | None = None,
    deploy_yaml: str = DEPLOY,
) -> AsyncIterator[Cluster]:
    """All of it, settled, for the length of the block; the logs are printed afterwards.

    ``etcd`` are servers that run already, else one is started; ``etcd_flags`` are further flags of control planes,
    ``gateway_flags`` of gateways.
    """
    async with contextlib.AsyncExitStack() as stack:
        services = Services(directory)
        nodes = etcd or [await stack.enter_async_context(etcd_server())]
        # In a thread: what ends says so through the proxies here.
        stack.push_async_callback(asyncio.to_thread, services.close)
        found = Cluster(services, nodes)

        async def wire(upstream: str, *, host: str = "127.0.0.1", port: int = 0) -> TcpProxy:
            return await stack.enter_async_context(TcpProxy(upstream, listen_host=host, listen_port=port))

        for number in range(control_planes):
            to_etcd = [await wire(node.endpoint) for node in nodes]
            found.etcd_wires += to_etcd
            address = f"127.0.0.1:{reserved_port()}"
            flags = ["--listen", address, "--etcd", ",".join(each.address for each in to_etcd)]
            flags += ["--lease-ttl-s", str(ttl_s)]
            for name, value in (etcd_flags or {}).items():
                flags += [name, value]
            found.control_planes.append(Unit(f"control plane {number}", "control-plane", flags, to_etcd, address))

        async def up_wires(unit: Unit) -> str:
            for plane in found.control_planes:
                to_plane = await wire(plane.address)
                unit.wires.append(to_plane)
                plane.wires.append(to_plane)
            return ",".join(each.address for each in unit.wires)

        for number in range(gateways):
            http, address = f"127.0.0.1:{reserved_port()}", f"127.0.0.1:{reserved_port()}"
            unit = Unit(f"gateway {number}", "gateway", [], [], address)
            unit.flags = ["--control-plane", await up_wires(unit), "--http", http, "--grpc", address]
            unit.flags += ["--balancing-policy", "round-robin", "--drain-timeout-s", "20"]
            unit.flags += [part for flag in (gateway_flags or {}).items() for part in flag]
            from_clients = await wire(http)
            unit.wires.append(from_clients)
            unit.http = from_clients.address
            found.gateways.append(unit)
        for number in range(workers):
            port, host = reserved_port(), f"127.0.1.{number + 1}"
            unit = Unit(f"worker {number}", "stage-worker", [], [], f"127.0.0.1:{port}")
            unit.flags = ["--control-plane", await up_wires(unit), "--listen", unit.address, "--advertise", host]
            unit.flags += ["--pipeline", PIPELINE, "--stage-id", "0", "--drain-timeout-s", "20"]
            unit.wires.append(await wire(unit.address, host=host, port=port))
            found.workers.append(unit)
        for unit in found.control_planes:
            found.spawn(unit)
        await found.control_planes[0].running.wait_ready(GUARD_S)
        await apply(found.control_planes[0].address, deploy_yaml)
        for unit in (*found.gateways, *found.workers):
            found.spawn(unit)
        for unit in found.units:
            await unit.running.wait_ready(GUARD_S)
        await found.settled()
        yield found
