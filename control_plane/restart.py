"""RestartStage: the replicas of a stage are drained, and started anew by their launchers, a few at a time.

What a step waits for is what the table shows: the claim gone, then another instance READY under the same id. So it
works whichever control planes the workers beat at, and whoever starts them again. One restart of a stage runs at a
time (``restart_lock``). What a call leaves behind for its repeats is in etcd: when the request was first made, which
tells what is older and still to be restarted, and a note about each replica that it drained.

Guarantees: no more than ``max_unavailable`` replicas are away because of this, repeats of a request included; no
replica is restarted twice by one request; after a failure nothing further is begun. Not guaranteed: that a launcher
starts anything; a replica that does not come back is the failure.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from control_plane import codec, drains, states, validate
from control_plane.admin import MAX_DEADLINE_S, Admin
from control_plane.answers import Answer, check_request_id, log_fields
from control_plane.changes import Change, ReplicaRow
from control_plane.etcd import EtcdClient, WriteOutcomeUnknown
from control_plane.keys import StageKey
from control_plane.plans import find_stage, require_revision
from control_plane.restart_lock import RestartLock
from control_plane.table import Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.durations import to_seconds
from omnicore.errors import (
    ConflictError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    OmniError,
    UnavailableError,
)
from omnicore.log import get_logger

_log = get_logger(__name__)

READY_TIMEOUT_S: Final = 600.0
# Beyond its limit a worker needs a beat to hear of it, time to cut off what still runs, and some to close its engine.
_LEAVE_MARGIN_S: Final = 60.0
_RESUMABLE_S: Final = 86_400  # a restart of many replicas takes hours
_MAX_UNAVAILABLE: Final = 10_000


@dataclasses.dataclass(slots=True)
class _Run:
    """One call."""

    request: pb.RestartStageRequest
    stage: StageKey
    lock: RestartLock
    rows: list[ReplicaRow]
    """To be restarted."""
    away: list[ReplicaRow]
    """Drained by an earlier try of this request, and not back yet; with no more in the record than is known of them."""
    steps: collections.deque[pb.RestartStageResponse] = dataclasses.field(default_factory=collections.deque)
    """Not told yet."""
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when there are steps to tell."""
    done: int = 0
    total: int = 0
    failure: OmniError | None = None


