"""A whole cluster on this machine: what is started in which order, and stopped in the reverse of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from omni.v1 import inference_service_pb2, pipeline_pb2, pipeline_service_pb2, types_pb2
from omnicore import rpc
from omnicore.config import split_host_port
from omnicore.errors import FailedPreconditionError, OmniError, UnavailableError
from omnicore.security import Security, SecurityConfig
from omnicore.supervise.ports import check_free, check_reachable
from omnicore.supervise.supervisor import Spec, Supervisor
from omnicore.tasks import together
from omnictl import connect
from omnictl.local.plan import WorkerPlan, plan_workers
from omnictl.local.turns import Turns

ETCD, CONTROL_PLANE, GATEWAY = "etcd", "control-plane", "gateway"

# Generous: they bound a start that hangs, and a machine may be busy with other things.
_SERVICE_READY_S = 60.0
_CALL_TIMEOUT_S = 15.0
_POLL_S = 0.1
# After its requests, a worker still closes its engine and connectors and leaves the registry.
_AFTER_DRAIN_S = 10.0
# A gateway learns of a replica within 100 ms of its registration; this is for a busy machine.
_SERVABLE_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What to run. Addresses are "host:port", port 0 taking any free one."""

    http: str = "127.0.0.1:8000"
    grpc: str = "127.0.0.1:0"
    control_plane_listen: str = "127.0.0.1:0"
    etcd: tuple[str, ...] = ()
    """Endpoints of an etcd that runs already; empty: start one."""
    etcd_data_dir: Path | None = None
    """Where a started etcd keeps its data; None: in the run directory."""
    cluster: str = "default"
    worker_ready_timeout_s: float = 900.0
    """Loading a model may take this long."""
    drain_timeout_s: float = 30.0
    """Requests may take this long after a stop was asked for."""
    insecure: bool = False
    """gRPC may also listen, and etcd be, beyond loopback: here it is plaintext."""

    def check(self) -> None:
        """Raise, naming flag and address, if an address is taken or beyond loopback, or a given etcd is not there."""
        rule = Security(SecurityConfig(insecure=self.insecure))
        for flag, address in (("--grpc", self.grpc), ("--control-plane-listen", self.control_plane_listen)):
            rule.check_plaintext(flag, [address], "say --insecure, or run the services themselves with TLS")
        check_free("--http", self.http)
        check_free("--grpc", self.grpc)
        check_free("--control-plane-listen", self.control_plane_listen)
        check_reachable("--etcd", self.etcd)


@dataclasses.dataclass(slots=True)
class Addresses:
    """Where the cluster serves; empty until known."""

    http: str = ""
    """ "http://host:port"."""
    grpc: str = ""
    control_plane: str = ""
    etcd: tuple[str, ...] = ()

    @property
    def etcdctl(self) -> str:
        """Endpoints that etcdctl can reach, separated by commas."""
        return ",".join(endpoint for endpoint in self.etcd if not endpoint.startswith("unix:"))


