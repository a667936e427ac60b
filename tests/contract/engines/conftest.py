from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from connectors.engines.base import LocalRegion, RemoteRegion, TransferEngine
from tests.contract.engines.peer import pattern, remote, running_engine

KINDS = ["mooncake", "nixl", "mori", "yuanrong_transfer_engine"]
MIB = 1 << 20


class PeerProcess:
    """The other end."""

    def __init__(self, kind: str, size_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.engines.peer", kind, str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        self.region: RemoteRegion = remote(self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer ended"
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Let it come to its end; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait()
        self._process.stdout.close()
        return code

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Standing still, inside the context."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def dispose(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Reader:
    """This end: an engine, and memory that is registered with it."""

    def __init__(self, engine: TransferEngine, size_bytes: int) -> None:
        self.engine = engine
        self.memory = np.zeros(size_bytes, np.uint8)
        self.region: LocalRegion = engine.register(self.memory.ctypes.data, self.memory.nbytes, "cpu")

    @property
    def address(self) -> int:
        return self.region.address


class Peers:
    """Starts peers. They cost seconds each, so one of each kind is shared by all tests that do it no harm."""

    def __init__(self) -> None:
        self._all: list[PeerProcess] = []
        self._shared: dict[str, PeerProcess] = {}

    def start(self, kind: str, size_bytes: int = 4 * MIB) -> PeerProcess:
        self._all.append(PeerProcess(kind, size_bytes))
        return self._all[-1]

    def shared(self, kind: str) -> PeerProcess:
        if kind not in self._shared:
            self._shared[kind] = self.start(kind)
        return self._shared[kind]

    def dispose(self) -> None:
        for peer in self._all:
            peer.dispose()


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    """Peers; those that are left are ended after the last test."""
    peers = Peers()
    yield peers
    peers.dispose()


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The engine under test."""
    return str(request.param)


@pytest.fixture(scope="session")
def peer(kind: str, peers: Peers) -> PeerProcess:
    """A peer with 4 MiB that stays well."""
    return peers.shared(kind)


@pytest.fixture(scope="session")
def shared_reader(kind: str) -> Iterator[Reader]:
    with running_engine(kind) as engine:
        yield Reader(engine, 4 * MIB)


@pytest.fixture
def reader(shared_reader: Reader) -> Reader:
    """This end, with 4 MiB of zeros."""
    shared_reader.memory[:] = 0
    return shared_reader


def is_pattern(memory: np.ndarray[Any, np.dtype[np.uint8]], first: int) -> bool:
    """The bytes are those of a peer from ``first`` on."""
    return bool((memory == pattern(first + memory.size)[first:]).all())
