from __future__ import annotations

import pytest

from control_plane.keys import ReplicaKey
from control_plane.liveness import (
    BASE_INTERVAL_S,
    FLAP_WINDOW_S,
    MAX_BEATS_PER_S,
    MAX_LATE_S,
    MAX_RETURN_BEATS,
    MISSED_BEATS,
    Liveness,
    Pulse,
    interval_s,
    ladder_s,
    lease_ttl_s,
)
from omnicore.clock import ManualClock

A, B = ReplicaKey("p", 0, 0), ReplicaKey("p", 0, 1)
INTERVAL_S = 0.25
TICK_S = 0.05


class World:
    """Replicas that beat on time unless told to be silent; swept as the service does."""

    def __init__(self, *keys: ReplicaKey) -> None:
        self.clock = ManualClock(100.0)
        self.liveness = Liveness(self.clock.monotonic())
        self.streams = {key: self.liveness.open_stream() for key in keys}
        self.silent: set[ReplicaKey] = set()
        self.suspected: list[ReplicaKey] = []

    def beat(self, key: ReplicaKey, epoch: int = 1) -> Pulse:
        return self.liveness.beat(key, epoch, self.streams[key], INTERVAL_S, self.clock.monotonic())

    def run(self, seconds: float) -> None:
        ticks = round(seconds / TICK_S)
        for tick in range(ticks):
            if tick % round(INTERVAL_S / TICK_S) == 0:
                for key in self.streams:
                    if key not in self.silent:
                        self.beat(key)
            self.clock.advance(TICK_S)
            self.suspected += [pulse.key for pulse in self.liveness.sweep(self.clock.monotonic())]

    def suspect(self, key: ReplicaKey) -> bool:
        pulse = self.liveness.get(key)
        assert pulse is not None
        return pulse.suspect


def test_who_beats_is_never_suspect() -> None:
    world = World(A, B)
    world.run(30)
    assert world.suspected == []


def test_three_missed_beats_and_not_before() -> None:
    world = World(A, B)
    world.run(1.0)
    world.silent.add(A)
    world.run(MISSED_BEATS * INTERVAL_S - 0.3)  # the last beat was one interval before
    assert world.suspected == []
    world.run(0.3)
    assert world.suspected == [A]
    world.run(5)
    assert world.suspected == [A], "once per silence"
    assert not world.suspect(B)


def test_return_takes_two_beats() -> None:
    world = World(A)
    world.run(1)
    world.silent.add(A)
    world.run(1)
    assert world.suspect(A)
    assert world.beat(A).suspect
    world.clock.advance(INTERVAL_S)
    assert not world.beat(A).suspect


def test_a_late_beat_starts_the_row_over() -> None:
    world = World(A)
    world.run(1)
    world.silent.add(A)
    world.run(1)
    for _ in range(3):
        assert world.beat(A).suspect
        world.clock.advance(MISSED_BEATS * INTERVAL_S + 0.1)


def test_flapping_makes_returns_slower_and_calm_makes_them_quick_again() -> None:
    world = World(A)
    needed = []
    for _ in range(6):
        world.beat(A)
        pulse = world.liveness.broken(A, 1, world.streams[A], world.clock.monotonic())
        assert pulse is not None
        beats = 0
        while pulse.suspect:
            world.clock.advance(INTERVAL_S)
            world.liveness.sweep(world.clock.monotonic())
            world.beat(A)
            beats += 1
        needed.append(beats)
    assert needed == [2, 4, 8, 16, MAX_RETURN_BEATS, MAX_RETURN_BEATS]
    world.run(FLAP_WINDOW_S + 10)
    pulse = world.liveness.broken(A, 1, world.streams[A], world.clock.monotonic())
    assert pulse is not None
    assert pulse.beats_to_return == 2


def test_a_broken_stream_is_suspect_at_once_and_once() -> None:
    world = World(A)
    world.beat(A)
    now = world.clock.monotonic()
    assert world.liveness.broken(A, 1, world.streams[A], now) is not None
    assert world.liveness.broken(A, 1, world.streams[A], now) is None
    world.run(0)
    assert world.suspected == []


