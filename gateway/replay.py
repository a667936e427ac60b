"""Which stages of a request start again when some of its calls are lost. Pure.

A lost stage starts again, and what was reading from it as well, unless it can go on in the midst of what the lost one
makes again. Its producers go on, and what they published is read again from the beginning, where it was kept; where it
was not, they start again, too. A stage that has finished stays finished, unless somebody needs data of it that is gone.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence


class Standing(enum.Enum):
    """Where a stage of a request is."""

    WAITING = "waiting"
    """Not dispatched: its producers have not finished."""
    RUNNING = "running"
    FINISHED = "finished"
    LOST = "lost"
    """It failed in a way that another replica may mend, or its replica is gone."""


class Move(enum.Enum):
    """How a stage starts again."""

    RESUME = "resume"
    """From its prompt and the tokens that it had brought."""
    RERUN = "rerun"
    """From the start; what the client has is skipped."""
    REMAKE = "remake"
    """From the start, only for its consumers: the client has all of its output."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageFacts:
    """A stage as it stands when something was lost."""

    stage_id: int
    producers: tuple[int, ...]
    standing: Standing
    readable: bool
    """What it has published can be read from the beginning, by whoever takes a consumer's place."""
    emitted: bool = False
    """The client's output has some of its own."""
    resumable: bool = False
    """Its tokens are known, and its engine has not refused to go on from them."""
    repeats: bool = False
    """From the same inputs it makes the same chunks again; and those who read from it were left without a word."""
    takes_sources: bool = False
    """It can read on from a producer that makes the same chunks again."""


def plan_restart(stages: Sequence[StageFacts]) -> dict[int, Move]:
    """The stages that start again, and how. All others stay as they are.

    The least set with: every lost stage; every running consumer of a stage in it that cannot go on with it
    (``_goes_on``); every producer whose data a stage in it needs and cannot read, which also holds for stages that wait
    for finished producers.
    """
    by_id = {stage.stage_id: stage for stage in stages}
    consumers: dict[int, list[StageFacts]] = {stage_id: [] for stage_id in by_id}
    for stage in stages:
        for producer in stage.producers:
            consumers[producer].append(stage)
    again: set[int] = set()
    frontier = [stage.stage_id for stage in stages if stage.standing is Standing.LOST]
    for stage in stages:
        if stage.standing is Standing.WAITING:
            frontier += [p for p in stage.producers if _is_gone(by_id[p])]
    while frontier:
        stage_id = frontier.pop()
        if stage_id in again:
            continue
        again.add(stage_id)
        for stage in [by_id[stage_id], *consumers[stage_id]]:  # whose own consumers may have gone on until now
            if stage.stage_id in again:
                running = [c for c in consumers[stage.stage_id] if c.standing is Standing.RUNNING]
                frontier += [c.stage_id for c in running if not _goes_on(c, stage, again)]
        frontier += [p for p in by_id[stage_id].producers if _cannot_be_read(by_id[p])]
    return {stage.stage_id: _move(stage) for stage in stages if stage.stage_id in again}


def spoils_output(stages: Sequence[StageFacts], moves: Mapping[int, Move]) -> bool:
    """True if a stage that the client has output of would be made anew in a way that may come out differently.

    While nothing of it has left this process, beginning everything again is then the better way.
    """
    return any(
        stage.emitted and (not stage.producers or any(producer in moves for producer in stage.producers))
        for stage in stages
        if moves.get(stage.stage_id) is Move.RERUN
    )


def _goes_on(consumer: StageFacts, producer: StageFacts, again: set[int]) -> bool:
    """``consumer`` can read on from ``producer``, which starts again: it makes the same from the same inputs."""
    return (
        consumer.takes_sources
        and producer.repeats
        and producer.standing is Standing.LOST
        and _move(producer) is Move.RERUN
        and not any(source in again for source in producer.producers)
    )


def _is_gone(stage: StageFacts) -> bool:
    return stage.standing is Standing.FINISHED and not stage.readable


def _cannot_be_read(stage: StageFacts) -> bool:
    return stage.standing is not Standing.WAITING and not stage.readable


def _move(stage: StageFacts) -> Move:
    if stage.standing is Standing.FINISHED:
        return Move.REMAKE
    return Move.RESUME if stage.emitted and stage.resumable else Move.RERUN
