"""Our side of bench.gateway: the real services, with two workers a model behind the gateway, and every feature on.

API keys, metrics, admission, routing, the timelines of requests and traces of one in a hundred are on, as they are by
default or in production. The collector of traces shares the core of load and workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.gateway_processes import on_cores
from bench.harness import Service
from omni.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
)
from omnicore import api_keys, rpc

REPLICAS = 2
TOKENS = 64
STEP_TOKENS = 8
"""Tokens that the burst's engine makes before the event loop turns: as fast as they come, for an engine that does not
wait. The HTTP workers write all 64 in one go."""
MODELS: dict[str, dict[str, float]] = {
    "unary": {"tokens": 1},
    "burst": {"tokens": TOKENS, "step_tokens": STEP_TOKENS},
    "paced": {"tokens": TOKENS, "ttft_ms": 20, "itl_ms": 10},
}
_READY_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gateway:
    """One that runs: what clients need to know."""

    port: int
    grpc: str
    pid: int
    headers: Sequence[str]
    """Of every HTTP request."""


class Ours:
    """etcd, control plane, workers and gateways. ``stage``: the cores of gateways, ``backstage``: of all others."""

    def __init__(self, run_dir: Path, services: contextlib.ExitStack, backstage: set[int], stage: set[int]) -> None:
        self._run_dir = run_dir
        self._services = services
        self._backstage, self._stage = backstage, stage
        self._key = api_keys.new_key()
        self._workers: dict[str, list[Service]] = {}
        self.control_plane = ""
        self._collector = ""

    def _start(self, name: str, service: str, *flags: str, env: Mapping[str, str] | None = None) -> Service:
        argv = [sys.executable, "-m", "omniplane", service, *flags, "--die-with-parent"]
        if env:
            argv = ["/usr/bin/env", *(f"{key}={value}" for key, value in env.items()), *argv]
        started = Service(name, argv, self._run_dir)
        self._services.callback(started.stop)
        return started

    async def start(self) -> None:
        """Bring up what every model needs."""
        self._keys_file = self._run_dir / "keys.jsonl"
        self._keys_file.write_text(json.dumps({"id": "bench", "sha256": api_keys.hashed(self._key)}) + "\n")
        self._keys_file.chmod(0o600)
        with on_cores(self._backstage):
            data_dir = str(self._run_dir / "etcd")
            etcd = self._start("etcd", "etcd", "--data-dir", data_dir, "--client-listen", "127.0.0.1:0")
            endpoints = (await etcd.ready())["endpoints"]
            assert isinstance(endpoints, list)
            flags = ("--listen", "127.0.0.1:0", "--etcd", str(endpoints[0]))
            control_plane = self._start("control-plane", "control-plane", *flags)
            sink = Service("traces", [sys.executable, "-m", "bench.trace_sink"], self._run_dir)
            self._services.callback(sink.stop)
        self.control_plane = str((await control_plane.ready())["address"])
        self._collector = f"http://{(await sink.ready())['address']}"

    async def start_gateway(self, name: str, *flags: str) -> Gateway:
        """One more gateway."""
        own = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", self.control_plane)
        keys = ("--api-keys", str(self._keys_file), "--log-level", "warning")
        traces = ("--trace-endpoint", self._collector, "--trace-sample", "0.01")
        with on_cores(self._stage):
            gateway = self._start(name, "gateway", *own, *keys, *traces, *flags)
        ready = await gateway.ready()
        port = int(str(ready["http"]).rsplit(":", 1)[1])
        return Gateway(port, str(ready["grpc"]), gateway.process.pid, [f"Authorization: Bearer {self._key}"])

    async def start_model(self, name: str) -> None:
        """A pipeline of one stage, and its workers."""
        options = ", ".join(f"{key}: {value}" for key, value in MODELS[name].items())
        deploy = (
            f"pipeline: {name}\nstages:\n  - stage_id: 0\n    engine: bench-clock\n    num_replicas: {REPLICAS}\n"
            f"    max_num_seqs: 256\n    engine_args: {{clock: {{{options}}}}}\n"
            "    final_output: true\n    final_output_type: text\n"
        )
        async with rpc.channel(self.control_plane) as channel:
            stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
            await stub.ApplyPipeline(pipeline_service_pb2.ApplyPipelineRequest(deploy_yaml=deploy, name=name))
        flags = ("--pipeline", name, "--stage-id", "0", "--control-plane", self.control_plane)
        with on_cores(self._backstage):
            self._workers[name] = [
                self._start(
                    f"{name}-{number}",
                    "stage-worker",
                    *flags,
                    *("--listen", "127.0.0.1:0", "--log-level", "warning"),
                    env={"PYTHONPATH": self._with_plugin()},
                )
                for number in range(REPLICAS)
            ]
        for worker in self._workers[name]:
            await worker.ready()

    def stop_model(self, name: str) -> None:
        """End its workers: idle ones beat."""
        for worker in self._workers.pop(name, ()):
            worker.stop()

    def worker_pids(self, name: str) -> list[int]:
        """Of a model that runs."""
        return [worker.process.pid for worker in self._workers[name]]

    async def serves(self, gateway: Gateway, models: Sequence[str]) -> None:
        """Wait until a gateway can route to every replica of these. Raises ``RuntimeError``."""
        deadline_s = time.monotonic() + _READY_S
        metadata = [("authorization", f"Bearer {self._key}")]
        async with rpc.channel(gateway.grpc) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            while True:
                found = await stub.ListModels(inference_service_pb2.ListModelsRequest(), metadata=metadata)
                if set(models) <= {model.id for model in found.models if model.ready}:
                    return
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"not ready: {models}; have {found}")
                await asyncio.sleep(0.05)

    def _with_plugin(self) -> str:
        """A path on which the engine is installed as one of another package would be."""
        plugins = self._run_dir / "plugins"
        info = plugins / "bench_clock-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-clock\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[omniplane.engines]\nbench-clock = bench.clock_engine:create\n")
        return os.pathsep.join(filter(None, (str(plugins), str(Path.cwd()), os.environ.get("PYTHONPATH", ""))))
