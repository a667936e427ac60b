"""The other end of a connection of ``omnicore.http2``, as ``h2`` makes it: what we send is judged by somebody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import h2.config
import h2.connection
import h2.events
import h2.settings
from hypothesis import strategies as st

from omnicore.http2 import GrpcConnection
from tests.support.http2 import grpc_message

E = TypeVar("E", bound=h2.events.Event)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 50_000) | st.integers(0, 50)),
        st.tuples(st.just("read"), st.integers(1, 70_000)),
        st.tuples(st.just("window"), st.integers(0, 200_000)),
        st.tuples(st.just("frame size"), st.integers(16_384, 2**24 - 1)),
    ),
    max_size=40,
)
"""What ours sends, and what the peer makes of its room meanwhile; see ``H2Peer.take``."""
WAITS = [("send", 200_000), ("window", 10), ("send", 3), ("window", 300_000), ("send", 1)]
"""Steps in which messages wait, and others follow them."""


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

    def take(self, steps: Sequence[tuple[str, int]]) -> bytes:
        """Go through ``STEPS``; returns all that ours was given to send. What it says to wait is what has not come."""
        sent = bytearray()
        unread = 0
        for number, (what, value) in enumerate(steps):
            before = len(self.body)
            if what == "send":
                message = bytes([number]) * value
                sent += grpc_message(message)
                self.say(message)  # h2 raises if it is too much
            elif what == "read" and unread:
                self.h2.acknowledge_received_data(min(value, unread), 1)
                unread -= min(value, unread)
            elif what == "window":
                self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: value})
            elif what == "frame size":
                self.h2.update_settings({h2.settings.SettingCodes.MAX_FRAME_SIZE: value})
            self.turn()
            unread += len(self.body) - before
            assert self._ours.queued_bytes == len(sent) - len(self.body)
        return bytes(sent)

    def make_room(self) -> None:
        """For all that may come."""
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
        self.h2.increment_flow_control_window(2**30)
        self.turn()
