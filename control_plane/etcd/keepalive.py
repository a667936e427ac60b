"""Leases, renewed over one shared stream.

Guarantees: while leases are to be renewed there is exactly one stream; every lease that is kept alive is either
renewed in time or its ``on_lost`` is called exactly once; a member that does not answer is left for the next one.
Not guaranteed: that a lease lives until its local deadline. etcd itself may lose one (a paused leader that wakes up
revokes what looks expired to it): whoever holds a lease must be ready to grant another.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from control_plane.etcd import errors as etcd_errors
from control_plane.etcd.leases import LeaseTable
from control_plane.etcd.transport import Method, Stream, StreamBrokenError, Transport
from omni.etcdwire.v1 import etcdwire_pb2 as wire
from omnicore import errors
from omnicore.backoff import Backoff
from omnicore.log import get_logger

_log = get_logger(__name__)

LEASE_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", wire.LeaseKeepAliveRequest, wire.LeaseKeepAliveResponse)
_Stream = Stream[wire.LeaseKeepAliveRequest, wire.LeaseKeepAliveResponse]


class KeepAlive:
    """Renews leases; starts its task with the first one. ``close`` it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._table = LeaseTable()
        self._on_lost: dict[int, Callable[[int], None]] = {}
        self._waiters: dict[int, list[asyncio.Future[float]]] = {}
        self._outbox: asyncio.Queue[int] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._busy = asyncio.Event()  # set while there is anything to renew
        self._stream: _Stream | None = None
        self._task: asyncio.Task[None] | None = None

    def keep(self, lease_id: int, ttl_s: float, on_lost: Callable[[int], None]) -> None:
        """Renew a lease that was just granted, until ``stop``, or its loss, which is told to ``on_lost`` once."""
        self._table.keep(lease_id, ttl_s, self._now())
        self._on_lost[lease_id] = on_lost
        self._wake()

    def stop(self, lease_id: int) -> None:
        """Let a lease run out; ``on_lost`` is not called."""
        self._on_lost.pop(lease_id, None)
        if lease_id in self._waiters:
            self._table.stop_keeping(lease_id, self._now())
        else:
            self._table.drop(lease_id)
        self._wake()

    async def refresh(self, lease_id: int, timeout_s: float) -> float:
        """Renew once and return the new life in seconds. Raises ``LeaseLost``, ``EtcdUnavailable``."""
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(lease_id, []).append(waiter)
        self._table.ask(lease_id, self._now())
        self._wake()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise etcd_errors.EtcdUnavailable(
                f"etcd did not renew lease {lease_id:x} within {timeout_s:g} s",
                metadata={"lease_id": f"{lease_id:x}"},
            ) from None
        finally:
            self._forget_waiter(lease_id, waiter)

    async def close(self) -> None:
        """Stop renewing; leases run out by themselves, and nobody is told."""
        for waiters in list(self._waiters.values()):
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(etcd_errors.EtcdUnavailable("the etcd client was closed"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                raise error

    def _now(self) -> float:
        return self._transport.clock.monotonic()

    def _wake(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="etcd-keep-alive")
            self._task.add_done_callback(_tell_fault)
        if len(self._table):
            self._busy.set()
        else:
            self._busy.clear()
        self._changed.set()

    def _forget_waiter(self, lease_id: int, waiter: asyncio.Future[float]) -> None:
        waiters = self._waiters.get(lease_id, [])
        if waiter in waiters:
            waiters.remove(waiter)
        if not waiters:
            self._waiters.pop(lease_id, None)
            if lease_id not in self._on_lost:
                self._table.drop(lease_id)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_time())
            group.create_task(self._keep_streams())

    async def _keep_time(self) -> None:
        """Queue what is due, tell what expired, leave members that hang."""
        while True:
            self._changed.clear()
            due = self._table.take_due(self._now())
            for lease_id in due.send:
                self._outbox.put_nowait(lease_id)
            for lease_id in due.expired:
                self._lost(lease_id, "no renewal was answered in time")
            if due.hung and self._stream is not None:
                self._stream.give_up()
            wait_s = self._table.next_due() - self._now()
            try:
                async with asyncio.timeout(None if wait_s == math.inf else max(wait_s, 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _keep_streams(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            await self._busy.wait()
            index = -1
            try:
                stream = await self._transport.open_stream(LEASE_KEEP_ALIVE)
                index = stream.index
                await self._renew_over(stream, backoff)
            except StreamBrokenError as error:
                _log.warning("etcd keep-alive stream broke", endpoint=self._transport.target, error=error)
                if etcd_errors.is_stale_token(error.details):
                    self._transport.discard_token(stream.token)
                self._transport.rotate(index)
            except errors.OmniError as error:  # logging in failed; deadlines go on meanwhile
                _log.warning("etcd keep-alive cannot log in", error=error)
            await asyncio.sleep(backoff.next_delay_s())

    async def _renew_over(self, stream: _Stream, backoff: Backoff) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()  # were meant for the last stream; restart makes them due again
        self._table.restart(self._now())
        self._changed.set()
        self._stream = stream
        writer = asyncio.create_task(self._write(stream), name="etcd-keep-alive-writer")
        try:
            while True:
                response = await stream.read()
                backoff.reset()
                self._answered(response.id, float(response.ttl))
        finally:
            self._stream = None
            writer.cancel()
            await stream.close()
            await asyncio.wait({writer})

    async def _write(self, stream: _Stream) -> None:
        try:
            while True:
                await stream.write(wire.LeaseKeepAliveRequest(id=await self._outbox.get()))
        except StreamBrokenError as error:
            # The reader sees the same end and starts over.
            _log.debug("etcd keep-alive write failed", error=error)

    def _answered(self, lease_id: int, ttl_s: float) -> None:
        self._table.heard(self._now())
        if ttl_s <= 0:
            self._table.drop(lease_id)
            self._lost(lease_id, "etcd does not know it any more")
            return
        self._table.answered(lease_id, ttl_s)
        for waiter in self._waiters.pop(lease_id, []):
            if not waiter.done():
                waiter.set_result(ttl_s)
        self._wake()

    def _lost(self, lease_id: int, why: str) -> None:
        for waiter in self._waiters.pop(lease_id, []):
            if not waiter.done():
                waiter.set_exception(etcd_errors.LeaseLost(lease_id))
        on_lost = self._on_lost.pop(lease_id, None)
        self._wake()
        if on_lost is not None:
            _log.warning("etcd lease lost", lease_id=f"{lease_id:x}", why=why)
            try:
                on_lost(lease_id)
            except Exception:  # noqa: BLE001 -- a fault of one holder must not end the renewals of all others
                _log.exception("etcd lease holder failed to hear of its loss", lease_id=f"{lease_id:x}")


def _tell_fault(task: asyncio.Task[None]) -> None:
    # The task never ends by itself, and its holders do not wait for it before ``close``.
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("etcd keep-alive ended by a fault; leases will run out", error=repr(error))
