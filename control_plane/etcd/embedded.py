"""A private single-node etcd as a child process, for one machine.

It listens on Unix sockets inside a directory of mode 0700, so only its user reaches it; a loopback TCP port can be
added for ``etcdctl``. It dies with its parent, even when that is killed. It is not replicated: for several machines
bring a cluster.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import platform
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from control_plane.etcd import workdir
from control_plane.etcd.binary import find_etcd
from control_plane.etcd.client import EtcdClient
from control_plane.etcd.errors import EtcdUnavailable
from omnicore import config, errors
from omnicore.log import get_logger
from omnicore.process import dying_with_parent

_log = get_logger(__name__)

_NAME = "omniplane"
# The names of the sockets: etcd wants host:port there, too.
_CLIENT, _PEER = "client:0", "peer:0"
# Nobody to elect but itself, so elections may be hasty: the first write is committed 0.2 s after the start rather than
# 1.2 s (measured with etcd 3.4.23 and 3.5.1).
_HEARTBEAT_MS, _ELECTION_MS = 20, 100
# Watchers that fall behind by more than this list again.
_HISTORY = "1h"
# Another process may take the free port between our choosing it and etcd's binding it.
_PORT_ATTEMPTS = 3
_POLL_S = 0.05
_ROTATE_LOG_BYTES = 16 * 1024 * 1024


def loopback(value: str) -> None:
    """Accept "host:port" on a loopback address. Raises ``ValueError``."""
    config.host_port(value)
    host, _ = config.split_host_port(value)
    try:
        accepted = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        accepted = False
    if not accepted:
        raise ValueError(f"must be on a loopback address, since this etcd has neither TLS nor users, got {value!r}")


class EmbeddedEtcd:
    """A private etcd. Use as ``async with``, or ``start`` and ``stop``.

    ``data_dir`` keeps the store over restarts; without one it is temporary and removed by ``stop``. ``client_listen``
    ("127.0.0.1:0"; port 0 takes a free one) adds a TCP listener on a loopback address. ``binary`` overrides the search
    of ``find_etcd``.
    """

    def __init__(
        self,
        *,
        data_dir: str | Path | None = None,
        client_listen: str = "",
        binary: str | Path | None = None,
        ready_timeout_s: float = 30.0,
    ) -> None:
        if client_listen:
            try:
                loopback(client_listen)
            except ValueError as error:
                raise errors.InvalidRequestError.field("client_listen", str(error)) from error
        self._data_dir = data_dir
        self._client_listen = client_listen
        self._binary = binary
        self._ready_timeout_s = ready_timeout_s
        self._dir: workdir.WorkDir | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._tail = ""
        self.endpoints: tuple[str, ...] = ()
        """Addresses for ``EtcdClient``, the Unix socket first; set by ``start``."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """The process id of etcd."""
        return self._running().pid

    async def start(self) -> None:
        """Start etcd and return once it has committed to lead: reads and writes work.

        Raises ``FailedPreconditionError`` (no program, or the directory cannot be used) and ``UnavailableError``
        (reason ETCD_START_FAILED, with the last lines of its log).
        """
        if self._process is not None:
            raise errors.FailedPreconditionError("this etcd was started already")
        binary = find_etcd(self._binary)
        self._dir = await asyncio.to_thread(workdir.acquire, self._data_dir)
        try:
            await self._start_with_port(binary, self._dir)
        except BaseException:
            await self.stop()
            raise
        _log.info("etcd started", pid=self.pid, binary=binary, endpoints=",".join(self.endpoints))

    async def stop(self, grace_s: float = 5.0) -> None:
        """End etcd in good order, or by force after ``grace_s`` seconds. May be called twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await self.wait()
            except TimeoutError:
                _log.warning("etcd did not stop in time and is killed", pid=self._process.pid)
                self._process.kill()
                await self.wait()
        if self._dir is not None:
            self._tail = self.log_tail()
            directory, self._dir = self._dir, None
            await asyncio.to_thread(directory.release)

    async def wait(self) -> int:
        """Wait for etcd to end; returns its exit code, negative for a signal."""
        process = self._running()
        # Not asyncio's subprocesses: they fork (see dying_with_parent). Not a pidfd: kernels before 5.3 have none.
        while (code := process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return code

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that etcd logged."""
        if self._dir is None:
            return self._tail
        try:
            text = (self._dir.data / "etcd.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise errors.FailedPreconditionError("this etcd was not started")
        return self._process

    async def _start_with_port(self, binary: Path, directory: workdir.WorkDir) -> None:
        any_port = self._client_listen.endswith(":0")
        for attempt in range(_PORT_ATTEMPTS):
            listen = _choose_port(self._client_listen) if any_port else self._client_listen
            self._process = self._spawn(binary, directory, listen)
            self.endpoints = (f"unix:{directory.sockets / _CLIENT}", *((listen,) if listen else ()))
            try:
                await self._until_ready()
                return
            except errors.UnavailableError as error:
                if not (any_port and "address already in use" in error.message and attempt + 1 < _PORT_ATTEMPTS):
                    raise

    def _spawn(self, binary: Path, directory: workdir.WorkDir, listen: str) -> subprocess.Popen[bytes]:
        for name in (_CLIENT, _PEER):
            (directory.sockets / name).unlink(missing_ok=True)  # left by a server that was killed
        log = directory.data / "etcd.log"
        if log.exists() and log.stat().st_size > _ROTATE_LOG_BYTES:
            log.replace(log.with_name("etcd.log.1"))
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(
                dying_with_parent([str(binary), *_flags(directory, listen)]),
                cwd=directory.sockets,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for us: we stop after those who use the store
            )
        finally:
            os.close(output)

    async def _until_ready(self) -> None:
        process = self._running()
        ended = asyncio.create_task(self.wait())
        ready = asyncio.create_task(self._first_read())
        try:
            await asyncio.wait({ended, ready}, timeout=self._ready_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise self._start_failed(f"ended with code {process.returncode} at once")
            if not ready.done():
                raise self._start_failed(f"was not ready after {self._ready_timeout_s:g} s")
            ready.result()
        finally:
            ended.cancel()
            ready.cancel()
            await asyncio.wait({ended, ready})

    async def _first_read(self) -> None:
        # A channel that meets no socket waits 0.1 s before it tries again, so look for the file first.
        path = self.endpoints[0].removeprefix("unix:")
        while not await asyncio.to_thread(os.path.exists, path):  # noqa: ASYNC110 -- nobody sends us an event
            await asyncio.sleep(0.01)
        async with EtcdClient(self.endpoints[:1], timeout_s=1.0) as client:
            while True:
                try:
                    await client.get("/omni/v1/meta")  # a linearizable read: there is a leader
                    return
                except EtcdUnavailable as error:
                    _log.debug("etcd is not ready yet", error=error)

    def _start_failed(self, why: str) -> errors.UnavailableError:
        tail = self.log_tail()
        return errors.UnavailableError(
            f"etcd {why}; its log ends with:\n{tail or '(nothing)'}", reason="ETCD_START_FAILED", metadata={"why": why}
        )


def _flags(directory: workdir.WorkDir, listen: str) -> list[str]:
    client, peer = f"unix://{_CLIENT}", f"unix://{_PEER}"
    clients = f"{client},http://{listen}" if listen else client
    values = {
        "name": _NAME,
        "data-dir": str(directory.data / "data"),
        "listen-client-urls": clients,
        "advertise-client-urls": clients,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"{_NAME}={peer}",
        "heartbeat-interval": str(_HEARTBEAT_MS),
        "election-timeout": str(_ELECTION_MS),
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": _HISTORY,
        "logger": "zap",
        "log-level": "warn",
    }
    return [f"--{name}={value}" for name, value in values.items()]


def _environment() -> dict[str, str]:
    # etcd refuses to start if ETCD_NAME and the like contradict a flag; they are meant for another server anyway.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    if platform.machine() == "aarch64":
        environment["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # needed by 3.4, harmless to newer ones
    return environment


def _choose_port(listen: str) -> str:
    host, _ = config.split_host_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return config.join_host_port(host, port)
