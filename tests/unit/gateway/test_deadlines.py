"""Every deadline is kept, in order, by one timer for all of a kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway import deadlines
from gateway.deadlines import Deadlines


class _Loop:
    """Time that a test moves, and the timers that were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, due_s: float, call: Callable[[], None]) -> tuple[float, Callable[[], None]]:
        self.timers.append((due_s, call))
        return self.timers[-1]

    def call_later(self, delay_s: float, call: Callable[[], None]) -> tuple[float, Callable[[], None]]:
        return self.call_at(self.now_s + delay_s, call)

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [timer for timer in self.timers if timer[0] <= end_s]:
            timer = min(due, key=lambda one: one[0])
            self.timers.remove(timer)
            self.now_s = timer[0]
            timer[1]()
        self.now_s = end_s


class _Late:
    def __init__(self, name: str, ended: list[tuple[str, float]], loop: _Loop) -> None:
        self.name, self.ended, self.loop = name, ended, loop

    def end_late(self) -> None:
        self.ended.append((self.name, self.loop.now_s))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> _Loop:
    made = _Loop()
    loops: Any = asyncio
    monkeypatch.setattr(deadlines, "asyncio", type("asyncio", (), {**vars(loops), "get_running_loop": lambda: made}))
    return made


def test_each_ends_when_its_time_is_over(loop: _Loop) -> None:
    ended: list[tuple[str, float]] = []
    line = Deadlines()
    items = {name: _Late(name, ended, loop) for name in "abcd"}
    line.add(items["a"], 10)
    loop.advance(3)
    line.add(items["b"], 10)
    line.add(items["c"], 1)
    loop.advance(2)
    line.add(items["d"], 10)
    line.remove(items["b"], 10)
    loop.advance(30)
    assert ended == [("c", 4), ("a", 10), ("d", 15)]


def test_one_timer_is_enough_and_none_is_left_when_nobody_is(loop: _Loop) -> None:
    ended: list[tuple[str, float]] = []
    line = Deadlines()
    for number in range(100):
        late = _Late(str(number), ended, loop)
        line.add(late, 10)
        loop.advance(0.5)
        line.remove(late, 10)
        assert len(loop.timers) == 1
    loop.advance(20)
    assert (ended, loop.timers) == ([], [])


def test_who_ends_another_one_is_no_trouble(loop: _Loop) -> None:
    ended: list[tuple[str, float]] = []
    line = Deadlines()
    second = _Late("b", ended, loop)

    class First(_Late):
        def end_late(self) -> None:
            super().end_late()
            line.remove(second, 10)

    line.add(First("a", ended, loop), 10)
    line.add(second, 10)
    loop.advance(20)
    assert ended == [("a", 10)]


def test_one_that_cannot_be_ended_holds_up_no_other(loop: _Loop) -> None:
    ended: list[tuple[str, float]] = []
    line = Deadlines()

    class Broken(_Late):
        def end_late(self) -> None:
            line.add(_Late("c", ended, loop), 10)
            raise ZeroDivisionError

    line.add(Broken("a", ended, loop), 10)
    line.add(_Late("b", ended, loop), 10)
    with pytest.raises(ZeroDivisionError):
        loop.advance(10)
    loop.advance(10)
    assert ended == [("b", 10), ("c", 20)]
