"""Following a control plane: what must not end it."""

from __future__ import annotations

import grpc.aio

from gateway.control_plane_watch import ControlPlaneWatch
from gateway.replica_table import ReplicaTable
from omnicore import errors
from tests.support.processes import wait_until


async def test_an_address_that_cannot_even_be_dialled_is_tried_again() -> None:
    """A certificate that is being replaced, say: the watch must not end with that, silently and for good."""
    asked: list[str] = []

    def connect(address: str) -> grpc.aio.Channel:
        asked.append(address)
        if len(asked) == 1:
            raise errors.FailedPreconditionError("the certificate cannot be read")
        if len(asked) == 2:
            raise ValueError("a bug of ours")
        return grpc.aio.insecure_channel(address)

    watch = ControlPlaneWatch(["127.0.0.1:1"], ReplicaTable(), connect=connect)
    watch.start()
    try:
        await wait_until(lambda: len(asked) >= 5, what="both watches going on")
        assert not watch.connected
    finally:
        await watch.close()
