"""Certificates, authorities and tokens change under running servers and callers."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from connectors.channels import IDLE_S, PeerChannels
from control_plane.etcd import EtcdClient, EtcdCredentialFiles
from omnicore.access import Role
from omnicore.clock import ManualClock
from omnicore.errors import UnauthenticatedError, UnavailableError, UnimplementedError
from omnicore.security import Security
from omnicore.tokens import TokenFile
from tests.integration.security.harness import outcome, serial, serving
from tests.support.certificates import DevCerts
from tests.support.etcd import etcd_server

pytestmark = pytest.mark.timeout(120)

READ = "RegistryService/ListReplicas"
WORKER = "worker.omniplane.internal"


@pytest.fixture
def mine(tmp_path: Path) -> DevCerts:
    """A set that the test may change."""
    return DevCerts.make(tmp_path / "mine")


async def test_a_renewed_certificate_is_shown_without_a_restart(mine: DevCerts) -> None:
    server = Security(mine.settings("worker"), serves=Role.WORKER)
    client = Security(mine.settings("gateway"))
    async with serving(server) as address, client.to_worker(address) as old:
        assert isinstance(await outcome(old, READ), UnimplementedError)
        first = await serial(address, mine, WORKER)
        DevCerts.make(mine.directory)
        second = await serial(address, mine, WORKER)
        assert second != first
        assert isinstance(await outcome(old, READ), UnimplementedError), "what is connected stays so"
        async with client.to_worker(address) as new:
            assert isinstance(await outcome(new, READ), UnimplementedError)


async def test_a_wrong_certificate_changes_nothing(mine: DevCerts, strangers: DevCerts) -> None:
    """Half of a pair, one of another authority, one of another role, an expired one: the former stays in force."""
    server = Security(mine.settings("worker"), serves=Role.WORKER)
    good = {name: Path(mine.path(name)).read_bytes() for name in ("worker.pem", "worker.key")}
    async with serving(server) as address:
        first = await serial(address, mine, WORKER)
        for cert, key in (
            (Path(strangers.path("worker.pem")).read_bytes(), good["worker.key"]),
            (Path(strangers.path("worker.pem")).read_bytes(), Path(strangers.path("worker.key")).read_bytes()),
            (Path(mine.path("gateway.pem")).read_bytes(), Path(mine.path("gateway.key")).read_bytes()),
            (b"", b""),
        ):
            Path(mine.path("worker.pem")).write_bytes(cert)
            Path(mine.path("worker.key")).write_bytes(key)
            assert await serial(address, mine, WORKER) == first
        DevCerts.make(mine.directory, "--days", "-1", "--role", "worker")
        assert await serial(address, mine, WORKER) == first
        Path(mine.path("worker.pem")).unlink()
        assert await serial(address, mine, WORKER) == first
        DevCerts.make(mine.directory, "--role", "worker")
        assert await serial(address, mine, WORKER) != first


async def test_the_authority_is_replaced_in_three_steps(mine: DevCerts, tmp_path: Path) -> None:
    """Both are believed for a while; then certificates of the new one; then only the new one."""
    ca = Path(mine.path("ca.pem"))
    old_ca = ca.read_bytes()
    new = DevCerts.make(tmp_path / "new")
    server = Security(mine.settings("worker"), serves=Role.WORKER)
    client = Security(new.settings("gateway"))

    async def attempt() -> type[Exception]:
        async with client.to_worker(address) as channel:
            return type(await outcome(channel, READ))

    async with serving(server) as address:
        assert await attempt() is UnavailableError
        ca.write_bytes(old_ca + Path(new.path("ca.pem")).read_bytes())
        Path(new.path("ca.pem")).write_bytes(ca.read_bytes())
        assert await attempt() is UnimplementedError
        for name in ("worker.key", "worker.pem"):
            shutil.copy(new.path(name), mine.path(name))
        assert await attempt() is UnimplementedError
        ca.write_bytes(Path(new.path("ca.pem")).read_bytes().removeprefix(old_ca))
        Path(new.path("ca.pem")).write_bytes(ca.read_bytes())
        assert await attempt() is UnimplementedError


async def test_tokens_rotate_without_a_restart_on_either_side(tmp_path: Path) -> None:
    at_server, at_worker = tmp_path / "server.token", tmp_path / "worker.token"
    old, new = "old-token-" * 3, "new-token-" * 3
    at_server.write_text(f"{old}\n")
    at_worker.write_text(f"{old}\n")
    worker = Security(token_file=str(at_worker))
    tokens = {Role.WORKER: TokenFile("--registration-token-file", str(at_server))}
    async with serving(Security(), tokens) as address, worker.to_control_plane(address) as channel:

        async def attempt() -> type[Exception]:
            return type(await outcome(channel, "RegistryService/Register"))

        assert await attempt() is UnimplementedError
        at_server.write_text(f"{old}\n{new}\n")
        assert await attempt() is UnimplementedError
        at_worker.write_text(f"{new}\n")
        assert await attempt() is UnimplementedError
        at_server.write_text(f"{new}\n")
        assert await attempt() is UnimplementedError
        at_worker.write_text(f"{old}\n")
        assert await attempt() is UnauthenticatedError


async def test_workers_dial_peers_with_the_renewed_certificate(mine: DevCerts) -> None:
    clock = ManualClock()
    security = Security(mine.settings("worker"), serves=Role.WORKER)
    channels = PeerChannels(clock, security.to_worker, lambda: security.version)
    async with serving(security) as address:
        with channels.use(address) as first, channels.use(address) as shared:
            assert first is shared
            DevCerts.make(mine.directory)
            with channels.use(address) as second:
                assert second is not first
                assert isinstance(await outcome(second, READ), UnimplementedError)
            await channels.sweep()
            assert isinstance(await outcome(first, READ), UnimplementedError), "still used: not closed"
        await channels.sweep()
        with pytest.raises(Exception, match="closed"):
            await outcome(first, READ)
        clock.advance(IDLE_S)
        await channels.sweep()
        with channels.use(address) as third:
            assert third is not second
    await channels.close()


async def test_etcds_authority_and_our_certificate_for_it_change(mine: DevCerts, tmp_path: Path) -> None:
    """One client, before and after; its watch goes on."""
    made = mine.for_etcd()
    files = EtcdCredentialFiles(ca=str(made.ca), cert=str(made.client_cert), key=str(made.client_key))
    async with (
        etcd_server(certificates=made) as etcd,
        EtcdClient([etcd.endpoint], credentials=files, timeout_s=20) as client,
    ):
        start = await client.put("k/1", b"")
        async with contextlib.aclosing(client.watch_prefix("k/", start_revision=start)) as watch:
            assert (await anext(watch)).events
            new = DevCerts.make(tmp_path / "new")
            for path in new.directory.iterdir():
                shutil.copy(path, mine.directory / path.name)
            etcd.kill()
            await etcd.restart(files)
            await client.put("k/2", b"")
            async for batch in watch:
                if batch.events:
                    assert [event.kv.key for event in batch.events] == ["k/2"]
                    break
