"""Who is alive, from beats and broken streams. Pure: time comes in as a parameter, decisions go out as values.

Ladder: beats arrive → alive. The stream breaks, or beats stay away for ``ladder_s`` → suspect, which gateways use only
as a last resort. The rest is not ours: a lease that nobody refreshes ends by itself, and etcd removes the claim.

Guarantees
* A replica is suspected at most once per silence, and trusted again only by beats.
* No flapping: the first return takes ``RETURN_BEATS`` beats in a row; each further one within ``FLAP_WINDOW_S`` takes
  twice as many, up to ``MAX_RETURN_BEATS``.
* If this process itself stood still (paused, starved, suspended), silence proves nothing: nobody is suspected until
  everyone had a full ladder of time to be heard again.

Not guaranteed: knowledge of replicas that beat at another control plane. Only replicas that beat here are watched, so
one that never beats is left to its lease.

A heap orders the deadlines. A beat only moves the deadline in its entry; the heap is corrected when the old deadline
comes up, so a beat costs O(1) and a replica O(log n) per ladder of silence, not per beat.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from typing import Final

from control_plane.keys import ReplicaKey

MISSED_BEATS: Final = 3
RETURN_BEATS: Final = 2
MAX_RETURN_BEATS: Final = 16
FLAP_WINDOW_S: Final = 60.0
# Between two sweeps; longer means that this process stood still. Far above the sweep period, below the shortest ladder.
STALL_S: Final = 0.5

BASE_INTERVAL_S: Final = 0.25  # 3 missed beats = 0.75 s, so a hang is unrouted well within 3 s
# A beat costs a control plane 0.3 to 0.4 ms of one core, most of it gRPC (docs/performance.md): beats may take less
# than half a core, so that registrations and watchers have the rest.
MAX_BEATS_PER_S: Final = 1_000.0
# Beats of a large fleet are seconds apart. A replica that is late by this much, or by half an interval, is as
# suspicious as one that missed two short ones; to wait for two long ones would only make a hang cost more.
MAX_LATE_S: Final = 1.5
# A refresh costs a control plane about as much as a beat. Leases keep the life that they were granted, so those of a
# fleet that has grown tenfold are refreshed three times as often as this.
MAX_REFRESHES_PER_S: Final = 100.0


def interval_s(replicas: int, base_s: float, lease_ttl_s: float) -> float:
    """How often each of ``replicas`` should beat: ``base_s`` while the fleet is small, then longer, so that the beats
    of all stay within ``MAX_BEATS_PER_S``. Never longer than a third of the replica's lease: only beats refresh it."""
    return min(max(base_s, replicas / MAX_BEATS_PER_S), max(base_s, lease_ttl_s / 3))


def ladder_s(interval_s: float) -> float:
    """The silence that makes suspect: three intervals, or less where those are long (see ``MAX_LATE_S``)."""
    return interval_s + min((MISSED_BEATS - 1) * interval_s, max(MAX_LATE_S, interval_s / 2))


def lease_ttl_s(replicas: int, base_s: int) -> int:
    """For how long a lease is granted in a fleet of ``replicas``: ``base_s`` while it is small, then longer, so that
    refreshing all of them at a third of their life stays near ``MAX_REFRESHES_PER_S``. Only how long a dead replica
    stays in the table depends on it: gateways leave it when it becomes suspect."""
    return max(base_s, round(3 * replicas / MAX_REFRESHES_PER_S))


@dataclasses.dataclass(slots=True, eq=False)
class Pulse:
    """What is known about the beats of one claim."""

    key: ReplicaKey
    epoch: int
    deadline_s: float
    stream: int
    heard_s: float = float("-inf")
    """When it surely beat last: beats that waited in a socket while this process stood still may be old."""
    beat_s: float = float("-inf")
    suspect: bool = False
    beats_in_row: int = 0
    suspicions: int = 0
    last_suspicion_s: float = float("-inf")
    in_heap: bool = False

    @property
    def beats_to_return(self) -> int:
        """Beats in a row that end a suspicion."""
        doublings = max(0, min(self.suspicions, 8) - 1)
        return min(RETURN_BEATS << doublings, MAX_RETURN_BEATS)


