"""What is special about Mori, over a double of the library (tests/doubles/libraries/mori)."""

from __future__ import annotations

import dataclasses
import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.engines.base import Piece, RemoteRegion, TransferFailedError
from connectors.engines.descriptor import Descriptor, pack_region
from connectors.engines.mori import MoriEngine
from omnicore import errors
from tests.contract.engines.conftest import Reader
from tests.doubles.loading import installed
from tests.support.processes import wait_until

GUARD_S = 60.0
SIZE = 1 << 16


@pytest.fixture
def switches() -> Iterator[Any]:
    """The library is the double; what it does and records."""
    with installed("mori"):
        yield importlib.import_module("mori.switches")


@pytest.fixture
def io(switches: Any) -> Any:
    return importlib.import_module("mori.io")


@dataclasses.dataclass
class Pair:
    owner: Reader
    reader: Reader

    @property
    def remote(self) -> RemoteRegion:
        engine, region = self.owner.engine, self.owner.region
        return RemoteRegion(engine.session, engine.descriptor, region.descriptor, region.address, region.size_bytes)

    def read(self, timeout_s: float = GUARD_S) -> None:
        self.reader.engine.read(self.remote, [Piece(self.reader.address, 0, SIZE)], timeout_s)


@pytest.fixture
def pair(switches: Any) -> Iterator[Pair]:
    """Two engines in this process; the first holds sevens."""
    engines = [MoriEngine(host="127.0.0.1", fence_patience_s=GUARD_S), MoriEngine(host="127.0.0.1", fence_patience_s=0)]
    pair = Pair(*(Reader(engine, SIZE) for engine in engines))
    pair.owner.memory[:] = 7
    yield pair
    for engine in engines:
        engine.close()
        assert engine.closing.failures == 0


def test_teardown_deregisters_each_thing_once_and_with_its_own_description(switches: Any, pair: Pair) -> None:
    pair.read()
    pair.reader.engine.close()
    switches.calls.append(("closed", None))
    pair.reader.engine.close()
    done = switches.calls[: switches.calls.index(("closed", None))]
    assert switches.calls[-1] == ("closed", None), "closing twice does nothing"
    given = [desc for call, desc in done if call == "register_memory" and desc.data == pair.reader.address]
    back = [desc for call, desc in done if call == "deregister_memory"]
    assert len(given) == 2, "for the half that serves and the half that reads"
    assert sorted(desc.id for desc in back) == sorted(desc.id for desc in given)
    assert all(desc in given for desc in back)
    remote = [desc for call, desc in done if call == "register_remote_engine"]
    assert [desc for call, desc in done if call == "deregister_remote_engine"] == remote
    assert f"{remote[0].host}:{remote[0].port}" == pair.remote.session
    assert len([call for call, _ in done if call == "drop"]) == 2


def test_errors_of_teardown_are_counted_and_the_other_steps_taken(switches: Any, io: Any) -> None:
    engine = MoriEngine(host="127.0.0.1")
    reader = Reader(engine, SIZE)
    more = np.zeros(SIZE, np.uint8)
    engine.register(more.ctypes.data, SIZE, "cpu")
    serving = engine._serving
    assert serving is not None
    serving._memories[reader.address] = "a key where a description belongs"
    engine.close()
    assert engine.closing.failures == 1
    assert [desc.data for call, desc in switches.calls if call == "deregister_memory"] == [more.ctypes.data]
    assert ("drop", engine._name) in switches.calls


@pytest.mark.parametrize(
    ("code", "fenced"),
    [
        ("ERR_INVALID_ARGS", True),
        ("ERR_NOT_FOUND", True),
        ("ERR_BAD_STATE", True),
        ("ERR_RDMA_OP", False),
        ("ERR_GPU_OP", False),
    ],
)
def test_what_the_library_says_of_a_failure_reaches_whoever_asked(
    switches: Any, io: Any, pair: Pair, code: str, fenced: bool
) -> None:
    switches.fail_next.append((io.StatusCode[code], "the reason"))
    with pytest.raises(TransferFailedError, match=f"{code}: the reason") as caught:
        pair.read()
    assert caught.value.fenced == fenced
    assert caught.value.metadata == {"session": pair.remote.session, "status": code}
    pair.reader.engine.fence()
    pair.read()
    assert (pair.reader.memory == 7).all()


def test_a_read_that_is_overdue_is_fenced_by_the_end_of_its_engine(switches: Any, pair: Pair) -> None:
    pair.read()
    switches.proceed.clear()
    with pytest.raises(TransferFailedError, match="timed out") as caught:
        pair.read(0.05)
    assert not caught.value.fenced
    pair.reader.engine.fence()
    pair.reader.memory[:] = 1
    switches.proceed.set()
    pair.owner.memory[:] = 8
    beside = np.zeros(SIZE, np.uint8)
    pair.reader.engine.register(beside.ctypes.data, SIZE, "cpu")
    pair.reader.engine.read(pair.remote, [Piece(beside.ctypes.data, 0, SIZE)], GUARD_S)
    assert (beside == 8).all()
    assert (pair.reader.memory == 1).all()


