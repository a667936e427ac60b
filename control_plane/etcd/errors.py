"""What can go wrong with etcd, and what it means for the caller.

::

    OmniError
    ├── UnavailableError
    │   ├── EtcdUnavailable      no member answered in time; a write was surely not applied
    │   ├── WriteOutcomeUnknown  the write may or may not have been applied: read before you repeat it
    │   └── WatchCancelled       the server ended the watch for a reason that reconnecting does not cure
    ├── FailedPreconditionError
    │   └── Compacted            that history is gone: list again, then watch from the list's revision
    ├── NotFoundError
    │   └── LeaseLost            the lease is gone, its keys with it: grant a new one
    └── UnauthenticatedError
        └── AuthFailed           user name and password are not accepted

All other refusals (permission denied, malformed request, out of space) are the plain errors of ``omnicore.errors``.
"""

from __future__ import annotations

import grpc
import grpc.aio

from omnicore import errors

# Codes behind which a member, or the way to it, is in trouble: another member, or the same one later, may do better.
# UNKNOWN, INTERNAL and CANCELLED are what calls in flight get from a server that is killed or stopping.
TROUBLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.CANCELLED,
    }
)

# After these the request was surely not applied. The first three come from gRPC before anything is sent, the others
# from etcd before it proposes (api/v3rpc/rpctypes/error.go, server/etcdserver/v3_server.go). "request timed out" and
# "server stopped" are not here: etcd says them after proposing.
_NOT_APPLIED = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "empty address list",
    "etcdserver: no leader",
    "etcdserver: not leader",
    "etcdserver: too many requests",
    "etcdserver: not capable",
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "etcdserver: user name is empty",
)
_STALE_TOKEN = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    # What a member says if it does not know a token at all, after a restart say.
    "etcdserver: user name is empty",
)
_BAD_LOGIN = ("etcdserver: authentication failed", "etcdserver: user name not found")


class EtcdUnavailable(errors.UnavailableError):
    """No member answered within the time allowed. If it was a write, it was surely not applied."""

    default_reason = "ETCD_UNAVAILABLE"


class WriteOutcomeUnknown(errors.UnavailableError):
    """A write was sent and its answer never came: it may or may not have been applied, now or soon.

    Put an owner's nonce into the value and read it back before writing again.
    """

    default_reason = "ETCD_WRITE_OUTCOME_UNKNOWN"


class WatchCancelled(errors.UnavailableError):
    """The server ended a watch, and reconnecting does not cure the reason."""

    default_reason = "ETCD_WATCH_CANCELLED"


class Compacted(errors.FailedPreconditionError):
    """History before ``compact_revision`` is gone (0: the server did not say from where on it is there).

    Also raised if the store is *behind* the revision asked for, which means that it was replaced or restored: in both
    cases list again and watch from the list's revision.
    """

    default_reason = "ETCD_COMPACTED"

    def __init__(self, compact_revision: int, message: str = "") -> None:
        super().__init__(
            message or f"etcd history before revision {compact_revision or '(unknown)'} is gone: list again",
            metadata={"compact_revision": compact_revision},
        )
        self.compact_revision = compact_revision


class LeaseLost(errors.NotFoundError):
    """The lease expired or was revoked; etcd deleted its keys. Zero for ``lease_id``: the server did not say which."""

    default_reason = "ETCD_LEASE_LOST"

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"etcd lease {lease_id:x} is gone", metadata={"lease_id": f"{lease_id:x}"})
        self.lease_id = lease_id


class AuthFailed(errors.UnauthenticatedError):
    """etcd does not accept the user name and password."""

    default_reason = "ETCD_AUTH_FAILED"


def surely_not_applied(details: str) -> bool:
    """True if a call that failed with these details cannot have changed anything."""
    return any(text in details for text in _NOT_APPLIED)


def is_stale_token(details: str) -> bool:
    """True if a new token cures this failure."""
    return any(text in details for text in _STALE_TOKEN)


def worth_retrying(code: grpc.StatusCode, details: str) -> bool:
    """True if the trouble is with the member or the way to it, rather than with the request."""
    return code in TROUBLE or "etcdserver: too many requests" in details


def refusal(error: grpc.aio.AioRpcError, lease_id: int = 0) -> errors.OmniError:
    """The typed error behind an answer that retrying does not change. ``lease_id``: the lease that was named."""
    details = error.details() or ""
    if "requested lease not found" in details:
        return LeaseLost(lease_id)
    if "required revision has been compacted" in details:
        return Compacted(0)
    if any(text in details for text in _BAD_LOGIN):
        return AuthFailed(details)
    return errors.from_rpc_error(error)
