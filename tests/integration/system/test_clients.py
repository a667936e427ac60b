"""Clients as users have them: the official OpenAI library, curl, Node's gRPC, the examples we ship."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from openai import OpenAI

from tests.integration.system.openapi import call_all
from tests.support.system import ROOT, System

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)

CLIENTS = ROOT / "examples" / "clients"


def require(command: str) -> str:
    path = shutil.which(command)
    if path is None:
        if os.environ.get("OMNIPLANE_REQUIRE_E2E"):
            pytest.fail(f"{command} is not installed")
        pytest.skip(f"{command} is not installed")
    return path


def wav_seconds(path: Path) -> float:
    with wave.open(str(path)) as wav:
        assert (wav.getsampwidth(), wav.getnchannels()) == (2, 1)
        data = wav.readframes(wav.getnframes())
        assert any(data), "silence"
        return float(wav.getnframes()) / float(wav.getframerate())


def client_of(system: System) -> OpenAI:
    return OpenAI(base_url=f"{system.http}/v1", api_key="unused", max_retries=0)


def test_openai_client_streams_chat(system: System) -> None:
    with client_of(system) as client:
        stream = client.chat.completions.create(
            model="speech",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert len(text) > 20
    assert reasons == ["stop"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 0
    assert {c.id for c in chunks} == {chunks[0].id}
    assert chunks[0].id.startswith("chatcmpl-")


def test_openai_client_gets_audio_with_its_transcript(system: System, tmp_path: Path) -> None:
    with client_of(system) as client:
        completion = client.chat.completions.create(
            model="speech",
            messages=[{"role": "user", "content": "Say something."}],
            modalities=["text", "audio"],
            audio={"voice": "default", "format": "wav"},
        )
    audio = completion.choices[0].message.audio
    assert audio is not None
    assert len(audio.transcript) > 20
    path = tmp_path / "answer.wav"
    path.write_bytes(base64.b64decode(audio.data))
    assert wav_seconds(path) > 1


def test_openai_client_speaks(system: System, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    with (
        client_of(system) as client,
        client.audio.speech.with_streaming_response.create(
            model="speech", voice="default", input="Hello. This is a test.", response_format="wav"
        ) as response,
    ):
        response.stream_to_file(path)
    assert wav_seconds(path) > 0.2


def test_openai_client_lists_models(system: System) -> None:
    with client_of(system) as client:
        assert [model.id for model in client.models.list()] == ["speech"]


def test_openai_example(system: System, tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    done = subprocess.run(
        [sys.executable, CLIENTS / "openai_chat.py", system.http, "speech", "Hello?", path],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert wav_seconds(path) > 1


def test_python_grpc_example(system: System) -> None:
    done = subprocess.run(
        [sys.executable, CLIENTS / "grpc_chat.py", system.grpc, "speech", "Hello?"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens]" in done.stdout


def test_curl_example(system: System, tmp_path: Path) -> None:
    require("curl")
    done = subprocess.run(
        [CLIENTS / "curl.sh", system.http, "speech"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    events = [line for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    finished = [json.loads(e[6:])["choices"][0]["finish_reason"] for e in events[:-1]]
    assert [reason for reason in finished if reason] == ["stop"]
    assert wav_seconds(tmp_path / "speech.wav") > 0.2


def test_rest_example(system: System) -> None:
    require("curl")
    done = subprocess.run(
        [CLIENTS / "rest.sh", system.http, "speech"], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    models, streamed, sent, refused = done.stdout.split("# ")[1:]
    assert [model["id"] for model in json.loads(models.partition("\n")[2])["models"]] == ["speech"]
    messages = [json.loads(line) for line in streamed.splitlines()[1:]]
    text = "".join(message["text"] for message in messages)
    assert messages[-1]["finish"]["reason"] == "stop"
    assert len(text) > 20
    events = [line.removeprefix("data: ") for line in sent.splitlines() if line.startswith("data: ")]
    assert [json.loads(event).get("finish", {}).get("reason") for event in events][-2:] == ["stop", None]
    assert "event: done" in sent
    assert json.loads(refused.splitlines()[1])["error"]["status"] == "NOT_FOUND"
    assert refused.splitlines()[2] == "404"


def test_reflection_example(system: System) -> None:
    def reflect(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(CLIENTS / "reflect.py"), system.grpc, *arguments]
        # Away from the generated code, which this client does without.
        return subprocess.run(command, capture_output=True, text=True, timeout=50, cwd="/", check=False)

    assert "omni.v1.InferenceService" in reflect("list").stdout.splitlines()
    described = reflect("describe", "omni.v1.InferenceService").stdout
    assert "Generate(omni.v1.GenerateRequest) → stream omni.v1.GenerateResponse" in described
    prompt = {"chat": {"messages": [{"role": "user", "parts": [{"text": "Hello?"}]}]}}
    request = json.dumps({"model": "speech", "prompt": prompt, "modalities": ["text"]})
    answer = reflect("call", "omni.v1.InferenceService/Generate", request)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1])["finish"]["reason"] == "stop"
    unknown = reflect("call", "omni.v1.InferenceService/GetRequest", '{"requestId": "nope"}')
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("NOT_FOUND: ")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node examples with what they need."""
    require("node")
    npm = require("npm")
    folder = tmp_path_factory.mktemp("node") / "node"
    shutil.copytree(CLIENTS / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=300, capture_output=True)
    return folder


