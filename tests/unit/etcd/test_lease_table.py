"""When leases are renewed and when they are lost."""

from __future__ import annotations

import math

import pytest

from control_plane.etcd.leases import LeaseTable


def test_kept_lease_is_sent_at_a_third_of_its_life_and_again_after_each_answer() -> None:
    table = LeaseTable()
    table.keep(1, 9.0, now=100.0)
    assert table.next_due() == 103.0
    assert table.take_due(102.9).send == []
    assert table.take_due(103.0).send == [1]
    table.answered(1, 9.0)
    assert table.next_due() == 106.0
    assert table.take_due(106.0).send == [1]


def test_deadline_counts_from_the_sending_of_the_request_that_was_answered() -> None:
    table = LeaseTable()
    table.keep(1, 9.0, now=0.0)
    table.take_due(3.0)
    table.answered(1, 9.0)
    table.take_due(6.0)  # sent, never answered
    assert table.take_due(11.9).expired == []
    assert table.take_due(12.0).expired == [1]
    assert len(table) == 0
    assert table.take_due(100.0).expired == []
    assert table.next_due() == math.inf


def test_missing_answer_tells_that_the_member_hangs_and_a_new_stream_sends_again() -> None:
    table = LeaseTable()
    table.keep(1, 9.0, now=0.0)
    table.take_due(3.0)
    assert not table.take_due(4.4).hung
    assert table.take_due(4.5).hung
    table.restart(5.0)
    assert table.take_due(5.0).send == [1]
    table.answered(1, 9.0)
    assert table.next_due() == 8.0


def test_late_answers_of_a_busy_member_are_waited_for() -> None:
    table = LeaseTable()
    table.keep(1, 30.0, now=0.0)
    table.keep(2, 30.0, now=0.0)
    table.take_due(10.0)
    table.heard(11.0)
    table.answered(1, 30.0)
    assert not table.take_due(11.6).hung, "2 is late, but others are answered"
    assert table.take_due(table.next_due()).hung, "nothing was answered since"


@pytest.mark.parametrize("ttl_s", [1.0, 2.0, 3.0, 10.0, 60.0])
def test_a_hung_member_leaves_time_for_another(ttl_s: float) -> None:
    table = LeaseTable()
    table.keep(1, ttl_s, now=0.0)
    table.take_due(ttl_s / 3)
    assert table.next_due() < ttl_s * 0.6
    assert table.take_due(table.next_due()).hung


def test_ask_is_sent_at_once_and_only_once() -> None:
    table = LeaseTable()
    table.ask(7, now=1.0)
    assert table.take_due(1.0).send == [7]
    table.ask(7, now=1.1)
    assert table.take_due(1.1).send == []
    table.answered(7, 30.0)
    assert len(table) == 0
    assert table.next_due() == math.inf


def test_ask_for_a_kept_lease_moves_its_renewal_forward() -> None:
    table = LeaseTable()
    table.keep(1, 9.0, now=0.0)
    table.ask(1, now=0.5)
    assert table.take_due(0.5).send == [1]
    table.answered(1, 9.0)
    assert table.next_due() == 3.5
    assert len(table) == 1


def test_asking_never_expires_and_late_or_strange_answers_are_ignored() -> None:
    table = LeaseTable()
    table.ask(1, now=0.0)
    table.take_due(0.0)
    assert table.take_due(1000.0).expired == []
    table.answered(99, 5.0)
    table.keep(2, 9.0, now=0.0)
    table.answered(2, 50.0)  # nothing was sent: an answer to the stream before
    assert table.take_due(9.0).expired == [2]


def test_dropped_and_stopped_leases() -> None:
    table = LeaseTable()
    table.keep(1, 9.0, now=0.0)
    assert table.drop(1)
    assert not table.drop(1)
    table.keep(2, 9.0, now=0.0)
    table.stop_keeping(2, now=1.0)  # somebody still waits for one renewal
    assert table.take_due(1.0).send == [2]
    assert table.take_due(20.0).expired == []
    table.answered(2, 9.0)
    assert len(table) == 0


def test_a_thousand_leases_are_all_renewed_and_none_twice() -> None:
    table = LeaseTable()
    for lease_id in range(1000):
        table.keep(lease_id, 10.0, now=lease_id / 1000)
    sent: list[int] = []
    while (now := table.next_due()) < 4.5:
        due = table.take_due(now)
        assert not due.hung
        sent += due.send
        for lease_id in due.send:
            table.answered(lease_id, 10.0)
    assert sorted(sent) == list(range(1000))
