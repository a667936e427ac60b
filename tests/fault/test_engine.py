"""An engine hangs for good while its process lives, answers pings and holds its connections."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.fault.clients import ask, http_session
from tests.fault.cluster import DEPLOY, TTL_S, cluster, eventually, rounds
from tests.fault.record import record

UNROUTED_S = 3.0
"""The bar for hangs."""
LOST_SILENCE_S = 10.0
"""After the end of its lease, so long without a word, and its calls are taken away (gateway/router.py)."""
SLACK_S = 12.0
HANGS = DEPLOY.replace("tokens: 40", "tokens: 40, hang_after_tokens: 20")


async def test_a_stuck_engine(tmp_path: Path) -> None:
    # Elsewhere it would hang at the same token: what is shown here is that nothing else does.
    flags = {"--replay-limit": "0"}
    async with cluster(tmp_path, control_planes=1, gateways=1, deploy_yaml=HANGS, gateway_flags=flags) as system:
        gateway, plane = system.gateways[0], system.control_planes[0]
        async with http_session() as session, rounds(system) as watch:
            stuck = asyncio.create_task(ask(session, gateway))  # more than 20 tokens
            suspects: list[int] = []
            since_s = time.monotonic()
            while not suspects:
                # The other worker may be late for a moment, but has nothing to do.
                suspects = [
                    number
                    for number, replica in (await system.replicas(plane)).items()
                    if replica.suspect and replica.load.queue_length
                ]
                assert time.monotonic() < since_s + SLACK_S, "nobody is suspect"
            unrouted_s = await watch.unrouted(suspects[0], since_s)
            for _ in range(4):
                short = await ask(session, gateway, max_tokens=5)
                assert short.ok, short
            await eventually(stuck.done, "the end of what hangs", TTL_S + LOST_SILENCE_S + SLACK_S)
            outcome = stuck.result()
            assert (outcome.error, bool(outcome.text)) == ("replica_hung", True), outcome
            assert all(worker.running.running for worker in system.workers), "its process lives"
    assert unrouted_s < UNROUTED_S
    said = "its answer stops, and ends with an error; all others complete"
    record("worker", "engine hangs, process lives", "one request", said, unrouted=unrouted_s, error=outcome.took_s)
