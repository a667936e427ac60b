"""Whatever comes in at any door gets a clear answer, and the service lives on."""

from __future__ import annotations

import json
import random
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.system import ROOT, System

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)

GOOD: dict[str, Any] = {"model": "speech", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}


def post(system: System, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        system.http + path, data=body, headers={"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def change(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (change(model="nope"), 404, "model", "speech"),
        (change(model=7), 400, "model", "string"),
        (json.dumps({"messages": GOOD["messages"]}).encode(), 400, "model", "required"),
        (json.dumps({"model": "speech"}).encode(), 400, "messages", "required"),
        (change(messages=[]), 400, "messages", ""),
        (change(messages="hi"), 400, "messages", "list"),
        (change(messages=[{"role": "user"}]), 400, "messages[0].content", ""),
        (change(messages=[{"role": "boss", "content": "x"}]), 400, "messages[0].role", ""),
        (change(messages=[{"role": "user", "content": 7}]), 400, "messages[0].content", ""),
        (change(modalities=["video"]), 400, "modalities[0]", "text, audio"),
        (change(modalities=[]), 400, "modalities", ""),
        (change(modalities="audio"), 400, "modalities", ""),
        (change(temperature="hot"), 400, "temperature", "number"),
        (change(temperature=-1), 400, "temperature", ""),
        (change(max_tokens=0), 400, "max_tokens", ""),
        (change(stream="yes"), 400, "stream", "true or false"),
        (b'{"model": "speech", ', 400, "body", "JSON"),
        (b"[]", 400, "body", "object"),
        (b"\xff\xfe", 400, "body", "JSON"),
        (b"", 400, "body", ""),
    ],
)
def test_chat_says_what_is_wrong(system: System, body: bytes, status: int, param: str, words: str) -> None:
    got, answer = post(system, "/v1/chat/completions", body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert words in answer["error"]["message"]
    assert answer["error"]["type"]
    assert set(answer["error"]) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": 7}, "input"),
        ({"input": "a" * 4097}, "input"),
        ({"response_format": "ogg"}, "response_format"),
        ({"speed": 9}, "speed"),
    ],
)
def test_speech_says_what_is_wrong(system: System, fields: dict[str, Any], param: str) -> None:
    body = {"model": "speech", "voice": "default", "input": "Hello.", **fields}
    status, answer = post(system, "/v1/audio/speech", json.dumps(body).encode())
    assert (status, answer["error"]["param"]) == (400, param), answer


def test_random_bytes_on_every_port(system: System) -> None:
    rng = random.Random(7)
    ports = [address.rsplit(":", 1)[1] for address in (system.http, system.grpc, system.server)]
    ports += [replica["endpoint"].rsplit(":", 1)[1] for replica in system.replicas()]
    assert len(ports) == 7
    for port in ports:
        for size in (1, 64, 5000):
            for head in (
                b"",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"GET / HTTP/1.1\r\n",
                b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 9999999999999\r\n\r\n",
            ):
                with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
                    try:
                        connection.sendall(head + rng.randbytes(size))
                        connection.shutdown(socket.SHUT_WR)
                        connection.recv(4096)
                    except (ConnectionError, TimeoutError, OSError):
                        pass  # hanging up on garbage is a good answer
    status, answer = post(system, "/v1/chat/completions", change())
    assert status == 200, answer
    done = system.omnictl("status")
    assert done.returncode == 0, done.stderr


TYPOS = [
    ("stages:", "stagse:", "stagse", "stages"),
    ("async_chunk: true", "async_chunk: 'true'", "async_chunk", "true or false"),
    ("num_replicas: 2", "num_replica: 2", "stages[1].num_replica", "num_replicas"),
    ("window_size: 4", "window_size: four", "window_size", ""),
    ("to: 1", "to: 9", "edges[0].to", ""),
]


@pytest.mark.parametrize(("old", "new", "path", "hint"), TYPOS)
def test_deploy_file_typos_exit_2_and_name_the_path(
    system: System, tmp_path: Path, old: str, new: str, path: str, hint: str
) -> None:
    text = (ROOT / "examples" / "speech.yaml").read_text()
    assert old in text
    file = tmp_path / "typo.yaml"
    file.write_text(text.replace(old, new, 1))
    done = system.omnictl("validate", str(file))
    assert done.returncode == 2, done.stdout + done.stderr
    assert path in done.stderr
    assert hint in done.stderr


def test_up_with_a_bad_file_exits_2(system: System, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("stagse: []\n")
    done = system.omnictl("up", str(file), "--engine", "sim", "--http", "127.0.0.1:0")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "stagse" in done.stdout + done.stderr
