"""Our connectors as paths of ``bench.transfer``: two workers without engines, each with its TransferService.

What is timed is what a stage does for a stage: ``ConnectorSet.put``, the handle as a message over a Unix socket that an
event loop waits on, ``ConnectorSet.get``. The consumer's answer releases the handle, as an acknowledgement does.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from bench.transfer_wire import Bytes, Consumer, Producer
from connectors.agreement import RankAgreement
from connectors.channels import PeerChannels
from connectors.connector_set import ConnectorSet
from connectors.handles import DEFAULT_TTL_S
from connectors.managed import ManagedBuffer
from connectors.payload import JsonValue, Payload
from omni.v1 import transfer_pb2, transfer_service_pb2_grpc, types_pb2
from omnicore import rpc
from omnicore.clock import SYSTEM_CLOCK
from stage_worker.flows import FlowTable
from stage_worker.identity import Identity
from stage_worker.subscriptions import SubscriptionSet
from stage_worker.transfer_service import TransferServicer

_HOST = "127.0.0.1"
_SERVICE = "omni.v1.TransferService"


class Worker:
    """One end: connectors, and a server for those that fetch."""

    def __init__(
        self,
        stage_id: int,
        pool_bytes: int,
        options: Mapping[str, Mapping[str, JsonValue]],
        *,
        epoch: int = 1,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> None:
        stage = types_pb2.StageRef(pipeline="bench", stage_id=stage_id)
        self.identity = Identity(stage, "")
        self.identity.adopt(types_pb2.ReplicaRef(stage=stage, epoch=epoch))
        self._channels = PeerChannels(SYSTEM_CLOCK)
        self._server: rpc.RunningServer | None = None
        self.connectors = ConnectorSet(
            lambda: self.identity.data_owner,
            lambda: self.identity.endpoint,
            self._channels.fetch,
            pool_bytes=pool_bytes,
            ttl_s=ttl_s,
            options=options,
        )

    async def serve(self) -> None:
        """Be reachable."""
        store = self.connectors.store
        flows = FlowTable(store.release, SYSTEM_CLOCK)
        servicer = TransferServicer(
            self.identity, store, SubscriptionSet(self.identity, flows), RankAgreement(SYSTEM_CLOCK)
        )
        self._server = await rpc.serve(
            lambda server: transfer_service_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server),
            [_SERVICE],
            host=_HOST,
            port=0,
        )
        self.identity.endpoint = f"{_HOST}:{self._server.port}"

    async def close(self) -> None:
        """Free everything."""
        await self.connectors.close()
        await self._channels.close()
        if self._server is not None:
            await self._server.stop(0)


class OurProducer(Producer):
    """``put`` of one tensor."""

    def __init__(self, kind: str, mode: str, options: Mapping[str, JsonValue]) -> None:
        self._kind, self._mode = kind, mode
        self._options = options
        self._worker: Worker | None = None
        self._buffer: ManagedBuffer | None = None
        self._handle = transfer_pb2.TransferHandle()

    @property
    def worker(self) -> Worker:
        """Once started."""
        assert self._worker is not None
        return self._worker

    async def start(self) -> dict[str, Any]:
        self._worker = Worker(0, 0, {self._kind: self._options})
        await self._worker.serve()
        return {}

    async def stage(self, data: Bytes) -> None:
        if self._mode == "in_place":
            shapes = {"kv": (data.shape, "uint8")}
            self._buffer = await self.worker.connectors.allocate(self._kind, shapes)
            np.copyto(self._buffer["kv"], data)

    async def put(self, number: int, data: Bytes) -> bytes:
        edge = transfer_pb2.EdgeRef(request_id=f"bench-{number}", from_stage=0, to_stage=1)
        payload = self._buffer.payload() if self._buffer is not None else Payload(tensors={"kv": data})
        self._handle = await self.worker.connectors.put(self._kind, f"bench-{number}/0", edge, 0, payload)
        return self._handle.SerializeToString()

    async def done(self) -> None:
        if self._buffer is not None:
            self._buffer.release()  # the handle carries a copy
        if not self.worker.connectors.store.release(self._handle.key, self._handle.token):
            raise RuntimeError("the handle was gone before it was released")


class OurConsumer(Consumer):
    """``get`` as views."""

    def __init__(self, kind: str, mode: str, options: Mapping[str, JsonValue]) -> None:
        self._kind, self._mode = kind, mode
        self._worker = Worker(1, 0, {kind: options})
        self._target = np.empty(0, np.uint8)

    async def prepare(self, size: int) -> None:
        if self._mode == "into":
            self._target = np.full(size, 1, np.uint8)

    @contextlib.asynccontextmanager
    async def get(self, message: bytes, size: int) -> AsyncIterator[Bytes]:
        handle = transfer_pb2.TransferHandle.FromString(message)
        if self._mode == "into":
            await self._worker.connectors.get_into(handle, {"kv": self._target})
            yield self._target
            return
        async with self._worker.connectors.get(handle) as payload:
            yield payload.tensors["kv"]

    async def relax(self) -> None:
        self._target = np.empty(0, np.uint8)


def make(kind: str, mode: str, role: str, options: Mapping[str, JsonValue]) -> Producer | Consumer:
    """One end of a connector of ours."""
    if role == "produce":
        return OurProducer(kind, mode, options)
    return OurConsumer(kind, mode, options)
