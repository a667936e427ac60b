"""Has a process of a gateway replaced that is there and answers nothing: SIGSTOP, a deadlock, a loop that never ends.

The kernel gives such a process its share of all new connections, and no request that waits there is seen by the
others. Its successor takes over, and whoever waits learns by a broken connection to ask again.

Guarantees: only who left several questions in a row unanswered is replaced. They are counted, not timed: if all stood
still together, as in a machine that was suspended, nobody is taken for hung. Who is not there is the supervisor's.
"""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable
from typing import Final, NoReturn

from gateway.processes.siblings import ANSWER_S, Siblings
from omnicore.log import get_logger

_log = get_logger(__name__)

_PAUSE_S: Final = 1.0
_FEWEST_QUESTIONS: Final = 2
"""One may have met a process that only stalled."""


class Watchdog:
    """Asks every process about once a second whether it is alive; ``run`` never returns, cancel it."""

    def __init__(
        self,
        siblings: Siblings,
        replace: Callable[[int], None],
        *,
        hung_after_s: float,
        answer_s: float = ANSWER_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """``siblings``: of somebody who is none of those that are asked. ``answer_s``: how long it waits for one."""
        self._siblings = siblings
        self._replace = replace
        self._pause_s = pause_s
        self._questions = max(_FEWEST_QUESTIONS, math.ceil(hung_after_s / (answer_s + pause_s)))
        self._unanswered: collections.Counter[int] = collections.Counter()

    async def run(self) -> NoReturn:
        """Ask for ever."""
        while True:
            await asyncio.sleep(self._pause_s)
            await self.ask()

    async def ask(self) -> None:
        """Ask once, and replace who has been silent for too long."""
        silent = (await self._siblings.ask("alive")).silent
        self._unanswered = collections.Counter({index: self._unanswered[index] + 1 for index in silent})
        for index in [index for index in silent if self._unanswered[index] >= self._questions]:
            del self._unanswered[index]
            _log.error("gateway process hangs: replaced", process=index, unanswered=self._questions)
            self._replace(index)
