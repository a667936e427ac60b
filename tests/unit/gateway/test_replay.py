"""Which stages start again: every rule once, and what must hold for any graph and any loss."""

from __future__ import annotations

import random
from collections.abc import Set as AbstractSet

import pytest

from gateway.replay import Move, StageFacts, Standing, plan_restart, spoils_output

R, F, L, W = Standing.RUNNING, Standing.FINISHED, Standing.LOST, Standing.WAITING


def chain(
    *standings: Standing,
    unreadable: AbstractSet[int] = frozenset(),
    emits: AbstractSet[int] = frozenset(),
    repeats: AbstractSet[int] = frozenset(),
    takes: AbstractSet[int] = frozenset(),
) -> list[StageFacts]:
    """thinker → talker → code2wav…; stages in ``emits`` have given output, of the first with its tokens."""
    return [
        StageFacts(
            n,
            (n - 1,) if n else (),
            standing,
            readable=n not in unreadable,
            emitted=n in emits,
            resumable=n == 0,
            repeats=n in repeats,
            takes_sources=n in takes,
        )
        for n, standing in enumerate(standings)
    ]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        pytest.param(chain(R, R, L), {2: Move.RERUN}, id="last: ancestors go on"),
        pytest.param(chain(R, L, R), {1: Move.RERUN, 2: Move.RERUN}, id="middle: with what reads from it"),
        pytest.param(chain(L, R, R, emits={0, 2}), {0: Move.RESUME, 1: Move.RERUN, 2: Move.RERUN}, id="first: resumes"),
        pytest.param(chain(L, R, R), {0: Move.RERUN, 1: Move.RERUN, 2: Move.RERUN}, id="first, nothing brought yet"),
        pytest.param(chain(F, R, L, emits={0}), {2: Move.RERUN}, id="a finished ancestor stays finished"),
        pytest.param(
            chain(F, L, R, unreadable={0}, emits={0}),
            {0: Move.REMAKE, 1: Move.RERUN, 2: Move.RERUN},
            id="a finished ancestor whose data is gone is made again for its consumers",
        ),
        pytest.param(
            chain(F, R, L, unreadable={0}, emits={0}), {2: Move.RERUN}, id="data that nobody needs may be gone"
        ),
        pytest.param(
            chain(R, R, L, unreadable={1}), {1: Move.RERUN, 2: Move.RERUN}, id="retention lost: its producer too"
        ),
        pytest.param(
            chain(R, R, L, unreadable={0, 1}, emits={0}),
            {0: Move.RESUME, 1: Move.RERUN, 2: Move.RERUN},
            id="nothing kept: everything",
        ),
        pytest.param(chain(L, R, L), {0: Move.RERUN, 1: Move.RERUN, 2: Move.RERUN}, id="several at once"),
        pytest.param(chain(F, W, W), {}, id="nothing lost"),
        pytest.param(
            chain(F, W, W, unreadable={0}, emits={0}), {0: Move.REMAKE}, id="data gone before its consumer began"
        ),
        pytest.param(chain(F, L, W), {1: Move.RERUN}, id="waiting stages wait on"),
        pytest.param(
            chain(R, L, R, emits={0, 2}, repeats={1}, takes={2}), {1: Move.RERUN}, id="its consumer goes on with it"
        ),
        pytest.param(
            chain(R, L, R, repeats={1}), {1: Move.RERUN, 2: Move.RERUN}, id="a consumer that takes no other source"
        ),
        pytest.param(chain(R, L, R, takes={2}), {1: Move.RERUN, 2: Move.RERUN}, id="it may come out differently"),
        pytest.param(
            chain(L, R, R, emits={0}, repeats={0}, takes={1}),
            {0: Move.RESUME, 1: Move.RERUN, 2: Move.RERUN},
            id="what resumes is not made again from the start",
        ),
        pytest.param(
            chain(L, L, R, repeats={0, 1}, takes={1, 2}),
            {0: Move.RERUN, 1: Move.RERUN, 2: Move.RERUN},
            id="made again from inputs that are made again",
        ),
        pytest.param(
            chain(R, L, R, unreadable={0}, repeats={1}, takes={1, 2}),
            {0: Move.RERUN, 1: Move.RERUN, 2: Move.RERUN},
            id="its own producer has to start again for it",
        ),
        pytest.param(
            chain(R, L, R, R, repeats={1, 2}, takes={2, 3}), {1: Move.RERUN}, id="nor does who reads from its consumer"
        ),
        pytest.param(
            chain(R, R, L, unreadable={1}, repeats={1, 2}, takes={2}),
            {1: Move.RERUN, 2: Move.RERUN},
            id="a producer that has only the rest, and whose consumer is lost",
        ),
    ],
)
def test_rules(stages: list[StageFacts], expected: dict[int, Move]) -> None:
    assert plan_restart(stages) == expected


