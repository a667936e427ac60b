"""``omniplane gateway --workers N``: one process that starts N gateways on the same two ports and keeps them running.

It holds both ports (bound, not listening, with SO_REUSEPORT, so that no connection comes here), which gives all the
same port where any free one is asked for, and keeps it while processes come and go. It serves nothing itself. One that
ends is started again, and so is one that hangs, which is killed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.config import GatewayConfig
from gateway.processes.siblings import Place, Siblings
from gateway.processes.watchdog import Watchdog
from omnicore import config as configuration
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.errors import UnavailableError
from omnicore.log import get_logger
from omnicore.process import ProcessConfig, write_ready_file
from omnicore.supervise.ports import check_free
from omnicore.supervise.restart import RestartPolicy
from omnicore.supervise.supervisor import Member, Spec, State, Supervisor
from omnicore.tasks import together

_log = get_logger(__name__)

_READY_S = 60.0  # bounds a start that hangs; a machine may be busy with other things
# After its requests, a gateway still closes what it has. Less than what launchers give us for the same.
_AFTER_DRAIN_S = 7.0
# A process that keeps dying is tried again after so long, then ever more seldom.
_CRASH_LOOP_DELAY_S = 10.0
# What is the parent's own, and what the supervisor gives each child.
_OWN = frozenset(field.name for field in dataclasses.fields(ProcessConfig)) - {"log_level", "log_json"}


async def serve_together(config: GatewayConfig) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. Raises ``UnavailableError`` for a taken port and
    ``StartFailedError`` if a process does not start."""
    directory = Path(tempfile.mkdtemp(prefix="omniplane-gateway-"))
    supervisor = Supervisor(directory, _tell, clock=SYSTEM_CLOCK, policy=_policy, own_logs=False, guarded=True)
    names = [f"gateway-{index}" for index in range(config.workers)]
    with contextlib.ExitStack() as stack, _Signals(supervisor, reloads=bool(config.api_keys)) as stop:
        try:
            http = stack.enter_context(_reserved("--http", config.http))
            grpc = stack.enter_context(_reserved("--grpc", config.grpc))
            specs = [_spec(config, name, index, directory, http, grpc) for index, name in enumerate(names)]
            starting = asyncio.ensure_future(together(*(supervisor.launch(spec) for spec in specs)))
            stopped = asyncio.ensure_future(stop.wait())
            tasks: set[asyncio.Future[Any]] = {starting, stopped}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    write_ready_file(config.ready_file, {"http": http, "grpc": grpc, "workers": config.workers})
                    _log.info("gateway processes serving", http=http, grpc=grpc, workers=config.workers)
                if config.replace_hung_after_s:
                    watchdog = _watchdog(config, supervisor, names, directory)
                    tasks.add(asyncio.create_task(watchdog.run(), name="watchdog"))
                ended, _ = await asyncio.wait(tasks - {starting}, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            _log.info("stopping: requests may finish")
        finally:
            await supervisor.stop([names])
            await supervisor.close()
            shutil.rmtree(directory, ignore_errors=True)
    _log.info("gateway processes stopped")
    return 0


def _watchdog(config: GatewayConfig, supervisor: Supervisor, names: Sequence[str], directory: Path) -> Watchdog:
    def replace(index: int) -> None:
        member = supervisor.members[names[index]]
        # In other states it has just ended by itself, or does not serve yet.
        if member.process is not None and member.state is State.READY:
            member.process.signal_group(signal.SIGKILL)

    # Of the processes 0 to N-1 we are the one that is none of them.
    place = Place(str(directory), config.workers, config.workers)
    return Watchdog(Siblings(place), replace, hung_after_s=config.replace_hung_after_s)


def flags(config: GatewayConfig, **changes: object) -> tuple[str, ...]:
    """The command line of a gateway with this configuration and these changes. All of it: what is left out would come
    from the environment."""
    words = []
    for field in dataclasses.fields(config):
        value = changes.get(field.name, getattr(config, field.name))
        flag = f"--{field.name.replace('_', '-')}"
        if field.name in _OWN or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif isinstance(value, tuple):
            words.append(f"{flag}={','.join(map(str, value))}")
        else:
            words.append(f"{flag}={value}")
    return tuple(words)


def share(total: int, count: int) -> int:
    """What each of ``count`` processes gets of a limit, so that all together have at least ``total``."""
    return math.ceil(total / count)


def _spec(config: GatewayConfig, name: str, index: int, directory: Path, http: str, grpc: str) -> Spec:
    place = Place(str(directory), index, config.workers)
    own = flags(
        config,
        http=http,
        grpc=grpc,
        workers=1,
        process=str(place),
        max_inflight=share(config.max_inflight, config.workers),
        max_queued=share(config.max_queued, config.workers),
    )
    return Spec(
        name=name,
        arguments=("gateway", *own),
        ready_timeout_s=_READY_S,
        stop_grace_s=config.drain_timeout_s + _AFTER_DRAIN_S,
        describe=lambda ready: f"pid {ready['pid']}",
    )


@contextlib.contextmanager
def _reserved(flag: str, address: str) -> Iterator[str]:
    """``address`` with its real port, which is kept for our processes meanwhile."""
    check_free(flag, address)  # as with SO_REUSEPORT another gateway of ours would not be in the way
    host, port = configuration.split_host_port(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise UnavailableError(
                f"{flag}: cannot listen on {address}: {error.strerror}",
                reason="ADDRESS_IN_USE",
                metadata={"address": address},
            ) from error
        yield configuration.join_host_port(host, holder.getsockname()[1])


def _policy(clock: Clock) -> RestartPolicy:
    return RestartPolicy(clock, crash_loop_delay_s=_CRASH_LOOP_DELAY_S)


def _tell(member: Member, text: str) -> None:
    for line in text.splitlines():
        level = _log.error if member.state in (State.CRASH_LOOP, State.FAILED) else _log.warning
        level(line, process=member.spec.name, state=member.state.value)


class _Signals:
    """SIGTERM and SIGINT end us, the second one at once; SIGHUP goes on to all processes, which look at their files."""

    def __init__(self, supervisor: Supervisor, *, reloads: bool) -> None:
        self._supervisor = supervisor
        self._reloads = reloads
        self._stopped = asyncio.Event()

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._stop, sig)
        if self._reloads:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(sig)

    async def wait(self) -> None:
        """Return when we shall stop."""
        await self._stopped.wait()

    def _stop(self, sig: signal.Signals) -> None:
        if self._stopped.is_set():
            self._supervisor.kill_all()
            os._exit(128 + sig)
        self._stopped.set()

    def _reload(self) -> None:
        for member in self._supervisor.members.values():
            if member.process is not None and member.state is State.READY:
                member.process.signal_group(signal.SIGHUP)
