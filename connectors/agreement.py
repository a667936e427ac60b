"""One verdict for all ranks: whether a transfer has come is decided once, not by every rank for itself.

Ranks of one engine step in lockstep. If one takes a KV cache for received and another does not, their collectives wait
for each other for ever. So every rank casts a vote at one place, rank 0's worker, and goes on as the verdict says: it
is good when all ranks have voted good, bad with the first bad vote, and bad at the deadline while votes are missing.

Guarantees: every vote on a topic gets the same verdict, late and repeated ones too, as long as the topic is remembered.
Not guaranteed: anything after the process that counts has ended. Ranks that get no answer take it for bad; the replica
is lost then anyway, since that process is one of its ranks.

Pure but for futures: ``sweep`` is called about twice a second. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses

from omnicore import errors
from omnicore.clock import Clock

MAX_REMEMBERED = 4096
"""Verdicts kept for late voters: more topics than a replica has in flight, some hundred bytes each."""

MAX_RANKS = 4096
"""Of one engine: far more than there are. Those that are missing are listed one by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What every rank is to believe."""

    good: bool
    reason: str = ""
    """Why not: the first bad vote, or whose votes are missing."""


@dataclasses.dataclass(slots=True)
class _Ballot:
    ranks: int
    deadline_s: float
    verdict: asyncio.Future[Verdict]
    voted: set[int] = dataclasses.field(default_factory=set)


class RankAgreement:
    """Counts votes. A topic is any text that is used once, such as the key of a transfer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, _Ballot] = {}
        self._decided: collections.OrderedDict[str, tuple[int, Verdict]] = collections.OrderedDict()

    def __len__(self) -> int:
        """Topics without verdict."""
        return len(self._open)

    async def vote(self, topic: str, rank: int, ranks: int, failure: str | None, timeout_s: float) -> Verdict:
        """Vote for ``rank`` of ``ranks``: good if ``failure`` is None, else bad for that reason; returns the verdict.

        The first vote's ``timeout_s`` is the topic's. Raises ``InvalidRequestError`` for a rank that does not exist or
        a number of ranks that other votes contradict; such a vote is not counted."""
        if not topic:
            raise errors.InvalidRequestError.field("topic", "must not be empty")
        if ranks > MAX_RANKS:
            raise errors.InvalidRequestError.field("ranks", f"must be at most {MAX_RANKS}, got {ranks}")
        if not 0 <= rank < ranks:
            raise errors.InvalidRequestError.field("rank", f"must be 0 to {ranks - 1}, got {rank}")
        if not timeout_s > 0:
            raise errors.InvalidRequestError.field("timeout", f"must be more than 0 s, got {timeout_s:g}")
        if (decided := self._decided.get(topic)) is not None:
            self._check_ranks(topic, ranks, decided[0])
            return decided[1]
        ballot = self._open.get(topic)
        if ballot is None:
            verdict = asyncio.get_running_loop().create_future()
            ballot = self._open[topic] = _Ballot(ranks, self._clock.monotonic() + timeout_s, verdict)
        self._check_ranks(topic, ranks, ballot.ranks)
        ballot.voted.add(rank)
        if failure is not None:
            self._decide(topic, Verdict(False, f"rank {rank}: {failure}"))
        elif len(ballot.voted) == ranks:
            self._decide(topic, Verdict(True))
        # Shielded: one rank that gives up waiting must not take the verdict from the others.
        return await asyncio.shield(ballot.verdict)

    def sweep(self) -> int:
        """Decide what has waited too long; returns how many topics."""
        now_s = self._clock.monotonic()
        late = [topic for topic, ballot in self._open.items() if ballot.deadline_s <= now_s]
        for topic in late:
            ballot = self._open[topic]
            missing = sorted(set(range(ballot.ranks)) - ballot.voted)
            self._decide(topic, Verdict(False, f"no vote of ranks {missing} in time"))
        return len(late)

    def close(self) -> None:
        """Everything undecided is bad."""
        for topic in list(self._open):
            self._decide(topic, Verdict(False, "the worker that counts votes stops"))

    def _decide(self, topic: str, verdict: Verdict) -> None:
        ballot = self._open.pop(topic)
        self._decided[topic] = ballot.ranks, verdict
        if len(self._decided) > MAX_REMEMBERED:
            self._decided.popitem(last=False)
        if not ballot.verdict.done():
            ballot.verdict.set_result(verdict)

    @staticmethod
    def _check_ranks(topic: str, ranks: int, known: int) -> None:
        if ranks != known:
            raise errors.InvalidRequestError.field("ranks", f"{topic!r} has {known} ranks, not {ranks}")
