"""Policies that look at more than load: prefix-affinity and topology-aware. Pure, seeded."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.balancers import BOUND, POLICIES, Hint, create_balancer
from gateway.prefix import PREFIX_BYTES, prefix_key
from gateway.topology import Distances, distance
from omni.v1 import prompt_pb2, types_pb2

SEEDS = st.integers(0, 2**32)
KEYS = st.integers(0, 2**64 - 1)


@dataclasses.dataclass(eq=False)
class Replica:
    order: int
    load: int = 0
    identity: int = 0
    rack: int = 0


def replicas(count: int, *, racks: int = 1) -> list[Replica]:
    rng = random.Random(17)
    return [Replica(order=n, identity=rng.getrandbits(64), rack=n % racks) for n in range(count)]


def keyed(key: int) -> Hint:
    return Hint(key=lambda: key)


def near(rack: int) -> Hint:
    return Hint(distance=lambda replica: 0 if replica.rack == rack else 1)


@given(st.sampled_from(POLICIES), st.lists(st.integers(0, 50), min_size=1, max_size=12), KEYS, SEEDS)
def test_the_same_seed_chooses_the_same_and_always_one_that_is_allowed(
    policy: str, loads: list[int], key: int, seed: int
) -> None:
    candidates = replicas(len(loads), racks=3)
    for replica, load in zip(candidates, loads, strict=True):
        replica.load = load
    hint = Hint(key=lambda: key, distance=lambda replica: replica.rack)
    one, other = (create_balancer(policy, random.Random(seed)) for _ in range(2))
    for _ in range(4):
        chosen = one.pick(candidates, hint)
        assert any(chosen is candidate for candidate in candidates)
        assert other.pick(candidates, hint) is chosen


@given(
    st.sampled_from(["prefix-affinity", "topology-aware"]),
    st.integers(1, 12),
    st.integers(1, 200),
    st.integers(1, 4),
    SEEDS,
)
def test_no_preference_fills_a_replica_beyond_its_bound(
    policy: str, count: int, requests: int, kinds: int, seed: int
) -> None:
    """However few kinds of requests there are: one prefix, one rack."""
    candidates = replicas(count, racks=kinds)
    balancer, rng = create_balancer(policy, random.Random(seed)), random.Random(seed)
    for placed in range(1, requests + 1):
        kind = rng.randrange(kinds)
        hint = keyed(kind) if policy == "prefix-affinity" else near(kind)
        balancer.pick(candidates, hint).load += 1
        assert max(replica.load for replica in candidates) < BOUND * placed / count + 1


@given(KEYS, st.integers(2, 20), st.data())
def test_a_replica_that_comes_or_goes_moves_only_its_own_share(key: int, count: int, data: st.DataObject) -> None:
    everyone = replicas(count)
    balancer = create_balancer("prefix-affinity", random.Random(1))
    owner = balancer.pick(everyone, keyed(key))
    leaver = data.draw(st.sampled_from(everyone))
    after = balancer.pick([replica for replica in everyone if replica is not leaver], keyed(key))
    if leaver is not owner:
        assert after is owner
    assert balancer.pick(everyone, keyed(key)) is owner, "who comes back gets its share back"


def test_keys_spread_evenly_and_each_stays() -> None:
    everyone = replicas(8)
    gateways = [create_balancer("prefix-affinity", random.Random(seed)) for seed in (1, 2)]
    rng = random.Random(5)
    counts: Counter[int] = Counter()
    for _ in range(8000):
        hint = keyed(rng.getrandbits(64))
        owner = gateways[0].pick(everyone, hint)
        assert gateways[1].pick(everyone, hint) is owner, "gateways agree without talking"
        counts[owner.order] += 1
    assert all(850 <= counts[replica.order] <= 1150 for replica in everyone)


def test_what_does_not_fit_goes_to_the_next_in_order_of_scores() -> None:
    everyone = replicas(4)
    balancer = create_balancer("prefix-affinity", random.Random(1))
    first = balancer.pick(everyone, keyed(7))
    second = balancer.pick([replica for replica in everyone if replica is not first], keyed(7))
    first.load = 40
    assert balancer.pick(everyone, keyed(7)) is second
    first.load = 0
    assert balancer.pick(everyone, keyed(7)) is first


def test_ties_of_distance_are_spread_and_the_far_ones_wait_for_need() -> None:
    everyone = replicas(9, racks=3)
    balancer = create_balancer("topology-aware", random.Random(2))
    counts = Counter(balancer.pick(everyone, near(1)).order for _ in range(3000))
    assert set(counts) == {1, 4, 7}
    assert all(850 <= count <= 1150 for count in counts.values())
    for replica in everyone:
        replica.load = 10 if replica.rack == 1 else 0
    assert balancer.pick(everyone, near(1)).rack != 1


def test_without_a_hint_both_go_by_load() -> None:
    for policy in ("prefix-affinity", "topology-aware"):
        everyone = replicas(4)
        everyone[3].load = 9
        balancer = create_balancer(policy, random.Random(3))
        assert {balancer.pick(everyone).order for _ in range(200)} == {0, 1, 2}


def test_ten_thousand_replicas_are_no_burden() -> None:
    everyone = replicas(10_000, racks=100)
    for policy, most_s in (("power-of-two", 0.0005), ("prefix-affinity", 0.1), ("topology-aware", 0.1)):
        balancer = create_balancer(policy, random.Random(4))
        hint = Hint(key=lambda: 12345, distance=lambda replica: replica.rack)
        begin_s = time.process_time()
        for _ in range(10):
            balancer.pick(everyone, hint)
        assert (time.process_time() - begin_s) / 10 < most_s, policy


# -- what a prompt's key is --


def chat(*turns: tuple[str, str]) -> prompt_pb2.Prompt:
    return prompt_pb2.Prompt(
        chat=prompt_pb2.ChatPrompt(
            messages=[
                prompt_pb2.ChatMessage(role=role, parts=[prompt_pb2.ContentPart(text=text)]) for role, text in turns
            ]
        )
    )


def test_turns_of_a_conversation_have_one_key_and_other_questions_another() -> None:
    opening = [("system", "Be brief."), ("user", "Who are you?")]
    key = prefix_key(chat(*opening))
    assert prefix_key(chat(*opening, ("assistant", "A model."), ("user", "Which?"))) == key
    assert prefix_key(chat(("system", "Be brief."), ("user", "Where are you?"))) != key
    assert prefix_key(chat(("system", "Be brief."), ("assistant", "Who are you?"))) != key
    long = "x" * PREFIX_BYTES
    assert prefix_key(chat(("system", long), ("user", "a"))) == prefix_key(chat(("system", long), ("user", "b")))
    assert prefix_key(prompt_pb2.Prompt(text=long + "a")) == prefix_key(prompt_pb2.Prompt(text=long + "b"))
    assert prefix_key(prompt_pb2.Prompt(text="a")) != prefix_key(prompt_pb2.Prompt(text="b"))
    tokens = [prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(token_ids=ids)) for ids in ([1, 2], [1, 2], [12])]
    assert prefix_key(tokens[0]) == prefix_key(tokens[1]) != prefix_key(tokens[2])


def test_a_session_is_its_own_key_and_media_counts() -> None:
    assert prefix_key(chat(("user", "a")), "s") == prefix_key(chat(("user", "b")), "s")
    assert prefix_key(chat(("user", "a")), "s") != prefix_key(chat(("user", "a")), "t")
    pictures = []
    for data in (b"one", b"two"):
        prompt = chat(("user", "What is it?"))
        prompt.chat.messages[0].parts.insert(
            0, prompt_pb2.ContentPart(media=prompt_pb2.MediaPart(mime_type="image/png", data=data))
        )
        pictures.append(prefix_key(prompt))
    assert len({*pictures, prefix_key(chat(("user", "What is it?")))}) == 3


# -- how far replicas are from each other --


def placed(boot_id: str, domain: str = "", *connectors: str) -> types_pb2.Replica:
    return types_pb2.Replica(
        placement=types_pb2.Placement(boot_id=boot_id, topology_domain=domain),
        connectors=[types_pb2.ConnectorOffer(name=name, healthy=True) for name in connectors],
    )


def test_one_host_is_nearer_than_one_rack_and_that_than_anywhere() -> None:
    for connectors in ((), ("shm", "grpc")):
        here = placed("a", "rack-1", *connectors)
        others = [placed("a", "", *connectors), placed("b", "rack-1", *connectors), placed("c", "rack-2", *connectors)]
        distances = [distance(here, other) for other in others]
        assert distances == sorted(set(distances))
    unknown = placed("")
    assert distance(unknown, placed("")) == distance(unknown, placed("b")), "nothing is known: nothing is near"


def test_the_better_path_is_nearer_and_none_at_all_is_farthest() -> None:
    here = placed("a", "", "shm", "nixl", "grpc")
    by_nixl, by_grpc = placed("b", "", "nixl", "grpc"), placed("c", "", "grpc")
    assert distance(here, by_nixl) < distance(here, by_grpc)
    assert distance(here, by_nixl, "auto", frozenset({"grpc"})) == distance(here, by_grpc)
    assert distance(here, placed("a", "", "grpc"), "shm") > distance(here, by_grpc)


def test_distances_are_remembered_by_what_they_depend_on() -> None:
    @dataclasses.dataclass
    class View:
        record: types_pb2.Replica

    @dataclasses.dataclass
    class Located:
        view: View
        profile: int

    distances = Distances()

    def located(record: types_pb2.Replica) -> Located:
        return Located(View(record), distances.profile(record))

    one, same, other = (located(placed(*facts)) for facts in (("a", "r"), ("a", "r"), ("b", "r")))
    assert one.profile == same.profile != other.profile
    assert distances.between(one, same) == 0 < distances.between(one, other)
    assert distances.between(one, other) == distance(one.view.record, other.view.record)
