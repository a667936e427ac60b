"""Two hosts, one with Docker's network card before the one that leads to the other: who is reached at which address."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnicore.process import dying_with_parent
from tests.support.netns import Host, require_namespaces, two_hosts

GUARD_S = 60.0
DEPLOY = """
pipeline: hosts
async_chunk: true
entrypoints: {chat: 0}
stages:
  - stage_id: 0
    engine: sim
    sim: {output: text, tokens: 24}
    final_output: true
    final_output_type: text
  - stage_id: 1
    engine: sim
    sim: {output: audio, seconds_per_chunk: 0.2}
    final_output: true
    final_output_type: audio
edges:
  - {from: 0, to: 1, chunk_by: sentence, window_size: 4}
"""


@dataclasses.dataclass(slots=True)
class Process:
    """A service on one of the hosts."""

    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path

    def ready(self) -> dict[str, Any]:
        """Wait until it serves; what it wrote then."""
        begin_s = time.monotonic()
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < begin_s + GUARD_S, self.log.read_text()
            time.sleep(0.02)
        return dict(json.loads(self.ready_file.read_bytes()))


class Hosts:
    """Control plane and gateway on host A; workers where a test wants them."""

    def __init__(self, directory: Path, a: Host, b: Host) -> None:
        self.a, self.b = a, b
        self._directory = directory
        self._started: list[Process] = []
        self.control_plane = f"{a.address}:7700"
        self.http = ""

    def start(self) -> None:
        """Start control plane and gateway, and apply the plan."""
        self.spawn(self.a, "control-plane", "--listen", self.control_plane, "--etcd", "embedded").ready()
        file = self._directory / "hosts.yaml"
        file.write_text(DEPLOY)
        self.omnictl("apply", "--file", str(file))
        listen = ("--http", f"{self.a.address}:0", "--grpc", f"{self.a.address}:0")
        gateway = self.spawn(self.a, "gateway", *listen, "--control-plane", self.control_plane)
        self.http = str(gateway.ready()["http"])

    def spawn(self, host: Host, service: str, *flags: str) -> Process:
        """Start a service on a host."""
        name = f"{len(self._started)}-{service}"
        log, ready_file = self._directory / f"{name}.log", self._directory / f"{name}.ready"
        command = host.python("-m", "omniplane", service, *flags, "--insecure", "--ready-file", str(ready_file))
        with log.open("wb") as output:
            process = subprocess.Popen(dying_with_parent(command), stdout=output, stderr=output)
        self._started.append(Process(process, log, ready_file))
        return self._started[-1]

    def worker(self, host: Host, stage_id: int, *flags: str) -> Process:
        """Start a worker."""
        where = ("--pipeline", "hosts", "--stage-id", str(stage_id), "--control-plane", self.control_plane)
        return self.spawn(host, "stage-worker", *where, *flags)

    def omnictl(self, *arguments: str) -> str:
        """Run it on host A."""
        command = self.a.python("-m", "omnictl", "--server", self.control_plane, "--insecure", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def speak(self) -> tuple[str, int]:
        """Ask for text and speech from host A: the text, and how much sound came."""
        self.until_routable()
        body = {
            "model": "hosts",
            "messages": [{"role": "user", "content": "Hello. How are you?"}],
            "modalities": ["text", "audio"],
            "audio": {"voice": "default", "format": "wav"},
        }
        url = f"http://{self.http}/v1/chat/completions"
        curl = ["curl", "-sS", "-m", "30", "-H", "content-type: application/json", "-d", json.dumps(body), url]
        done = subprocess.run(self.a.command(*curl), capture_output=True, text=True, timeout=GUARD_S, check=True)
        answer = json.loads(done.stdout)
        assert "error" not in answer, answer
        message = answer["choices"][0]["message"]
        return str(message["content"] or message["audio"]["transcript"]), len(message["audio"]["data"])

    def until_routable(self) -> None:
        """Wait until the gateway has heard of a replica of each stage: a worker is ready before that."""
        begin_s = time.monotonic()
        while True:
            curl = ["curl", "-sS", "-m", "30", f"http://{self.http}/ready"]
            done = subprocess.run(self.a.command(*curl), capture_output=True, text=True, timeout=GUARD_S, check=True)
            if json.loads(done.stdout)["pipelines"].get("hosts", {}).get("ready"):
                return
            assert time.monotonic() < begin_s + GUARD_S, done.stdout
            time.sleep(0.1)

    def close(self) -> None:
        """End all, last started first, and print the logs."""
        for running in reversed(self._started):
            running.process.terminate()
            try:
                running.process.wait(10)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        for running in self._started:
            print(f"----- {running.log.name} -----\n{running.log.read_text(errors='replace')}")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    require_namespaces()
    with two_hosts(tmp_path) as (a, b):
        running = Hosts(tmp_path, a, b)
        try:
            running.start()
            yield running
        finally:
            running.close()


def test_the_routable_address_is_advertised_and_the_pipeline_spans_both(hosts: Hosts) -> None:
    local = hosts.worker(hosts.a, 0)
    remote = hosts.worker(hosts.b, 1)
    assert local.ready()["address"].startswith(f"{hosts.a.address}:")
    # Not 172.17.0.1, which is that host's first card and leads nowhere.
    assert remote.ready()["address"].startswith(f"{hosts.b.address}:")
    text, sound = hosts.speak()
    assert len(text) > 20
    assert sound > 1000
    listed = json.loads(hosts.omnictl("get", "replicas", "-o", "json"))
    records = listed["replicas"] if isinstance(listed, dict) else listed
    assert {record["placement"]["host"] for record in records} == {"host-a", "host-b"}


def test_the_override_wins(hosts: Hosts) -> None:
    hosts.worker(hosts.a, 0).ready()
    chosen = hosts.b.second_address
    remote = hosts.worker(hosts.b, 1, "--omni-replica-address", chosen, "--listen", "0.0.0.0:0")
    assert remote.ready()["address"].startswith(f"{chosen}:")
    assert hosts.speak()[1] > 1000


def test_loopback_offered_by_another_host_is_refused(hosts: Hosts) -> None:
    refused = hosts.worker(hosts.b, 1, "--omni-replica-address", "127.0.0.1")
    assert refused.process.wait(GUARD_S) != 0
    said = refused.log.read_text()
    assert "127.0.0.1" in said
    assert hosts.b.address in said, "who offered it"
