"""What the deploy file may say under ``extra`` of a connector; anything else is an error that names the key."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from connectors.payload import JsonValue
from connectors.peers import DEFAULT_MAX_PEERS
from connectors.publish import MAX_INLINE_BYTES
from omnicore import errors

T = TypeVar("T")

_DEFAULT_PUT_WAIT_S = 10.0  # as long as a request waits for a replica


def _option(default: Any, *, low: float = 0, high: float = math.inf) -> Any:
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


@dataclasses.dataclass(frozen=True, slots=True)
class ShmOptions:
    """Options of the shared-memory connector."""

    pool_bytes: int = _option(0)
    """Size of the pool that this worker publishes into; 0: what the worker was started with."""
    shm_threshold_bytes: int = _option(MAX_INLINE_BYTES, high=MAX_INLINE_BYTES)
    """Payloads below this travel inside their handle."""
    put_wait_s: float = _option(_DEFAULT_PUT_WAIT_S)
    """How long ``put`` waits for room."""
    checksum: bool = False
    """Put a CRC-32 into every handle, which readers check."""
    max_peers: int = _option(DEFAULT_MAX_PEERS, low=1)
    """Pools of other workers that stay mapped while idle."""
    pin_memory: bool = False
    """Page-lock the pool for CUDA, where there is a device: tensors of GPUs are copied into it at full speed."""
    in_place_bytes: int = _option(0)
    """Payloads from here on stay in the producer's own memory, which must not change until they are released; peers
    copy them out of that process. 0: never."""


@dataclasses.dataclass(frozen=True, slots=True)
class GrpcOptions:
    """Options of the connector of last resort."""

    pool_bytes: int = _option(256 * 1024 * 1024)
    """Most bytes that are published and not yet released; taken only when needed."""
    inline_bytes: int = _option(MAX_INLINE_BYTES, high=MAX_INLINE_BYTES)
    """Payloads below this travel inside their handle."""
    put_wait_s: float = _option(_DEFAULT_PUT_WAIT_S)
    """How long ``put`` waits for room."""
    checksum: bool = False
    """Put a CRC-32 into every handle, which readers check."""
    max_fetch_bytes: int = _option(4 * 1024**3, low=1)
    """Larger handles are refused before any byte is asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of every connector over an object store."""

    pool_bytes: int = _option(512 * 1024 * 1024, low=1)
    """Most bytes that this worker has in the store and not yet removed."""
    inline_bytes: int = _option(MAX_INLINE_BYTES, high=MAX_INLINE_BYTES)
    """Payloads below this travel inside their handle."""
    put_wait_s: float = _option(_DEFAULT_PUT_WAIT_S)
    """How long ``put`` waits for room, here or in the store."""
    timeout_s: float = _option(10.0, low=0.1)
    """How long one write or read may take."""
    threads: int = _option(4, low=1, high=64)
    """Calls to the store at once."""
    checksum: bool = False
    """Put a CRC-32 into every handle, which readers check."""


@dataclasses.dataclass(frozen=True, slots=True)
class MooncakeStoreOptions(StoreOptions):
    """Options of the Mooncake Store. The names up to ``segment`` are those of the reference connector, and so are their
    defaults; sizes are in bytes."""

    host: str = "127.0.0.1"
    """This worker's address, at which others read what lies in its segment."""
    master: str = "127.0.0.1:50051"
    """ "host:port" of ``mooncake_master``."""
    metadata_server: str = "http://127.0.0.1:8080/metadata"
    """Where clients find each other: a URL, or "P2PHANDSHAKE" to do without."""
    proto: str = "tcp"
    """Transport: "tcp" or "rdma"."""
    rdma: str = ""
    """RDMA devices, separated by commas."""
    localbuf: int = _option(64 * 1024 * 1024)
    """Staging memory that is kept for reuse."""
    segment: int = _option(512 * 1024 * 1024)
    """Memory that this worker lends to the store; 0: none."""
    replica_num: int = _option(1, low=1)
    """Copies of every object; each lies in another worker's segment. Fewer than asked for is an error."""
    hard_pin: bool = True
    """Objects are never evicted. Without it the store may drop what was put, which fits caches only."""


@dataclasses.dataclass(frozen=True, slots=True)
class YuanrongOptions(StoreOptions):
    """Options of openYuanrong's key-value store."""

    host: str = "127.0.0.1"
    """Host of the datasystem worker, which must be this one."""
    port: int = _option(31501, low=1, high=65535)
    """Port of the datasystem worker."""
    cluster: str = ""
    """Name of the cluster of that worker, the same on all hosts; empty: "host:port", for a cluster of one."""
    get_sub_timeout_ms: int = _option(1000, high=2**31 - 1)
    """How long a read waits for an object that is not there yet, in milliseconds."""
    connect_timeout_ms: int = _option(3000, low=1, high=2**31 - 1)
    """How long connecting to the worker may take, in milliseconds."""
    object_ttl_s: int = _option(3900, high=2**32 - 1)
    """Age at which the store drops an object whose owner has died, more than a handle can live; 0: never."""


