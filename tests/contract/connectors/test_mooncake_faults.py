"""What Mooncake's engine does when peers die or stand still, and what consumers see of it: real engines, two processes.

What was measured of the library is in ``connectors.engines.mooncake``; each of it that would hurt has a test here.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.connector_set import ConnectorSet
from connectors.engines import mooncake_environment
from connectors.engines.base import Piece, RemoteRegion, TransferFailedError
from connectors.engines.descriptor import Descriptor, unseal
from connectors.engines.mooncake import MooncakeEngine
from connectors.one_sided import OneSidedConnector, check_handle
from connectors.options import MooncakeOptions
from connectors.registry import ConnectorContext, create_connector
from omni.v1 import transfer_pb2
from omnicore import errors
from tests.contract.connectors.conftest import Child
from tests.contract.connectors.peer import Peer, running_peer, tensor
from tests.contract.connectors.test_connector_deaths import Spawn, handle_of
from tests.support.processes import wait_until
from tests.support.transfer_engines import MOONCAKE, Engines, Lent

MIB = 1 << 20
BIG = 16 * MIB
LIBRARY = "mooncake-transfer-engine"


@pytest.fixture
def kind() -> str:
    return "mooncake"


@dataclasses.dataclass
class Consumer:
    """A consumer whose receive pool has room for one big payload."""

    peer: Peer
    connector: OneSidedConnector

    async def read(self, handle: transfer_pb2.TransferHandle) -> Any:
        async with self.connector.get(handle) as got:
            return got.tensors["x"].copy()

    @property
    def free(self) -> int:
        return self.connector.receive_usage().free_bytes

    @property
    def pool(self) -> int:
        return self.connector.receive_usage().pool_bytes


@contextlib.asynccontextmanager
async def consuming(engines: Engines, get_timeout_s: float) -> AsyncIterator[Consumer]:
    async with running_peer(pool_bytes=0) as peer:
        options = MooncakeOptions(receive_pool_bytes=BIG + MIB, get_timeout_s=get_timeout_s)
        connector = OneSidedConnector("mooncake", peer.store, Lent(engines.consuming), options, pool_bytes=0)
        made = Consumer(peer, connector)
        yield made
        await wait_until(lambda: made.free == made.pool, what="the receive pool to be whole")
        await connector.close()


@contextlib.contextmanager
def standing_still(child: Child) -> Iterator[None]:
    child.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        child.process.send_signal(signal.SIGCONT)


async def big(child: Child, key: str = "big") -> transfer_pb2.TransferHandle:
    return handle_of(await child.ask(op="put", kind="mooncake", key=key, size=BIG, seed=1))


async def small(child: Child, seed: int = 2) -> transfer_pb2.TransferHandle:
    return handle_of(await child.ask(op="put", kind="mooncake", key=f"small{seed}", size=100_000, seed=seed))


@pytest.fixture
def extra() -> dict[str, Any]:
    """Of the children: two big payloads fit, and a few small ones."""
    return {**MOONCAKE, "pool_bytes": 2 * BIG + 4 * MIB, "receive_pool_bytes": MIB}


async def test_producers_that_stand_still_or_die(mooncake_engines: Engines, spawn: Spawn) -> None:
    frail, well = await asyncio.gather(spawn("mooncake"), spawn("mooncake"))
    await first_contact_with_a_stopped_producer_holds_nobody_up(mooncake_engines, frail, well)
    await stopped_producers_write_into_no_buffer_that_is_used_again(mooncake_engines, frail, well)
    await producers_killed_in_the_middle_are_noticed_at_once(mooncake_engines, frail, well)


async def stopped_producers_write_into_no_buffer_that_is_used_again(
    mooncake_engines: Engines, stopping: Child, well: Child
) -> None:
    first, other = await asyncio.gather(big(stopping), big(well))
    near = await small(well)
    async with consuming(mooncake_engines, 0.5) as consumer:
        await consumer.read(await small(stopping))  # they have met
        with standing_still(stopping):
            with pytest.raises(errors.UnavailableError):
                await consumer.read(first)
            # It may still write there: nobody else gets that memory, and whoever needs it waits in vain.
            assert consumer.free <= MIB
            with pytest.raises(errors.ResourceExhaustedError):
                await consumer.read(other)
            assert (await consumer.read(near) == tensor(100_000, 2)).all(), "others are read as always"
        await wait_until(lambda: consumer.free == consumer.pool, what="the buffer to come back")
        async with asyncio.timeout(30):
            while True:  # half a second may be too short for a slow machine
                with contextlib.suppress(errors.UnavailableError, errors.ResourceExhaustedError):
                    async with consumer.connector.get(other) as got:
                        assert (got.tensors["x"] == tensor(BIG, 1)).all()
                        break


async def producers_killed_in_the_middle_are_noticed_at_once(
    mooncake_engines: Engines, child: Child, well: Child
) -> None:
    handle, near = await big(child, "big again"), await small(well, 5)
    async with consuming(mooncake_engines, 60.0) as consumer:
        await consumer.read(await small(child, 6))
        child.process.send_signal(signal.SIGSTOP)  # so that the read is under way when it dies
        reading = asyncio.ensure_future(consumer.read(handle))
        await wait_until(lambda: consumer.free <= MIB, what="the read to begin")
        await child.kill()
        async with asyncio.timeout(30):
            with pytest.raises(errors.UnavailableError) as caught:
                await reading
        assert caught.value.reason in ("TRANSFER_FAILED", "PEER_UNREACHABLE")
        assert consumer.connector.receive_usage().reads.fences == 0
        assert (await consumer.read(near) == tensor(100_000, 5)).all()
        assert consumer.connector.sweep() == 1


async def first_contact_with_a_stopped_producer_holds_nobody_up(
    mooncake_engines: Engines, stopped: Child, well: Child
) -> None:
    """The library waits 60 s for it, and everything else that its engine should do waits as well."""
    unseen, near = await asyncio.gather(small(stopped, 4), small(well, 3))
    async with consuming(mooncake_engines, 1.0) as consumer:
        with standing_still(stopped):
            waiting = asyncio.ensure_future(consumer.read(unseen))
            async with asyncio.timeout(30):
                while not waiting.done():
                    assert (await consumer.read(near) == tensor(100_000, 3)).all()
            with pytest.raises(errors.UnavailableError) as caught:
                await waiting
            assert caught.value.reason in ("PEER_SILENT", "TRANSFER_TIMEOUT")
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(errors.UnavailableError):
                    assert (await consumer.read(unseen) == tensor(100_000, 4)).all()
                    break


class Liar:
    """Answers the greeting as a peer does, and then nothing."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            first, _ = self._server.accept()
            first.recv(100)
            first.sendall(b"\x03\0\0\0\0\0\0\0\x03{}")
            first.close()
            while True:
                self.kept.append(self._server.accept()[0])

    def end(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()
        for connection in self.kept:
            connection.close()


async def test_what_an_engine_keeps_of_its_peers_does_no_harm(mooncake_engines: Engines, spawn: Spawn) -> None:
    near = check_handle(await small(await spawn("mooncake")), "mooncake")
    await peers_that_stop_after_the_greeting_hang_only_those_that_read_from_them(mooncake_engines, near)
    await restarted_producers_with_the_session_of_another_are_met_anew(mooncake_engines, near)
    await rejections_that_close_connections_do_not_fail_those_that_come_after(mooncake_engines, near)


async def peers_that_stop_after_the_greeting_hang_only_those_that_read_from_them(
    mooncake_engines: Engines, near: RemoteRegion
) -> None:
    engine, liar = mooncake_engines.consuming, Liar()
    version = mooncake_environment.library()[1]
    lying = dataclasses.replace(
        near,
        session=liar.session,
        engine=Descriptor(LIBRARY, version, "liar", liar.session.encode()).seal(),
        region=Descriptor(LIBRARY, version, "liar", unseal(near.region, LIBRARY, version).content).seal(),
    )
    memory = np.zeros(MIB, np.uint8)
    region = engine.register(memory.ctypes.data, memory.nbytes, "cpu")
    try:
        hanging = asyncio.ensure_future(asyncio.to_thread(engine.read, lying, [Piece(region.address, 0, 64)], 5.0))
        await wait_until(lambda: bool(liar.kept), what="the library's own handshake")
        await asyncio.sleep(2.1)  # from 2 s on, a first call is known to hang
        async with asyncio.timeout(30):
            await asyncio.to_thread(engine.read, near, [Piece(region.address, 0, 1000)], 5.0)
        assert memory[:1000].any()
        assert not hanging.done()
    finally:
        liar.end()
    with pytest.raises(TransferFailedError):
        await hanging
    engine.unregister(region)


async def restarted_producers_with_the_session_of_another_are_met_anew(
    mooncake_engines: Engines, near: RemoteRegion
) -> None:
    version = mooncake_environment.library()[1]
    memory = np.zeros(4096, np.uint8)
    reader = mooncake_engines.consuming
    region = reader.register(memory.ctypes.data, memory.nbytes, "cpu")
    before = dataclasses.replace(
        near,
        engine=Descriptor(LIBRARY, version, "before", near.session.encode()).seal(),
        region=Descriptor(LIBRARY, version, "before", unseal(near.region, LIBRARY, version).content).seal(),
    )
    for remote in (before, near, before, near):
        memory[:] = 0
        await asyncio.to_thread(reader.read, remote, [Piece(region.address, 0, 1000)], 30.0)
        assert memory[:1000].any()
    reader.unregister(region)


async def rejections_that_close_connections_do_not_fail_those_that_come_after(
    mooncake_engines: Engines, near: RemoteRegion
) -> None:
    version, reader = mooncake_environment.library()[1], mooncake_engines.consuming
    name = unseal(near.engine, LIBRARY, version).name
    content = (near.address + near.size_bytes).to_bytes(8, "little") + (4096).to_bytes(8, "little")
    beyond = dataclasses.replace(
        near,
        address=near.address + near.size_bytes,
        size_bytes=4096,
        region=Descriptor(LIBRARY, version, name, content).seal(),
    )
    memory = np.zeros(4096, np.uint8)
    region = reader.register(memory.ctypes.data, memory.nbytes, "cpu")
    for _ in range(4):
        with pytest.raises(TransferFailedError) as caught:
            await asyncio.to_thread(reader.read, beyond, [Piece(region.address, 0, 64)], 30.0)
        assert caught.value.fenced
    for _ in range(2):
        await asyncio.to_thread(reader.read, near, [Piece(region.address, 0, 1000)], 30.0)
        assert memory[:1000].any()
    reader.unregister(region)


def test_options_that_cannot_work_are_errors_at_the_start(mooncake_engines: Engines) -> None:
    for options, reason in (
        ({"protocol": "pigeon"}, "INVALID_REQUEST"),
        ({"protocol": "rdma"}, "PROTOCOL_FIXED"),
        ({"device_name": "mlx5_0"}, "INVALID_REQUEST"),
        ({"host": "127.0.0.1:15000"}, "INVALID_REQUEST"),
        ({"host": "0.0.0.0"}, "INVALID_REQUEST"),
        ({"host": "no-such-host.invalid"}, "INVALID_REQUEST"),
    ):
        with pytest.raises(errors.OmniError) as caught:
            MooncakeEngine(**options)
        assert caught.value.reason == reason, options
    with pytest.raises(errors.FailedPreconditionError) as missing:
        mooncake_environment.check_devices("rdma", "nosuch_0")
    assert missing.value.reason == "DEVICE_MISSING"
    if mooncake_environment.library()[0] == mooncake_environment.DISTRIBUTIONS[0]:
        with pytest.raises(errors.FailedPreconditionError):
            mooncake_environment.check_devices("nvlink", "")
        with pytest.raises(errors.FailedPreconditionError):
            mooncake_engines.consuming.register(4096, 4096, "cuda:0")


def started(program: str, **environment: str) -> str:
    """What a fresh process says."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**{name: v for name, v in os.environ.items() if not name.startswith("MC_")}, **environment},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    return done.stdout.strip()


START = """
import os
from connectors.engines.mooncake import MooncakeEngine
from omnicore import errors
try:
    print(MooncakeEngine(host="127.0.0.1").session, flush=True)
except errors.OmniError as error:
    print(error.reason, flush=True)
os._exit(0)
"""


def test_an_environment_in_which_transfers_outlive_their_errors_is_refused() -> None:
    assert started(START, MC_TCP_PROGRESS_TIMEOUT_SEC="60", MC_TRANSFER_TIMEOUT="30") == "UNSAFE_ENVIRONMENT"
    assert started("import mooncake.engine\n" + START) == "IMPORTED_TOO_EARLY"


def test_without_the_library_it_is_an_error_and_nothing_else_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)

    def fetch(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        raise AssertionError(handle)

    store = ConnectorSet(lambda: handle_ref(), lambda: "h:1", fetch, pool_bytes=0).store
    with pytest.raises(errors.FailedPreconditionError) as caught:
        create_connector("mooncake", ConnectorContext(store, fetch, 0), {"host": "127.0.0.1"})
    assert caught.value.reason == "LIBRARY_MISSING"
    assert "mooncake" in caught.value.message


def handle_ref() -> Any:
    return transfer_pb2.TransferHandle().owner
