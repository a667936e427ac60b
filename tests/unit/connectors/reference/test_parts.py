"""Proofs, values, and the thread in which connectors work."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.connector_set import ConnectorSet
from connectors.payload import Payload
from connectors.reference import (
    ConnectorSpec,
    ManagedBuffer,
    OmniConnectorBase,
    OmniConnectorFactory,
    TransferConfigError,
    proofs,
    values,
)
from connectors.reference.classes import GrpcConnector
from connectors.reference.loop import LoopThread
from omni.v1 import reference_transfer_service_pb2 as pb
from omni.v1 import transfer_pb2
from omnicore import errors

SECRET, OTHER = b"one", b"another"


# --- proofs -----------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_to_who_knows_the_secret() -> None:
    request = proofs.ask("k@0_1", "me", SECRET)
    proofs.check_request(request, SECRET)
    proofs.check_request(request, b"")  # an owner without secret does not ask for one
    for wrong in (OTHER, SECRET + b"x"):
        with pytest.raises(errors.PermissionDeniedError):
            proofs.check_request(request, wrong)
    with pytest.raises(errors.PermissionDeniedError):
        proofs.check_request(proofs.ask("k@0_1", "me", b""), SECRET)


@pytest.mark.parametrize("change", [{"key": "l@0_1"}, {"consumer": "you"}, {"nonce": b"n" * 16}, {"proof": b""}])
def test_no_field_of_a_question_can_be_changed(change: dict[str, Any]) -> None:
    request = proofs.ask("k@0_1", "me", SECRET)
    request.MergeFrom(pb.QueryRequest(**change))
    if change == {"proof": b""}:
        request.ClearField("proof")
    with pytest.raises(errors.PermissionDeniedError):
        proofs.check_request(request, SECRET)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"key": "x" * 2049}, "key"), ({"nonce": b"short"}, "nonce"), ({"nonce": b"n" * 17}, "nonce")],
)
def test_fields_have_limits(change: dict[str, Any], field: str) -> None:
    request = proofs.ask("k", "me", b"")
    request.MergeFrom(pb.QueryRequest(**change))
    with pytest.raises(errors.InvalidRequestError) as raised:
        proofs.check_request(request, b"")
    assert raised.value.violations[0].field == field
    for empty in (pb.QueryRequest(consumer="me", nonce=b"n" * 16), pb.QueryRequest(key="k", nonce=b"n" * 16)):
        with pytest.raises(errors.InvalidRequestError):
            proofs.check_request(empty, b"")


def test_an_answer_is_believed_of_who_knows_the_secret_and_to_this_question() -> None:
    request, another = proofs.ask("k", "me", SECRET), proofs.ask("k", "me", SECRET)
    good = proofs.answer(request, b"handle", SECRET)
    proofs.check_answer(request, good, SECRET)
    for response, asked in (
        (proofs.answer(request, b"handle", OTHER), request),
        (proofs.answer(request, b"handle", b""), request),
        (pb.QueryResponse(handle=b"changed", proof=good.proof), request),
        (good, another),
    ):
        with pytest.raises(errors.PermissionDeniedError):
            proofs.check_answer(asked, response, SECRET)
    with pytest.raises(errors.DataLossError):
        proofs.check_answer(request, pb.QueryResponse(handle=bytes(proofs.MAX_HANDLE_BYTES + 1)), b"")


# --- values -----------------------------------------------------------------------------------------------------------

_TEXT = st.text("aZ0 \x00ü€𝄞", max_size=20)
_OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT | st.binary(max_size=3000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT | st.integers(), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=40)
@given(_OBJECTS)
def test_n_06_objects_come_back(value: Any) -> None:
    assert OmniConnectorBase.deserialize_obj(OmniConnectorBase.serialize_obj(value)) == value


def test_n_06_arrays_tensors_and_images_come_back() -> None:
    torch = pytest.importorskip("torch")
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new("RGB", (5, 4), (1, 2, 3))
    sent = {"n": np.arange(6, dtype=np.float16).reshape(2, 3), "t": torch.ones(3, dtype=torch.bfloat16), "i": image}
    got = values.deserialize(values.serialize(sent))
    np.testing.assert_array_equal(got["n"], sent["n"], strict=True)
    assert got["n"].flags.writeable
    assert got["t"].equal(sent["t"])
    assert (got["i"].size, got["i"].tobytes()) == (image.size, image.tobytes())


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("code of the sender ran",))


@pytest.mark.parametrize(
    "data",
    [b"", b"OMN1", b"OMN1\xff\xff\xff\xff", pickle.dumps(_Evil()), b"OMN2" + bytes(40), bytes(100)],
    ids=["empty", "magic", "length", "pickle", "version", "zeros"],
)
def test_n_06_other_bytes_are_refused_and_no_code_runs(data: bytes) -> None:
    with pytest.raises(errors.DataLossError):
        values.deserialize(data)


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_n_06_a_turned_bit_gives_an_error_or_an_object(position: int, bit: int) -> None:
    raw = bytearray(values.serialize({"a": [1, 2.5, "x"], "b": b"y" * 2000}))
    raw[position % len(raw)] ^= 1 << bit
    try:
        values.deserialize(bytes(raw))
    except errors.OmniError:
        return


def test_n_26_raw_is_what_a_receiver_wants_as_memory() -> None:
    assert values.raw_of(values.to_payload(b"abc", raw=True)).tobytes() == b"abc"
    assert values.from_payload(values.to_payload(b"abc", raw=False)) == b"abc"
    assert values.from_payload(values.to_payload([b"abc"], raw=True)) == [b"abc"]
    with pytest.raises(errors.DataLossError):
        values.raw_of(Payload(text="no"))


def test_n_24_a_buffer_may_be_a_devices() -> None:
    torch = pytest.importorskip("torch")
    given_back: list[bool] = []
    with ManagedBuffer(torch.arange(6, dtype=torch.int16).reshape(2, 3), given_back.append) as buffer:
        assert (buffer.size, buffer.released) == (12, False)
        assert buffer.tensor.dtype == torch.uint8
        assert buffer.as_tensor(torch.int16, (3, 2)).tolist() == [[0, 1], [2, 3], [4, 5]]
        assert buffer.to_bytes() == np.arange(6, dtype=np.int16).tobytes()
    assert (buffer.released, given_back) == (True, [True])
    with pytest.raises(errors.FailedPreconditionError):
        _ = buffer.tensor


# --- the thread -------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread.acquire()
    yield made
    made.release()


async def _give(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def _raise(error: BaseException) -> None:
    raise error


def test_one_thread_for_all_until_the_last_leaves() -> None:
    first, second = LoopThread.acquire(), LoopThread.acquire()
    assert first is second
    first.release()
    assert second.run(_give(1), 1) == 1
    second.release()
    assert "omni-connectors" not in {thread.name for thread in threading.enumerate()}
    third = LoopThread.acquire()
    assert third is not first
    assert third.run(_give(2), 1) == 2
    third.release()


def test_errors_come_back_as_they_are(loop: LoopThread) -> None:
    for error in (errors.NotFoundError("x"), ValueError("y"), TimeoutError("its own")):
        with pytest.raises(type(error)) as raised:
            loop.run(_raise(error), 1)
        assert raised.value.args == error.args


def test_the_thread_does_not_wait_for_itself(loop: LoopThread) -> None:
    async def inside() -> None:
        loop.run(_give(1), 1)

    with pytest.raises(errors.InternalError):
        loop.run(inside(), 1)


def test_what_was_begun_is_ended_with_the_thread() -> None:
    loop = LoopThread.acquire()
    begun, ended = threading.Event(), threading.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    loop.start(forever())
    assert begun.wait(30)
    loop.release()
    assert ended.wait(30)


# --- the factory ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Mine:
    config: dict[str, Any]
    needs_role = True


@pytest.fixture
def registered() -> Iterator[str]:
    name = "ConnectorOfThisTest"
    OmniConnectorFactory.register_connector(name, _Mine)  # type: ignore[arg-type]
    yield name
    OmniConnectorFactory.unregister_connector(name)


def test_n_12_names_are_added_once_and_made_by_their_constructor(registered: str) -> None:
    assert registered in OmniConnectorFactory.list_registered_connectors()
    spec = ConnectorSpec(registered, {"a": 1})
    made = OmniConnectorFactory.create_connector(spec)
    assert isinstance(made, _Mine)
    assert made.config == {"a": 1}
    assert made.config is not spec.extra
    assert OmniConnectorFactory.needs_role(registered)
    for name in (registered, "SharedMemoryConnector"):
        with pytest.raises(TransferConfigError, match="registered already"):
            OmniConnectorFactory.register_connector(name, _Mine)  # type: ignore[arg-type]
    with pytest.raises(TransferConfigError):
        OmniConnectorFactory.register_connector("", _Mine)  # type: ignore[arg-type]


def test_n_12_the_references_names_stay() -> None:
    OmniConnectorFactory.unregister_connector("SharedMemoryConnector")
    assert "SharedMemoryConnector" in OmniConnectorFactory.list_registered_connectors()


def test_n_12_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(TransferConfigError, match=r"known: .*NixlConnector.*did you mean 'NixlConnector'"):
        OmniConnectorFactory.create_connector(ConnectorSpec("NixlConector"))
    assert not OmniConnectorFactory.needs_role("NixlConector")


@pytest.mark.parametrize("name", ["GrpcConnector", "SharedMemoryConnector"])
def test_n_05_a_forgotten_connector_closes_itself(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    extra = {"directory": str(tmp_path)} if name == "SharedMemoryConnector" else {"host": "127.0.0.1", "zmq_port": 0}
    connector = OmniConnectorFactory.create_connector(ConnectorSpec(name, {**extra, "memory_pool_size": 1 << 20}))
    assert connector.put(0, 1, "k", "x")[0]
    del connector
    gc.collect()
    end = time.monotonic() + 30
    while "omni-connectors" in {thread.name for thread in threading.enumerate()}:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert list(tmp_path.rglob("*.sender")) == []


def test_raw_data_that_is_not_raw_is_given_back() -> None:
    with GrpcConnector({"host": "127.0.0.1", "zmq_port": 0, "role": "dual"}) as both:
        edge = transfer_pb2.EdgeRef(request_id="k@0_1", from_stage=0, to_stage=1)
        two = Payload({"a": np.arange(3), "b": np.arange(3)}, metadata={"form": "bytes"})
        handle = both._loop.run(both._publish("k@0_1", edge, two, 1), 30)
        assert both.get(0, 1, "k", both._describe(handle)) is None
        health = both.health()
        assert health["last_error"]["message"].startswith("raw data is one tensor")
        assert (health["buffers_held"], health["handles"]) == (0, 0)


def test_a_round_of_sweeping_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def sweep(connectors: ConnectorSet) -> int:
        rounds.append(connectors)
        raise errors.InternalError("cuIpcCloseMemHandle failed")

    monkeypatch.setattr("connectors.reference.node._SWEEP_S", 0.001)
    monkeypatch.setattr(ConnectorSet, "sweep", sweep)
    with GrpcConnector({"host": "127.0.0.1", "zmq_port": 0, "role": "dual"}):
        end = time.monotonic() + 30
        while len(rounds) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