class Restarts:
    """The rolling restarts that this control plane conducts."""

    def __init__(self, client: EtcdClient, table: Table, verbs: Admin, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._table = table
        self._verbs = verbs
        self._clock = clock
        self._closed = asyncio.Event()
        self._waiting: set[asyncio.Event] = set()
        table.on_change(self._on_change)

    def close(self) -> None:
        """End all of them with UNAVAILABLE: this control plane stops."""
        self._closed.set()

    async def restart(self, request: pb.RestartStageRequest) -> AsyncGenerator[pb.RestartStageResponse, None]:
        """Conduct one restart. Raises as the proto says; ending the generator stops it."""
        _check(request)
        self._table.require_loaded()
        stage = validate.stage_key(request.stage)
        await find_stage(self._client, self._table, stage)
        async with RestartLock(self._client, self._table.keys, stage, request.request_id, request.reason) as lock:
            # Whoever registered before is in the table then.
            await require_revision(self._table, lock.locked_at)
            since = await self._since(request, lock.locked_at)
            rows = [row for row in self._table.stage_rows(stage) if row.epoch <= since]
            # The sick ones first: if they do not come back, no healthy one has been touched.
            rows.sort(key=lambda row: (states.is_routable(row.replica), row.key.replica_id))
            run = _Run(request, stage, lock, rows, await self._away(request, stage))
            _log.info(
                "stage restarts",
                stage=stage,
                replicas=len(rows),
                reason=request.reason[:200],
                **log_fields(request.request_id),
            )
            async with contextlib.aclosing(self._run(run)) as steps:
                async for step in steps:
                    yield step

    async def _run(self, run: _Run) -> AsyncGenerator[pb.RestartStageResponse, None]:
        conductor = asyncio.create_task(self._conduct(run), name=f"restart {run.stage}")
        ends: set[asyncio.Task[None]] = {
            asyncio.create_task(run.lock.keep(), name="restart-lock"),
            asyncio.create_task(self._stopping(), name="restart-stop"),
        }
        try:
            async with contextlib.aclosing(_until_done(run, conductor, ends)) as steps:
                async for step in steps:
                    yield step
            if run.failure is not None:
                raise run.failure
            yield self._step(run, pb.RESTART_STEP_FINISHED)
        finally:
            for task in (conductor, *ends):
                task.cancel()
            await asyncio.wait({conductor, *ends})

    # ---- the plan

    async def _conduct(self, run: _Run) -> None:
        left_alone = {row.key: why for row in run.rows if (why := _left_alone(row.replica))}
        run.total = len(run.rows) - len(left_alone) + len(run.away)
        away = f", {len(run.away)} of them away already" if run.away else ""
        planned = f"{run.total} of {len(run.rows) + len(run.away)} replicas{away}"
        self._tell(run, pb.RESTART_STEP_PLANNED, detail=planned)
        for row in run.rows:
            if row.key in left_alone:
                self._tell(run, pb.RESTART_STEP_SKIPPED, row, left_alone[row.key])
        places = asyncio.Semaphore(run.request.max_unavailable or 1)

        async def one(step: Callable[[_Run, ReplicaRow], Awaitable[None]], row: ReplicaRow) -> None:
            try:
                await step(run, row)
            except OmniError as error:
                run.failure = run.failure or error
                self._tell(run, pb.RESTART_STEP_FAILED, row, error.message)
            finally:
                places.release()

        async with asyncio.TaskGroup() as tasks:
            # Those that are away take their places first.
            todo = [(self._await_first, row) for row in run.away]
            todo += [(self._restart_one, row) for row in run.rows if row.key not in left_alone]
            for step, row in todo:
                await places.acquire()
                if run.failure is not None:
                    return
                tasks.create_task(one(step, row), name=f"restart {row.key}")

    async def _restart_one(self, run: _Run, row: ReplicaRow) -> None:
        request, began_s = run.request, self._clock.monotonic()
        order = types_pb2.DrainOrder(restart=True, reason=request.reason or "rolling restart")
        if request.HasField("drain_deadline"):
            order.limit.CopyFrom(request.drain_deadline)
        try:
            # Fenced: once a repeat has taken over, nothing of ours has an effect any more.
            record = await self._verbs.drain_for_restart(
                row.replica.ref, order, request_id=request.request_id, only_if=run.lock.fence, unless=_left_alone
            )
        except FailedPreconditionError as error:
            self._skip(run, row, error.message)
            return
        except (NotFoundError, ConflictError):
            await run.lock.check()
            note = await self._drain_note(row)
            if note is not None and note.for_restart and note.request_id == request.request_id:
                await self._await_first(run, row)  # the try before drained it, and it left a moment ago
                return
            # It left on its own since the plan was made: what it was has gone, and somebody starts it or does not.
            self._skip(run, row, "it left meanwhile")
            return
        self._tell(run, pb.RESTART_STEP_DRAINING, row)
        limit_s = drains.limit_s(record) + _LEAVE_MARGIN_S
        await self._until(lambda: not self._restarts(row), limit_s, _not_left(row, limit_s))
        if why := await self._gone_for_good(row):
            self._skip(run, row, why)
            return
        self._tell(run, pb.RESTART_STEP_LEFT, row, f"after {self._clock.monotonic() - began_s:.1f} s")
        await self._await_back(run, row, began_s)

    async def _await_first(self, run: _Run, row: ReplicaRow) -> None:
        self._tell(run, pb.RESTART_STEP_LEFT, row, "in an earlier try of this request")
        await self._await_back(run, row, self._clock.monotonic())

    async def _await_back(self, run: _Run, row: ReplicaRow, began_s: float) -> None:
        ready_s = to_seconds(run.request.ready_timeout) or READY_TIMEOUT_S
        try:
            await self._until(lambda: self._successor(row) is not None, ready_s, None)
        except TimeoutError:
            raise self._not_back(row, ready_s) from None
        run.done += 1
        detail = f"after {self._clock.monotonic() - began_s:.1f} s"
        self._tell(run, pb.RESTART_STEP_READY, row, detail, self._successor(row))

    def _skip(self, run: _Run, row: ReplicaRow, why: str) -> None:
        run.total -= 1
        self._tell(run, pb.RESTART_STEP_SKIPPED, row, why)

    # ---- what the table shows

    def _restarts(self, row: ReplicaRow) -> bool:
        """Whether it is there still, on its way to its restart."""
        now = self._table.replica(row.key)
        return (
            now is not None
            and now.replica.instance_uuid == row.replica.instance_uuid
            # A table that has not heard of the drain yet shows another state.
            and (now.replica.drain.restart or now.replica.state != states.DRAINING)
        )

    async def _gone_for_good(self, row: ReplicaRow) -> str:
        """Why nobody is to take the place of one that was on its way to its restart; empty if somebody is."""
        if await self._client.get(self._table.keys.eviction(row.replica.instance_uuid)) is not None:
            return "it was evicted meanwhile"
        note = await self._drain_note(row)
        return "" if note is None or note.for_restart else "it was drained for good meanwhile"

    async def _drain_note(self, row: ReplicaRow) -> drains.DrainNote | None:
        kv = await self._client.get(self._table.keys.drain(row.replica.instance_uuid))
        return None if kv is None else drains.decode(self._table.keys, kv)

    def _successor(self, row: ReplicaRow) -> ReplicaRow | None:
        now = self._table.replica(row.key)
        if now is None or now.replica.instance_uuid == row.replica.instance_uuid:
            return None
        return now if now.replica.state == states.READY and not now.replica.suspect else None

    async def _until(self, condition: Callable[[], bool], limit_s: float, error: OmniError | None) -> None:
        changed = asyncio.Event()
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            if error is None:
                raise
            raise error from None
        finally:
            self._waiting.discard(changed)

    def _on_change(self, change: Change) -> None:
        if change.replicas or change.replicas_gone or change.reset:
            for changed in self._waiting:
                changed.set()

    def _not_back(self, row: ReplicaRow, limit_s: float) -> DeadlineExceededError:
        now = self._table.replica(row.key)
        state = "no process has registered" if now is None else f"its successor is {states.name(now.replica.state)}"
        return DeadlineExceededError(
            f"replica {row.key} left, and is not back within {limit_s:g} s ({state}): is it under a supervisor that "
            "starts it again? The rest of the stage was not touched: with the same request_id this goes on, with "
            "another one it begins anew",
            reason="RESTART_NOT_BACK",
            metadata={"replica": row.key, "host": row.replica.placement.host, "waited_s": f"{limit_s:g}"},
        )

    # ---- telling

    def _tell(
        self,
        run: _Run,
        step: pb.RestartStep.ValueType,
        row: ReplicaRow | None = None,
        detail: str = "",
        successor: ReplicaRow | None = None,
    ) -> None:
        run.steps.append(self._step(run, step, row, detail, successor))
        run.news.set()
        if row is not None:
            name = pb.RestartStep.Name(step).removeprefix("RESTART_STEP_").lower()
            _log.info("restart step", step=name, replica=row.key, epoch=row.epoch, detail=detail)

    def _step(
        self,
        run: _Run,
        step: pb.RestartStep.ValueType,
        row: ReplicaRow | None = None,
        detail: str = "",
        successor: ReplicaRow | None = None,
    ) -> pb.RestartStageResponse:
        return pb.RestartStageResponse(
            step=step,
            replica=row.replica.ref if row is not None else None,
            successor=successor.replica.ref if successor is not None else None,
            done=run.done,
            total=run.total,
            detail=detail,
            revision=self._table.revision,
        )

    # ---- one at a time, and again

    async def _since(self, request: pb.RestartStageRequest, now: int) -> int:
        """The revision that claims must be older than: that of the first call with this request id, or ``now``."""
        kind = pb.RestartStageResponse
        async with Answer(
            self._client, self._table.keys, "RestartStage", request.request_id, request, kind, kept_s=_RESUMABLE_S
        ) as answer:
            while True:
                known, _ = await answer.look()
                if known is not None:
                    return int(known.revision)
                if not answer.conditions:
                    return now
                with contextlib.suppress(WriteOutcomeUnknown):
                    result = await self._client.txn(answer.conditions, answer.ops(kind()))
                    if result.succeeded:
                        return result.revision

    async def _away(self, request: pb.RestartStageRequest, stage: StageKey) -> list[ReplicaRow]:
        """Who was drained by an earlier try of this request and has no successor that is READY."""
        if not request.request_id:
            return []
        keys, away = self._table.keys, []
        for kv in (await self._client.get_prefix(keys.drains)).kvs:
            note = drains.decode(keys, kv)
            ours = note is not None and note.for_restart and note.request_id == request.request_id
            if note is None or not ours or note.key.stage != stage:
                continue
            ref = codec.replica_ref(note.key, note.epoch)
            row = ReplicaRow(note.key, types_pb2.Replica(ref=ref, instance_uuid=note.instance_uuid), kv.mod_revision, 0)
            now = self._table.replica(note.key)
            # One that still drains is in the plan.
            there = now is not None and now.replica.instance_uuid == note.instance_uuid
            if not there and self._successor(row) is None and not self._table.is_evicted(note.instance_uuid):
                away.append(row)
        return away

    async def _stopping(self) -> None:
        await self._closed.wait()
        raise UnavailableError(
            "this control plane is stopping; repeat with the same request id at another one to go on",
            reason="STOPPING",
            retry_after_s=0.0,
        )


async def _until_done(
    run: _Run, conductor: asyncio.Task[None], ends: set[asyncio.Task[None]]
) -> AsyncGenerator[pb.RestartStageResponse, None]:
    """The steps until the conductor is done; raises what ended it, or what one of ``ends`` raises first."""
    while True:
        run.news.clear()
        while run.steps:
            yield run.steps.popleft()
        for task in (conductor, *ends):
            if task.done():
                task.result()
        if conductor.done() and not run.steps:
            return
        news = asyncio.create_task(run.news.wait())
        try:
            await asyncio.wait({news, conductor, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()


def _left_alone(replica: types_pb2.Replica) -> str:
    """Why a replica is not restarted; empty if it is."""
    if replica.cordoned:
        return "it is cordoned, which a new process would not be: uncordon it first"
    if replica.state == states.DRAINING and not replica.drain.restart:
        return "it is draining for good"
    return ""


def _not_left(row: ReplicaRow, limit_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"replica {row.key} was told to drain and has not left after {limit_s:g} s: evict it if it hangs",
        reason="RESTART_NOT_BACK",
        metadata={"replica": row.key, "host": row.replica.placement.host, "waited_s": f"{limit_s:g}"},
    )


def _check(request: pb.RestartStageRequest) -> None:
    faults = validate.Faults()
    validate.stage_ref(faults, "stage", request.stage, present=request.HasField("stage"))
    if request.max_unavailable > _MAX_UNAVAILABLE:
        faults.add("max_unavailable", f"must be 0 to {_MAX_UNAVAILABLE}, got {request.max_unavailable}")
    validate.duration(faults, "drain_deadline", request.drain_deadline, MAX_DEADLINE_S)
    if request.HasField("ready_timeout"):
        validate.duration(faults, "ready_timeout", request.ready_timeout, MAX_DEADLINE_S, above_0=True)
    check_request_id(faults, request.request_id)
    faults.raise_if_any()
