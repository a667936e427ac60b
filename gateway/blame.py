"""What the failures of a request's calls mean together: who is to blame, who only follows, and which replica all of it
comes from. ``failures`` tells what a single error says; here it is seen beside what its neighbours did."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from gateway import failures
from gateway.replica_table import Claim
from gateway.request import RequestSpec
from gateway.router import Router
from gateway.stage_work import StageRun, StageWork
from omni.v1 import types_pb2
from omnicore import errors


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A call, and why it ended."""

    run: StageRun
    error: errors.OmniError


class Blame:
    """Of one request, whose ``works`` are its stages."""

    def __init__(self, spec: RequestSpec, works: Mapping[int, StageWork], router: Router) -> None:
        self.tried: set[Claim] = set()
        """Instances that failed at this request and still take others."""
        self._spec = spec
        self._works = works
        self._router = router

    def has_lost_its_peer(self, error: errors.OmniError) -> bool:
        """It is about data of a replica that is gone: whatever it says, this is why."""
        peer = error.metadata.get("peer_stage", "")
        work = self._works.get(int(peer)) if peer.isdigit() else None
        return work is not None and any((run.ended and not run.finished) or not run.readable for run in work.runs)

    def needs_budget(self, failure: Failure) -> bool:
        """What is begun again for it could be begun again for every request."""
        return failures.needs_budget(failure.error) and not self._follows(failure)

    def neighbour_fails(self, failed: Sequence[Failure]) -> bool:
        """A stage that one of ``failed`` names has not failed itself yet."""
        for failure in failed:
            named = failures.waits_for(failure.error)
            work = self._works.get(named) if named is not None else None
            if work is not None and work is not failure.run.work and any(not run.ended for run in work.runs):
                return True
        return False

    def take_in(self, failed: Sequence[Failure]) -> set[Claim]:
        """Note what the failures say; returns the instances not to use again for this request."""
        for failure in failed:
            work = failure.run.work
            if failure.error.reason == failures.RESUME_UNSUPPORTED:
                work.resume_refused = True
            if failures.is_data_gone(failure.error):
                for producer in self._producers_named(failure):
                    producer.data_gone = True
            unreachable = failures.unreachable_producer(failure.error)
            if unreachable is not None and unreachable in self._works:
                self._note_unreachable(self._works[unreachable])
            lost = failures.lost_producer(failure.error)
            if lost is not None and lost in self._works and not self._works[lost].finished:
                for run in self._works[lost].runs:
                    run.abort()
        culprits = set(self._culprits(failed))
        self.tried |= culprits
        return culprits

    def needs_the_only_one(self, culprits: Iterable[Claim], again: Collection[int]) -> bool:
        """One of ``culprits`` goes on answering and has no other beside it, so waiting would change nothing. ``again``:
        the stages that start again; none: all."""
        return any((not again or claim[1] in again) and not self._has_alternative(claim) for claim in culprits)

    def lost(self, failed: Sequence[Failure]) -> types_pb2.ReplicaRef:
        """The replica that all of it comes from: its consumers may be the first to notice, or the only ones."""
        own = next((failure for failure in failed if failures.missed_producer(failure.error) is None), None)
        if own is not None:
            return own.run.ref
        producer = self._works.get(failures.missed_producer(failed[0].error) or 0)
        return producer.run.ref if producer is not None and producer.runs else failed[0].run.ref

    def _follows(self, failure: Failure) -> bool:
        """A consumer, itself well, could not read from a producer that has failed as well."""
        error = failure.error
        if not failures.needs_budget(error) or failures.lost_producer(error) is not None:
            return False
        return self.has_lost_its_peer(error)

    def _note_unreachable(self, work: StageWork) -> None:
        """A consumer cannot reach where ``work`` has finished: its replica owes nobody a sign of life, so nobody else
        would notice. It is asked once more, since what is made again may come out differently, unless its heartbeats
        say the same."""
        if work.finished and work.runs:
            work.unreachable += 1
            if work.unreachable > 1 or not self._router.is_well(work.run.assignment.slot.claim):
                work.data_gone = True

    def _producers_named(self, failure: Failure) -> list[StageWork]:
        producers = [self._works[edge.from_stage] for edge in failure.run.work.step.inputs]
        peer = failure.error.metadata.get("peer_stage", "")
        return [work for work in producers if str(work.stage_id) == peer] or producers

    def _culprits(self, failed: Sequence[Failure]) -> Iterable[Claim]:
        """Instances that take requests but failed at this one. Who is gone needs no mention: nobody is sent there."""
        claims = {work.stage_id: work.run.assignment.slot.claim for work in self._works.values() if work.runs}
        if any(not self._router.is_routable(claim) for claim in claims.values()):
            failed = [failure for failure in failed if failures.needs_budget(failure.error)]
        for failure in failed:
            if failures.costs_no_try(failure.error) or self._follows(failure):
                continue
            blamed = failures.blamed_stage(failure.error)
            claim = claims.get(blamed) if blamed is not None else None
            if claim is None:
                claim = failure.run.assignment.slot.claim
            # Whom only a connection failed may be tried again where there is nobody else.
            must_go = failures.needs_budget(failure.error)
            if self._router.is_routable(claim) and (must_go or self._has_alternative(claim)):
                yield claim

    def _has_alternative(self, claim: Claim) -> bool:
        """Another replica of its stage takes requests, and has not failed at this one. Of a strict session, none."""
        spec = self._spec
        if self._router.is_strict(spec.graph.name, spec.session_id, spec.strict_session):
            return False
        pool = self._router.pools.get(claim[:2])
        return pool is not None and any(
            slot.view.routable and slot.claim != claim and slot.claim not in self.tried for slot in pool.slots.values()
        )
