"""A stage is restarted, one replica after the other, while clients stream without a pause: they do not notice."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import admin_service_pb2_grpc as pb_grpc
from omni.v1 import types_pb2
from tests.support.system import System, eventually, running_system

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(300)

PIPELINE = """
pipeline: rolling
async_chunk: true
entrypoints: {chat: 0}
stages:
  - stage_id: 0
    engine: sim
    num_replicas: 2
    sim: {output: text, tokens: 30, tpot_ms: 10}
    final_output: true
    final_output_type: text
  - stage_id: 1
    engine: sim
    num_replicas: 2
    sim: {output: audio, seconds_per_chunk: 0.1}
    final_output: true
    final_output_type: audio
edges:
  - {from: 0, to: 1, chunk_by: sentence, window_size: 4}
"""


@pytest.fixture(scope="module")
def rolling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("rolling")
    file = directory / "rolling.yaml"
    file.write_text(PIPELINE)
    with running_system(directory, file) as running:
        yield running


class Load:
    """Clients that stream one answer after the other until they are told to stop."""

    def __init__(self, system: System, clients: int) -> None:
        self._url = f"{system.http}/v1/chat/completions"
        self._stop = threading.Event()
        self.answers = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._stream, args=(i,), daemon=True) for i in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def _stream(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                self._one(number)
                self.answers += 1
            except Exception as error:  # noqa: BLE001 -- whatever it is, the client noticed
                self.failures.append(f"{type(error).__name__}: {error}")

    def _one(self, number: int) -> None:
        spoken = number % 2 == 0
        body: dict[str, object] = {
            "model": "rolling",
            "messages": [{"role": "user", "content": "Go on. And on."}],
            "modalities": ["text", "audio"] if spoken else ["text"],
            "stream": True,
        }
        if spoken:
            body["audio"] = {"voice": "default", "format": "pcm16"}
        request = urllib.request.Request(
            self._url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        text, audio, end, done = "", 0, "", False
        with urllib.request.urlopen(request, timeout=60) as response:
            for raw in response:
                line = raw.decode().strip()
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event["error"]
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
                        audio += len((choice["delta"].get("audio") or {}).get("data") or "")
                        end = choice.get("finish_reason") or end
        assert done, "no [DONE]"
        assert end == "stop", f"finish_reason {end!r}"
        assert text, "no text"
        assert audio or not spoken, "no audio"


def restart(system: System, stage_id: int, **fields: object) -> list[pb.RestartStageResponse]:
    stage = types_pb2.StageRef(pipeline="rolling", stage_id=stage_id)
    with grpc.insecure_channel(system.server) as channel:
        request = pb.RestartStageRequest(stage=stage, **fields)  # type: ignore[arg-type]
        return list(pb_grpc.AdminServiceStub(channel).RestartStage(request, timeout=200))


def epochs(system: System, stage_id: int) -> dict[int, int]:
    return {
        int(replica["ref"].get("replica_id", 0)): int(replica["ref"]["epoch"])
        for replica in system.replicas()
        if int(replica["ref"]["stage"].get("stage_id", 0)) == stage_id
    }


@pytest.mark.parametrize("stage_id", [0, 1])
def test_no_request_is_lost_while_a_stage_restarts_under_load(rolling: System, stage_id: int) -> None:
    before = epochs(rolling, stage_id)
    assert sorted(before) == [0, 1]
    other = epochs(rolling, 1 - stage_id)
    with Load(rolling, clients=4) as load:
        eventually(lambda: load.answers > 4, 60, "load")
        steps = restart(rolling, stage_id, reason="new weights")
        restarted_at = load.answers
        eventually(lambda: load.answers > restarted_at + 4, 60, "load after it")
    assert load.failures == []

    told = [(pb.RestartStep.Name(step.step)[len("RESTART_STEP_") :], step.replica.replica_id) for step in steps]
    assert told[0] == ("PLANNED", 0)
    assert told[-1] == ("FINISHED", 0)
    one_by_one = [(what, who) for who in (0, 1) for what in ("DRAINING", "LEFT", "READY")]
    assert told[1:-1] == one_by_one, "one at a time"
    assert (steps[-1].done, steps[-1].total) == (2, 2)
    after = epochs(rolling, stage_id)
    assert sorted(after) == [0, 1], "under the same ids"
    assert all(after[replica_id] > before[replica_id] for replica_id in before)
    assert [step.successor.epoch for step in steps if step.step == pb.RESTART_STEP_READY] == [after[0], after[1]]
    assert epochs(rolling, 1 - stage_id) == other, "the other stage was left alone"


def test_two_at_a_time(rolling: System, tmp_path: Path) -> None:
    steps = restart(rolling, 1, max_unavailable=2)
    told = [step.step for step in steps if step.step in (pb.RESTART_STEP_DRAINING, pb.RESTART_STEP_READY)]
    assert told == [pb.RESTART_STEP_DRAINING] * 2 + [pb.RESTART_STEP_READY] * 2
    assert "was asked to restart" in rolling.log()
