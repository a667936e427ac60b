"""Reads of a transfer engine: in threads, with a deadline, and with care for what a failed read may still write.

A read that has failed is not always over. Libraries return an error while they still copy, and calls to a process that
stands still return when they please. Guarantees: memory that a read may still write to is given back only when the
call has returned and, unless the engine says that nothing is written any more, ``engine.fence`` has returned after it.
Meanwhile it is in quarantine, which is counted and logged. Not guaranteed: that it ever comes back; a pool can run out
of room for reasons that are its peers'.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from connectors.engines.base import Piece, RemoteRegion, TransferEngine, TransferFailedError
from connectors.lanes import Lane
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

BULK_BYTES = 1024 * 1024
"""Reads from here on have a thread of their own for each peer: they take milliseconds, and gain nothing from running
beside each other, while small ones must not wait behind them."""
_IDLE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReaderStats:
    """Counts of one reader since it began, and of now."""

    peers: int
    failures: int
    quarantined_bytes: int
    fences: int


def _nothing() -> None:
    """There is nothing to do meanwhile."""


class _Returning:
    """An awaitable in the block: ``future`` has returned, or the time is up. As ``asyncio.wait``, which takes as long
    as a small read does."""

    def __init__(self, future: concurrent.futures.Future[None], timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] = self._loop.create_future()

    def __enter__(self) -> asyncio.Future[None]:
        self._timer = self._loop.call_later(self._timeout_s, self._wake)
        self._future.add_done_callback(self._returned)
        return self._waiter

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._waiter.cancel()

    def _returned(self, _: object) -> None:
        if not self._waiter.done():
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)


class _Peer:
    def __init__(self, remote: RemoteRegion) -> None:
        self.remote = remote
        self.small = Lane(f"read {remote.session}")
        self.bulk = Lane(f"bulk read {remote.session}")
        self.failed = False
        self.used_s = time.monotonic()

    @property
    def busy(self) -> bool:
        return bool(self.small.waiting or self.bulk.waiting)

    def end(self) -> None:
        self.small.end()
        self.bulk.end()


class Reader:
    """All reads of one engine. Methods belong to one event loop; what is given back is given back in any thread."""

    def __init__(self, kind: str, engine: TransferEngine, timeout_s: float) -> None:
        self._kind = kind
        self._engine = engine
        self._timeout_s = timeout_s
        self._peers: dict[str, _Peer] = {}
        self._quarantine = _Quarantine(kind, engine)
        self._failures = 0

    async def read(
        self,
        remote: RemoteRegion,
        pieces: Sequence[Piece],
        give_back: Callable[[], None],
        meanwhile: Callable[[], None] = _nothing,
    ) -> None:
        """Copy ``pieces`` from a peer; ``meanwhile`` is done on their way. When this raises, ``give_back`` is called
        as soon as nothing can be written to local memory any more, be it long after; when it returns, the memory is the
        caller's. Raises ``TransferFailedError``, ``UnavailableError`` TRANSFER_TIMEOUT when the time is up, and what
        the engine says about a handle that it does not understand."""
        deadline_s = time.monotonic() + self._timeout_s
        size_bytes = sum(piece.size_bytes for piece in pieces)
        peer = self._peer(remote)
        lane = peer.bulk if size_bytes >= BULK_BYTES else peer.small
        future = lane.submit(lambda: self._engine.read(remote, pieces, max(0.001, deadline_s - time.monotonic())))
        try:
            with _Returning(future, self._timeout_s) as returned:
                meanwhile()
                await returned
        except BaseException:
            future.cancel()  # if it has not begun
            self._quarantine.settle(future, size_bytes, give_back)
            raise
        if not future.done():
            future.cancel()
            self._quarantine.settle(future, size_bytes, give_back)
            self._note_failure(peer, "TRANSFER_TIMEOUT", "the time is up")
            raise errors.UnavailableError(
                f"{remote.session} did not give {size_bytes} bytes in {self._timeout_s:g} s",
                reason="TRANSFER_TIMEOUT",
                metadata={"connector": self._kind, "session": remote.session, "size_bytes": size_bytes},
            )
        error = future.exception()
        if error is not None:
            self._quarantine.settle(future, size_bytes, give_back)
            reason = error.reason if isinstance(error, errors.OmniError) else type(error).__name__
            self._note_failure(peer, reason, str(error))
            raise error

    def sweep(self) -> int:
        """Forget peers that failed and that nobody reads from; let threads go that had nothing to do for a while.
        Returns how many peers were forgotten."""
        now_s = time.monotonic()
        idle = [(session, peer) for session, peer in self._peers.items() if not peer.busy]
        failed = [(session, peer) for session, peer in idle if peer.failed]
        for _, peer in failed:
            peer.small.submit(lambda peer=peer: self._forget(peer.remote))  # type: ignore[misc]
        for session, peer in [*failed, *((s, p) for s, p in idle if now_s - p.used_s > _IDLE_S)]:
            if self._peers.pop(session, None) is not None:
                peer.end()
        return len(failed)

    def stats(self) -> ReaderStats:
        """Counts now."""
        return ReaderStats(
            peers=len(self._peers),
            failures=self._failures,
            quarantined_bytes=self._quarantine.size_bytes,
            fences=self._quarantine.fences,
        )

    def close(self) -> None:
        """Let the threads go when they have done what they do."""
        for peer in self._peers.values():
            peer.end()
        self._peers.clear()

    def _peer(self, remote: RemoteRegion) -> _Peer:
        peer = self._peers.get(remote.session)
        if peer is None:
            peer = self._peers[remote.session] = _Peer(remote)
        peer.remote = remote
        peer.used_s = time.monotonic()
        return peer

    def _note_failure(self, peer: _Peer, reason: str, detail: str) -> None:
        peer.failed = True
        self._failures += 1
        session = peer.remote.session
        _log.warning("transfer failed", connector=self._kind, session=session, reason=reason, detail=detail)

    def _forget(self, remote: RemoteRegion) -> None:
        try:
            self._engine.forget(remote)
        except Exception as error:  # noqa: BLE001 -- native libraries raise anything, and the peer is gone anyway
            _log.warning("peer not forgotten", connector=self._kind, session=remote.session, error=str(error))


class _Quarantine:
    """Memory that failed reads may still write to."""

    def __init__(self, kind: str, engine: TransferEngine) -> None:
        self._kind = kind
        self._engine = engine
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._fencing = False
        self.size_bytes = 0
        self.fences = 0

    def settle(self, future: concurrent.futures.Future[None], size_bytes: int, give_back: Callable[[], None]) -> None:
        """Give back what the read of ``future`` used as soon as that is safe."""
        with self._lock:
            self.size_bytes += size_bytes
        future.add_done_callback(lambda done: self._returned(done, size_bytes, give_back))

    def _returned(self, done: concurrent.futures.Future[None], size_bytes: int, give_back: Callable[[], None]) -> None:
        if done.cancelled() or _is_over(done.exception()):
            self._release(size_bytes, give_back)
            return
        with self._lock:
            self._waiting.append((size_bytes, give_back))
            if self._fencing:
                return
            self._fencing = True
        _log.warning("receive buffer in quarantine", connector=self._kind, size_bytes=size_bytes)
        threading.Thread(target=self._fence, name=f"fence {self._kind}", daemon=True).start()

    def _fence(self) -> None:
        while True:
            with self._lock:
                fenced, self._waiting = self._waiting, []
                if not fenced:
                    self._fencing = False
                    return
            try:
                self._engine.fence()
            except Exception as error:  # noqa: BLE001 -- native libraries raise anything; the memory is lost then
                lost = sum(size_bytes for size_bytes, _ in fenced)
                _log.error("fence failed: memory is lost", connector=self._kind, size_bytes=lost, error=str(error))
                continue
            self.fences += 1
            for size_bytes, give_back in fenced:
                self._release(size_bytes, give_back)
            _log.info("receive buffers out of quarantine", connector=self._kind, buffers=len(fenced))

    def _release(self, size_bytes: int, give_back: Callable[[], None]) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(give_back)
            with self._lock:
                self.size_bytes -= size_bytes


def _is_over(error: BaseException | None) -> bool:
    """Nothing is written any more after a read that ended so. Errors about handles come before any byte moves."""
    if isinstance(error, TransferFailedError):
        return error.fenced
    return error is None or isinstance(error, errors.OmniError)