def test_what_is_heard_after_standing_still_may_be_old() -> None:
    world = World(A)
    world.run(1.0)
    before_s = world.clock.monotonic()
    world.clock.advance(5.0)  # a beat from back then is read, and the end of its stream
    assert world.beat(A).heard_s < before_s
    assert world.liveness.broken(A, 1, world.streams[A], world.clock.monotonic()) is None
    world.silent.add(A)
    world.run(2.0)
    assert world.suspected == [A], "silence decides"
    pulse = world.liveness.get(A)
    assert pulse is not None
    assert pulse.heard_s < before_s, "so that who beats elsewhere by now can be told apart"


def test_an_old_stream_says_nothing_once_a_newer_one_beats() -> None:
    world = World(A)
    world.beat(A)
    old = world.streams[A]
    world.streams[A] = world.liveness.open_stream()
    world.beat(A)
    assert world.liveness.broken(A, 1, old, world.clock.monotonic()) is None
    assert not world.suspect(A)
    assert world.liveness.broken(A, 1, world.streams[A], world.clock.monotonic()) is not None


def test_an_old_epoch_says_nothing() -> None:
    world = World(A)
    world.beat(A, epoch=1)
    world.beat(A, epoch=2)
    assert world.liveness.broken(A, 1, world.streams[A], world.clock.monotonic()) is None
    world.liveness.forget(A, 1)
    assert world.liveness.get(A) is not None
    world.liveness.forget(A, 2)
    assert world.liveness.get(A) is None
    assert len(world.liveness) == 0


def test_standing_still_ourselves_suspects_nobody() -> None:
    world = World(A, B)
    world.run(1)
    world.clock.advance(60)  # SIGSTOP of this process
    assert world.liveness.sweep(world.clock.monotonic()) == []
    world.run(5)
    assert world.suspected == []
    world.silent.add(B)
    world.run(2)
    assert world.suspected == [B], "real silence is still noticed"


def test_another_control_planes_suspicion_is_earned_back_here() -> None:
    world = World(A)
    pulse = world.beat(A)
    world.liveness.recorded_suspect(pulse, world.clock.monotonic())
    assert pulse.suspect
    world.clock.advance(INTERVAL_S)
    assert not world.beat(A).suspect


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [(0, BASE_INTERVAL_S), (200, BASE_INTERVAL_S), (3000, 3000 / MAX_BEATS_PER_S), (1_000_000, 10 / 3)],
)
def test_interval_grows_with_the_fleet_within_the_lease(replicas: int, expected: float) -> None:
    assert interval_s(replicas, BASE_INTERVAL_S, lease_ttl_s=10) == pytest.approx(expected)


def test_long_intervals_do_not_make_a_hang_long() -> None:
    assert ladder_s(BASE_INTERVAL_S) == MISSED_BEATS * BASE_INTERVAL_S
    assert ladder_s(3.0) == 3.0 + MAX_LATE_S
    assert ladder_s(10.0) == 15.0
    world = World(A)
    world.liveness.beat(A, 1, world.streams[A], 3.0, world.clock.monotonic())
    suspected_s: list[float] = []
    for tick in range(100):
        world.clock.advance(TICK_S)
        suspected_s += [tick * TICK_S for _ in world.liveness.sweep(world.clock.monotonic())]
    assert suspected_s == [pytest.approx(3.0 + MAX_LATE_S, abs=2 * TICK_S)]


@pytest.mark.parametrize(("replicas", "expected"), [(0, 10), (300, 10), (1_000, 30), (10_000, 300)])
def test_leases_grow_with_the_fleet(replicas: int, expected: int) -> None:
    assert lease_ttl_s(replicas, 10) == expected
    assert lease_ttl_s(replicas, 3600) == 3600


def test_many_replicas_cost_little() -> None:
    liveness = Liveness(0.0)
    stream = liveness.open_stream()
    now = 0.0
    for _ in range(20):
        for number in range(2000):
            liveness.beat(ReplicaKey("p", 0, number), 1, stream, INTERVAL_S, now)
        now += INTERVAL_S
        assert liveness.sweep(now) == []
    assert len(liveness.sweep(now + 0.4)) == 0
    assert len(liveness.sweep(now + 0.8)) == 2000
