"""What the executions of a gateway share: limits, counts, and the parts they work with."""

from __future__ import annotations

import dataclasses

from gateway.paths import EdgePaths
from gateway.retry_budget import RetryBudget
from gateway.router import Router
from gateway.stage_work import EdgeKey
from omnicore.turns import Turns


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How often one request may begin again because of the same stage."""

    retries: int = 2
    """Before its output has begun, or all over while none of it has left this process."""
    replays: int = 2
    """Afterwards. 0: replicas are not asked to keep data, and output is not noted."""


class Counts:
    """What happened to all requests of a gateway, for its metrics."""

    def __init__(self) -> None:
        self.retries: dict[str, int] = {}
        """Pipeline → attempts begun again before any output."""
        self.replays: dict[tuple[str, int, str], int] = {}
        """Pipeline, stage that was lost, "done" or "failed" or "refused" → replays."""

    def retried(self, pipeline: str) -> None:
        """A request began again."""
        self.retries[pipeline] = self.retries.get(pipeline, 0) + 1

    def replayed(self, pipeline: str, stage_id: int, outcome: str) -> None:
        """A replay has come to its end, or was not begun."""
        key = (pipeline, stage_id, outcome)
        self.replays[key] = self.replays.get(key, 0) + 1


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionParts:
    """What the executions of a gateway share."""

    router: Router
    edges: Turns[EdgeKey]
    paths: EdgePaths
    limits: Limits
    budget: RetryBudget
    counts: Counts
