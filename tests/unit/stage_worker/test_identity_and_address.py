"""Who a worker is, and where others reach it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from omni.v1 import types_pb2
from omnicore.config import join_host_port
from omnicore.errors import FailedPreconditionError, InternalError, InvalidRequestError, UnavailableError
from stage_worker.address import listen_and_advertised, probe_address
from stage_worker.identity import Identity

STAGE = types_pb2.StageRef(pipeline="p", stage_id=1)


def claim(replica_id: int = 0, epoch: int = 5, stage_id: int = 1) -> types_pb2.ReplicaRef:
    return types_pb2.ReplicaRef(
        stage=types_pb2.StageRef(pipeline="p", stage_id=stage_id), replica_id=replica_id, epoch=epoch
    )


def test_claims_that_were_held_are_accepted_and_no_others() -> None:
    identity = Identity(STAGE, "h:1")
    with pytest.raises(FailedPreconditionError):
        identity.check(claim())
    identity.adopt(claim(0, 5))
    identity.adopt(claim(2, 9))
    for good in (claim(0, 5), claim(2, 9)):
        identity.check(good)
    for bad in (claim(0, 9), claim(2, 5), claim(2, 8), claim(2, 9, stage_id=0), claim(2, 0)):
        with pytest.raises(FailedPreconditionError, match="p/1/2@9"):
            identity.check(bad)
    identity.check(claim(7, 0), any_epoch=True)
    identity.check(types_pb2.ReplicaRef(), any_epoch=True)
    with pytest.raises(FailedPreconditionError):
        identity.check(claim(7, 0, stage_id=0), any_epoch=True)


def test_handles_carry_the_first_claim_and_outlive_it() -> None:
    identity = Identity(STAGE, "h:1")
    first = claim(0, 5)
    identity.adopt(first)
    identity.adopt(claim(0, 9))
    assert identity.data_owner == first
    assert identity.current.epoch == 9


def test_errors_say_where_they_arose() -> None:
    identity = Identity(STAGE, "h:1")
    identity.adopt(claim(3))
    assert identity.locate(InternalError("x"), 2).metadata == {"stage": "1", "replica": "3", "attempt": "2"}
    forwarded = identity.locate(InternalError("x", metadata={"stage": 0, "replica": 7}), 2)
    assert (forwarded.metadata["stage"], forwarded.metadata["replica"]) == ("0", "7")


def test_the_route_decides_the_address() -> None:
    assert probe_address("127.0.0.1:7700") == "127.0.0.1"
    assert listen_and_advertised("", "", ["127.0.0.1:7700"]) == ("127.0.0.1", 0, "127.0.0.1")
    assert listen_and_advertised("0.0.0.0:9", "", ["127.0.0.1:7700"]) == ("0.0.0.0", 9, "127.0.0.1")
    assert listen_and_advertised("127.0.0.2:9", "", ["127.0.0.1:7700"]) == ("127.0.0.2", 9, "127.0.0.2")
    assert listen_and_advertised("", "worker.example", ["127.0.0.1:7700"]) == ("127.0.0.1", 0, "worker.example")
    with pytest.raises(InvalidRequestError, match="advertise"):
        listen_and_advertised("", "0.0.0.0", ["127.0.0.1:7700"])
    with pytest.raises(UnavailableError, match="no-such-host"):
        probe_address("no-such-host.invalid:7700")


def test_probing_sends_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.setblocking(False)
        probe_address(f"127.0.0.1:{receiver.getsockname()[1]}")
        with pytest.raises(BlockingIOError):
            receiver.recv(1)


def test_endpoints() -> None:
    assert join_host_port("10.0.0.1", 5) == "10.0.0.1:5"
    assert join_host_port("fe80::1", 5) == "[fe80::1]:5"


async def test_a_claim_known_elsewhere_first_is_waited_for() -> None:
    identity = Identity(STAGE, "h:1")
    identity.adopt(claim(0, 5))
    with identity.claiming():
        ahead = asyncio.create_task(identity.check_settled(claim(0, 9)))
        stale = asyncio.create_task(identity.check_settled(claim(0, 4)))
        other = asyncio.create_task(identity.check_settled(claim(0, 9, stage_id=0)))
        await asyncio.wait([stale, other])  # neither can become ours: refused while the claim is still asked for
        assert isinstance(stale.exception(), FailedPreconditionError)
        assert isinstance(other.exception(), FailedPreconditionError)
        assert not ahead.done()
        identity.adopt(claim(0, 9))
    await ahead


async def test_a_claim_that_never_comes_is_refused_in_the_end() -> None:
    identity = Identity(STAGE, "h:1")
    identity.adopt(claim(0, 5))
    with identity.claiming(), pytest.raises(FailedPreconditionError, match="p/1/0@5"):
        await identity.check_settled(claim(0, 9), wait_s=0.01)
    with pytest.raises(FailedPreconditionError):
        await identity.check_settled(claim(0, 9), wait_s=3600)  # nothing is asked for: no wait
