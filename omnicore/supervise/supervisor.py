"""Many children: each started, watched, restarted and finally stopped by one owner."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.errors import InternalError, InvalidRequestError
from omnicore.process import RESTART_EXIT_CODE
from omnicore.supervise.guardian import Guardian
from omnicore.supervise.process import Files, Process, ProcessEndedError, end_text
from omnicore.supervise.restart import RestartPolicy

TAIL_LINES = 12


class State(enum.Enum):
    """Life of a member, as people see it."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    CRASH_LOOP = "crash-loop"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


SETTLED = frozenset({State.READY, State.FAILED, State.STOPPED})


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """A process to run."""

    name: str
    """Unique; also the name of its log."""
    arguments: tuple[str, ...]
    """What follows ``omniplane``; the ready file and parent-death flags are added."""
    ready_timeout_s: float
    """It has failed if it is not ready this long after its start."""
    stop_grace_s: float
    """Between being asked to stop and being killed."""
    pin: Callable[[dict[str, Any]], tuple[str, ...]] = lambda _: ()
    """Further arguments for restarts, from a ready file: what others know it by. It is the first one, and the latest
    where a restart was asked for: whoever did waits for it under the name that it had last."""
    describe: Callable[[dict[str, Any]], str] = lambda _: ""
    """Where it serves, for people, from its ready file."""
    may_leave: bool = False
    """An end with code 0 was somebody's wish, a drain say: it is not restarted."""
    environ: Callable[[], Mapping[str, str]] = dict
    """Environment variables of its own, asked for at every start."""


@dataclasses.dataclass(slots=True)
class Member:
    """A process under supervision."""

    spec: Spec
    state: State
    since_s: float
    """When it came into this state, on the supervisor's clock."""
    started_s: float
    process: Process | None = None
    ready: dict[str, Any] = dataclasses.field(default_factory=dict)
    detail: str = ""
    task: asyncio.Task[None] | None = None
    starts: int = 0
    """How often it was started."""
    guarded: int = 0
    """Process group that is ended should the supervisor's process be killed."""

    def took_s(self, now_s: float) -> float:
        """Seconds from its start until it settled, or until now."""
        return (self.since_s if self.state in SETTLED else now_s) - self.started_s

    def last_line(self) -> str:
        """The newest line of its log."""
        lines = self.process.tail(1) if self.process else []
        return lines[0] if lines else ""


class StartFailedError(InternalError):
    """A process did not become ready; ``log_lines`` are the last that it wrote, ``process_code`` is what it ended
    with (1 if it did not end by itself). ``exit_code`` is for ``up``: that of wrong input if the process ended because
    of it, such as an engine that does not exist."""

    default_reason = "START_FAILED"

    def __init__(self, name: str, why: str, log_lines: list[str], log: Path | None, process_code: int = 1) -> None:
        hint = {"hint": f"its whole log is {log}"} if log is not None else {}
        super().__init__(f"{name} {why}", metadata={"process": name, **hint})
        self.log_lines = log_lines
        self.process_code = process_code
        wrong_input = InvalidRequestError.row.exit_code
        self.exit_code = wrong_input if process_code == wrong_input else self.row.exit_code