@dataclasses.dataclass(frozen=True, slots=True)
class CudaIpcOptions:
    """Options of the connector between GPUs of one host."""

    pool_bytes: int = _option(0)
    """Device memory that this worker publishes into; 0: as much as the worker was started with."""
    device: int = _option(0)
    """Number of the device among those that the worker sees."""
    inline_bytes: int = _option(0, high=MAX_INLINE_BYTES)
    """Payloads below this travel inside their handle, and arrive in host memory."""
    put_wait_s: float = _option(_DEFAULT_PUT_WAIT_S)
    """How long ``put`` waits for room."""
    checksum: bool = False
    """Put a CRC-32 into every handle, which readers check: both copy all data to the host for it."""
    max_peers: int = _option(DEFAULT_MAX_PEERS, low=1)
    """Pools of other workers that stay open while idle."""
    to_host: bool = False
    """Give consumers numpy copies in host memory instead of views of device memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class OneSidedOptions:
    """Options of every connector over a transfer engine."""

    pool_bytes: int = _option(0)
    """Size of the registered pool that this worker publishes into; 0: what the worker was started with."""
    receive_pool_bytes: int = _option(256 * 1024 * 1024)
    """Size of the registered pool where reads arrive; 0: a worker that reads nothing."""
    inline_bytes: int = _option(MAX_INLINE_BYTES, high=MAX_INLINE_BYTES)
    """Payloads below this travel inside their handle."""
    put_wait_s: float = _option(_DEFAULT_PUT_WAIT_S)
    """How long ``put`` waits for room."""
    get_timeout_s: float = _option(30.0, low=0.001)
    """How long ``get`` waits for room to receive, and then for the bytes."""
    checksum: bool = False
    """Put a CRC-32 into every handle, which readers check."""


@dataclasses.dataclass(frozen=True, slots=True)
class MooncakeOptions(OneSidedOptions):
    """Options of the Mooncake transfer engine."""

    protocol: str = "tcp"
    """tcp, rdma or nvlink; one for all engines of a process."""
    host: str = "auto"
    """Where peers reach this worker's engine; auto: the address that leads out of this host."""
    device_name: str = ""
    """RDMA devices, separated by commas; empty: all."""


@dataclasses.dataclass(frozen=True, slots=True)
class NixlOptions(OneSidedOptions):
    """Options of NIXL; how bytes travel is UCX's affair, in the environment (UCX_TLS, UCX_NET_DEVICES)."""


@dataclasses.dataclass(frozen=True, slots=True)
class MoriOptions(OneSidedOptions):
    """Options of Mori."""

    backend: str = "rdma"
    """rdma, or between GPUs xgmi or fabric."""
    host: str = "auto"
    """Where peers reach this worker's engine; auto: the address that leads out of this host."""
    port: int = _option(0, high=65535)
    """Where it listens, for peers to connect; 0: any. One that is taken is an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class YuanrongTransferEngineOptions(OneSidedOptions):
    """Options of Yuanrong's TransferEngine."""

    host: str = "auto"
    """Where peers reach this worker's engine; auto: the address that leads out of this host."""
    port: int = _option(0, high=65535)
    """Where it listens, for peers to connect; 0: any. One that is taken is an error."""
    device: str = "auto"
    """npu:N; auto: the first that this worker sees."""


def parse_options(cls: type[T], kind: str, extra: Mapping[str, JsonValue]) -> T:
    """``extra`` as a ``cls``, whose fields are ``bool``, ``int``, ``float`` or ``str``. Raises ``InvalidRequestError``
    for an unknown key, with the nearest one, for a wrong type and for a number out of range."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in extra.items():
        path = f"connectors.{kind}.extra.{key}"
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f", did you mean {near[0]!r}?" if near else f"; accepted: {', '.join(fields)}"
            raise errors.InvalidRequestError.field(path, f"no such option{hint}", reason="UNKNOWN_OPTION")
        values[key] = _converted(path, value, hints[key], fields[key].metadata)
    return cls(**values)


def _converted(path: str, value: JsonValue, hint: Any, limits: Mapping[str, float]) -> Any:
    if hint is bool:
        if not isinstance(value, bool):
            raise errors.InvalidRequestError.field(path, f"must be true or false, got {value!r}")
        return value
    if hint is str:
        if not isinstance(value, str):
            raise errors.InvalidRequestError.field(path, f"must be a string, got {value!r}")
        return value
    # Numbers that have been through a protobuf Struct are floats: 65536.0 is a whole number.
    if isinstance(value, bool) or not isinstance(value, int | float) or (hint is int and not float(value).is_integer()):
        wanted = "a whole number" if hint is int else "a number"
        raise errors.InvalidRequestError.field(path, f"must be {wanted}, got {value!r}")
    if not limits["low"] <= value <= limits["high"]:
        raise errors.InvalidRequestError.field(path, f"must be {limits['low']:g} to {limits['high']:g}, got {value:g}")
    return hint(value)
