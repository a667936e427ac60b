"""What the platform itself costs: added latency per stage hop, and tokens through one gateway core.

    python -m bench.first_light [--quick]

Everything runs as real processes on the ``sim`` engine with no think time, so what is measured is ours: HTTP or gRPC
in, routing, session, engine step, flow between workers, and out again.

* **Hop**: one request at a time through pipelines of one, two and three stages. A hop is what each further stage adds:
  (three stages − one stage) / 2. Baseline of the same run: one unary gRPC round trip between two processes (a health
  check), which is the least that any process-to-process hop over gRPC costs.
* **Gateway**: 64 connections, streams of 64 tokens, as fast as they come (burst) and one every 10 ms (paced). The
  gateway is pinned to one core; load and worker share the other. Counted is the gateway's own CPU. Baseline of the same
  run: ``bench.relay_baseline``, the same HTTP stack with one gRPC call per request, on the same core, in turns with
  ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import harness
from bench.harness import Service
from omni.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    prompt_pb2,
)
from omnicore import rpc

TOKENS = 64
CONCURRENCY = 64
_SIM = "{ttft_ms: 0, tpot_ms: 0, step_ms: 0"


def _deploy(name: str, stages: list[str]) -> str:
    """A deploy file of ``sim`` stages in a chain; the last one's output is final."""
    lines = [f"pipeline: {name}", "async_chunk: true", "stages:"]
    for index, sim in enumerate(stages):
        last = index == len(stages) - 1
        kind = "audio" if "audio" in sim else "text"
        lines += [f"  - stage_id: {index}", "    engine: sim", "    max_num_seqs: 256", f"    sim: {sim}}}"]
        if last:
            lines += ["    final_output: true", f"    final_output_type: {kind}"]
    return "\n".join(lines) + "\n"


PIPELINES = {
    "hop1": [f"{_SIM}, output: text, tokens: 1"],
    "hop2": [f"{_SIM}, output: text, tokens: 1", f"{_SIM}, output: audio, seconds_per_chunk: 0.01"],
    "hop3": [
        f"{_SIM}, output: text, tokens: 1",
        f"{_SIM}, output: tensor, chunk_bytes: 4096",
        f"{_SIM}, output: audio, seconds_per_chunk: 0.01",
    ],
    "burst": [f"{_SIM}, output: text, tokens: {TOKENS}"],
    "paced": [f"{{ttft_ms: 0, tpot_ms: 10, step_ms: 10, output: text, tokens: {TOKENS}"],
}
MODES = ("burst", "paced")


class Cluster:
    """etcd, control plane and gateway, with pipelines and workers on demand."""

    def __init__(self, run_dir: Path, services: contextlib.ExitStack) -> None:
        self._run_dir = run_dir
        self._services = services
        self.http = self.grpc = self.control_plane = ""
        self.gateway_pid = 0

    def _start(self, name: str, service: str, *flags: str) -> Service:
        started = Service.ours(name, service, self._run_dir, *flags)
        self._services.callback(started.stop)
        return started

    async def start(self) -> None:
        """Bring up everything but workers."""
        etcd = self._start("etcd", "etcd", "--data-dir", str(self._run_dir / "etcd"), "--client-listen", "127.0.0.1:0")
        endpoints = (await etcd.ready())["endpoints"]
        assert isinstance(endpoints, list)
        control_plane = self._start(
            "control-plane", "control-plane", "--listen", "127.0.0.1:0", "--etcd", str(endpoints[0])
        )
        self.control_plane = str((await control_plane.ready())["address"])
        gateway = self._start(
            "gateway",
            "gateway",
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
            "--control-plane",
            self.control_plane,
        )
        ready = await gateway.ready()
        self.http, self.grpc = str(ready["http"]), str(ready["grpc"])
        self.gateway_pid = gateway.process.pid

    async def add(self, name: str) -> list[tuple[int, str]]:
        """Apply one of PIPELINES and start its workers; their process ids and addresses."""
        async with rpc.channel(self.control_plane) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            await stub.ApplyPipeline(
                pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=_deploy(name, PIPELINES[name]), name=name)
            )
        flags = ("--pipeline", name, "--control-plane", self.control_plane, "--listen", "127.0.0.1:0")
        workers = [
            self._start(f"{name}-{stage}", "stage-worker", "--stage-id", str(stage), *flags)
            for stage in range(len(PIPELINES[name]))
        ]
        return [(worker.process.pid, str((await worker.ready())["address"])) for worker in workers]


