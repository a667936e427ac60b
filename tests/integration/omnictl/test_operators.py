"""What operators look at and change, on a cluster that is as before afterwards."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from control_plane.etcd import EtcdClient
from omnictl.commands import build_parser
from omnictl.commands.completion import script
from tests.integration.omnictl.cli import Cli, wait_for

pytestmark = [pytest.mark.xdist_group("omnictl-cluster"), pytest.mark.timeout(180)]


def test_edges_and_policies(cluster: Cli) -> None:
    edges = [line.split() for line in cluster.ok("get", "edges", "speech").splitlines()]
    assert [row[:3] for row in edges[1:]] == [
        ["speech/0-1", "thinker", "talker"],
        ["speech/1-2", "talker", "code2wav"],
    ]
    found = json.loads(cluster.ok("get", "edges", "-o", "json"))["edges"]
    assert [edge["status"]["pairs"] for edge in found] == [2, 2]
    assert cluster.ok("get", "policies", "-o", "name").split() == ["speech/0", "speech/1", "speech/2"]


def test_a_policy_is_set_shown_watched_and_taken_back(cluster: Cli) -> None:
    with cluster.spawn("watch", "policies", "speech/talker") as watch:
        watch.wait_out("speech/1")
        done = cluster.ok("policy", "set", "speech/talker", "round-robin")
        assert done == "speech/1 policy round-robin (was unset)\n"
        watch.wait_out("round-robin")
        assert cluster.ok("policy", "get", "speech/talker").splitlines()[1].split() == [
            *("speech/1", "talker", "round-robin"),
        ]
        assert "Balancing:        round-robin" in cluster.ok("describe", "stage", "speech/talker")
        assert cluster.ok("policy", "unset", "speech/1", "-o", "name") == "speech/1\n"
    assert json.loads(cluster.ok("policy", "get", "-o", "json"))["policies"][1] == {
        "stage": {"pipeline": "speech", "stage_id": 1},
        "name": "talker",
        "policy": "",
    }


def test_top_once(cluster: Cli) -> None:
    wait_for(lambda: _idle(cluster), what="beats that tell the end of earlier tests' requests")
    table = [line.split() for line in cluster.ok("top", "--once", "--sort", "load").splitlines()]
    assert table[0] == ["REPLICA", "STAGE", "STATE", "RUN", "WAIT", "KV", "OUT/S", "BEAT", "XFERS"]
    assert len(table) == 5
    rows = json.loads(cluster.ok("top", "speech/talker", "--once", "-o", "json"))["replicas"]
    assert [row["ref"]["replica_id"] for row in rows] == [0, 1]
    for row in rows:
        assert row["beat_age_s"] < 10
        assert row["outputs_per_s"] == 0
        assert row["load"]["running"] == 0
    # No terminal: as with --once.
    assert len(cluster.ok("top", "--no-headers").splitlines()) == 4


def test_sleep_and_wake_have_a_row_for_each_replica(cluster: Cli) -> None:
    try:
        slept = [line.split() for line in cluster.ok("sleep", "speech", "--stage", "talker").splitlines()]
        assert [row[:3] for row in slept[1:]] == [["speech/1/0", "talker", "done"], ["speech/1/1", "talker", "done"]]
        wait_for(lambda: _states(cluster, "speech/1") == ["ASLEEP", "ASLEEP"], what="both asleep")
        assert _states(cluster, "speech/0") == ["READY"]  # no other stage is touched
    finally:
        woken = json.loads(cluster.ok("wake", "--stage", "speech/1", "-o", "json"))
    assert [result["code"] for result in woken["results"]] == ["OK", "OK"]
    wait_for(lambda: _states(cluster, "speech/1") == ["READY", "READY"], what="both awake")


def test_what_an_engine_cannot_do_is_a_row_and_an_exit_code(cluster: Cli) -> None:
    done = cluster.run("profile", "start", "--stage", "0,2")
    assert done.code == 7
    assert [line.split()[2] for line in done.out.splitlines()[1:]] == ["UNIMPLEMENTED"] * 2
    assert done.err == "error: 2 of 2 replicas failed\n"
    assert len(cluster.ok("reset-cache", "--all-stages", "-o", "name").split()) == 4


@pytest.mark.parametrize("stages", ["-1", "1,7", "talker,nope", "other/1"])
def test_one_unknown_stage_refuses_all_of_it(cluster: Cli, stages: str) -> None:
    done = cluster.run("sleep", "speech", "--stage", stages)
    assert (done.code, done.out) == (4, "")
    assert "it has 0 (thinker), 1 (talker), 2 (code2wav)" in done.err
    assert _states(cluster, "speech") == ["READY"] * 4


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["sleep", "speech"], 2, "--stage STAGE or --all-stages"),
        (["sleep", "speech", "--stage", "1", "--all-stages"], 2, "--stage and --all-stages: give one of the two"),
        (["sleep", "speech", "--stage", "1", "--level", "3"], 2, "--level: must be 1 or 2"),
        (["wake", "speech", "--stage", "1", "--replica-timeout", "11m"], 2, "at most 600 s"),
        (["wake", "nope", "--stage", "1"], 4, "'nope'"),
        (["policy", "set", "speech/9", "random"], 4, "it has 0 (thinker)"),
        (["policy", "set", "speech/1", "randum"], 2, "did you mean 'random'?"),
        (["restart", "speech"], 2, "STAGE: must be PIPELINE/STAGE"),
        (["restart", "speech/nope"], 4, "it has 0 (thinker)"),
        (["restart", "speech/1", "--max-unavailable", "0"], 2, "--max-unavailable"),
        (["restart", "speech/1", "--max-unavailable", "9" * 14], 2, "must be a whole number from 1 to 10000, got '999"),
        (["drain", "speech/1/4294967296"], 2, "the replica id must be a whole number from 0 to 4294967295, got '4294"),
        (["drain", "speech/1/0", "--wait-timeout", "3s"], 2, "goes with --wait"),
        (["describe", "stage", "speech"], 2, "STAGE: must be PIPELINE/STAGE"),
        (["etcd", "get", "pipelines/nope"], 4, "hint: 'omnictl etcd ls -o name'"),
        (["etcd", "ls", "/registry/"], 2, "this cluster's keys, got '/registry/'"),
        (["etcd", "watch", "--revision", "x"], 2, "--revision: must be a whole number"),
        (["top", "--interval", "0"], 2, "--interval"),
        (["get", "replicas", "--context", "nope"], 4, "it has: local"),
        (["get", "replicas", "--server", "10.1.2.3:1"], 2, "plaintext only goes to loopback"),
        (["get", "replicas", "--tls-ca", "/nonexistent"], 2, "go together"),
        (["delete", "pipeline", "nope"], 4, "'nope'"),
    ],
)
def test_errors(cluster: Cli, argv: list[str], code: int, message: str) -> None:
    done = cluster.run(*argv)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("error: ")
    assert message in done.err


async def test_a_plan_that_cannot_be_read_is_named_and_deleted(cluster: Cli) -> None:
    key = "/omni/v1/default/pipelines/spoiled"
    async with EtcdClient([cluster.known()["etcd"]]) as client:
        await client.put(key, b"garbage")
        described = cluster.run("describe", "pipeline", "spoiled")
        assert (described.code, described.out) == (1, "")
        assert key in described.err
        assert "apply the pipeline again, or delete it" in described.err
        deleted = cluster.run("delete", "pipeline", "spoiled", "-o", "name")
        assert (deleted.code, deleted.out) == (0, "spoiled\n")
        assert deleted.err.startswith("note: the plan in etcd key")
        assert await client.get(key) is None


async def test_etcd_as_etcd_has_it(cluster: Cli) -> None:
    async with EtcdClient([cluster.known()["etcd"]]) as client:
        keys = await client.get_prefix("/omni/v1/default/")
        assert cluster.ok("etcd", "ls", "-o", "name").split() == [*(kv.key for kv in keys.kvs), "/omni/v1/meta"]
        assert "schema_version=1" in cluster.ok("etcd", "ls")
        shown = json.loads(cluster.ok("etcd", "ls", "replicas/", "-o", "json"))["keys"]
        stored = {kv.key: kv for kv in keys.kvs}
        assert len(shown) == 4
        for key in shown:
            kv = stored[key["key"]]
            assert key["value"] == json.loads(kv.value)
            assert (key["mod_revision"], key["lease"]) == (str(kv.mod_revision), f"{kv.lease_id:016x}")
        leases = {f"{lease_id:016x}" for lease_id in await client.leases()}
    listed = json.loads(cluster.ok("etcd", "leases", "-o", "json"))["leases"]
    assert {lease["lease_id"] for lease in listed} <= leases
    holders = {key for lease in listed for key in lease["keys"]}
    assert {key["key"] for key in shown} <= holders


def test_one_key_for_reading_and_for_programs(cluster: Cli) -> None:
    assert "schema_version: 1\n" in cluster.ok("etcd", "get", "/omni/v1/meta")
    assert cluster.ok("etcd", "get", "pipelines/speech").startswith("name: speech\n")
    value = json.loads(cluster.ok("etcd", "get", "pipelines/speech", "-o", "json"))
    assert value["value"]["stages"][1]["name"] == "talker"
    many = cluster.ok("etcd", "get", "--prefix", "replicas/speech/1/")
    assert [line for line in many.splitlines() if line.startswith(("#", "---"))] == [
        "# /omni/v1/default/replicas/speech/1/0",
        "---",
        "# /omni/v1/default/replicas/speech/1/1",
    ]
    assert cluster.ok("etcd", "status").startswith("Version:   3.")


def test_etcd_watch_sees_a_cordon(cluster: Cli) -> None:
    with (
        cluster.spawn("etcd", "watch") as lines,
        cluster.spawn("etcd", "watch", "admin/", "-o", "json") as objects,
    ):
        # Nothing says that a watch has begun: change things until it has.
        def seen() -> bool:
            cluster.ok("cordon", "speech/1/1", "--reason", "seen")
            cluster.ok("uncordon", "speech/1/1")
            # A watch may begin between the two: it has seen both only when it has seen the first of them.
            put = '"PUT", "key": "/omni/v1/default/admin/cordons/' in objects.out
            return "READY,CORDONED at" in lines.out and put and '"DELETE"' in objects.out

        wait_for(seen, what="the changes")
        assert lines.end(signal.SIGINT) == 130
        assert objects.end(signal.SIGINT) == 130
    changes = [json.loads(line) for line in objects.out.splitlines()]
    puts = [c for c in changes if c["type"] == "PUT" and "/cordons/" in c["key"]]
    assert puts[0]["value"] == {"replica": "speech/1/1", "reason": "seen"}
    assert "value" not in next(change for change in changes if change["type"] == "DELETE")


def test_describe_tells_of_heartbeats(cluster: Cli) -> None:
    text = cluster.ok("describe", "replica", "speech/talker/1")
    (beat,) = (line for line in text.splitlines() if line.startswith("Heartbeat:"))
    assert beat.endswith(f" ago at {cluster.known()['server']}")


def test_where_a_request_was_and_its_end(cluster: Cli) -> None:
    answer = json.loads(cluster.ok("chat", "speech", "Hello?", "--max-tokens", "5", "-o", "json"))
    found = json.loads(cluster.ok("request", "get", answer["request_id"], "-o", "json"))
    assert found["status"] == "finished"
    assert [event["event"] for event in found["timeline"]][:2] == ["admitted", "dispatched"]
    assert found["gateway"] == cluster.known()["gateway"]
    text = cluster.ok("request", "get", answer["request_id"])
    assert "speech/0/0" in text
    assert text.startswith(f"Request:  {answer['request_id']}\nStatus:   finished\n")
    (row,) = [
        row
        for row in json.loads(cluster.ok("request", "list", "--all", "-o", "json"))["requests"]
        if row["request_id"] == answer["request_id"]
    ]
    assert (row["status"], row["model"], row["gateway"]) == ("finished", "speech", cluster.known()["gateway"])
    assert answer["request_id"] in cluster.ok("request", "list", "--all", "--model", "speech")
    for argv in (("get", "nope"), ("abort", "nope"), ("abort", answer["request_id"])):
        done = cluster.run("request", *argv)
        assert (done.code, done.out) == (4, "")
        assert "no request" in done.err
    assert cluster.run("request", "get", "nope", "--gateway", "127.0.0.1:1").code == 6


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["get", "replicas", ""], ["speech/"]),
        (["get", "replicas", "speech/t"], ["speech/thinker/", "speech/talker/"]),
        (["drain", "speech/1/0", "speech/1/"], ["speech/1/0", "speech/1/1"]),
        (["sleep", "speech", "--stage", ""], ["thinker", "talker", "code2wav"]),
        (["describe", "pipeline", ""], ["speech"]),
        (["etcd", "ls", "pipelines/"], ["pipelines/speech"]),
        (["--context", ""], ["local"]),
        (["--server", "127.0.0.1:1", "get", "replicas", ""], []),
    ],
)
def test_completion_knows_the_cluster(cluster: Cli, words: list[str], expected: list[str]) -> None:
    array = " ".join(f"'{word}'" for word in ["omnictl", *words])
    program = (
        f"{script('bash', build_parser())}\nCOMP_WORDS=({array}); COMP_CWORD={len(words)}; _omnictl\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    environ = cluster.environ | {"PATH": cluster.path_with_omnictl()}
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, env=environ, timeout=40, check=True)
    assert sorted(done.stdout.split()) == sorted(expected)


def _idle(cluster: Cli) -> bool:
    rows = json.loads(cluster.ok("top", "--once", "-o", "json"))["replicas"]
    return not any(row["load"]["running"] or row["outputs_per_s"] for row in rows)


def _states(cluster: Cli, name: str) -> list[str]:
    return [line.split()[2] for line in cluster.ok("get", "replicas", name, "--no-headers").splitlines()]
