from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.deltalog import Cursor, DeltaLog


def contents(log: DeltaLog[str], cursor: Cursor) -> list[str] | None:
    deltas = log.since(cursor)
    return None if deltas is None else [delta.content for delta in deltas]


def test_readers_go_at_their_own_pace() -> None:
    log: DeltaLog[str] = DeltaLog(10)
    log.reset(5)
    slow = log.head
    log.append(7, "a")
    quick = log.head
    log.append(9, "b")
    assert contents(log, slow) == ["a", "b"]
    assert contents(log, quick) == ["b"]
    assert contents(log, log.head) == []


def test_who_falls_off_is_told() -> None:
    log: DeltaLog[str] = DeltaLog(2)
    log.reset(1)
    start = log.head
    for revision, name in enumerate("abc", start=2):
        log.append(revision, name)
    assert contents(log, start) is None
    assert log.resume(1) is None
    resumed = log.resume(2)
    assert resumed is not None
    assert contents(log, resumed) == ["b", "c"]


def test_resuming_needs_known_history() -> None:
    log: DeltaLog[str] = DeltaLog(10)
    log.reset(100)
    assert log.resume(99) is None, "before the beginning"
    assert log.resume(101) is None, "after the end: another history, or we are behind"
    assert log.resume(100) == log.head
    log.advance(110)
    assert log.resume(105) is not None, "nothing happened in between"


def test_reset_ends_all_cursors_even_if_revisions_start_over() -> None:
    log: DeltaLog[str] = DeltaLog(10)
    log.reset(100)
    log.append(101, "a")
    old = log.head
    log.reset(3)
    assert contents(log, old) is None
    log.append(101, "b")
    assert contents(log, old) is None


def test_a_revision_is_used_once() -> None:
    log: DeltaLog[str] = DeltaLog(10)
    log.reset(1)
    log.append(2, "a")
    reader = log.head
    log.append(2, "again")
    assert contents(log, reader) is None


def test_capacity_is_checked() -> None:
    with pytest.raises(ValueError, match="capacity"):
        DeltaLog[str](0)


@given(st.lists(st.integers(1, 3), max_size=40), st.integers(1, 10), st.integers(0, 60))
def test_resuming_loses_and_repeats_nothing(steps: list[int], capacity: int, resume_at: int) -> None:
    log: DeltaLog[int] = DeltaLog(capacity)
    log.reset(10)
    revision, written = 10, []
    for step in steps:
        revision += step
        log.append(revision, revision)
        written.append(revision)
    cursor = log.resume(10 + resume_at)
    if cursor is not None:
        deltas = log.since(cursor)
        assert deltas is not None
        assert [delta.content for delta in deltas] == [r for r in written if r > 10 + resume_at]
    elif resume_at <= sum(steps):
        assert len(written) > capacity
