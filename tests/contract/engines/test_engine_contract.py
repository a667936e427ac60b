"""What every transfer engine does, on each of them: one body, two processes."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from connectors.engines.base import LocalRegion, Piece, TransferFailedError
from connectors.engines.descriptor import MAX_DESCRIPTOR_BYTES, Descriptor
from omnicore import errors
from tests.contract.engines.conftest import MIB, PeerProcess, Peers, Reader, is_pattern
from tests.contract.engines.peer import running_engine

GUARD_S = 60.0  # nothing here takes long; a slow machine may


def test_bytes_arrive_where_they_are_wanted_and_nowhere_else(peer: PeerProcess, reader: Reader) -> None:
    wanted = [(0, 0, 1), (64, 1, 1), (1000, 777, 4096), (8192, 4 * MIB - 5, 5), (MIB, MIB + 3, 2 * MIB + 1)]
    pieces = [Piece(reader.address + here, there, size) for here, there, size in wanted]
    reader.engine.read(peer.region, pieces, GUARD_S)
    untouched = np.ones(reader.memory.size, np.bool_)
    for here, there, size in wanted:
        assert is_pattern(reader.memory[here : here + size], there)
        untouched[here : here + size] = False
    assert not reader.memory[untouched].any()
    assert peer.ask("intact") == {"intact": True}


def test_many_pieces_at_once(peer: PeerProcess, reader: Reader) -> None:
    count = 3000
    pieces = [Piece(reader.address + i * 100, (count - i) * 100, 100) for i in range(count)]
    reader.engine.read(peer.region, pieces, GUARD_S)
    for i in range(count):
        assert is_pattern(reader.memory[i * 100 : i * 100 + 100], (count - i) * 100)


def test_pieces_may_go_to_different_memory(peer: PeerProcess, reader: Reader) -> None:
    more = [np.zeros(5000, np.uint8) for _ in range(2)]
    regions = [reader.engine.register(memory.ctypes.data, memory.nbytes, "cpu") for memory in more]
    places = [regions[0].address, reader.address, regions[1].address, regions[0].address + 2500]
    pieces = [Piece(address, number * 3000, 2500) for number, address in enumerate(places)]
    reader.engine.read(peer.region, pieces, GUARD_S)
    for region in regions:
        reader.engine.unregister(region)
    for memory, first in ((more[0], 0), (reader.memory, 3000), (more[1], 6000), (more[0][2500:], 9000)):
        assert is_pattern(memory[:2500], first)
    assert not more[1][2500:].any()


def test_threads_read_at_once_into_places_of_their_own(peer: PeerProcess, reader: Reader) -> None:
    failures: list[BaseException] = []
    share = reader.memory.size // 4

    def read(number: int) -> None:
        try:
            for turn in range(20):
                size = share // (1 + turn % 3)
                piece = Piece(reader.address + number * share, number * 1000 + turn, size)
                reader.engine.read(peer.region, [piece], GUARD_S)
                assert is_pattern(reader.memory[number * share :][:size], piece.remote_offset)
        except BaseException as error:  # noqa: BLE001 -- for the test to see
            failures.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_descriptors_fit_into_a_handle(peer: PeerProcess, reader: Reader) -> None:
    for described in (peer.region.engine, peer.region.region, reader.engine.descriptor, reader.region.descriptor):
        assert len(described) <= MAX_DESCRIPTOR_BYTES
    assert peer.region.session
    assert peer.region.session != reader.engine.session


def test_damaged_descriptors_are_refused_before_a_byte_moves(peer: PeerProcess, reader: Reader) -> None:
    whole = peer.region
    for field, good in (("engine", whole.engine), ("region", whole.region)):
        spoilt = [good[:-1], good + b"\0", b"", b"\xff" * 100, good * 200]
        spoilt += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), 7)]
        for bad in spoilt:
            handle = (
                dataclasses.replace(whole, engine=bad) if field == "engine" else dataclasses.replace(whole, region=bad)
            )
            with pytest.raises(errors.DataLossError) as caught:
                reader.engine.read(handle, [Piece(reader.address, 0, 100)], GUARD_S)
            assert caught.value.reason == "BAD_HANDLE"
    for mixed in (
        dataclasses.replace(whole, session="someone-else:1"),
        dataclasses.replace(whole, engine=reader.engine.descriptor),
        dataclasses.replace(whole, region=reader.region.descriptor),
    ):
        with pytest.raises(errors.DataLossError):
            reader.engine.read(mixed, [Piece(reader.address, 0, 100)], GUARD_S)
    assert not reader.memory.any()
    reader.engine.read(whole, [Piece(reader.address, 0, 100)], GUARD_S)
    assert is_pattern(reader.memory[:100], 0)


def test_peers_of_another_version_are_refused(peer: PeerProcess, reader: Reader) -> None:
    library = reader.engine.descriptor[8 + 4 :].split(b"\0")[0].decode()
    other = Descriptor(library, "0.0.1", peer.region.session, b"").seal()
    with pytest.raises(errors.FailedPreconditionError, match="they must match") as caught:
        reader.engine.read(dataclasses.replace(peer.region, region=other), [Piece(reader.address, 0, 100)], GUARD_S)
    assert caught.value.reason == "OTHER_VERSION"
    assert "0.0.1" in caught.value.message


def test_a_killed_peer_is_a_failure_and_others_stay_readable(
    kind: str, peers: Peers, peer: PeerProcess, reader: Reader
) -> None:
    mortal = peers.start(kind)
    reader.engine.read(mortal.region, [Piece(reader.address, 5, 1000)], GUARD_S)
    assert is_pattern(reader.memory[:1000], 5)
    mortal.kill()
    for _ in range(2):  # also the second time, when it is known to be dead
        with pytest.raises(TransferFailedError) as caught:
            reader.engine.read(mortal.region, [Piece(reader.address, 0, 4 * MIB)], 10)
        assert caught.value.reason in ("TRANSFER_FAILED", "PEER_UNREACHABLE")
        reader.engine.fence()
    reader.engine.forget(mortal.region)
    reader.engine.forget(mortal.region)
    reader.memory[:] = 0
    reader.engine.read(peer.region, [Piece(reader.address, 9, 1000)], GUARD_S)
    assert is_pattern(reader.memory[:1000], 9)
    assert not reader.memory[1000:].any()


def test_memory_can_be_registered_once_at_a_time(reader: Reader) -> None:
    more = np.zeros(1 << 16, np.uint8)
    region = reader.engine.register(more.ctypes.data, more.nbytes, "cpu")
    with pytest.raises(errors.FailedPreconditionError):
        reader.engine.register(more.ctypes.data, more.nbytes, "cpu")
    reader.engine.unregister(region)
    reader.engine.unregister(region)
    reader.engine.unregister(LocalRegion(1 << 40, 100, b""))
    again = reader.engine.register(more.ctypes.data, more.nbytes, "cpu")
    reader.engine.unregister(again)


def test_a_peer_lets_go_and_ends_in_good_order(kind: str, peers: Peers, reader: Reader) -> None:
    """Also where a library would have the process end by a signal."""
    peer = peers.start(kind, 1 << 16)
    reader.engine.read(peer.region, [Piece(reader.address, 0, 100)], GUARD_S)
    assert peer.ask("unregister") == {"done": True}
    assert peer.end() == 0


def test_a_fence_with_nothing_to_fence_is_at_once(reader: Reader) -> None:
    for _ in range(100):
        reader.engine.fence()


def test_closing_twice_and_reading_afterwards(kind: str, peer: PeerProcess) -> None:
    with running_engine(kind) as engine:
        memory = np.zeros(100, np.uint8)
        region = engine.register(memory.ctypes.data, memory.nbytes, "cpu")
        engine.read(peer.region, [Piece(region.address, 0, 100)], GUARD_S)
        engine.close()
        memory[:] = 0
        with pytest.raises(TransferFailedError) as caught:
            engine.read(peer.region, [Piece(region.address, 0, 100)], GUARD_S)
        assert caught.value.fenced
        with pytest.raises(errors.UnavailableError):
            engine.register(memory.ctypes.data, memory.nbytes, "cpu")
        engine.fence()
        engine.unregister(region)
        engine.forget(peer.region)
        engine.close()
    assert not memory.any()
