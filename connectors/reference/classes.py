"""The classes of the reference, by name: a kind of connector each, and the options that their files use."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from connectors.payload import JsonValue
from connectors.publish import MAX_INLINE_BYTES
from connectors.reference.connector import CoreConnector
from connectors.reference.host import HostConnector
from connectors.reference.node import NodeOptions
from connectors.reference.ports import DEFAULT_PORT
from connectors.reference.settings import Option
from connectors.shm import DEFAULT_POOL_BYTES

_GIB = 1024**3
_NETWORK: Mapping[str, Option] = {
    "host": Option("auto"),
    "zmq_port": Option(DEFAULT_PORT, high=65535),
    "sender_host": Option(""),
    "sender_zmq_port": Option(0, high=65535),
}
"""Of classes with a sender's and a receiver's end. Port 0: any that is free; ``get_connection_info`` says which."""


class SharedMemoryConnector(HostConnector):
    """Shared memory of one host. Everything arrives as the object it was; nothing needs to be released."""

    kind = "shm"
    backends = frozenset({"inline", "shm", "process"})
    options: ClassVar[Mapping[str, Option]] = {
        **HostConnector.host_options,
        "shm_threshold_bytes": Option(MAX_INLINE_BYTES, core="shm_threshold_bytes", high=MAX_INLINE_BYTES),
        "memory_pool_size": Option(DEFAULT_POOL_BYTES, low=1),
        "device": Option("cuda:0"),
    }

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.threshold: int = self.values["shm_threshold_bytes"]
        self.device: str = self.values["device"]

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return dataclasses.replace(super()._node_options(core), pool_bytes=self.values["memory_pool_size"])


class RoleConnector(CoreConnector):
    """A connector with a sender's end, which listens, and a receiver's, which asks."""

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


class GrpcConnector(RoleConnector):
    """Bytes over gRPC; not in the reference. It needs nothing but a network."""

    kind = "grpc"
    backends = frozenset({"inline", "fetch"})
    options: ClassVar[Mapping[str, Option]] = {
        **_NETWORK,
        "memory_pool_size": Option(_GIB, core="pool_bytes", low=1),
    }


BY_NAME: Mapping[str, type[CoreConnector]] = {
    "SharedMemoryConnector": SharedMemoryConnector,
    "GrpcConnector": GrpcConnector,
}
"""Names in files."""
