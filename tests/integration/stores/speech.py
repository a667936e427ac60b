"""A whole request whose stages hand over through a store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.integration.stage_worker.cluster import assert_empty, local_workers, pipeline, sessions, speech_calls
from tests.integration.stage_worker.test_flows import spoken

REQUESTS = 3
CHUNK_BYTES = 100_000


async def assert_stages_hand_over(kind: str, extra: Mapping[str, Any]) -> None:
    """Requests over three workers with connector ``kind``: what is spoken is what was written, nothing is left."""
    plan = pipeline({"tokens": 20, "tpot_ms": 1}, {"chunk_bytes": CHUNK_BYTES})
    plan.connectors.add(name=kind, kind=kind).extra.update(extra)
    for edge in plan.edges:
        edge.connector = kind
    async with local_workers(plan) as workers, sessions(workers) as opened:

        async def one(name: str) -> None:
            calls = speech_calls(workers, name, "say it", connector=kind)
            made = [(await session.begin(call))[0] for session, call in zip(opened, calls, strict=True)]
            text, _, audio = [await call.wait() for call in made]
            assert [call.error for call in made] == [None] * 3
            assert text.text
            assert audio.media == spoken(text.text, CHUNK_BYTES)

        await asyncio.gather(*(one(f"r{number}") for number in range(REQUESTS)))
        await assert_empty(workers)
