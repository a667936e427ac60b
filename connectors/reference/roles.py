"""Connectors with a sender's end, which listens, and a receiver's, which asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from connectors.payload import JsonValue
from connectors.reference.connector import CoreConnector
from connectors.reference.node import NodeOptions
from connectors.reference.ports import DEFAULT_PORT
from connectors.reference.settings import Option

GIB: Final = 1024**3
NETWORK: Final[Mapping[str, Option]] = {
    "host": Option("auto"),
    "zmq_port": Option(DEFAULT_PORT, high=65535, auto=True),
    "sender_host": Option(""),
    "sender_zmq_port": Option(0, high=65535, auto=True),
}
"""Port 0 or "auto": any that is free; ``get_connection_info`` says which."""
POOL: Final[Mapping[str, Option]] = {
    "memory_pool_size": Option(GIB, low=1),
    "memory_pool_device": Option("cpu", choices=("cpu",)),
    "inline_bytes": Option(65536, core="inline_bytes", high=65536),
}
"""Of classes over a transfer engine: memory that is registered with it, to publish into and to receive in."""


class RoleConnector(CoreConnector):
    """Both ends; ``role`` says which one it is, or "dual"."""

    supports_raw_data = True
    needs_role = True

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        host, port = self.values["sender_host"], self.values["sender_zmq_port"]
        if host and host.lower() != "auto" and port:
            self.update_sender_info(host, port)

    @property
    def zmq_port(self) -> int:
        """Where a sender listens: the port that was asked for, or found free; 0 for a receiver."""
        return self._node.port

    @property
    def sender_host(self) -> str | None:
        """Of the default sender; None if there is none."""
        return self._senders.default.rpartition(":")[0] or None

    @property
    def sender_zmq_port(self) -> int | None:
        """Of the default sender; None if there is none."""
        port = self._senders.default.rpartition(":")[2]
        return int(port) if port else None


class EngineConnector(RoleConnector):
    """Over a transfer engine."""

    backends = frozenset({"inline", "engine"})
    options: ClassVar[Mapping[str, Option]] = {**NETWORK, **POOL}

    @property
    def pool_size(self) -> int:
        """Bytes registered to publish into, and as many to receive in."""
        return int(self.values["memory_pool_size"])

    @property
    def pool_device(self) -> str:
        """Where they are."""
        return str(self.values["memory_pool_device"])

    @property
    def protocol(self) -> str:
        """As configured; "" for engines that have none."""
        return str(self.values.get("protocol", ""))

    @property
    def device_name(self) -> str:
        """Network devices as configured."""
        return str(self.values.get("device_name", ""))

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        pools = {
            "pool_bytes": self.pool_size if self.can_put else 0,
            "receive_pool_bytes": self.pool_size if self.role != "sender" else 0,
            "get_timeout_s": self.values["get_timeout_s"],
        }
        return super()._node_options({**pools, **core})