@pytest.mark.timeout(400)
def test_node_openai_example(system: System, node: Path) -> None:
    def ask(model: str) -> subprocess.CompletedProcess[str]:
        command = ["node", "openai_chat.mjs", system.http, model, "Hello?"]
        return subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=50, check=False)

    done = ask("speech")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\[stop, \d+ tokens\]$", done.stdout, re.MULTILINE)
    unknown = ask("nope")
    assert unknown.returncode == 1
    assert "NotFoundError: 404 model_not_found" in unknown.stderr


@pytest.mark.timeout(400)
def test_what_the_node_client_makes_of_answers(system: System, node: Path) -> None:
    script = shutil.copy(Path(__file__).parent / "openai_behaviour.mjs", node)
    done = subprocess.run(
        ["node", script, system.http, "speech"], cwd=node, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["models"] == ["speech"]
    assert found["whole"] == found["streamed"]
    assert len(set(found["whole"])) == 2
    assert found["riff"] == "RIFF"
    assert found["after"] == "length"
    assert found["errors"] == {
        "field": ["BadRequestError", 400, "invalid_request", "top_p"],
        "model": ["NotFoundError", 404, "model_not_found", "model"],
        "modality": ["BadRequestError", 400, "unsupported_modality", "modalities[0]"],
        "images": ["BadRequestError", 400, "unsupported_modality", "model"],
        "transcription": ["BadRequestError", 400, "task_not_offered", "model"],
    }


@pytest.mark.timeout(400)
def test_node_grpc_example(system: System, node: Path, tmp_path: Path) -> None:
    path = tmp_path / "answer.wav"
    done = subprocess.run(
        ["node", "chat.js", system.grpc, "speech", "Hello?", path],
        cwd=node,
        env={**os.environ, "OMNI_PROTOS": str(ROOT / "protos")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tokens]" in done.stdout
    assert wav_seconds(path) > 1
    unknown = subprocess.run(
        ["node", "chat.js", system.grpc, "nope", "Hello?"],
        cwd=node,
        env={**os.environ, "OMNI_PROTOS": str(ROOT / "protos")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert unknown.returncode == 1
    assert "NOT_FOUND" in unknown.stderr


def test_every_operation_answers_as_the_document_says(system: System) -> None:
    def left_out(verb: str, path: str) -> bool:
        # Watches do not end, and what changes the system would change it for other tests: schemathesis learns names.
        administrative = re.match(r"/api/v1/(replicas|stages|pipelines)", path) is not None and verb != "GET"
        return administrative or path.endswith(":watch") or path == "/metrics"

    seen = call_all(f"{system.http}/openapi.json", left_out, examples=3)
    assert {"200", "400", "404"} <= seen.keys(), seen
    assert system.omnictl("get", "replicas").returncode == 0
