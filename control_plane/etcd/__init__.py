"""etcd: our own asyncio client, and a launcher for a private server.

Enters here: etcd's wire format and nothing else of the project. Must not: replicas, pipelines, or anything that knows
what the keys mean. Only this package talks to etcd.
"""

from control_plane.etcd.client import EtcdClient
from control_plane.etcd.embedded import EmbeddedEtcd
from control_plane.etcd.endpoints import EtcdCredentialFiles, EtcdCredentials
from control_plane.etcd.errors import (
    AuthFailed,
    Compacted,
    EtcdUnavailable,
    LeaseLost,
    WatchCancelled,
    WriteOutcomeUnknown,
)
from control_plane.etcd.model import (
    Compare,
    DeleteResult,
    EventKind,
    KeyValue,
    Lease,
    LeaseTtl,
    Member,
    MemberStatus,
    Op,
    PutResult,
    RangeResult,
    TxnResult,
    WatchBatch,
    WatchEvent,
    create_revision_is,
    mod_revision_is,
    op_delete,
    op_delete_prefix,
    op_get,
    op_put,
    value_is,
)

__all__ = [
    "AuthFailed",
    "Compacted",
    "Compare",
    "DeleteResult",
    "EmbeddedEtcd",
    "EtcdClient",
    "EtcdCredentialFiles",
    "EtcdCredentials",
    "EtcdUnavailable",
    "EventKind",
    "KeyValue",
    "Lease",
    "LeaseLost",
    "LeaseTtl",
    "Member",
    "MemberStatus",
    "Op",
    "PutResult",
    "RangeResult",
    "TxnResult",
    "WatchBatch",
    "WatchCancelled",
    "WatchEvent",
    "WriteOutcomeUnknown",
    "create_revision_is",
    "mod_revision_is",
    "op_delete",
    "op_delete_prefix",
    "op_get",
    "op_put",
    "value_is",
]
