"""A stream whose first message, the greeting, says what it is for; here on a stream of ``omnicore.grpc_stream_server``:
frames are taken and written within the event loop's reading and writing of the socket.

Frames are taken in order, the greeting first. What comes while the greeting is heard is kept, up to a limit. Not
guaranteed: that anything is taken of a stream that ends meanwhile.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from omnicore.errors import OmniError, ResourceExhaustedError
from omnicore.grpc_stream_server import ServedStream
from stage_worker.frames import PART_OVERHEAD_BYTES, FrameWriter

GREETING_TIMEOUT_S = 10.0
"""A stream that says nothing is closed after this."""
_MOST_EARLY_BYTES = 1024 * 1024
"""What is kept until the greeting is heard, which takes seconds while a claim is asked for."""

In = TypeVar("In", bound=Message)
_Taken = TypeVar("_Taken", bound=Message, contravariant=True)


class Conversation(Protocol[_Taken]):
    """What a greeting has opened."""

    @property
    def writer(self) -> FrameWriter[Any]:
        """What it has to say."""
        ...

    def take(self, request: _Taken, *, first: bool = False) -> None:
        """What one frame asks for; ``first``: it is the greeting. What it raises ends the stream."""
        ...

    def half_close(self) -> None:
        """No more frames will come."""
        ...


Opened = TypeVar("Opened", bound=Conversation[Any])


async def greeting(requests: AsyncIterator[In], no_greeting: Callable[[], OmniError]) -> In:
    """The first message of a stream of gRPC's own server. Raises ``no_greeting()`` if none comes in time."""
    try:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            return await anext(requests)
    except (StopAsyncIteration, TimeoutError):
        raise no_greeting() from None


class GreetedStream(abc.ABC, Generic[In, Opened]):
    """Takes what comes on one stream (``StreamHandler``). Its kinds say what a greeting opens and how that ends."""

    def __init__(self, stream: ServedStream, frame: type[In]) -> None:
        self._stream = stream
        self._frame = frame
        self._conversation: Opened | None = None
        self._opening: asyncio.Task[None] | None = None
        self._early: list[In] = []
        """What came meanwhile."""
        self._early_bytes = 0
        self._half_closed = False
        self._limit = asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, stream.finish, self.no_greeting())

    @abc.abstractmethod
    def no_greeting(self) -> OmniError:
        """What is told who says nothing."""

    @abc.abstractmethod
    async def open(self, first: In) -> Opened:
        """Hear the greeting; ``first`` is taken afterwards. Raises what the stream ends with."""

    @abc.abstractmethod
    def end(self, conversation: Opened) -> None:
        """The stream is over, and so is what ``open`` has returned."""

    def on_message(self, message: bytes) -> None:
        """One frame. Raises what a conversation refuses."""
        frame = self._frame.FromString(message)
        if self._conversation is not None:
            self._conversation.take(frame)
        elif self._opening is not None:
            self._early_bytes += len(message) + PART_OVERHEAD_BYTES
            if self._early_bytes > _MOST_EARLY_BYTES:
                raise ResourceExhaustedError(
                    f"more than {_MOST_EARLY_BYTES} bytes before the answer", reason="TOO_EARLY"
                )
            self._early.append(frame)
        else:
            self._limit.cancel()
            self._opening = asyncio.create_task(self._open(frame), name="open-stream")

    def on_half_close(self) -> None:
        """No more frames will come."""
        self._half_closed = True
        if self._conversation is not None:
            self._conversation.half_close()
        elif self._opening is None:
            raise self.no_greeting()

    def on_room(self) -> None:
        """The peer reads again."""
        if self._conversation is not None:
            self._conversation.writer.resume()

    def on_end(self) -> None:
        """The peer is gone, or was told that it is over."""
        self._limit.cancel()
        if self._opening is not None:
            self._opening.cancel()
        if self._conversation is not None:
            self.end(self._conversation)

    async def _open(self, first: In) -> None:
        try:
            conversation = self._conversation = await self.open(first)
            conversation.writer.pump(self._write, self._stream.finish)
            for frame in (first, *self._early):
                conversation.take(frame, first=frame is first)
            self._early.clear()
            if self._half_closed:
                conversation.half_close()
        except Exception as error:  # noqa: BLE001 -- of whatever kind, it is this stream's end
            self._stream.finish(error)

    def _write(self, frame: Message) -> bool:
        self._stream.write(frame.SerializeToString())
        return not self._stream.full
