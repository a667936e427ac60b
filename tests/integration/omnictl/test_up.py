"""``omnictl up``: starting, failing, restarting and stopping real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import wave
from pathlib import Path

import pytest

from tests.integration.omnictl.cli import SPEECH, START_S, Cli, Running, processes_of, wait_for

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(240)

ANY_PORT = ("--http", "127.0.0.1:0")
ONE_STAGE = "pipeline: one\nstages:\n  - {stage_id: 0, name: only, engine: sim, final_output_type: text}\n"


@pytest.fixture
def one_stage(tmp_path: Path) -> str:
    file = tmp_path / "one.yaml"
    file.write_text(ONE_STAGE)
    return str(file)


def _pid_of(cli: Cli, service: str) -> int:
    """The process of a service of the cluster that runs in ``cli``'s directory."""
    found = [pid for pid, command in processes_of(cli.directory).items() if f"-m omniplane {service} " in command]
    assert len(found) == 1, processes_of(cli.directory)
    return found[0]


def _nothing_left(cli: Cli, up: Running) -> None:
    wait_for(lambda: not processes_of(cli.directory / "tmp"), 40, "the end of every child")
    assert up.process.poll() is not None


def test_ctrl_c_drains_and_leaves_nothing(cli: Cli, one_stage: str) -> None:
    ready = cli.directory / "ready.json"
    with cli.spawn("up", one_stage, *ANY_PORT, "--ready-file", str(ready)) as up:
        up.wait_out("one is ready after", START_S)
        assert "etcd             ready" in up.err
        assert "only-0           ready" in up.err
        addresses = json.loads(ready.read_bytes())
        assert addresses["pipeline"] == "one"
        assert cli.known()["server"] == addresses["control_plane"]
        assert up.end(signal.SIGINT) == 0
        order = [line.split()[0] for line in up.err.splitlines() if " stopped " in line]
        assert order == ["gateway", "only-0", "control-plane", "etcd"]
        _nothing_left(cli, up)
    assert not cli.context.exists()
    assert list((cli.directory / "tmp").iterdir()) == []


def test_of_two_that_begin_at_once_on_one_directory_one_is_told_to_go_elsewhere(cli: Cli, one_stage: str) -> None:
    kept = cli.directory / "kept"
    begin = ("up", one_stage, *ANY_PORT, "--data-dir", str(kept))
    with cli.spawn(*begin) as one, cli.spawn(*begin) as other:
        wait_for(lambda: one.process.poll() is not None or other.process.poll() is not None, START_S, "one of them")
        refused, serving = (one, other) if one.process.poll() is not None else (other, one)
        assert refused.process.wait() == 5
        assert refused.err.startswith(f"error: --data-dir: {kept} is in use by another launcher (process ")
        serving.wait_out("one is ready after", START_S)
        assert serving.end(signal.SIGINT) == 0
    assert (kept / "logs").is_dir()