class LocalCluster:
    """Starts services and workers under ``supervisor``. Call the methods in their order; ``stop`` at any time."""

    def __init__(self, config: ClusterConfig, supervisor: Supervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        self._workers: list[WorkerPlan] = []
        self._turns = Turns()
        self.addresses = Addresses(etcd=config.etcd)
        self.gateway_started = asyncio.Event()
        self.serving = False

    async def start_control_plane(self) -> None:
        """Start etcd, unless one was given, and a control plane on it."""
        if not self._config.etcd:
            data_dir = self._config.etcd_data_dir or self._supervisor.run_dir / "etcd"
            ready = await self._supervisor.launch(_etcd(data_dir))
            self.addresses.etcd = tuple(ready["endpoints"])
        ready = await self._supervisor.launch(_control_plane(self._config, self.addresses.etcd))
        self.addresses.control_plane = ready["address"]

    async def start_gateway(self) -> None:
        """Start a gateway."""
        ready = await self._launch(_gateway(self._config, self.addresses.control_plane))
        self.addresses.http = f"http://{_reachable(ready['http'])}"
        self.addresses.grpc = _reachable(ready["grpc"])
        self.gateway_started.set()

    async def start_workers(self, pipeline: pipeline_pb2.Pipeline) -> None:
        """Start every worker of ``pipeline``, the first replicas of all stages first; returns when all are ready."""
        self._workers = sorted(plan_workers(pipeline), key=lambda worker: worker.ordinal)
        marking = asyncio.create_task(self._mark_loading())
        try:
            await together(*(self._launch(_worker(self._config, self.addresses, worker)) for worker in self._workers))
        finally:
            marking.cancel()
            await asyncio.wait({marking})

    async def wait_servable(self, pipeline: str, timeout_s: float = _SERVABLE_S) -> None:
        """Return once the gateway can serve ``pipeline``. Raises ``UnavailableError`` after ``timeout_s``."""
        async with connected(self.addresses.grpc) as channel:
            gateway = connect.Gateway(channel, self.addresses.grpc, _CALL_TIMEOUT_S)
            try:
                async with asyncio.timeout(timeout_s):
                    while not await _servable(gateway, pipeline):  # noqa: ASYNC110 -- asks another process
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                raise UnavailableError(
                    f"the gateway could not serve {pipeline} within {timeout_s:g} s", reason="NOT_SERVABLE"
                ) from None

    async def stop(self) -> None:
        """The gateway first: it takes nothing new, and what runs ends at workers that still serve. Were they to leave
        before, requests that come meanwhile would wait for a replica, and the gateway for them."""
        workers = [worker.name for worker in self._workers]
        await self._supervisor.stop([[GATEWAY], workers, [CONTROL_PLANE], [ETCD]])

    async def _launch(self, spec: Spec) -> dict[str, Any]:
        async with self._turns.turn():
            return await self._supervisor.launch(spec)

    async def _mark_loading(self) -> None:
        """Tell the view of workers that have announced themselves but still load. Only for people: ends on error."""
        async with connected(self.addresses.control_plane) as channel:
            plane = connect.ControlPlane(channel, self.addresses.control_plane, _CALL_TIMEOUT_S)
            while True:
                try:
                    table = await plane.list_replicas()
                except OmniError:
                    return
                loading = {r.placement.pid for r in table.replicas if r.state == types_pb2.REPLICA_STATE_STARTING}
                for worker in self._workers:
                    member = self._supervisor.members.get(worker.name)
                    if member is not None and member.process is not None and member.process.pid in loading:
                        self._supervisor.mark_loading(worker.name)
                await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to ``address`` that is closed afterwards."""
    channel = rpc.channel(address)
    try:
        yield channel
    finally:
        await channel.close(None)


async def apply(
    address: str, request: pipeline_service_pb2.ApplyPipelineRequest
) -> pipeline_service_pb2.ApplyPipelineResponse:
    """ApplyPipeline at the control plane at ``address``. Raises ``InvalidRequestError`` for a wrong deploy file."""
    async with connected(address) as channel:
        plane = connect.ControlPlane(channel, address, _CALL_TIMEOUT_S)
        response: pipeline_service_pb2.ApplyPipelineResponse = await plane.call(plane.pipelines.ApplyPipeline, request)
        return response


async def _servable(gateway: connect.Gateway, pipeline: str) -> bool:
    response: inference_service_pb2.ListModelsResponse = await gateway.call(
        gateway.inference.ListModels, inference_service_pb2.ListModelsRequest()
    )
    return any(model.id == pipeline and model.ready for model in response.models)


def _etcd(data_dir: Path) -> Spec:
    def tcp(ready: dict[str, Any]) -> str:
        found = [e for e in ready["endpoints"] if not e.startswith("unix:")]
        if not found:
            raise FailedPreconditionError("etcd offers no TCP endpoint", reason="NO_TCP_ENDPOINT")
        return str(found[0])

    return Spec(
        name=ETCD,
        arguments=("etcd", "--data-dir", str(data_dir), "--client-listen", "127.0.0.1:0"),
        ready_timeout_s=_SERVICE_READY_S,
        stop_grace_s=5.0,
        pin=lambda ready: ("--client-listen", tcp(ready)),
        describe=tcp,
    )


def _control_plane(config: ClusterConfig, etcd: tuple[str, ...]) -> Spec:
    listen = config.control_plane_listen
    return Spec(
        name=CONTROL_PLANE,
        arguments=(
            *("control-plane", "--listen", listen),
            *("--etcd", ",".join(etcd)),
            *("--cluster", config.cluster),
            *_insecure(config),
        ),
        ready_timeout_s=_SERVICE_READY_S,
        stop_grace_s=5.0,
        pin=lambda ready: ("--listen", _pinned(listen, ready["address"])),
        describe=lambda ready: str(ready["address"]),
    )


def _gateway(config: ClusterConfig, control_plane: str) -> Spec:
    return Spec(
        name=GATEWAY,
        arguments=(
            *("gateway", "--http", config.http),
            *("--grpc", config.grpc),
            *("--control-plane", control_plane),
            # It stops first, so it is here that requests get their time to end.
            *("--drain-timeout-s", f"{config.drain_timeout_s:g}"),
            *_insecure(config),
        ),
        ready_timeout_s=_SERVICE_READY_S,
        stop_grace_s=config.drain_timeout_s + _AFTER_DRAIN_S,
        pin=lambda ready: (
            *("--http", _pinned(config.http, ready["http"])),
            *("--grpc", _pinned(config.grpc, ready["grpc"])),
        ),
        describe=lambda ready: f"http://{_reachable(ready['http'])}, gRPC {_reachable(ready['grpc'])}",
    )


def _worker(config: ClusterConfig, addresses: Addresses, worker: WorkerPlan) -> Spec:
    devices = ("--devices", ",".join(worker.devices)) if worker.devices else ()
    return Spec(
        name=worker.name,
        arguments=(
            *("stage-worker", "--pipeline", worker.pipeline),
            *("--stage-id", str(worker.stage_id)),
            *("--control-plane", addresses.control_plane),
            *("--listen", "127.0.0.1:0"),
            *("--drain-timeout-s", f"{config.drain_timeout_s:g}"),
            *devices,
            *_insecure(config),
        ),
        ready_timeout_s=config.worker_ready_timeout_s,
        stop_grace_s=config.drain_timeout_s + _AFTER_DRAIN_S,
        # A new process takes the place of the old one, also where ids have gaps.
        pin=lambda ready: ("--preferred-replica-id", str(ready["replica_id"])),
        describe=lambda ready: f"{worker.pipeline}/{worker.stage_id}/{ready['replica_id']} at {ready['address']}",
        may_leave=True,
    )


def _insecure(config: ClusterConfig) -> tuple[str, ...]:
    return ("--insecure",) if config.insecure else ()


def _pinned(listen: str, address: str) -> str:
    """The host that was asked for, with the port that was got."""
    return f"{listen.rpartition(':')[0]}:{split_host_port(address)[1]}"


def _reachable(address: str) -> str:
    """``address`` as clients of this machine dial it: a wildcard is every interface, so also loopback."""
    host, port = split_host_port(address)
    if host in ("0.0.0.0", "::", ""):
        return f"127.0.0.1:{port}"
    return address
