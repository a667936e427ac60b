"""Follows a control plane's WatchPipelines and WatchReplicas into the table, for as long as the gateway runs.

Any control plane of the list will do: revisions are the store's, so a watch resumes where the last one broke, at
another address. While none answers, the table stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from gateway.replica_table import ReplicaTable
from omni.v1 import (
    pipeline_service_pb2,
    pipeline_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from omnicore import errors, rpc
from omnicore.backoff import Backoff
from omnicore.log import get_logger

_log = get_logger(__name__)

# A control plane sends bookmarks every second; a stream silent for this long belongs to one that hangs.
SILENCE_LIMIT_S = 5.0
# With the jitter 0.6: a worker that comes at the same time as a control plane is routed to within a second.
_MOST_BACKOFF_S = 0.4
_REMINDER_S = 10.0
"""Once it was said that one is away, that is said again so much later."""


class ControlPlaneWatch:
    """Two resumable watches over a list of control planes."""

    def __init__(
        self,
        addresses: Sequence[str],
        table: ReplicaTable,
        *,
        connect: Callable[[str], grpc.aio.Channel] = rpc.channel,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._addresses = tuple(addresses)
        self._table = table
        self._connect = connect
        self._silence_limit_s = silence_limit_s
        self._connected = 0
        self._both = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Both watches have heard from a control plane and not lost it since."""
        return self._connected == 2

    async def heard(self) -> None:
        """Return once both watches have heard from a control plane."""
        await self._both.wait()

    def start(self) -> None:
        """Begin, in tasks that this object owns."""
        self._tasks = [
            asyncio.create_task(self._follow("pipelines", self._watch_pipelines)),
            asyncio.create_task(self._follow("replicas", self._watch_replicas)),
        ]

    async def close(self) -> None:
        """Stop following. May be called more than once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _follow(
        self, what: str, watch: Callable[[grpc.aio.Channel, Callable[[], None]], Awaitable[None]]
    ) -> None:
        backoff = Backoff(max_s=_MOST_BACKOFF_S)
        turn = 0
        said_s: dict[str, float] = {}
        while True:
            address = self._addresses[turn % len(self._addresses)]
            turn += 1
            heard = False

            def on_message(address: str = address) -> None:
                nonlocal heard
                if not heard:
                    heard = True
                    self._connected += 1
                    if self.connected:
                        self._both.set()
                    backoff.reset()
                    said_s.clear()
                    _log.info("control plane connected", address=address, watch=what)

            channel: grpc.aio.Channel | None = None
            try:
                channel = self._connect(address)
                await watch(channel, on_message)
                reason = "the stream ended"
            except grpc.aio.AioRpcError as error:
                reason = errors.from_rpc_error(error).message
            except TimeoutError:
                reason = f"silent for {self._silence_limit_s:g} s"
            except errors.OmniError as error:  # of certificates, say
                reason = error.message
            except Exception:  # noqa: BLE001 -- logged, and the watch begins again
                # A message that we cannot take in must not end the watch for good.
                _log.exception("control plane message failed", address=address, watch=what)
                reason = "a message could not be taken in"
            finally:
                self._connected -= heard
                if channel is not None:
                    await channel.close(None)
            now_s = asyncio.get_running_loop().time()
            if now_s - said_s.get(address, float("-inf")) >= _REMINDER_S:
                said_s[address] = now_s
                _log.warning("control plane away", address=address, watch=what, reason=reason)
            await asyncio.sleep(backoff.next_delay_s())

    async def _watch_pipelines(self, channel: grpc.aio.Channel, on_message: Callable[[], None]) -> None:
        request = pipeline_service_pb2.WatchPipelinesRequest(resume_revision=self._table.pipeline_revision)
        call = pipeline_service_pb2_grpc.PipelineServiceStub(channel).WatchPipelines(request)
        while True:
            # Not wait_for: that of Python 3.11 forgets a cancellation that meets an arriving message.
            async with asyncio.timeout(self._silence_limit_s):
                message = await call.read()
            if not isinstance(message, pipeline_service_pb2.WatchPipelinesResponse):
                return
            self._table.apply_pipelines(
                message.changed, message.removed, snapshot=message.snapshot, revision=message.revision
            )
            on_message()

    async def _watch_replicas(self, channel: grpc.aio.Channel, on_message: Callable[[], None]) -> None:
        request = registry_service_pb2.WatchReplicasRequest(resume_revision=self._table.revision)
        call = registry_service_pb2_grpc.RegistryServiceStub(channel).WatchReplicas(request)
        while True:
            # Not wait_for: that of Python 3.11 forgets a cancellation that meets an arriving message.
            async with asyncio.timeout(self._silence_limit_s):
                message = await call.read()
            if not isinstance(message, registry_service_pb2.WatchReplicasResponse):
                return
            self._table.apply_replicas(
                message.changed,
                message.removed,
                lapsed=message.lapsed,
                snapshot=message.snapshot,
                revision=message.revision,
                stale=message.stale,
            )
            on_message()
