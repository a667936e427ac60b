"""Connectors between processes of one host: a receiver needs nothing but the key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from connectors.payload import Payload
from connectors.reference import metadata as meta
from connectors.reference.connector import CoreConnector
from connectors.reference.rendezvous import Rendezvous, Sender, default_directory
from connectors.reference.settings import Option
from omni.v1 import transfer_pb2
from omnicore import errors

# Why a sender does not have a key for us, though another one may.
_NEXT = (errors.NotFoundError, errors.ResourceExhaustedError)
_GONE = (errors.UnavailableError, errors.DeadlineExceededError, errors.PermissionDeniedError)


class HostConnector(CoreConnector):
    """Finds senders by a ``Rendezvous``; metadata of other connectors means nothing to it, as in the reference."""

    default_host = "127.0.0.1"
    publish_late = True
    host_options: ClassVar[Mapping[str, Option]] = {"namespace": Option("default"), "directory": Option("")}

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self._meeting: Rendezvous | None = None
        self._announcing = asyncio.Lock()
        self._last: Sender | None = None
        super().__init__(config)

    async def _start(self) -> None:
        namespace = str(self.values["namespace"])
        if not namespace.isidentifier():
            raise errors.InvalidRequestError.field("namespace", f"must be a name, got {namespace!r}")
        directory = Path(self.values["directory"]) if self.values["directory"] else default_directory()
        meeting = self._meeting = Rendezvous(directory, namespace)

        async def leave() -> None:
            meeting.close()

        self._node.before_close(leave)
        await super()._start()

    def _told(self, metadata: object, plain_key: str, key: str) -> meta.Told:
        return meta.handle_only(metadata, plain_key, key)

    async def _publish(
        self, key: str, edge: transfer_pb2.EdgeRef, payload: Payload, consumers: int
    ) -> transfer_pb2.TransferHandle:
        async with self._announcing:
            if self._meeting is not None and not self._meeting.announced:
                self._node.secret = self._meeting.announce(self._node.endpoint)
        return await super()._publish(key, edge, payload, consumers)

    async def _find(self, key: str, told: meta.Told, rank: int | None, consumer: str) -> transfer_pb2.TransferHandle:
        """Ask the senders of this host one after the other, so that no place is taken at two; first the one that had
        the last key."""
        assert self._meeting is not None
        missing: errors.OmniError = errors.NotFoundError(
            f"nobody on this host has published {key!r}", reason="HANDLE_NOT_FOUND"
        )
        senders = self._meeting.senders()
        for sender in sorted(senders, key=lambda sender: sender != self._last):
            try:
                handle = await self._node.query(sender.endpoint, key, consumer, sender.secret)
            except _NEXT as error:
                missing = error if isinstance(error, errors.ResourceExhaustedError) else missing
            except _GONE:
                self._meeting.forget()
            else:
                self._last = sender
                return handle
        raise missing
