"""``omniplane serve`` as its users run it, and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc, prompt_pb2, types_pb2
from omnicore import rpc
from omnicore.security import Security
from omniplane.serve.pipelines import connected
from tests.support.ports import reserved_port
from tests.support.processes import ServiceProcess, Services, wait_until

# A head starts in 3 s on an idle machine; tests must also pass on a busy one.
START_S = 90.0

TWO_STAGES = """
pipeline: bagel
async_chunk: false
engine: sim
stages:
  - {stage_id: 0, name: thinker, final_output: true, final_output_type: text,
     sim: {output: text, tokens: 4, ttft_ms: 1, tpot_ms: 1}}
  - {stage_id: 1, name: dit, final_output: true, final_output_type: image, sim: {output: image}}
edges: [{from: 0, to: 1}]
"""
THREE_STAGES = """
pipeline: speech
async_chunk: false
engine: sim
stages:
  - {stage_id: 0, name: thinker, final_output: true, final_output_type: text,
     sim: {output: text, tokens: 4, ttft_ms: 1, tpot_ms: 1}}
  - {stage_id: 1, name: talker, sim: {output: tensor, chunks: 2, chunk_bytes: 1024}}
  - {stage_id: 2, name: code2wav, final_output: true, final_output_type: audio, sim: {output: audio}}
edges: [{from: 0, to: 1}, {from: 1, to: 2}]
"""


class World:
    """The launchers of one test."""

    def __init__(self, services: Services, directory: Path) -> None:
        self.services = services
        self.directory = directory
        self.master_port = free_port()
        (directory / "tmp").mkdir()

    def file(self, text: str, name: str = "deploy.yaml") -> str:
        """A deploy file."""
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def spawn(self, *flags: str, env: dict[str, str] | None = None) -> ServiceProcess:
        """Start a launcher without waiting."""
        # Seldom beats: on a busy machine nobody becomes suspect, whom others would then be preferred to.
        calm = {"OMNI_CONTROL_PLANE_HEARTBEAT_INTERVAL_S": "2"}
        environ = {"TMPDIR": str(self.directory / "tmp"), **calm, **(env or {})}
        return self.services.spawn("serve", *flags, env=environ)

    def head(self, file: str, stage_id: int, *flags: str, env: dict[str, str] | None = None) -> ServiceProcess:
        """Start a head without waiting."""
        return self.spawn(
            *("some/model", "--omni", "--deploy-config", file, "--port", "0", "--stage-id", str(stage_id)),
            *self.master,
            *flags,
            env=env,
        )

    def headless(self, stage_id: int, *flags: str, env: dict[str, str] | None = None) -> ServiceProcess:
        """Start a headless launcher without waiting."""
        return self.spawn(
            "some/model", "--omni", "--headless", "--stage-id", str(stage_id), *self.master, *flags, env=env
        )

    @property
    def master(self) -> tuple[str, ...]:
        """Where the head's control plane is."""
        return ("-oma", "127.0.0.1", "-omp", str(self.master_port))

    async def replicas(self, pipeline: str, control_plane: str = "") -> dict[int, list[types_pb2.Replica]]:
        """Every replica by stage, in the order of their ids."""
        async with connected(Security(), control_plane or f"127.0.0.1:{self.master_port}") as plane:
            found: dict[int, list[types_pb2.Replica]] = {}
            for replica in await plane.replicas(pipeline):
                found.setdefault(replica.ref.stage.stage_id, []).append(replica)
            return found

    async def ids(self, pipeline: str) -> dict[int, list[int]]:
        """Replica ids of the ready replicas of each stage."""
        return {
            stage_id: sorted(r.ref.replica_id for r in found if r.state == types_pb2.REPLICA_STATE_READY)
            for stage_id, found in (await self.replicas(pipeline)).items()
        }

    async def nothing_left(self, pids: Sequence[tuple[int, str]], timeout_s: float = 60.0) -> None:
        """Until all of these processes are gone, and what launchers kept on disk."""
        await wait_until(lambda: not [pid for pid in pids if alive(*pid)], timeout_s, "the end of every child")


@pytest.fixture
def world(services: Services, tmp_path: Path) -> Iterator[World]:
    found = World(services, tmp_path)
    yield found
    left = [pid for running in services.started for pid in family(running.pid)]
    assert not [pid for pid in left if alive(*pid)] or any(running.running for running in services.started)


def free_port() -> int:
    """A port that nobody listens on now, nor takes before it is used."""
    return reserved_port()


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command's name: state, parent, …, and the start time as the 20th."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def family(pid: int) -> list[tuple[int, str]]:
    """All descendants of a process: ids and start times."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = _stat(int(entry.name))
            children.setdefault(int(fields[1]), []).append((int(entry.name), fields[19]))
    found: list[tuple[int, str]] = []
    waiting = [pid]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += [child for child, _ in mine]
    return found


def alive(pid: int, start: str) -> bool:
    """Whether this very process lives; one that has ended and was not waited for does not."""
    try:
        fields = _stat(pid)
    except OSError:
        return False
    return fields[19] == start and fields[0] != "Z"


def command(pid: int) -> str:
    """Its command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environment(pid: int) -> dict[str, str]:
    """Its environment as it was started with."""
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def children(launcher: ServiceProcess, service: str) -> list[int]:
    """Process ids of a launcher's services of one kind."""
    return [pid for pid, _ in family(launcher.pid) if f"-m omniplane {service} " in command(pid)]


def get(url: str) -> tuple[int, Any]:
    """Status and JSON of a GET; status 0 if nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, orjson.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, orjson.loads(error.read())
    except OSError:
        return 0, None


def chat(url: str, model: str) -> dict[str, Any]:
    """One answer to one question. A refusal fails the test with what it says."""
    body = orjson.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            found: dict[str, Any] = orjson.loads(response.read())
            return found
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from error


async def draw(ready: dict[str, Any], count: int) -> dict[int, list[int]]:
    """Ask ``count`` times for an image; which replica of each stage worked on each request."""
    channel = rpc.channel(ready["grpc"])
    stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
    used: dict[int, list[int]] = {}
    try:
        for number in range(count):
            request = inference_service_pb2.GenerateRequest(
                model=ready["pipeline"],
                request_id=f"draw-{number}",
                prompt=prompt_pb2.Prompt(text=f"cat {number}"),
                modalities=["image"],
            )
            media = b"".join([response.media async for response in stub.Generate(request, timeout=START_S)])
            assert media.startswith(b"\x89PNG")
            told = await stub.GetRequest(
                inference_service_pb2.GetRequestRequest(request_id=request.request_id), timeout=START_S
            )
            for event in told.timeline:
                if event.event == "dispatched":
                    used.setdefault(event.replica.stage.stage_id, []).append(event.replica.replica_id)
    finally:
        await channel.close(None)
    return used
