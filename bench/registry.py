"""What a fleet costs the control plane: 100 to 10,000 registered, beating replicas, watched by four gateways.

    python -m bench.registry [--quick] [--sizes 100,1000] [--peer-python PATH]

Everything that is measured is real: etcd, the control plane, gRPC over TCP with one connection a replica, and four
processes that run the watch and the table of the gateway. Only the replicas are made cheap (``bench.registry_wire``),
so that 10,000 of them fit beside it on two cores; each beat of each brings a new load. At each size:

* **steady**: CPU of control plane and etcd in a quiet window, beats per second, resident memory;
* **register → routable**: fresh replicas register one after the other; counted until the *last* of the four gateways
  may route to it;
* **SIGKILL → not routed**: those are processes of their own, killed one after the other, until the last gateway has
  stopped to route to them; **SIGSTOP → not routed** likewise, for a replica that hangs;
* **register rate**: how fast the fleet grew to this size, some registrations at a time.

Baseline: the coordinator of vLLM-Omni 0.30.0 in the same run (``bench.registry_peer``), with 1,000 replicas. It
needs an environment of its own, which is not part of this project::

    python -m venv PEER && PEER/bin/pip install pyzmq && PEER/bin/pip install --no-deps vllm-omni==0.30.0
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvloop

from bench import harness
from bench.harness import Helper, Service
from omni.v1 import pipeline_service_pb2, pipeline_service_pb2_grpc, registry_service_pb2
from omnicore import protocol, rpc

GATEWAYS = 4
SIZES = (100, 1_000, 3_000, 10_000)
QUICK_SIZES = (20, 60)
PEER_SIZE = 1_000
_DEPLOY = "pipeline: fleet\nstages:\n  - {stage_id: 0, engine: sim, final_output: true, final_output_type: text}\n"
_FIRST_PORT = 10_000  # nobody listens there: endpoints only have to differ
_SETTLE_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Effort:
    """How much of everything."""

    window_s: float = 8.0
    victims: int = 50
    hung: int = 8
    in_flight: int = 16
    pause_s: float = 0.05
    """Between one victim and the next: what is measured is a single event, not a storm."""


QUICK = Effort(window_s=1.0, victims=6, hung=2, in_flight=4, pause_s=0.02)


class Registry:
    """The processes under measurement and those that measure."""

    def __init__(self, effort: Effort, sizes: Sequence[int]) -> None:
        self.effort = effort
        self.sizes = sizes
        self.control_plane_pid = self.etcd_pid = 0
        self.log: Callable[[], str] = str
        """The end of the control plane's log."""
        self.watchers: list[Helper] = []
        self._fleet: Helper | None = None

    @property
    def fleet(self) -> Helper:
        """The replicas."""
        assert self._fleet is not None
        return self._fleet

    @contextlib.asynccontextmanager
    async def running(self, run_dir: Path) -> AsyncIterator[None]:
        """Bring everything up, with an empty registry."""
        async with contextlib.AsyncExitStack() as stack:
            etcd = Service.ours("etcd", "etcd", run_dir, "--data-dir", str(run_dir / "etcd"))
            stack.callback(etcd.stop)
            endpoints = (await etcd.ready())["endpoints"]
            assert isinstance(endpoints, list)
            flags = ("--listen", "127.0.0.1:0", "--etcd", str(endpoints[0]), "--log-level", "warning")
            control_plane = Service.ours("control-plane", "control-plane", run_dir, *flags)
            stack.callback(control_plane.stop)
            address = str((await control_plane.ready())["address"])
            self.control_plane_pid = control_plane.process.pid
            self.log = control_plane.log_tail
            self.etcd_pid = _only_child(etcd.process.pid)
            fleet = await self._fleet_settings(address)
            argv = [sys.executable, "-m", "bench.registry_fleet", json.dumps(fleet)]
            self._fleet = await stack.enter_async_context(Helper("fleet", argv))
            for number in range(GATEWAYS):
                argv = [sys.executable, "-m", "bench.registry_watch", address]
                self.watchers.append(await stack.enter_async_context(Helper(f"watcher {number}", argv)))
            yield

    async def _fleet_settings(self, address: str) -> dict[str, object]:
        async with rpc.channel(address) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            request = pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=_DEPLOY, name="fleet")
            (stage,) = (await stub.ApplyPipeline(request)).pipeline.stages
        return {
            "control_plane": address,
            "pipeline": "fleet",
            "config_sha256": stage.config_sha256,
            "protocol_version": protocol.VERSION,
            "first_port": _FIRST_PORT,
            "victims": (self.effort.victims + self.effort.hung) * len(self.sizes),
        }

    async def measure(self, size: int, before: int) -> dict[str, float]:
        """Grow to ``size`` and measure there. Keys are those of the results, without the size."""
        figures: dict[str, float] = {}
        grown = await self.fleet.ask("grow", count=size - before, in_flight=self.effort.in_flight)
        figures["register_per_s"] = (size - before) / grown["seconds"]
        figures["register_answer_ms_p50"], figures["register_answer_ms_p99"] = _ms(grown["answer_s"])
        await self._until_routable(size)
        await asyncio.sleep(2.0 if self.effort.window_s > 2 else 0.2)
        figures |= await self._steady()
        figures |= await self._come_and_go()
        await self._until_routable(size)
        return figures

    async def _until_routable(self, count: int) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            counts = [(await watcher.ask("count"))["routable"] for watcher in self.watchers]
            if set(counts) == {count}:
                for watcher in self.watchers:
                    await watcher.ask("events")
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"gateways see {counts} routable replicas instead of {count}; the fleet: "
                    f"{await self.fleet.ask('beats')}; the control plane:\n{self.log()}"
                )
            await asyncio.sleep(0.2)

    async def _steady(self) -> dict[str, float]:
        pids = {
            "control_plane": [self.control_plane_pid],
            "etcd": [self.etcd_pid],
            "gateways": [watcher.pid for watcher in self.watchers],
            "fleet": [self.fleet.pid],
        }
        cpu_before = {name: sum(map(harness.cpu_seconds, each)) for name, each in pids.items()}
        beats_before = (await self.fleet.ask("beats"))["beats"]
        started_s = time.monotonic()
        await asyncio.sleep(self.effort.window_s)
        after = await self.fleet.ask("beats")
        seconds = time.monotonic() - started_s
        if after["faults"]:
            raise RuntimeError(f"{after['faults']} replicas were lost: {after['fault']}")
        if after["directives"] != [registry_service_pb2.HEARTBEAT_DIRECTIVE_CONTINUE]:
            raise RuntimeError(f"replicas were told other things than to go on: {after['directives']}")
        figures = {
            f"{name}_cores": (sum(map(harness.cpu_seconds, each)) - cpu_before[name]) / seconds
            for name, each in pids.items()
        }
        figures["beats_per_s"] = (after["beats"] - beats_before) / seconds
        figures["control_plane_mib"] = harness.resident_mib(self.control_plane_pid)
        figures["etcd_mib"] = harness.resident_mib(self.etcd_pid)
        return figures

    async def _come_and_go(self) -> dict[str, float]:
        """Register victims one by one; kill most of them one by one; stop the others all at once."""
        effort = self.effort
        asked_s: dict[str, float] = {}
        pids: dict[str, int] = {}
        for _ in range(effort.victims + effort.hung):
            victim = await self.fleet.ask("victim")
            asked_s[victim["uuid"]], pids[victim["uuid"]] = victim["asked_s"], victim["pid"]
            await asyncio.sleep(effort.pause_s)
        figures = dict(zip(("visible_ms_p50", "visible_ms_p99"), _ms(await self._latest("came", asked_s)), strict=True))

        everyone = list(pids)
        killed_s: dict[str, float] = {}
        for uuid in everyone[effort.hung :]:
            killed_s[uuid] = time.monotonic()
            os.kill(pids[uuid], signal.SIGKILL)
            await asyncio.sleep(effort.pause_s)
        figures["kill_ms_p50"], figures["kill_ms_p99"] = _ms(await self._latest("went", killed_s))

        stopped_s: dict[str, float] = {}
        for uuid in everyone[: effort.hung]:
            stopped_s[uuid] = time.monotonic()
            os.kill(pids[uuid], signal.SIGSTOP)
        delays_s = await self._latest("went", stopped_s)
        figures["hang_ms_p50"], figures["hang_ms_max"] = _ms(delays_s)[0], max(delays_s) * 1e3
        for uuid in stopped_s:
            os.kill(pids[uuid], signal.SIGKILL)
        return figures

    async def _latest(self, event: str, since_s: dict[str, float]) -> list[float]:
        """Seconds until the last gateway noticed, for each instance."""
        noticed: dict[str, list[float]] = {uuid: [] for uuid in since_s}
        deadline = time.monotonic() + 60.0
        while any(len(times) < GATEWAYS for times in noticed.values()):
            if time.monotonic() > deadline:
                missing = sum(len(times) < GATEWAYS for times in noticed.values())
                raise RuntimeError(f"{missing} of {len(noticed)} replicas: no gateway-wide {event!r} within 60 s")
            await asyncio.sleep(0.1)
            for watcher in self.watchers:
                for uuid, at_s in (await watcher.ask("events"))[event].items():
                    if uuid in noticed:
                        noticed[uuid].append(at_s)
        return [max(times) - since_s[uuid] for uuid, times in noticed.items()]


