"""Real services as child processes: spawn, wait until they serve, kill or freeze them, read their logs.

Use the ``services`` fixture (``from tests.support.processes import services``): whatever a test started is ended
after it, and every log is printed then, which pytest shows for failing tests only. ::

    async def test_something(services: Services) -> None:
        control_plane = await services.start("control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded")
        gateway = await services.start("gateway", "--control-plane", control_plane.ready["address"], ...)
        gateway.kill()
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

POLL_S = 0.02
SIMULATED = {"OMNI_STAGE_WORKER_POOL_BYTES": str(32 << 20)}
"""Environment of workers with simulated engines: they fill their pool when they start, which takes a quarter of a
second of the processor with the 256 MiB that are the default."""


async def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0, what: str = "condition") -> None:
    """Return once ``condition()`` is true; fail the test after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)


@dataclasses.dataclass(slots=True)
class ServiceProcess:
    """One running service."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    ready_path: Path
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the service wrote into its ready file: addresses, ids."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """True until it has exited."""
        return self.process.poll() is None

    def logs(self) -> str:
        """All that it wrote to standard output and standard error so far."""
        return self.log_path.read_text(errors="replace")

    async def wait_ready(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait for the ready file and return its content; fails the test if the process ends before."""
        deadline = time.monotonic() + timeout_s
        while not self.ready_path.exists():
            if not self.running:
                pytest.fail(f"{self.name} exited with {self.process.returncode} before it was ready:\n{self.logs()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{self.name} was not ready within {timeout_s:g} s:\n{self.logs()}")
            await asyncio.sleep(POLL_S)
        self.ready = orjson.loads(self.ready_path.read_bytes())
        return self.ready

    async def wait_exit(self, timeout_s: float = 120.0) -> int:
        """Wait for the end and return the exit code (negative: minus the signal's number)."""
        await wait_until(lambda: not self.running, timeout_s, f"exit of {self.name}")
        return int(self.process.returncode)

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to this process."""
        if self.running:
            self.process.send_signal(sig)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        if self.running:
            self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP: alive, but hung."""
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    async def terminate(self, timeout_s: float = 120.0) -> int:
        """SIGTERM, wait, and return the exit code."""
        self.send(signal.SIGTERM)
        return await self.wait_exit(timeout_s)


class Services:
    """The services of one test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.started: list[ServiceProcess] = []

    def spawn(
        self, service: str, *flags: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> ServiceProcess:
        """Start ``omniplane SERVICE FLAGS…`` without waiting; see ``ServiceProcess.wait_ready``. ``prefix``: a program
        that runs it, ``ip netns exec NAME`` say."""
        name = f"{len(self.started)}-{service}"
        ready_path = self._directory / f"{name}.ready"
        command = [*prefix, sys.executable, "-m", "omniplane", service, *flags]
        command += ["--ready-file", str(ready_path), "--die-with-parent"]
        log_path = self._directory / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **SIMULATED, **(env or {})},
            )
        running = ServiceProcess(name, process, log_path, ready_path)
        self.started.append(running)
        return running

    async def start(
        self,
        service: str,
        *flags: str,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        timeout_s: float = 120.0,
    ) -> ServiceProcess:
        """Start a service and wait until it serves."""
        running = self.spawn(service, *flags, env=env, prefix=prefix)
        await running.wait_ready(timeout_s)
        return running

    def close(self) -> None:
        """End everything, last started first, and print the logs."""
        for running in reversed(self.started):
            if running.running:
                running.thaw()
                running.process.terminate()
                try:
                    running.process.wait(10)
                except subprocess.TimeoutExpired:
                    print(f"{running.name} did not stop within 10 s of SIGTERM and was killed")
                    running.kill()
        for running in self.started:
            print(f"----- {running.name} (exit code {running.process.returncode}) -----\n{running.logs()}")


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    """Services of this test; ended, and their logs printed, when it is over."""
    group = Services(tmp_path)
    try:
        yield group
    finally:
        group.close()
