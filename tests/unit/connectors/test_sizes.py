"""Sizes that the deploy file sets: the pool, and what travels inside a handle."""

from __future__ import annotations

import numpy as np
import pytest

from connectors.connector_set import ConnectorSet
from connectors.payload import Payload
from omni.v1 import transfer_pb2
from tests.unit.connectors.test_registry import REF, no_fetch

EDGE = transfer_pb2.EdgeRef(request_id="r", from_stage=0, to_stage=1)


@pytest.mark.parametrize("threshold", [65536, 1000])
async def test_payloads_below_the_threshold_travel_inside_their_handle(threshold: int) -> None:
    connectors = ConnectorSet(
        lambda: REF,
        lambda: "h:1",
        no_fetch,
        pool_bytes=1 << 20,
        options={} if threshold == 65536 else {"shm": {"shm_threshold_bytes": threshold}},
    )
    for size, backend in ((threshold - 1, "inline"), (threshold, "shm"), (threshold + 1, "shm")):
        handle = await connectors.put("auto", f"k{size}", EDGE, 0, Payload({"x": np.zeros(size, np.uint8)}))
        assert handle.WhichOneof("backend") == backend, size
    await connectors.close()


async def test_the_pool_has_the_size_that_was_set() -> None:
    connectors = ConnectorSet(
        lambda: REF, lambda: "h:1", no_fetch, pool_bytes=1 << 16, options={"shm": {"pool_bytes": 1 << 18}}
    )
    assert connectors.usage().pool_bytes >= 1 << 18
    await connectors.close()
