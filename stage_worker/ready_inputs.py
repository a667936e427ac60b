"""Data that was ready before its consumer began: read, then given back to its owners."""

from __future__ import annotations

import asyncio
import collections

import grpc.aio

from connectors.channels import PeerChannels
from connectors.payload import Payload
from omni.v1 import transfer_pb2, transfer_service_pb2_grpc
from omni.v1 import transfer_service_pb2 as pb
from omnicore.errors import DataLossError, OmniError
from omnicore.log import get_logger
from stage_worker.identity import replica_name
from stage_worker.reading import Reading

_log = get_logger(__name__)
_RELEASE_TIMEOUT_S = 5.0
_GONE = frozenset(("HANDLE_NOT_FOUND", "HANDLE_EXPIRED", "RELEASED_WHILE_READ"))


class HandleReader:
    """Data that is ready, as payloads. Each handle is released at its owner once read; closing releases the rest."""

    def __init__(self, handles: list[transfer_pb2.TransferHandle], reading: Reading, releaser: Releaser) -> None:
        self._handles = collections.deque(handles)
        self._reading = reading
        self._releaser = releaser
        self._current: transfer_pb2.TransferHandle | None = None
        self._sequence = -1
        self._error: OmniError | None = None

    def __aiter__(self) -> HandleReader:
        return self

    async def __anext__(self) -> Payload:
        """The next payload; raises what the connector raises, ``DeadlineExceededError``, and ``DataLossError`` for what
        was retained for another attempt and is gone."""
        await self._close_payload()
        if not self._handles:
            raise StopAsyncIteration
        self._current = self._handles.popleft()
        self._sequence += 1
        try:
            return await self._reading.open(self._current, self._sequence)
        except OmniError as error:
            self._error = self._gone(self._current, error)
            raise self._error from error

    async def aclose(self) -> None:
        """Release everything. May be called more than once."""
        try:
            await self._close_payload()
        finally:
            while self._handles:
                self._releaser.release(self._handles.popleft())
            self._reading.end(self._error)

    async def _close_payload(self) -> None:
        handle, self._current = self._current, None
        if handle is None:
            return
        try:
            await self._reading.close(self._sequence)
        except OmniError as error:
            self._error = self._gone(handle, error)
            raise self._error from error
        finally:
            self._releaser.release(handle)

    def _gone(self, handle: transfer_pb2.TransferHandle, error: OmniError) -> OmniError:
        """What an earlier attempt was given was kept for this one only as long as there was memory for it."""
        if handle.edge.attempt >= self._reading.edge.attempt or error.reason not in _GONE:
            return error
        message = f"what was retained is gone: {error.message}"
        return DataLossError(message, reason="RETENTION_LOST", metadata=error.metadata)


class Releaser:
    """Gives handles back to their owners, many a message. A lost release costs memory until the handle expires."""

    def __init__(self, channels: PeerChannels) -> None:
        self._channels = channels
        self._pending: dict[tuple[str, str], list[transfer_pb2.TransferHandle]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, handle: transfer_pb2.TransferHandle) -> None:
        """Release soon."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault((handle.owner_endpoint, replica_name(handle.owner)), []).append(handle)

    async def close(self) -> None:
        """Send what is pending."""
        self._flush()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=_RELEASE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for (endpoint, _), handles in pending.items():
            task = asyncio.create_task(self._send(endpoint, handles), name=f"release-{endpoint}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, endpoint: str, handles: list[transfer_pb2.TransferHandle]) -> None:
        request = pb.TransferServiceReleaseRequest(
            owner=handles[0].owner, releases=[pb.HandleRelease(key=h.key, token=h.token) for h in handles]
        )
        try:
            with self._channels.use(endpoint) as channel:
                stub = transfer_service_pb2_grpc.TransferServiceStub(channel)
                await stub.Release(request, timeout=_RELEASE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.debug("release lost", endpoint=endpoint, handles=len(handles), code=error.code().name)
        except OmniError as error:  # no channel can be had to this address
            _log.debug("release lost", endpoint=endpoint, handles=len(handles), reason=error.message)
