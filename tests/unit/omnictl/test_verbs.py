"""Texts and rules of the commands that change things."""

from __future__ import annotations

import pytest

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_pb2, types_pb2
from omnicore import errors
from omnictl import edges, output, refs, rows
from omnictl.candidates import names
from omnictl.commands.collective import columns
from omnictl.commands.describe import describe_stage
from omnictl.commands.restart import line
from tests.unit.omnictl import snapshot
from tests.unit.omnictl.records import NOW_S, replica, speech_pipeline, speech_replicas


def test_restart_steps() -> None:
    def step(kind: pb.RestartStep.ValueType, done: int, detail: str = "") -> pb.RestartStageResponse:
        ref = None if kind in (pb.RESTART_STEP_PLANNED, pb.RESTART_STEP_FINISHED) else replica(1, 0).ref
        return pb.RestartStageResponse(step=kind, replica=ref, done=done, total=2, detail=detail)

    steps = [
        (step(pb.RESTART_STEP_PLANNED, 0, "2 of 3 replicas"), 0.1),
        (step(pb.RESTART_STEP_SKIPPED, 0, "cordoned"), 0.1),
        (step(pb.RESTART_STEP_DRAINING, 0), 0.2),
        (step(pb.RESTART_STEP_LEFT, 0, "after 30.1 s"), 30.3),
        (step(pb.RESTART_STEP_READY, 1, "after 72.0 s"), 102.3),
        (step(pb.RESTART_STEP_FAILED, 1, "not back within 600 s"), 733.0),
        (step(pb.RESTART_STEP_FINISHED, 2), 4000.0),
    ]
    snapshot.check("restart", "".join(f"{line(each, at_s)}\n" for each, at_s in steps))
    unknown = pb.RestartStageResponse(step=99, replica=replica(1, 0).ref)  # type: ignore[arg-type] # of a newer server
    assert line(unknown, 0.0).endswith("step 99 speech/1/0")


def test_collective_results() -> None:
    done = pb.ReplicaResult(replica=replica(1, 0).ref)
    done.result.update({"asleep": True, "freed_bytes": 2048, "path": "/tmp/x\ny"})
    refused = pb.ReplicaResult(replica=replica(1, 1).ref)
    refused.status.CopyFrom(errors.FailedPreconditionError("3 requests are running").to_status())
    table = output.table(columns(refs.names([speech_pipeline()])), [done, refused], wide=True)
    snapshot.check("collective", table + "\n")


def test_describe_a_stage() -> None:
    plan, replicas = speech_pipeline(), speech_replicas()
    plan.stages[1].balancing_policy = "round-robin"
    snapshot.check("describe_stage", describe_stage(plan, 1, replicas, NOW_S) + "\n")


@pytest.mark.parametrize("wide", [False, True])
def test_edge_table(wide: bool) -> None:
    found = edges.edge_rows([speech_pipeline()], speech_replicas())
    snapshot.check(f"edges{'_wide' if wide else ''}", output.table(edges.edge_columns(), found, wide=wide) + "\n")


def test_an_edges_pairs_by_what_both_can_use() -> None:
    plan = speech_pipeline()
    shm, grpc = types_pb2.ConnectorOffer(name="shm", healthy=True), types_pb2.ConnectorOffer(name="grpc", healthy=True)

    def made(stage_id: int, boot_id: str, *offers: types_pb2.ConnectorOffer) -> types_pb2.Replica:
        record = replica(stage_id, 0)
        del record.connectors[:]
        record.connectors.extend(offers)
        record.placement.boot_id = boot_id
        return record

    def pairs(producer: types_pb2.Replica, *consumers: types_pb2.Replica) -> dict[str, int]:
        edge = pipeline_pb2.Edge(from_stage=0, to_stage=1)
        return edges.EdgeRow(plan, edge, [producer], consumers).connectors()

    here = made(0, "a", shm, grpc)
    assert pairs(here, made(1, "a", shm, grpc), made(1, "b", shm, grpc)) == {"grpc": 1, "shm": 1}
    assert pairs(here, made(1, "b", shm)) == {"none": 1}
    sick = types_pb2.ConnectorOffer(name="shm", healthy=False)
    assert pairs(here, made(1, "a", sick, grpc)) == {"grpc": 1}
    assert pairs(here) == {}


