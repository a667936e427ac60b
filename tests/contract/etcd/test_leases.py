"""Leases: kept alive over restarts and pauses, and lost exactly once."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.etcd import EtcdClient, LeaseLost
from omnicore import errors
from tests.support.etcd import etcd_server
from tests.support.processes import wait_until


async def test_lease_is_granted_renewed_and_revoked() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        lease = await client.grant_lease(30)
        assert lease.ttl_s == 30
        await client.put("a", b"1", lease_id=lease.lease_id)
        assert await client.refresh_lease(lease.lease_id) == 30
        left = await client.lease_time_to_live(lease.lease_id)
        assert 0 < left.ttl_s <= left.granted_ttl_s == 30
        assert left.keys == ["a"]
        assert await client.leases() == [lease.lease_id]
        await client.revoke_lease(lease.lease_id)
        await client.revoke_lease(lease.lease_id)
        assert await client.get("a") is None
        assert (await client.lease_time_to_live(lease.lease_id)).ttl_s == -1
        with pytest.raises(LeaseLost):
            await client.refresh_lease(lease.lease_id)


async def test_lease_id_can_be_chosen_once() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        assert (await client.grant_lease(30, lease_id=77)).lease_id == 77
        with pytest.raises(errors.AlreadyExistsError):
            await client.grant_lease(30, lease_id=77)


async def test_many_renewals_share_one_stream() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        leases = await asyncio.gather(*(client.grant_lease(60) for _ in range(300)))
        ids = [lease.lease_id for lease in leases]
        lives = await asyncio.gather(*(client.refresh_lease(lease_id) for lease_id in ids * 2))
        assert lives == [60.0] * 600
        mixed = await asyncio.gather(
            *(client.refresh_lease(lease_id) for lease_id in (ids[0], 999, ids[1])), return_exceptions=True
        )
        assert mixed[0] == mixed[2] == 60.0
        assert isinstance(mixed[1], LeaseLost)


async def test_kept_lease_outlives_its_ttl_and_ends_without_renewal() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        lost: list[int] = []
        kept, left = await client.grant_lease(6), await client.grant_lease(6)
        await client.put("kept", b"", lease_id=kept.lease_id)
        await client.put("left", b"", lease_id=left.lease_id)
        client.keep_alive(kept.lease_id, kept.ttl_s, lost.append)
        while await client.get("left") is not None:
            await asyncio.sleep(0.05)
        assert await client.get("kept") is not None
        assert lost == []


async def test_revoked_lease_is_lost_once() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        lost: list[int] = []
        one, two = await client.grant_lease(15), await client.grant_lease(60)  # the loss is found after a third of it
        for lease in (one, two):
            client.keep_alive(lease.lease_id, lease.ttl_s, lost.append)
        etcd.ctl("lease", "revoke", f"{one.lease_id:x}")
        await wait_until(lambda: bool(lost), what="the loss of the lease")
        await client.refresh_lease(two.lease_id)
        assert lost == [one.lease_id]
        await client.revoke_lease(two.lease_id)  # by its own holder: not a loss
        with pytest.raises(LeaseLost):
            await client.refresh_lease(two.lease_id)
        assert lost == [one.lease_id]


async def test_lease_survives_a_pause_shorter_than_its_ttl() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        lost: list[int] = []
        lease = await client.grant_lease(30)
        await client.put("a", b"1", lease_id=lease.lease_id)
        client.keep_alive(lease.lease_id, lease.ttl_s, lost.append)
        etcd.freeze()
        await asyncio.sleep(3)  # the length of the pause is what is tested
        etcd.thaw()
        await client.refresh_lease(lease.lease_id)
        assert await client.get("a") is not None
        assert lost == []


async def test_lease_survives_a_restart_of_the_server() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        lost: list[int] = []
        lease = await client.grant_lease(90)
        await client.put("a", b"1", lease_id=lease.lease_id)
        client.keep_alive(lease.lease_id, lease.ttl_s, lost.append)
        assert await client.refresh_lease(lease.lease_id) == 90
        etcd.kill()
        await etcd.restart()
        assert await client.refresh_lease(lease.lease_id) == 90
        assert await client.get("a") is not None
        assert lost == []


async def test_local_deadline_tells_the_loss_while_etcd_is_away() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=5) as client:
        lost: list[int] = []
        lease = await client.grant_lease(5)
        client.keep_alive(lease.lease_id, lease.ttl_s, lost.append)
        await client.refresh_lease(lease.lease_id)
        etcd.kill()
        await wait_until(lambda: bool(lost), what="the local deadline")
        assert lost == [lease.lease_id]
        await etcd.restart()
        again = await client.grant_lease(60)  # the client lives on
        assert await client.refresh_lease(again.lease_id) == 60
        assert lost == [lease.lease_id]


async def test_holder_that_fails_to_hear_does_not_end_the_renewals_of_others() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:

        def deaf(lease_id: int) -> None:
            raise RuntimeError(f"cannot hear of {lease_id}")

        lease = await client.grant_lease(60)
        client.keep_alive(lease.lease_id, lease.ttl_s, deaf)
        etcd.ctl("lease", "revoke", f"{lease.lease_id:x}")
        with pytest.raises(LeaseLost):
            await client.refresh_lease(lease.lease_id)
        other = await client.grant_lease(60)
        assert await client.refresh_lease(other.lease_id) == 60
