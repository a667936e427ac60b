"""RPCs to a worker beside its session: a channel for the few that need one."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

from omni.v1 import stage_service_pb2, stage_service_pb2_grpc
from omnicore.log import get_logger

_log = get_logger(__name__)


class WorkerRpcs:
    """Opened when first used; after ``close`` it may be used again."""

    def __init__(self, endpoint: str, connect: Callable[[str], grpc.aio.Channel]) -> None:
        self._endpoint = endpoint
        self._connect = connect
        self._channel: grpc.aio.Channel | None = None

    def stub(self) -> stage_service_pb2_grpc.StageServiceAsyncStub:
        """Its RPCs. Raises what ``connect`` does where no channel can be had."""
        if self._channel is None:
            self._channel = self._connect(self._endpoint)
        return stage_service_pb2_grpc.StageServiceStub(self._channel)

    async def abort(self, request_id: str, reason: str, timeout_s: float) -> None:
        """Have everything of a request dropped there. Failure is logged: expiry frees it in the end, and nobody waits
        for this."""
        try:
            await self.stub().Abort(
                stage_service_pb2.StageServiceAbortRequest(request_id=request_id, reason=reason), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            _log.warning("abort failed", request_id=request_id, worker=self._endpoint, reason=error.details())

    async def close(self) -> None:
        """RPCs under way fail."""
        channel, self._channel = self._channel, None
        if channel is None:
            return
        try:
            await channel.close(None)
        except Exception:  # noqa: BLE001 -- the session must go on, or the replica is lost for good
            _log.exception("channel failed to close", worker=self._endpoint)
