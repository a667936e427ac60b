from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors import agreement
from connectors.agreement import RankAgreement, Verdict
from omnicore import errors
from omnicore.clock import ManualClock


def voters(room: RankAgreement, votes: dict[int, str | None], ranks: int = 4) -> list[asyncio.Task[Verdict]]:
    return [asyncio.ensure_future(room.vote("kv", rank, ranks, why, 10)) for rank, why in votes.items()]


async def test_all_good_is_good_for_all() -> None:
    room = RankAgreement(ManualClock())
    assert await asyncio.gather(*voters(room, dict.fromkeys(range(4)))) == [Verdict(True)] * 4
    assert len(room) == 0


async def test_bug_60_a_rank_that_does_not_vote_fails_all_of_them_alike() -> None:
    clock = ManualClock()
    room = RankAgreement(clock)
    waiting = voters(room, {0: None, 1: None, 3: None})
    await asyncio.sleep(0)
    clock.advance(9)
    assert room.sweep() == 0
    clock.advance(1)
    assert room.sweep() == 1
    bad = Verdict(False, "no vote of ranks [2] in time")
    assert await asyncio.gather(*waiting) == [bad] * 3
    assert await room.vote("kv", 2, 4, None, 10) == bad, "the late one, too"


async def test_one_bad_vote_decides_at_once() -> None:
    room = RankAgreement(ManualClock())
    waiting = voters(room, {0: None, 1: "checksum"})
    assert await asyncio.gather(*waiting) == [Verdict(False, "rank 1: checksum")] * 2
    assert await room.vote("kv", 2, 4, None, 10) == Verdict(False, "rank 1: checksum")


async def test_a_vote_that_is_repeated_counts_once() -> None:
    room = RankAgreement(ManualClock())
    waiting = voters(room, {0: None}) + voters(room, {0: None}) + voters(room, {1: None, 2: None})
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    await room.vote("kv", 3, 4, None, 10)
    assert await asyncio.gather(*waiting) == [Verdict(True)] * 4


async def test_a_voter_that_gives_up_takes_nothing_from_the_others() -> None:
    room = RankAgreement(ManualClock())
    first, second = voters(room, {0: None, 1: None}, ranks=3)
    await asyncio.sleep(0)
    first.cancel()
    assert await room.vote("kv", 2, 3, None, 10) == Verdict(True)
    assert await second == Verdict(True)


@pytest.mark.parametrize(
    ("topic", "rank", "ranks", "timeout_s", "field"),
    [
        ("", 0, 1, 1, "topic"),
        ("kv", 4, 4, 1, "rank"),
        ("kv", -1, 4, 1, "rank"),
        ("kv", 0, 0, 1, "rank"),
        ("kv", 0, 2**32 - 1, 1, "ranks"),
        ("kv", 0, 1, 0, "timeout"),
    ],
)
async def test_votes_that_make_no_sense_are_refused(
    topic: str, rank: int, ranks: int, timeout_s: float, field: str
) -> None:
    room = RankAgreement(ManualClock())
    with pytest.raises(errors.InvalidRequestError, match=field):
        await room.vote(topic, rank, ranks, None, timeout_s)
    assert len(room) == 0


async def test_ranks_that_count_differently_are_refused_and_not_counted() -> None:
    room = RankAgreement(ManualClock())
    waiting = voters(room, {0: None}, ranks=2)
    await asyncio.sleep(0)
    with pytest.raises(errors.InvalidRequestError, match="has 2 ranks, not 4"):
        await room.vote("kv", 1, 4, None, 10)
    assert not waiting[0].done()
    assert await room.vote("kv", 1, 2, None, 10) == Verdict(True)
    with pytest.raises(errors.InvalidRequestError, match="has 2 ranks, not 4"):
        await room.vote("kv", 1, 4, None, 10)


async def test_closing_is_bad_for_who_waits() -> None:
    room = RankAgreement(ManualClock())
    waiting = voters(room, {0: None})
    await asyncio.sleep(0)
    room.close()
    assert (await waiting[0]).good is False


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_REMEMBERED", 3)
    room = RankAgreement(ManualClock())
    for topic in "abcde":
        await room.vote(topic, 0, 1, None, 1)
    assert len(room._decided) == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, "lost"])), max_size=12))
async def test_all_ranks_believe_the_same(votes: list[tuple[int, str | None]]) -> None:
    clock = ManualClock()
    room = RankAgreement(clock)
    tasks = [asyncio.ensure_future(room.vote("kv", rank, 4, why, 5)) for rank, why in votes]
    await asyncio.sleep(0)
    clock.advance(5)
    room.sweep()
    verdicts = await asyncio.gather(*tasks)
    assert len(set(verdicts)) <= 1
    if verdicts:
        first_bad = next((i for i, (_, why) in enumerate(votes) if why), len(votes))
        assert verdicts[0].good == ({rank for rank, _ in votes[:first_bad]} == set(range(4)))
