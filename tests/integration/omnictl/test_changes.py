"""Verbs that replicas do not come back from, on clusters of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.omnictl.cli import START_S, Cli, wait_for

# Answers one word every 50 ms for a minute.
SIM = """
pipeline: sim
stages:
  - {stage_id: 0, engine: sim, num_replicas: 2, final_output_type: text, sim: {tpot_ms: 50, tokens: 1200}}
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cli]:
    """A cluster of one stage with two replicas."""
    cli = Cli(tmp_path)
    file = tmp_path / "sim.yaml"
    file.write_text(SIM)
    with cli.spawn("up", str(file), "--http", "127.0.0.1:0") as up:
        up.wait_out("is ready after", START_S)
        yield cli
        assert up.end() == 0


@pytest.mark.timeout(180)
def test_restart_then_drain_then_evict(own: Cli) -> None:
    before = _epochs(own)
    assert list(before) == ["sim/0/0", "sim/0/1"]
    done = own.run("restart", "sim/stage-0", "--deadline", "20s", "--reason", "test", timeout_s=100)
    assert done.code == 0, done.err
    steps = done.out.splitlines()
    assert steps[0].endswith("restarting 2 of 2 replicas")
    assert steps[-1].endswith("finished: 2 of 2 replicas restarted")
    for name in before:
        assert [word for line in steps if name in line for word in ("draining", "left", "ready") if word in line] == [
            *("draining", "left", "ready"),
        ]
    after = _epochs(own)
    assert list(after) == list(before)
    assert all(after[name] > before[name] for name in before)

    report = json.loads(own.ok("drain", "sim/0/1", "--deadline", "20s", "--wait", "--reason", "test", "-o", "json"))
    assert [(result["name"], result["done"]) for result in report["results"]] == [
        ("sim/0/1", "draining"),
        ("sim/0/1", "gone"),
    ]
    assert report["results"][0]["replica"]["drain"]["reason"] == "test"
    assert list(_epochs(own)) == ["sim/0/0"]

    stale = own.run("evict", "sim/0/0", "--epoch", str(before["sim/0/0"]))
    assert stale.code == 5
    assert "epoch" in stale.err
    assert own.ok("evict", "sim/stage-0/0") == "sim/0/0 evicted\n"
    assert own.ok("get", "replicas", "-o", "name") == ""
    status = own.run("status", "-o", "yaml")
    assert status.code == 6
    assert "serving: false\n" in status.out
    kinds = {line.split()[0] for line in own.ok("etcd", "ls", "--no-headers").splitlines()}
    assert {"eviction", "drain", "pipeline"} <= kinds


@pytest.mark.timeout(120)
def test_a_drain_that_takes_too_long_is_code_6_and_goes_on(own: Cli) -> None:
    own.ok("cordon", "sim/0/1")  # all requests go to the other one
    with own.spawn("chat", "sim", "Tell me everything.") as chat:
        busy = wait_for(lambda: _busy(own), what="a replica that works")
        done = own.run("drain", busy, "--deadline", "60s", "--wait", "--wait-timeout", "500ms")
        assert done.code == 6
        assert done.out == f"{busy} draining\n"
        assert f"still there after 0.5 s: {busy}" in done.err
        assert chat.end(signal.SIGINT) == 130
    wait_for(lambda: busy not in _epochs(own), what="the end of the drain")


def _epochs(cli: Cli) -> dict[str, int]:
    replicas = json.loads(cli.ok("get", "replicas", "-o", "json"))["replicas"]
    return {f"sim/0/{replica['ref']['replica_id']}": int(replica["ref"]["epoch"]) for replica in replicas}


def _busy(cli: Cli) -> str:
    for replica in json.loads(cli.ok("get", "replicas", "-o", "json"))["replicas"]:
        if replica["load"] and replica["load"]["running"]:
            return f"sim/0/{replica['ref']['replica_id']}"
    return ""
