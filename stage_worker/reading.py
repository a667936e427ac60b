"""What one request reads on one edge: within the edge's limit and deadline, timed, and told as one event at the end.

An error in reading names both stages, the chunk and the producer's replica. ``Reading`` is used by the two readers,
of flows (``links.py``) and of data that was ready before (``ready_inputs.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from time import perf_counter
from typing import NamedTuple

from connectors import times
from connectors.payload import Payload
from connectors.publish import read_inline
from omni.v1 import pipeline_pb2, transfer_pb2
from omnicore.durations import to_seconds
from omnicore.errors import DeadlineExceededError, OmniError
from omnicore.log import get_logger
from omnicore.turns import Turn, Turns
from stage_worker.edges import edge_name, reading_attempt
from stage_worker.transfer_metrics import PathSeries, TransferMetrics

_log = get_logger(__name__)

GetPayload = Callable[[transfer_pb2.TransferHandle], AbstractAsyncContextManager[Payload]]
CHUNK_TIMEOUT_S = 120.0
"""Longest silence of a flow: above a long queue at the producer, below a client's patience."""


class Reads:
    """All reading of a worker. ``edges`` of the plan say how many transfers may run at a time, and how long a chunk may
    take if that is not ``chunk_timeout_s``."""

    def __init__(
        self,
        get: GetPayload,
        metrics: TransferMetrics,
        edges: Iterable[pipeline_pb2.Edge] = (),
        *,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
        locate: Callable[[OmniError, int], OmniError] = lambda error, _: error,
    ) -> None:
        """``locate``: puts this worker's claim and the attempt into an error."""
        self.get = get
        self.metrics = metrics
        self.locate = locate
        self.on_end: Callable[[Reading, OmniError | None], None] | None = None
        """Told when nothing more is read, and why if that is an error."""
        self.turns: Turns[tuple[int, int]] = Turns()
        """At edges with ``max_inflight``."""
        self._chunk_timeout_s = chunk_timeout_s
        self._edges = {(edge.from_stage, edge.to_stage): edge for edge in edges}

    def begin(self, edge: transfer_pb2.EdgeRef, producer: str, keys: int | None = None) -> Reading:
        """A request begins to read on ``edge``; ``keys``: how many handles, if that is known."""
        plan = self._edges.get((edge.from_stage, edge.to_stage))
        timeout_s = self._chunk_timeout_s
        if plan is not None and plan.HasField("chunk_timeout"):
            timeout_s = to_seconds(plan.chunk_timeout)
        _log.debug("transfer awaited", request_id=edge.request_id, edge=edge_name(edge), producer=producer, keys=keys)
        return Reading(self, edge, producer, plan.max_inflight if plan is not None else 0, timeout_s)


class Read(NamedTuple):
    """What was read."""

    chunks: int
    size_bytes: int
    wait_s: float
    """The consumer was ready, and waited."""
    read_s: float
    """For the bytes to be there."""
    connector: str


