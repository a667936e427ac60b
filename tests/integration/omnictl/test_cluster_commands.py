"""Commands against real services: what they print, and with which exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.omnictl.cli import SPEECH, Cli, wait_for

pytestmark = [pytest.mark.xdist_group("omnictl-cluster"), pytest.mark.timeout(180)]


def test_status(cluster: Cli) -> None:
    done = cluster.run("status")
    assert done.code == 0
    assert "Gateway:        ready at 127.0.0.1:" in done.out
    value = cluster.run("status", "-o", "json").json
    assert value["serving"] is True
    stages = value["control_plane"]["stages"]
    assert [(s["stage"]["stage_id"], s["routable"]) for s in stages] == [(0, 1), (1, 2), (2, 1)]
    assert value["gateway"]["models"][0]["modalities"] == ["text", "audio"]


def test_status_without_gateway_says_so_and_is_code_6(cluster: Cli) -> None:
    done = cluster.run("status", "--gateway", "127.0.0.1:1")
    assert done.code == 6
    assert "Gateway:        not ready at 127.0.0.1:1 (cannot reach the gateway" in done.out
    assert "connection refused" in done.out


def test_status_of_services_that_were_started_by_hand_says_that_the_gateway_was_not_named(
    cluster: Cli, tmp_path: Path
) -> None:
    done = Cli(tmp_path).run("status", "--server", cluster.known()["server"])
    assert done.code == 6
    assert "Gateway:        not asked (no address: pass --gateway or set OMNICTL_GATEWAY)" in done.out


def test_tables(cluster: Cli) -> None:
    assert cluster.ok("get", "pipelines").splitlines()[1].split()[:4] == ["speech", "3/3", "4", "chat,speech"]
    stages = [line.split() for line in cluster.ok("get", "stages", "speech").splitlines()]
    assert stages[0][:3] == ["STAGE", "NAME", "READY"]
    assert [row[:3] for row in stages[1:]] == [
        ["speech/0", "thinker", "1/1"],
        ["speech/1", "talker", "2/2"],
        ["speech/2", "code2wav", "1/1"],
    ]
    replicas = cluster.ok("get", "replicas", "speech/talker", "--no-headers").splitlines()
    assert [line.split()[:3] for line in replicas] == [
        ["speech/1/0", "talker", "READY"],
        ["speech/1/1", "talker", "READY"],
    ]


def test_names_and_structures(cluster: Cli) -> None:
    assert cluster.ok("get", "rp", "-o", "name").split() == ["speech/0/0", "speech/1/0", "speech/1/1", "speech/2/0"]
    one = json.loads(cluster.ok("get", "replica", "speech/code2wav/0", "-o", "json"))
    assert one["state"] == "REPLICA_STATE_READY"
    assert list(one["ref"]) == ["stage", "replica_id", "epoch"]
    many = json.loads(cluster.ok("get", "replicas", "-o", "json"))
    assert len(many["replicas"]) == 4
    assert int(many["revision"]) >= int(one["ref"]["epoch"])
    assert cluster.ok("get", "pipeline", "speech", "-o", "yaml").startswith("name: speech\nstages:\n- stage_id: 0\n")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["get", "pipelines", "nope"], 4, "'nope'"),
        (["get", "replicas", "speech/talkr"], 4, "it has 0 (thinker), 1 (talker), 2 (code2wav)"),
        (["get", "replicas", "speech/1/9"], 4, "no replica speech/1/9"),
        (["describe", "replica", "speech/1/9"], 4, "no replica speech/1/9"),
        (["cordon", "speech/1/9"], 4, "speech/1/9"),
        (["cordon", "speech/1/0", "--epoch", "1"], 5, "epoch"),
        (["delete", "pipeline", "nope"], 4, "'nope'"),
        (["chat", "nope", "hello"], 4, "known models: speech"),
        (["chat", "speech", " "], 2, "the question is empty"),
        (["chat", "speech", "hi", "--temperature", "hot"], 2, "--temperature: must be a number, got 'hot'"),
        (["chat", "speech", "hi", "--audio", "/nonexistent/a.wav"], 2, "there is no directory /nonexistent"),
        (["get", "replicas", "--server", "127.0.0.1:1"], 6, "127.0.0.1:1 (connection refused)"),
    ],
)
def test_errors_have_a_line_a_hint_and_a_code(cluster: Cli, argv: list[str], code: int, message: str) -> None:
    done = cluster.run(*argv)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert message in done.err


def test_the_gateways_http_port_is_recognised(cluster: Cli) -> None:
    http = cluster.known()["gateway_http"].removeprefix("http://")
    done = cluster.run("chat", "speech", "hi", "--gateway", http)
    assert done.code == 6
    assert "it does not speak gRPC in plaintext: is that an HTTP port" in done.err


def test_any_of_several_servers_will_do(cluster: Cli) -> None:
    real = cluster.known()["server"]
    assert "speech" in cluster.ok("get", "pipelines", "--server", f"127.0.0.1:1,{real}")


def test_chat_streams_text_and_writes_speech(cluster: Cli, tmp_path: Path) -> None:
    audio = tmp_path / "answer.wav"
    done = cluster.run("chat", "speech", "Why is the sky blue?", "--audio", str(audio), "--seed", "1")
    assert done.code == 0
    assert len(done.out.split()) > 5
    assert "first text after" in done.err
    assert f"s of speech in {audio}" in done.err
    with wave.open(str(audio), "rb") as found:
        assert found.getnframes() / found.getframerate() > 1
        assert any(found.readframes(found.getnframes()))
    assert cluster.run("chat", "speech", "Why is the sky blue?", "--seed", "1").out == done.out


def test_chat_as_json_from_standard_input(cluster: Cli) -> None:
    value = json.loads(cluster.ok("chat", "speech", "-", "--max-tokens", "5", "-o", "json", input="Hello?\n"))
    assert value["completion_tokens"] == 5
    assert value["finish_reason"] == "length"
    assert value["first_text_s"] <= value["total_s"]


def test_speech_into_a_pipe(cluster: Cli) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omnictl", "chat", "speech", "Hi there.", "--audio", "-"],
        capture_output=True,
        env=cluster.environ,
        timeout=30,
        check=True,
    )
    assert done.stdout.startswith(b"RIFF")
    assert done.stdout.count(b"RIFF") == 1
    assert b"Answer" in done.stderr


def test_ctrl_c_ends_a_chat_with_130_and_aborts_it(cluster: Cli, slow_pipeline: str) -> None:
    with cluster.spawn("chat", slow_pipeline, "Tell me everything.") as chat:
        chat.wait_out("Answer")
        assert chat.end(signal.SIGINT) == 130
        assert "Traceback" not in chat.err
    wait_for(lambda: _load(cluster, slow_pipeline) == "0+0", what="the end of the request")


def test_output_that_nobody_reads_is_no_error(cluster: Cli) -> None:
    command = f"{sys.executable} -m omnictl get replicas -o json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=cluster.environ, timeout=30)
    assert done.stdout.split() in (["{", "141"], ["{", "0"])  # 0: all was written before head had gone
    assert done.stderr == ""


def test_cordon_and_back_seen_by_a_watch(cluster: Cli) -> None:
    with (
        cluster.spawn("get", "replicas", "speech/1/0", "--watch") as table,
        cluster.spawn("get", "replicas", "speech/talker", "--watch", "-o", "json") as objects,
    ):
        table.wait_out("READY")
        objects.wait_out("speech")
        assert cluster.ok("cordon", "speech/talker/0", "--reason", "test") == "speech/1/0 cordoned\n"
        table.wait_out("READY,CORDONED")
        assert cluster.ok("uncordon", "speech/1/0") == "speech/1/0 uncordoned\n"
        wait_for(lambda: len(table.out.splitlines()) == 4, what="three rows under the headings")
        wait_for(lambda: _cordons(objects.out) == [False, True, False], what="both changes as JSON")
        assert table.end(signal.SIGINT) == 130
        assert objects.end(signal.SIGINT) == 130
    assert [line.split()[2] for line in table.out.splitlines()] == ["STATE", "READY", "READY,CORDONED", "READY"]
    changes = [json.loads(line) for line in objects.out.splitlines()]
    assert [change["type"] for change in changes[:2]] == ["ADDED", "ADDED"]
    assert _cordons(objects.out) == [False, True, False]


def test_apply_validate_and_delete(cluster: Cli, tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("pipeline: other\nstages:\n  - {stage_id: 0, engine: sim, final_output_type: text}\n")
    assert cluster.ok("validate", str(file)) == f"{file}: ok (pipeline other, 1 stage, 0 edges)\n"
    assert "other" not in cluster.ok("get", "pipelines", "-o", "name")
    with cluster.spawn("get", "pipelines", "--watch") as watch:
        watch.wait_out("speech")
        assert cluster.ok("apply", "-f", str(file)).startswith("pipeline other created (generation ")
        assert cluster.ok("apply", "-f", str(file)).startswith("pipeline other unchanged (generation ")
        watch.wait_out("other")
        assert cluster.run("status").code == 6  # one pipeline cannot serve
        assert cluster.ok("delete", "pipeline", "other") == "pipeline other deleted\n"
        watch.wait_out("GONE")
    assert cluster.ok("get", "pipelines", "-o", "name").split() == ["speech"]


def test_every_fault_of_a_file_is_a_line(cluster: Cli, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("pipeline: bad\nstages:\n  - stage_id: 0\n    engin: sim\n    num_replicas: -1\n")
    for command in (["validate", str(file)], ["apply", "-f", str(file)]):
        done = cluster.run(*command)
        assert (done.code, done.out) == (2, "")
        lines = done.err.splitlines()
        assert any(line.startswith(f"{file}: stages[0].engin: ") and "did you mean 'engine'" in line for line in lines)
        assert any(line.startswith(f"{file}: stages[0].num_replicas: ") for line in lines)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe", "not UTF-8"), (b"#" * (1 << 20) + b"#", "larger than 1 MiB")]
)
def test_files_that_are_none(cluster: Cli, tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    done = cluster.run("apply", "-f", str(file))
    assert done.code == 2
    assert done.err.startswith(f"error: {file}: {message}")


def test_version(cluster: Cli) -> None:
    value = json.loads(cluster.ok("version", "-o", "json"))
    assert value["client"] == value["server"]


def test_a_second_cluster_lends_the_context_and_gives_it_back(cluster: Cli) -> None:
    before = cluster.context.read_bytes()
    with cluster.spawn("up", SPEECH, "--engine", "sim", "--name", "second", "--http", "127.0.0.1:0") as up:
        up.wait_out("second is ready after", 50)
        assert cluster.ok("get", "pipelines", "-o", "name") == "second\n"
        assert cluster.ok("down") == "stopped second\n"
        assert up.process.wait(40) == 0
    assert cluster.context.read_bytes() == before


def _cordons(out: str) -> list[bool]:
    """Of replica 0, one for each time that it changed, in the whole lines of a watch."""
    changes = [json.loads(line)["replica"] for line in out.splitlines(keepends=True) if line.endswith("\n")]
    cordons = [replica["cordoned"] for replica in changes if replica["ref"]["replica_id"] == 0]
    return [now for index, now in enumerate(cordons) if index == 0 or now != cordons[index - 1]]


def _load(cluster: Cli, pipeline: str) -> str:
    return cluster.ok("get", "replicas", pipeline, "--no-headers").split()[3]


@pytest.fixture
def slow_pipeline(cluster: Cli, tmp_path: Path) -> Iterator[str]:
    """A pipeline of one worker that answers one word every 50 ms for a minute."""
    file = tmp_path / "slow.yaml"
    file.write_text(
        "pipeline: slow\nstages:\n  - stage_id: 0\n    engine: sim\n    final_output_type: text\n"
        "    sim: {tpot_ms: 50, tokens: 1200}\n"
    )
    cluster.ok("apply", "-f", str(file))
    server = cluster.known()["server"]
    worker = subprocess.Popen(
        [
            *(sys.executable, "-m", "omniplane", "stage-worker", "--pipeline", "slow", "--stage-id", "0"),
            *("--control-plane", server, "--listen", "127.0.0.1:0", "--die-with-parent"),
        ],
        env=cluster.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: "READY" in cluster.ok("get", "replicas", "slow", "--no-headers"), what="the slow worker")
        yield "slow"
    finally:
        worker.terminate()
        worker.wait(40)
        cluster.ok("delete", "pipeline", "slow")
