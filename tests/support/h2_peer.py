"""The other end of a connection of ``omnicore.http2``, as ``h2`` makes it: what we send is judged by somebody else."""

from __future__ import annotations

from typing import TypeVar

import h2.config
import h2.connection
import h2.events

from omnicore.http2 import GrpcConnection

E = TypeVar("E", bound=h2.events.Event)


class H2Peer:
    """Raises where ``ours`` does what HTTP/2 does not allow."""

    def __init__(self, ours: GrpcConnection, *, client_side: bool) -> None:
        config = h2.config.H2Configuration(client_side=client_side, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []
        self.body = b""
        """All data of ours."""
        self.messages: list[bytes] = []
        """What ours took."""
        self._ours = ours

    def turn(self) -> None:
        """Carry bytes until neither end has more to say."""
        while True:
            there, here = self._ours.take_outgoing(), self.h2.data_to_send()
            if not there and not here:
                return
            self.hear(there)
            self.messages += self._ours.receive(here)

    def hear(self, sent: bytes) -> None:
        """Take what ours has sent."""
        for event in self.h2.receive_data(sent):
            self.events.append(event)
            if isinstance(event, h2.events.DataReceived):
                self.body += event.data

    def say(self, message: bytes) -> None:
        """Have ours send a message."""
        self.hear(self._ours.send(message))

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]
