"""The routers that bench.gateway and bench.faults compare with, each from an environment of its own.

``scripts/bench-peers DIR`` makes the environments; a peer that is not there is named as skipped. All run with their
defaults but for what makes them comparable: round-robin over the same two workers, loopback, no access log.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.gateway_processes import SOURCES, Process, free_port

MODEL_CACHE = Path(os.environ.get("OMNIPLANE_MODELS", Path.home() / ".cache" / "omniplane" / "models"))


class Peer:
    """A router before HTTP workers. Subclasses say what it is called, where it is and how it is started."""

    name = ""
    version = ""
    model = "mock"
    own_workers = False
    """Speaks no HTTP to its workers, so brings its own (Dynamo)."""

    def missing(self, peers: Path) -> str:
        """Why it cannot run; empty if it can."""
        program = self.program(peers)
        return "" if program.exists() else f"{program} is not there"

    def program(self, peers: Path) -> Path:
        """What must be installed."""
        raise NotImplementedError

    def start(self, peers: Path, run_dir: Path, port: int, workers: Sequence[int], tag: str) -> Process:
        """The router on ``port`` before HTTP workers on the ports ``workers``; it may not listen yet."""
        raise NotImplementedError

    def start_worker(
        self, peers: Path, run_dir: Path, number: int, tag: str, *, ttft_s: float, itl_s: float, tokens: int
    ) -> Process:
        """One of its own workers, for a peer that brings them."""
        raise NotImplementedError


class Nginx(Peer):
    """The floor: a byte proxy in C, without any of what a model router does."""

    name = "nginx"
    version = "nginx-light"

    def program(self, peers: Path) -> Path:
        return Path(shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "/usr/sbin/nginx")

    def start(self, peers: Path, run_dir: Path, port: int, workers: Sequence[int], tag: str) -> Process:
        home = run_dir / f"nginx-{tag}"
        home.mkdir(exist_ok=True)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = " ".join(f"{kind}_temp_path {home}/{kind};" for kind in kinds)
        upstream = " ".join(f"server 127.0.0.1:{worker};" for worker in workers)
        (home / "nginx.conf").write_text(
            f"daemon off; pid {home}/pid; error_log {home}/error.log; worker_processes 1;\n"
            "events { worker_connections 4096; }\n"
            f"http {{ access_log off; {temporary}\n"
            f"upstream workers {{ {upstream} keepalive 256; }}\n"
            f"server {{ listen 127.0.0.1:{port}; keepalive_requests 100000000;\n"
            "location / { proxy_pass http://workers; proxy_http_version 1.1;"
            ' proxy_set_header Connection ""; proxy_buffering off; } } }\n'
        )
        argv = [str(self.program(peers)), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]
        return Process(f"{self.name}-{tag}", argv, run_dir)


class VllmRouter(Peer):
    """vLLM's own router, in Rust."""

    name = "vllm-router"
    version = "0.1.17"
    flags: Sequence[str] = ()

    def program(self, peers: Path) -> Path:
        return peers / "vllm-router" / "bin" / "vllm-router"

    def start(self, peers: Path, run_dir: Path, port: int, workers: Sequence[int], tag: str) -> Process:
        argv = [str(self.program(peers)), "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
        argv += ["--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in workers)]
        argv += ["--prometheus-port", str(free_port()), "--log-level", "warning", *self.flags]
        return Process(f"{self.name}-{tag}", argv, run_dir)


class SglangRouter(Peer):
    """SGLang's router, in Rust."""

    name = "sglang-router"
    version = "0.3.2"
    flags: Sequence[str] = ()

    def program(self, peers: Path) -> Path:
        return peers / "sglang-router" / "bin" / "python"

    def start(self, peers: Path, run_dir: Path, port: int, workers: Sequence[int], tag: str) -> Process:
        argv = [str(self.program(peers)), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
        argv += ["--port", str(port), "--policy", "round_robin", "--log-level", "warn"]
        argv += ["--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in workers)]
        argv += ["--prometheus-port", str(free_port()), "--prometheus-host", "127.0.0.1", *self.flags]
        return Process(f"{self.name}-{tag}", argv, run_dir)


class ProductionStack(Peer):
    """The router of vLLM's production stack: FastAPI and aiohttp, run from its sources."""

    name = "production-stack"
    version = "a6c01db"
    flags: Sequence[str] = ()

    def program(self, peers: Path) -> Path:
        return peers / "production-stack" / "bin" / "python"

    def missing(self, peers: Path) -> str:
        sources = peers / "production-stack-src" / "src" / "vllm_router"
        return super().missing(peers) or ("" if sources.is_dir() else f"{sources} is not there")

    def start(self, peers: Path, run_dir: Path, port: int, workers: Sequence[int], tag: str) -> Process:
        argv = [str(self.program(peers)), "-m", "vllm_router.app", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--service-discovery", "static", "--routing-logic", "roundrobin", "--log-level", "warning"]
        argv += ["--static-backends", ",".join(f"http://127.0.0.1:{worker}" for worker in workers)]
        argv += ["--static-models", ",".join("mock" for _ in workers), *self.flags]
        return Process(f"{self.name}-{tag}", argv, run_dir, cwd=peers / "production-stack-src" / "src")


class Dynamo(Peer):
    """NVIDIA Dynamo's frontend, which also templates and tokenises, before workers of its own runtime."""

    name = "dynamo"
    version = "1.6.1"
    own_workers = True
    flags: Sequence[str] = ()
    discovery = "file"
    etcd = ""
    """host:port of etcd, for the discovery that finds the dead."""

    def program(self, peers: Path) -> Path:
        return peers / "dynamo" / "bin" / "python"

    def missing(self, peers: Path) -> str:
        return super().missing(peers) or ("" if self._model() else f"no model with a tokenizer below {MODEL_CACHE}")

    @staticmethod
    def _model() -> Path | None:
        """Its frontend wants the tokenizer of a model; scripts/demo brings a small one."""
        return next((path.parent for path in sorted(MODEL_CACHE.glob("*/tokenizer.json"))), None)

    def _env(self, run_dir: Path, tag: str) -> dict[str, str]:
        names = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
        return {
            **dict.fromkeys(names, "127.0.0.1"),
            "DYN_FILE_KV": str(run_dir / f"dynamo-{tag}"),
            "DYN_LOG": "warn",
            "DYN_SYSTEM_PORT": "-1",
            "HF_HUB_OFFLINE": "1",
            "ETCD_ENDPOINTS": f"http://{self.etcd}",
        }

    def start_worker(
        self, peers: Path, run_dir: Path, number: int, tag: str, *, ttft_s: float, itl_s: float, tokens: int
    ) -> Process:
        argv = [str(self.program(peers)), str(SOURCES / "gateway_dynamo.py"), str(ttft_s), str(itl_s), str(tokens)]
        argv += [str(self._model()), self.discovery]
        return Process(f"dynamo-worker-{tag}-{number}", argv, run_dir, env=self._env(run_dir, tag))

    def start(self, peers: Path, run_dir: Path, port: int, workers: Sequence[int], tag: str) -> Process:
        argv = [str(self.program(peers)), "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        argv += ["--discovery-backend", self.discovery, "--request-plane", "tcp", "--router-mode", "round-robin"]
        return Process(f"dynamo-{tag}", [*argv, *self.flags], run_dir, env=self._env(run_dir, tag))


PEERS: dict[str, Peer] = {
    peer.name: peer for peer in (Nginx(), VllmRouter(), SglangRouter(), ProductionStack(), Dynamo())
}
