"""Plain chats, answered without a task: read in one go, one call at one replica, and the answer from within its events.

What nearly every request is, and what a gateway is measured by. Anything else, and anything that is wrong, is left to
``ChatEndpoint``, so that it is handled and said in one place.
"""

from __future__ import annotations

import time

import orjson

from gateway.admission import Entry, effective_priority
from gateway.http.body_fields import as_in_body
from gateway.http.chat import ChatChunks, plain_answer
from gateway.http.exchange import JSON_HEADERS, Exchange
from gateway.http.plain_chat import PlainChat, plain_chat
from gateway.http.service import HttpService
from gateway.http.sse import EventStream
from gateway.request import RequestSpec, RequestState
from omni.v1 import prompt_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

# With one of these there is more to a request than its body.
_ASKS_FOR_MORE = frozenset((b"x-priority", b"x-request-timeout", b"content-encoding"))
_NO_SPEECH = prompt_pb2.SpeechOptions()


class DirectChat:
    """See ``answer_now``."""

    def __init__(self, service: HttpService) -> None:
        self._service = service

    def answer_now(self, exchange: Exchange) -> bool:
        """Begin to answer a chat, whose caller is known; ``exchange.finish`` follows. False: nothing was done.

        Raises what admission raises.
        """
        service = self._service
        limits = service.limits
        body = exchange.whole_json
        if body is None or len(body) > limits.max_body_bytes or not _ASKS_FOR_MORE.isdisjoint(exchange.headers):
            return False
        try:
            read = orjson.loads(body)
        except orjson.JSONDecodeError:
            return False
        chat = plain_chat(read, service.pipelines, limits.max_prompt_bytes)
        if chat is None or chat.session_id:
            return False
        request_id, caller = "chatcmpl-" + exchange.id, exchange.caller
        trace_parent = exchange.headers.get(b"traceparent")
        spec = RequestSpec(
            request_id, chat.graph, "chat", chat.modalities, chat.prompt, chat.sampling, _NO_SPEECH,
            limits.request_timeout_s, "", None, trace_parent.decode("latin-1") if trace_parent else "", "",
            Entry(caller, effective_priority(caller, None)),
        )  # fmt: skip
        if trace_parent and (trace_state := exchange.headers.get(b"tracestate")):
            spec.trace_state = trace_state.decode("latin-1")
        state = service.orchestrator.submit_directly(spec)
        if state is None:
            return False
        exchange.drop_body()
        try:
            exchange.abort_on_disconnect(state)
            answer = _Answer(exchange, state, chat)
            if chat.stream:
                answer.stream(limits.keepalive_s)
            else:
                state.attach_for_end(answer)
        except Exception:
            state.detach()
            state.abort("nobody can answer it")
            raise
        return True


class _Answer:
    """The response to one request, and its end."""

    __slots__ = ("_chat", "_created", "_exchange", "_state", "_stream")

    def __init__(self, exchange: Exchange, state: RequestState, chat: PlainChat) -> None:
        self._exchange = exchange
        self._state = state
        self._chat = chat
        self._created = int(time.time())
        self._stream: EventStream | None = None

    def stream(self, keepalive_s: float) -> None:
        """As events, as they come."""
        encoder = ChatChunks(self._state.request_id, self._created, self._chat)
        self._stream = EventStream(self._exchange, self._state, encoder, keepalive_s, self._streamed)

    def _streamed(self, error: Exception | None) -> None:
        stream, self._stream = self._stream, None  # it refers to us
        if stream is not None:
            stream.stop()
        self._state.abort("its response has ended")
        try:
            if error is not None:
                self._refuse(error)
        finally:
            self._exchange.finish()

    def on_output(self) -> None:
        """The request has ended: answer in one piece."""
        exchange, state = self._exchange, self._state
        state.detach()
        try:
            if state.error is not None:
                self._refuse(state.error)
            else:
                answer = plain_answer(state.request_id, self._created, self._chat, state, state.take())
                exchange.answer(200, answer, JSON_HEADERS)
        except Exception as error:  # noqa: BLE001 -- it costs this response only
            self._refuse(error)
        finally:
            exchange.finish()

    def _refuse(self, error: Exception) -> None:
        typed = errors.from_exception(error)
        if typed is not error:
            _log.exception("request failed", request_id=self._state.request_id)
        if not self._exchange.started:
            self._exchange.answer_error(as_in_body(typed, self._exchange.path))
