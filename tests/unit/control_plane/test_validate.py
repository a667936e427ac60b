from __future__ import annotations

import uuid

import pytest

from control_plane import compat, paging, states, validate
from control_plane.keys import StageKey
from omni.v1 import pipeline_pb2, types_pb2
from omni.v1 import registry_service_pb2 as pb
from omnicore.errors import FailedPreconditionError, InvalidRequestError, NotFoundError


def good() -> pb.RegisterRequest:
    return pb.RegisterRequest(
        instance_uuid=str(uuid.UUID(int=1)),
        stage=types_pb2.StageRef(pipeline="speech", stage_id=1),
        endpoint="127.0.0.1:4000",
        fingerprint=types_pb2.StageFingerprint(
            model="m", config_sha256="a" * 64, tensor_parallel_size=1, kv_layout="16:f32", protocol_version="1.0"
        ),
        state=types_pb2.REPLICA_STATE_STARTING,
        engine="sim",
    )


def fields(request: pb.RegisterRequest) -> list[str]:
    with pytest.raises(InvalidRequestError) as caught:
        validate.register_request(request)
    return [violation.field for violation in caught.value.violations]


def test_a_good_request_passes() -> None:
    request = good()  # with sessions where all else is
    validate.register_request(request)
    request.session_endpoint = "[::1]:4001"
    validate.register_request(request)


def test_an_empty_request_names_every_field() -> None:
    assert fields(pb.RegisterRequest()) == ["instance_uuid", "stage", "endpoint", "state", "fingerprint"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: setattr(r, "instance_uuid", "x" * 10_000_000), "instance_uuid"),
        (lambda r: setattr(r.stage, "pipeline", "no/slash"), "stage.pipeline"),
        (lambda r: setattr(r, "endpoint", "host"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "host:0"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "host:65536"), "endpoint"),
        (lambda r: setattr(r, "endpoint", ":80"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "0.0.0.0:80"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "[::]:80"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "[zz]:80"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "a b:80"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "::1:80"), "endpoint"),
        (lambda r: setattr(r, "endpoint", "h:٣"), "endpoint"),
        (lambda r: setattr(r, "session_endpoint", "host"), "session_endpoint"),
        (lambda r: setattr(r, "session_endpoint", "host:65536"), "session_endpoint"),
        (lambda r: setattr(r, "session_endpoint", "0.0.0.0:80"), "session_endpoint"),
        (lambda r: setattr(r, "state", types_pb2.REPLICA_STATE_DRAINING), "state"),
        (lambda r: setattr(r, "state", 99), "state"),
        (lambda r: setattr(r.fingerprint, "config_sha256", "A" * 64), "fingerprint.config_sha256"),
        (lambda r: setattr(r.fingerprint, "tensor_parallel_size", 0), "fingerprint.tensor_parallel_size"),
        (lambda r: setattr(r.fingerprint, "protocol_version", "one"), "fingerprint.protocol_version"),
        (lambda r: setattr(r.fingerprint, "model", "m" * 2000), "fingerprint.model"),
        (lambda r: r.connectors.add(name=""), "connectors[0].name"),
        (lambda r: r.placement.devices.append(""), "placement.devices[0]"),
        (lambda r: setattr(r, "engine", "e" * 2000), "engine"),
    ],
)
def test_each_field_is_checked(change: object, field: str) -> None:
    request = good()
    assert callable(change)
    change(request)
    assert fields(request) == [field]


@pytest.mark.parametrize("endpoint", ["10.0.0.5:1", "host.example:65535", "[fe80::1]:443", "localhost:80"])
def test_good_endpoints(endpoint: str) -> None:
    assert validate.endpoint_fault(endpoint) == ""


def test_messages_stay_small_whatever_comes_in() -> None:
    request = pb.RegisterRequest(instance_uuid="x" * 1_000_000, endpoint="y" * 1_000_000)
    request.stage.pipeline = "z" * 1_000_000
    request.fingerprint.config_sha256 = "w" * 1_000_000
    for _ in range(200):
        request.connectors.add(name="v" * 10_000)
    with pytest.raises(InvalidRequestError) as caught:
        validate.register_request(request)
    assert len(caught.value.to_status().SerializeToString()) < 6_000


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), -0.1, 1.1])
def test_absurd_load_is_refused(ratio: float) -> None:
    assert "kv_usage_ratio" in validate.load(types_pb2.LoadReport(kv_usage_ratio=ratio))
    for field in ("queue_length", "running", "waiting", "inflight_transfers"):
        minus_one = types_pb2.LoadReport(**{field: 2**32 - 1})  # by a worker that counts wrong
        assert field in validate.load(minus_one)
    assert "transfer_pool_free_bytes" in validate.load(types_pb2.LoadReport(transfer_pool_free_bytes=2**64 - 1))
    assert validate.load(types_pb2.LoadReport(queue_length=7, kv_usage_ratio=1.0)) == ""