def test_pairs_say_what_they_take_and_why() -> None:
    plan = speech_pipeline()
    plan.async_chunk = True
    del plan.connectors[:]
    plan.connectors.add(name="fast", kind="auto").extra.update({"among": ["mooncake", "shm"]})
    plan.edges[0].connector = "fast"
    producer, here, there = replica(0, 0), replica(1, 0), replica(1, 1)
    for record, boot_id in ((producer, "a"), (here, "a"), (there, "b")):
        record.placement.boot_id = boot_id
        del record.connectors[:]
        for name in ("shm", "mooncake", "grpc"):
            record.connectors.add(name=name, healthy=True, backend="tcp" if name == "mooncake" else "")
    row = edges.EdgeRow(plan, plan.edges[0], [producer], [here, there])
    assert row.connectors() == {"mooncake(tcp)": 1, "shm": 1}
    told = [(pair.consumer, pair.path.connector, pair.path.reason) for pair in row.pairs()]
    assert told == [
        ("speech/1/0", "shm", "same host: one copy at memory speed"),
        ("speech/1/1", "mooncake", "both have Mooncake"),
    ]
    plan.async_chunk = False
    assert row.connectors() == {"grpc": 1, "shm": 1}, "published before the consumer is known"


def test_policy_table() -> None:
    plan = speech_pipeline()
    plan.stages[1].balancing_policy = "round-robin"
    policies = [rows.PolicyRow(plan, stage) for stage in plan.stages]
    snapshot.check("policies", output.table(rows.policy_columns(), policies) + "\n")


@pytest.mark.parametrize(
    ("current", "depth", "expected"),
    [
        ("", 1, ["speech"]),
        ("sp", 3, ["speech/"]),
        ("speech/", 2, ["speech/thinker", "speech/talker", "speech/code2wav"]),
        ("speech/t", 3, ["speech/thinker/", "speech/talker/", "speech/code2wav/"]),
        ("speech/1", 3, ["speech/0/", "speech/1/", "speech/2/"]),
        ("speech/talker/", 3, ["speech/talker/0", "speech/talker/1"]),
        ("speech/1/", 3, ["speech/1/0", "speech/1/1"]),
        ("speech/talker/", 2, []),
        ("nope/", 3, []),
        ("speech/nope/", 3, []),
        ("a/b/c/d", 3, []),
    ],
)
def test_names_that_complete(current: str, depth: int, expected: list[str]) -> None:
    assert names([speech_pipeline()], speech_replicas(), current, depth) == expected


def test_a_report_as_lines_names_and_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    for form, expected in (
        ("text", "a drained\na gone\nb drained\n"),
        ("name", "a\nb\n"),
        (
            "yaml",
            "results:\n- name: a\n  done: drained\n- name: a\n  done: gone\n- name: b\n  done: drained\n",
        ),
    ):
        report = output.Report(form)
        for name, what in (("a", "drained"), ("a", "gone"), ("b", "drained")):
            report.done(name, what)
        report.end()
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "0", "٣", "99999999999", "9" * 5000])
def test_whole_numbers_that_are_not(text: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="--n: must be a whole number from 1 to 4294967296, got"):
        output.whole_number(text, "--n", "omnictl x", high=2**32)
    if text != "99999999999":
        wanted = f"from 1 to {2**63 - 1}" if len(text) > 18 else "of 1 or more"
        with pytest.raises(errors.InvalidRequestError, match=f"--n: must be a whole number {wanted}, got"):
            output.whole_number(text, "--n", "omnictl x")


def test_texts_are_cut_by_columns_not_characters() -> None:
    assert output.cut("日本語", 6) == "日本語"
    assert output.cut("日本語", 5) == "日本…"
    assert output.cut("abc", 2) == "a…"