@pytest.mark.parametrize("command", [("omnictl", "up"), ("omniplane", "gateway")])
def test_ctrl_c_while_a_program_loads_is_no_traceback(cli: Cli, one_stage: str, command: tuple[str, str]) -> None:
    """Ctrl-C comes with the first module that the command itself imports."""
    program, word = command
    (cli.directory / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('omnictl.cli', 'gateway.app'):\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", program, word, one_stage],
        env=cli.environ | {"PYTHONPATH": str(cli.directory)},
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_every_interface_if_that_is_said_to_be_insecure(cli: Cli, one_stage: str) -> None:
    anywhere = ("--grpc", "0.0.0.0:0", "--control-plane-listen", "0.0.0.0:0", "--insecure")
    with cli.spawn("up", one_stage, *ANY_PORT, *anywhere) as up:
        up.wait_out("one is ready after", START_S)
        assert up.end(signal.SIGINT) == 0


def test_a_killed_up_leaves_no_process_behind(cli: Cli, one_stage: str) -> None:
    with cli.spawn("up", one_stage, *ANY_PORT) as up:
        up.wait_out("one is ready after", START_S)
        assert len(processes_of(cli.directory / "tmp")) >= 5  # four services, and etcd itself
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
        _nothing_left(cli, up)
    done = cli.run("status")
    assert done.code == 6
    assert "has ended" in done.err
    assert cli.ok("down") == "no cluster of 'omnictl up' runs here\n"


def test_whatever_dies_is_restarted_where_the_others_find_it(cli: Cli, one_stage: str) -> None:
    with cli.spawn("up", one_stage, *ANY_PORT) as up:
        up.wait_out("one is ready after", START_S)
        for service, name in (("stage-worker", "only-0"), ("control-plane", "control-plane"), ("gateway", "gateway")):
            os.kill(_pid_of(cli, service), signal.SIGKILL)
            up.wait_err(f"{name} was killed by SIGKILL; its last lines:")
            up.wait_err(f"{name} is ready again", START_S)
        wait_for(lambda: cli.run("chat", "one", "Still there?").code == 0, 30, "an answer")
        assert up.end() == 0
        _nothing_left(cli, up)


def test_one_question(cli: Cli) -> None:
    audio = cli.directory / "a.wav"
    argv = ("up", SPEECH, "--engine", "sim", *ANY_PORT, "--ask", "Why is the sky blue?", "--audio", str(audio))
    done = cli.run(*argv, timeout_s=START_S)
    assert done.code == 0, done.err
    assert done.out.startswith("Answer")
    assert "since start: ready after " in done.err
    with wave.open(str(audio), "rb") as found:
        assert found.getnframes() > found.getframerate()
    assert processes_of(cli.directory / "tmp") == {}
    assert list((cli.directory / "tmp").iterdir()) == []


def test_a_file_with_faults_is_code_2_and_a_line_for_each(cli: Cli) -> None:
    file = cli.directory / "bad.yaml"
    file.write_text("pipeline: bad\nstages:\n  - stage_id: 0\n    engin: sim\n")
    done = cli.run("up", str(file), *ANY_PORT)
    assert done.code == 2
    assert any(line.startswith(f"{file}: stages[0].engin: ") for line in done.err.splitlines())
    assert processes_of(cli.directory / "tmp") == {}
    assert list((cli.directory / "tmp").iterdir()) == []


def test_a_worker_that_cannot_start_ends_it_with_the_reason(cli: Cli, one_stage: str) -> None:
    cli.environ["OMNI_STAGE_WORKER_LOG_LEVEL"] = "loud"
    done = cli.run("up", one_stage, *ANY_PORT, timeout_s=START_S)
    assert done.code == 2  # the worker's own: wrong input, not a fault
    assert "error: only-0 exited with code 2" in done.err
    assert any(line.startswith("  | ") and "OMNI_STAGE_WORKER_LOG_LEVEL" in line for line in done.err.splitlines())
    logs = cli.directory / "tmp"
    kept = [line for line in done.err.splitlines() if line.startswith("logs are kept in ")]
    assert len(kept) == 1
    assert (Path(kept[0].removeprefix("logs are kept in ")) / "only-0.log").exists()
    assert processes_of(logs) == {}


def test_an_unknown_engine_is_wrong_input(cli: Cli, one_stage: str) -> None:
    done = cli.run("up", one_stage, *ANY_PORT, "--engine", "nope", timeout_s=START_S)
    assert done.code == 2
    assert "unknown engine 'nope'; known: " in done.err


@pytest.mark.parametrize("flag", ["--http", "--grpc", "--control-plane-listen"])
def test_a_port_in_use_is_named_before_anything_starts(cli: Cli, one_stage: str, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli.run("up", one_stage, *ANY_PORT, flag, f"127.0.0.1:{port}")
    assert done.code == 6
    assert f"error: {flag}: port {port} of 127.0.0.1 is in use by " in done.err
    assert f"(pid {os.getpid()})" in done.err
    assert list((cli.directory / "tmp").iterdir()) == []


def test_an_etcd_that_is_not_there_is_named_before_anything_starts(cli: Cli, one_stage: str) -> None:
    done = cli.run("up", one_stage, *ANY_PORT, "--etcd", "127.0.0.1:1,unix:/nonexistent")
    assert done.code == 6
    assert "--etcd: nothing listens at 127.0.0.1:1 (connection refused), unix:/nonexistent (no such file" in done.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("/nonexistent.yaml",), "/nonexistent.yaml: No such file or directory"),
        (("FILE", "--http", "8000"), "--http: must be host:port, got '8000'"),
        (("FILE", "--http", "no.such.host.invalid:0"), "--http: unknown host"),
        (
            ("FILE", "--grpc", "0.0.0.0:0"),
            "--grpc: plaintext only goes to loopback, and 0.0.0.0:0 is beyond it: say --in",
        ),
        (("FILE", "--ready-timeout", "soon"), "--ready-timeout: must be a duration"),
        (("FILE", "--ask", ""), "the question is empty"),
        (("FILE", "--ask", "x", "--detach"), "--detach: goes neither with"),
    ],
)
def test_wrong_flags_are_code_2(cli: Cli, one_stage: str, argv: tuple[str, ...], message: str) -> None:
    done = cli.run("up", *(one_stage if word == "FILE" else word for word in argv))
    assert done.code == 2
    assert message in done.err