async def _models_ready(stub: Any, names: set[str]) -> None:
    deadline = time.monotonic() + 30
    while True:
        response = await stub.ListModels(inference_service_pb2.ListModelsRequest())
        if names <= {model.id for model in response.models if model.ready}:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"not ready: {names}; have {response}")
        await asyncio.sleep(0.05)


async def measure_hops(cluster: Cluster, worker: str, repeats: int) -> dict[str, float]:
    """Milliseconds per request through one, two and three stages, interleaved so that noise falls on all alike."""
    samples: dict[str, list[float]] = {"unary": [], "hop1": [], "hop2": [], "hop3": []}
    async with rpc.channel(cluster.grpc) as channel, rpc.channel(worker) as direct:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        health = health_pb2_grpc.HealthStub(direct)
        await _models_ready(stub, {"hop1", "hop2", "hop3"})

        async def generate(model: str) -> None:
            request = inference_service_pb2.GenerateRequest(
                model=model,
                prompt=prompt_pb2.Prompt(text="Hello."),
                modalities=["text" if model == "hop1" else "audio"],
            )
            async for _ in stub.Generate(request):
                pass

        for index in range(repeats + 20):
            for name, kept in samples.items():
                started = time.perf_counter()
                if name == "unary":
                    await health.Check(health_pb2.HealthCheckRequest())
                else:
                    await generate(name)
                if index >= 20:  # the first ones warm up connections and caches
                    kept.append((time.perf_counter() - started) * 1e3)
    figures: dict[str, float] = {}
    for name, kept in samples.items():
        figures[f"{name}_ms_p50"], figures[f"{name}_ms_p99"] = harness.summary(kept)
    for at in ("p50", "p99"):
        figures[f"added_per_hop_ms_{at}"] = (figures[f"hop3_ms_{at}"] - figures[f"hop1_ms_{at}"]) / 2
    figures["added_per_hop_over_unary_grpc_ratio"] = figures["added_per_hop_ms_p50"] / figures["unary_ms_p50"]
    return figures


async def _load(address: str, model: str, streams: int, core: int) -> dict[str, Any]:
    arguments = (address, model, CONCURRENCY, streams, TOKENS, core)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.sse_load", *map(str, arguments)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    if child.returncode != 0:
        raise RuntimeError("load generator failed")
    result: dict[str, Any] = json.loads(out)
    return result


async def measure_gateway(cluster: Cluster, run_dir: Path, mode: str, streams: int, rounds: int) -> dict[str, float]:
    """CPU and rate of gateway and baseline on one core, in turns: A B A B …"""
    ((worker_pid, worker),) = await cluster.add(mode)
    async with rpc.channel(cluster.grpc) as channel:
        await _models_ready(inference_service_pb2_grpc.InferenceServiceStub(channel), {mode})
    relay = Service(f"relay-{mode}", [sys.executable, "-m", "bench.relay_baseline", worker], run_dir)
    try:
        relay_http = str((await relay.ready())["http"])
        harness.pin(worker_pid, {1})
        targets = {"gateway": (cluster.http, cluster.gateway_pid), "relay": (relay_http, relay.process.pid)}
        kept: dict[str, list[dict[str, float]]] = {"gateway": [], "relay": []}
        for address, pid in targets.values():
            harness.pin(pid, {0})
            await _load(address, mode, CONCURRENCY, 1)
        for _ in range(rounds):
            for name, (address, pid) in targets.items():
                before = harness.cpu_seconds(pid)
                result = await _load(address, mode, streams, 1)
                cpu_s = harness.cpu_seconds(pid) - before
                tokens = result["streams"] * TOKENS
                kept[name].append(
                    {
                        "cpu_ms_per_stream": cpu_s * 1e3 / result["streams"],
                        "tokens_per_cpu_second": tokens / cpu_s,
                        "tokens_per_second": tokens / result["seconds"],
                        "ttft_ms_p50": result["ttft_ms_p50"],
                        "total_ms_p99": result["total_ms_p99"],
                    }
                )
    finally:
        relay.stop()
    figures = {
        f"{mode}_{name}_{key}": statistics.median(row[key] for row in rows)
        for name, rows in kept.items()
        for key in rows[0]
    }
    figures[f"{mode}_gateway_over_relay_cpu_ratio"] = (
        figures[f"{mode}_gateway_cpu_ms_per_stream"] / figures[f"{mode}_relay_cpu_ms_per_stream"]
    )
    return figures


