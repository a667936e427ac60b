"""What a connection needs of its server: somebody who answers, and somebody who keeps it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from gateway.http.exchange import Exchange

Application = Callable[[Exchange], Awaitable[None]]
"""Answers a request; returns after its last byte."""
AnswerNow = Callable[[Exchange], bool]
"""Sees to a request without a task, from its begin to ``exchange.finish``. False: it needs one, and nothing was done.
Must not block, nor raise."""

C = TypeVar("C", contravariant=True)


class Registry(Protocol[C]):
    """Keeps the connections of one server."""

    closing: bool
    """No connection shall take a further request."""
    draining: bool
    """Every response is the last of its connection."""

    answer_now: AnswerNow

    def add(self, connection: C) -> None:
        """It is open."""
        ...

    def discard(self, connection: C) -> None:
        """It is gone."""
        ...
