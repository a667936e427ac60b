"""The classes of the reference, by name: a kind of connector each, and the options that their files use.

Options keep the reference's names and defaults. ``core`` names what they are called by the kind; where its default is
another one, the reference's is passed on whether it was given or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from connectors.options import MooncakeStoreOptions, YuanrongOptions, parse_options
from connectors.payload import JsonValue
from connectors.publish import MAX_INLINE_BYTES
from connectors.reference.host import HostConnector
from connectors.reference.node import NodeOptions
from connectors.reference.ports import detect_local_ip
from connectors.reference.roles import GIB, NETWORK, POOL, EngineConnector, RoleConnector
from connectors.reference.settings import Option
from connectors.reference.stored import StoredConnector
from connectors.shm import DEFAULT_POOL_BYTES
from connectors.stores import factories as stores
from connectors.stores.base import ObjectStore

_MIB = 1024**2


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

    @property
    def threshold(self) -> int:
        """Payloads below so many bytes travel in their handle."""
        return int(self.values["shm_threshold_bytes"])

    @property
    def device(self) -> str:
        """As configured. Tensors arrive on the CPU."""
        return str(self.values["device"])

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return dataclasses.replace(super()._node_options(core), pool_bytes=self.values["memory_pool_size"])


class CudaIpcConnector(HostConnector):
    """GPUs of one host. Tensors arrive as a ``ManagedBuffer`` on the device; not in R4, but in later releases."""

    kind = "cuda_ipc"
    supports_raw_data = True
    backends = frozenset({"inline", "cuda_ipc"})
    options: ClassVar[Mapping[str, Option]] = {
        **HostConnector.host_options,
        "memory_pool_size": Option(GIB, core="pool_bytes", low=1),
        "device": Option(0, core="device"),
    }

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return super()._node_options({"pool_bytes": self.values["memory_pool_size"], **core})


class GrpcConnector(RoleConnector):
    """Bytes over gRPC; not in the reference. It needs nothing but a network."""

    kind = "grpc"
    backends = frozenset({"inline", "fetch"})
    options: ClassVar[Mapping[str, Option]] = {**NETWORK, "memory_pool_size": Option(GIB, core="pool_bytes", low=1)}


class MooncakeTransferEngineConnector(EngineConnector):
    """Mooncake's transfer engine over TCP, RDMA or NVLink."""

    kind = "mooncake"
    options: ClassVar[Mapping[str, Option]] = {
        **NETWORK,
        **POOL,
        "protocol": Option("rdma"),
        "device_name": Option("", core="device_name"),
    }

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return super()._node_options({**core, "protocol": self.values["protocol"], "host": self.host})


class NixlConnector(EngineConnector):
    """NIXL over UCX."""

    kind = "nixl"
    options: ClassVar[Mapping[str, Option]] = {**NETWORK, **POOL}


class MoriTransferEngineConnector(EngineConnector):
    """Mori over RDMA or XGMI."""

    kind = "mori"
    options: ClassVar[Mapping[str, Option]] = {
        **NETWORK,
        **POOL,
        "backend_type": Option("rdma", core="backend"),
        "rpc_port": Option(0, core="port", high=65535, auto=True),
    }

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return super()._node_options({**core, "host": self.host})


class YuanrongTransferEngineConnector(EngineConnector):
    """Yuanrong's transfer engine between NPUs."""

    kind = "yuanrong_transfer_engine"
    options: ClassVar[Mapping[str, Option]] = {
        **NETWORK,
        **POOL,
        "protocol": Option("ascend"),
        "memory_pool_device": Option("npu"),
        "device_name": Option("auto", core="device"),
        "rpc_port": Option(0, core="port", high=65535, auto=True),
    }

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        return super()._node_options({**core, "host": self.host})


class MooncakeStoreConnector(StoredConnector):
    """Objects in a Mooncake Store."""

    kind = "mooncake_store"
    backends = frozenset({"inline", "store"})
    default_host = "127.0.0.1"
    options: ClassVar[Mapping[str, Option]] = {
        "host": Option("127.0.0.1", core="host"),
        "metadata_server": Option("http://127.0.0.1:8080/metadata", core="metadata_server"),
        "master": Option("127.0.0.1:50051", core="master"),
        "segment": Option(512 * _MIB, core="segment"),
        "localbuf": Option(64 * _MIB, core="localbuf"),
        "proto": Option("tcp", core="proto"),
        "rdma": Option("", core="rdma"),
        "timeout_s": Option(10.0, core="timeout_s"),
        "memory_pool_size": Option(512 * _MIB, core="pool_bytes", low=1),
    }

    @staticmethod
    def client(extra: Mapping[str, Any]) -> ObjectStore:
        """A client of the store."""
        return stores.mooncake_client(parse_options(MooncakeStoreOptions, "mooncake_store", extra))

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        self._core = {**core, "host": self.host}
        return super()._node_options(self._core)

    def __getattr__(self, name: str) -> Any:
        """The options as attributes, by the reference's names: master, segment, localbuf, proto, rdma, metadata."""
        if name in ("master", "segment", "localbuf", "proto", "rdma"):
            return self.values[name]
        if name == "metadata":
            return self.values["metadata_server"]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


MooncakeConnector = MooncakeStoreConnector
"""The reference's older name."""


class YuanrongConnector(StoredConnector):
    """Objects in openYuanrong's data system, whose worker must run on this host."""

    kind = "yuanrong"
    backends = frozenset({"inline", "store"})
    options: ClassVar[Mapping[str, Option]] = {
        "host": Option("127.0.0.1", core="host"),
        "port": Option(35001, low=1, high=65535),
        "cluster": Option("", core="cluster"),
        "get_sub_timeout_ms": Option(1000, core="get_sub_timeout_ms", low=-(2.0**31), high=2.0**31 - 1),
        "timeout_s": Option(10.0, core="timeout_s"),
        "memory_pool_size": Option(512 * _MIB, core="pool_bytes", low=1),
    }

    @staticmethod
    def client(extra: Mapping[str, Any]) -> ObjectStore:
        """A client of the store."""
        return stores.yuanrong_client(parse_options(YuanrongOptions, "yuanrong", extra))

    @property
    def get_sub_timeout_ms(self) -> int:
        """How long a read waits for an object that is not there yet; never below 0."""
        return max(0, int(self.values["get_sub_timeout_ms"]))

    def _own_host(self) -> str:
        """``host`` is the data system's; peers reach this one where it is reached."""
        loopback = self.values["host"] in ("127.0.0.1", "localhost", "::1")
        return "127.0.0.1" if loopback else detect_local_ip()

    def _node_options(self, core: Mapping[str, JsonValue]) -> NodeOptions:
        fixed = {"port": self.values["port"], "get_sub_timeout_ms": self.get_sub_timeout_ms}
        self._core = {**core, **fixed}
        return super()._node_options(self._core)


BY_NAME: Mapping[str, type[SharedMemoryConnector | RoleConnector | StoredConnector | CudaIpcConnector]] = {
    "SharedMemoryConnector": SharedMemoryConnector,
    "CudaIpcConnector": CudaIpcConnector,
    "GrpcConnector": GrpcConnector,
    "MooncakeTransferEngineConnector": MooncakeTransferEngineConnector,
    "MooncakeStoreConnector": MooncakeStoreConnector,
    "MooncakeConnector": MooncakeConnector,
    "NixlConnector": NixlConnector,
    "MoriTransferEngineConnector": MoriTransferEngineConnector,
    "YuanrongConnector": YuanrongConnector,
    "YuanrongTransferEngineConnector": YuanrongTransferEngineConnector,
}
"""Names in files."""
