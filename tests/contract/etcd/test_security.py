"""Users, tokens that expire, and TLS."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from control_plane.etcd import AuthFailed, EtcdClient, EtcdCredentialFiles, EtcdCredentials, EtcdUnavailable
from omnicore import errors
from tests.support.etcd import Certificates, enable_auth, etcd_server

USER = EtcdCredentials(user="omni", password="secret")
TOKEN_TTL_S = 3


async def test_users_with_tokens_that_expire() -> None:
    async with etcd_server(flags=[f"--auth-token-ttl={TOKEN_TTL_S}"]) as etcd:
        enable_auth(etcd, root_password="root", user="omni", password="secret", prefix="k/")

        async with EtcdClient([etcd.endpoint], credentials=EtcdCredentials(user="omni", password="no")) as wrong:
            with pytest.raises(AuthFailed):
                await wrong.get("k/1")
        async with EtcdClient([etcd.endpoint]) as nobody:
            with pytest.raises(errors.OmniError, match="user name is empty"):
                await nobody.get("k/1")

        async with EtcdClient([etcd.endpoint], credentials=USER, timeout_s=60) as client:
            with pytest.raises(errors.PermissionDeniedError):
                await client.get("not/mine")
            with pytest.raises(errors.PermissionDeniedError):
                await anext(client.watch_prefix("not/mine"))
            lost: list[int] = []
            lease = await client.grant_lease(90)
            client.keep_alive(lease.lease_id, lease.ttl_s, lost.append)
            start = await client.put("k/0", b"", lease_id=lease.lease_id)
            for number in (1, 2):
                await asyncio.sleep(TOKEN_TTL_S * 1.3)  # so that the token expires, which no answer tells
                await client.put(f"k/{number}", b"")  # a write: an expired token surely did not apply it
                await client.refresh_lease(lease.lease_id)
                seen = []
                async with contextlib.aclosing(client.watch_prefix("k/", start_revision=start)) as watch:
                    async for batch in watch:
                        seen += [event.kv.key for event in batch.events]
                        if len(seen) == number + 1:
                            break
                assert seen == [f"k/{n}" for n in range(number + 1)]
            assert lost == []


async def test_restart_forgets_tokens_and_an_open_watch_and_leases_go_on() -> None:
    async with etcd_server() as etcd:
        enable_auth(etcd, root_password="root", user="omni", password="secret", prefix="k/")
        async with EtcdClient([etcd.endpoint], credentials=USER, timeout_s=60) as client:
            lost: list[int] = []
            lease = await client.grant_lease(90)
            client.keep_alive(lease.lease_id, lease.ttl_s, lost.append)
            start = await client.put("k/0", b"", lease_id=lease.lease_id)
            async with contextlib.aclosing(client.watch_prefix("k/", start_revision=start)) as watch:
                assert (await anext(watch)).events
                etcd.kill()
                await etcd.restart()
                await client.put("k/1", b"")
                async for batch in watch:
                    if batch.events:
                        assert [event.kv.key for event in batch.events] == ["k/1"]
                        break
            assert await client.refresh_lease(lease.lease_id) == 90
            assert lost == []


async def test_client_certificates(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    files = {"ca": str(certificates.ca), "cert": str(certificates.client_cert), "key": str(certificates.client_key)}
    async with etcd_server(certificates=certificates) as etcd:
        async with EtcdClient([etcd.endpoint], credentials=EtcdCredentialFiles(**files)) as client:
            start = await client.put("k/1", b"1")
            lease = await client.grant_lease(10)
            assert await client.refresh_lease(lease.lease_id) == 10
            async with contextlib.aclosing(client.watch_prefix("k/", start_revision=start)) as watch:
                assert (await anext(watch)).events[0].kv.value == b"1"

        only_ca = EtcdCredentialFiles(ca=str(certificates.ca))
        for credentials in (None, only_ca):
            async with EtcdClient([etcd.endpoint], credentials=credentials, timeout_s=0.5) as stranger:
                with pytest.raises(EtcdUnavailable):
                    await stranger.get("k/1")
        async with EtcdClient([f"https://{etcd.endpoint}"], timeout_s=0.5) as distrustful:
            with pytest.raises(EtcdUnavailable):
                await distrustful.get("k/1")
