"""Who may open which stream at the port of a worker's sessions, and flows between workers that prove who they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from omnicore import access, errors
from omnicore.access import Role
from omnicore.grpc_stream import open_stream
from omnicore.security import Security
from stage_worker import session_stream, subscriptions
from stage_worker.worker import Worker
from tests.integration.stage_worker.cluster import (
    Session,
    assert_empty,
    call,
    flow_in,
    flow_out,
    local_worker,
    pipeline,
)
from tests.support.certificates import DevCerts
from tests.support.streams import Received

PLAN = pipeline({"tokens": 20, "tpot_ms": 1})


def worker_security(certs: DevCerts) -> Security:
    return Security(certs.settings("worker"), serves=Role.WORKER)


@contextlib.asynccontextmanager
async def session(worker: Worker, certs: DevCerts) -> AsyncIterator[Session]:
    channel = Security(certs.settings("gateway")).to_worker(worker.identity.endpoint)
    opened = Session(worker, channel)
    try:
        await opened.open()
        yield opened
    finally:
        await opened.close()


@pytest.mark.parametrize("method", [session_stream.METHOD, subscriptions.METHOD])
async def test_each_stream_has_roles_of_its_own(certs: DevCerts, method: str) -> None:
    async with local_worker(PLAN, 0, security=worker_security(certs)) as worker:
        for role in Role:
            dial = Security(certs.settings(role)).dial_worker(worker.identity.session_endpoint)
            async with asyncio.timeout(60), open_stream(dial, method, Received()) as stream:
                stream.write(b"")  # a greeting that says nothing is refused, but heard
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stream.ended()
            refused = errors.from_rpc_error(caught.value)
            assert isinstance(refused, errors.PermissionDeniedError) != (role in access.allowed(method)), refused


async def test_flows_over_tls(certs: DevCerts) -> None:
    security = worker_security(certs)
    async with (
        local_worker(PLAN, 0, security=security) as thinker,
        local_worker(PLAN, 1, security=security) as talker,
        session(thinker, certs) as think,
        session(talker, certs) as talk,
    ):
        (text,) = await think.begin(call("r", "hello", outputs=[flow_out(1)]))
        assert (await talk.run(call("r", emit=False, inputs=[flow_in(thinker)]))).error is None
        assert (await text.wait()).error is None
        await assert_empty([thinker, talker])


async def test_a_producer_of_another_authority_is_not_read(certs: DevCerts, strangers: DevCerts) -> None:
    async with (
        local_worker(PLAN, 0, security=worker_security(strangers)) as stranger,
        local_worker(PLAN, 1, security=worker_security(certs)) as talker,
        session(talker, certs) as talk,
    ):
        lost = await talk.run(call("r", emit=False, inputs=[flow_in(stranger)]))
        assert isinstance(lost.error, errors.UnavailableError)
        assert "certificate" in lost.error.message.lower()
        await assert_empty([talker])
