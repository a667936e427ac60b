"""Who gets a stream of ``omnicore.grpc_stream``: as it is with gRPC's own channels (``test_handshakes.py``)."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import ssl

import grpc
import grpc.aio
import pytest
import uvloop

from omnicore.access import Role
from omnicore.grpc_stream import Dial, open_stream
from omnicore.security import Security
from tests.support.certificates import DevCerts
from tests.support.streams import METHOD, Received, code_of, port, serving

GUARD_S = 90.0


async def refused(dial: Dial) -> str:
    """The words with which a connection, or the stream on it, fails."""

    async def call() -> None:
        async with asyncio.timeout(GUARD_S), open_stream(dial, METHOD, Received()) as stream:
            stream.write(b"echo x")
            await stream.ended()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call()
    assert code_of(caught) is grpc.StatusCode.UNAVAILABLE
    return caught.value.details() or ""


async def test_members_and_others(certs: DevCerts, strangers: DevCerts) -> None:
    gateway = Security(certs.settings("gateway"))
    async with (
        asyncio.timeout(GUARD_S),
        serving(security=Security(certs.settings("worker"), serves=Role.WORKER)) as (
            address,
            _,
        ),
    ):
        dial = gateway.dial_worker(address)
        async with open_stream(dial, METHOD, received := Received()) as stream:
            contents = [random.Random(size).randbytes(size) for size in (5, 20_000, 3_000_000)]
            for content in contents:
                stream.write(b"echo " + content)
            assert await received.first(3) == contents
            stream.write(b"end")
            await stream.ended()
        # Without a name it must be for the address, which a certificate for development is.
        async with open_stream(dataclasses.replace(dial, server_name=""), METHOD, received := Received()) as stream:
            stream.write(b"echo x")
            await received.first(1)
        assert "ostname" in await refused(
            dataclasses.replace(dial, server_name=f"{Role.CONTROL_PLANE}.omniplane.internal")
        )
        assert "certificate verify failed" in await refused(
            Security(strangers.settings("gateway")).dial_worker(address)
        )
        # One who believes our authority, but shows a certificate of another one; one who shows none; and plaintext.
        posing = ssl.create_default_context(cafile=certs.path("ca.pem"))
        posing.set_alpn_protocols(["h2"])
        await refused(dataclasses.replace(dial, tls=posing))
        posing.load_cert_chain(strangers.path("gateway.pem"), strangers.path("gateway.key"))
        await refused(dataclasses.replace(dial, tls=posing))
        await refused(Dial(address))
    async with serving() as (address, _):
        await refused(gateway.dial_worker(address))


async def test_tls_without_http2(certs: DevCerts) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certs.path("worker.pem"), certs.path("worker.key"))

    async with port(lambda _: b"", context) as address:
        assert "does not speak HTTP/2" in await refused(Security(certs.settings("gateway")).dial_worker(address))


async def test_a_server_that_does_not_shake_hands(certs: DevCerts) -> None:
    async with port(lambda _: b"") as address:
        dial = Security(certs.settings("gateway")).dial_worker(address)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), open_stream(dial, METHOD, Received()):
                raise AssertionError("there is no stream")


def test_on_the_loop_of_services(certs: DevCerts, strangers: DevCerts) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_members_and_others(certs, strangers))
        runner.run(test_tls_without_http2(certs))
        runner.run(test_a_server_that_does_not_shake_hands(certs))
