"""Who gets a stream of a ``StreamServer``: as it is with gRPC's own servers (``test_handshakes.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop

from omnicore import access, errors, grpc_stream, grpc_stream_server
from omnicore.access import Role
from omnicore.grpc_stream import Dial, open_stream
from omnicore.security import Security
from tests.integration.security.harness import serial
from tests.support.certificates import DevCerts
from tests.support.processes import wait_until
from tests.support.stream_server import Calls, stream_server
from tests.support.streams import METHOD, Received, code_of

GUARD_S = 60.0
SESSION = "/omni.v1.StageService/Session"
WORKER = "worker.omniplane.internal"


@contextlib.asynccontextmanager
async def serving(certs: DevCerts) -> AsyncIterator[tuple[str, Calls]]:
    """As a worker serves its sessions."""
    security = Security(certs.settings("worker"), serves=Role.WORKER)
    async with stream_server(
        check=lambda _, caller: security.check_caller(SESSION, caller), tls=security.server_context
    ) as served:
        yield served


async def outcome(dial: Dial) -> errors.OmniError | None:
    """How a stream ends."""
    try:
        async with asyncio.timeout(GUARD_S), open_stream(dial, METHOD, Received()) as stream:
            stream.write(b"end")
            await stream.ended()
    except grpc.aio.AioRpcError as error:
        return errors.from_rpc_error(error)
    return None


async def test_roles(certs: DevCerts) -> None:
    async with serving(certs) as (address, calls):
        for role in [*Role, "etcd"]:
            mine = Role.CLIENT if role == "etcd" else Role(role)  # a certificate without a role is a client's
            ended = await outcome(Security(certs.settings(role)).dial_worker(address))
            if mine in access.allowed(SESSION):
                assert ended is None, role
                continue
            assert isinstance(ended, errors.PermissionDeniedError), (role, ended)
            assert (ended.reason, ended.metadata["certificate"]) == ("ROLE_REQUIRED", role)
            assert mine in ended.message
        assert len(calls.all) == len(access.allowed(SESSION) & set(Role)) < len(Role)


async def test_clients_of_grpc(certs: DevCerts) -> None:
    content = bytes(3_000_000)
    async with asyncio.timeout(GUARD_S), serving(certs) as (address, calls):
        async with Security(certs.settings("gateway")).to_worker(address) as channel:
            call: Any = channel.stream_stream(METHOD, None, None)(None)
            await call.write(b"echo " + content)
            assert await call.read() == content
        async with Security(certs.settings("client")).to_worker(address) as channel:
            call = channel.stream_stream(METHOD, None, None)(None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert code_of(caught) is grpc.StatusCode.PERMISSION_DENIED
        assert len(calls.all) == 1


async def test_who_is_no_member_gets_no_stream(certs: DevCerts, strangers: DevCerts) -> None:
    gateway = Security(certs.settings("gateway"))
    posing = ssl.create_default_context(cafile=certs.path("ca.pem"))
    posing.set_alpn_protocols(["h2"])
    also_posing = ssl.create_default_context(cafile=certs.path("ca.pem"))
    also_posing.load_cert_chain(strangers.path("gateway.pem"), strangers.path("gateway.key"))
    async with serving(certs) as (address, calls):
        dials = {
            "another authority": Security(strangers.settings("gateway")).dial_worker(address),
            "no certificate": Dial(address, posing, WORKER),
            "one of another authority": Dial(address, also_posing, WORKER),
            "no TLS": Dial(address),
        }
        for who, dial in dials.items():
            assert isinstance(await outcome(dial), errors.UnavailableError), who
        assert not calls.all
        assert await outcome(gateway.dial_worker(address)) is None
    async with stream_server() as (address, calls):
        assert isinstance(await outcome(gateway.dial_worker(address)), errors.UnavailableError)
        assert not calls.all


async def test_a_renewed_certificate_is_shown_from_the_next_connection_on(certs: DevCerts, tmp_path: Path) -> None:
    mine = DevCerts.make(tmp_path / "mine")
    async with asyncio.timeout(GUARD_S), serving(mine) as (address, _):
        gateway = Security(mine.settings("gateway"))
        async with open_stream(gateway.dial_worker(address), METHOD, received := Received()) as stream:
            stream.write(b"echo before")
            await received.first(1)
            first = await serial(address, mine, WORKER)
            DevCerts.make(mine.directory)
            assert await serial(address, mine, WORKER) != first
            assert await outcome(gateway.dial_worker(address)) is None
            stream.write(b"echo after")
            assert await received.first(2) == [b"before", b"after"], "what is connected stays so"
        # The authority, too: who was a member is none.
        Path(mine.path("ca.pem")).write_bytes(Path(certs.path("ca.pem")).read_bytes())
        for name in ("worker.pem", "worker.key"):
            Path(mine.path(name)).write_bytes(Path(certs.path(name)).read_bytes())
        assert await outcome(Security(certs.settings("gateway")).dial_worker(address)) is None


async def test_handshakes_that_come_to_nothing_leave_nothing(certs: DevCerts, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with serving(certs) as (address, calls):
        host, _, port = address.rpartition(":")
        assert await outcome(Security(certs.settings("gateway")).dial_worker(address)) is None
        before, patience_s = open_files(), grpc_stream_server._HANDSHAKE_S
        monkeypatch.setattr(grpc_stream_server, "_HANDSHAKE_S", 0.1)
        for wire in (b"", b"\x16\x03", b"GET / HTTP/1.1\r\n\r\n", bytes(100)) * 2:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire)
            if len(wire) < 5:
                await asyncio.wait_for(reader.read(), GUARD_S)
            writer.close()
        await wait_until(lambda: open_files() <= before, GUARD_S)
        monkeypatch.setattr(grpc_stream_server, "_HANDSHAKE_S", patience_s)
        assert await outcome(Security(certs.settings("gateway")).dial_worker(address)) is None
        # Stopping does not wait for a handshake.
        _, writer = await asyncio.open_connection(host, int(port))
        monkeypatch.setattr(grpc_stream_server, "_HANDSHAKE_S", GUARD_S)
        await asyncio.wait_for(calls.server.close(), GUARD_S / 2)
        writer.close()


async def test_who_does_not_close_its_side_of_tls_is_cut(certs: DevCerts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_stream_server, "GOODBYE_S", 0.1)
    monkeypatch.setattr(grpc_stream_server, "TLS_GOODBYE_S", 0.1)
    monkeypatch.setattr(grpc_stream, "TLS_GOODBYE_S", 0.1)
    async with serving(certs) as (address, calls):
        context = ssl.create_default_context(cafile=certs.path("ca.pem"))
        context.load_cert_chain(certs.path("gateway.pem"), certs.path("gateway.key"))
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=context, server_hostname=WORKER, limit=1
        )  # at whose limit nothing more is read
        await wait_until(lambda: len(calls.server.streams) == 1, GUARD_S)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await wait_until(lambda: not calls.server.streams, GUARD_S / 2)
        assert await reader.readexactly(1)
        writer.transport.abort()


@pytest.mark.parametrize("test", [test_roles, test_clients_of_grpc])
def test_on_the_loop_of_services(test: Callable[[DevCerts], Coroutine[Any, Any, None]], certs: DevCerts) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test(certs))


def test_no_member_gets_no_stream_on_the_loop_of_services(certs: DevCerts, strangers: DevCerts) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_who_is_no_member_gets_no_stream(certs, strangers))


def test_handshakes_on_the_loop_of_services(certs: DevCerts, monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_handshakes_that_come_to_nothing_leave_nothing(certs, monkeypatch))
        runner.run(test_who_does_not_close_its_side_of_tls_is_cut(certs, monkeypatch))
