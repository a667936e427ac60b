"""What a gateway core costs, ours and those of the routers in use today, measured side by side.

    python -m bench.gateway [--peers DIR] [--only ours,vllm-router,nginx] [--modes unary,burst,paced] [--quick]

Workers and load share core 0, the router has core 1: what is counted is the CPU of its whole process tree. Targets take
turns within every round. HTTP routers stand before two HTTP workers in C (``bench/gateway_mock.c``), ours before two
stage workers whose engine makes the same tokens (``bench/clock_engine.py``), Dynamo's before two of its runtime.

* **unary**: a chat completion of 64 tokens in one piece. **burst**: 64 tokens of an event stream as fast as they come.
  **paced**: the first after 20 ms, then one every 10 ms. At 1, 16 and 64 connections.
* Tokens carry the clock of the worker: one-way delays need no model of the network.
* ``foreign`` is what others used of the machine meanwhile, in cores: above 0.2 the rates say little.
* CPU is user and system time of all its processes, counted in ticks of 10 ms: of one paced stream it is rough.
* Where a router used less than 85 % of its core although 16 or more clients waited, workers and load are the limit:
  such rates are marked ``~``. CPU per request means the same either way.

An open loop follows (``--qps``): latency of paced streams at a fixed rate, for comparison at equal throughput; then two
gateway processes on one port against one. ``scripts/bench-peers DIR`` installs the peers; who is not there is named.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench import gateway_report, gateway_scaling, harness
from bench.gateway_ours import TOKENS, Gateway, Ours
from bench.gateway_peers import PEERS, Peer
from bench.gateway_processes import ForeignCpu, Process, compiled, free_port, on_cores, tree, tree_cpu_s, tree_mib

_CORES = sorted(os.sched_getaffinity(0))
BACKSTAGE, STAGE = {_CORES[0]}, {_CORES[-1]}
MODES = ("unary", "burst", "paced")
CONCURRENCIES = (1, 16, 64)
_QUIET_CORES = 0.15
_PROMPT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {
        "role": "user",
        "content": "Write a short note about gRPC control planes, leases, and routers. Keep it brief, please, and use "
        "plain words throughout.",
    },
]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat completions."""

    name: str
    port: int
    model: str
    pid: int = 0
    """The router's; 0: there is none."""
    headers: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long it takes."""

    seconds: float
    paced_seconds: float = 2.0
    rounds: int
    """Of unary and burst; paced streams take longer, so they have one less."""
    concurrencies: Sequence[int] = CONCURRENCIES
    quiet_wait_s: float = 3.0
    """Longest wait for a quiet machine before a measurement."""


class Bench:
    """Targets of one phase, and how each is measured."""

    def __init__(self, run_dir: Path, load: Path) -> None:
        self._run_dir = run_dir
        self._load = load
        self.pids: list[int] = []
        """Every process of this benchmark: what is not here is foreign."""

    async def measure(
        self, target: Target, mode: str, connections: int, seconds: float, qps: float = 0
    ) -> dict[str, Any]:
        """One run of the load generator, and what the router used."""
        warm_s = min(0.7, seconds / 3) if mode == "paced" else min(0.3, seconds / 3)
        body = {"model": target.model, "messages": _PROMPT, "max_tokens": TOKENS, "temperature": 0}
        body |= {"stream": True} if mode != "unary" else {}
        body_file = self._run_dir / f"{target.model}-{mode}.json"
        body_file.write_text(json.dumps(body, separators=(",", ":")))
        numbers = map(str, (connections, warm_s, seconds, qps))
        argv = (str(self._load), str(target.port), str(body_file), *numbers, *target.headers)
        foreign, begin_s = ForeignCpu(self.pids), time.monotonic()
        cpu_s = tree_cpu_s(target.pid) if target.pid else 0.0
        with on_cores(BACKSTAGE):
            child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        out, _ = await child.communicate()
        if child.returncode != 0:
            raise RuntimeError(f"load generator: {child.returncode}")
        row: dict[str, Any] = json.loads(out)
        cpu_s = (tree_cpu_s(target.pid) if target.pid else 0.0) - cpu_s
        row["cpu_s"], row["wall_s"] = cpu_s, time.monotonic() - begin_s
        row["foreign_cores"] = foreign.cores()
        row["mib"] = tree_mib(target.pid) if target.pid else 0.0
        return row

    async def quiet(self, most_s: float) -> None:
        """Wait until others use little, but not for long."""
        deadline_s = time.monotonic() + most_s
        while time.monotonic() < deadline_s:
            foreign = ForeignCpu(self.pids)
            await asyncio.sleep(0.3)
            if foreign.cores() < _QUIET_CORES:
                return


def _answers(target: Target) -> bool:
    body = json.dumps({"model": target.model, "messages": _PROMPT, "max_tokens": 4}).encode()
    headers = dict(header.split(": ", 1) for header in target.headers) | {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{target.port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


async def answers(target: Target, process: Process | None = None, timeout_s: float = 90) -> None:
    """Wait until it does. Raises ``RuntimeError`` with its log."""
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(_answers, target):
        if time.monotonic() > deadline_s or (process is not None and process.process.poll() is not None):
            raise RuntimeError(f"{target.name} does not answer:\n{process.log_tail() if process else ''}")
        await asyncio.sleep(0.2)


def start_mock(program: Path, run_dir: Path, name: str, *arguments: object, port: int = 0) -> tuple[Process, int]:
    """An HTTP worker; its process and port."""
    process = Process(name, [str(program), str(port), *map(str, arguments)], run_dir)
    deadline_s = time.monotonic() + 10
    while not (said := process.log_path.read_text().splitlines()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{name} does not start")
        time.sleep(0.01)
    return process, int(said[-1])


async def _start_peer(
    peer: Peer, peers: Path, run_dir: Path, workers: Sequence[int], paced: bool, stack: contextlib.ExitStack
) -> tuple[Target, list[int]] | None:
    tag, port = "paced" if paced else "fast", free_port()
    pids = []
    if peer.own_workers:
        with on_cores(BACKSTAGE):
            for number in range(2):
                ttft_s, itl_s = (0.02, 0.01) if paced else (0.0, 0.0)
                worker = peer.start_worker(peers, run_dir, number, tag, ttft_s=ttft_s, itl_s=itl_s, tokens=TOKENS)
                stack.callback(worker.stop)
                pids.append(worker.pid)
    with on_cores(STAGE):
        process = peer.start(peers, run_dir, port, workers, tag)
    stack.callback(process.stop)
    target = Target(peer.name, port, peer.model, process.pid)
    try:
        await answers(target, process)
    except RuntimeError as error:  # a peer that does not run here is no reason to measure none
        print(f"skipped: {error}", file=sys.stderr)
        stack.close()
        return None
    return target, [*pids, process.pid]


@contextlib.asynccontextmanager
async def targets(
    bench: Bench, names: Sequence[str], mode: str, peers: Path, run_dir: Path, mock: Path, ours: Ours, gateway: Gateway
) -> AsyncIterator[list[Target]]:
    """Everything that is to be measured in one mode, running."""
    paced = mode == "paced"
    with contextlib.ExitStack() as stack:
        ports = []
        with on_cores(BACKSTAGE):
            for number in range(2):
                delays = (20_000, 10_000) if paced else (0, 0)
                process, port = start_mock(mock, run_dir, f"mock-{mode}-{number}", *delays, TOKENS, 1)
                stack.callback(process.stop)
                bench.pids.append(process.pid)
                ports.append(port)
        found = [Target("direct", ports[0], "mock")]
        if "ours" in names:
            await ours.start_model(mode)
            stack.callback(ours.stop_model, mode)
            await ours.serves(gateway, [mode])
            bench.pids += ours.worker_pids(mode)
            found.append(Target("ours", gateway.port, mode, gateway.pid, gateway.headers))
        for name in names:
            if name in PEERS:
                of_peer = stack.enter_context(contextlib.ExitStack())
                started = await _start_peer(PEERS[name], peers, run_dir, ports, paced, of_peer)
                if started is not None:
                    found.append(started[0])
                    bench.pids += started[1]
        yield found


async def measure_processes(
    bench: Bench, ours: Ours, effort: Effort, services: contextlib.ExitStack
) -> dict[str, float]:
    """Unary requests a second of one gateway process, and of two on one port, in turns (bench/gateway_scaling.py)."""
    await ours.start_model("unary")
    services.callback(ours.stop_model, "unary")
    found: dict[int, Target] = {}
    for processes in (1, 2):
        gateway = await ours.start_gateway(f"gateway-of-{processes}", "--workers", str(processes))
        await ours.serves(gateway, ["unary"])
        found[processes] = Target(f"ours × {processes}", gateway.port, "unary", gateway.pid, gateway.headers)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(effort.rounds):
        for processes, target in found.items():
            with gateway_scaling.quotas(tree(target.pid)):
                await bench.quiet(effort.quiet_wait_s)
                row = await bench.measure(target, "unary", 64 * processes, effort.seconds)
                rates[processes].append(row["per_s"])
    one, two = (statistics.median(rates[processes]) for processes in (1, 2))
    share = gateway_scaling.SHARE
    return {"processes_1_per_s": one, "processes_2_per_s": two, "processes_2_over_1_ratio": two / one} | {
        "processes_share_of_a_core": share
    }


async def measure(
    names: Sequence[str], modes: Sequence[str], effort: Effort, peers: Path, qps: Sequence[float] = ()
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of single runs (``mode``, ``target``, ``connections``, ``qps`` and what was counted), and what two processes
    bring."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="omniplane-bench-") as folder, contextlib.ExitStack() as services:
        run_dir = Path(folder)
        load, mock = compiled("gateway_load", run_dir), compiled("gateway_mock", run_dir)
        if load is None or mock is None:
            raise SystemExit("bench.gateway needs a C compiler (cc): its workers and its load generator are in C")
        bench = Bench(run_dir, load)
        ours = Ours(run_dir, services, BACKSTAGE, STAGE)
        await ours.start()
        gateway = await ours.start_gateway("gateway")
        bench.pids.append(gateway.pid)
        for mode in modes:
            async with targets(bench, names, mode, peers, run_dir, mock, ours, gateway) as found:
                for target in found:  # connections, caches
                    await bench.measure(target, mode, 16, 0.3)
                cells = [(connections, 0.0) for connections in effort.concurrencies]
                cells += [(256, rate) for rate in qps if mode == "paced"]
                for connections, rate in cells:
                    print(f"{mode}, {rate or connections} …", file=sys.stderr, flush=True)
                    paced = mode == "paced"
                    for round_number in range(max(1, effort.rounds - paced)):
                        for target in found:
                            await bench.quiet(effort.quiet_wait_s)
                            seconds = effort.paced_seconds if paced else effort.seconds
                            row = await bench.measure(target, mode, connections, seconds, rate)
                            about = {"mode": mode, "target": target.name, "connections": connections, "qps": rate}
                            rows.append({**about, "round": round_number, **row})
        scaling: dict[str, float] = {}
        if "ours" in names and "unary" in modes:
            if why := gateway_scaling.no_quota():
                print(f"skipped: two processes on one port: {why}")
            else:
                scaling = await measure_processes(bench, ours, effort, services)
    return rows, scaling


def _arguments() -> argparse.Namespace:
    parser = harness.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="directory of scripts/bench-peers")
    parser.add_argument("--only", default="", help=f"targets, comma-separated, of: ours, {', '.join(PEERS)}")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--concurrency", default=",".join(map(str, CONCURRENCIES)), help="comma-separated")
    parser.add_argument(
        "--seconds", type=float, default=1.2, help="of every measurement but paced streams, which take 2"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of every cell, targets in turns")
    parser.add_argument("--qps", default="50", help="rates of an open loop of paced streams, comma-separated")
    arguments: argparse.Namespace = parser.parse_args()
    return arguments


async def main(arguments: argparse.Namespace) -> None:
    """Measure, print, store, plot."""
    wanted = [name for name in arguments.only.split(",") if name] or ["ours", *PEERS]
    if unknown := set(wanted) - {"ours", *PEERS}:
        raise SystemExit(f"--only: unknown {sorted(unknown)}; known: ours, {', '.join(PEERS)}")
    peers = arguments.peers.resolve()
    skipped = {name: why for name in wanted if name in PEERS and (why := PEERS[name].missing(peers))}
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}")
    names = [name for name in wanted if name not in skipped]
    concurrencies = [int(number) for number in arguments.concurrency.split(",")]
    effort = Effort(seconds=arguments.seconds, rounds=arguments.rounds, concurrencies=concurrencies)
    if arguments.quick:
        few = concurrencies if arguments.only else (1, 16)
        effort = Effort(seconds=0.4, paced_seconds=0.7, rounds=1, concurrencies=few, quiet_wait_s=0)
    qps = [float(rate) for rate in arguments.qps.split(",") if rate and not arguments.quick]
    rows, scaling = await measure(names, arguments.modes.split(","), effort, peers, qps)
    figures = gateway_report.figures(rows) | scaling
    print(harness.machine_line())
    gateway_report.show(rows, figures)
    partial = bool(arguments.only) or arguments.modes != ",".join(MODES)
    if not partial:
        about = {f"version_{name}": PEERS[name].version for name in names if name in PEERS}
        path = harness.store("gateway", {**figures, **about}, arguments.quick)
        gateway_report.plot(figures, path.with_suffix(".png"))
        if not arguments.quick:
            tables = gateway_report.markdown(figures, ["direct", *names], harness.machine_line())
            harness.write_table(harness.DOCS / "performance.md", "gateway", tables)
        print(f"wrote {path} and its plot")


if __name__ == "__main__":
    uvloop.run(main(_arguments()))
