"""``omniplane serve`` with real processes and the sim engine: the three modes, and the scenarios that users know."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import orjson
import pytest

from tests.integration.serve.harness import (
    START_S,
    THREE_STAGES,
    TWO_STAGES,
    World,
    chat,
    children,
    command,
    draw,
    environment,
    family,
    free_port,
    get,
    world,
)
from tests.support.processes import services, wait_until

__all__ = ["services", "world"]

pytestmark = pytest.mark.timeout(240)


async def test_plain_serves_the_whole_pipeline_and_leaves_nothing(world: World) -> None:
    port = free_port()
    plain = world.spawn("--omni", "--deploy-config", world.file(TWO_STAGES), "--port", str(port))
    ready = await plain.wait_ready(START_S)
    assert get(f"http://127.0.0.1:{port}/health")[0] == 200
    assert chat(ready["http"], "bagel")["choices"][0]["finish_reason"]
    assert await draw(ready, 1) == {0: [0], 1: [0]}
    assert "Stage 0 replica id=0 up" in plain.logs()
    assert "Diffusion replica id=0 for stage 1 is up" in plain.logs()
    # Nobody joins it: its control plane is on a loopback port of its own.
    assert ready["control_plane"].startswith("127.0.0.1:")
    left = family(plain.pid)
    assert len(children(plain, "stage-worker")) == 2
    assert await plain.terminate(START_S) == 0
    await world.nothing_left(left)
    assert list((world.directory / "tmp").iterdir()) == []


async def test_a_head_waits_for_the_other_stages_and_serves_with_them(world: World) -> None:
    """Scenario B: two AR replicas at the head, two DiT replicas elsewhere, each with a device of its own."""
    port = free_port()
    file = world.file(TWO_STAGES.replace("name: dit,", "name: dit, num_replicas: 2, devices: [0, 1],"))
    flags = ("--omni-dp-size-local", "2", "--omni-lb-policy", "round-robin", "--port", str(port))
    head = world.head(file, 0, *flags, env={"CUDA_VISIBLE_DEVICES": "4,5"})
    await wait_until(lambda: "Listening on tcp" in head.logs(), START_S, "the control plane")
    await wait_until(lambda: head.logs().count("Stage 0 replica id=") == 2, START_S, "the head's replicas")
    await wait_until(lambda: get(f"http://127.0.0.1:{port}/health")[0] == 503, START_S, "the gateway")
    assert get(f"http://127.0.0.1:{port}/health")[1]["missing"] == {"bagel": {"1": "0 of 2"}}
    await wait_until(lambda: "Waiting for 0 local, 2 remote replica(s)" in head.logs(), START_S, "a word about it")

    headless = world.headless(1, "--omni-dp-size-local", "2", env={"CUDA_VISIBLE_DEVICES": "6,7"})
    await headless.wait_ready(START_S)
    ready = await head.wait_ready(START_S)
    assert get(f"http://127.0.0.1:{port}/health")[0] == 200
    assert headless.logs().count("Diffusion replica id=") == 2
    assert await world.ids("bagel") == {0: [0, 1], 1: [0, 1]}
    for stage_id in (0, 1):
        await wait_until(lambda at=stage_id: _routable(ready["http"], at) == 2, START_S, "both in turn")  # type: ignore[misc]
    used = await draw(ready, 4)
    assert [sorted(used[stage_id]) for stage_id in (0, 1)] == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert not children(headless, "gateway")
    assert not children(headless, "control-plane")

    for launcher, stage_id in ((head, 0), (headless, 1)):
        workers = children(launcher, "stage-worker")
        # What each sees is the device at that place of its launcher's own CUDA_VISIBLE_DEVICES.
        assert {flag_of(pid, "--devices") for pid in workers} == {"0", "1"}
        assert sorted(tuple(r.placement.devices) for r in (await world.replicas("bagel"))[stage_id]) == [("0",), ("1",)]
        assert len({environment(pid)["MASTER_PORT"] for pid in workers}) == 2

    left = family(head.pid) + family(headless.pid)
    assert await headless.terminate(START_S) == 0
    assert (await world.ids("bagel")).get(1, []) == []
    assert await head.terminate(START_S) == 0
    await world.nothing_left(left)


async def test_ten_replicas_in_three_stages(world: World) -> None:
    """The topology of the older documentation: 2 + 4 + 1 + 3, ids unique in each stage."""
    file = world.file(THREE_STAGES)
    head = world.head(file, 0, "--omni-dp-size-local", "2")
    first = world.headless(1, "--omni-dp-size-local", "4")
    second = world.headless(1)
    third = world.headless(2, "--omni-dp-size-local", "3")
    for launcher in (head, first, second, third):
        await launcher.wait_ready(START_S)
    assert await world.ids("speech") == {0: [0, 1], 1: [0, 1, 2, 3, 4], 2: [0, 1, 2]}
    assert chat(head.ready["http"], "speech")["choices"][0]["finish_reason"]
    # They come and go without the head.
    assert await first.terminate(START_S) == 0
    assert len((await world.ids("speech"))[1]) == 1
    assert chat(head.ready["http"], "speech")["choices"][0]["finish_reason"]


async def test_a_headless_of_the_heads_own_stage_gets_the_ids_above_even_if_it_comes_first(world: World) -> None:
    """Scenario C, with the head last."""
    headless = world.headless(0, "--omni-dp-size-local", "2")
    await wait_until(lambda: "waiting for the head" in headless.logs(), START_S, "a headless that waits")
    head = world.head(world.file(TWO_STAGES), 0, "--omni-lb-policy", "round-robin")
    dit = world.headless(1)
    for launcher in (headless, head, dit):
        await launcher.wait_ready(START_S)
    assert await world.ids("bagel") == {0: [0, 1, 2], 1: [0]}
    assert [replica["replica_id"] for replica in head.ready["replicas"]] == [0]
    assert sorted(replica["replica_id"] for replica in headless.ready["replicas"]) == [1, 2]
    # A gateway hears of replicas a moment after the control plane.
    await wait_until(lambda: _routable(head.ready["http"], 0) == 3, START_S, "three routable replicas")
    assert sorted((await draw(head.ready, 3))[0]) == [0, 1, 2]


async def test_the_head_may_be_any_stage_and_flags_reach_the_engines(world: World) -> None:
    """The setup of the older test report: the head has the last stage, both processes the same engine flags."""
    flags = ("--quantization", "fp8", "--trust-remote-code")
    head = world.head(world.file(TWO_STAGES), 1, "--omni-dp-size-local", "2", *flags)
    headless = world.headless(0, *flags, "--replica-id", "7", "--omni-heartbeat-timeout", "1")
    await headless.wait_ready(START_S)
    await head.wait_ready(START_S)
    assert await world.ids("bagel") == {0: [0], 1: [0, 1]}
    assert [line for line in headless.logs().splitlines() if "--replica-id 7" in line and " W " in line] != []
    assert headless.logs().count("--replica-id 7") == 1
    assert "ignored on headless, as the head's decide: --omni-heartbeat-timeout" in headless.logs()
    # 30 s, the head's: not the second that the headless was told.
    assert flag_of(children(head, "control-plane")[0], "--lease-ttl-s") == "30"
    other = world.headless(0, "--quantization", "awq")
    assert await other.wait_exit(START_S) == 2
    assert 'quantization: "awq" here, "fp8" in the plan' in other.logs()
    assert "--stage-0-quantization VALUE" in other.logs()


async def test_only_a_head_runs_a_control_plane(world: World) -> None:
    """Without a stage id it is private; with --headless there is none."""
    head = world.head(world.file(TWO_STAGES), 0)
    headless = world.headless(1, "-ora", "127.0.0.2")
    await headless.wait_ready(START_S)
    await head.wait_ready(START_S)
    assert len(children(head, "control-plane")) == len(children(head, "etcd")) == len(children(head, "gateway")) == 1
    assert not children(headless, "control-plane")
    assert [r.endpoint.rpartition(":")[0] for r in (await world.replicas("bagel"))[1]] == ["127.0.0.2"]


async def test_a_planned_replica_that_does_not_come_ends_the_head_and_is_named(world: World) -> None:
    file = world.file(TWO_STAGES.replace("name: dit,", "name: dit, num_replicas: 2,"))
    head = world.head(file, 0, "--stage-init-timeout", "8")
    headless = world.headless(1)
    left = []
    await wait_until(lambda: bool(children(head, "stage-worker")) or not head.running, START_S, "its replica")
    left = family(head.pid)
    assert await head.wait_exit(START_S) == 6
    assert "--stage-init-timeout: not registered within 8 s: stage 1 (dit): replica" in head.logs()
    assert "of 2" in head.logs()
    await world.nothing_left(left)
    assert headless.running  # it waits for a head to come back


async def test_an_engine_that_takes_too_long_ends_the_launcher(world: World) -> None:
    plain = world.spawn(
        *("--deploy-config", world.file(TWO_STAGES), "--port", "0", "--init-timeout", "12"),
        *("--stage-1-sim", '{"output": "image", "start_ms": 600000}'),
    )
    # On a slow machine the time may be over before its replicas have begun.
    await wait_until(lambda: len(children(plain, "stage-worker")) == 2 or not plain.running, START_S, "its replicas")
    left = family(plain.pid)
    assert await plain.wait_exit(START_S) == 6
    assert "--init-timeout: not everything served within 12 s" in plain.logs()
    await world.nothing_left(left)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--stage-id", "7"), "--stage-id: pipeline 'bagel' has no stage 7; its stages are 0 (thinker), 1 (dit)"),
        (("--stage-id", "0", "--stage-5-dtype", "half"), "--stage-5-dtype: pipeline 'bagel' has no stage 5"),
        (("--stage-id", "0", "--stage-1-no-such-key", "1"), "stages[1].no_such_key"),
        (("--stage-id", "0", "--engine", "no-such-engine"), "no-such-engine"),
    ],
)
async def test_what_the_file_does_not_have_is_told(world: World, flags: tuple[str, ...], said: str) -> None:
    head = world.spawn("--deploy-config", world.file(TWO_STAGES), "--port", "0", *world.master, *flags)
    assert await head.wait_exit(START_S) in (2, 4)
    assert said in head.logs()


async def test_a_missing_file_is_named_before_anything_starts(world: World) -> None:
    plain = world.spawn("--deploy-config", "/no/such/deploy.yaml", "--port", "0")
    assert await plain.wait_exit(START_S) == 2
    assert "--deploy-config: /no/such/deploy.yaml: no such file or directory" in plain.logs()
    assert "etcd" not in plain.logs()


async def test_faults_of_the_file_are_told_with_their_lines(world: World) -> None:
    plain = world.spawn("--deploy-config", world.file(TWO_STAGES.replace("edges:", "edgse:")), "--port", "0")
    assert await plain.wait_exit(START_S) == 2
    assert "deploy.yaml: edgse: line 9: unknown key" in plain.logs()


async def test_a_headless_without_a_head_gives_up_and_says_where_it_looked(world: World) -> None:
    headless = world.headless(0, "--startup-timeout", "1")
    assert await headless.wait_exit(START_S) == 6
    assert f"the head at 127.0.0.1:{world.master_port} did not serve a pipeline within 1 s" in headless.logs()


async def test_an_address_that_is_not_this_hosts_is_refused_at_once(world: World) -> None:
    headless = world.headless(0, "-ora", "192.0.2.1", "--insecure")
    assert await headless.wait_exit(START_S) == 2
    assert "--omni-replica-address: cannot listen on 192.0.2.1" in headless.logs()


def flag_of(pid: int, flag: str) -> str:
    """The value of a flag of a running process."""
    words = command(pid).split()
    return words[words.index(flag) + 1]


def _routable(url: str, stage_id: int) -> int:
    """Replicas of a stage that the gateway may route to."""
    return int(get(f"{url}/ready")[1]["pipelines"]["bagel"]["routable_replicas"][str(stage_id)])


async def test_a_file_that_names_no_pipeline_gets_the_models_name(world: World) -> None:
    file = world.file(TWO_STAGES.replace("pipeline: bagel\n", ""))
    plain = world.spawn("ByteDance-Seed/BAGEL-7B-MoT", "--deploy-config", file, "--port", "0")
    ready = await plain.wait_ready(START_S)
    assert ready["pipeline"] == "BAGEL-7B-MoT"

    def listed() -> list[str]:
        return [model["id"] for model in get(f"{ready['http']}/v1/models")[1]["data"]]

    # The gateway hears of the last replica a moment after the launcher does.
    await wait_until(lambda: bool(listed()), what="the model")
    assert listed() == ["BAGEL-7B-MoT"]


async def test_stopping_before_it_serves_is_graceful_as_well(world: World) -> None:
    head = world.head(world.file(TWO_STAGES), 0)
    await wait_until(lambda: "Stage 0 replica id=0 up" in head.logs(), START_S, "its replica")
    left = family(head.pid)
    head.send(signal.SIGTERM)
    assert await head.wait_exit(START_S) == 0
    assert not head.ready_path.exists()
    await world.nothing_left(left)
    assert list((world.directory / "tmp").iterdir()) == []


async def test_it_needs_nothing_of_its_environment(world: World) -> None:
    ready_path = world.directory / "ready.json"
    command_line = (sys.executable, "-m", "omniplane", "serve", "--deploy-config", world.file(TWO_STAGES))
    with (world.directory / "bare.log").open("wb") as log:
        process = subprocess.Popen(
            [*command_line, "--port", "0", "--ready-file", str(ready_path)],
            env={"PATH": os.environ["PATH"], "HOME": str(world.directory)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        await wait_until(lambda: ready_path.exists() or process.poll() is not None, START_S, "readiness")
        assert process.poll() is None, (world.directory / "bare.log").read_text()
        ready = orjson.loads(ready_path.read_bytes())
        assert chat(ready["http"], "bagel")["choices"][0]["finish_reason"]
        left = family(process.pid)
    finally:
        process.terminate()
    assert await asyncio.to_thread(process.wait, START_S) == 0
    await world.nothing_left(left)
