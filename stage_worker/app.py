"""``omniplane stage-worker``: runs one replica of one stage until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

from omnicore import config as configuration
from omnicore import process
from omnicore.access import Role
from omnicore.clock import SYSTEM_CLOCK
from omnicore.log import get_logger
from omnicore.security import Security
from stage_worker.config import StageWorkerConfig
from stage_worker.control_plane_client import ControlPlaneClient
from stage_worker.devices import VISIBLE_DEVICES, narrowed
from stage_worker.worker import Worker, plan_worker

_log = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run the service; returns its exit code: 0 after a graceful stop, ``RESTART_EXIT_CODE`` after a drain whose
    operator wants a new process."""
    config = configuration.parse(StageWorkerConfig, argv, program="omniplane stage-worker", component="stage_worker")
    config.begin(f"stage-worker {config.pipeline}/{config.stage_id}")
    return process.run(_run_service(config))


async def _run_service(config: StageWorkerConfig) -> int:
    if config.devices:
        os.environ[VISIBLE_DEVICES] = narrowed(config.devices, os.environ.get(VISIBLE_DEVICES))
    return await serve(config)


async def serve(config: StageWorkerConfig, shutdown: process.Shutdown | None = None) -> int:
    """Start, serve, stop. Raises typed errors for a start that fails, such as plaintext beyond loopback; ``shutdown``
    ends it, by default on SIGTERM and SIGINT."""
    if shutdown is None:
        shutdown = process.Shutdown()
        shutdown.install()
    security = Security(
        config, serves=Role.WORKER, token_flag="--registration-token-file", token_file=config.registration_token_file
    )
    security.check_dial("--control-plane", config.control_plane)
    if config.listen:  # else it is what leads to the control plane, and so loopback if that is
        security.check_listen("--listen", config.listen)
    client = ControlPlaneClient(config.control_plane, SYSTEM_CLOCK, security.to_control_plane)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        stop = asyncio.create_task(shutdown.wait(), name="shutdown")
        stack.callback(stop.cancel)
        deadline_s = SYSTEM_CLOCK.monotonic() + config.startup_timeout_s
        planning = asyncio.create_task(plan_worker(config, client, deadline_s, security), name="plan")
        if not await _first(planning, stop):
            return 0
        worker = planning.result()
        stack.push_async_callback(worker.close)
        return await _run(worker, config, stop, deadline_s)


async def _run(worker: Worker, config: StageWorkerConfig, stop: asyncio.Task[None], deadline_s: float) -> int:
    stopping = asyncio.create_task(worker.stopping.wait(), name="stopping")
    reason = "shutdown"
    try:
        starting = asyncio.create_task(_start(worker, deadline_s), name="start")
        if await _first(starting, stop, stopping):
            starting.result()
            claim = worker.identity.current
            ready = {
                "address": worker.identity.endpoint,
                "sessions": worker.identity.session_endpoint,
                "replica_id": claim.replica_id,
                "epoch": claim.epoch,
            }
            if worker.metrics_address:
                ready["metrics"] = worker.metrics_address
            process.write_ready_file(config.ready_file, ready)
            await asyncio.wait([stop, stopping], return_when=asyncio.FIRST_COMPLETED)
        if worker.failure is not None:
            reason = worker.failure.message
    except Exception as error:
        reason = f"start failed: {error}"
        raise
    finally:
        stopping.cancel()
        await worker.leave(reason)
    if worker.failure is not None:
        raise worker.failure
    return worker.drain.exit_code


async def _start(worker: Worker, deadline_s: float) -> None:
    await worker.listen()
    await worker.join(deadline_s)
    await worker.start_engine()
    await worker.announce()


async def _first(work: asyncio.Task[object], *ends: asyncio.Task[object]) -> bool:
    """True when ``work`` is done, False when one of ``ends`` came first; ``work`` is then cancelled."""
    await asyncio.wait([work, *ends], return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        return True
    work.cancel()
    await asyncio.wait([work])
    return False
