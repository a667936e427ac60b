"""What is special about Yuanrong's TransferEngine, over a double of the library; and the double beside the real one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from connectors.engines.base import Piece, RemoteRegion, TransferFailedError
from connectors.engines.yuanrong_transfer_engine import YuanrongTransferEngine
from omnicore import errors
from tests.contract.engines.conftest import Reader
from tests.doubles.loading import LIBRARIES, installed
from tests.support.processes import wait_until

GUARD_S = 60.0
SIZE = 1 << 16
ROOT = Path(__file__).parents[3]
# What works in the real library without an NPU, asked of whichever of the two is imported.
QUESTIONS = """
import json, socket, sys
import numpy as np
from yr.datasystem import TransferEngine
memory = np.zeros(1 << 16, np.uint8)
at = memory.ctypes.data
def start(engine):
    for _ in range(50):  # another process may be quicker to take a free port
        mine = port()
        status = engine.initialize(f"127.0.0.1:{mine}", "ascend", "npu:0")
        if status.get_msg() != "bind failed":
            return mine, status
def port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
answers = []
def ask(what, answer):
    if not isinstance(answer, int):
        answer = [answer.get_code().name, answer.get_code().value, answer.get_msg(), answer.is_ok(), answer.is_error()]
    answers.append([what, answer])
e = TransferEngine()
ask("register early", e.register_memory(at, 100))
ask("read early", e.transfer_sync_read("127.0.0.1:1", at, at, 10))
ask("unregister early", e.unregister_memory(at))
ask("port early", e.get_rpc_port())
ask("finalize early", e.finalize())
for address in ("127.0.0.1:0", "nowhere", "localhost:1234"):
    ask(f"initialize {address}", TransferEngine().initialize(address, "ascend", "npu:0"))
for device in ("npu", "cpu", "cuda:0", "npu:-1", "npu:x", ""):
    ask(f"initialize {device}", TransferEngine().initialize(f"127.0.0.1:{port()}", "ascend", device))
with socket.create_server(("127.0.0.1", 0)) as taken:
    ask("port taken", TransferEngine().initialize(f"127.0.0.1:{taken.getsockname()[1]}", "ascend", "npu:0"))