def plan() -> pipeline_pb2.Pipeline:
    stage = pipeline_pb2.Stage(stage_id=1, name="talker", model="m", config_sha256="a" * 64, tensor_parallel_size=1)
    return pipeline_pb2.Pipeline(name="speech", stages=[stage])


def test_an_unknown_stage_names_those_that_exist() -> None:
    assert compat.find_stage(plan(), 1).name == "talker"
    with pytest.raises(NotFoundError, match=r"no stage 7; it has 1 \(talker\)"):
        compat.find_stage(plan(), 7)


def test_fingerprints_must_match_the_plan_and_the_peers() -> None:
    stage = StageKey("speech", 1)
    peer = types_pb2.Replica(fingerprint=good().fingerprint)
    compat.check_fingerprint(good().fingerprint, stage, plan().stages[0], [peer])

    other = good().fingerprint
    other.model, other.kv_layout, other.protocol_version = "n", "32:f16", "2.0"
    with pytest.raises(FailedPreconditionError) as caught:
        compat.check_fingerprint(other, stage, plan().stages[0], [peer])
    assert caught.value.reason == "FINGERPRINT_MISMATCH"
    assert caught.value.metadata["model.offered"] == "n"
    assert caught.value.metadata["model.expected"] == "m"
    assert caught.value.metadata["kv_layout.expected"] == "16:f32"
    assert caught.value.metadata["protocol_version.expected"] == "1.x"
    assert "'n'" in caught.value.message
    assert "'m'" in caught.value.message


def test_peers_of_an_older_config_have_no_say() -> None:
    old = types_pb2.Replica(fingerprint=types_pb2.StageFingerprint(config_sha256="b" * 64, kv_layout="8:f16"))
    compat.check_fingerprint(good().fingerprint, StageKey("speech", 1), plan().stages[0], [old])


@pytest.mark.parametrize(
    ("endpoint", "peer", "refused"),
    [
        ("127.0.0.1:80", "ipv4:127.0.0.1:5000", False),
        ("127.0.0.1:80", "ipv4:10.1.1.1:5000", True),
        ("localhost:80", "ipv6:%5Bfe80::2%5D:5000", True),
        ("[::1]:80", "ipv6:[::ffff:10.0.0.1]:5000", True),
        ("127.0.0.1:80", "ipv6:[::ffff:127.0.0.1]:5000", False),
        ("10.1.1.1:80", "ipv4:10.1.1.1:5000", False),
        ("127.0.0.1:80", "unix:/run/x", False),
        ("127.0.0.1:80", "", False),
    ],
)
def test_loopback_of_another_host_is_refused(endpoint: str, peer: str, refused: bool) -> None:
    if not refused:
        compat.check_reachable(endpoint, peer)
        return
    with pytest.raises(FailedPreconditionError, match="loopback"):
        compat.check_reachable(endpoint, peer)


def test_states() -> None:
    allowed = {
        (now, then)
        for now in (states.STARTING, states.READY, states.ASLEEP, states.DRAINING)
        for then in (states.STARTING, states.READY, states.ASLEEP, states.DRAINING)
        if now != then and states.may_become(now, then)
    }
    assert allowed == {
        (states.STARTING, states.READY),
        (states.READY, states.ASLEEP),
        (states.ASLEEP, states.READY),
        (states.STARTING, states.DRAINING),
        (states.READY, states.DRAINING),
        (states.ASLEEP, states.DRAINING),
    }
    assert states.name(states.READY) == "READY"
    assert states.name(99) == "99"
    assert not states.is_state(0)


def test_page_tokens() -> None:
    token = paging.encode_token("speech", 1, 2)
    assert paging.decode_token(token, (str, int, int)) == ("speech", 1, 2)
    for wrong in ("x", "%%%", token + "A", "A" * 5000, paging.encode_token("speech"), paging.encode_token(1, 1, True)):
        with pytest.raises(InvalidRequestError, match="page_token"):
            paging.decode_token(wrong, (str, int, int))
