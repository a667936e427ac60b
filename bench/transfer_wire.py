"""What both ends of every measured path share, whatever environment they run in: numpy and the standard library only.

A path is two processes and a Unix socket between them. For each transfer the producer publishes, sends one message
over the socket, and the consumer gets the data::

    producer                                             consumer
    stamp the data; t0
    put ── message (handle, address, …) ──────────────►  get: a view of the bytes
                                                         touch the first and the last byte       → "handed"
                                                         add up every 8-byte word                → "read"
    wait ◄─────────────────────────────── two clock readings, and whether the sum was right
    release

Both clocks are CLOCK_MONOTONIC of one machine, so times are one way: from before ``put`` until the consumer has views
(handed), or has read every byte (read). Each transfer carries another number in its first word and is checked by its
sum, outside "handed"; releases are outside both.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_HEADER = struct.Struct("<cQQQ")  # kind, bytes of the message, bytes of the data, sum of its words
_HELLO, _PREPARE, _DATA, _RELAX = b"h", b"p", b"d", b"r"
_ANSWER = struct.Struct("<qqQ")  # handed, read, bytes of the complaint that follows, if any
_COMMAND_BYTES = 1 << 20
_PATTERN_BYTES = 8 << 20


class Channel(Protocol):
    """The Unix socket between the two ends."""

    async def send(self, data: bytes) -> None:
        """All of it."""
        ...

    async def receive(self, size: int) -> bytes:
        """Exactly ``size`` bytes. Raises ``EOFError`` when the other end has gone."""
        ...


class BlockingChannel:
    """For ends that are not asyncio programs: the lowest latency there is."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)

    async def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    async def receive(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts


class LoopChannel:
    """For ends whose event loop must go on meanwhile, as a stage worker's does."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), b""
        while len(parts) < size:
            part = await loop.sock_recv(self._socket, size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts


class Producer:
    """The end that has the data."""

    async def start(self) -> dict[str, Any]:
        """Get ready; what the consumer needs to know."""
        return {}

    async def prepare(self, size: int) -> Bytes:
        """The data, writable, that the next transfers publish."""
        return pattern(size)

    async def stage(self, data: Bytes) -> None:
        """Not timed: have the data where its producer would have made it."""

    async def put(self, number: int, data: Bytes) -> bytes:
        """Publish; what to tell the consumer."""
        raise NotImplementedError

    async def push(self) -> None:
        """Move the bytes, where that is the producer's part: after the consumer has been told."""

    async def done(self) -> None:
        """The consumer has finished: release."""

    async def relax(self) -> None:
        """Let go of what ``prepare`` took."""

    async def measure(
        self, channel: Channel, size: int, *, samples: int, budget_s: float, first_number: int
    ) -> list[tuple[float, float, float]]:
        """See ``measure_transfers``."""
        return await measure_transfers(
            channel, self, size, samples=samples, budget_s=budget_s, first_number=first_number
        )


class Consumer:
    """The end that wants the data."""

    async def start(self, hello: dict[str, Any]) -> None:
        """Get ready, knowing what the producer says."""

    async def prepare(self, size: int) -> None:
        """Have room for transfers of this size, where the room is the consumer's."""

    def get(self, message: bytes, size: int) -> AbstractAsyncContextManager[Bytes]:
        """The data, as flat bytes."""
        raise NotImplementedError

    async def relax(self) -> None:
        """Let go of what ``prepare`` took."""


def pattern(size: int) -> Bytes:
    """Bytes that repeat only every 8 MiB; sizes are multiples of 8."""
    words = np.arange(min(size, _PATTERN_BYTES) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    data = np.empty(size, np.uint8)
    for start in range(0, size, _PATTERN_BYTES):
        piece = data[start : start + _PATTERN_BYTES]
        piece[:] = words.view(np.uint8)[: len(piece)]
    return data


def word_sum(data: Bytes) -> int:
    """The sum of all 8-byte words: reads every byte, at about the speed of memory."""
    return int(np.add.reduce(data.view(np.uint64)))


async def measure_transfers(
    channel: Channel, producer: Producer, size: int, *, samples: int, budget_s: float, first_number: int
) -> list[tuple[float, float, float]]:
    """Seconds (put, handed, read) of up to ``samples`` transfers, of as many as begin within ``budget_s``, after one
    that is not counted unless it takes longer. Raises ``RuntimeError`` with what the consumer complains of."""
    await _ask(channel, _PREPARE, size=size)
    data = await producer.prepare(size)
    words = data.view(np.uint64)
    words[0] = 0
    rest = word_sum(data)
    try:
        results: list[tuple[float, float, float]] = []
        deadline_s = None
        for number in range(first_number, first_number + samples + 1):
            words[0] = number
            total = (rest + number) % 2**64
            await producer.stage(data)
            begun_ns = time.monotonic_ns()
            message = await producer.put(number, data)
            put_ns = time.monotonic_ns()
            await channel.send(_HEADER.pack(_DATA, len(message), size, total) + message)
            await producer.push()
            handed_ns, read_ns = await _answer(channel)
            await producer.done()
            if deadline_s is None:
                deadline_s = time.monotonic() + budget_s
                if read_ns / 1e9 - begun_ns / 1e9 < budget_s:
                    continue
            results.append(((put_ns - begun_ns) / 1e9, (handed_ns - begun_ns) / 1e9, (read_ns - begun_ns) / 1e9))
            if time.monotonic() > deadline_s:
                break
        return results
    finally:
        del words, data
        await producer.relax()
        await _ask(channel, _RELAX)


async def _ask(channel: Channel, kind: bytes, *, size: int = 0, message: bytes = b"") -> None:
    await channel.send(_HEADER.pack(kind, len(message), size, 0) + message)
    await _answer(channel)


async def _answer(channel: Channel) -> tuple[int, int]:
    handed_ns, read_ns, length = _ANSWER.unpack(await channel.receive(_ANSWER.size))
    if length:
        raise RuntimeError((await channel.receive(length)).decode())
    return handed_ns, read_ns


async def consume(channel: Channel, consumer: Consumer) -> None:
    """A consumer's process: does what its producer asks, until that has gone. Failures are answers too."""
    while True:
        try:
            kind, length, size, expected = _HEADER.unpack(await channel.receive(_HEADER.size))
        except EOFError:
            return
        message = await channel.receive(length)
        handed_ns = read_ns = 0
        complaint = b""
        try:
            if kind == _DATA:
                handed_ns, read_ns = await _get(consumer, message, size, expected)
            elif kind == _PREPARE:
                await consumer.prepare(size)
            elif kind == _RELAX:
                await consumer.relax()
            else:
                await consumer.start(json.loads(message))
        except Exception as error:  # noqa: BLE001  # it is what the run reports of this path
            complaint = f"{type(error).__name__}: {error}".encode()
        await channel.send(_ANSWER.pack(handed_ns, read_ns, len(complaint)) + complaint)


async def _get(consumer: Consumer, message: bytes, size: int, expected: int) -> tuple[int, int]:
    async with consumer.get(message, size) as data:
        ends = bytes((data[0], data[-1]))
        handed_ns = time.monotonic_ns()
        total = word_sum(data)
        read_ns = time.monotonic_ns()
        length = data.nbytes
        del data
    if total != expected or length != size:
        raise ValueError(f"wrong bytes: {length} of {size}, sum {total} instead of {expected}, ends {ends!r}")
    return handed_ns, read_ns


async def produce(channel: Channel, producer: Producer) -> None:
    """A producer's process: one line of JSON in, one out, until standard input ends. Failures are answers too."""
    # Libraries print to standard output; the answers go to where it led at first.
    out = os.dup(1)
    os.dup2(2, 1)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_COMMAND_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    number = 1
    while line := await reader.readline():
        command: dict[str, Any] = json.loads(line)
        try:
            if command["do"] == "start":
                hello = await producer.start()
                await _ask(channel, _HELLO, message=json.dumps(hello).encode())
                answer: dict[str, Any] = {}
            else:
                samples, budget_s = command["samples"], command["budget_s"]
                size = command["size"]
                found = await producer.measure(channel, size, samples=samples, budget_s=budget_s, first_number=number)
                number += samples + 1
                answer = {"samples": found}
        except Exception as error:  # noqa: BLE001  # it is what the run reports of this path
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(out, json.dumps(answer).encode() + b"\n")
