"""Whether an engine is dead is asked as soon as a call says so."""

from __future__ import annotations

import asyncio

from omnicore.errors import UnavailableError
from stage_worker.engine import ENGINE_DEAD
from stage_worker.progress import DeathWatch, EngineDiedError


class Engine:
    def __init__(self) -> None:
        self.probes = 0
        self.dead = False
        self.go = asyncio.Event()

    async def probe(self) -> None:
        self.probes += 1
        await self.go.wait()
        if self.dead:
            raise UnavailableError("gone", reason=ENGINE_DEAD)


async def test_many_suspicions_are_one_question_and_an_answer_ends_them() -> None:
    engine, deaths = Engine(), list[EngineDiedError]()
    watch = DeathWatch(engine.probe, deaths.append)
    for _ in range(3):
        watch.suspect()
    await asyncio.sleep(0)
    assert engine.probes == 1
    engine.go.set()
    await asyncio.sleep(0)
    assert not deaths, "it was another engine's output that the call had read"
    engine.dead = True
    watch.suspect()
    await asyncio.sleep(0)
    assert engine.probes == 2
    assert [(error.reason, error.message) for error in deaths] == [(ENGINE_DEAD, "the engine has died: gone")]


async def test_it_waits_for_no_engine_at_its_end() -> None:
    engine, deaths = Engine(), list[EngineDiedError]()
    watch = DeathWatch(engine.probe, deaths.append)
    watch.suspect()
    await asyncio.sleep(0)
    watch.close()
    await asyncio.sleep(0)
    engine.go.set()
    await asyncio.sleep(0)
    assert not deaths
