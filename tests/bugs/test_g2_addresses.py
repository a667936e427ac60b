"""Known failures of ports and peers on one host; ``docs/known-failures.md`` has the list."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket

from omnicore.errors import UnavailableError
from tests.bugs.harness import system
from tests.integration.stage_worker.cluster import (
    assert_empty,
    call,
    flow_in,
    flow_out,
    local_worker,
    pipeline,
    sessions,
)
from tests.support.ports import reserved_port

SPEECH = """
pipeline: speech
async_chunk: true
entrypoints: {chat: 0}
stages:
  - {stage_id: 0, engine: sim, num_replicas: 2, final_output: true, final_output_type: text, sim: {output: text}}
  - {stage_id: 1, engine: sim, num_replicas: 2, final_output: true, final_output_type: audio, sim: {output: audio}}
edges: [{from: 0, to: 1}]
"""


async def test_bug_21_replicas_and_stages_of_one_host_have_ports_of_their_own_and_reach_the_right_one() -> None:
    async with system(balancing_policy="round-robin") as made:
        await made.apply(SPEECH)
        first = await made.worker("speech", 0)
        # What would be the next port in a row is another program's.
        _, _, port = first.identity.endpoint.rpartition(":")
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # or it is one's already
                other.bind(("127.0.0.1", int(port) + 1 if int(port) < 65535 else 0))
                other.listen()
            workers = [first, *await asyncio.gather(*(made.worker("speech", stage_id) for stage_id in (0, 1, 1)))]
            assert len({worker.identity.endpoint for worker in workers}) == 4
            for stage_id in (0, 1):
                await made.routable(2, "speech", stage_id)
            answers = await asyncio.gather(
                *(made.chat("speech", modalities=["text", "audio"], seed=number) for number in range(16))
            )
        for status, body in answers:
            assert status == 200
            audio = body["choices"][0]["message"]["audio"]
            # The engine makes its audio of the text that it got: another request's would not fit.
            assert audio["transcript"] == body["choices"][0]["message"]["content"]
            assert len(base64.b64decode(audio["data"])) > 44
        for stage_id in (0, 1):
            slots = made.gateway.router.pools["speech", stage_id].slots.values()
            assert [slot.calls for slot in slots] == [8, 8]


async def test_bug_26_a_peer_that_is_not_there_fails_its_requests_in_time_and_is_used_once_it_comes() -> None:
    plan = pipeline({"tokens": 10})
    port = reserved_port()
    limits = {"flow_open_timeout_s": 5.0, "chunk_timeout_s": 20.0}
    async with local_worker(plan, 1, **limits) as talker, sessions([talker]) as (session,):
        source = flow_in(talker)
        source.from_stage = source.flow.replica.stage.stage_id = 0
        source.flow.endpoint = f"127.0.0.1:{port}"
        async with asyncio.timeout(60):  # its limit is 20 s
            failed = await session.run(call("r", emit=False, inputs=[source]))
        assert isinstance(failed.error, UnavailableError)
        assert f"127.0.0.1:{port}" in failed.error.message or failed.error.metadata["peer_stage"] == "0"
        await assert_empty([talker])
        async with local_worker(plan, 0, listen=f"127.0.0.1:{port}") as thinker, sessions([thinker]) as (text,):
            (said,) = await text.begin(call("again", "hello", outputs=[flow_out(1)]))
            heard = await session.run(call("again", emit=False, inputs=[flow_in(thinker)]))
            assert heard.error is None
            assert (await said.wait()).error is None
            await assert_empty([talker, thinker])
