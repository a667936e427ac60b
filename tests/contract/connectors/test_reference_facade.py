"""The reference's interface, on every class that can run here: one body.

Senders and receivers are made once for each class (an engine takes a second to go); every test uses keys of its own and
leaves nothing published.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.reference import (
    ConnectorSpec,
    ManagedBuffer,
    OmniConnectorBase,
    OmniConnectorFactory,
    TransferConfigError,
)
from connectors.reference.connector import CoreConnector
from omnicore import errors
from tests.doubles.loading import installed

torch = pytest.importorskip("torch")

KIB = 1024
LARGE = 100 * KIB  # beyond what travels inside of a handle
GUARD_S = 30.0
_serial = itertools.count()


@dataclasses.dataclass(frozen=True)
class Setup:
    """How to make the two ends of a class."""

    name: str
    extra: dict[str, Any]
    library: str = ""
    """What must be installed."""
    service: str = ""
    """The fixture of the store that it needs."""
    double: str = ""
    """What stands for its library, which needs hardware."""

    def at(self, service: Any) -> Setup:
        """With the options of that store."""
        mine = service.extra()
        names = ("master", "metadata_server", "segment", "localbuf", "host", "port", "timeout_s")
        return dataclasses.replace(self, extra={**self.extra, **{k: v for k, v in mine.items() if k in names}})

    def make(self, directory: Path, **extra: Any) -> CoreConnector:
        places = {"directory": str(directory)} if self.name in HOST_BOUND else {}
        patient = {"get_timeout_s": GUARD_S, "query_timeout_s": GUARD_S}
        options = {**patient, **self.extra, **places, **extra}
        made = OmniConnectorFactory.create_connector(ConnectorSpec(self.name, options))
        assert isinstance(made, CoreConnector)
        return made


HOST_BOUND = {"SharedMemoryConnector"}
_NETWORK = {"host": "127.0.0.1", "zmq_port": 0, "memory_pool_size": 8 << 20}
SETUPS = [
    Setup("SharedMemoryConnector", {"memory_pool_size": 8 << 20}),
    Setup("GrpcConnector", _NETWORK),
    Setup("MooncakeTransferEngineConnector", {**_NETWORK, "protocol": "tcp"}, library="mooncake"),
    Setup("NixlConnector", _NETWORK, library="nixl"),
    Setup("MoriTransferEngineConnector", _NETWORK, double="mori"),
    Setup("YuanrongTransferEngineConnector", {**_NETWORK, "memory_pool_device": "npu:0"}, double="yuanrong"),
    Setup("MooncakeStoreConnector", {"memory_pool_size": 8 << 20}, library="mooncake", service="mooncake_master"),
]
# The other store runs but one test: its code here is the same, and its worker takes seconds to start.
YUANRONG = Setup("YuanrongConnector", {"memory_pool_size": 8 << 20}, library="yr", service="yuanrong_worker")
CHEAP = [setup for setup in SETUPS if setup.name in ("SharedMemoryConnector", "GrpcConnector")]


@dataclasses.dataclass
class Pair:
    """A sender and a receiver that knows it."""

    setup: Setup
    sender: CoreConnector
    receiver: CoreConnector
    directory: Path

    @property
    def raw(self) -> bool:
        return self.sender.supports_raw_data

    def get(self, key: str, metadata: Any = None, receiver: CoreConnector | None = None) -> Any:
        """What arrives, with memory of its own; None if nothing does."""
        found = (receiver or self.receiver).get("0", "1", key, metadata)
        if found is None:
            return None
        value, size = found
        assert size >= 0
        if isinstance(value, ManagedBuffer):
            with value:
                return value.to_bytes()
        return value


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    setup: Setup = request.param
    # Not imported to find out: engines set their library's environment before they import it.
    if setup.library and importlib.util.find_spec(setup.library) is None:
        pytest.skip(f"{setup.library} is not installed")
    if setup.service:
        setup = setup.at(request.getfixturevalue(setup.service))
    directory = tmp_path_factory.mktemp("senders")
    directory.chmod(0o700)
    with (
        installed(setup.double) if setup.double else contextlib.nullcontext(),
        setup.make(directory, role="sender") as sender,
        setup.make(directory, role="receiver") as receiver,
    ):
        if sender.needs_role:
            receiver.update_sender_info(sender.host, sender.get_connection_info()["zmq_port"])
        yield Pair(setup, sender, receiver, directory)


@pytest.fixture
def pair(made: Pair) -> Iterator[Pair]:
    """Whatever a test does, it leaves nothing."""
    yield made
    eventually(lambda: made.sender.health()["handles"] == 0)
    eventually(lambda: all_free(made.sender.health()))
    assert made.receiver.health()["buffers_held"] == 0


@pytest.fixture(params=CHEAP, ids=lambda setup: setup.name)
def cheap(request: pytest.FixtureRequest) -> Setup:
    """A class whose instances cost nothing."""
    setup: Setup = request.param
    return setup


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A directory of this test's own for senders."""
    tmp_path.chmod(0o700)
    return tmp_path


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < end, "never became true"
        time.sleep(0.01)


