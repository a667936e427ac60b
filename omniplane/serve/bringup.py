"""Waiting for the replicas that a head's plan asks for, wherever they run."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.config import split_host_port
from omnicore.errors import DeadlineExceededError, UnavailableError
from omnicore.log import get_logger
from omniplane.serve.pipelines import ControlPlaneClient

_log = get_logger(__name__)

_POLL_S = 0.2
_REMIND_S = 10.0
_HTTP_TIMEOUT_S = 5.0


def missing(pipeline: pipeline_pb2.Pipeline, replicas: Sequence[types_pb2.Replica]) -> dict[int, list[int]]:
    """Replica ids that stages with too few routable replicas still wait for, lowest first."""
    ids: dict[int, set[int]] = {stage.stage_id: set() for stage in pipeline.stages}
    for replica in replicas:
        if replica.state == types_pb2.REPLICA_STATE_READY and not replica.suspect and not replica.cordoned:
            ids.setdefault(replica.ref.stage.stage_id, set()).add(replica.ref.replica_id)
    found = {}
    for stage in pipeline.stages:
        have = ids[stage.stage_id]
        absent = [slot for slot in range(stage.num_replicas) if slot not in have]
        # Any id fills a slot: ids above the planned ones count as well.
        lacking = stage.num_replicas - len(have)
        if lacking > 0:
            found[stage.stage_id] = absent[-lacking:]
    return found


def describe(pipeline: pipeline_pb2.Pipeline, slots: Mapping[int, Sequence[int]]) -> str:
    """Missing slots for people: "stage 1 (dit): replica 1 of 2"."""
    stages = {stage.stage_id: stage for stage in pipeline.stages}
    return "; ".join(
        f"stage {stage_id} ({stages[stage_id].name}): replica {', '.join(map(str, ids))} of "
        f"{stages[stage_id].num_replicas}"
        for stage_id, ids in slots.items()
    )


async def wait_for_slots(
    plane: ControlPlaneClient,
    pipeline: pipeline_pb2.Pipeline,
    local_stages: frozenset[int],
    timeout_s: float,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Return once every stage has as many routable replicas as planned, telling now and then what is missing.

    ``local_stages`` are those that this process runs: they have limits of their own. Raises ``DeadlineExceededError``
    that names the missing slots when replicas from elsewhere have not come within ``timeout_s``.
    """
    deadline_s = clock.monotonic() + timeout_s
    remind_s = clock.monotonic() + _REMIND_S / 10
    while True:
        try:
            slots = missing(pipeline, await plane.replicas(pipeline.name))
        except UnavailableError as error:
            _log.debug("replicas unknown", error=error.message)  # it may be restarting; the deadline holds
            slots = missing(pipeline, [])
        if not slots:
            return
        remote = {stage_id: ids for stage_id, ids in slots.items() if stage_id not in local_stages}
        now_s = clock.monotonic()
        if remote and now_s >= deadline_s:
            what = describe(pipeline, remote)
            raise DeadlineExceededError(
                f"--stage-init-timeout: not registered within {timeout_s:g} s: {what}",
                reason="REPLICAS_MISSING",
                metadata={"missing": what},
            )
        if now_s >= remind_s:
            local = sum(len(ids) for stage_id, ids in slots.items() if stage_id in local_stages)
            others = sum(map(len, remote.values()))
            _log.info(
                f"Waiting for {local} local, {others} remote replica(s) to start", missing=describe(pipeline, slots)
            )
            remind_s = now_s + _REMIND_S
        await asyncio.sleep(_POLL_S)


async def wait_healthy(address: str, *, encrypted: bool) -> None:
    """Return once GET /health of the gateway at ``address`` ("host:port") answers 200."""
    context = ssl.create_default_context() if encrypted else None
    if context is not None:
        # Our own child, of which only a status is read: its certificate is for its clients, under names of theirs.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    while not await _healthy(address, context):  # noqa: ASYNC110 -- asks another process
        await asyncio.sleep(_POLL_S)


async def _healthy(address: str, context: ssl.SSLContext | None) -> bool:
    host, port = split_host_port(address)
    try:
        async with asyncio.timeout(_HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return status.split(maxsplit=2)[1:2] == [b"200"]
