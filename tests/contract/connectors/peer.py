"""One end of a connector with a real TransferService; importable, and a process of its own for tests that kill it.

As a process it answers one JSON line on standard output for each command line on standard input.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import orjson

from connectors.connector_set import ConnectorSet
from connectors.payload import JsonValue, Payload
from connectors.pool import fingerprint
from connectors.registry import ConnectorFactory
from omni.v1 import transfer_pb2, types_pb2
from omni.v1 import transfer_service_pb2 as pb
from omni.v1 import transfer_service_pb2_grpc as pb_grpc
from omnicore import errors, process, rpc
from omnicore.clock import SYSTEM_CLOCK, Clock
from tests.doubles.loading import installed
from tests.support.transfer_engines import DOUBLES

PIECE_BYTES = 1024 * 1024
EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)


class Transfer(pb_grpc.TransferServiceServicer):
    """The part of a worker's TransferService that connectors need: fencing, and the store behind it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._store = peer.connectors.store

    def _check(self, owner: types_pb2.ReplicaRef) -> None:
        if owner != self._peer.ref:
            raise errors.FailedPreconditionError(f"the caller means {owner}, this is {self._peer.ref}")

    async def Describe(self, request: pb.DescribeRequest, context: rpc.ServicerContext) -> pb.DescribeResponse:  # noqa: N802
        self._check(request.owner)
        return pb.DescribeResponse(handle=self._store.describe(request.key, request.token))

    async def Release(  # noqa: N802
        self, request: pb.TransferServiceReleaseRequest, context: rpc.ServicerContext
    ) -> pb.TransferServiceReleaseResponse:
        self._check(request.owner)
        freed = sum(self._store.release(item.key, item.token, item.consumer) for item in request.releases)
        return pb.TransferServiceReleaseResponse(freed=freed)

    async def Subscribe(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.SubscribeRequest], context: rpc.ServicerContext
    ) -> AsyncIterator[pb.SubscribeResponse]:
        async for _ in request_iterator:
            raise errors.UnimplementedError("flows are the worker's")
        yield pb.SubscribeResponse()

    async def Claim(self, request: pb.ClaimRequest, context: rpc.ServicerContext) -> pb.ClaimResponse:  # noqa: N802
        self._check(request.owner)
        return pb.ClaimResponse(consumers_left=self._store.claim(request.key, request.token, request.consumer))

    async def Agree(self, request: pb.AgreeRequest, context: rpc.ServicerContext) -> pb.AgreeResponse:  # noqa: N802
        raise errors.UnimplementedError("ranks are the worker's")

    async def Fetch(self, request: pb.FetchRequest, context: rpc.ServicerContext) -> AsyncIterator[pb.FetchResponse]:  # noqa: N802
        self._check(request.owner)
        async with self._store.open(request.key, request.token, request.fingerprint) as data:
            for offset in range(0, len(data), PIECE_BYTES):
                yield pb.FetchResponse(data=bytes(data[offset : offset + PIECE_BYTES]), offset_bytes=offset)