async def test_a_fence_waits_for_an_overdue_read_that_comes_to_an_end(switches: Any, pair: Pair) -> None:
    """``pair.owner`` is the patient one: it reads from the other."""
    patient, other = pair.owner, Pair(pair.reader, pair.owner)
    switches.proceed.clear()
    with pytest.raises(TransferFailedError, match="timed out"):
        other.read(0.05)
    fence = threading.Thread(target=patient.engine.fence)
    fence.start()
    switches.proceed.set()
    await wait_until(lambda: not fence.is_alive(), what="the end of the fence")
    assert not patient.memory.any(), "the other's zeros have arrived"
    assert not [key for call, key in switches.calls if call == "drop"]


def test_its_port_is_the_one_that_was_asked_for_or_none(switches: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(errors.FailedPreconditionError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
            MoriEngine(host="127.0.0.1", port=port)
    assert caught.value.reason == "ADDRESS_IN_USE"
    engine = MoriEngine(host="127.0.0.1", port=0)
    host, _, given = engine.session.rpartition(":")
    assert host == "127.0.0.1"
    socket.create_connection((host, int(given)), timeout=GUARD_S).close()
    engine.close()


def test_backends_that_this_host_lacks_are_errors_and_never_replaced(switches: Any) -> None:
    switches.has_rdma_devices = False
    with pytest.raises(errors.FailedPreconditionError, match="no active RDMA device on this host") as caught:
        MoriEngine(host="127.0.0.1")
    assert (caught.value.reason, caught.value.metadata) == ("ENGINE_FAILED", {"backend": "rdma"})
    switches.has_rdma_devices = True
    with pytest.raises(errors.InvalidRequestError, match="must be one of rdma, xgmi, fabric, got 'tcp'"):
        MoriEngine(host="127.0.0.1", backend="tcp")
    with pytest.raises(errors.InvalidRequestError, match="no address that peers can reach"):
        MoriEngine(host="0.0.0.0")


def test_the_backend_that_is_used_can_be_seen(switches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(SIZE, np.uint8)
    for backend, auto_disabled, seen in (("rdma", "1", "rdma"), ("rdma", "0", "rdma+xgmi"), ("xgmi", "1", "xgmi")):
        monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", auto_disabled)
        engine = MoriEngine(host="127.0.0.1", backend=backend)
        assert engine.backend == seen
        if backend == "xgmi":
            with pytest.raises(errors.FailedPreconditionError, match="moves memory of GPUs"):
                engine.register(memory.ctypes.data, SIZE, "cpu")
            region = engine.register(memory.ctypes.data, SIZE, "cuda:1")
            assert switches.calls[-1][1].device_id == 1
            engine.unregister(region)
        engine.close()


def test_handles_whose_descriptions_disagree_are_refused(switches: Any, io: Any, pair: Pair) -> None:
    remote, name = pair.remote, pair.owner.engine.descriptor
    memory = io.MemoryDesc.unpack(switches.calls[0][1].pack())

    def region(content: bytes) -> RemoteRegion:
        sealed = Descriptor("amd-mori", "1.2.4", "mori-1", content).seal()
        return dataclasses.replace(remote, region=sealed)

    cut = dataclasses.replace(remote, size_bytes=SIZE - 64)
    for wrong in (
        cut,
        dataclasses.replace(remote, address=remote.address + 64),
        region(pack_region(remote.address, SIZE, memory.pack())),
        region(pack_region(remote.address, SIZE, b"[]")),
        region(b"short"),
    ):
        with pytest.raises(errors.DataLossError) as caught:
            pair.reader.engine.read(wrong, [Piece(pair.reader.address, 0, 64)], GUARD_S)
        assert caught.value.reason == "BAD_HANDLE"
    assert remote.engine == name
    assert not pair.reader.memory.any()


def test_a_description_that_does_not_fit_into_a_handle() -> None:
    with pytest.raises(errors.FailedPreconditionError, match="a handle has room for 65536") as caught:
        Descriptor("amd-mori", "1.2.4", "mori-1", bytes(65536)).seal()
    assert caught.value.reason == "DESCRIPTOR_TOO_LONG"


def test_a_library_that_cannot_be_loaded_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel installs where ROCm is not; its native part then fails with another error than a missing module's."""
    (tmp_path / "mori").mkdir()
    (tmp_path / "mori" / "__init__.py").touch()
    (tmp_path / "mori" / "io.py").write_text("raise OSError('libpci.so.3: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"libpci\.so\.3") as caught:
        MoriEngine(host="127.0.0.1")
    assert caught.value.name == "mori"
    del sys.modules["mori"]