mine, started = start(e)
ask("initialize", started)
ask("port", int(e.get_rpc_port() == mine))
ask("initialize again", e.initialize(f"127.0.0.1:{mine}", "ascend", "npu:0"))
ask("register", e.register_memory(at, 1 << 16))
ask("register the same", e.register_memory(at, 1 << 16))
ask("register an overlap", e.register_memory(at + 4096, 4096))
ask("register nothing", e.register_memory(at + (1 << 20), 0))
ask("register null", e.register_memory(0, 10))
ask("register unequal lists", e.batch_register_memory([at + (1 << 20)], []))
ask("register no list", e.batch_register_memory([], []))
ask("unregister what is not", e.unregister_memory(at + 1))
ask("read nowhere", e.transfer_sync_read("nowhere", at, at, 10))
ask("read nothing", e.transfer_sync_read(f"127.0.0.1:{mine}", at, at, 0))
ask("read unequal lists", e.batch_transfer_sync_read(f"127.0.0.1:{mine}", [at], [at], [1, 2]))
ask("read no list", e.batch_transfer_sync_read(f"127.0.0.1:{mine}", [], [], []))
ask("unregister", e.unregister_memory(at))
ask("unregister again", e.unregister_memory(at))
ask("finalize", e.finalize())
ask("finalize again", e.finalize())
ask("initialize after that", start(e)[1])
e.finalize()
print(json.dumps(answers))
"""


def answers(python_path: str) -> Any:
    environ = {**os.environ, "PYTHONPATH": python_path}
    done = subprocess.run(
        [sys.executable, "-c", QUESTIONS], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout.splitlines()[-1])


def test_the_double_answers_as_the_library_does() -> None:
    if importlib.util.find_spec("yr") is None:
        if os.environ.get("OMNIPLANE_REQUIRE_E2E"):
            pytest.fail("openyuanrong-datasystem is not installed: requirements/transfer.txt")
        pytest.skip("openyuanrong-datasystem is not installed")
    assert answers(f"{LIBRARIES / 'yuanrong'}:{ROOT}") == answers("")


@pytest.fixture
def library() -> Iterator[Any]:
    """The double."""
    with installed("yuanrong"):
        yield importlib.import_module("yr.datasystem")


@pytest.fixture
def ends(library: Any) -> Iterator[tuple[Reader, Reader]]:
    """Two engines in this process; the first holds sevens."""
    engines = [YuanrongTransferEngine(host="127.0.0.1") for _ in range(2)]
    owner, reader = (Reader(engine, SIZE) for engine in engines)
    owner.memory[:] = 7
    yield owner, reader
    for engine in engines:
        engine.close()
        assert engine.closing.failures == 0


def read(owner: Reader, reader: Reader) -> None:
    engine, region = owner.engine, owner.region
    remote = RemoteRegion(engine.session, engine.descriptor, region.descriptor, region.address, region.size_bytes)
    reader.engine.read(remote, [Piece(reader.address, 0, SIZE)], GUARD_S)


@pytest.mark.parametrize(("code", "fenced"), [("kNotReady", True), ("kNotFound", True), ("kRuntimeError", False)])
def test_what_the_library_says_of_a_failure_reaches_whoever_asked(
    library: Any, ends: tuple[Reader, Reader], code: str, fenced: bool
) -> None:
    library.fail_next.append((library.StatusCode[code], "the reason"))
    with pytest.raises(TransferFailedError, match=f"{code}: the reason") as caught:
        read(*ends)
    assert caught.value.fenced == fenced
    assert caught.value.metadata["status"] == code
    before = len([call for call, _ in library.calls if call == "finalize"])
    ends[1].engine.fence()
    assert len([call for call, _ in library.calls if call == "finalize"]) == before + (not fenced)
    read(*ends)
    assert (ends[1].memory == 7).all()


async def test_closing_waits_for_the_call_that_is_under_way(library: Any, ends: tuple[Reader, Reader]) -> None:
    owner, reader = ends
    library.proceed.clear()
    reading = threading.Thread(target=read, args=ends)
    reading.start()
    await wait_until(lambda: ("read", owner.engine.session) in library.calls, what="the read")
    closing = threading.Thread(target=reader.engine.close)
    closing.start()
    assert reading.is_alive()
    assert closing.is_alive()
    library.proceed.set()
    reading.join()
    closing.join()
    assert (reader.memory == 7).all()


def test_its_port_is_the_one_that_was_asked_for_or_a_free_one(library: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(errors.FailedPreconditionError) as caught:
        YuanrongTransferEngine(host="127.0.0.1", port=taken.getsockname()[1])
    assert caught.value.reason == "ADDRESS_IN_USE"
    engine = YuanrongTransferEngine(host="127.0.0.1")
    host, _, port = engine.session.rpartition(":")
    socket.create_connection((host, int(port)), timeout=GUARD_S).close()
    engine.close()


@pytest.mark.parametrize("device", ["cpu", "npu", "npu:x", "cuda:0", ""])
def test_only_npus_are_its_devices(library: Any, device: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"extra.device: must be auto or npu:N"):
        YuanrongTransferEngine(host="127.0.0.1", device=device)


def test_closing_gives_everything_back_once(library: Any, ends: tuple[Reader, Reader]) -> None:
    owner, reader = ends
    read(owner, reader)
    library.calls.clear()
    reader.engine.close()
    reader.engine.close()
    done = [call for call, _ in library.calls]
    assert done.count("finalize") == 2, "the half that reads and the half that serves"
    assert done.count("unregister_memory") == 1, "a half that ends takes its registrations with it"


def test_memory_that_one_half_refuses_is_not_left_with_the_other(
    library: Any, ends: tuple[Reader, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = ends
    read(owner, reader)  # now there is a half that reads
    more, register = np.zeros(SIZE, np.uint8), library.TransferEngine.register_memory
    asked: list[object] = []

    def second_refused(half: Any, address: int, size_bytes: int) -> Any:
        asked.append(half)
        return register(half, address, 0 if len(asked) == 2 else size_bytes)

    with monkeypatch.context() as patched:
        patched.setattr(library.TransferEngine, "register_memory", second_refused)
        with pytest.raises(errors.FailedPreconditionError):
            reader.engine.register(more.ctypes.data, SIZE, "cpu")
    assert len(asked) == 2
    assert ("unregister_memory", more.ctypes.data) in library.calls
    reader.engine.unregister(reader.engine.register(more.ctypes.data, SIZE, "cpu"))
