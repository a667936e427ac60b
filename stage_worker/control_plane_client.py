"""Calls to the control plane that go on to the next address when one does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import grpc
import grpc.aio

from omni.v1 import pipeline_pb2, pipeline_service_pb2, pipeline_service_pb2_grpc
from omnicore import rpc
from omnicore.backoff import Backoff
from omnicore.clock import Clock
from omnicore.errors import (
    DeadlineExceededError,
    NotFoundError,
    OmniError,
    UnavailableError,
    from_rpc_error,
)
from omnicore.log import get_logger

T = TypeVar("T")
_log = get_logger(__name__)

AWAY: tuple[type[OmniError], ...] = (UnavailableError, DeadlineExceededError)
"""The errors of a control plane that is not there."""
ATTEMPT_TIMEOUT_S = 5.0
"""One call at one control plane; etcd pauses for up to 2 s when its leader is lost."""


class ControlPlaneClient:
    """Channels to the control planes of a list; one of them is in use until it fails."""

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Clock,
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
    ) -> None:
        self._addresses = list(addresses)
        self._clock = clock
        self._connect = connect
        self._index = 0
        self._channel: grpc.aio.Channel | None = None

    @property
    def address(self) -> str:
        """The control plane in use."""
        return self._addresses[self._index]

    @property
    def addresses(self) -> Sequence[str]:
        """All of them."""
        return self._addresses

    @property
    def channel(self) -> grpc.aio.Channel:
        """A channel to it."""
        if self._channel is None:
            self._channel = self._connect(self.address)
        return self._channel

    async def next_address(self, failed: grpc.aio.Channel | None = None) -> None:
        """It failed: go on to the next one of the list, unless another task has done so since it opened ``failed``."""
        if failed is None or failed is self._channel:
            self._index = (self._index + 1) % len(self._addresses)
            await self.close()

    async def close(self) -> None:
        """Close the channel; a later use opens another one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def call(
        self,
        what: str,
        attempt: Callable[[grpc.aio.Channel], Awaitable[T]],
        *,
        deadline_s: float | None,
        retry: tuple[type[OmniError], ...] = AWAY,
    ) -> T:
        """``attempt`` until it succeeds, at one control plane after the other.

        Errors other than ``retry`` are raised at once. Raises ``UnavailableError`` with the addresses and the last
        error once ``deadline_s`` (monotonic) has passed; None: never.
        """
        backoff = Backoff()
        said = ""
        while True:
            channel = self.channel
            try:
                async with asyncio.timeout(ATTEMPT_TIMEOUT_S):
                    with closed_is_unavailable():
                        return await attempt(channel)
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except TimeoutError:
                error = DeadlineExceededError(f"no answer within {ATTEMPT_TIMEOUT_S:g} s")
            if not isinstance(error, retry):
                raise error
            delay_s = error.retry_after_s or backoff.next_delay_s()
            if deadline_s is not None and self._clock.monotonic() + delay_s > deadline_s:
                raise UnavailableError(
                    f"{what}: no success at control plane {', '.join(self._addresses)} in time; last from "
                    f"{self.address}: {error.message}",
                    reason="CONTROL_PLANE_UNAVAILABLE",
                    metadata={"address": self.address},
                )
            if said != error.reason:
                _log.warning("waiting for the control plane", what=what, address=self.address, error=error.message)
                said = error.reason
            await self.next_address(channel)
            await asyncio.sleep(delay_s)


@contextlib.contextmanager
def closed_is_unavailable() -> Iterator[None]:
    """Around a call on a channel that other tasks use, too. When one of them goes on to the next address, gRPC has who
    waits here cancelled, as if this task were to end; raises ``grpc.aio.AioRpcError`` with UNAVAILABLE instead."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        nothing, why = grpc.aio.Metadata(), "given up for the next control plane"
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, why, why) from None


async def fetch_plan(
    client: ControlPlaneClient, pipeline: str, stage_id: int, deadline_s: float
) -> tuple[pipeline_pb2.Pipeline, pipeline_pb2.Stage]:
    """The plan of a pipeline and of one stage in it; waits until it has been applied.

    Raises ``NotFoundError`` for a stage that the pipeline does not have, with those it has, and ``UnavailableError``
    if there is no plan in time.
    """

    async def attempt(channel: grpc.aio.Channel) -> pipeline_pb2.Pipeline:
        stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
        response = await stub.GetPipeline(pipeline_service_pb2.GetPipelineRequest(name=pipeline))
        return response.pipeline

    plan = await client.call(
        f"get pipeline {pipeline!r}",
        attempt,
        deadline_s=deadline_s,
        retry=(*AWAY, NotFoundError),
    )
    for stage in plan.stages:
        if stage.stage_id == stage_id:
            return plan, stage
    known = ", ".join(f"{stage.stage_id} ({stage.name})" for stage in plan.stages)
    raise NotFoundError(f"pipeline {pipeline!r} has no stage {stage_id}; it has {known}", reason="STAGE_NOT_FOUND")