def test_ctrl_c_while_starting_is_130_and_leaves_nothing(cli: Cli) -> None:
    file = cli.directory / "slow.yaml"
    file.write_text(
        "pipeline: slow\nstages:\n  - {stage_id: 0, engine: sim, final_output_type: text, sim: {start_ms: 60000}}\n"
    )
    with cli.spawn("up", str(file), *ANY_PORT) as up:
        up.wait_err("stage-0-0        loading", START_S)
        assert up.end(signal.SIGINT) == 130
        _nothing_left(cli, up)


def test_a_second_ctrl_c_stops_at_once(cli: Cli) -> None:
    file = cli.directory / "endless.yaml"
    file.write_text(
        "pipeline: endless\nstages:\n  - stage_id: 0\n    engine: sim\n    final_output_type: text\n"
        "    sim: {tpot_ms: 50, tokens: 1200}\n"
    )
    with cli.spawn("up", str(file), *ANY_PORT) as up:
        up.wait_out("endless is ready after", START_S)
        with cli.spawn("chat", "endless", "Tell me everything.") as chat:
            chat.wait_out("Answer")
            up.process.send_signal(signal.SIGINT)
            up.wait_err("stopping: requests may finish")
            assert "Answer" in chat.out
            assert chat.process.poll() is None  # it goes on while the worker drains
            assert up.end(signal.SIGINT) == 130
            assert chat.process.wait(40) == 6
        _nothing_left(cli, up)


def test_detached_until_down(cli: Cli, one_stage: str) -> None:
    done = cli.run("up", one_stage, *ANY_PORT, "--detach", timeout_s=START_S)
    assert done.code == 0, done.err
    assert "one is ready after" in done.err
    assert "'omnictl down' stops it" in done.out
    assert cli.run("status").code == 0
    assert cli.ok("down") == "stopped one\n"
    assert processes_of(cli.directory / "tmp") == {}


def test_detached_failure_is_reported_in_the_foreground(cli: Cli) -> None:
    file = cli.directory / "bad.yaml"
    file.write_text("pipeline: bad\n")
    done = cli.run("up", str(file), *ANY_PORT, "--detach")
    assert done.code == 2
    assert f"{file}: " in done.err


def test_validate_needs_no_cluster(cli: Cli, one_stage: str) -> None:
    assert cli.ok("validate", one_stage, SPEECH).splitlines() == [
        f"{one_stage}: ok (pipeline one, 1 stage, 0 edges)",
        f"{SPEECH}: ok (pipeline speech, 3 stages, 2 edges)",
    ]
    assert processes_of(cli.directory / "tmp") == {}
