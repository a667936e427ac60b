"""What is special about NIXL: the traps that were measured, each with the real library."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from connectors.engines.base import Piece, RemoteRegion, TransferFailedError
from connectors.engines.nixl import NixlEngine
from connectors.engines.nixl_bindings import load_bindings
from omnicore import errors
from tests.contract.engines.conftest import MIB, Peers, Reader, is_pattern
from tests.contract.engines.peer import running_engine

GUARD_S = 60.0
FILLED = 255  # in no pattern


def test_a_peer_that_stands_still_costs_the_timeout_and_the_fence_waits_for_its_bytes(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP, where the peer's process answers: what a failed read asked for arrives when the peer goes on."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    peer = peers.shared("nixl")
    engine = NixlEngine(fence_patience_s=GUARD_S)
    reader = Reader(engine, 4 * MIB)
    try:
        engine.read(peer.region, [Piece(reader.address, 0, 100)], GUARD_S)
        with peer.stopped():
            began = time.monotonic()
            with pytest.raises(TransferFailedError, match="timed out") as caught:
                engine.read(peer.region, [Piece(reader.address, 0, 4 * MIB)], 0.3)
            assert 0.3 <= time.monotonic() - began < GUARD_S
            assert not caught.value.fenced
            reader.memory[:] = FILLED
            fence = threading.Thread(target=engine.fence)
            fence.start()
        fence.join()
        assert is_pattern(reader.memory, 0), "all have come: none will come later"
        reader.memory[:] = FILLED
        peer.ask("cpu")
        assert (reader.memory == FILLED).all()
    finally:
        engine.close()


def test_the_fence_ends_what_a_silent_peer_has_begun_and_nothing_else(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    silent, well = peers.start("nixl"), peers.shared("nixl")
    engine = NixlEngine(fence_patience_s=0)
    reader = Reader(engine, 8 * MIB)
    beside = Piece(reader.address + 4 * MIB, 7, 4 * MIB - 7)
    failures: list[Exception] = []
    reading, enough = threading.Event(), threading.Event()

    def read_on() -> None:
        try:
            while not enough.is_set():
                engine.read(well.region, [beside], GUARD_S)
                reading.set()
        except Exception as error:  # noqa: BLE001 -- for the test to see
            failures.append(error)
            reading.set()

    others = threading.Thread(target=read_on)
    others.start()
    try:
        assert reading.wait(GUARD_S)
        with silent.stopped():  # before the first contact
            with pytest.raises(TransferFailedError, match="timed out") as kept:
                engine.read(silent.region, [Piece(reader.address, 0, 4 * MIB)], 0.3)
            engine.fence()
            reader.memory[: 4 * MIB] = FILLED
        silent.ask("cpu")  # it goes on
        assert not kept.value.fenced
        engine.read(silent.region, [beside], GUARD_S)
        enough.set()
        others.join()
        assert failures == []
        assert (reader.memory[: 4 * MIB] == FILLED).all()
        assert engine.closing.failures == 0
    finally:
        enough.set()
        others.join()
        engine.close()


def test_an_idle_engine_sleeps(peers: Peers) -> None:
    """NIXL's own progress thread, as its Python API sets it up, takes 0.9 cores."""
    peer = peers.shared("nixl")
    before, began = peer.ask("cpu")["cpu_s"], time.monotonic()
    time.sleep(1)
    assert peer.ask("cpu")["cpu_s"] - before < 0.5 * (time.monotonic() - began)


def test_loading_it_leaves_the_logs_alone(capfd: pytest.CaptureFixture[str]) -> None:
    before = logging.raiseExceptions
    load_bindings()
    assert logging.raiseExceptions == before
    assert not logging.getLogger("nixl").handlers
    with running_engine("nixl"):
        pass
    assert capfd.readouterr() == ("", "")


def test_without_any_transport_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(errors.FailedPreconditionError, match="NIXL cannot use UCX here") as caught:
        NixlEngine()
    assert caught.value.reason == "ENGINE_FAILED"


def test_memory_of_devices_it_does_not_know(peers: Peers) -> None:
    with running_engine("nixl") as engine:
        memory = np.zeros(100, np.uint8)
        with pytest.raises(errors.FailedPreconditionError, match=r"cpu and cuda:N, not 'npu:0'"):
            engine.register(memory.ctypes.data, memory.nbytes, "npu:0")


def test_two_engines_of_one_process_read_each_other() -> None:
    with running_engine("nixl") as one, running_engine("nixl") as other:
        reader, owner = Reader(one, 4096), Reader(other, 4096)
        owner.memory[:] = 5
        region = owner.region
        remote = RemoteRegion(other.session, other.descriptor, region.descriptor, region.address, region.size_bytes)
        one.read(remote, [Piece(reader.address, 0, 4096)], GUARD_S)
        assert (reader.memory == 5).all()
