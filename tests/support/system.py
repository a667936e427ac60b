"""The whole system as an operator starts it: ``omnictl up FILE`` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import SIMULATED

ROOT = Path(__file__).parents[2]


def eventually(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Return once ``condition()`` holds; fail the test after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)


class System:
    """A running ``omnictl up``: addresses, and the processes behind them."""

    def __init__(self, directory: Path, file: Path, *flags: str, environ: Mapping[str, str] = SIMULATED) -> None:
        self.directory = directory
        self.environ = {**os.environ, **environ, "OMNICTL_CONTEXT": str(directory / "context.json")}
        self._log_path = directory / "up.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "omnictl", "up", str(file), "--http", "127.0.0.1:0", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environ,
                cwd=directory,
            )
        self.context: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float) -> None:
        """Until ``omnictl up`` has told its addresses."""
        path = Path(self.environ["OMNICTL_CONTEXT"])

        def ready() -> bool:
            if self.process.poll() is not None:
                pytest.fail(f"omnictl up exited with {self.process.returncode}:\n{self.log()}")
            return path.exists()

        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                pytest.fail(f"omnictl up was not ready within {timeout_s:g} s:\n{self.log()}")
            time.sleep(0.05)
        value = json.loads(path.read_text())
        self.context = value["contexts"][value["current"]]

    def log(self) -> str:
        """What ``omnictl up`` printed, then the last lines of every process of it."""
        text = self._log_path.read_text(errors="replace")
        logs = Path(str(self.context.get("run_dir", ""))) / "logs"
        if self.context and logs.is_dir():
            for path in sorted(logs.iterdir()):
                text += f"\n----- {path.name} -----\n" + path.read_text(errors="replace")[-3000:]
        return text

    @property
    def http(self) -> str:
        """Of the gateway, "http://host:port"."""
        return str(self.context["gateway_http"])

    @property
    def grpc(self) -> str:
        """Of the gateway, "host:port"."""
        return str(self.context["gateway"])

    @property
    def server(self) -> str:
        """Of the control plane, "host:port"."""
        return str(self.context["server"])

    @property
    def etcd(self) -> str:
        """What etcdctl can reach, "host:port"."""
        return str(self.context["etcd"])

    def omnictl(self, *args: str, timeout_s: float = 50.0) -> subprocess.CompletedProcess[str]:
        """Run an omnictl command against this system."""
        return subprocess.run(
            [sys.executable, "-m", "omnictl", *args],
            capture_output=True,
            text=True,
            env=self.environ,
            timeout=timeout_s,
            check=False,
        )

    def replicas(self) -> list[dict[str, Any]]:
        """Records as ``omnictl get replicas -o json`` prints them."""
        done = self.omnictl("get", "replicas", "-o", "json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return list(found["replicas"] if isinstance(found, dict) else found)

    def etcdctl(self, *args: str) -> str:
        """Output of the real etcdctl."""
        done = subprocess.run(
            ["etcdctl", "--endpoints", self.etcd, *args],
            capture_output=True,
            text=True,
            env={**os.environ, "ETCDCTL_API": "3"},
            timeout=60,
            check=True,
        )
        return done.stdout

    def stop(self) -> int:
        """Ctrl-C, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                pytest.fail(f"omnictl up did not stop within 60 s of Ctrl-C:\n{self.log()}")
        return int(self.process.returncode)


@contextlib.contextmanager
def running_system(
    directory: Path,
    file: Path,
    *flags: str,
    ready_timeout_s: float = 60.0,
    environ: Mapping[str, str] = SIMULATED,
) -> Iterator[System]:
    """A system for the length of the block; its logs are printed at the end, which pytest shows on failure."""
    system = System(directory, file, *flags, environ=environ)
    try:
        system.wait_ready(ready_timeout_s)
        yield system
    finally:
        try:
            print(system.log())
        finally:
            system.stop()
