"""What the processes of one gateway ask of each other, over Unix sockets in a directory that only their user can enter.

A question is one line of JSON, the answer everything until the end of the connection, JSON as well. A process that is
not there has nothing to tell: it crashed, and is on its way back. One that is there and does not answer within
``ANSWER_S`` is silent: what it knows is missing, and whoever asked must say so. Nothing here is on a request's path.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

ANSWER_S = 2.0
"""Longest wait for a sibling."""
# A question names a request at most; ids have up to 256 characters.
_MOST_QUESTION_BYTES = 64 * 1024

Handler = Callable[[Mapping[str, Any]], Awaitable[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Which process of a gateway this one is."""

    directory: str = ""
    """Of the sockets; empty: it is the only one."""
    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Place:
        """ "INDEX/COUNT:DIRECTORY", or "". Raises ``ValueError``."""
        if not text:
            return cls()
        numbers, _, directory = text.partition(":")
        index, _, count = numbers.partition("/")
        if not directory or not index.isdigit() or not count.isdigit() or int(index) >= int(count):
            raise ValueError(f"must be INDEX/COUNT:DIRECTORY, got {text!r}")
        return cls(directory, int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}:{self.directory}" if self.directory else ""

    @property
    def alone(self) -> bool:
        """There are no others."""
        return not self.directory

    def socket(self, index: int) -> str:
        """Where process ``index`` answers."""
        return str(Path(self.directory) / f"{index}.sock")


class Answers(NamedTuple):
    """What the others said."""

    given: dict[int, Any]
    """By index."""
    silent: tuple[int, ...] = ()
    """Those that are there and gave none."""

    def check(self, what: str) -> None:
        """Nobody who answered has ``what``: raises ``UnavailableError`` if one that is silent may have it."""
        if self.silent:
            names = ", ".join(map(str, self.silent))
            raise errors.UnavailableError(
                f"process {names} of this gateway does not answer, and no other has {what}",
                reason="PROCESS_SILENT",
                metadata={"processes": names},
                retry_after_s=1.0,
            )


async def _alive(_: Mapping[str, Any]) -> bool:
    return True


class Siblings:
    """Answers the other processes, and asks them. Used from one event loop; alone it does nothing."""

    def __init__(self, place: Place | None = None, *, answer_s: float = ANSWER_S) -> None:
        self.place = place or Place()
        self._answer_s = answer_s
        self._handlers: dict[str, Handler] = {"alive": _alive}
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    def answer(self, what: str, handler: Handler) -> None:
        """``handler`` answers questions of this kind. What it returns must go into JSON."""
        self._handlers[what] = handler

    async def start(self) -> None:
        """Listen."""
        if self.place.alone:
            return
        path = self.place.socket(self.place.index)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 -- of the process that this one replaces; local, and before we serve
        self._server = await asyncio.start_unix_server(self._connected, path, limit=_MOST_QUESTION_BYTES)

    async def close(self) -> None:
        """Answer no more. Twice is fine."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running))

    async def ask(self, what: str, **details: Any) -> Answers:
        """The answers of the others. All are asked at once."""
        place = self.place
        if place.alone:
            return Answers({})
        others = [index for index in range(place.count) if index != place.index]
        question = orjson.dumps({"ask": what, **details}) + b"\n"
        if len(question) > _MOST_QUESTION_BYTES:  # an id that nobody has: nothing of ours is that long
            return Answers({})
        given: dict[int, Any] = {}
        there = await asyncio.gather(*(self._ask(index, question, given) for index in others))
        silent = tuple(i for i, is_there in zip(others, there, strict=True) if is_there and i not in given)
        if silent:
            _log.warning("gateway processes do not answer", processes=silent, asked=what)
        return Answers({index: given[index] for index in others if index in given}, silent)

    async def _ask(self, index: int, question: bytes, given: dict[int, Any]) -> bool:
        """Put its answer into ``given``. False: it is not there."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._answer_s):
                reader, writer = await asyncio.open_unix_connection(self.place.socket(index))
                writer.write(question)
                data = await reader.read()
            given[index] = orjson.loads(data)["answer"]
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except (OSError, TimeoutError, orjson.JSONDecodeError, KeyError) as error:
            _log.debug("a gateway process does not answer", process=index, reason=str(error))
            return True
        finally:
            if writer is not None:
                writer.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="sibling-question")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._answer_s):
                question = orjson.loads(await reader.readline())
                answer = await self._handlers[question.pop("ask")](question)
                writer.write(orjson.dumps({"answer": answer}))
                await writer.drain()
        except (OSError, TimeoutError, orjson.JSONDecodeError, errors.OmniError) as error:
            _log.debug("a sibling's question went unanswered", reason=str(error))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
