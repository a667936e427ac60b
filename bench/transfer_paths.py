"""The paths of ``bench.transfer``, and the two processes of each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness import Helper
from connectors.payload import JsonValue
from connectors.registry import list_connectors
from omnicore import process

ROOT = Path(__file__).parents[1]
_START_S = 180.0
_TURN_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One way to hand over bytes."""

    key: str
    """Its name in results and in ``--only``."""
    label: str
    family: str
    """ "baseline", "ours" or "peer"."""
    name: str
    mode: str = "-"
    """Of ours: "copied", "in_place" or "into"."""
    awake: bool = False
    """Never stopped: somebody else counts its heartbeats."""


BASELINES = (
    Contender("memcpy", "memcpy, one process", "baseline", "memcpy"),
    Contender("tcp", "TCP, loopback", "baseline", "tcp"),
    Contender("cma", "process_vm_readv", "baseline", "cma"),
    Contender("raw_mooncake", "Mooncake engine alone (read)", "baseline", "mooncake"),
)
PEERS = (
    Contender("peer_shm", "vLLM-Omni SharedMemoryConnector", "peer", "shm"),
    Contender("peer_mooncake", "vLLM-Omni MooncakeTransferEngineConnector", "peer", "mooncake"),
)
_MODES = {
    "shm": ("copied", "in_place", "into"),
    "mooncake": ("copied", "in_place", "into"),
    "nixl": ("copied", "in_place", "into"),
}
_STORES = ("mooncake_store", "yuanrong")
_NEVER_HERE = ("cuda_ipc", "mori", "yuanrong_transfer_engine")  # need devices


def contenders(with_peers: bool) -> list[Contender]:
    """All that this build knows, in the order of the tables."""
    ours = [
        Contender(
            f"{kind}_{mode}" if mode != "copied" else kind,
            f"{kind}, {mode.replace('_', ' ')}",
            "ours",
            kind,
            mode,
            kind in _STORES,
        )
        for kind in sorted(list_connectors(), key=lambda kind: (kind != "shm", kind))
        if kind not in _NEVER_HERE
        for mode in _MODES.get(kind, ("copied",))
    ]
    return [*BASELINES, *ours, *(PEERS if with_peers else ())]


class UnavailableHereError(Exception):
    """A path that this machine cannot go; the text says why."""


class Pair:
    """Producer and consumer of one path. Stopped between turns."""

    def __init__(
        self,
        contender: Contender,
        run_dir: Path,
        peer_python: str,
        largest: int,
        options: Mapping[str, Mapping[str, JsonValue]],
    ) -> None:
        self.contender = contender
        self._options = options
        self._log_path = run_dir / f"{contender.key}.log"
        self._log = self._log_path.open("wb")
        self._peer_port = str(_two_ports())
        near, far = socket.socketpair()
        with near, far:
            self._consumer = subprocess.Popen(
                self._command("consume", far.fileno(), peer_python, largest),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[far.fileno()],
                cwd=ROOT,
            )
            near_fd = os.dup(near.fileno())
        self._near_fd = near_fd
        self._producer = Helper(
            contender.key,
            self._command("produce", near_fd, peer_python, largest),
            stderr=self._log,
            pass_fds=[near_fd],
            cwd=ROOT,
        )

    def _command(self, role: str, fd: int, peer_python: str, largest: int) -> list[str]:
        contender = self.contender
        if contender.family == "peer":
            python, module = os.path.abspath(peer_python), "bench.transfer_peer"  # noqa: PTH100  # not where a link leads
            arguments = [role, contender.name, str(fd), self._peer_port, str(largest)]
        else:
            python, module = sys.executable, "bench.transfer_end"
            options = json.dumps({**self._options.get("both", {}), **self._options.get(role, {})})
            arguments = [role, contender.family, contender.name, contender.mode, str(fd), str(largest), options]
        return process.dying_with_parent([python, "-m", module, *arguments], signal.SIGKILL)

    async def start(self) -> None:
        """Both ends ready, then stopped. Raises ``UnavailableHereError``."""
        await self._producer.__aenter__()
        os.close(self._near_fd)
        await self._ask(_START_S, "start")
        self._signal(signal.SIGSTOP)

    @property
    def pids(self) -> list[int]:
        """Of both ends."""
        return [self._producer.pid, self._consumer.pid]

    async def turn(self, size: int, samples: int, budget_s: float) -> list[tuple[float, float, float]]:
        """Seconds (put, handed, read) of each transfer. Raises ``UnavailableHereError`` if it cannot."""
        self._signal(signal.SIGCONT)
        try:
            answer = await self._ask(_TURN_S, "measure", size=size, samples=samples, budget_s=budget_s)
        finally:
            self._signal(signal.SIGSTOP)
        found: list[tuple[float, float, float]] = answer["samples"]
        return found

    async def close(self) -> None:
        """End both, at once: they hold nothing that outlives them."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._producer.__aexit__()
        self._consumer.wait()
        self._log.close()

    async def _ask(self, timeout_s: float, do: str, **fields: object) -> dict[str, Any]:
        try:
            answer = await asyncio.wait_for(self._producer.ask(do, **fields), timeout_s)
        except TimeoutError:
            raise UnavailableHereError(f"no answer within {timeout_s:g} s{self._log_tail()}") from None
        except (RuntimeError, OSError) as error:
            raise UnavailableHereError(f"{error}{self._log_tail()}") from error
        if "error" in answer:
            raise UnavailableHereError(f"{answer['error']}{self._log_tail()}")
        return answer

    def _log_tail(self) -> str:
        lines = [line for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        return "".join(f"\n    {line[:200]}" for line in lines[-4:])

    def _signal(self, number: signal.Signals) -> None:
        if not self.contender.awake:
            for pid in self.pids:
                os.kill(pid, number)


def _two_ports() -> int:
    """The first of two free ports in a row, for the peer, which wants to be told."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