def test_a_stage_whose_tokens_are_not_known_runs_again() -> None:
    stages = [StageFacts(0, (), L, readable=False, emitted=True, resumable=False)]
    assert plan_restart(stages) == {0: Move.RERUN}
    assert spoils_output(stages, {0: Move.RERUN})


def test_output_made_from_the_same_input_is_not_spoilt() -> None:
    kept = chain(R, R, L, emits={0, 2})
    assert not spoils_output(kept, plan_restart(kept))
    remade = chain(R, L, R, emits={0, 2})
    assert spoils_output(remade, plan_restart(remade))


def random_request(rng: random.Random) -> list[StageFacts]:
    """A graph of up to 7 stages, each with any producers before it, and any state a request can be in."""
    stages: list[StageFacts] = []
    for n in range(rng.randint(1, 7)):
        producers = tuple(p for p in range(n) if rng.random() < 0.4)
        ready = all(stages[p].standing is F for p in producers)
        standing = rng.choice([R, F, L, W]) if ready else rng.choice([R, L, W])
        stages.append(
            StageFacts(
                n,
                producers,
                standing,
                readable=standing in (R, F) and rng.random() < 0.7,
                emitted=standing is not W and rng.random() < 0.5,
                resumable=rng.random() < 0.5,
                repeats=rng.random() < 0.6,
                takes_sources=rng.random() < 0.6,
            )
        )
    return stages


def goes_on(stage: StageFacts, stages: list[StageFacts], moves: dict[int, Move]) -> bool:
    """All its producers that start again make the same again, from the same inputs, and it can take them."""
    producers = [stages[p] for p in stage.producers if p in moves]
    return stage.takes_sources and all(
        p.standing is L and p.repeats and moves[p.stage_id] is Move.RERUN and not set(p.producers) & set(moves)
        for p in producers
    )


def test_for_any_graph_and_loss() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        stages = random_request(rng)
        moves = plan_restart(stages)
        for stage in stages:
            again = stage.stage_id in moves
            if stage.standing is L:
                assert again
            if stage.standing is W:
                assert not again
            if again:
                for producer in stage.producers:  # all it reads exists, or is made
                    assert producer in moves or stages[producer].readable or stages[producer].standing is W
            if stage.standing is R and any(p in moves for p in stage.producers):
                assert again or goes_on(stage, stages, moves)  # nobody else reads from what starts again
            if again:
                assert (moves[stage.stage_id] is Move.REMAKE) == (stage.standing is F)
        # Nothing restarts without a reason: it is lost, reads from what restarts, or feeds what needs its data.
        for stage_id in moves:
            stage = stages[stage_id]
            consumers = [s for s in stages if stage_id in s.producers]
            assert (
                stage.standing is L
                or (stage.standing is R and not goes_on(stage, stages, moves))
                or (not stage.readable and any(c.stage_id in moves or c.standing is W for c in consumers))
            )
        # What was replayed is running: the same loss does not ask for more.
        after = [
            StageFacts(s.stage_id, s.producers, R, readable=True, emitted=s.emitted, resumable=s.resumable)
            if s.stage_id in moves
            else s
            for s in stages
        ]
        assert plan_restart(after) == {}