class Peer:
    """A worker without engine: connectors, and a server for their TransferService."""

    def __init__(self) -> None:
        self.ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=1, epoch=5)
        self.endpoint = ""
        self.connectors: ConnectorSet
        self.fetched_pieces = 0

    @property
    def store(self) -> Any:
        return self.connectors.store

    async def fetch(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        request = pb.FetchRequest(
            owner=handle.owner, key=handle.key, token=handle.token, fingerprint=fingerprint(handle)
        )
        async with rpc.channel(handle.owner_endpoint) as channel:
            async for piece in pb_grpc.TransferServiceStub(channel).Fetch(request):
                self.fetched_pieces += 1
                yield piece.data

    async def claim(self, handle: transfer_pb2.TransferHandle) -> int:
        request = pb.ClaimRequest(owner=handle.owner, key=handle.key, token=handle.token)
        async with rpc.channel(handle.owner_endpoint) as channel:
            return (await pb_grpc.TransferServiceStub(channel).Claim(request)).consumers_left

    async def describe(self, handle: transfer_pb2.TransferHandle) -> transfer_pb2.TransferHandle:
        request = pb.DescribeRequest(owner=handle.owner, key=handle.key, token=handle.token)
        async with rpc.channel(handle.owner_endpoint) as channel:
            return (await pb_grpc.TransferServiceStub(channel).Describe(request)).handle

    async def release(self, handle: transfer_pb2.TransferHandle) -> int:
        release = pb.HandleRelease(key=handle.key, token=handle.token)
        request = pb.TransferServiceReleaseRequest(owner=handle.owner, releases=[release])
        async with rpc.channel(handle.owner_endpoint) as channel:
            return (await pb_grpc.TransferServiceStub(channel).Release(request)).freed


@contextlib.asynccontextmanager
async def running_peer(
    *,
    pool_bytes: int = 1 << 20,
    clock: Clock = SYSTEM_CLOCK,
    options: Mapping[str, Mapping[str, JsonValue]] | None = None,
    factories: Mapping[str, ConnectorFactory] | None = None,
) -> AsyncIterator[Peer]:
    """A serving peer; TTL 10 s by ``clock``."""
    peer = Peer()
    peer.connectors = ConnectorSet(
        lambda: peer.ref,
        lambda: peer.endpoint,
        peer.fetch,
        pool_bytes=pool_bytes,
        clock=clock,
        ttl_s=10,
        options=options,
        factories=factories,
    )
    server = await rpc.serve(
        lambda server: pb_grpc.add_TransferServiceServicer_to_server(Transfer(peer), server),
        ["omni.v1.TransferService"],
        host="127.0.0.1",
        port=0,
    )
    peer.endpoint = f"127.0.0.1:{server.port}"
    try:
        yield peer
    finally:
        await peer.connectors.close()
        await server.stop(0)


def tensor(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that only this seed gives."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def digest(payload: Payload) -> str:
    """Of all tensors."""
    return hashlib.sha256(b"".join(t.tobytes() for t in payload.tensors.values())).hexdigest()


async def _answer(peer: Peer, command: dict[str, Any], kept: contextlib.AsyncExitStack) -> dict[str, Any]:
    match command["op"]:
        case "put":
            payload = Payload(tensors={"x": tensor(command["size"], command["seed"])})
            handle = await peer.connectors.put(command["kind"], command["key"], EDGE, 0, payload)
            return {"handle": base64.b64encode(handle.SerializeToString()).decode(), "digest": digest(payload)}
        case "get":
            handle = transfer_pb2.TransferHandle.FromString(base64.b64decode(command["handle"]))
            if command.get("claim"):
                await peer.claim(handle)
            payload = await kept.enter_async_context(peer.connectors.get(handle))
            return {"digest": digest(payload)}
        case "release":
            return {"freed": peer.store.release(command["key"], base64.b64decode(command["token"]))}
        case _:
            return {"free_bytes": peer.connectors.usage().free_bytes, "handles": peer.connectors.usage().handles}


async def main(kind: str, extra: Mapping[str, JsonValue]) -> int:
    """Serve commands until standard input ends. ``extra``: options that connector ``kind`` needs here."""
    process.die_with_parent()
    options: dict[str, dict[str, JsonValue]] = {"shm": {"shm_threshold_bytes": 0}, "grpc": {"inline_bytes": 0}}
    if kind == "cuda_ipc":
        options[kind] = {"to_host": True}
    if extra:
        options[kind] = {"inline_bytes": 0, **extra}
    async with contextlib.AsyncExitStack() as kept:
        if kind in DOUBLES:
            kept.enter_context(installed(DOUBLES[kind]))
        peer = await kept.enter_async_context(running_peer(pool_bytes=1 << 22, options=options))
        print(orjson.dumps({"endpoint": peer.endpoint, "kind": kind}).decode(), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answer = await _answer(peer, orjson.loads(line), kept)
            except errors.OmniError as error:
                answer = {"error": error.code.name, "reason": error.reason}
            print(orjson.dumps(answer).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(process.run(main(sys.argv[1], orjson.loads(sys.argv[2]))))
