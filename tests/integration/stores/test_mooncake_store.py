"""The Mooncake Store with its real master: what its library leaves to its users."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest

from connectors.options import MooncakeStoreOptions
from connectors.payload import Payload
from connectors.stores import factories
from connectors.stores.mooncake_store import MooncakeStore
from connectors.stores.shared import SharedClient
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.clock import ManualClock
from tests.contract.connectors.peer import EDGE, Peer, running_peer, tensor
from tests.integration.stores.speech import assert_stages_hand_over
from tests.support.ports import reserved_port
from tests.support.stores import MIB, MooncakeMaster

KIND = "mooncake_store"
SIZE = 200_000


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    master.start()
    yield master
    master.close()


@pytest.fixture(scope="module")
def store(master: MooncakeMaster) -> Iterator[SharedClient]:
    """A client that lends 64 MiB, all that this store has."""
    store = factories.mooncake_client(MooncakeStoreOptions(**master.extra()))
    yield store
    store.close()


def filled_with(value: int) -> Callable[[memoryview], None]:
    def fill(memory: memoryview) -> None:
        np.frombuffer(memory, np.uint8)[:] = value

    return fill


def read(store: SharedClient, key: str, size_bytes: int) -> bytes:
    with contextlib.closing(store.open(key, size_bytes)) as found:
        return bytes(found.data)


def test_a_key_in_use_is_an_error_and_its_object_stays(store: SharedClient) -> None:
    store.put("twice", 100, filled_with(1))
    with pytest.raises(errors.AlreadyExistsError):
        store.put("twice", 100, filled_with(2))
    assert read(store, "twice", 100) == bytes([1]) * 100
    store.remove(["twice"])


def test_missing_and_wrong_lengths_are_told_apart(store: SharedClient) -> None:
    with pytest.raises(errors.NotFoundError):
        store.open("never", 100)
    store.put("k", 100_000, filled_with(3))
    for size in (99, 100_001, 200_000):
        with pytest.raises(errors.DataLossError) as caught:
            store.open("k", size)
        assert caught.value.metadata["found_bytes"] == "100000"
    assert read(store, "k", 100_000) == bytes([3]) * 100_000
    # That read protects it from an ordinary removal, for seconds.
    store.remove(["k", "never"])
    with pytest.raises(errors.NotFoundError):
        store.open("k", 100_000)


def test_a_full_store_says_so_and_drops_nothing(store: SharedClient) -> None:
    keys: list[str] = []
    with pytest.raises(errors.ResourceExhaustedError) as caught:  # noqa: PT012 (how many fit is its business)
        for number in range(20):
            store.put(f"big{number}", 8 * MIB, filled_with(number))
            keys.append(f"big{number}")
    assert caught.value.reason == "STORE_FULL"
    assert len(keys) >= 4
    for number, key in enumerate(keys):
        assert read(store, key, 8 * MIB) == bytes([number]) * 8 * MIB
    store.remove(keys)
    store.put("again", 8 * MIB, filled_with(9))
    store.remove(["again"])


def test_fewer_replicas_than_asked_for_are_an_error(master: MooncakeMaster, store: SharedClient) -> None:
    store.put("lends", 1, filled_with(1))  # the other client's segment is there
    store.remove(["lends"])
    wants_two = MooncakeStore(MooncakeStoreOptions(**master.extra(replica_num=2, segment=0)))
    try:
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            wants_two.put("k", 1000, filled_with(1))
        assert caught.value.metadata["replicas"] == "1"
        with pytest.raises(errors.NotFoundError):
            wants_two.open("k", 1000)
    finally:
        wants_two.close()
    for call in (lambda: wants_two.open("k", 1), lambda: wants_two.remove(["k"])):
        with pytest.raises(errors.UnavailableError):
            call()
    assert not wants_two.healthy()


async def test_stages_hand_over_through_the_store(master: MooncakeMaster, store: SharedClient) -> None:
    await assert_stages_hand_over(KIND, master.extra(inline_bytes=0))


@pytest.mark.parametrize("address", ["", "nohost", "host:", ":1", "host:0", "host:99999", "host:x"])
def test_addresses_that_are_none_are_refused_by_name(address: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"connectors\.mooncake_store\.extra\.master"):
        MooncakeStore(MooncakeStoreOptions(master=address))


@pytest.mark.parametrize("address", ["", "nonsense", "host:8080", "http://", "http://host:x/metadata", "ftp://host"])
def test_metadata_servers_that_are_none_are_refused_by_name(address: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"connectors\.mooncake_store\.extra\.metadata_server"):
        MooncakeStore(MooncakeStoreOptions(metadata_server=address))


@pytest.mark.parametrize("scheme", ["http", "etcd"])
def test_metadata_server_that_is_away_is_named_at_once(master: MooncakeMaster, scheme: str) -> None:
    """The library would try for up to a minute and a half, and let no other thread run meanwhile."""
    address = f"{scheme}://127.0.0.1:{reserved_port()}/metadata"
    store = MooncakeStore(MooncakeStoreOptions(**master.extra(metadata_server=address)))
    for _ in range(20):
        with pytest.raises(errors.UnavailableError, match="metadata server"):
            store.put("k", 10, filled_with(1))
    assert not store.healthy()
    store.close()


# --- a master that comes and goes -----------------------------------------------------------------------------------


@pytest.fixture
async def alone() -> AsyncIterator[tuple[MooncakeMaster, Peer]]:
    """A worker whose store is not there yet."""
    master = MooncakeMaster()
    try:
        async with running_peer(options={KIND: master.extra(inline_bytes=0)}, clock=ManualClock()) as peer:
            yield master, peer
    finally:
        master.close()


async def healthy(peer: Peer, wanted: bool) -> None:
    async with asyncio.timeout(60):
        while next(o.healthy for o in peer.connectors.offers() if o.name == KIND) != wanted:
            peer.connectors.sweep()
            await asyncio.sleep(0.02)


T = TypeVar("T")


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """A client that has lost its master notices by and by that there is one again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except errors.UnavailableError as error:
                if error.reason == "LEASE_EXPIRED":
                    raise
                await asyncio.sleep(0.05)


