"""RestartStage: the replicas of a stage are drained, and started anew by their launchers, a few at a time.

What a step waits for is what the table shows: the claim gone, then another instance READY under the same id. So it
works whichever control planes the workers beat at, and whoever starts them again. One restart of a stage runs at a
time: a key in etcd says so, under a lease that lives as long as the call.

Guarantees: no more than ``max_unavailable`` replicas are away because of this; after a failure nothing further is
begun. Not guaranteed: that a launcher starts anything; a replica that does not come back is the failure.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

from control_plane import codec, states, validate
from control_plane.admin import MAX_DEADLINE_S, Admin, check_deadline
from control_plane.answers import Answer, check_request_id, log_fields
from control_plane.etcd import (
    EtcdClient,
    KeyValue,
    LeaseLost,
    WriteOutcomeUnknown,
    create_revision_is,
    mod_revision_is,
    op_get,
    op_put,
)
from control_plane.keys import StageKey
from control_plane.plans import find_stage, require_revision
from control_plane.records import found
from control_plane.table import Change, ReplicaRow, Table
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.durations import to_seconds
from omnicore.errors import ConflictError, DeadlineExceededError, NotFoundError, OmniError, UnavailableError
from omnicore.log import get_logger

_log = get_logger(__name__)

READY_TIMEOUT_S: Final = 600.0
# Beyond its deadline a worker needs a beat to hear of it and a moment to close.
_LEAVE_MARGIN_S: Final = 60.0
# Without a deadline the worker's own limit holds, which is not known here; the default is 30 s.
_LEAVE_TIMEOUT_S: Final = 3600.0
_LOCK_TTL_S: Final = 15
_LOCK_CHECK_S: Final = 2.0
_RESUMABLE_S: Final = 86_400  # a restart of many replicas takes hours
_MAX_UNAVAILABLE: Final = 10_000


@dataclasses.dataclass(slots=True)
class _Run:
    """One call."""

    request: pb.RestartStageRequest
    stage: StageKey
    rows: list[ReplicaRow]
    lease_id: int
    """Of the lock."""
    locked_at: int
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
        async with self._lock(stage, request) as (lease_id, locked_at):
            since = await self._since(request, locked_at)
            rows = [row for row in self._table.stage_rows(stage) if row.epoch <= since]
            # The sick ones first: if they do not come back, no healthy one has been touched.
            rows.sort(key=lambda row: (states.is_routable(row.replica), row.key.replica_id))
            run = _Run(request, stage, rows, lease_id, locked_at)
            _log.info(
                "stage restarts",
                stage=stage,
                replicas=len(rows),
                reason=request.reason[:200],
                **log_fields(request.request_id),
            )
            conductor = asyncio.create_task(self._conduct(run), name=f"restart {stage}")
            ends: set[asyncio.Task[None]] = {
                asyncio.create_task(self._keep(run), name="restart-lock"),
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
        left_alone = {row.key: why for row in run.rows if (why := _left_alone(row))}
        run.total = len(run.rows) - len(left_alone)
        self._tell(run, pb.RESTART_STEP_PLANNED, detail=f"{run.total} of {len(run.rows)} replicas")
        for row in run.rows:
            if row.key in left_alone:
                self._tell(run, pb.RESTART_STEP_SKIPPED, row, left_alone[row.key])
        places = asyncio.Semaphore(run.request.max_unavailable or 1)

        async def one(row: ReplicaRow) -> None:
            try:
                if run.failure is None:
                    await self._one(run, row)
            except OmniError as error:
                run.failure = run.failure or error
                self._tell(run, pb.RESTART_STEP_FAILED, row, error.message)
            finally:
                places.release()

        async with asyncio.TaskGroup() as tasks:
            for row in run.rows:
                await places.acquire()
                if run.failure is not None:
                    return
                if row.key in left_alone:
                    places.release()
                else:
                    tasks.create_task(one(row), name=f"restart {row.key}")

    async def _one(self, run: _Run, row: ReplicaRow) -> None:
        request, began_s = run.request, self._clock.monotonic()
        order = types_pb2.DrainOrder(restart=True, reason=request.reason or "rolling restart")
        if request.HasField("drain_deadline"):
            order.limit.CopyFrom(request.drain_deadline)
        try:
            # Fenced: once a repeat has taken over, nothing of ours has an effect any more.
            fence = mod_revision_is(self._table.keys.restart(run.stage), run.locked_at)
            await self._verbs.drain_for_restart(row.replica.ref, order, fence)
        except (NotFoundError, ConflictError):
            await self._check_lock(run)
            # It left on its own since the plan was made: what it was has gone, and somebody starts it or does not.
            run.total -= 1
            self._tell(run, pb.RESTART_STEP_SKIPPED, row, "it left meanwhile")
            return
        self._tell(run, pb.RESTART_STEP_DRAINING, row)
        limit_s = _LEAVE_TIMEOUT_S
        if request.HasField("drain_deadline"):
            limit_s = to_seconds(request.drain_deadline) + _LEAVE_MARGIN_S
        await self._until(lambda: not self._holds(row), limit_s, _not_left(row, limit_s))
        left_s = self._clock.monotonic()
        self._tell(run, pb.RESTART_STEP_LEFT, row, f"after {left_s - began_s:.1f} s")
        ready_s = to_seconds(request.ready_timeout) or READY_TIMEOUT_S
        try:
            await self._until(lambda: self._successor(row) is not None, ready_s, None)
        except TimeoutError:
            raise self._not_back(row, ready_s) from None
        successor = self._successor(row)
        run.done += 1
        detail = f"after {self._clock.monotonic() - began_s:.1f} s"
        self._tell(run, pb.RESTART_STEP_READY, row, detail, successor)

    # ---- what the table shows

    def _holds(self, row: ReplicaRow) -> bool:
        now = self._table.replica(row.key)
        return now is not None and now.replica.instance_uuid == row.replica.instance_uuid

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
            "starts it again? The rest of the stage was not touched; repeat with the same request id to go on",
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

    @contextlib.asynccontextmanager
    async def _lock(self, stage: StageKey, request: pb.RestartStageRequest) -> AsyncIterator[tuple[int, int]]:
        """Hold the stage, by a lease that ``_keep`` must keep meanwhile. Gives that, and the revision since when."""
        path = self._table.keys.restart(stage)
        lease = await self._client.grant_lease(_LOCK_TTL_S)
        try:
            note = codec.encode_note(request_id=request.request_id, reason=request.reason[:1000])
            locked_at = await self._take_lock(stage, path, note, lease.lease_id, request.request_id)
            # Whoever registered before is in the table then.
            await require_revision(self._table, locked_at)
            yield lease.lease_id, locked_at
        finally:
            try:
                await self._client.revoke_lease(lease.lease_id)
            except OmniError as error:
                _log.warning("lease left to run out", lease=f"{lease.lease_id:x}", error=error)

    async def _take_lock(self, stage: StageKey, path: str, note: bytes, lease_id: int, request_id: str) -> int:
        """Take the lock, also from an earlier call of the same request: its control plane may have died with it."""
        condition = create_revision_is(path, 0)
        while True:
            try:
                result = await self._client.txn([condition], [op_put(path, note, lease_id)], [op_get(path)])
            except WriteOutcomeUnknown:
                continue
            holder = None if result.succeeded else found(result)
            if result.succeeded or (holder is not None and holder.lease_id == lease_id):
                return result.revision if holder is None else holder.mod_revision
            if holder is None:
                condition = create_revision_is(path, 0)
            elif _is_of(holder, request_id):
                condition = mod_revision_is(path, holder.mod_revision)
            else:
                text = validate.shown(holder.value.decode(errors="replace"), 300)
                raise ConflictError(
                    f"stage {stage} is being restarted: {text}", reason="RESTART_RUNS", metadata={"stage": stage}
                )

    async def _check_lock(self, run: _Run) -> None:
        holder = await self._client.get(self._table.keys.restart(run.stage))
        if holder is None or holder.lease_id != run.lease_id:
            raise ConflictError(
                f"a repeat of this request has taken over the restart of stage {run.stage}",
                reason="RESTART_TAKEN_OVER",
                metadata={"stage": run.stage},
            )

    async def _keep(self, run: _Run) -> None:
        while True:
            await asyncio.sleep(_LOCK_CHECK_S)
            try:
                await self._client.refresh_lease(run.lease_id)
                await self._check_lock(run)
            except LeaseLost:
                raise UnavailableError(
                    f"etcd was away for too long: another restart of stage {run.stage} may have begun; "
                    "repeat with the same request id to go on",
                    reason="RESTART_LOCK_LOST",
                ) from None
            except UnavailableError as error:
                _log.warning("lock of a restart not refreshed", stage=run.stage, error=error)

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


def _is_of(holder: KeyValue, request_id: str) -> bool:
    """Whether a lock is to be taken over by this request: it is its own, or what a hand has left in its place."""
    try:
        of = codec.decode_note(holder.value).get("request_id")
    except codec.RecordError as error:
        _log.warning("unreadable lock of a restart is replaced", key=holder.key, error=error)
        return True
    return bool(request_id) and of == request_id


def _left_alone(row: ReplicaRow) -> str:
    """Why a replica is not restarted; empty if it is."""
    replica = row.replica
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
    check_deadline(faults, "drain_deadline", request.drain_deadline)
    ready_s = to_seconds(request.ready_timeout)
    if request.HasField("ready_timeout") and not 0 < ready_s <= MAX_DEADLINE_S:
        faults.add("ready_timeout", f"must be above 0 and at most {MAX_DEADLINE_S:g} s, got {ready_s:g} s")
    check_request_id(faults, request.request_id)
    faults.raise_if_any()
