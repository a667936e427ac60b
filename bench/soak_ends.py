"""The two ends of ``bench.soak``, as processes that may be killed at any time.

    python -m bench.soak_ends produce|consume SETTINGS   (JSON, see ``Settings``)

Messages are those of flows (``SubscribeResponse`` with chunks, ``SubscribeRequest`` with acknowledgements) over a Unix
socket, each behind its length and a note of what is meant to happen to the batch. As in flows, chunks are claimed for
their consumers by name when they are published, an acknowledgement releases them, and a consumer that has gone is
released from everything it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop

from bench.soak_plan import SMALL_PER_BATCH, Counters, Fate, Ground, fate_of, mixed
from bench.transfer_ours import Worker
from connectors.payload import JsonValue
from omni.v1 import transfer_pb2
from omni.v1 import transfer_service_pb2 as pb
from omnicore import errors, process
from omnicore.log import get_logger, setup_logging

_log = get_logger(__name__)

_FRAME = struct.Struct("<IQBBB")  # bytes that follow, batch, fate, large, whether the reader is its first
_ACK = struct.Struct("<Q")
_HELLO = struct.Struct("<B")
PRODUCER = 0  # its row; consumers have the next ones
_SWEEP_S = 0.25
_DRAIN_S = 60.0
_AHEAD, _AHEAD_S = 0.02, 0.02
_FEW = 256  # one in so many reads lingers


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the supervisor tells its children."""

    row: int
    consumers: int
    counters_fd: int
    socket_path: str
    connector: str
    options: Mapping[str, JsonValue]
    pool_bytes: int
    small: int
    large: int
    large_bytes: int
    ttl_s: float
    windows: tuple[int, int]
    """Batches under way at once: small ones, large ones."""


