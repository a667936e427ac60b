"""What ``omniplane serve`` does about deaths: of its children, and of itself."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from omni.v1 import admin_service_pb2, admin_service_pb2_grpc, types_pb2
from omnicore import rpc
from omnicore.supervise.guardian import Guardian
from omnicore.supervise.process import Files, Process
from omnicore.supervise.supervisor import State, Supervisor
from omniplane.serve.app import parse
from omniplane.serve.control_plane import ControlPlaneRuntime
from omniplane.serve.replicas import ReplicaProcManager, local_replicas
from tests.integration.serve.harness import (
    START_S,
    TWO_STAGES,
    World,
    alive,
    chat,
    children,
    command,
    draw,
    family,
    get,
    world,
)
from tests.support.processes import services, wait_until

__all__ = ["services", "world"]

pytestmark = pytest.mark.timeout(240)

ONE_STAGE = "pipeline: one\nengine: sim\nstages:\n  - {stage_id: 0, final_output_type: text, sim: {tokens: 4}}\n"


async def test_dead_children_are_started_again_where_the_others_find_them(world: World) -> None:
    head = world.head(world.file(ONE_STAGE), 0, "--omni-dp-size-local", "2")
    ready = await head.wait_ready(START_S)
    for service, name in (
        ("stage-worker", "stage-0-replica-"),
        ("control-plane", "control-plane"),
        ("gateway", "gate"),
    ):
        before = children(head, service)
        os.kill(before[0], signal.SIGKILL)
        await wait_until(lambda: "was killed by SIGKILL" in head.logs(), START_S, "a word about it")
        await wait_until(
            lambda service=service, before=before: len(set(children(head, service)) - set(before)) == 1,  # type: ignore[misc]
            START_S,
            f"another {service}",
        )
        await wait_until(lambda name=name: _again(head.logs(), name), START_S, f"{service} being ready")  # type: ignore[misc]
    await wait_until(lambda: get(f"{ready['http']}/health")[0] == 200, START_S, "health")
    deadline = asyncio.get_running_loop().time() + START_S
    while await world.ids("one") != {0: [0, 1]}:
        assert asyncio.get_running_loop().time() < deadline, await world.ids("one")
        await asyncio.sleep(0.2)
    assert chat(ready["http"], "one")["choices"][0]["finish_reason"]
    assert await head.terminate(START_S) == 0


async def test_a_killed_head_leaves_no_process(world: World) -> None:
    head = world.head(world.file(ONE_STAGE), 0, "--omni-dp-size-local", "2")
    await head.wait_ready(START_S)
    left = family(head.pid)
    # Two workers, gateway, control plane, etcd and what it runs, and the guardian.
    assert len(left) >= 7
    head.kill()
    await world.nothing_left(left)


async def test_a_killed_headless_leaves_not_even_a_replica_that_hangs(world: World) -> None:
    head = world.head(world.file(TWO_STAGES), 0)
    headless = world.headless(1, "--omni-dp-size-local", "2", "--drain-timeout", "0")
    await headless.wait_ready(START_S)
    await head.wait_ready(START_S)
    left = family(headless.pid)
    hung = children(headless, "stage-worker")[0]
    os.kill(hung, signal.SIGSTOP)
    headless.kill()
    await world.nothing_left(left)
    assert head.running
    assert get(f"{head.ready['http']}/health")[0] == 200


async def test_a_head_that_comes_back_finds_the_others_again(world: World) -> None:
    file = world.file(TWO_STAGES)
    head = world.head(file, 0)
    headless = world.headless(1)
    await headless.wait_ready(START_S)
    await head.wait_ready(START_S)
    left = family(head.pid)
    head.kill()
    await world.nothing_left(left)
    before = children(headless, "stage-worker")
    another = world.head(file, 0)
    ready = await another.wait_ready(START_S)
    # Its control plane and etcd are new: the replica told them of itself, and is the same process.
    assert await world.ids("bagel") == {0: [0], 1: [0]}
    assert await draw(ready, 1) == {0: [0], 1: [0]}
    assert children(headless, "stage-worker") == before


async def test_a_second_signal_ends_everything_at_once(world: World) -> None:
    plain = world.spawn("--deploy-config", world.file(ONE_STAGE), "--port", "0", "--drain-timeout", "600")
    await plain.wait_ready(START_S)
    left = family(plain.pid)
    # It cannot drain: it stands still.
    os.kill(children(plain, "gateway")[0], signal.SIGSTOP)
    plain.send(signal.SIGTERM)
    await wait_until(lambda: "stopping: requests may finish" in plain.logs(), START_S, "the first signal")
    plain.send(signal.SIGTERM)
    assert await plain.wait_exit(START_S) == 128 + signal.SIGTERM
    await world.nothing_left(left)


async def test_requests_end_before_the_launcher_does(world: World) -> None:
    slow = ONE_STAGE.replace("{tokens: 4}", "{tokens: 20, tpot_ms: 150}")
    plain = world.spawn("--deploy-config", world.file(slow), "--port", "0")
    ready = await plain.wait_ready(START_S)
    answer = asyncio.create_task(asyncio.to_thread(chat, ready["http"], "one"))
    await wait_until(lambda: "inflight_requests" in str(_ready(ready["http"])), START_S, "its state")
    await wait_until(lambda: _ready(ready["http"])["inflight_requests"] == 1, START_S, "the request")
    plain.send(signal.SIGTERM)
    assert (await answer)["usage"]["completion_tokens"] == 20
    assert await plain.wait_exit(START_S) == 0


async def test_a_headless_whose_replicas_were_drained_ends(world: World) -> None:
    head = world.head(world.file(TWO_STAGES), 0)
    headless = world.headless(1)
    await headless.wait_ready(START_S)
    await head.wait_ready(START_S)
    channel = rpc.channel(f"127.0.0.1:{world.master_port}")
    stage = types_pb2.StageRef(pipeline="bagel", stage_id=1)
    request = admin_service_pb2.DrainReplicaRequest(replica=types_pb2.ReplicaRef(stage=stage, replica_id=0))
    await admin_service_pb2_grpc.AdminServiceStub(channel).DrainReplica(request)
    await channel.close(None)
    assert await headless.wait_exit(START_S) == 0
    assert "every replica has left" in headless.logs()
    assert head.running


async def test_a_crashed_engine_is_replaced_and_keeps_its_id(world: World) -> None:
    crashing = TWO_STAGES.replace("sim: {output: text,", "sim: {crash_after_tokens: 2, output: text,")
    head = world.head(world.file(crashing), 1)
    headless = world.headless(0)
    await headless.wait_ready(START_S)
    ready = await head.wait_ready(START_S)
    first = children(headless, "stage-worker")
    # Who asked hears nothing of it: the request goes on at the one that follows.
    assert (await asyncio.to_thread(chat, ready["http"], "bagel"))["choices"][0]["finish_reason"]
    await wait_until(lambda: "stage-0-replica-0 is ready again" in headless.logs(), START_S, "another one")
    assert set(children(headless, "stage-worker")) != set(first)
    assert (await world.ids("bagel"))[0] == [0]


async def test_parts_start_and_stop_any_number_of_times(tmp_path: Path) -> None:
    others = set(family(os.getpid()))  # of tests before this one in this process
    config, _ = parse(("--deploy-config", "unused.yaml"))
    supervisor = Supervisor(tmp_path, lambda *_: None)
    plane, replicas = ControlPlaneRuntime(config, supervisor), ReplicaProcManager(config, supervisor)
    await plane.stop()
    await plane.start()
    address = plane.address
    await plane.start()
    assert plane.address == address
    await replicas.start("p", address, local_replicas([], None), reserved_ids=False)
    pids = set(family(os.getpid())) - others
    for part in (replicas, plane, plane, replicas):
        await part.stop()
    assert plane.address == ""
    assert not [pid for pid in pids if "omniplane" in command(pid[0]) and alive(*pid)]
    assert {member.state for member in supervisor.members.values()} == {State.STOPPED}


async def test_the_guardian_kills_what_its_launcher_leaves(tmp_path: Path) -> None:
    program = tmp_path / "stubborn.py"
    program.write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid) + '\\n')\n"
        "time.sleep(600)\n"
    )
    others = set(family(os.getpid()))  # of tests before this one in this process
    guardian = Guardian()
    watched = [
        Process.start((sys.executable, str(program)), Files(tmp_path / f"{n}.log", tmp_path / f"{n}")) for n in "ab"
    ]
    await wait_until(lambda: len(set(family(os.getpid())) - others) >= 5, 30, "all processes")
    pids = [pid for pid in set(family(os.getpid())) - others if pid[0] != guardian.pid]
    guardian.watch(watched[0].pid, 600)
    guardian.forget(watched[0].pid)
    guardian.watch(watched[0].pid, 0.0)
    guardian.watch(watched[1].pid, 0.5)
    assert all(alive(*pid) for pid in pids)
    await asyncio.to_thread(guardian.close)
    for process in watched:
        assert await process.wait() == -signal.SIGKILL
    await wait_until(lambda: not any(alive(*pid) for pid in pids), 30, "their children's end")


def _again(log: str, name: str) -> bool:
    return any(name in line and "is ready again" in line for line in log.splitlines())


def _ready(url: str) -> dict[str, object]:
    status, content = get(f"{url}/ready")
    assert status in (200, 503)
    found: dict[str, object] = content
    return found
