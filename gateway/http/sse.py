"""Server-sent events: one writer for every streamed endpoint.

The status line leaves with the first output, so that a failure before it is an honest HTTP status. After that an error
is an event. Every stream ends with exactly one ``[DONE]``. All that arrived since the last send leaves in one send;
a stream that is silent for long gets a comment, so that nothing on the way takes it for dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import orjson

from gateway.http.exchange import Exchange, error_body
from gateway.http.pacing import Pacer
from gateway.request import RequestState
from omni.v1 import stage_service_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold tokens back
)
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


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
    begun = False
    try:
        with Pacer(state, keepalive_s, on_silence=state.nudge) as pacer:
            while True:
                events = await state.next()
                data = encoder.chunks(events) if events else b""
                if done := state.status == "finished":
                    data += encoder.end(state) + _DONE
                elif not events:
                    data = _COMMENT
                if not begun and data is not _COMMENT:
                    begun = True
                    data = encoder.begin() + data
                pacer.sends += 1
                if not exchange.started:
                    await exchange.start(200, _HEADERS)
                await exchange.body(data, more=not done)
                if done:
                    return
                pacer.sends += 1
    except Exception as error:
        if not exchange.started:
            raise
        if not isinstance(error, errors.OmniError):
            _log.exception("stream failed", request_id=state.request_id)
        data = b"data: " + orjson.dumps(error_body(errors.from_exception(error))) + b"\n\n" + _DONE
        await exchange.body(data, more=False)
    finally:
        state.abort("its response has ended")
