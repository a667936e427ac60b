from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from control_plane.ids import IdPool


def test_lowest_free() -> None:
    pool = IdPool()
    assert [pool.reserve_lowest() for _ in range(3)] == [0, 1, 2]
    pool.release(1)
    assert pool.reserve_lowest() == 1
    assert pool.reserve_lowest() == 3


def test_claims_survive_the_release_of_their_reservation() -> None:
    pool = IdPool()
    taken = pool.reserve_lowest()
    pool.claim(taken)
    pool.release(taken)
    assert pool.reserve_lowest() == 1
    pool.free(taken)
    pool.release(1)
    assert pool.reserve_lowest() == 0


def test_a_reservation_is_exclusive_whatever_is_claimed() -> None:
    pool = IdPool()
    pool.claim(5)
    assert pool.reserve(5), "the table may be out of date: etcd decides"
    assert not pool.reserve(5)


def test_replacing_forgets_phantoms() -> None:
    pool = IdPool()
    for replica_id in range(4):
        pool.claim(replica_id)
    pool.replace({1, 3})
    assert pool.reserve_lowest() == 0
    assert pool.reserve_lowest() == 2
    assert len(pool) == 2


@given(st.lists(st.tuples(st.sampled_from(["take", "free", "claim", "release"]), st.integers(0, 8)), max_size=60))
def test_lowest_is_always_the_lowest(steps: list[tuple[str, int]]) -> None:
    pool, claimed, reserved = IdPool(), set[int](), set[int]()
    for verb, number in steps:
        if verb == "take":
            expected = min(set(range(100)) - claimed - reserved)
            assert pool.reserve_lowest() == expected
            reserved.add(expected)
        elif verb == "free":
            pool.free(number)
            claimed.discard(number)
        elif verb == "claim":
            pool.claim(number)
            claimed.add(number)
        else:
            pool.release(number)
            reserved.discard(number)
    assert pool.idle == (not claimed and not reserved)


def test_ids_from_a_number_on_leave_the_lower_ones_free() -> None:
    pool = IdPool()
    assert [pool.reserve_lowest(2) for _ in range(2)] == [2, 3]
    assert [pool.reserve_lowest() for _ in range(3)] == [0, 1, 4]
    pool.release(2)
    assert pool.reserve_lowest(3) == 5
    assert pool.reserve_lowest() == 2