class Supervisor:
    """Owns the processes that it launches until ``stop``.

    ``on_change`` is called after every change of a member, with a line for people if there is something to say.
    ``own_logs``: each process logs to a file of its own, else to our standard error. ``guarded``: what hangs when this
    process is killed is killed as well, after its ``stop_grace_s``; call ``close`` at the end. A process that ends
    with ``RESTART_EXIT_CODE`` is started again at once, which counts as no failure.
    """

    def __init__(
        self,
        run_dir: Path,
        on_change: Callable[[Member, str], None],
        *,
        members: dict[str, Member] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        program: tuple[str, ...] = (sys.executable, "-P", "-m", "omniplane"),
        policy: Callable[[Clock], RestartPolicy] = RestartPolicy,
        own_logs: bool = True,
        guarded: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self.members: dict[str, Member] = {} if members is None else members
        self._on_change = on_change
        self._clock = clock
        self._program = program
        self._policy = policy
        self._own_logs = own_logs
        self._guardian = Guardian() if guarded else None

    async def launch(self, spec: Spec) -> dict[str, Any]:
        """Start ``spec`` and return the content of its ready file; it is then kept running.

        Raises ``StartFailedError`` if it ends or takes too long before it is ready for the first time.
        """
        now_s = self._clock.monotonic()
        member = Member(spec, State.STARTING, now_s, now_s)
        self.members[spec.name] = member
        first: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        member.task = asyncio.create_task(self._supervise(member, first), name=f"supervise {spec.name}")
        # The task, too: a fault in it must not leave us waiting.
        waited: set[asyncio.Future[Any]] = {first, member.task}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await member.task
            raise InternalError(f"{spec.name} was stopped while it started")
        return first.result()

    async def stop(self, groups: Iterable[Iterable[str]]) -> None:
        """Stop members, one group after the other, those of a group together. Names not launched are skipped."""
        for group in groups:
            members = [self.members[name] for name in group if name in self.members]
            async with asyncio.TaskGroup() as tasks:
                for member in members:
                    tasks.create_task(self._stop(member))

    async def close(self) -> None:
        """After ``stop``: nothing can be launched any more."""
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.close)

    def kill_all(self) -> None:
        """End everything at once, without waiting."""
        for member in self.members.values():
            if member.process is not None:
                member.process.signal_group(signal.SIGKILL)

    def log_path(self, name: str) -> Path | None:
        """The log of a member; None where members have none of their own."""
        if not self._own_logs:
            return None
        return self.run_dir / "logs" / f"{name.replace('/', '-')}.log"

    def mark_loading(self, name: str) -> None:
        """It has announced itself and loads its engine."""
        if self.members[name].state is State.STARTING:
            self._set(self.members[name], State.LOADING)

    async def _supervise(self, member: Member, first: asyncio.Future[dict[str, Any]]) -> None:
        spec, policy = member.spec, self._policy(self._clock)
        files = Files(self.log_path(spec.name), self.run_dir / "ready" / f"{spec.name.replace('/', '-')}.json")
        files.ready.parent.mkdir(parents=True, exist_ok=True)
        pinned: tuple[str, ...] = ()
        awaited: tuple[str, ...] = ()
        while True:
            flags = (*(awaited or pinned), "--ready-file", str(files.ready), "--die-with-parent")
            member.started_s = self._clock.monotonic()
            process = Process.start((*self._program, *spec.arguments, *flags), files, spec.environ())
            member.process = process
            member.starts += 1
            self._guard(member)
            self._set(member, State.STARTING)
            code: int | None = None
            served = False
            try:
                member.ready = await process.ready(spec.ready_timeout_s)
            except ProcessEndedError as error:
                code, why = error.code, str(error)
                process.signal_group(signal.SIGKILL)
            except TimeoutError:
                why = f"was not ready after {spec.ready_timeout_s:g} s"
                await process.stop(0.5)
            else:
                member.detail = spec.describe(member.ready)
                self._set(member, State.READY, f"{spec.name} is ready again: {member.detail}" if first.done() else "")
                if not first.done():
                    pinned = spec.pin(member.ready)
                    first.set_result(member.ready)
                served, awaited = True, ()
                code = await process.wait()
                why = end_text(code)
            if not first.done():
                self._set(member, State.FAILED)
                first.set_exception(StartFailedError(spec.name, why, process.tail(TAIL_LINES), files.log, code or 1))
                first.exception()  # retrieved: nobody waits for it any more if the launch was cancelled
                return
            if code == 0 and spec.may_leave:
                self._set(member, State.STOPPED, f"{spec.name} left (code 0); it is not restarted")
                return
            if served and code == RESTART_EXIT_CODE:
                self._set(member, State.RESTARTING, f"{spec.name} was asked to restart")
                awaited = spec.pin(member.ready)
                continue
            delay_s = policy.after_end()
            self._report_end(member, process, why, delay_s, looping=policy.looping)
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)

    def _guard(self, member: Member) -> None:
        """Have its process group ended should this process be killed; one that it replaces has left nothing."""
        if self._guardian is None or member.process is None:
            return
        if member.guarded:
            self._guardian.forget(member.guarded)
        member.guarded = member.process.pid
        self._guardian.watch(member.guarded, member.spec.stop_grace_s)

    def _report_end(self, member: Member, process: Process, why: str, delay_s: float | None, *, looping: bool) -> None:
        name = member.spec.name
        last = [f"  {text}" for text in process.tail(TAIL_LINES)]
        lines = [f"{name} {why}; its last lines:", *last] if self._own_logs else [f"{name} {why}"]
        if delay_s is None:
            log = self.log_path(name)
            lines.append(f"{name} keeps ending: it stays down" + (f". Log: {log}" if log is not None else ""))
            self._set(member, State.FAILED, "\n".join(lines))
        elif looping:
            lines.append(f"{name} keeps ending: the next try is in {delay_s:.0f} s")
            self._set(member, State.CRASH_LOOP, "\n".join(lines))
        else:
            lines.append(f"{name} restarts in {delay_s:.1f} s")
            self._set(member, State.RESTARTING, "\n".join(lines))

    async def _stop(self, member: Member) -> None:
        if member.task is not None:
            member.task.cancel()
            await asyncio.wait({member.task})
            if not member.task.cancelled() and (fault := member.task.exception()) is not None:
                self._on_change(member, f"{member.spec.name}: internal error ({type(fault).__name__}: {fault})")
        if member.process is None or member.state in (State.FAILED, State.STOPPED):
            return
        member.started_s = self._clock.monotonic()  # from here on, seconds are those of stopping
        self._set(member, State.STOPPING)
        in_time = await member.process.stop(member.spec.stop_grace_s)
        if self._guardian is not None:
            self._guardian.forget(member.guarded)
        text = "" if in_time else f"{member.spec.name} did not stop within {member.spec.stop_grace_s:g} s: killed"
        self._set(member, State.STOPPED, text)

    def _set(self, member: Member, state: State, text: str = "") -> None:
        member.state = state
        member.since_s = self._clock.monotonic()
        self._on_change(member, text)
