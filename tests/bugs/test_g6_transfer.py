"""Bugs of group 6 that transfers between workers can have, on every connector that needs no service of its own."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from connectors.payload import JsonValue, Payload
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.clock import ManualClock
from tests.contract.connectors.peer import EDGE, running_peer, tensor
from tests.support.processes import wait_until
from tests.support.transfer_engines import Engines, mooncake_engines  # noqa: F401 (fixture)
from tests.unit.connectors.test_one_sided import Pair, data

SIZE = 100_000
Options = dict[str, dict[str, JsonValue]]
OPTIONS: Options = {"shm": {"shm_threshold_bytes": 0}, "grpc": {"inline_bytes": 0}}
MOONCAKE: Options = {
    "mooncake": {"host": "127.0.0.1", "inline_bytes": 0, "pool_bytes": 1 << 20, "receive_pool_bytes": 1 << 20}
}
KINDS = ["shm", "grpc", "mooncake"]


@pytest.mark.parametrize("kind", KINDS)
async def test_057_a_wrong_length_is_refused_and_nothing_is_written(
    kind: str,
    mooncake_engines: Engines,  # noqa: F811
) -> None:
    """The receiver trusted the length in the message: truncation, or a read out of bounds."""
    options = {**OPTIONS, **MOONCAKE}
    async with (
        running_peer(options=options, factories=mooncake_engines.factories(producing=True)) as producer,
        running_peer(pool_bytes=0, options=options, factories=mooncake_engines.factories(producing=False)) as consumer,
    ):
        handle = await producer.connectors.put(kind, "k", EDGE, 0, Payload({"x": tensor(SIZE, 1)}))
        into = np.zeros(SIZE, np.uint8)
        for length in (2**64 - 1, 0, SIZE - 1, SIZE + 1, 2**63):
            wrong = transfer_pb2.TransferHandle.FromString(handle.SerializeToString())
            wrong.size_bytes = length
            with pytest.raises(errors.DataLossError) as caught:
                await consumer.connectors.get_into(wrong, {"x": into})
            assert caught.value.reason == "BAD_HANDLE"
            # And where everything in the handle agrees with the wrong length.
            wrong.tensors[0].size_bytes = length
            wrong.tensors[0].shape[:] = [length]
            with pytest.raises(errors.OmniError):
                await consumer.connectors.get_into(wrong, {"x": into})
            with pytest.raises(errors.OmniError):
                async with consumer.connectors.get(wrong):
                    pass
            assert not into.any()
        await consumer.connectors.get_into(handle, {"x": into})
        assert (into == tensor(SIZE, 1)).all()


async def test_058_data_outlives_its_time_while_it_is_pulled_and_is_freed_once() -> None:
    """A buffer was reclaimed by age while two receivers pulled it."""
    clock, go_on = ManualClock(), threading.Event()
    ends = Pair(clock=clock, get_timeout_s=60.0)
    handle = await ends.producer.put("k", EDGE, 0, Payload({"x": data(1 << 20)}), consumers=2)
    ends.engine.before = lambda: (go_on.wait(), None)[1]
    for consumer in ("one", "two"):
        ends.store.claim("k", handle.token, consumer)
    pulls = [asyncio.ensure_future(ends.read(handle)) for _ in range(2)]
    await wait_until(lambda: bool(ends.engine.calls), what="a pull to begin")
    for _ in range(3):
        clock.advance(301)
        assert ends.store.sweep() == 0
    go_on.set()
    for pulled in await asyncio.gather(*pulls):
        assert (pulled == data(1 << 20)).all()
    freed = [ends.store.release("k", handle.token, consumer) for consumer in ("one", "two", "two", "one")]
    assert freed == [False, True, False, False]
    assert ends.producer.usage().free_bytes == ends.producer.usage().pool_bytes
    await ends.consumer.close()
    await ends.producer.close()


async def test_059_the_port_in_the_handle_is_the_one_that_answers(mooncake_engines: Engines) -> None:  # noqa: F811
    """A port that was taken was replaced in silence, and receivers waited at the old one."""
    async with (
        running_peer(options=MOONCAKE, factories=mooncake_engines.factories(producing=True)) as producer,
        running_peer(pool_bytes=0, options=MOONCAKE, factories=mooncake_engines.factories(producing=False)) as consumer,
    ):
        handle = await producer.connectors.put("mooncake", "k", EDGE, 0, Payload({"x": tensor(SIZE, 1)}))
        (offer,) = (offer for offer in producer.connectors.offers() if offer.name == "mooncake")
        assert handle.engine.session == offer.address == mooncake_engines.producing.session
        async with consumer.connectors.get(handle) as got:
            assert (got.tensors["x"] == tensor(SIZE, 1)).all()
        assert consumer.fetched_pieces == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_063_the_same_key_twice_is_refused_and_the_first_data_stays(
    kind: str,
    mooncake_engines: Engines,  # noqa: F811
) -> None:
    """The second of two requests with one key replaced the first one's data."""
    options = {**OPTIONS, **MOONCAKE}
    async with (
        running_peer(options=options, factories=mooncake_engines.factories(producing=True)) as producer,
        running_peer(pool_bytes=0, options=options, factories=mooncake_engines.factories(producing=False)) as consumer,
    ):
        handle = await producer.connectors.put(kind, "k", EDGE, 0, Payload({"x": tensor(SIZE, 1)}))
        other = transfer_pb2.EdgeRef(request_id="req2", from_stage=0, to_stage=1)
        with pytest.raises(errors.AlreadyExistsError):
            await producer.connectors.put(kind, "k", other, 0, Payload({"x": tensor(SIZE, 2)}))
        async with consumer.connectors.get(handle) as got:
            assert (got.tensors["x"] == tensor(SIZE, 1)).all()
