"""What a receiver is told: three cases, and nothing else moves a byte."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.reference import metadata as meta
from connectors.reference.base import belongs_to, edge_key, plain_key
from connectors.reference.connector import CoreConnector
from connectors.reference.senders import Senders, rank_of
from omni.v1 import transfer_pb2
from omnicore import errors

KEY, EDGE_KEY = "req1", "req1@0_1"


def handle(**changes: Any) -> transfer_pb2.TransferHandle:
    made = transfer_pb2.TransferHandle(
        key=EDGE_KEY,
        edge=transfer_pb2.EdgeRef(request_id=EDGE_KEY),
        owner_endpoint="127.0.0.1:5000",
        size_bytes=5,
        token=b"t" * 16,
    )
    made.tensors.add(name="data", dtype="uint8", shape=[5], size_bytes=5)
    made.fetch.SetInParent()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def full(**changes: Any) -> dict[str, Any]:
    return {**meta.build(handle(), "127.0.0.1", 5000, True), **changes}


def test_n_21_n_22_n_23_the_three_cases() -> None:
    assert meta.parse(None, KEY, EDGE_KEY) == meta.Told()
    assert meta.parse({}, KEY, EDGE_KEY) == meta.Told()
    asked = meta.parse({"source_host": "10.0.0.1", "source_port": "5001"}, KEY, EDGE_KEY)
    assert (asked.handle, asked.endpoint, asked.size_bytes) == (None, "10.0.0.1:5001", None)
    told = meta.parse(full(), KEY, EDGE_KEY)
    assert told.handle == handle()
    assert meta.parse({KEY: full(), "other": 1}, KEY, EDGE_KEY) == told, "of several keys at once"
    assert meta.parse({**full(), "from_rank": 3}, KEY, EDGE_KEY) == told, "what others add is theirs"
    without_handle = meta.parse(full(handle=None), KEY, EDGE_KEY)
    assert (without_handle.handle, without_handle.endpoint, without_handle.size_bytes) == (None, "127.0.0.1:5000", 5)
    ipv6 = meta.parse({"source_host": "::1", "source_port": 1}, KEY, EDGE_KEY)
    assert ipv6.endpoint == "[::1]:1"


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ([], "metadata"),
        ("text", "metadata"),
        ({"source_host": "h"}, "source_host"),
        ({"source_port": 1}, "source_host"),
        ({"source_host": "auto", "source_port": 1}, "source_host"),
        ({"source_host": "h/../x", "source_port": 1}, "source_host"),
        ({"source_host": "h", "source_port": 0}, "source_host"),
        ({"source_host": "h", "source_port": 65536}, "source_host"),
        ({"source_host": "h", "source_port": True}, "source_host"),
        ({"source_host": "h", "source_port": 1.0}, "source_host"),
        ({"data_size": 3}, "source_host"),
        (full(data_size=-1), "data_size"),
        (full(data_size="5"), "data_size"),
        (full(data_size=True), "data_size"),
        (full(data_size=6), "data_size"),
        (full(is_fast_path=1), "is_fast_path"),
        (full(source_port=5001), "source_host"),
        (full(source_host="10.0.0.1"), "source_host"),
        (full(handle=b"bytes"), "handle"),
        (full(handle="not base64!"), "handle"),
        (full(handle=base64.b64encode(b"\xff\xff\xff").decode()), "handle"),
        (full(handle="A" * 2_000_000), "handle"),
        (full(handle=""), "handle"),
    ],
)
def test_malformed_metadata_is_refused_by_field(metadata: Any, named: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as raised:
        meta.parse(metadata, KEY, EDGE_KEY)
    assert raised.value.violations[0].field == named


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "req2@0_1"},
        {"key": ""},
        {"owner_endpoint": ""},
        {"owner_endpoint": "nowhere"},
        {"owner_endpoint": "h:0"},
        {"owner_endpoint": "h:99999"},
        {"owner_endpoint": "unix:/run/x"},
        {"size_bytes": 6},
        {"text": "as well"},
    ],
    ids=str,
)
def test_a_handle_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    bad = base64.b64encode(handle(**changes).SerializeToString()).decode()
    with pytest.raises((errors.InvalidRequestError, errors.DataLossError)):
        meta.parse({"handle": bad}, KEY, EDGE_KEY)


_TEXT = st.text("aZ09=:./_\x00ü€", max_size=20)  # of all of Unicode takes seconds to set up
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_FIELDS = ("handle", "source_host", "source_port", "data_size", "is_fast_path", KEY)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(_FIELDS), _ANY, min_size=1) | _ANY)
def test_whatever_is_said_is_understood_or_refused(metadata: Any) -> None:
    try:
        told = meta.parse(metadata, KEY, EDGE_KEY)
    except (errors.InvalidRequestError, errors.DataLossError):
        return
    assert told.handle is None
    assert told.size_bytes is None or told.endpoint


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_handle_with_any_bit_turned_is_of_this_key_and_sound_or_refused(position: int, bit: int) -> None:
    raw = bytearray(handle().SerializeToString())
    raw[position % len(raw)] ^= 1 << bit
    try:
        told = meta.parse({"handle": base64.b64encode(bytes(raw)).decode()}, KEY, EDGE_KEY)
    except (errors.InvalidRequestError, errors.DataLossError, errors.UnimplementedError):
        return
    assert told.handle is not None
    assert told.handle.key == EDGE_KEY
    assert told.handle.size_bytes == 5


@pytest.fixture(scope="module")
def receiver() -> Any:
    from connectors.reference import GrpcConnector

    with GrpcConnector({"role": "receiver", "host": "127.0.0.1", "get_timeout_s": 5}) as made:
        yield made


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.sampled_from(_FIELDS[:1] + _FIELDS[3:]), _ANY, min_size=1) | _ANY)
def test_get_of_malformed_metadata_is_none_and_never_an_exception(receiver: CoreConnector, metadata: Any) -> None:
    before = receiver.health()["errors"]
    assert receiver.get("0", "1", KEY, metadata) is None
    assert receiver.health()["errors"] == before + 1


# --- senders and keys -------------------------------------------------------------------------------------------------


def test_n_29_k_13_default_and_ranks_are_apart() -> None:
    senders = Senders()
    with pytest.raises(errors.FailedPreconditionError) as missing:
        senders.find(None)
    assert missing.value.reason == "NO_SENDER"
    senders.update("a", 1, 2)
    with pytest.raises(errors.FailedPreconditionError):
        senders.find(0)
    senders.update("b", 2)
    assert (senders.find(2), senders.find(0), senders.find(None)) == ("a:1", "b:2", "b:2")
    senders.update("c", 3)
    assert (senders.find(2), senders.find(None), senders.default) == ("a:1", "c:3", "c:3")


@pytest.mark.parametrize(("host", "port", "rank"), [("", 1, None), ("auto", 1, None), ("h", 0, 1), ("h", 1, -1)])
def test_n_29_a_wrong_sender_changes_nothing(host: str, port: int, rank: int | None) -> None:
    senders = Senders()
    senders.update("good", 1)
    with pytest.raises(errors.InvalidRequestError):
        senders.update(host, port, rank)
    assert (senders.find(None), senders.find(1)) == ("good:1", "good:1")


@pytest.mark.parametrize(
    ("key", "rank"),
    [
        ("req_0_0_3_1", 3),
        ("chatcmpl-8e30_0_12_0_7", 0),
        ("a_b_0_0_2_0", 2),
        ("req_1_0_3_1", None),  # of another stage
        ("req_0_0", None),
        ("omni_0_to_1_kv_cache_req", None),
        ("req", None),
    ],
)
def test_n_20_the_senders_rank_stands_in_the_key(key: str, rank: int | None) -> None:
    assert rank_of(key, "0") == rank_of(key, 0) == rank


@pytest.mark.parametrize(
    ("key", "request_id", "belongs"),
    [
        ("req1", "req1", True),
        ("req1_0_3", "req1", True),
        ("omni_0_to_1_kv_cache_req1", "req1", True),
        ("req11", "req1", False),
        ("xreq1", "req1", False),
        ("req11_0", "req1", False),
        ("a_req1_b", "req1", False),
        ("req1-0", "req1", False),
    ],
)
def test_n_33_keys_of_a_request(key: str, request_id: str, belongs: bool) -> None:
    assert belongs_to(edge_key(key, 0, 1), request_id) is belongs
    assert belongs_to(edge_key(key, 0, 1), edge_key(key, "0", "1")), "its inner key is itself"


@given(_TEXT.filter(bool), st.integers(0, 99), st.integers(0, 99))
def test_n_27_edge_keys_come_apart_again(key: str, start: int, end: int) -> None:
    assert plain_key(edge_key(key, start, end)) == key


@pytest.mark.parametrize("stage", [None, 1.5, True, "", b"0"])
def test_a_stage_is_a_number_or_a_name(stage: Any) -> None:
    with pytest.raises(errors.InvalidRequestError):
        edge_key("k", stage, 1)
