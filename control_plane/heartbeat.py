"""Heartbeat streams: beats in, directives out; leases refreshed and records kept true on the replicas' behalf.

What a beat says is checked against the table, which is a mirror of etcd. A claim that the table does not know is
looked up in etcd before anybody is told to register again, so this works with an empty memory: after a restart, or
when a worker comes over from another control plane, the beat itself (claim, lease, instance) is all that is needed.

Leases are refreshed every third of their life and only by beats, so a hung engine loses its claim although its process
lives. Records are written by few workers from what the last beats said (``workqueue``): no beat waits for etcd, and
while etcd is away nothing piles up. Nothing is concluded from etcd being away: beats are answered with CONTINUE.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, NoReturn

from control_plane import codec, liveness, states, validate
from control_plane.beating import BeatingClaim, correct, differs, same_claim
from control_plane.changes import Change, ReplicaRow
from control_plane.etcd import EtcdClient, LeaseLost
from control_plane.keys import ReplicaKey
from control_plane.liveness import Liveness
from control_plane.records import Records
from control_plane.table import Table
from control_plane.workqueue import WorkQueue
from omni.v1 import registry_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.clock import SYSTEM_CLOCK, Clock
from omnicore.durations import to_duration
from omnicore.errors import ConflictError, InvalidRequestError, UnavailableError
from omnicore.log import get_logger

_log = get_logger(__name__)

CONTINUE: Final = pb.HEARTBEAT_DIRECTIVE_CONTINUE
REREGISTER: Final = pb.HEARTBEAT_DIRECTIVE_REREGISTER
DRAIN: Final = pb.HEARTBEAT_DIRECTIVE_DRAIN
STOP: Final = pb.HEARTBEAT_DIRECTIVE_STOP

_SWEEP_S: Final = 0.1
_RETRY_S: Final = 0.5  # after etcd failed
# Looking up a claim that the table does not know must not hold up the stream until it looks silent.
_LOOKUP_S: Final = 0.5
# Nor must waiting for a new state to be recorded: a few milliseconds while etcd is well.
_SETTLE_S: Final = 0.3
_WORKERS: Final = 32
# A suspicion that is written so long after the last beat, or later, may have been overtaken: this process or its way to
# etcd stood still, and the replica beats at another control plane by now.
_OLD_NEWS_S: Final = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class KnownPulse:
    """A replica that beats here: how long ago it last did, and how often it fell silent lately."""

    key: ReplicaKey
    epoch: int
    age_s: float
    suspect: bool
    suspicions: int


class Heartbeats:
    """All heartbeat streams of this process."""

    def __init__(
        self,
        client: EtcdClient,
        table: Table,
        records: Records,
        *,
        lease_ttl_s: float,
        interval_s: float = liveness.BASE_INTERVAL_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client = client
        self._table = table
        self._records = records
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._base_interval_s = interval_s
        self._claims: dict[ReplicaKey, BeatingClaim] = {}
        self._liveness = Liveness(clock.monotonic())
        self._refreshes: WorkQueue[ReplicaKey] = WorkQueue("lease", self._refresh, workers=_WORKERS)
        self._writes: WorkQueue[ReplicaKey] = WorkQueue("record", self._write, workers=_WORKERS)
        self._plain: tuple[float, int, pb.HeartbeatResponse] | None = None
        self._closing = False
        table.on_change(self._on_change)

    @property
    def interval_s(self) -> float:
        """How often a replica should beat at present, if its lease is long enough."""
        return self._interval_s(math.inf)

    def pulses(self) -> list[KnownPulse]:
        """What is heard of every replica that beats here, ordered by replica."""
        now_s = self._clock.monotonic()
        return [KnownPulse(p.key, p.epoch, now_s - p.beat_s, p.suspect, p.suspicions) for p in self._liveness.all()]

    async def run(self) -> NoReturn:
        """Refresh, write and notice silence, for ever; cancel it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refreshes.run(), name="leases")
            tasks.create_task(self._writes.run(), name="records")
            tasks.create_task(self._sweep(), name="sweep")
        raise AssertionError("unreachable")  # all three are endless

    def close(self) -> None:
        """From now on streams end because of us, which says nothing about the replicas."""
        self._closing = True

    async def stream(self, beats: AsyncIterator[pb.HeartbeatRequest]) -> AsyncGenerator[pb.HeartbeatResponse, None]:
        """One stream: one instance, though it may claim anew in between."""
        self._table.require_loaded()
        number = self._liveness.open_stream()
        last: pb.HeartbeatRequest | None = None
        key: ReplicaKey | None = None
        try:
            async for beat in beats:
                if key is None or last is None or not same_claim(beat, last):
                    validate.heartbeat_claim(beat)
                    if last is not None and beat.instance_uuid != last.instance_uuid:
                        raise InvalidRequestError.field(
                            "instance_uuid", f"this stream carries {last.instance_uuid}; open another one"
                        )
                    key, last = validate.replica_key(beat.replica), beat
                yield await self._beat(beat, key, number)
                if self._closing:
                    raise UnavailableError(
                        "this control plane is stopping; beat at another one", reason="STOPPING", retry_after_s=0.0
                    )
        finally:
            if key is not None and last is not None and not self._closing:
                self._ended(key, last.replica.epoch, number)

    def registered(self, key: ReplicaKey, epoch: int, lease_ttl_s: float) -> float:
        """A claim whose lease has just been granted or refreshed, so that its first beat need not do it again. Returns
        how often it should beat."""
        row = self._table.replica(key)
        if row is not None and row.epoch == epoch:  # or etcd's event is late: then the first beat refreshes the lease
            claim = self._claims.get(key)
            if claim is None or claim.epoch != epoch:
                claim = self._claims[key] = self._new_claim(row, lease_ttl_s)
            claim.lease_ttl_s = lease_ttl_s
            claim.refresh_due_s = self._clock.monotonic() + _refresh_after_s(lease_ttl_s)
        return self._interval_s(lease_ttl_s)

    def _new_claim(self, row: ReplicaRow, lease_ttl_s: float) -> BeatingClaim:
        return BeatingClaim(row.key, row.epoch, row.lease_id, row.replica.state, lease_ttl_s, self._clock.monotonic())

    def _interval_s(self, lease_ttl_s: float) -> float:
        return liveness.interval_s(len(self._liveness), self._base_interval_s, lease_ttl_s)

    # ---- one beat

    async def _beat(self, beat: pb.HeartbeatRequest, key: ReplicaKey, stream: int) -> pb.HeartbeatResponse:
        epoch = beat.replica.epoch
        order: types_pb2.DrainOrder | None = None
        lease_ttl_s: float = self._lease_ttl_s
        directive, detail = await self._verdict(beat, key, epoch)
        if directive == CONTINUE and (row := self._table.replica(key)) is not None and row.epoch == epoch:
            known = self._claims.get(key)
            before = known.state if known is not None and known.epoch == epoch else row.replica.state
            directive, detail = self._take(beat, row, stream)
            claim = self._claims[key]
            lease_ttl_s = claim.lease_ttl_s
            if claim.state != before:
                await self._settle(claim)
            if row.replica.HasField("drain"):
                order = row.replica.drain
        if directive == CONTINUE and not detail and order is None:
            return self._plain_answer(self._interval_s(lease_ttl_s), self._table.revision)
        return pb.HeartbeatResponse(
            directive=directive,
            next_interval=to_duration(self._interval_s(lease_ttl_s)),
            revision=self._table.revision,
            detail=detail,
            drain=order,
        )

    def _plain_answer(self, interval_s: float, revision: int) -> pb.HeartbeatResponse:
        """CONTINUE: nearly all beats get the same answer, which is made once."""
        if self._plain is None or self._plain[:2] != (interval_s, revision):
            response = pb.HeartbeatResponse(
                directive=CONTINUE, next_interval=to_duration(interval_s), revision=revision
            )
            self._plain = interval_s, revision, response
        return self._plain[2]

    async def _verdict(
        self, beat: pb.HeartbeatRequest, key: ReplicaKey, epoch: int
    ) -> tuple[pb.HeartbeatDirective.ValueType, str]:
        """Whether the claim in a beat is in force."""
        row = self._table.replica(key)
        if row is not None and row.epoch == epoch:
            return self._verdict_on_holder(beat, row)
        if self._table.is_evicted(beat.instance_uuid):
            return STOP, "an operator evicted this instance"
        if self._table.is_drained(beat.instance_uuid):
            # Its claim was lost meanwhile: it must not come back, but may finish.
            return DRAIN, "an operator drained this instance"
        if self._table.stale:
            return CONTINUE, "etcd is away: nothing is known about this claim"
        if row is not None and row.epoch > epoch:
            return _superseded(row.replica, beat)
        # The claim is newer than the table, or gone: only etcd knows.
        try:
            async with asyncio.timeout(_LOOKUP_S):
                kv = await self._records.read(key)
                if kv is not None and kv.create_revision == epoch:
                    codec.decode_replica(kv.value, key, epoch)
                    await self._table.wait_revision(kv.mod_revision, _LOOKUP_S)
                    return CONTINUE, ""
        except codec.RecordError as error:
            return REREGISTER, error.message  # the table would never have it
        except (TimeoutError, UnavailableError):
            return CONTINUE, "etcd does not answer: nothing is known about this claim"
        if kv is not None and kv.create_revision > epoch:
            try:
                return _superseded(codec.decode_replica(kv.value, key, kv.create_revision), beat)
            except codec.RecordError as error:
                return REREGISTER, error.message
        return REREGISTER, f"replica {key} has no claim with epoch {epoch}: its lease ended, or it was removed"

    def _verdict_on_holder(
        self, beat: pb.HeartbeatRequest, row: ReplicaRow
    ) -> tuple[pb.HeartbeatDirective.ValueType, str]:
        if row.replica.instance_uuid != beat.instance_uuid:
            return REREGISTER, f"replica {row.key} is held by another instance, {row.replica.instance_uuid}"
        if row.lease_id != beat.lease_id:
            return REREGISTER, f"replica {row.key} is not under lease {beat.lease_id}"
        claim = self._claims.get(row.key)
        if claim is not None and claim.epoch == row.epoch and claim.lost:
            return REREGISTER, f"the lease of replica {row.key} has ended"
        return CONTINUE, ""

    def _take(
        self, beat: pb.HeartbeatRequest, row: ReplicaRow, stream: int
    ) -> tuple[pb.HeartbeatDirective.ValueType, str]:
        """Take in what a valid claim says of itself."""
        now_s = self._clock.monotonic()
        claim = self._claims.get(row.key)
        if claim is None or claim.epoch != row.epoch:
            claim = self._claims[row.key] = self._new_claim(row, self._lease_ttl_s)
        interval_s = self._interval_s(claim.lease_ttl_s)
        known = self._liveness.get(row.key)
        was_suspect = known is not None and known.epoch == row.epoch and known.suspect
        pulse = self._liveness.beat(row.key, row.epoch, stream, interval_s, now_s)
        if known is not pulse and row.replica.suspect:
            self._liveness.recorded_suspect(pulse, now_s)
        if was_suspect and not pulse.suspect:
            _log.info("replica is back", replica=row.key, epoch=row.epoch)

        refused = self._take_report(beat, row, claim)
        if now_s + interval_s / 2 >= claim.refresh_due_s:  # this beat is nearer to it than the next one
            claim.refresh_due_s = now_s + claim.lease_ttl_s / 3
            self._refreshes.add(row.key)
        if row.spoiled or differs(row.replica, claim, pulse.suspect):
            claim.settled.clear()
            self._writes.add(row.key)

        if beat.state != states.DRAINING:
            if row.replica.state == states.DRAINING:
                return DRAIN, "; ".join(["an operator asked to drain this replica", *refused])
            if self._table.is_deleted(row.key.pipeline) and not self._table.stale:
                return DRAIN, "; ".join([f"pipeline {row.key.pipeline} was deleted", *refused])
        return CONTINUE, "; ".join(refused)

    def _take_report(self, beat: pb.HeartbeatRequest, row: ReplicaRow, claim: BeatingClaim) -> list[str]:
        """Load, connectors and state; returns what was refused of them, and why."""
        refused: list[str] = []
        if beat.HasField("load"):
            if fault := validate.load(beat.load):
                refused.append(f"INVALID_ARGUMENT: {fault}")
            else:
                self._table.set_load(row.key, row.epoch, beat.load)
        if beat.connectors:
            faults = validate.Faults()
            validate.connectors(faults, beat.connectors)
            if faults:
                refused.append(f"INVALID_ARGUMENT: {faults.text()}")
            else:
                claim.connectors = list(beat.connectors)
        if not states.is_state(beat.state):
            refused.append(f"INVALID_ARGUMENT: state: must be one of the four states, got {states.name(beat.state)}")
        elif states.may_become(claim.state, beat.state):
            claim.state = beat.state
        elif claim.state != states.DRAINING:
            refused.append(
                f"FAILED_PRECONDITION: state: {states.name(claim.state)} cannot become {states.name(beat.state)}"
            )
        return refused

    async def _settle(self, claim: BeatingClaim) -> None:
        """After a change of state, answer when it is recorded: who hears that READY was taken in is routable."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                await claim.settled.wait()
        except TimeoutError:
            _log.debug("state not recorded yet", replica=claim.key)

    # ---- keeping etcd true

    async def _write(self, key: ReplicaKey) -> float | None:
        """Make the record of a claim say what we know. Work queue handler."""
        claim, pulse = self._claims.get(key), self._liveness.get(key)
        if claim is None or pulse is None or pulse.epoch != claim.epoch:
            return None
        try:
            if pulse.suspect and await self._beats_elsewhere(claim, pulse):
                _log.info("replica beats at another control plane", replica=key, epoch=claim.epoch)
                self._liveness.forget(key, claim.epoch)
                self._claims.pop(key, None)
                return None
            written = await self._records.update(key, claim.epoch, lambda new: correct(new, claim, pulse.suspect))
            if written is not None:
                await self._table.wait_revision(written.revision)
            claim.settled.set()
        except LeaseLost:
            claim.lost = True
        except (UnavailableError, ConflictError) as error:
            _log.debug("record not written yet", replica=key, error=error)
            return _RETRY_S
        except codec.RecordError as error:
            _log.warning("record left alone: it is unreadable", replica=key, error=error)
        return None

    async def _beats_elsewhere(self, claim: BeatingClaim, pulse: liveness.Pulse) -> bool:
        """Whether somebody refreshed its lease after its last beat here: only beats do that."""
        # Where this process is starved from the first beat on, none is sure; before it knew the claim there was none.
        silent_s = self._clock.monotonic() - max(pulse.heard_s, claim.known_s)
        if silent_s < max(_OLD_NEWS_S, liveness.MISSED_BEATS * self.interval_s + 1.0):
            return False
        ttl = await self._client.lease_time_to_live(claim.lease_id)
        # Ours was refreshed at its last beat at the latest. etcd tells whole seconds.
        return ttl.ttl_s > ttl.granted_ttl_s - silent_s + 1.0

    async def _refresh(self, key: ReplicaKey) -> float | None:
        """Refresh the lease of a claim. Work queue handler; failures are repeated by later beats only."""
        claim = self._claims.get(key)
        if claim is None:
            return None
        asked_s = self._clock.monotonic()
        try:
            ttl_s = await self._client.refresh_lease(claim.lease_id)
        except LeaseLost:
            claim.lost = True
            _log.warning("lease lost: the replica will register again", replica=key, epoch=claim.epoch)
        except UnavailableError as error:
            claim.refresh_due_s = self._clock.monotonic() + min(_RETRY_S, self._lease_ttl_s / 6)
            _log.debug("lease not refreshed", replica=key, error=error)
        else:
            claim.lease_ttl_s = ttl_s
            claim.refresh_due_s = asked_s + _refresh_after_s(ttl_s)
        return None

    # ---- silence

    def _ended(self, key: ReplicaKey, epoch: int, stream: int) -> None:
        if self._liveness.broken(key, epoch, stream, self._clock.monotonic()) is not None:
            _log.info("replica suspect: its heartbeat stream ended", replica=key, epoch=epoch)
            self._writes.add(key)

    async def _sweep(self) -> NoReturn:
        while True:
            await asyncio.sleep(_SWEEP_S)
            for pulse in self._liveness.sweep(self._clock.monotonic()):
                _log.info("replica suspect: it missed its beats", replica=pulse.key, epoch=pulse.epoch)
                self._writes.add(pulse.key)

    def _on_change(self, change: Change) -> None:
        for row in change.replicas_gone:
            self._liveness.forget(row.key, row.epoch)
            claim = self._claims.get(row.key)
            if claim is not None and claim.epoch <= row.epoch:
                del self._claims[row.key]
        for row in change.replicas:
            pulse = self._liveness.get(row.key)
            if pulse is not None and pulse.epoch == row.epoch and row.replica.suspect and not pulse.suspect:
                # Another control plane lost sight of it, while it beats here.
                self._liveness.recorded_suspect(pulse, self._clock.monotonic())


def _refresh_after_s(ttl_s: float) -> float:
    """Around a third of its life: leases that fell due together, after a restart say, must not stay together."""
    return ttl_s * random.uniform(0.28, 0.38)


def _superseded(holder: types_pb2.Replica, beat: pb.HeartbeatRequest) -> tuple[pb.HeartbeatDirective.ValueType, str]:
    if holder.instance_uuid == beat.instance_uuid:
        return REREGISTER, f"this instance has a newer claim, with epoch {holder.ref.epoch}"
    return STOP, f"instance {holder.instance_uuid} holds this id under the newer epoch {holder.ref.epoch}"
