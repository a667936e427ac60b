"""The interface of vLLM-Omni's connectors, as programs were written against it.

Synchronous, from any thread. ``put`` and ``get`` say with their results that something did not work, and never with an
exception for anything that happens while running: what happened is in the log and under ``last_error`` of ``health``.
"""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, ClassVar, Self

from connectors.reference import values
from omnicore import errors

Metadata = dict[str, Any]
"""What ``put`` returns for a receiver's ``get``: plain values, so that it may travel by any means."""
Stage = str | int
"""A stage's id; 1 and "1" are the same stage."""

_KEY_SEPARATOR = "@"


class OmniConnectorBase(abc.ABC):
    """One end of a way between stages."""

    supports_raw_data: ClassVar[bool] = False
    """Tensors and bytes arrive as a ``ManagedBuffer``, which the receiver must release."""
    needs_role: ClassVar[bool] = False
    """It has a sender's end, which listens at an address of its own, and a receiver's, which must be told that
    address."""

    @abc.abstractmethod
    def put(self, from_stage: Stage, to_stage: Stage, put_key: str, data: Any) -> tuple[bool, int, Metadata | None]:
        """Publish ``data``: (done, bytes, what a receiver may be told), or (False, 0, None)."""

    @abc.abstractmethod
    def get(
        self, from_stage: Stage, to_stage: Stage, get_key: str, metadata: Metadata | None = None
    ) -> tuple[Any, int] | None:
        """The data of a key and its bytes, or None if it is not there, or not any more; within a bounded time."""

    @abc.abstractmethod
    def cleanup(self, request_id: str, from_stage: Stage | None = None, to_stage: Stage | None = None) -> None:
        """Free what this connector has published for a request, or with both stages under exactly this key."""

    @abc.abstractmethod
    def health(self) -> dict[str, Any]:
        """How it is, who it is, and what it has done so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything. May be called more than once."""

    def get_with_deadline(
        self,
        from_stage: Stage,
        to_stage: Stage,
        get_key: str,
        metadata: Metadata | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """``get`` that gives up when ``time.monotonic()`` has reached ``deadline``."""
        raise errors.UnimplementedError(f"{type(self).__name__} has no get_with_deadline")

    def abandon_get(self, get_key: str) -> None:  # noqa: B027 -- may be left as it is
        """Give up looking for a key. Nothing is kept between looks, so there is nothing to do."""

    def reap_consumed(self) -> None:  # noqa: B027 -- may be left as it is
        """Forget what others have consumed. They say so themselves, so there is nothing to do."""

    @staticmethod
    def serialize_obj(obj: Any) -> bytes:
        """An object as bytes that carry no code. Raises ``InvalidRequestError`` naming what cannot be sent."""
        return values.serialize(obj)

    @staticmethod
    def deserialize_obj(data: bytes) -> Any:
        """The object again. Raises ``DataLossError`` for bytes that are not one."""
        return values.deserialize(data)

    @staticmethod
    def _make_key(key: str, from_stage: Stage, to_stage: Stage) -> str:
        """The key under which data of an edge is known between connectors."""
        return edge_key(key, from_stage, to_stage)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def stage_name(stage: Stage, field: str = "stage") -> str:
    """A stage's id as text. Raises ``InvalidRequestError`` for what cannot be one."""
    if isinstance(stage, bool) or not isinstance(stage, str | int) or stage == "":
        raise errors.InvalidRequestError.field(field, f"must be a stage's id, got {stage!r}")
    return str(stage)


def stage_number(stage: Stage) -> int:
    """A stage's id as a number; 0 for a name. Raises as ``stage_name``."""
    name = stage_name(stage)
    return int(name) if name.isdecimal() and len(name) < 10 else 0


def edge_key(key: str, from_stage: Stage, to_stage: Stage) -> str:
    """``KEY@FROM_TO``, the reference's form."""
    return f"{key}{_KEY_SEPARATOR}{stage_name(from_stage, 'from_stage')}_{stage_name(to_stage, 'to_stage')}"


def plain_key(key: str) -> str:
    """What ``edge_key`` was made of."""
    return key.rpartition(_KEY_SEPARATOR)[0] or key


def belongs_to(key: str, request_id: str) -> bool:
    """Whether an edge key is one of a request's.

    It is if it is the request id itself or has it before or after a ``_``, as chunk and KV keys have
    (``req1_0_3``, ``omni_0_to_1_kv_cache_req1``). ``req11`` is not of ``req1``.
    """
    if key == request_id:
        return True
    plain = plain_key(key)
    return plain == request_id or plain.startswith(f"{request_id}_") or plain.endswith(f"_{request_id}")
