"""The supervisor with small programs in the place of services."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omnicore.backoff import Backoff
from omnicore.clock import Clock
from omnicore.supervise.restart import RestartPolicy
from omnicore.supervise.supervisor import Member, Spec, StartFailedError, State, Supervisor
from tests.support.processes import wait_until

# Arguments: what to do, then what the supervisor adds: --ready-file FILE --die-with-parent.
_PROGRAM = """
import json, os, signal, subprocess, sys, time
what = sys.argv[1]
ready = sys.argv[sys.argv.index("--ready-file") + 1]
def serve():
    with open(ready + ".tmp", "w") as file:
        json.dump({"pid": os.getpid(), "arguments": sys.argv[1:]}, file)
    os.rename(ready + ".tmp", ready)
print("doing", what, flush=True)
if what == "awaited":
    with open(ready + ".starts", "a") as file:
        print(json.dumps([os.getpid(), sys.argv[3] if sys.argv[2] == "--pinned" else None]), file=file)
    number = len(open(ready + ".starts").readlines())
if what == "fail":
    print("no such model", flush=True); sys.exit(3)
if what == "hang":
    time.sleep(60)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "family":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("child", child.pid, flush=True)
serve()
if what == "loop":
    sys.exit(4)
if what == "leave":
    sys.exit(0)
if what == "restart" and "--pinned" not in sys.argv:
    sys.exit(75)
if what == "awaited":
    if number < 4:
        sys.exit({1: 4, 2: 75, 3: 4}[number])
if what == "environment":
    print("it is", os.environ["WHO"], flush=True)
