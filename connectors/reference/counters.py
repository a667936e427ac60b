"""What a connector has done, for ``health``."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

from omnicore import errors


@dataclasses.dataclass(slots=True)
class _Edge:
    """Of one edge, on this end; the reference's names and units. Times are of the last transfer."""

    puts: int = 0
    gets: int = 0
    size_kbytes: float = 0.0
    tx_time_ms: float = 0.0
    """From the call of ``put`` until a receiver can have it."""
    in_flight_time_ms: float = 0.0
    """From the call of ``get`` until the bytes can be read: question, claim and pull."""
    rx_decode_time_ms: float = 0.0
    """From then until the caller has the object."""


class Counters:
    """Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"puts": 0, "gets": 0, "misses": 0, "bytes_transferred": 0, "errors": 0, "timeouts": 0}
        self._edges: dict[str, _Edge] = {}
        self._last_error: dict[str, Any] | None = None

    def put(self, edge: str, size_bytes: int, took_s: float) -> None:
        """Something was published."""
        with self._lock:
            self._counts["puts"] += 1
            self._counts["bytes_transferred"] += size_bytes
            facts = self._edges.setdefault(edge, _Edge())
            facts.puts += 1
            facts.size_kbytes = size_bytes / 1024
            facts.tx_time_ms = took_s * 1000

    def got(self, edge: str, size_bytes: int, in_flight_s: float, decode_s: float) -> None:
        """Something was received."""
        with self._lock:
            self._counts["gets"] += 1
            self._counts["bytes_transferred"] += size_bytes
            facts = self._edges.setdefault(edge, _Edge())
            facts.gets += 1
            facts.size_kbytes = size_bytes / 1024
            facts.in_flight_time_ms = in_flight_s * 1000
            facts.rx_decode_time_ms = decode_s * 1000

    def missed(self) -> None:
        """A key was not there."""
        with self._lock:
            self._counts["misses"] += 1

    def failed(self, error: errors.OmniError) -> bool:
        """Something did not work. True if that is news: the last failure had another reason."""
        with self._lock:
            self._counts["timeouts" if isinstance(error, errors.DeadlineExceededError) else "errors"] += 1
            news = self._last_error is None or self._last_error["reason"] != error.reason
            self._last_error = {"reason": error.reason, "message": error.message, "at_unix_s": time.time()}
            return news

    def snapshot(self) -> dict[str, Any]:
        """All of it, as plain values."""
        with self._lock:
            edges = {name: dataclasses.asdict(edge) for name, edge in self._edges.items()}
            return {**self._counts, "edges": edges, "last_error": self._last_error and dict(self._last_error)}
