"""The three ways to serve: everything here (plain), a head, headless replicas. One interface, chosen once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Protocol

from omni.v1 import pipeline_pb2
from omnicore.config import join_host_port
from omnicore.errors import DeadlineExceededError, InvalidRequestError
from omnicore.log import get_logger
from omnicore.security import Security
from omnicore.supervise.ports import check_bindable, check_free, check_reachable
from omnicore.supervise.supervisor import Member, Supervisor
from omnicore.tasks import together
from omniplane.serve import access, bringup, overlay, specs
from omniplane.serve.config import Mode, ServeConfig
from omniplane.serve.control_plane import ControlPlaneRuntime
from omniplane.serve.overlay import Keys, StageKeys
from omniplane.serve.pipelines import connected, plan_of_head
from omniplane.serve.planning import put_into_force, read_deploy_file
from omniplane.serve.replicas import ReplicaProcManager, local_replicas

_log = get_logger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.2


class Launcher(Protocol):
    """One invocation: ``check``, ``start``, then ``ended`` until it is stopped, and ``stop`` at any time."""

    def check(self) -> None:
        """Raise a typed error for what can be known to be wrong before anything is started."""

    async def start(self) -> dict[str, Any]:
        """Start everything; returns what the ready file says, once it serves."""
        ...

    async def ended(self) -> None:
        """Return if there is nothing left to run."""

    async def stop(self) -> None:
        """Let requests end, then stop everything; twice is fine."""

    def changed(self, member: Member) -> None:
        """A process changed its state."""


def choose(config: ServeConfig, flags: StageKeys, supervisor: Supervisor) -> Launcher:
    """The launcher for ``config``."""
    single = overlay.stage_keys(config, flags)
    if config.mode is Mode.HEADLESS:
        return HeadlessLauncher(config, single, supervisor)
    return HeadLauncher(config, single, supervisor)


class HeadLauncher:
    """A control plane, a gateway and replicas: those of one stage (head), or of all of them (plain)."""

    def __init__(self, config: ServeConfig, single: Mapping[int, Keys], supervisor: Supervisor) -> None:
        self._config = config
        self._single = single
        self._supervisor = supervisor
        self._file = ""
        self._security = Security()
        self._control_plane = ControlPlaneRuntime(config, supervisor)
        self._replicas = ReplicaProcManager(config, supervisor)

    def check(self) -> None:
        """The deploy file can be read, and the addresses are free."""
        self._file = read_deploy_file(self._config)
        self._security = access.own_security(self._config)
        if self._config.mode is Mode.HEAD:
            self._security.check_listen("--omni-master-address", self._control_plane.listen)
        check_free("--port", join_host_port(self._config.host, self._config.port))
        check_free("--grpc-port", join_host_port(self._config.host, self._config.grpc_port))
        if self._config.mode is Mode.HEAD:
            check_free("--omni-master-port", self._control_plane.listen)
        check_reachable("--etcd", self._config.etcd)

    async def start(self) -> dict[str, Any]:
        """Returns once every planned replica is there and the gateway is healthy."""
        try:
            async with asyncio.timeout(self._config.init_timeout):
                return await self._start()
        except TimeoutError:
            raise DeadlineExceededError(
                f"--init-timeout: not everything served within {self._config.init_timeout:g} s", reason="INIT_TIMEOUT"
            ) from None

    async def _start(self) -> dict[str, Any]:
        await self._control_plane.start()
        address = self._control_plane.address
        visible = os.environ.get(VISIBLE_DEVICES)
        async with connected(self._security, address) as plane:
            planned = await put_into_force(plane, self._config, self._file, self._single, visible)
            for warning in planned.warnings:
                _log.warning("deploy file", file=self._config.deploy_file, warning=warning)
            pipeline = planned.pipeline
            own = [stage for stage in pipeline.stages if self._config.stage_id in (None, stage.stage_id)]
            replicas = local_replicas([(stage, stage.num_replicas) for stage in own], visible)
            gateway, *_ = await together(
                self._supervisor.launch(specs.gateway(self._config, address)),
                self._replicas.start(pipeline.name, address, replicas, reserved_ids=True),
                bringup.wait_for_slots(
                    plane, pipeline, frozenset(stage.stage_id for stage in own), self._config.stage_init_timeout
                ),
            )
        await bringup.wait_healthy(specs.reachable(gateway["http"]), encrypted=bool(self._config.ssl_certfile))
        return self._ready(pipeline, gateway)

    def _ready(self, pipeline: pipeline_pb2.Pipeline, gateway: dict[str, Any]) -> dict[str, Any]:
        return {
            "http": f"{'https' if self._config.ssl_certfile else 'http'}://{specs.reachable(gateway['http'])}",
            "grpc": specs.reachable(gateway["grpc"]),
            "control_plane": self._control_plane.address,
            "etcd": list(self._control_plane.etcd),
            "pipeline": pipeline.name,
            "replicas": self._replicas.ready(),
        }

    async def ended(self) -> None:
        """Never: a head without replicas of its own still serves those of others."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """The gateway first: while it lets requests end, they need the replicas."""
        await self._supervisor.stop([[specs.GATEWAY]])
        await self._replicas.stop()
        await self._control_plane.stop()

    def changed(self, member: Member) -> None:
        """A replica may be up."""
        self._replicas.changed(member)


class HeadlessLauncher:
    """Replicas of one stage, for the pipeline of a head elsewhere."""

    def __init__(self, config: ServeConfig, single: Mapping[int, Keys], supervisor: Supervisor) -> None:
        self._config = config
        self._single = single
        self._security = Security()
        self._replicas = ReplicaProcManager(config, supervisor)

    def check(self) -> None:
        """The address to listen on is one of this host's."""
        self._security = access.own_security(self._config)
        self._security.check_dial("--omni-master-address", [self._head])
        if self._config.omni_replica_address:
            check_bindable("--omni-replica-address", self._config.omni_replica_address)
            self._security.check_listen("--omni-replica-address", join_host_port(self._config.omni_replica_address, 0))

    async def start(self) -> dict[str, Any]:
        """Wait for the head and its plan, then start; returns once every replica is ready."""
        config, address = self._config, self._head
        async with connected(self._security, address) as plane:
            pipeline, stage = await plan_of_head(plane, config.pipeline, config.stage_id, config.startup_timeout)
        self._check_agreement(stage)
        replicas = local_replicas([(stage, config.omni_dp_size_local)], os.environ.get(VISIBLE_DEVICES))
        try:
            async with asyncio.timeout(config.init_timeout):
                await self._replicas.start(pipeline.name, address, replicas, reserved_ids=False)
        except TimeoutError:
            raise DeadlineExceededError(
                f"--init-timeout: the replicas did not start within {config.init_timeout:g} s", reason="INIT_TIMEOUT"
            ) from None
        return {"control_plane": address, "pipeline": pipeline.name, "replicas": self._replicas.ready()}

    @property
    def _head(self) -> str:
        """ "host:port" of the head's control plane."""
        assert self._config.omni_master_port is not None
        return join_host_port(self._config.omni_master_address, self._config.omni_master_port)

    def _check_agreement(self, stage: pipeline_pb2.Stage) -> None:
        """Engine flags were taken where they stood in the past; now the head's plan decides, and a flag that says
        something else is refused rather than ignored."""
        wanted = {**overlay.engine_keys(self._config), **self._single.get(stage.stage_id, {})}
        if faults := overlay.disagreements(stage, wanted):
            flags = " ".join(
                f"--stage-{stage.stage_id}-{fault.split(':')[0].replace('_', '-')} VALUE" for fault in faults
            )
            raise InvalidRequestError(
                f"engine flags differ from the head's plan of stage {stage.stage_id}: {'; '.join(faults)}. Say it in "
                f"the head's deploy file, or there as {flags}",
                reason="PLAN_DIFFERS",
            )

    async def ended(self) -> None:
        """Once every replica has left, drained or evicted say."""
        while not self._replicas.over:  # noqa: ASYNC110 -- members change in many places
            await asyncio.sleep(_POLL_S)

    async def stop(self) -> None:
        """Let requests end, then stop the replicas."""
        await self._replicas.stop()

    def changed(self, member: Member) -> None:
        """A replica may be up."""
        self._replicas.changed(member)