@contextlib.asynccontextmanager
async def _cluster() -> AsyncIterator[tuple[Cluster, Path]]:
    with tempfile.TemporaryDirectory(prefix="omniplane-bench-") as folder, contextlib.ExitStack() as services:
        run_dir = Path(folder)
        cluster = Cluster(run_dir, services)
        await cluster.start()
        yield cluster, run_dir


async def hops(repeats: int) -> dict[str, float]:
    """``measure_hops`` on a cluster of its own."""
    async with _cluster() as (cluster, _):
        workers = [await cluster.add(name) for name in ("hop1", "hop2", "hop3")]
        return await measure_hops(cluster, workers[0][0][1], repeats)


async def main(quick: bool) -> None:
    """Measure, print, store, plot."""
    found = await hops(50 if quick else 1000)
    async with _cluster() as (cluster, run_dir):
        gateway: dict[str, float] = {}
        for mode in MODES:
            gateway |= await measure_gateway(cluster, run_dir, mode, 256 if quick else 1024, 1 if quick else 5)

    print(harness.machine_line())
    harness.report(
        "first_light",
        "one request at a time, gRPC in and out, ms",
        ["path", "p50", "p99"],
        [
            *((label, found[f"{key}_ms_p50"], found[f"{key}_ms_p99"]) for key, label in HOP_LABELS.items()),
            ("added per hop", found["added_per_hop_ms_p50"], found["added_per_hop_ms_p99"]),
            ("… × unary gRPC", found["added_per_hop_over_unary_grpc_ratio"], ""),
        ],
    )
    for mode in MODES:
        rows = []
        for key, label in _GATEWAY_LABELS.items():
            ours, theirs = gateway[f"{mode}_gateway_{key}"], gateway[f"{mode}_relay_{key}"]
            rows.append((label, ours, theirs, ours / theirs))
        title = f"{mode} SSE, {CONCURRENCY} connections, {TOKENS} tokens a stream, gateway on one core"
        harness.report("first_light", title, ["", "gateway", "relay (baseline)", "ratio"], rows)
    path = harness.store("first_light", found | gateway, quick)
    _plot(found, gateway, path.with_suffix(".png"))
    print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path} and its plot")


HOP_LABELS = {
    "unary": "unary gRPC (baseline)",
    "hop1": "one stage, through the gateway",
    "hop2": "two stages",
    "hop3": "three stages",
}
_NAMES = ("gateway", "relay")
_GATEWAY_LABELS = {
    "cpu_ms_per_stream": "CPU ms per stream",
    "tokens_per_cpu_second": "tokens per CPU second",
    "tokens_per_second": "tokens per second",
    "ttft_ms_p50": "TTFT p50, ms",
    "total_ms_p99": "stream p99, ms",
}


def _plot(hops: dict[str, float], gateway: dict[str, float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    keys = list(HOP_LABELS)
    left.barh([HOP_LABELS[key] for key in keys], [hops[f"{key}_ms_p50"] for key in keys], color="#4472a8")
    left.invert_yaxis()
    left.set_xlabel("ms, median")
    left.set_title("Latency, one request at a time")
    bars = {f"{name}, {mode}": gateway[f"{mode}_{name}_cpu_ms_per_stream"] for mode in MODES for name in _NAMES}
    right.barh(list(bars), list(bars.values()), color=["#4472a8", "#b0b0b0"] * len(MODES))
    right.invert_yaxis()
    right.set_xlabel("CPU ms per stream")
    right.set_title(f"SSE, {CONCURRENCY} × {TOKENS} tokens (relay: baseline)")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    uvloop.run(main(harness.arguments((__doc__ or "").splitlines()[0]).quick))
