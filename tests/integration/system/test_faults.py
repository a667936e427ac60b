"""What an operator sees in etcd, and what a killed replica costs."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import System, eventually, running_system

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)

SLOW = """
pipeline: slow
async_chunk: true
entrypoints: {chat: 0}
stages:
  - stage_id: 0
    engine: sim
    sim: {output: text, tokens: 120, tpot_ms: 50}
    final_output: true
    final_output_type: text
  - stage_id: 1
    engine: sim
    num_replicas: 2
    sim: {output: tensor}
  - stage_id: 2
    engine: sim
    sim: {output: audio, seconds_per_chunk: 0.2}
    final_output: true
    final_output_type: audio
edges:
  - {from: 0, to: 1, chunk_by: sentence, window_size: 4}
  - {from: 1, to: 2, window_size: 4}
"""


@pytest.fixture
def slow_system(tmp_path: Path) -> Iterator[System]:
    file = tmp_path / "slow.yaml"
    file.write_text(SLOW)
    with running_system(tmp_path, file) as running:
        yield running


def chat(system: System, model: str, modalities: list[str]) -> tuple[str, int, str]:
    """Stream one answer: its text, bytes of audio, and how it ended."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Go on."}],
        "modalities": modalities,
        "stream": True,
    }
    if "audio" in modalities:
        body["audio"] = {"voice": "default", "format": "pcm16"}
    request = urllib.request.Request(
        f"{system.http}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    text, audio, end, done = "", 0, "", False
    with urllib.request.urlopen(request, timeout=40) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            assert not done, "something after [DONE]"
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                end = f"error: {event['error']['message']}"
                continue
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                audio += len(base64.b64decode((choice["delta"].get("audio") or {}).get("data") or ""))
                end = choice["finish_reason"] or end
    assert done, "the stream has no [DONE]"
    return text, audio, end


def inflight(system: System, talker: int) -> bool:
    """Whether the gateway has something running at this replica of stage 1. Quicker than a command of its own."""
    with urllib.request.urlopen(f"{system.http}/metrics", timeout=40) as response:
        name = f'omni_gateway_stage_inflight_calls{{pipeline="slow",replica="{talker}",stage="1"}} '
        counts = [line[len(name) :] for line in response.read().decode().splitlines() if line.startswith(name)]
    return any(float(count) for count in counts)


def test_etcdctl_reads_like_documentation(system: System) -> None:
    keys = system.etcdctl("get", "--prefix", "/omni/v1/", "--keys-only").split()
    assert "/omni/v1/default/pipelines/speech" in keys
    replicas = [key for key in keys if "/replicas/" in key]
    assert sorted(replicas) == [f"/omni/v1/default/replicas/speech/{at}" for at in ("0/0", "1/0", "1/1", "2/0")]
    for key in keys:
        value = system.etcdctl("get", key, "--print-value-only")
        json.loads(value)
        assert "\n" in value.strip(), f"{key}: one long line is not readable"
    record = json.loads(system.etcdctl("get", replicas[0], "--print-value-only"))
    assert record["state"] == "REPLICA_STATE_READY"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", record["endpoint"])


def test_killed_talker_leaves_the_pipeline_serving(slow_system: System) -> None:
    system = slow_system
    talkers: dict[int, dict[str, Any]] = {
        replica["ref"].get("replica_id", 0): replica
        for replica in system.replicas()
        if replica["ref"]["stage"]["stage_id"] == 1
    }
    assert len(talkers) == 2
    results: list[tuple[str, int, str]] = []
    requests = [
        threading.Thread(target=lambda: results.append(chat(system, "slow", ["text", "audio"]))) for _ in range(4)
    ]
    for request in requests:
        request.start()

    busy: list[int] = []

    def a_talker_works() -> bool:
        busy[:] = [talker for talker in talkers if inflight(system, talker)]
        return bool(busy)

    eventually(a_talker_works, 30, "a talker at work")
    victim = talkers[busy[0]]
    os.kill(victim["placement"]["pid"], signal.SIGKILL)
    for request in requests:
        request.join(50)
    # Every stream is complete: what was lost went on at the other one.
    assert len(results) == 4
    assert {(len(text), end) for text, _, end in results} == {(len(results[0][0]), "stop")}
    assert len({audio for _, audio, _ in results}) == 1

    # The other one serves at once, whatever comes.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        later = list(pool.map(lambda _: chat(system, "slow", ["text", "audio"]), range(3)))
    for text, audio, end in later:
        assert end == "stop"
        assert len(text) > 20
        assert audio > 1000
    prefix = "/omni/v1/default/replicas/slow/1/"

    def gone() -> bool:
        return victim["instance_uuid"] not in system.etcdctl("get", "--prefix", prefix)

    eventually(gone, 30, "the key of the killed replica gone after its TTL")
