"""Keys and transactions against a real etcd, and what writes become when it fails."""

from __future__ import annotations

import asyncio
import time

import pytest

from control_plane.etcd import (
    Compacted,
    EtcdClient,
    EtcdUnavailable,
    LeaseLost,
    RangeResult,
    WriteOutcomeUnknown,
    create_revision_is,
    mod_revision_is,
    op_delete,
    op_get,
    op_put,
    value_is,
)
from omnicore import errors
from tests.support.etcd import etcd_server


async def test_keys_are_written_read_and_deleted() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        assert await client.get("a") is None
        first = await client.put("a", b"1")
        second = await client.put("a", b"2")
        kv = await client.get("a")
        assert kv is not None
        assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version) == ("a", b"2", first, second, 2)

        for key in ("p/2", "p/1", "q"):
            await client.put(key, b"")
        page = await client.get_prefix("p/", limit=1)
        assert [kv.key for kv in page.kvs] == ["p/1"]
        assert page.more
        assert [kv.key for kv in (await client.get_prefix("")).kvs] == ["a", "p/1", "p/2", "q"]

        past = await client.get_prefix("a", revision=first)
        assert past.kvs[0].value == b"1"
        deleted = await client.delete_prefix("p/")
        assert deleted.deleted == 2
        assert (await client.delete("p/1")).deleted == 0
        assert etcd.ctl("get", "a", "--print-value-only").strip() == "2"
        with pytest.raises(errors.InvalidRequestError, match="prefix"):
            await client.delete_prefix("")


async def test_transaction_takes_one_branch() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        made = await client.txn([create_revision_is("a", 0)], [op_put("a", b"1")], [op_get("a")])
        assert made.succeeded
        again = await client.txn([create_revision_is("a", 0)], [op_put("a", b"2")], [op_get("a"), op_get("b")])
        assert not again.succeeded
        found, absent = again.responses
        assert isinstance(found, RangeResult)
        assert isinstance(absent, RangeResult)
        assert found.kvs[0].value == b"1"
        assert absent.kvs == []
        changed = await client.txn(
            [mod_revision_is("a", made.revision), value_is("a", b"1")], [op_put("a", b"3"), op_delete("b")]
        )
        assert changed.succeeded
        assert changed.revision == made.revision + 1
        with pytest.raises(errors.InvalidRequestError, match="duplicate key"):
            await client.txn([], [op_put("a", b"1"), op_put("a", b"2")])


async def test_one_of_200_concurrent_creators_wins() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as one, EtcdClient([etcd.endpoint]) as two:

        async def create(number: int) -> bool:
            client = (one, two)[number % 2]
            mine = str(number).encode()
            return (await client.txn([create_revision_is("slot", 0)], [op_put("slot", mine)])).succeeded

        won = await asyncio.gather(*(create(number) for number in range(200)))
        assert won.count(True) == 1
        kv = await one.get("slot")
        assert kv is not None
        assert kv.value == str(won.index(True)).encode()
        assert kv.version == 1


async def test_compacted_past_is_a_typed_error() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        for number in range(5):
            last = await client.put("a", str(number).encode())
        await client.compact(last)
        with pytest.raises(Compacted):
            await client.get_prefix("a", revision=last - 1)
        assert (await client.get_prefix("a", revision=last)).kvs


async def test_lease_that_is_gone_is_named() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        with pytest.raises(LeaseLost) as caught:
            await client.put("a", b"1", lease_id=42)
        assert caught.value.lease_id == 42
        with pytest.raises(LeaseLost) as caught:
            await client.txn([], [op_get("b"), op_put("a", b"1", lease_id=43)])
        assert caught.value.lease_id == 43
        assert await client.get("a") is None


async def test_nobody_there_is_unavailable_in_time_and_never_unknown() -> None:
    async with EtcdClient(["unix:/nonexistent/socket", "127.0.0.1:1"], timeout_s=0.5) as client:
        started = time.monotonic()
        with pytest.raises(EtcdUnavailable, match=r"127\.0\.0\.1:1"):
            await client.get("a")
        with pytest.raises(EtcdUnavailable):
            await client.put("a", b"1")
        with pytest.raises(EtcdUnavailable):
            await client.refresh_lease(1)
        assert time.monotonic() - started < 20


async def test_first_member_that_is_down_is_passed_over() -> None:
    async with etcd_server() as etcd:
        for endpoints in (["127.0.0.1:1", etcd.endpoint], [etcd.endpoint, "127.0.0.1:1"]):
            async with EtcdClient(endpoints) as client:
                await client.put("a", b"1")
                assert await client.get("a") is not None


async def test_write_to_a_hung_server_is_unknown_and_a_read_is_not() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=0.5) as client:
        await client.put("a", b"1")
        etcd.freeze()
        with pytest.raises(WriteOutcomeUnknown):
            await client.put("a", b"2")
        with pytest.raises(EtcdUnavailable):
            await client.get("a")
        etcd.thaw()
        kv = await client.get("a")
        assert kv is not None
        assert kv.value in (b"1", b"2")


async def test_every_acknowledged_write_survives_a_kill() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        acknowledged: list[str] = []
        unknown: list[str] = []
        started, stop = asyncio.Event(), asyncio.Event()

        async def write(worker: int) -> None:
            number = 0
            while not stop.is_set():
                key = f"w/{worker}/{number}"
                try:
                    await client.put(key, b"")
                    acknowledged.append(key)
                except WriteOutcomeUnknown:
                    unknown.append(key)
                number += 1
                if len(acknowledged) > 100:
                    started.set()

        writers = [asyncio.create_task(write(worker)) for worker in range(16)]
        await started.wait()
        etcd.kill()
        await etcd.restart()
        stop.set()
        await asyncio.gather(*writers)
        result = await client.get_prefix("w/")
        stored = {kv.key for kv in result.kvs}
        assert set(acknowledged) <= stored <= set(acknowledged) | set(unknown)
        assert all(kv.version == 1 for kv in result.kvs), "a write was applied twice"


async def test_writes_wait_out_a_restart() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint], timeout_s=60) as client:
        await client.put("a", b"1")
        etcd.kill()
        # While nobody listens the write is surely not applied, so it is repeated until the server is back.
        write = asyncio.create_task(client.put("a", b"2"))
        await asyncio.sleep(0)
        await etcd.restart()
        try:
            await write
        except WriteOutcomeUnknown:  # it met the very moment of the kill
            return
        kv = await client.get("a")
        assert kv is not None
        assert kv.value == b"2"


async def test_status_and_members() -> None:
    async with etcd_server() as etcd, EtcdClient([etcd.endpoint]) as client:
        status = await client.status()
        assert status.version.startswith("3.")
        assert status.leader_id == status.member_id != 0
        assert [member.member_id for member in await client.members()] == [status.member_id]
