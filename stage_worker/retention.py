"""What a worker keeps of data that its consumers have had, in case one of them is lost: how much, and for how long.

Bounded by bytes over all requests. Above the limit, and when a connector has no room for new data, the request that
retained something first gives up all that it retains: it could only be replayed as a whole.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

from omni.v1 import transfer_pb2
from omnicore.clock import Clock
from omnicore.log import get_logger

_log = get_logger(__name__)

DEFAULT_RETAIN_BYTES = 64 * 1024 * 1024
"""A quarter of the default pool. Text of thousands of requests; of data in a pool, what new data needs goes first."""
RETAIN_S = 1800.0
"""What nobody asked for or added to for so long is dropped: a gateway that lives would have named its call by then.
Half of the time for which a claim protects data (``connectors.handles.DEFAULT_CLAIM_LIMIT_S``)."""
OVERHEAD_BYTES = 2048
"""What keeping a chunk costs beside its data: its handle, and the store's entry; generous."""
CAUSES = ("limit", "pool", "age")
"""Why retained data was dropped: above ``--retain-bytes``, no room for new data, nobody asked for long."""


class Holder(Protocol):
    """Who retains data: a flow, or the handles of an edge that does not flow."""

    request_id: str

    def drop_retained(self) -> None:
        """Give up all that is kept beyond what a consumer still has to read."""
        ...


@dataclasses.dataclass(slots=True)
class _Request:
    changed_s: float
    holders: dict[int, tuple[Holder, int]] = dataclasses.field(default_factory=dict)
    """By identity: a holder and its bytes."""
    in_pool: bool = False
    """Some of it takes room in a connector's memory."""


class Retention:
    """What is retained in one worker; everything runs in its event loop."""

    def __init__(self, clock: Clock, limit_bytes: int | None) -> None:
        """``limit_bytes``: None is no limit, 0 keeps nothing."""
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._requests: dict[str, _Request] = {}  # in the order in which they began to retain
        self.size_bytes = 0
        """Kept now, with ``OVERHEAD_BYTES`` for each chunk."""
        self.dropped = collections.Counter[str]()
        """Requests that gave up what they retained, by cause."""

    def add(self, holder: Holder, handle: transfer_pb2.TransferHandle) -> None:
        """``holder`` keeps ``handle`` longer than it would have to. May drop what is retained, also of ``holder``."""
        size_bytes = handle.size_bytes + OVERHEAD_BYTES
        now_s = self._clock.monotonic()
        request = self._requests.get(holder.request_id)
        if request is None:
            request = self._requests[holder.request_id] = _Request(now_s)
        request.changed_s = now_s
        request.in_pool = request.in_pool or handle.WhichOneof("backend") != "inline"
        known = request.holders.get(id(holder))
        request.holders[id(holder)] = (holder, size_bytes + (known[1] if known else 0))
        self.size_bytes += size_bytes
        while self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            self._drop(next(iter(self._requests)), "limit")

    def forget(self, holder: Holder) -> None:
        """``holder`` keeps nothing more."""
        request = self._requests.get(holder.request_id)
        if request is None or (known := request.holders.pop(id(holder), None)) is None:
            return
        self.size_bytes -= known[1]
        if not request.holders:
            del self._requests[holder.request_id]

    def make_room(self) -> bool:
        """A connector has no room: drop the oldest request's data that takes any. False: there is none."""
        for request_id, request in self._requests.items():
            if request.in_pool:
                self._drop(request_id, "pool")
                return True
        return False

    def sweep(self) -> None:
        """Drop what nobody has asked for or added to for long."""
        before_s = self._clock.monotonic() - RETAIN_S
        for request_id in [name for name, request in self._requests.items() if request.changed_s <= before_s]:
            self._drop(request_id, "age")

    def end(self, request_id: str) -> None:
        """The request is over: nothing of it is kept."""
        if request_id in self._requests:
            self._give_up(request_id)

    def _drop(self, request_id: str, cause: str) -> None:
        size_bytes = self._give_up(request_id)
        self.dropped[cause] += 1
        _log.info("retained data dropped", request_id=request_id, size_bytes=size_bytes, cause=cause)

    def _give_up(self, request_id: str) -> int:
        request = self._requests.pop(request_id)
        size_bytes = sum(size for _, size in request.holders.values())
        self.size_bytes -= size_bytes
        for holder, _ in request.holders.values():
            holder.drop_retained()
        return size_bytes
