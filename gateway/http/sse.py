"""Server-sent events: one writer for every streamed endpoint.

The status line leaves with the first output, or with the comment that a long silence brings, so that a failure before
it is an honest HTTP status. After that an error is an event. Every stream ends with exactly one ``[DONE]``. All that
arrived since the last send leaves in one send; a stream that is silent for long gets a comment, so that nothing on the
way takes it for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.http.body_fields import as_in_body
from gateway.http.events import COMMENT, DONE, HEADERS, error_event
from gateway.http.exchange import Exchange
from gateway.request import RequestState
from omni.v1 import stage_service_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)


class ChunkEncoder(Protocol):
    """Makes the events of one stream."""

    def begin(self) -> bytes:
        """What comes first."""
        ...

    def chunks(self, events: Sequence[stage_service_pb2.StageEvent]) -> bytes:
        """The events of this output."""
        ...

    def end(self, state: RequestState) -> bytes:
        """What comes last: finish reason, usage."""
        ...


async def stream_events(exchange: Exchange, state: RequestState, encoder: ChunkEncoder, keepalive_s: float) -> None:
    """Write the whole stream. Raises the request's error if nothing has been sent yet."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_end(error: Exception | None) -> None:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    stream = EventStream(exchange, state, encoder, keepalive_s, on_end)
    try:
        await done
    finally:
        stream.stop()
        state.abort("its response has ended")


class EventStream:
    """A consumer that writes: called with output, it encodes and sends in the same call.

    While the client is behind with reading, output stays with the request, whose bound is that of a slow client; a
    client that takes nothing at all loses its connection, and with it the request.

    ``on_end`` is called once: the response is complete (None), or the request failed before there was one.
    """

    __slots__ = (
        "_begun", "_done", "_encoder", "_exchange", "_keepalive_s", "_loop", "_on_end", "_state", "_timer", "_written",
    )  # fmt: skip

    def __init__(
        self,
        exchange: Exchange,
        state: RequestState,
        encoder: ChunkEncoder,
        keepalive_s: float,
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._exchange = exchange
        self._state = state
        self._encoder = encoder
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._begun = False
        self._written = False  # since the last look
        self._done = False
        self._on_end = on_end
        self._timer = self._loop.call_later(keepalive_s, self._look)
        exchange.on_writable = self.on_output
        state.attach(self)

    def stop(self) -> None:
        """Write nothing more."""
        self._timer.cancel()
        self._exchange.on_writable = None
        self._state.detach()

    def on_output(self) -> None:
        """Send what there is."""
        state = self._state
        status = state.status
        if self._done or (status == "running" and self._exchange.wire.congested):
            return
        events = state.take()
        try:
            if status == "running":
                if not events:
                    return
                data = self._encoder.chunks(events)
                if self._begun:
                    self._written = True
                    self._exchange.send(data, more=True)
                    return
            else:
                data = self._encoder.chunks(events) if events else b""
                if status == "finished":
                    data += self._encoder.end(state) + DONE
            if events or status == "finished":
                if not self._begun:
                    self._begun = True
                    data = self._encoder.begin() + data
                self._send(data, more=status != "finished")
            if status == "finished":
                self._end(None)
            elif state.error is not None:
                self._fail(state.error)  # raised, it would refer to this frame, and so to itself
        except Exception as error:  # noqa: BLE001 -- it costs this response only, whose client hears of it
            self._fail(error)

    def _send(self, data: bytes, *, more: bool) -> None:
        self._written = True
        if not self._exchange.started:
            self._exchange.begin(200, HEADERS)
        self._exchange.send(data, more=more)

    def _fail(self, error: Exception) -> None:
        if not self._exchange.started:
            self._end(error)
            return
        if not isinstance(error, errors.OmniError):
            _log.exception("stream failed", request_id=self._state.request_id)
        try:
            told = as_in_body(errors.from_exception(error), self._exchange.path)
            self._exchange.send(error_event(told) + DONE, more=False)
        finally:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self._done:
            self._done = True
            self._on_end(error)

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._keepalive_s, self._look)
        if not self._written and not self._exchange.congested and not self._done:
            self._send(COMMENT, more=True)
        self._written = False
