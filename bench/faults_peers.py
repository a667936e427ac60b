"""A router of others before two workers that can be killed, hung and started again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path

from bench import gateway_peers
from bench.faults_load import Client
from bench.gateway_peers import Dynamo, Peer
from bench.gateway_processes import Process, free_port
from bench.harness import Service

TOKENS = 64


class DynamoOverEtcd(Dynamo):
    """Dynamo with the discovery that notices who has died."""

    discovery = "etcd"


class DynamoMigrating(DynamoOverEtcd):
    """Dynamo as it does best: streams migrate."""

    name = "dynamo-migrating"
    flags = ("--migration-limit", "3")


PEERS: dict[str, Peer] = {
    **gateway_peers.PEERS,
    **{peer.name: peer for peer in (DynamoOverEtcd(), DynamoMigrating())},
}


class PeerCluster:
    """Use as ``async with``."""

    def __init__(
        self, peer: Peer, peers: Path, run_dir: Path, mock: Path, *, ttft_ms: float = 0, itl_ms: float = 0
    ) -> None:
        self._peer, self._peers = peer, peers
        self._run_dir = run_dir
        self._mock = mock
        self._ttft_ms, self._itl_ms = ttft_ms, itl_ms
        self._stack = contextlib.ExitStack()
        self._generation = 0
        self.port = 0
        self.workers: list[Process] = []
        self._ports: Sequence[int] = ()

    def _start_worker(self, number: int) -> Process:
        self._generation += 1
        if self._peer.own_workers:
            seconds = {"ttft_s": self._ttft_ms / 1e3, "itl_s": self._itl_ms / 1e3}
            worker = self._peer.start_worker(
                self._peers, self._run_dir, self._generation, "faults", tokens=TOKENS, **seconds
            )
        else:
            argv = [str(self._mock), str(self._ports[number])]
            argv += [str(int(self._ttft_ms * 1e3)), str(int(self._itl_ms * 1e3)), str(TOKENS), "0"]
            worker = Process(f"mock-{self._generation}", argv, self._run_dir)
        self._stack.callback(worker.stop)
        return worker

    async def __aenter__(self) -> PeerCluster:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if isinstance(self._peer, DynamoOverEtcd):
            flags = ("--data-dir", str(self._run_dir / "etcd"), "--client-listen", "127.0.0.1:0")
            etcd = Service.ours("etcd", "etcd", self._run_dir, *flags)
            self._stack.callback(etcd.stop)
            endpoints = (await etcd.ready())["endpoints"]
            assert isinstance(endpoints, list)
            self._peer.etcd = str(endpoints[-1])
        self._ports = [free_port(), free_port()]
        self.workers = [self._start_worker(number) for number in range(2)]
        self.port = free_port()
        router = self._peer.start(self._peers, self._run_dir, self.port, self._ports, "faults")
        self._stack.callback(router.stop)
        async with asyncio.timeout(90), Client(self.port, "mock", timeout_s=3) as client:
            good = 0
            while good < 4:  # both workers
                good = good + 1 if not (await client.ask()).error else 0
                await asyncio.sleep(0.2)
        await asyncio.sleep(4 if self._peer.own_workers else 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stack.close()

    def kill(self) -> None:
        """SIGKILL to the second worker."""
        self.workers[1].signal(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP to the second worker."""
        self.workers[1].signal(signal.SIGSTOP)

    def restart(self) -> None:
        """Start the second worker again."""
        self.workers[1].process.wait()
        self.workers[1] = self._start_worker(1)

    def came_from_restarted(self, text: str) -> bool:
        """Whether an answer is the second worker's (its port is in it)."""
        return f"port {self._ports[1]}" in text


def expected_stream() -> str:
    """What a complete stream of an HTTP worker says."""
    return "".join(f"t{number:020d} " for number in range(TOKENS))