def all_free(health: dict[str, Any]) -> bool:
    return bool(health["pool_free_bytes"] == health["pool_bytes"])


def new_key(stem: str = "req") -> str:
    return f"{stem}{next(_serial)}x"


def data(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


def put(pair: Pair, key: str, value: Any, **more: Any) -> dict[str, Any]:
    ok, size, metadata = pair.sender.put("0", "1", key, value, **more)
    assert ok, pair.sender.health()["last_error"]
    assert metadata is not None
    assert size == metadata["data_size"]
    return metadata


# --- put and get ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, LARGE], ids=["inline", "by backend"])
def test_n_01_n_02_n_25_objects_arrive_and_give_their_memory_back(pair: Pair, size: int) -> None:
    sent = {
        "kv": torch.arange(size, dtype=torch.float32).to(torch.bfloat16),
        "codes": [np.arange(12, dtype=np.int16).reshape(3, 4), (1, 2.5, None, True)],
        "raw": data(size),
        7: "text",
    }
    key = new_key()
    metadata = put(pair, key, sent)
    assert metadata["is_fast_path"] is False
    got = pair.get(key, metadata)
    assert torch.equal(got["kv"], sent["kv"])
    assert got["kv"].dtype == torch.bfloat16
    np.testing.assert_array_equal(got["codes"][0], sent["codes"][0], strict=True)
    assert (got["codes"][1], got["raw"], got[7]) == (sent["codes"][1], sent["raw"], "text")
    assert pair.sender.health()["handles"] == 0, "released before get returned"


@pytest.mark.parametrize("value", ["", b"", None, 0, [], {}, "text", np.zeros((0, 3), np.float32)], ids=repr)
def test_n_01_values_that_are_false_are_values(pair: Pair, value: Any) -> None:
    key = new_key()
    put(pair, key, value)
    got = pair.receiver.get("0", "1", key)
    assert got is not None
    if isinstance(got[0], ManagedBuffer):
        got[0].release()
    elif isinstance(value, np.ndarray):
        assert got[0].shape == value.shape
    else:
        assert (got[0], type(got[0])) == (value, type(value))


def test_n_01_n_06_what_cannot_be_sent_is_a_failure_that_names_it(pair: Pair) -> None:
    assert pair.sender.put("0", "1", new_key(), {"a": [object()]}) == (False, 0, None)
    error = pair.sender.health()["last_error"]
    assert "object['a'][0]" in error["message"]
    assert error["reason"] == "UNSUPPORTED_TYPE"


@pytest.mark.parametrize("kind", ["tensor", "bytes", "bytearray"])
def test_n_07_n_24_n_26_raw_memory_is_the_readers_until_released(pair: Pair, kind: str) -> None:
    raw = data(LARGE)
    tensor = torch.frombuffer(bytearray(raw), dtype=torch.int16).reshape(8, -1)
    sent = {"tensor": tensor, "bytes": raw, "bytearray": bytearray(raw)}[kind]
    key = new_key()
    metadata = put(pair, key, sent)
    assert metadata["is_fast_path"] is pair.raw
    found = pair.receiver.get("0", "1", key, metadata)
    assert found is not None
    value, size = found
    if not pair.raw:
        assert value.equal(tensor) if kind == "tensor" else value == raw
        return
    assert isinstance(value, ManagedBuffer)
    assert size == value.size == LARGE
    assert (pair.sender.health()["handles"], pair.receiver.health()["buffers_held"]) == (1, 1)
    assert value.to_bytes() == raw
    assert value.as_tensor(torch.int16, (8, LARGE // 16)).equal(tensor)
    with pytest.raises(errors.InvalidRequestError):
        value.as_tensor(torch.int16, (8, 8))
    value.release()
    assert pair.sender.health()["handles"] == 0
    value.release()  # harmless
    with pytest.raises(errors.FailedPreconditionError):
        value.to_bytes()


def test_n_26_a_received_buffer_can_be_sent_on(pair: Pair) -> None:
    if not pair.raw:
        pytest.skip("objects have memory of their own here")
    first, second = new_key(), new_key()
    put(pair, first, data(LARGE, 5))
    found = pair.receiver.get("0", "1", first)
    assert found is not None
    with found[0] as buffer:
        put(pair, second, buffer)
    assert pair.get(second) == data(LARGE, 5)


def test_n_26_room_of_its_own_pool_is_sent_without_a_copy_and_of_another_with_one(pair: Pair) -> None:
    if not pair.raw:
        with pytest.raises(errors.UnimplementedError):
            pair.sender.allocate(LARGE)
        return
    for make in (pair.sender.allocate, other_pool(pair)):
        with make(LARGE) as room:
            room.array[:] = np.frombuffer(data(LARGE, 9), np.uint8)
            used = used_bytes(pair.sender)
            key = new_key()
            put(pair, key, room)
            more = used_bytes(pair.sender) - used
            assert (more == 0) is (make == pair.sender.allocate), "the same room, or another one"
        assert pair.get(key) == data(LARGE, 9), "a room that was put is the receiver's, whoever leaves the context"
    with pair.sender.allocate(LARGE):
        assert used_bytes(pair.sender) >= LARGE
    assert used_bytes(pair.sender) == 0
    with pytest.raises(errors.UnimplementedError):
        pair.receiver.allocate(1)


def other_pool(pair: Pair) -> Callable[[int], ManagedBuffer]:
    """Room that is not of the sender's pool: what a receiver holds."""

    def make(size: int) -> ManagedBuffer:
        array = np.zeros(size, np.uint8)
        return ManagedBuffer(array, lambda _: None)

    return make


def used_bytes(connector: CoreConnector) -> int:
    health = connector.health()
    return int(health["pool_bytes"] - health["pool_free_bytes"])


def test_n_24_a_buffer_that_is_forgotten_is_given_back(pair: Pair) -> None:
    if not pair.raw:
        pytest.skip("nothing to forget here")
    key = new_key()
    put(pair, key, data(LARGE))
    found = pair.receiver.get("0", "1", key)
    assert found is not None
    del found
    eventually(lambda: pair.sender.health()["handles"] == 0)


# --- the three cases of metadata --------------------------------------------------------------------------------------


def test_n_21_full_metadata_needs_no_question(pair: Pair) -> None:
    key = new_key()
    metadata = put(pair, key, data(LARGE))
    before = pair.sender.health()["queries_answered"]
    assert pair.get(key, metadata) == data(LARGE)
    assert pair.sender.health()["queries_answered"] == before


def test_n_22_a_host_and_port_are_asked_exactly_once(pair: Pair) -> None:
    key = new_key()
    full = put(pair, key, data(LARGE))
    partial = {name: full[name] for name in ("source_host", "source_port")}
    before = pair.sender.health()["queries_answered"]
    assert pair.get(key, partial) == data(LARGE)
    assert pair.sender.health()["queries_answered"] == before + 1


def test_n_23_m_27_k_13_without_metadata_the_known_sender_is_polled(pair: Pair) -> None:
    key = new_key()
    started = time.monotonic()
    assert pair.get(key) is None, "not there yet"
    assert time.monotonic() - started < GUARD_S
    errors_before = pair.receiver.health()["errors"]
    put(pair, key, data(LARGE))
    assert pair.get(key) == data(LARGE)
    assert pair.receiver.health()["errors"] == errors_before, "to poll too early is no fault"


def test_n_22_a_wrong_length_is_refused_and_the_data_stays(pair: Pair) -> None:
    if not pair.sender.needs_role:
        pytest.skip("metadata of others means nothing here")
    key = new_key()
    full = put(pair, key, data(LARGE))
    for wrong in (full["data_size"] + 1, full["data_size"] - 1, 0):
        assert pair.get(key, {**full, "data_size": wrong}) is None
        assert pair.get(key, {**full, "data_size": wrong, "handle": None}) is None
        assert pair.receiver.health()["last_error"]["reason"] in ("WRONG_LENGTH", "BAD_METADATA")
    assert pair.get(key, {**full, "handle": None}) == data(LARGE), "its place was not lost"


def test_n_32_metadata_of_others_means_nothing_to_shared_memory(pair: Pair) -> None:
    if pair.sender.needs_role:
        pytest.skip("others listen to it")
    for metadata in ({}, [1], "x", {"source_host": "10.0.0.1", "source_port": 1}, {"size": 3}):
        key = new_key()
        put(pair, key, data(LARGE))
        assert pair.get(key, metadata) == data(LARGE)
    key = new_key()
    assert pair.get(key, {key: put(pair, key, "wrapped")}) == "wrapped"


# --- consumers, keys, ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["full metadata", "by key"])
def test_n_19_one_receiver_a_key(pair: Pair, told: bool) -> None:
    key = new_key()
    metadata = put(pair, key, data(LARGE))
    assert pair.get(key, metadata if told else None) == data(LARGE)
    assert pair.get(key, metadata if told else None) is None
    assert pair.get(key, None if told else metadata) is None


def test_n_19_of_many_at_once_one_gets_it(pair: Pair) -> None:
    key = new_key()
    metadata = put(pair, key, data(LARGE))
    found: list[Any] = []
    ready = threading.Barrier(4)

    def take(how: dict[str, Any] | None) -> None:
        ready.wait(GUARD_S)
        found.append(pair.get(key, how))

    in_threads([functools.partial(take, how) for how in (metadata, None, metadata, None)])
    assert sorted(found, key=lambda value: value is None) == [data(LARGE), None, None, None]


def test_n_19_n_31_w_02_several_receivers_if_said(pair: Pair) -> None:
    key = new_key()
    metadata = put(pair, key, data(LARGE), consumers=3)
    for how in (metadata, None, metadata):
        assert pair.sender.health()["handles"] == 1
        assert pair.get(key, how) == data(LARGE)
    assert pair.sender.health()["handles"] == 0
    assert pair.get(key, metadata) is None


def test_the_same_key_twice_is_refused_and_the_first_stays(pair: Pair) -> None:
    key = new_key()
    put(pair, key, data(LARGE, 1))
    assert pair.sender.put("0", "1", key, data(LARGE, 2)) == (False, 0, None)
    assert pair.sender.health()["last_error"]["reason"] == "KEY_IN_USE"
    put_on_other_edge = pair.sender.put("0", "2", key, data(LARGE, 3))
    assert put_on_other_edge[0], "another edge is another key"
    assert pair.get(key) == data(LARGE, 1)
    pair.sender.cleanup(key, "0", "2")


def test_n_03_n_27_n_33_n_34_n_41_cleanup_takes_exactly_one_request(pair: Pair) -> None:
    """Keys as the reference's managers make them."""
    request = new_key()
    mine = [request, f"{request}_0_7", f"omni_0_to_1_kv_cache_{request}", f"{request}_0_0_3_1", f"{request}__cfg_text"]
    others = [f"{request}1", f"x{request}", f"{request}1_0_7", f"kv_x{request}"]
    for key in (*mine, *others):
        put(pair, key, data(LARGE))
    pair.sender.cleanup("nobody")
    assert pair.sender.health()["handles"] == len(mine) + len(others)
    pair.sender.cleanup(request)
    pair.sender.cleanup(request)
    assert [key for key in mine if pair.get(key) is not None] == []
    assert [key for key in others if pair.get(key) is None] == []


def test_n_27_cleanup_with_both_stages_or_the_inner_key_takes_one_key(pair: Pair) -> None:
    key, other = new_key(), new_key()
    put(pair, key, data(LARGE))
    put(pair, f"{key}_0", data(LARGE))
    pair.sender.cleanup(key, "0", "1")
    assert pair.get(key) is None
    assert pair.get(f"{key}_0") == data(LARGE)
    put(pair, other, data(LARGE))
    pair.sender.cleanup(f"{other}@0_1")
    assert pair.get(other) is None


def test_any_thread_may_call(pair: Pair) -> None:
    """Eight at once, each its own keys, three sizes; every byte is checked."""

    def work(seed: int) -> None:
        for index, size in enumerate((10, LARGE, 300 * KIB, 0)):
            key = new_key(f"t{seed}-{index}-")
            metadata = put(pair, key, data(size, seed))
            assert pair.get(key, metadata if index % 2 else None) == data(size, seed)

    in_threads([functools.partial(work, seed) for seed in range(8)])


def test_n_05_close_is_idempotent_and_says_so(pair: Pair) -> None:
    connector = pair.setup.make(pair.directory, role="sender")
    assert connector.put("0", "1", "k", data(LARGE))[0]
    for _ in range(3):
        connector.close()
    assert connector.put("0", "1", "k", b"x") == (False, 0, None)
    assert connector.get("0", "1", "k") is None
    connector.cleanup("k")
    health = connector.health()
    assert (health["status"], health["last_error"]["reason"]) == ("closed", "CONNECTOR_CLOSED")


def test_n_04_n_28_m_14_m_28_health_tells_who_how_and_what(pair: Pair) -> None:
    before = pair.receiver.health()
    key = new_key()
    put(pair, key, data(LARGE))
    assert pair.get(key) == data(LARGE)
    sender, receiver = pair.sender.health(), pair.receiver.health()
    assert sender["status"] == receiver["status"] == "healthy"
    assert sender["connector"] == pair.setup.name
    assert receiver["gets"] == before["gets"] + 1
    assert receiver["bytes_transferred"] >= before["bytes_transferred"] + LARGE
    edge = receiver["edges"]["0->1"]
    assert edge["size_kbytes"] >= LARGE / 1024
    assert edge["in_flight_time_ms"] > 0
    assert edge["rx_decode_time_ms"] > 0
    assert sender["edges"]["0->1"]["tx_time_ms"] > 0
    info = pair.sender.get_connection_info()
    assert (info["host"], info["engine_id"], info["can_put"]) == (pair.sender.host, pair.sender.engine_id, True)
    assert info["zmq_port"] > 0


# --- roles and senders ------------------------------------------------------------------------------------------------


def test_k_12_a_receiver_publishes_nothing(pair: Pair) -> None:
    if not pair.sender.needs_role:
        ok, _, _ = pair.receiver.put("0", "1", "k", b"x")
        assert ok, "no role is needed here, and none is enforced"
        pair.receiver.cleanup("k")
        return
    assert (pair.sender.can_put, pair.receiver.can_put) == (True, False)
    assert pair.receiver.put("0", "1", "k", b"x") == (False, 0, None)
    assert pair.receiver.health()["last_error"]["reason"] == "RECEIVER"


def test_n_23_without_a_sender_nothing_is_found_and_health_says_why() -> None:
    with SETUPS[1].make(Path(), role="receiver") as receiver:
        assert receiver.get("0", "1", "k") is None
        assert receiver.health()["last_error"]["reason"] == "NO_SENDER"
        receiver.update_sender_info("127.0.0.1", 1)  # nobody listens there
        assert receiver.get("0", "1", "k") is None
        assert receiver.health()["last_error"]["reason"] in ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def test_n_20_n_29_n_30_m_20_w_09_each_rank_has_its_sender() -> None:
    """One receiver, four senders: by rank-aware key, by argument, by partial metadata; the default is unaffected."""
    ranks = 4
    senders = [SETUPS[1].make(Path(), role="sender", local_rank=rank) for rank in range(ranks)]
    try:
        with SETUPS[1].make(Path(), role="receiver") as receiver:
            whole = torch.arange(4 * 30000, dtype=torch.float32).reshape(4, -1)
            for rank, sender in enumerate(senders):
                receiver.update_sender_info(sender.host, sender.get_connection_info()["zmq_port"], rank)
                for key in (f"req_0_0_{rank}_0", f"by-argument-{rank}", f"partial-{rank}"):
                    assert sender.put(0, 1, key, whole[rank])[0]
            asks: list[Callable[[int], Any]] = [
                lambda rank: receiver.get(0, 1, f"req_0_0_{rank}_0"),
                lambda rank: receiver.get(0, 1, f"by-argument-{rank}", sender_rank=rank),
                lambda rank: receiver.get(0, 1, f"partial-{rank}", partial(senders[rank])),
            ]
            for ask in asks:
                shards = []
                for rank in range(ranks):
                    found = ask(rank)
                    assert found is not None
                    with found[0] as buffer:
                        shards.append(buffer.as_tensor(torch.float32, (30000,)).clone())
                assert torch.stack(shards).equal(whole)
            assert receiver.get(0, 1, "no-rank") is None
            assert receiver.health()["last_error"]["reason"] == "NO_SENDER", "there is no default sender"
    finally:
        for sender in senders:
            sender.close()


def partial(sender: CoreConnector) -> dict[str, Any]:
    return {"source_host": sender.host, "source_port": sender.get_connection_info()["zmq_port"]}


def test_m_22_m_09_a_taken_port_is_an_error_and_the_first_stays() -> None:
    with SETUPS[1].make(Path(), role="sender") as first, SETUPS[1].make(Path(), role="receiver") as receiver:
        port = first.get_connection_info()["zmq_port"]
        with pytest.raises(errors.UnavailableError) as refused:
            SETUPS[1].make(Path(), role="sender", zmq_port=port)
        assert refused.value.reason == "ADDRESS_IN_USE"
        assert first.put(0, 1, "k", "first")[0]
        receiver.update_sender_info(first.host, port)
        assert receiver.get(0, 1, "k") == ("first", first.health()["edges"]["0->1"]["size_kbytes"] * 1024)


def test_a_sender_that_took_the_port_of_another_is_not_mistaken_for_it() -> None:
    with SETUPS[1].make(Path(), role="receiver") as receiver:
        metadata, second = successor(receiver)
        with second:
            assert second.put(0, 1, "k", data(LARGE, 2))[0]
            eventually(lambda: reason_of(receiver, metadata) == "WRONG_REPLICA")
            assert second.health()["handles"] == 1


def successor(receiver: CoreConnector) -> tuple[dict[str, Any] | None, CoreConnector]:
    """What a sender said that is gone, and one that has its port now; once more if somebody else was faster."""
    end = time.monotonic() + GUARD_S
    while True:
        with SETUPS[1].make(Path(), role="sender") as first:
            port = first.get_connection_info()["zmq_port"]
            metadata = first.put(0, 1, "k", data(LARGE))[2]
        assert receiver.get(0, 1, "k", metadata) is None, "nobody is there"
        try:
            return metadata, SETUPS[1].make(Path(), role="sender", zmq_port=port)
        except errors.UnavailableError:
            assert time.monotonic() < end


def reason_of(receiver: CoreConnector, metadata: dict[str, Any] | None) -> str:
    assert receiver.get(0, 1, "k", metadata) is None
    return str(receiver.health()["last_error"]["reason"])


def test_only_who_has_the_secret_is_answered_and_believed() -> None:
    secret = {"secret": "one of this edge"}
    with (
        SETUPS[1].make(Path(), role="sender", **secret) as sender,
        SETUPS[1].make(Path(), role="sender") as impostor,
        SETUPS[1].make(Path(), role="receiver", **secret) as receiver,
        SETUPS[1].make(Path(), role="receiver", secret="another") as stranger,
        SETUPS[1].make(Path(), role="receiver") as nobody,
    ):
        assert sender.put(0, 1, "k", "for one")[0]
        assert impostor.put(0, 1, "k", "false")[0]
        for other in (stranger, nobody):
            assert other.get(0, 1, "k", partial(sender)) is None
            assert other.health()["last_error"]["reason"] == "WRONG_SECRET"
        assert receiver.get(0, 1, "k", partial(impostor)) is None
        assert receiver.health()["last_error"]["reason"] == "WRONG_SECRET"
        found = receiver.get(0, 1, "k", partial(sender))
        assert found is not None
        assert found[0] == "for one"


def test_m_26_a_stage_in_the_middle_receives_and_sends(cheap: Setup, private: Path) -> None:
    with (
        cheap.make(private, role="sender") as first,
        cheap.make(private, role="dual") as middle,
        cheap.make(private, role="receiver") as last,
    ):
        metadata = first.put(0, 1, "req", [1])[2]
        found = middle.get(0, 1, "req", metadata)
        assert found is not None
        metadata = middle.put(1, 2, "req", [*found[0], 2])[2]
        found = last.get(1, 2, "req", metadata)
        assert found is not None
        assert found[0] == [1, 2]


def test_a_full_pool_is_waited_for_then_refused(cheap: Setup, private: Path) -> None:
    with cheap.make(private, role="sender", memory_pool_size=1 << 20, put_wait_s=0.1) as sender:
        assert sender.put(0, 1, "a", data(700 * KIB))[0]
        assert not sender.put(0, 1, "b", data(700 * KIB))[0]
        assert sender.health()["last_error"]["reason"] == "POOL_FULL"
        assert not sender.put(0, 1, "c", data(2 << 20))[0]
        assert sender.health()["last_error"]["reason"] == "LARGER_THAN_POOL"
        sender.cleanup("a")
        assert sender.put(0, 1, "b", data(700 * KIB))[0], "room again"


def test_get_gives_up_at_its_deadline(cheap: Setup, private: Path) -> None:
    with cheap.make(private, role="dual") as connector:
        assert connector.get_with_deadline(0, 1, "k", deadline=time.monotonic() - 1) is None
        assert connector.get_with_deadline(0, 1, "k", deadline=time.monotonic() + 1) is None


def test_unknown_classes_are_never_replaced() -> None:
    with pytest.raises(TransferConfigError, match="did you mean 'SharedMemoryConnector'"):
        OmniConnectorFactory.create_connector(ConnectorSpec("SharedMemoryConnecter"))
    assert issubclass(CoreConnector, OmniConnectorBase)


def in_threads(work: list[Callable[[], None]]) -> None:
    """Run all at once; the first failure is raised here."""
    failures: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 -- raised below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
        assert not thread.is_alive()
    for failure in failures:
        raise failure


# --- processes --------------------------------------------------------------------------------------------------------

_SENDER = """
import ast, sys
from connectors.reference import ConnectorSpec, OmniConnectorFactory
spec = ConnectorSpec(sys.argv[1], ast.literal_eval(sys.argv[2]))
with OmniConnectorFactory.create_connector(spec) as sender:
    puts = [sender.put(0, 1, key, {"x": b"x" * 200_000}) for key in sys.argv[3:]]
    print(repr(puts), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def publisher(cheap: Setup, private: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[bytes]]]:
    """Starts a sender in a process of its own, which publishes some keys and says what ``put`` returned."""
    extra = {**cheap.extra, "role": "sender", **({"directory": str(private)} if cheap.name in HOST_BOUND else {})}
    processes: list[subprocess.Popen[bytes]] = []

    def start(keys: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _SENDER, cheap.name, repr(extra), *keys]
        root = Path(__file__).parents[3]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root))
        return processes[-1]

    yield start
    for process in processes:
        with process:
            process.kill()


def test_n_34_n_35_between_processes_and_nothing_is_left_of_a_killed_one(
    cheap: Setup, private: Path, publisher: Callable[[list[str]], subprocess.Popen[bytes]]
) -> None:
    unique = uuid.uuid4().hex
    keys = [f"{unique}-told", f"{unique}-asked", f"{unique}-too-late"]
    process = publisher(keys)
    assert process.stdout is not None
    puts = ast.literal_eval(process.stdout.readline().decode())
    metadata = [put[2] for put in puts]
    with cheap.make(private, role="receiver") as receiver:
        if cheap.name not in HOST_BOUND:
            receiver.update_sender_info(metadata[0]["source_host"], metadata[0]["source_port"])
        expected = ({"x": b"x" * 200_000}, metadata[0]["data_size"])
        assert receiver.get("0", "1", keys[0], metadata[0]) == expected
        assert receiver.get("0", "1", keys[1]) == expected
        process.kill()
        process.wait()
        assert receiver.get("0", "1", keys[2], metadata[2]) is None
        assert receiver.get("0", "1", keys[2]) is None
        assert receiver.get("0", "1", keys[2]) is None
    assert list(private.rglob("*.sender")) == [], "the next one that looked has removed it"
    assert [path.name for path in Path("/dev/shm").iterdir() if unique in path.name] == []


def test_n_15_an_unreachable_store_is_unhealthy_and_put_fails(request: pytest.FixtureRequest, private: Path) -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed")
    setup = next(setup for setup in SETUPS if setup.name == "MooncakeStoreConnector")
    setup = setup.at(request.getfixturevalue("mooncake_master"))
    with setup.make(private, master="127.0.0.1:1", timeout_s=0.5, put_wait_s=0.0) as connector:
        assert connector.put("0", "1", "k", data(LARGE)) == (False, 0, None)
        assert connector.health()["status"] == "unhealthy"
        assert connector.health()["last_error"]["reason"]


def test_n_36_yuanrong_is_a_store_like_the_other(request: pytest.FixtureRequest, private: Path) -> None:
    if importlib.util.find_spec("yr") is None:
        pytest.skip("yr is not installed")
    setup = YUANRONG.at(request.getfixturevalue("yuanrong_worker"))
    with setup.make(private, role="sender") as sender, setup.make(private, role="receiver") as receiver:
        for key in ("a", "b", "c"):
            assert sender.put("0", "1", key, data(LARGE))[0]
        for key, metadata in (("a", None), ("b", {"source_host": "10.0.0.1"})):
            found = receiver.get("0", "1", key, metadata)
            assert found is not None
            assert found[0] == data(LARGE)
        sender.cleanup("c")
        assert sender.health()["handles"] == 0
        assert receiver.get("0", "1", "c") is None
        assert sender.health()["status"] == "healthy"
