"""Addresses of senders, for deployments that compute them on both ends instead of passing them on.

Within one purpose no two workers of a host share a port as long as stages are below 16 and ranks below 64; what lies
outside is an error, not another worker's port. Purposes are ranges that overlap from rank 6 on, as in the reference:
give each its own base there.
"""

from __future__ import annotations

import socket
from typing import Final, Literal

from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

KV_RANK_PORT_STRIDE: Final = 16
"""Between the ranks of a replica, so more than the stages of a pipeline."""
KV_REPLICA_PORT_STRIDE: Final = 1024
"""Between the replicas of a stage: 64 ranks."""
KV_TRANSFER_PORT_OFFSET: Final = 100
"""KV caches beside requests that are forwarded from the same base port."""
MAX_RANKS: Final = KV_REPLICA_PORT_STRIDE // KV_RANK_PORT_STRIDE
DEFAULT_PORT: Final = 50051

Purpose = Literal["request_forwarding", "kv_transfer", "orchestrator"]
_OFFSETS: Final[dict[str, int]] = {
    "request_forwarding": 0,
    "kv_transfer": KV_TRANSFER_PORT_OFFSET,
    "orchestrator": 200,
}
AUTO_HOSTS: Final = frozenset({"", "auto", "*", "0.0.0.0", "::"})
"""Hosts that mean: find out."""


def connector_port(
    base_port: int, *, purpose: Purpose = "kv_transfer", from_stage: int, local_rank: int = 0, replica_id: int = 0
) -> int:
    """The port of a sender: base + purpose + replica · 1024 + rank · 16 + stage. Raises ``InvalidRequestError`` naming
    what is out of range."""
    if purpose not in _OFFSETS:
        raise errors.InvalidRequestError.field("purpose", f"must be one of {', '.join(_OFFSETS)}, got {purpose!r}")
    for field, value, limit in (
        ("from_stage", from_stage, KV_RANK_PORT_STRIDE),
        ("local_rank", local_rank, MAX_RANKS),
        ("replica_id", replica_id, 65536 // KV_REPLICA_PORT_STRIDE),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < limit:
            raise errors.InvalidRequestError.field(field, f"must be 0 to {limit - 1}, got {value!r}")
    port = (
        base_port
        + _OFFSETS[purpose]
        + replica_id * KV_REPLICA_PORT_STRIDE
        + local_rank * KV_RANK_PORT_STRIDE
        + from_stage
    )
    if not 1 <= port <= 65535:
        raise errors.InvalidRequestError.field(
            "zmq_port", f"base {base_port} leads to port {port}, which must be 1 to 65535", reason="PORT_OUT_OF_RANGE"
        )
    return port


def detect_local_ip() -> str:
    """The address of this host that others reach, from its routing table; nothing is sent. Without a route, what the
    host name stands for, else 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: whatever leads out
            return str(probe.getsockname()[0])
        except OSError as error:
            reason = error
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "127.0.0.1"
    _log.info("no route out of this host", address=found, reason=str(reason))
    return found


def resolve_host(host: str) -> str:
    """``host``, or this host's address for "auto" and the wildcards."""
    return detect_local_ip() if host.lower() in AUTO_HOSTS else host