class Reading:
    """One request's payloads on one edge, one at a time: ``open``, ``close``, …, ``end``."""

    def __init__(
        self, reads: Reads, edge: transfer_pb2.EdgeRef, producer: str, max_inflight: int, timeout_s: float
    ) -> None:
        self.edge = edge
        """As it began: a flow may go on as one of another producer."""
        self.producer = producer
        self.timeout_s = timeout_s
        """Longest time for a chunk to come, and for its bytes to be read."""
        self.most_unacked = 0
        """Of a flow: chunks that had come and were not acknowledged, at most."""
        self._reads = reads
        self._max_inflight = max_inflight
        self._open: AbstractAsyncContextManager[Payload] | None = None
        self._inline: PathSeries | None = None
        self._waited_s = 0.0  # for the chunk that comes next
        self._wait_s = self._link_s = 0.0  # of all
        self._keys = self._size_bytes = 0
        self._times = times.ReadTimes()
        self._backend = ""
        self._ended = False

    def waited(self, seconds: float) -> None:
        """The consumer was ready, and had to wait."""
        self._waited_s += seconds

    async def open(self, handle: transfer_pb2.TransferHandle, sequence: int) -> Payload:
        """The payload of chunk ``sequence``, valid until ``close``. Raises what the connector raises, and
        ``DeadlineExceededError``."""
        begin_s = perf_counter()
        try:
            if handle.WhichOneof("backend") == "inline":  # the path of every token: nothing has to move
                payload = read_inline(handle)
                series = self._inline
                if series is None:
                    edge = self.edge
                    series = self._inline = self._reads.metrics.path(edge.from_stage, edge.to_stage, "inline", "inline")
                link_s = perf_counter() - begin_s
            else:
                payload, link_s, series = await self._transfer(handle)
        except OmniError as error:
            raise self.located(error, sequence) from error
        series.rx.observe(link_s)
        series.wait.observe(self._waited_s)
        self._keys += 1
        self._size_bytes += handle.size_bytes
        self._link_s += link_s
        self._wait_s += self._waited_s
        self._waited_s = 0.0
        return payload

    async def close(self, sequence: int) -> None:
        """Leave the payload that is open. Raises ``DataLossError`` if its owner freed it meanwhile: what was computed
        from it is worthless."""
        if self._open is None:
            return
        payload, self._open = self._open, None
        try:
            await payload.__aexit__(None, None, None)
        except OmniError as error:
            raise self.located(error, sequence) from error

    def located(self, error: OmniError, sequence: int) -> OmniError:
        """``error``, counted, and saying which chunk of which edge could not be read, and whose it was."""
        edge = self.edge
        error.message = (
            f"stage {edge.to_stage} could not read chunk {sequence} of edge {edge_name(edge)}, published by "
            f"{self.producer}: {error.message}"
        )
        error.args = (error.message,)
        where = {"peer_stage": str(edge.from_stage), "producer": self.producer, "chunk": str(sequence)}
        error.metadata = {**error.metadata, **where}
        self.count(error)
        return self._reads.locate(error, reading_attempt(edge))

    def count(self, error: OmniError) -> None:
        """The consumer could not read on, because of ``error``."""
        self._reads.metrics.failed(self.edge, error.reason)

    @property
    def so_far(self) -> Read:
        """What was read until now."""
        return Read(self._keys, self._size_bytes, self._wait_s, self._link_s, self._times.connector or "inline")

    def end(self, error: OmniError | None = None) -> None:
        """Nothing more is read: say what there was. Idempotent."""
        if self._ended:
            return
        self._ended = True
        spent = self._times
        megabytes = self._size_bytes / 1e6
        _log.debug(
            "transfer",
            request_id=self.edge.request_id,
            attempt=reading_attempt(self.edge),
            edge=edge_name(self.edge),
            producer=self.producer,
            keys=self._keys,
            bytes=self._size_bytes,
            wait_s=round(self._wait_s, 6),
            link_ms=_ms(self._link_s),
            connector=spent.connector or "inline",
            backend=self._backend or "inline",
            fast_path=spent.connector != "grpc",
            zero_copy=spent.zero_copy,
            query_ms=_ms(spent.query),
            alloc_ms=_ms(spent.alloc),
            read_ms=_ms(spent.read),
            sync_ms=_ms(spent.sync),
            total_ms=_ms(self._link_s),
            mb_s=round(megabytes / self._link_s, 1) if self._link_s else 0.0,
            most_unacked=self.most_unacked,
            error=error.reason if error is not None else "",
        )
        if self._reads.on_end is not None:
            self._reads.on_end(self, error)

    async def _transfer(self, handle: transfer_pb2.TransferHandle) -> tuple[Payload, float, PathSeries]:
        """Move the bytes: when it is this request's turn, and before the deadline."""
        turn: Turn[tuple[int, int]] | None = None
        edge = self.edge
        if self._max_inflight:
            turn = self._reads.turns.queue((edge.from_stage, edge.to_stage), self._max_inflight)
        try:
            async with asyncio.timeout(self.timeout_s) as scope:
                if turn is not None:
                    begin_s = perf_counter()
                    await turn.come()
                    self._waited_s += perf_counter() - begin_s
                with times.recording() as spent:
                    begin_s = perf_counter()
                    context = self._reads.get(handle)
                    payload = await context.__aenter__()
                    link_s = perf_counter() - begin_s
            self._open = context
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineExceededError(
                f"its {handle.size_bytes} bytes were not read within {self.timeout_s:g} s",
                reason="READ_TIMEOUT",
                metadata={"timeout_s": self.timeout_s, "size_bytes": handle.size_bytes},
            ) from None
        finally:
            if turn is not None:
                turn.leave()
        self._backend = handle.WhichOneof("backend") or ""
        spent.connector = spent.connector or _connector(handle)
        self._times.add(spent)
        self._times.connector, self._times.zero_copy = spent.connector, spent.zero_copy
        self._reads.metrics.read(spent, link_s)
        series = self._reads.metrics.path(edge.from_stage, edge.to_stage, spent.connector, self._backend)
        return payload, link_s, series


def _connector(handle: transfer_pb2.TransferHandle) -> str:
    """Which connector published it, as far as the handle says."""
    backend = handle.WhichOneof("backend") or ""
    with contextlib.suppress(AttributeError):  # engines and stores name theirs
        return str(getattr(handle, backend).connector)
    return backend


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
