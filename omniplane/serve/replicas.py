"""The replicas that a launcher runs on this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Mapping, Sequence

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import OmniError
from omnicore.log import get_logger
from omnicore.supervise.supervisor import Member, State, Supervisor
from omnicore.tasks import together
from omniplane.serve import devices, specs
from omniplane.serve.access import worker_security
from omniplane.serve.config import ServeConfig
from omniplane.serve.pipelines import connected

_log = get_logger(__name__)

_OVER = (State.STOPPED, State.FAILED)
_ENDED = (State.RESTARTING, State.CRASH_LOOP, State.FAILED)
_DIFFUSION_OUTPUTS = ("image", "video")


@dataclasses.dataclass(frozen=True, slots=True)
class LocalReplica:
    """One replica to run here."""

    name: str
    """Of its process, such as "stage-1-replica-0"; not a promise of the replica id."""
    stage: pipeline_pb2.Stage
    ordinal: int
    devices: tuple[str, ...]


def local_replicas(stages: Sequence[tuple[pipeline_pb2.Stage, int]], visible: str | None) -> list[LocalReplica]:
    """So many replicas of each stage, each with its own devices. ``visible`` is CUDA_VISIBLE_DEVICES. Raises
    ``InvalidRequestError`` where there are too few devices."""
    found: list[LocalReplica] = []
    for stage, count in stages:
        for ordinal, share in enumerate(devices.shares(stage, count, visible)):
            found.append(LocalReplica(f"stage-{stage.stage_id}-replica-{ordinal}", stage, ordinal, share))
        if count > 1 and visible and not stage.devices and not found[-1].devices:
            _log.warning(
                "replicas share the visible devices: there are too few for each to have its own",
                stage=stage.stage_id,
                replicas=count,
                visible=visible,
            )
    return found


class ReplicaProcManager:
    """Owns the worker processes of this launcher. ``start`` and ``stop`` may be called any number of times."""

    def __init__(self, config: ServeConfig, supervisor: Supervisor) -> None:
        self._config = config
        self._supervisor = supervisor
        self._replicas: dict[str, LocalReplica] = {}
        self._ports: dict[str, int] = {}
        self._pipeline = ""
        self._control_plane = ""
        self._claims: dict[str, tuple[int, int]] = {}
        self._giving_back: set[asyncio.Task[None]] = set()

    async def start(
        self, pipeline: str, control_plane_address: str, replicas: Sequence[LocalReplica], *, reserved_ids: bool
    ) -> None:
        """Start those of ``replicas`` that do not run, all at once; returns when they are ready. ``reserved_ids``:
        they ask for the ids from 0 on, which the control plane keeps for them."""
        self._pipeline, self._control_plane = pipeline, control_plane_address
        new = [replica for replica in replicas if replica.name not in self._replicas]
        self._replicas |= {replica.name: replica for replica in new}
        await together(
            *(
                self._supervisor.launch(
                    specs.worker(
                        self._config,
                        replica.name,
                        pipeline=pipeline,
                        stage_id=replica.stage.stage_id,
                        control_plane_address=control_plane_address,
                        devices=replica.devices,
                        replica_id=replica.ordinal if reserved_ids else None,
                        environ=functools.partial(self._rendezvous, replica.name),
                    )
                )
                for replica in new
            )
        )

    async def stop(self) -> None:
        """Stop them all: requests may end, up to --drain-timeout."""
        await self._supervisor.stop([list(self._replicas)])
        if self._giving_back:
            await asyncio.wait(self._giving_back)

    def changed(self, member: Member) -> None:
        """A process changed its state."""
        replica = self._replicas.get(member.spec.name)
        if replica is None:
            return
        if member.state is State.READY:
            self._claims[replica.name] = (int(member.ready["replica_id"]), int(member.ready["epoch"]))
            self._tell(replica, member)
        elif member.state in _ENDED and (claim := self._claims.pop(replica.name, None)) is not None:
            task = asyncio.create_task(self._give_back(replica, *claim), name=f"give back {replica.name}")
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    async def _give_back(self, replica: LocalReplica, replica_id: int, epoch: int) -> None:
        """Deregister a replica that died without a word, so that its id is free for the process that replaces it.
        Best effort: its lease ends it anyway, and one that did deregister itself is none the worse."""
        stage = types_pb2.StageRef(pipeline=self._pipeline, stage_id=replica.stage.stage_id)
        ref = types_pb2.ReplicaRef(stage=stage, replica_id=replica_id, epoch=epoch)
        try:
            async with connected(worker_security(self._config), self._control_plane) as plane:
                await plane.deregister(ref, f"its process {replica.name} ended")
        except OmniError as error:
            _log.info("its claim is left to its lease", replica=replica.name, error=error.message)

    @staticmethod
    def _tell(replica: LocalReplica, member: Member) -> None:
        """That it is up, in the words that scripts written for vLLM-Omni wait for."""
        stage, replica_id = replica.stage, member.ready["replica_id"]
        diffusion = stage.engine == "diffusers" or stage.final_output_type in _DIFFUSION_OUTPUTS
        text = (
            f"Diffusion replica id={replica_id} for stage {stage.stage_id} is up"
            if diffusion
            else f"Stage {stage.stage_id} replica id={replica_id} up"
        )
        _log.info(text, address=member.ready["address"], devices=",".join(replica.devices) or "host")

    @property
    def over(self) -> bool:
        """None of them runs, and none will."""
        members = [self._supervisor.members.get(name) for name in self._replicas]
        return bool(members) and all(member is not None and member.state in _OVER for member in members)

    def ready(self) -> list[dict[str, object]]:
        """What each replica said when it became ready."""
        members = [self._supervisor.members[name] for name in self._replicas if name in self._supervisor.members]
        return [{"name": member.spec.name, **member.ready} for member in members if member.ready]

    def _rendezvous(self, name: str) -> Mapping[str, str]:
        """A port of its own for the ranks of a replica: free, and given to no other replica of this launcher."""
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            if port not in self._ports.values():
                self._ports[name] = port
                return devices.rendezvous(port)