async def put(peer: Peer, key: str, seed: int, size: int = SIZE) -> transfer_pb2.TransferHandle:
    return await peer.connectors.put(KIND, key, EDGE, 0, Payload({"x": tensor(size, seed)}))


async def seen(peer: Peer, handle: transfer_pb2.TransferHandle) -> bytes:
    async with peer.connectors.get(handle) as got:
        return bytes(got.tensors["x"].tobytes())


async def test_master_comes_late_dies_and_comes_back(alone: tuple[MooncakeMaster, Peer]) -> None:
    master, peer = alone
    await healthy(peer, False)
    with pytest.raises(errors.UnavailableError) as caught:
        await put(peer, "early", 1)
    assert caught.value.reason == "STORE_UNREACHABLE"

    await asyncio.to_thread(master.start)
    await healthy(peer, True)
    handle = await patiently(lambda: put(peer, "old", 2))
    assert await patiently(lambda: seen(peer, handle)) == tensor(SIZE, 2).tobytes()

    # Frozen: calls are given up, though the library waits for half a minute, and end when it goes on.
    options = {KIND: master.extra(inline_bytes=0, timeout_s=0.2)}
    async with running_peer(options=options, pool_bytes=0) as impatient:
        master.signal(signal.SIGSTOP)
        with pytest.raises(errors.UnavailableError) as caught:
            await seen(impatient, handle)
        assert caught.value.reason == "STORE_TIMEOUT"
        await healthy(impatient, False)
        master.signal(signal.SIGCONT)
        await healthy(impatient, True)

    await asyncio.to_thread(master.kill)
    with pytest.raises(errors.UnavailableError):
        await seen(peer, handle)
    with pytest.raises(errors.UnavailableError):
        await put(peer, "meanwhile", 1)
    await healthy(peer, False)

    # Another one knows of nothing. This one protects what is read for a millisecond, which is too short.
    master.lease_ttl_ms = 1
    await asyncio.to_thread(master.start)
    await healthy(peer, True)
    with pytest.raises(errors.NotFoundError):
        await patiently(lambda: seen(peer, handle))
    assert peer.store.release("old", handle.token)
    again = await patiently(lambda: put(peer, "new", 3, 32 * MIB))
    with pytest.raises(errors.UnavailableError, match="default_kv_lease_ttl") as caught:
        await patiently(lambda: seen(peer, again))
    assert caught.value.reason == "LEASE_EXPIRED"