class Producer:
    """Publishes until enough was read, whatever happens to its readers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counters = Counters(settings.consumers + 1, settings.counters_fd)
        self.ground = Ground(settings.large_bytes)
        self.worker = Worker(
            0,
            settings.pool_bytes,
            {settings.connector: settings.options},
            epoch=self.counters.get(PRODUCER, "incarnation"),
            ttl_s=settings.ttl_s,
        )
        self.free_bytes = self.worker.connectors.usage().free_bytes
        self.readers: dict[int, asyncio.StreamWriter] = {}
        self.waiting: dict[int, tuple[set[int], list[transfer_pb2.TransferHandle], asyncio.Event]] = {}
        self.changed = asyncio.Condition()
        self.late: set[asyncio.Task[None]] = set()

    def count(self, name: str, value: int = 1) -> None:
        """Add to one of our numbers."""
        self.counters.add(PRODUCER, name, value)

    async def run(self) -> None:
        """Everything, from the first batch to the last acknowledgement."""
        await self.worker.serve()
        Path(self.settings.socket_path).unlink(missing_ok=True)  # noqa: ASYNC240  # of the producer before this one
        server = await asyncio.start_unix_server(self._reader, self.settings.socket_path)
        sweeper = asyncio.create_task(self._sweep())
        async with asyncio.TaskGroup() as tasks:
            for large, window in enumerate(self.settings.windows):
                for _ in range(window):
                    tasks.create_task(self._publish(bool(large)))
        await asyncio.gather(*self.late)
        await self._drained()
        sweeper.cancel()
        self._gauge()
        server.close()
        for writer in list(self.readers.values()):
            writer.close()
        await self.worker.close()

    def _enough(self, large: bool) -> bool:
        return self._share(large) >= 1

    def _share(self, large: bool) -> float:
        wanted = self.settings.large if large else self.settings.small
        return self.counters.sum("large" if large else "small") / wanted if wanted else 1.0

    def _ahead(self, large: bool) -> bool:
        """The large ones would be done long before the small ones: they wait, so that all is mixed all the time."""
        return large and self._share(True) > self._share(False) + _AHEAD

    async def _publish(self, large: bool) -> None:
        while not self._enough(large):
            if self._ahead(large):
                await asyncio.sleep(_AHEAD_S)
                continue
            batch = self.counters.get(PRODUCER, "next_batch")
            self.counters.set(PRODUCER, "next_batch", batch + 1)
            fate = fate_of(batch)
            readers = await self._choose(batch)
            putting = asyncio.create_task(self._put(batch, large, readers, fate))
            if fate is Fate.CANCELLED:
                await asyncio.sleep(mixed(batch) % 1000 / 1000 * (0.01 if large else 0.003))
                putting.cancel()
            try:
                handles = await putting
            except (asyncio.CancelledError, errors.NotFoundError) as error:
                # Cancelled on purpose; or this process stood still for the time to live before it claimed.
                if isinstance(error, asyncio.CancelledError) and fate is not Fate.CANCELLED:
                    raise
                # What was published before goes the way of a request that was given up.
                self.worker.connectors.store.cleanup(_request(batch))
                self.count("cancelled")
                continue
            if fate is Fate.FORGOTTEN:
                continue
            if fate is Fate.LATE:
                self.late.add(task := asyncio.create_task(self._send_late(batch, large, readers, handles)))
                task.add_done_callback(self.late.discard)
                continue
            await self._send(batch, large, readers, handles, fate)

    async def _choose(self, batch: int) -> list[int]:
        """Who shall read: one of the consumers that are there, or several."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.readers)
        here = sorted(self.readers)
        first = here[mixed(batch) % len(here)]
        return [first, *(row for row in here if row != first and mixed(batch ^ row) % 5 == 0)]

    async def _put(self, batch: int, large: bool, readers: list[int], fate: Fate) -> list[transfer_pb2.TransferHandle]:
        handles = []
        store = self.worker.connectors.store
        request_id = _request(batch)
        edge = transfer_pb2.EdgeRef(request_id=request_id, from_stage=0, to_stage=1)
        for index in range(1 if large else SMALL_PER_BATCH):
            number = batch * SMALL_PER_BATCH + index
            payload = self.ground.payload(self.ground.large(number) if large else self.ground.small(number))
            kind = self.settings.connector
            key = f"{request_id}/0/0-1/{index}"
            handle = await self.worker.connectors.put(kind, key, edge, index, payload, len(readers))
            if fate not in (Fate.FORGOTTEN, Fate.LATE):
                for row in readers:
                    store.claim(key, handle.token, str(row))
            handles.append(handle)
        self.count("published", len(handles))
        return handles

    async def _send(
        self, batch: int, large: bool, readers: list[int], handles: list[transfer_pb2.TransferHandle], fate: Fate
    ) -> None:
        done = asyncio.Event()
        self.waiting[batch] = (set(readers), handles, done)
        frame = _message(handles)
        for row in readers:
            self._write(row, batch, fate, large, row == readers[0], frame)
        if fate is Fate.ABORTED:
            await asyncio.sleep(mixed(batch) % 1000 / 1000 * (0.03 if large else 0.005))
            self.worker.connectors.store.cleanup(_request(batch))
            self.count("aborted")
        await done.wait()

    async def _send_late(
        self, batch: int, large: bool, readers: list[int], handles: list[transfer_pb2.TransferHandle]
    ) -> None:
        """After the time to live; nothing was claimed, nothing is awaited."""
        await asyncio.sleep(self.settings.ttl_s + 3 * _SWEEP_S)
        for row in readers:
            self._write(row, batch, Fate.LATE, large, False, _message(handles))

    def _write(self, row: int, batch: int, fate: Fate, large: bool, first: bool, frame: bytes) -> None:
        writer = self.readers.get(row)
        if writer is None or writer.is_closing():
            self._finish(batch, row)
        else:
            writer.write(_FRAME.pack(len(frame), batch, fate, large, first) + frame)

    def _finish(self, batch: int, row: int) -> None:
        """A reader has acknowledged a batch, or will never."""
        entry = self.waiting.get(batch)
        if entry is None:
            return
        readers, handles, done = entry
        readers.discard(row)
        for handle in handles:
            self.worker.connectors.store.release(handle.key, handle.token, str(row))
        if not readers:
            del self.waiting[batch]
            done.set()

    async def _reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One consumer, until it ends."""
        row = -1
        try:
            (row,) = _HELLO.unpack(await reader.readexactly(_HELLO.size))
            self.readers[row] = writer
            async with self.changed:
                self.changed.notify_all()
            while True:
                (batch,) = _ACK.unpack(await reader.readexactly(_ACK.size))
                self._finish(batch, row)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.count("lost_consumers")
        finally:
            writer.close()
            if self.readers.get(row) is writer:
                del self.readers[row]
                for batch in [batch for batch, (readers, _, _) in self.waiting.items() if row in readers]:
                    self._finish(batch, row)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.count("expired", self.worker.connectors.sweep())
            self._gauge()

    def _gauge(self) -> None:
        stats, usage = self.worker.connectors.store.stats(), self.worker.connectors.usage()
        for name, value in (
            ("handles", stats.handles),
            ("claims", stats.claims),
            ("draining", stats.draining),
            ("free_bytes", usage.free_bytes),
            ("pool_bytes", usage.pool_bytes),
            ("outstanding", len(self.waiting)),
        ):
            self.counters.set(PRODUCER, name, value)

    async def _drained(self) -> None:
        """Nothing is held any more: what was forgotten has expired, too."""
        deadline = asyncio.get_running_loop().time() + _DRAIN_S
        while asyncio.get_running_loop().time() < deadline:
            stats, usage = self.worker.connectors.store.stats(), self.worker.connectors.usage()
            if not (stats.handles or stats.claims or stats.draining) and usage.free_bytes == self.free_bytes:
                return
            await asyncio.sleep(0.05)
        self.count("failures")
        _log.error(
            "the pool is not empty in the end", **dataclasses.asdict(stats), missing=self.free_bytes - usage.free_bytes
        )


class Consumer:
    """Reads whatever it is sent, and looks at every byte."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.row = settings.row
        self.counters = Counters(settings.consumers + 1, settings.counters_fd)
        self.ground = Ground(settings.large_bytes)
        self.worker = Worker(1, 0, {settings.connector: settings.options})

    async def run(self) -> None:
        """Until the supervisor says that it is enough."""
        await self.worker.serve()
        sweeper = asyncio.create_task(self._sweep())
        while not self.counters.get(self.row, "stopped"):
            try:
                reader, writer = await asyncio.open_unix_connection(self.settings.socket_path)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.02)
                continue
            self.counters.add(self.row, "reconnects")
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._converse(reader, writer)
            writer.close()
        sweeper.cancel()
        await self.worker.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.is_closing():  # its producer was killed the moment it accepted; uvloop refuses to write then
            return
        writer.write(_HELLO.pack(self.row))
        while True:
            size, batch, fate, large, first = _FRAME.unpack(await reader.readexactly(_FRAME.size))
            message = pb.SubscribeResponse.FromString(await reader.readexactly(size))
            for chunk in message.chunks:
                await self._read(batch, Fate(fate), bool(large), bool(first), chunk.handle)
            if writer.is_closing():
                return
            writer.write(_ACK.pack(batch))

    async def _read(
        self, batch: int, fate: Fate, large: bool, first: bool, handle: transfer_pb2.TransferHandle
    ) -> None:
        number = batch * SMALL_PER_BATCH + handle.sequence
        plan = self.ground.large(number) if large else self.ground.small(number)
        mistake = ""
        try:
            async with self.worker.connectors.get(handle) as payload:
                if mixed(number) % _FEW == 0:
                    await asyncio.sleep(mixed(batch) % 100 / 20_000)
                mistake = self.ground.mistake(plan, payload)
        except (errors.NotFoundError, errors.DataLossError) as error:
            inline = handle.WhichOneof("backend") == "inline"
            if fate is Fate.ABORTED and not inline:
                self._count("refused_aborted")
            elif fate is Fate.LATE and isinstance(error, errors.NotFoundError):
                self._count("refused_late")
            else:
                self._fail(f"refused: {error}", batch, fate, handle)
            return
        except (errors.UnavailableError, errors.FailedPreconditionError) as error:
            if self.counters.get(PRODUCER, "incarnation") == handle.owner.epoch and not self._producer_gone():
                self._fail(f"refused although its owner lives: {error}", batch, fate, handle)
            self._count("refused_dead")
            return
        if mistake:
            self._fail(mistake, batch, fate, handle)
        if fate is Fate.LATE and handle.WhichOneof("backend") not in ("inline", None):
            self._fail("read after its time to live", batch, fate, handle)
        self._count("reads")
        self._count("bytes", handle.size_bytes)
        if first:
            self._count("large" if large else "small")

    def _producer_gone(self) -> bool:
        pid = self.counters.get(PRODUCER, "pid")
        try:
            return b") Z " in Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return True

    def _count(self, name: str, value: int = 1) -> None:
        self.counters.add(self.row, name, value)

    def _fail(self, what: str, batch: int, fate: Fate, handle: transfer_pb2.TransferHandle) -> None:
        self._count("failures")
        backend = handle.WhichOneof("backend")
        _log.error("transfer failed", what=what, batch=batch, fate=fate.name, key=handle.key, backend=backend)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.worker.connectors.sweep()


def _request(batch: int) -> str:
    return f"soak-{batch}"


def _message(handles: list[transfer_pb2.TransferHandle]) -> bytes:
    message = pb.SubscribeResponse()
    for handle in handles:
        message.chunks.add(edge=handle.edge, sequence=handle.sequence, handle=handle)
    return message.SerializeToString()


def main(argv: list[str]) -> int:
    """A child of the supervisor."""
    process.die_with_parent()
    setup_logging(f"soak-{argv[0]}", "warning")
    fields = json.loads(argv[1])
    settings = Settings(**{**fields, "windows": tuple(fields["windows"])})
    counters = Counters(settings.consumers + 1, settings.counters_fd)
    counters.set(settings.row, "pid", os.getpid())
    end = Producer(settings) if argv[0] == "produce" else Consumer(settings)
    uvloop.run(end.run())
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # engines of libraries end in their own time, or crash