def _ms(seconds: Sequence[float]) -> tuple[float, float]:
    return harness.summary([value * 1e3 for value in seconds])


def _only_child(pid: int) -> int:
    """etcd itself, below the process that keeps it."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def measure(sizes: Sequence[int], effort: Effort) -> dict[int, dict[str, float]]:
    """The figures of each size."""
    figures: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="omniplane-bench-") as folder:
        registry = Registry(effort, sizes)
        async with registry.running(Path(folder)):
            before = 0
            for size in sizes:
                print(f"growing to {size}", file=sys.stderr)
                figures[size] = await registry.measure(size, before)
                before = size
    return figures


async def measure_peer(python: str, size: int, effort: Effort) -> dict[str, float]:
    """The peer's coordinator with ``size`` replicas."""
    script = Path(__file__).with_name("registry_peer.py")
    victims = max(4, effort.victims // 3)
    child = await asyncio.create_subprocess_exec(
        *(python, str(script), str(size), str(victims), str(effort.window_s)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError("the peer's coordinator could not be measured; its errors are above")
    figures: dict[str, float] = json.loads(out)
    return figures


async def main(arguments: argparse.Namespace) -> None:
    """Measure, print, store, plot."""
    effort = QUICK if arguments.quick else Effort()
    sizes: tuple[int, ...] = QUICK_SIZES if arguments.quick else SIZES
    if arguments.sizes:
        sizes = tuple(int(size) for size in arguments.sizes.split(","))
    ours = await measure(sizes, effort)
    peer: dict[str, float] = {}
    if arguments.peer_python:
        peer = await measure_peer(arguments.peer_python, min(PEER_SIZE, sizes[-1]), effort)

    print(harness.machine_line())
    title = f"by size of the fleet; {GATEWAYS} gateways watch, every beat brings a new load"
    rows = [(label, *(ours[size][key] for size in sizes)) for key, label in _LABELS.items()]
    harness.report("registry", title, ["replicas", *map(str, sizes)], rows)
    if peer:
        size = min(sizes, key=lambda each: abs(each - peer["replicas"]))
        title = f"beside vLLM-Omni 0.30.0's coordinator with {peer['replicas']:.0f} replicas"
        rows = [(label, ours[size][key], peer[key], ours[size][key] / peer[key]) for key, label in _BESIDE.items()]
        harness.report("registry", title, ["", f"ours, {size} replicas", "peer", "ratio"], rows)
    flat = {f"n{size}_{key}": value for size, figures in ours.items() for key, value in figures.items()}
    path = harness.store("registry", flat | {f"peer_{key}": value for key, value in peer.items()}, arguments.quick)
    _plot(ours, peer, path.with_suffix(".png"))
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path} and its plot")


_LABELS = {
    "beats_per_s": "beats per second",
    "control_plane_cores": "control plane, cores",
    "etcd_cores": "etcd, cores",
    "gateways_cores": f"{GATEWAYS} watchers, cores",
    "fleet_cores": "the fleet itself, cores",
    "control_plane_mib": "control plane, MiB",
    "etcd_mib": "etcd, MiB",
    "register_per_s": "registrations per second",
    "register_answer_ms_p50": "… answered within, p50 ms",
    "visible_ms_p50": "register → routable, p50 ms",
    "visible_ms_p99": "… p99",
    "kill_ms_p50": "SIGKILL → not routed, p50 ms",
    "kill_ms_p99": "… p99",
    "hang_ms_p50": "SIGSTOP → not routed, p50 ms",
    "hang_ms_max": "… at most",
}
_BESIDE = {
    "visible_ms_p50": "register → visible, p50 ms",
    "visible_ms_p99": "… p99",
    "kill_ms_p50": "SIGKILL → not listed, p50 ms",
    "kill_ms_p99": "… p99",
}


def _plot(ours: dict[int, dict[str, float]], peer: dict[str, float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    sizes = list(ours)
    for key, label in (("control_plane_cores", "control plane"), ("etcd_cores", "etcd")):
        left.plot(sizes, [ours[size][key] for size in sizes], marker="o", label=label)
    left.axhline(1.0, color="#b0b0b0", linestyle="--", label="bar: one core")
    left.set_ylabel("cores")
    left.set_ylim(bottom=0)
    left.set_title("CPU while the fleet beats")
    left.legend(fontsize="small")
    lines = (
        ("visible_ms_p99", "register → routable, p99", "tab:blue"),
        ("kill_ms_p99", "SIGKILL → not routed, p99", "tab:orange"),
        ("hang_ms_p50", "SIGSTOP → not routed, p50", "tab:green"),
    )
    for key, label, color in lines:
        right.plot(sizes, [ours[size][key] for size in sizes], marker="o", label=label, color=color)
        if key in peer:
            right.plot([peer["replicas"]], [peer[key]], marker="x", linestyle="", label=f"peer: {label}", color=color)
    right.set_ylabel("ms, until the last of four gateways")
    right.set_yscale("log")
    right.set_title("Until gateways know")
    right.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("replicas")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = harness.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="", help="fleet sizes, rising, separated by commas")
    parser.add_argument("--peer-python", default="", help="python of an environment with vllm-omni 0.30.0")
    return parser.parse_args(argv)


if __name__ == "__main__":
    uvloop.run(main(arguments()))