class Liveness:
    """The pulses of all replicas that beat here."""

    def __init__(self, now_s: float) -> None:
        self._pulses: dict[ReplicaKey, Pulse] = {}
        self._heap: list[tuple[float, int, Pulse]] = []
        self._tie = itertools.count()
        self._streams = itertools.count(1)
        self._last_sweep_s = now_s
        self._trust_until_s = float("-inf")
        self._ladder_s = ladder_s(BASE_INTERVAL_S)

    def __len__(self) -> int:
        return len(self._pulses)

    def get(self, key: ReplicaKey) -> Pulse | None:
        """The pulse of a replica that beats here."""
        return self._pulses.get(key)

    def all(self) -> list[Pulse]:
        """Every pulse, ordered by replica."""
        return [self._pulses[key] for key in sorted(self._pulses)]

    def open_stream(self) -> int:
        """A number for a new heartbeat stream; a later stream outranks earlier ones of the same claim."""
        return next(self._streams)

    def beat(self, key: ReplicaKey, epoch: int, stream: int, interval_s: float, now_s: float) -> Pulse:
        """Take note of a beat; the next one is due ``interval_s`` later. Clears suspicion after enough beats."""
        pulse = self._pulses.get(key)
        if pulse is None or pulse.epoch != epoch:
            pulse = self._pulses[key] = Pulse(key, epoch, 0.0, stream)
        pulse.stream = max(pulse.stream, stream)
        pulse.beats_in_row = pulse.beats_in_row + 1 if now_s <= pulse.deadline_s else 1
        self._ladder_s = ladder_s(interval_s)
        pulse.beat_s = now_s
        pulse.deadline_s = now_s + self._ladder_s
        if not self._awakes(now_s):
            pulse.heard_s = now_s
        if pulse.suspect and pulse.beats_in_row >= pulse.beats_to_return:
            pulse.suspect = False
        if not pulse.in_heap and not pulse.suspect:
            self._push(pulse)
        return pulse

    def recorded_suspect(self, pulse: Pulse, now_s: float) -> None:
        """The record says suspect, set by another control plane or before this one started, while the claim beats
        here: it has to earn its return like any other."""
        if not pulse.suspect:
            self._suspect(pulse, now_s)
            pulse.beats_in_row = 1

    def broken(self, key: ReplicaKey, epoch: int, stream: int, now_s: float) -> Pulse | None:
        """The stream ended. The pulse that is suspect by that; ``None`` if it already was, a newer stream has taken
        over, or the claim is gone. Not if this process stood still: the end may be old news, so silence decides."""
        pulse = self._pulses.get(key)
        if self._awakes(now_s) or pulse is None or pulse.epoch != epoch or pulse.stream != stream or pulse.suspect:
            return None
        self._suspect(pulse, now_s)
        return pulse

    def forget(self, key: ReplicaKey, epoch: int) -> None:
        """The claim is gone."""
        pulse = self._pulses.get(key)
        if pulse is not None and pulse.epoch <= epoch:
            del self._pulses[key]

    def sweep(self, now_s: float) -> list[Pulse]:
        """Those that became suspect by silence since the last sweep. Call several times a second."""
        stood_still = now_s - self._last_sweep_s > STALL_S
        self._last_sweep_s = now_s
        if stood_still:
            self._trust_until_s = now_s + self._ladder_s
        if now_s < self._trust_until_s:
            return []
        silent: list[Pulse] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, pulse = heapq.heappop(self._heap)
            pulse.in_heap = False
            if self._pulses.get(pulse.key) is not pulse or pulse.suspect:
                continue
            if pulse.deadline_s > now_s:
                self._push(pulse)
                continue
            self._suspect(pulse, now_s)
            silent.append(pulse)
        return silent

    def _awakes(self, now_s: float) -> bool:
        """True while what this process hears may be from before it stood still."""
        return now_s - self._last_sweep_s > STALL_S or now_s < self._trust_until_s

    def _push(self, pulse: Pulse) -> None:
        pulse.in_heap = True
        heapq.heappush(self._heap, (pulse.deadline_s, next(self._tie), pulse))

    def _suspect(self, pulse: Pulse, now_s: float) -> None:
        if now_s - pulse.last_suspicion_s > FLAP_WINDOW_S:
            pulse.suspicions = 0
        pulse.suspect = True
        pulse.suspicions += 1
        pulse.last_suspicion_s = now_s
        pulse.beats_in_row = 0
