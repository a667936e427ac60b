"""The baseline of bench.registry: the coordinator of vLLM-Omni 0.30.0, asked the same questions.

    PEER/bin/python bench/registry_peer.py REPLICAS VICTIMS WINDOW_S

Runs in the peer's own environment and imports nothing of this project. Coordinator, hubs and victims are the modules as
released, with their defaults; only the parents of their package are left out, which would import an inference engine.
The fleet is made cheap as ours is: DEALER sockets that send what the peer's stage client sends, every 5 s as it does.
Prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import statistics
import sys
import time
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

GATEWAYS = 4
_INTERVAL_S = 5.0  # of the peer's stage client
_PACKAGE = "vllm_omni.distributed.omni_coordinator"
_fork = multiprocessing.get_context("fork")


def _peer(module: str) -> Any:
    """One module of the peer's coordinator."""
    if "vllm_omni" not in sys.modules:
        spec = importlib.util.find_spec("vllm_omni")
        if spec is None or spec.origin is None:
            raise SystemExit("this environment has no vllm-omni")
        folder = Path(spec.origin).parent
        for name, path in (
            ("vllm_omni", folder),
            ("vllm_omni.distributed", folder / "distributed"),
            (_PACKAGE, folder / "distributed" / "omni_coordinator"),
        ):
            parent = types.ModuleType(name)
            parent.__path__ = [str(path)]
            sys.modules[name] = parent
    return importlib.import_module(f"{_PACKAGE}.{module}")


def _coordinator(pipe: multiprocessing.connection.Connection) -> None:
    made = _peer("omni_coordinator").OmniCoordinator("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    pipe.send((made.router_zmq_addr, made.pub_zmq_addr))
    made.wait_for_shutdown()


def _hub(pub: str, pipe: multiprocessing.connection.Connection) -> None:
    """Tells when addresses came into its list or left it, and how many there are, whenever it is asked."""
    hub = _peer("omni_coord_client_for_hub").OmniCoordClientForHub(pub)
    known: set[str] = set()
    events: list[tuple[str, str, float]] = []
    seen: object = None
    while True:
        current = hub.get_replica_list()
        if current is not seen and current is not None:
            seen, now_s = current, time.monotonic()
            addresses = {replica.input_addr for replica in current.replicas}
            events += [("came", address, now_s) for address in addresses - known]
            events += [("went", address, now_s) for address in known - addresses]
            known = addresses
        if pipe.poll(0.001):
            pipe.recv()
            pipe.send((len(known), events))
            events = []


def _fleet(router: str, count: int) -> None:
    import zmq

    messages = _peer("messages")
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)

    def event(index: int, kind: str, queue_length: int) -> bytes:
        address = f"tcp://fleet:{index}"
        made = messages.ReplicaEvent(address, address, 0, kind, messages.ReplicaStatus.UP, queue_length)
        return json.dumps(asdict(made)).encode()

    sockets = []
    for index in range(count):
        socket = context.socket(zmq.DEALER)
        socket.connect(router)
        socket.send(event(index, "update", 0))
        sockets.append(socket)
    beat = 0
    while True:
        beat += 1
        started_s = time.monotonic()
        for index, socket in enumerate(sockets):
            socket.send(event(index, "heartbeat", beat % 100))
            ahead_s = started_s + index / count * _INTERVAL_S - time.monotonic()
            if ahead_s > 0:
                time.sleep(ahead_s)
        time.sleep(max(0.0, started_s + _INTERVAL_S - time.monotonic()))


def _victim(router: str, name: str, pipe: multiprocessing.connection.Connection) -> None:
    make = _peer("omni_coord_client_for_stage").OmniCoordClientForStage
    pipe.recv()
    asked_s = time.monotonic()
    client = make(router, name, name, 0)
    pipe.send(asked_s)
    signal.pause()
    del client


class Run:
    """One coordinator under load."""

    def __init__(self, replicas: int, victims: int) -> None:
        self._processes: list[Any] = []
        mine, theirs = _fork.Pipe()
        self.coordinator = self._start(_coordinator, theirs)
        router, pub = mine.recv()
        self.hubs = [self._with_pipe(_hub, pub)[1] for _ in range(GATEWAYS)]
        self.victims = {
            f"tcp://victim:{index}": self._with_pipe(_victim, router, f"tcp://victim:{index}")
            for index in range(victims)
        }
        self._wait_for(0)
        started_s = time.monotonic()
        self._start(_fleet, router, replicas)
        self._wait_for(replicas)
        self.grow_s = time.monotonic() - started_s

    def _start(self, target: Any, *arguments: object) -> Any:
        process = _fork.Process(target=target, args=arguments, daemon=True)
        process.start()
        self._processes.append(process)
        return process

    def _with_pipe(self, target: Any, *arguments: object) -> tuple[Any, Any]:
        mine, theirs = _fork.Pipe()
        return self._start(target, *arguments, theirs), mine

    def events(self) -> list[tuple[int, list[tuple[str, str, float]]]]:
        """What each hub counts, and saw since it was last asked."""
        for hub in self.hubs:
            hub.send("?")
        return [hub.recv() for hub in self.hubs]

    def _wait_for(self, count: int) -> None:
        deadline_s = time.monotonic() + 60
        while {known for known, _ in self.events()} != {count}:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"hubs do not see {count} replicas")
            time.sleep(0.05)

    def latest_ms(self, kind: str, since_s: dict[str, float], limit_s: float) -> list[float]:
        """Milliseconds until the last hub noticed; those that not all noticed within the limit count as the limit."""
        noticed: dict[str, list[float]] = {name: [] for name in since_s}
        deadline_s = time.monotonic() + limit_s
        while any(len(times) < GATEWAYS for times in noticed.values()) and time.monotonic() < deadline_s:
            for _, seen in self.events():
                for what, name, at_s in seen:
                    if what == kind and name in noticed:
                        noticed[name].append(at_s)
            time.sleep(0.05)
        return [
            (max(times) - since_s[name] if len(times) == GATEWAYS else limit_s) * 1e3 for name, times in noticed.items()
        ]

    def stop(self) -> None:
        """End everything."""
        for process in self._processes:
            process.kill()


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _p50_p99(name: str, values: list[float]) -> dict[str, float]:
    return {
        f"{name}_ms_p50": statistics.median(values),
        f"{name}_ms_p99": sorted(values)[min(len(values) - 1, int(len(values) * 0.99))],
    }


def main(replicas: int, victims: int, window_s: float) -> None:
    """Measure and print."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run = Run(replicas, victims)
    try:
        figures: dict[str, float] = {"replicas": replicas, "register_per_s": replicas / run.grow_s}
        time.sleep(1.0)
        before_s = _cpu_s(run.coordinator.pid)
        time.sleep(window_s)
        figures["coordinator_cores"] = (_cpu_s(run.coordinator.pid) - before_s) / window_s
        asked_s = {}
        for name, (_, pipe) in run.victims.items():
            pipe.send("go")
            asked_s[name] = pipe.recv()
            time.sleep(0.05)
        figures |= _p50_p99("visible", run.latest_ms("came", asked_s, 30.0))
        killed_s = {}
        for name, (process, _) in run.victims.items():
            killed_s[name] = time.monotonic()
            os.kill(process.pid, signal.SIGKILL)
        figures |= _p50_p99("kill", run.latest_ms("went", killed_s, 60.0))
        print(json.dumps(figures))
    finally:
        run.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