time.sleep(60)
"""


class _World:
    def __init__(self, directory: Path) -> None:
        program = directory / "program.py"
        program.write_text(_PROGRAM)
        self.said: list[str] = []
        self.states: list[tuple[str, State]] = []

        def on_change(member: Member, text: str) -> None:
            self.states.append((member.spec.name, member.state))
            if text:
                self.said.append(text)

        def policy(clock: Clock) -> RestartPolicy:
            return RestartPolicy(clock, limit=3, backoff=Backoff(initial_s=0.01, max_s=0.02))

        self.supervisor = Supervisor(
            directory / "run", on_change, program=(sys.executable, "-I", "-S", str(program)), policy=policy
        )

    def state(self, name: str) -> State:
        return self.supervisor.members[name].state


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[_World]:
    found = _World(tmp_path)
    try:
        yield found
    finally:
        await found.supervisor.stop([list(found.supervisor.members)])


def _spec(what: str, *, name: str = "it", ready_timeout_s: float = 20.0, may_leave: bool = False) -> Spec:
    return Spec(
        name=name,
        arguments=(what,),
        ready_timeout_s=ready_timeout_s,
        stop_grace_s=0.5,
        pin=lambda ready: ("--pinned", str(ready["pid"])),
        may_leave=may_leave,
    )


async def test_launch_returns_the_ready_file(world: _World) -> None:
    ready = await world.supervisor.launch(_spec("serve"))
    assert ready["arguments"][0] == "serve"
    assert ready["arguments"][-1] == "--die-with-parent"
    assert world.states == [("it", State.STARTING), ("it", State.READY)]
    log = world.supervisor.log_path("it")
    assert log is not None
    assert "doing serve" in log.read_text()


async def test_a_first_start_that_fails_raises_with_the_last_lines(world: _World) -> None:
    with pytest.raises(StartFailedError, match="it exited with code 3") as caught:
        await world.supervisor.launch(_spec("fail"))
    assert caught.value.log_lines == ["doing fail", "no such model"]
    assert world.state("it") is State.FAILED


async def test_a_first_start_that_takes_too_long_raises_and_ends_it(world: _World) -> None:
    with pytest.raises(StartFailedError, match=r"it was not ready after 0\.3 s"):
        await world.supervisor.launch(_spec("hang", ready_timeout_s=0.3))
    process = world.supervisor.members["it"].process
    assert process is not None
    assert not Path(f"/proc/{process.pid}").exists()


async def test_a_death_is_reported_and_the_restart_gets_its_pins(world: _World) -> None:
    first = await world.supervisor.launch(_spec("serve"))
    os.kill(first["pid"], 9)
    member = world.supervisor.members["it"]
    await wait_until(lambda: member.ready["pid"] != first["pid"], what="the restart")
    assert member.ready["arguments"][1:3] == ["--pinned", str(first["pid"])]
    assert world.said[0].splitlines() == [
        "it was killed by SIGKILL; its last lines:",
        "  doing serve",
        "it restarts in 0.0 s",
    ]


async def test_a_crash_loop_stays_down_and_the_others_live(world: _World) -> None:
    await world.supervisor.launch(_spec("serve", name="other"))
    await world.supervisor.launch(_spec("loop"))
    await wait_until(lambda: world.state("it") is State.FAILED, what="giving up")
    assert world.said[-1].splitlines()[-1].startswith("it keeps ending: it stays down. Log: ")
    assert world.state("other") is State.READY


async def test_one_that_may_leave_is_not_restarted(world: _World) -> None:
    await world.supervisor.launch(_spec("leave", may_leave=True))
    await wait_until(lambda: world.state("it") is State.STOPPED, what="its end")
    assert world.said == ["it left (code 0); it is not restarted"]


async def test_one_that_may_not_leave_is(world: _World) -> None:
    await world.supervisor.launch(_spec("leave"))
    await wait_until(lambda: ("it", State.RESTARTING) in world.states, what="a restart")


async def test_one_that_asks_for_a_restart_gets_it_at_once(world: _World) -> None:
    await world.supervisor.launch(_spec("restart"))
    await wait_until(lambda: world.supervisor.members["it"].starts == 2, what="the restart")
    await wait_until(lambda: world.state("it") is State.READY, what="readiness")
    assert world.said[0] == "it was asked to restart"
    assert world.said[1].startswith("it is ready again")


async def test_a_restart_that_was_asked_for_comes_back_as_what_it_was_last(world: _World) -> None:
    """A killed worker comes back under another id while its claim still stands; a restart then waits for that id."""
    await world.supervisor.launch(_spec("awaited"))
    member = world.supervisor.members["it"]
    await wait_until(lambda: member.starts == 4 and member.state is State.READY, what="the fourth start")
    told = (world.supervisor.run_dir / "ready" / "it.json.starts").read_text()
    starts = [json.loads(line) for line in told.splitlines()]
    pids = [pid for pid, _ in starts]
    assert [pinned for _, pinned in starts] == [None, str(pids[0]), str(pids[1]), str(pids[0])]


async def test_a_crash_loop_may_be_tried_again_later(tmp_path: Path) -> None:
    states: list[State] = []

    def policy(clock: Clock) -> RestartPolicy:
        backoff = Backoff(initial_s=0.01, max_s=0.02)
        return RestartPolicy(clock, limit=2, backoff=backoff, crash_loop_delay_s=0.05)

    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    supervisor = Supervisor(
        tmp_path / "run",
        lambda member, _: states.append(member.state),
        program=(sys.executable, "-I", "-S", str(program)),
        policy=policy,
    )
    await supervisor.launch(_spec("loop"))
    await wait_until(lambda: states.count(State.CRASH_LOOP) >= 2, what="the second try")
    await supervisor.stop([["it"]])
    assert State.FAILED not in states


async def test_each_start_asks_for_its_environment_anew(world: _World) -> None:
    names = iter(("first", "second"))
    spec = Spec("it", ("environment",), 20.0, 0.5, environ=lambda: {"WHO": next(names)})
    ready = await world.supervisor.launch(spec)
    log = world.supervisor.log_path("it")
    assert log is not None
    await wait_until(lambda: "it is first" in log.read_text(), what="its words")
    os.kill(ready["pid"], 9)
    await wait_until(lambda: "it is second" in log.read_text(), what="its words after the restart")


async def test_a_stubborn_one_is_killed_after_its_grace(world: _World) -> None:
    await world.supervisor.launch(_spec("stubborn"))
    await world.supervisor.stop([["it"]])
    assert world.said == ["it did not stop within 0.5 s: killed"]
    assert world.state("it") is State.STOPPED


async def test_what_a_process_started_ends_with_it(world: _World) -> None:
    ready = await world.supervisor.launch(_spec("family", may_leave=True))
    process = world.supervisor.members["it"].process
    assert process is not None
    child = int(process.tail(1)[0].split()[1])
    os.kill(ready["pid"], 9)
    await wait_until(lambda: not _lives(child), what="the end of its child")


async def test_groups_stop_one_after_the_other(world: _World) -> None:
    for name in ("a", "b", "c"):
        await world.supervisor.launch(_spec("serve", name=name))
    world.states.clear()
    await world.supervisor.stop([["c"], ["never launched"], ["a", "b"]])
    stopped = [name for name, state in world.states if state is State.STOPPED]
    assert stopped[0] == "c"
    assert sorted(stopped) == ["a", "b", "c"]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
