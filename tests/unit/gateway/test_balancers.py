"""Balancing policies: pure, seeded, no I/O."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.balancers import POLICIES, RoundRobinBalancer, create_balancer


@dataclasses.dataclass
class Replica:
    order: int
    load: int = 0
    identity: int = 0


def replicas(*loads: int) -> list[Replica]:
    return [Replica(order=10 * index, load=load) for index, load in enumerate(loads)]


def picks(policy: str, candidates: list[Replica], count: int, seed: int = 1) -> Counter[int]:
    balancer = create_balancer(policy, random.Random(seed))
    return Counter(candidates.index(balancer.pick(candidates)) for _ in range(count))


@given(
    policy=st.sampled_from(POLICIES),
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    seed=st.integers(0, 2**32),
)
def test_every_policy_picks_one_of_the_candidates(policy: str, loads: list[int], seed: int) -> None:
    candidates = replicas(*loads)
    balancer = create_balancer(policy, random.Random(seed))
    assert balancer.name == policy
    for _ in range(5):
        chosen = balancer.pick(candidates)
        assert any(chosen is candidate for candidate in candidates)


def test_random_is_uniform_and_ignores_load() -> None:
    counts = picks("random", replicas(0, 50, 1000), 3000)
    assert all(850 <= counts[index] <= 1150 for index in range(3))


def test_round_robin_cycles_in_order_of_registration() -> None:
    candidates = replicas(9, 0, 5)
    balancer = RoundRobinBalancer()
    assert [balancer.pick(candidates).order for _ in range(6)] == [0, 10, 20, 0, 10, 20]


def test_round_robin_goes_on_where_it_was_when_members_change() -> None:
    first, second, third = candidates = replicas(0, 0, 0)
    balancer = RoundRobinBalancer()
    assert balancer.pick(candidates) is first
    without_second = [first, third]
    assert [balancer.pick(without_second) for _ in range(3)] == [third, first, third]
    fourth = Replica(order=30)
    assert balancer.pick([first, second, third, fourth]) is fourth
    assert balancer.pick([first, second, third, fourth]) is first


@given(st.integers(1, 12), st.integers(0, 40))
def test_round_robin_is_fair_to_a_stable_membership(members: int, rounds: int) -> None:
    counts = picks("round-robin", replicas(*[0] * members), members * rounds)
    assert all(counts[index] == rounds for index in range(members))


def test_least_queue_length_takes_the_smallest() -> None:
    assert picks("least-queue-length", replicas(5, 2, 9), 100) == {1: 100}


def test_least_queue_length_spreads_ties() -> None:
    counts = picks("least-queue-length", replicas(7, 1, 1, 1), 3000)
    assert counts[0] == 0
    assert all(850 <= counts[index] <= 1150 for index in (1, 2, 3))


def test_power_of_two_never_takes_the_most_loaded() -> None:
    counts = picks("power-of-two", replicas(1, 2, 3, 99), 2000)
    assert counts[3] == 0
    assert counts[0] > counts[1] > counts[2] > 0


def test_power_of_two_spreads_ties() -> None:
    counts = picks("power-of-two", replicas(0, 0, 0, 0), 4000)
    assert all(850 <= counts[index] <= 1150 for index in range(4))


@pytest.mark.parametrize("policy", ["power-of-two", "least-queue-length"])
def test_a_burst_is_balanced_by_what_was_just_sent(policy: str) -> None:
    candidates = replicas(0, 0, 0, 0)
    balancer = create_balancer(policy, random.Random(3))
    for _ in range(64):
        balancer.pick(candidates).load += 1
    assert all(14 <= candidate.load <= 18 for candidate in candidates)


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="power-of-two, round-robin, random, least-queue-length"):
        create_balancer("fastest", random.Random())
