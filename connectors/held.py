"""What a ``HandleStore`` holds of each handle, and what it asks of keys, consumers and tokens. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from connectors.places import ConsumerPlaces
from omni.v1 import transfer_pb2
from omnicore import errors

MAX_CONSUMER_BYTES = 128
"""Of a consumer's name: they are kept as long as the handle."""
_TOKEN_BYTES = 16  # 128 bits of keyed BLAKE2, which is a MAC by itself: not guessable within a handle's life


def edge_key(edge: transfer_pb2.EdgeRef, sequence: int) -> str:
    """The key under which workers publish chunk ``sequence`` of a flow: unique per request, attempt, edge and chunk."""
    return f"{edge.request_id}/{edge.attempt}/{edge.from_stage}-{edge.to_stage}/{sequence}"


@dataclasses.dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of a store, or of one kind of connector in it."""

    handles: int = 0
    size_bytes: int = 0
    """Data of those handles."""
    claims: int = 0
    """Claims not yet released."""
    draining: int = 0
    """Handles that are gone but whose data somebody still reads."""


Elsewhere = Callable[[], AbstractAsyncContextManager[memoryview]]
"""How to get at data that does not lie in this process's memory: it is valid inside the context."""


class FreedHandle(Protocol):
    """Hears of handles that are gone."""

    def __call__(self, handle: transfer_pb2.TransferHandle, kind: str, held_s: float) -> None:
        """``handle``, of a connector ``kind``, was published ``held_s`` seconds ago. Must not raise."""


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """A handle that is published."""

    handle: transfer_pb2.TransferHandle
    kind: str
    data: memoryview | Elsewhere
    on_free: Callable[[], None]
    deadline_s: float
    """Until when it is kept if nobody claims it."""
    places: ConsumerPlaces
    readers: int = 0
    gone: bool = False


class Tokens:
    """Makes the tokens of one store. Used under its lock."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._serial = 0

    def next(self, key: str, epoch: int) -> bytes:
        """The token of a handle. Its serial number makes that of a key which is used again another one."""
        self._serial += 1
        message = f"{self._serial}/{epoch}/{key}".encode()
        return hashlib.blake2b(message, key=self._secret, digest_size=_TOKEN_BYTES).digest()


def check_token(handle: transfer_pb2.TransferHandle, token: bytes) -> None:
    """Raises ``PermissionDeniedError`` for another one than that of ``handle``."""
    if not hmac.compare_digest(handle.token, token):
        raise errors.PermissionDeniedError(
            f"the token does not open {handle.key!r}", reason="WRONG_TOKEN", metadata={"key": handle.key}
        )


def check_put(key: str, edge: transfer_pb2.EdgeRef, sequence: int, consumers: int) -> None:
    """Raises ``InvalidRequestError`` that names the field which nothing can be published with."""
    if not key:
        raise errors.InvalidRequestError.field("key", "must not be empty")
    if not edge.request_id:
        raise errors.InvalidRequestError.field("edge.request_id", "must not be empty")
    if not 0 <= sequence < 2**64:
        raise errors.InvalidRequestError.field("sequence", f"must be 0 to 18446744073709551615, got {sequence}")
    if not 1 <= consumers < 2**32:
        raise errors.InvalidRequestError.field("consumers", f"must be 1 to 4294967295, got {consumers}")


def check_consumer(consumer: str) -> None:
    """Raises ``InvalidRequestError`` for a name that is too long."""
    if len(consumer.encode()) > MAX_CONSUMER_BYTES:
        raise errors.InvalidRequestError.field("consumer", f"must be at most {MAX_CONSUMER_BYTES} bytes long")


def not_found(key: str, why: str, reason: str) -> errors.NotFoundError:
    """What to raise for ``key``."""
    return errors.NotFoundError(f"no data under {key!r}: {why}", reason=reason, metadata={"key": key})
