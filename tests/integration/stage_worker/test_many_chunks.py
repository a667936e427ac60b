"""One request, many chunks on each edge."""

from __future__ import annotations

import zlib

import pytest

from stage_worker.engines.sim_content import payload_digest, tensor_chunk, tone
from tests.integration.stage_worker.cluster import assert_empty, local_workers, pipeline, sessions, speech_calls

# All workers of a test share its process: on a busy machine they take many times as long.
pytestmark = pytest.mark.timeout(240)

CHUNKS = 93


@pytest.mark.parametrize("connector", ["auto", "grpc"])
async def test_93_chunks_arrive_in_order_and_none_is_lost(connector: str) -> None:
    plan = pipeline({"tokens": CHUNKS}, {"chunk_bytes": 100_000}, chunk_by="STEP")
    async with local_workers(plan) as workers, sessions(workers) as opened:
        calls = list(speech_calls(workers, "r", "hello", "STEP", connector=connector))
        text, _, audio = [(await session.begin(one))[0] for session, one in zip(opened, calls, strict=True)]
        await audio.wait()
        assert audio.error is None
        words = [event.text for event in text.events if event.text]
        assert len(words) == CHUNKS
        expected = []
        for word in words:
            source = zlib.crc32(word.encode())
            chunk = tensor_chunk(source, 0, 0, 100_000, with_checksum=False)
            expected.append(tone(payload_digest(chunk), 0.01).tobytes())
        assert audio.media == b"".join(expected)
        await assert_empty(workers)
