"""Connectors over an object store: a receiver needs nothing but the key, on any host that sees the store.

Beside the data, the store gets a small note under a name that is made of the key: where its sender answers, and the
secret to ask with. Who reads the store may therefore ask, as it may read the data.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from connectors.payload import Payload
from connectors.reference import metadata as meta
from connectors.reference.connector import CoreConnector
from connectors.reference.node import Node
from connectors.reference.rendezvous import Sender
from connectors.stores.base import ObjectStore
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_NOTE_BYTES = 512
_SWEEP_S = 1.0


class Notes:
    """The notes of one connector in a store."""

    def __init__(self, client: ObjectStore) -> None:
        self._client = client
        self._written: set[str] = set()
        self._going: set[str] = set()
        self._gone = asyncio.Event()

    async def write(self, key: str, sender: Sender) -> None:
        """Say who has ``key``. A note that another sender left is replaced. Raises ``UnavailableError``."""
        text = orjson.dumps({"endpoint": sender.endpoint, "secret": sender.secret.hex()}).ljust(_NOTE_BYTES)

        def fill(target: memoryview) -> None:
            target[:] = text

        name = _name(key)
        if key in self._going:  # of what was published under it before: that removal would take this note
            await self._gone.wait()
        self._written.add(key)  # first: what a failed call has written must go, too
        try:
            await asyncio.to_thread(self._client.put, name, _NOTE_BYTES, fill)
        except errors.AlreadyExistsError:
            if await self.read(key) != sender:
                await asyncio.to_thread(self._client.remove, [name])
                await asyncio.to_thread(self._client.put, name, _NOTE_BYTES, fill)

    async def read(self, key: str) -> Sender:
        """Who has ``key``. Raises ``NotFoundError`` if nobody does, ``UnavailableError``, ``DataLossError``."""

        def read() -> bytes:
            found = self._client.open(_name(key), _NOTE_BYTES)
            with contextlib.closing(found):
                return bytes(found.data)

        text = await asyncio.to_thread(read)
        try:
            document = orjson.loads(text.rstrip())
            host, _, port = document["endpoint"].rpartition(":")
            return Sender(meta.checked_address(host, port, "endpoint"), bytes.fromhex(document["secret"]))
        except (ValueError, KeyError, TypeError, AttributeError, errors.InvalidRequestError) as error:
            raise errors.DataLossError(f"the note about {key!r} is not one: {error}") from error

    async def keep(self, keys: Iterable[str]) -> None:
        """Remove what was written about others than ``keys``."""
        gone = self._written - set(keys)
        if gone:
            self._written -= gone
            self._going = gone
            self._gone.clear()
            try:
                await asyncio.to_thread(self._client.remove, [_name(key) for key in gone])
            except errors.OmniError as error:
                self._written |= gone  # once more, later
                _log.debug("notes are left in the store", notes=len(gone), reason=error.message)
            finally:
                self._going = set()
                self._gone.set()

    def close(self) -> None:
        """Leave the store."""
        self._client.close()


def _name(key: str) -> str:
    return f"omni-note:{hashlib.blake2b(key.encode(), digest_size=24).hexdigest()}"


class StoredConnector(CoreConnector):
    """Finds senders by notes in the store; metadata of other connectors means nothing to it, as in the reference."""

    client: Callable[[Mapping[str, Any]], ObjectStore]
    """Makes a client of the store, of the kind's options."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._notes: Notes | None = None
        self._core: Mapping[str, Any] = {}
        self._note_secret = secrets.token_bytes(32)
        super().__init__(config)

    async def _start(self) -> None:
        await super()._start()
        self._node.secret = self._note_secret
        client = type(self).client
        notes = self._notes = Notes(await asyncio.to_thread(client, self._core))
        keeper = asyncio.create_task(_keep(notes, self._node), name=f"notes-{self.engine_id}")

        async def leave() -> None:
            keeper.cancel()
            await asyncio.wait([keeper])
            await notes.keep(())
            await asyncio.to_thread(notes.close)

        self._node.before_close(leave)

    def _told(self, metadata: object, plain_key: str, key: str) -> meta.Told:
        return meta.handle_only(metadata, plain_key, key)

    async def _publish(
        self, key: str, edge: transfer_pb2.EdgeRef, payload: Payload, consumers: int
    ) -> transfer_pb2.TransferHandle:
        assert self._notes is not None
        handle = await super()._publish(key, edge, payload, consumers)
        try:
            await self._notes.write(key, Sender(self._node.endpoint, self._note_secret))
        except BaseException:
            self._node.published().cleanup(key)
            raise
        return handle

    async def _find(self, key: str, told: meta.Told, rank: int | None, consumer: str) -> transfer_pb2.TransferHandle:
        assert self._notes is not None
        sender = await self._notes.read(key)
        try:
            return await self._node.query(sender.endpoint, key, consumer, sender.secret)
        except (errors.PermissionDeniedError, errors.UnavailableError) as error:
            raise errors.NotFoundError(
                f"the sender of {key!r} is gone: {error.message}", reason="HANDLE_NOT_FOUND"
            ) from error


async def _keep(notes: Notes, node: Node) -> None:
    """Remove notes about what is no longer published; until cancelled."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        try:
            keys = node.published().requests()
        except errors.NotFoundError:
            continue
        await notes.keep(keys)
