"""Every error a caller can see, and what it is on each protocol.

::

    OmniError
    ├── InvalidRequestError        INVALID_ARGUMENT     400  invalid_request_error  exit 2
    ├── UnauthenticatedError       UNAUTHENTICATED      401  authentication_error   exit 3
    ├── PermissionDeniedError      PERMISSION_DENIED    403  permission_error       exit 3
    ├── NotFoundError              NOT_FOUND            404  not_found_error        exit 4
    ├── AlreadyExistsError         ALREADY_EXISTS       409  conflict_error         exit 5
    ├── ConflictError              ABORTED              409  conflict_error         exit 5
    ├── FailedPreconditionError    FAILED_PRECONDITION  400  invalid_request_error  exit 5
    ├── ResourceExhaustedError     RESOURCE_EXHAUSTED   429  rate_limit_error       exit 6
    ├── RequestCancelledError      CANCELLED            499  cancelled_error        exit 130
    ├── UnimplementedError         UNIMPLEMENTED        501  invalid_request_error  exit 7
    ├── UnavailableError           UNAVAILABLE          503  service_unavailable    exit 6
    ├── DeadlineExceededError      DEADLINE_EXCEEDED    504  timeout_error          exit 6
    ├── DataLossError              DATA_LOSS            500  server_error           exit 1
    └── InternalError              INTERNAL             500  server_error           exit 1

``TABLE`` holds the same rows; nothing else in the project maps errors. On the wire an error is a ``google.rpc.Status``
whose details always carry ``ErrorInfo{reason, domain, metadata}`` (AIP-193), ``BadRequest`` where fields are wrong and
``RetryInfo`` where waiting helps. Only ``UNAVAILABLE`` is ever retried on the caller's behalf.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from omnicore.durations import to_duration, to_seconds

DOMAIN = "omniplane"
_STATUS_DETAILS_KEY = "grpc-status-details-bin"  # gRPC's own name for a serialized google.rpc.Status in the trailers

# Errors repeat what callers sent, and travel in HTTP/2 trailers, where peers may refuse more than 8 KiB (gRPC's
# default). All of one error stays below: the message goes twice, percent-encoded and in base64.
MAX_TEXT_BYTES = 1024
"""Of a message, and of a violation's description."""
MAX_NAME_BYTES = 256
"""Of a metadata value, and of a violation's path."""


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRow:
    """One error on every protocol."""

    code: grpc.StatusCode
    http_status: int
    openai_type: str
    exit_code: int


@dataclasses.dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the caller's input that is wrong: its path, and what is accepted."""

    field: str
    description: str


class OmniError(Exception):
    """Base of all errors that a caller sees.

    ``reason`` is UPPER_SNAKE, at most 63 characters, and stable: programs test it. ``metadata`` repeats every dynamic
    part of the message. ``retry_after_s`` says when to come back, if waiting helps. Texts that are too long are cut.
    """

    row: ClassVar[ErrorRow] = ErrorRow(grpc.StatusCode.INTERNAL, 500, "server_error", 1)
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, object] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        message = _clip(message, MAX_TEXT_BYTES)
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = {key: _clip(str(value), MAX_NAME_BYTES) for key, value in (metadata or {}).items()}
        self.violations = tuple(
            FieldViolation(_clip(v.field, MAX_NAME_BYTES), _clip(v.description, MAX_TEXT_BYTES)) for v in violations
        )
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC code."""
        return self.row.code

    def to_status(self) -> status_pb2.Status:
        """This error as it travels: code, message and details."""
        details: list[any_pb2.Any] = []

        def add(message: Any) -> None:
            packed = any_pb2.Any()
            packed.Pack(message)
            details.append(packed)

        add(error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata))
        if self.violations:
            fields = [
                error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                for v in self.violations
            ]
            add(error_details_pb2.BadRequest(field_violations=fields))
        if self.retry_after_s is not None:
            add(error_details_pb2.RetryInfo(retry_delay=to_duration(self.retry_after_s)))
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=details)


class InvalidRequestError(OmniError):
    """The caller's input is wrong; ``violations`` name the fields."""

    row = ErrorRow(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", 2)
    default_reason = "INVALID_REQUEST"

    @classmethod
    def field(cls, field: str, description: str, *, reason: str | None = None) -> InvalidRequestError:
        """An error for one wrong field."""
        return cls(f"{field}: {description}", reason=reason, violations=[FieldViolation(field, description)])


class UnauthenticatedError(OmniError):
    """No credentials, or wrong ones."""

    row = ErrorRow(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error", 3)
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(OmniError):
    """Good credentials that do not allow this."""

    row = ErrorRow(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error", 3)
    default_reason = "PERMISSION_DENIED"


class NotFoundError(OmniError):
    """What the caller named does not exist."""

    row = ErrorRow(grpc.StatusCode.NOT_FOUND, 404, "not_found_error", 4)
    default_reason = "NOT_FOUND"


class AlreadyExistsError(OmniError):
    """What the caller wants to create exists."""

    row = ErrorRow(grpc.StatusCode.ALREADY_EXISTS, 409, "conflict_error", 5)
    default_reason = "ALREADY_EXISTS"


class ConflictError(OmniError):
    """Somebody else changed it meanwhile."""

    row = ErrorRow(grpc.StatusCode.ABORTED, 409, "conflict_error", 5)
    default_reason = "CONFLICT"


class FailedPreconditionError(OmniError):
    """The thing named is not in a state that allows this."""

    row = ErrorRow(grpc.StatusCode.FAILED_PRECONDITION, 400, "invalid_request_error", 5)
    default_reason = "FAILED_PRECONDITION"


class ResourceExhaustedError(OmniError):
    """Over a limit; ``retry_after_s`` says when to come back."""

    row = ErrorRow(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", 6)
    default_reason = "RESOURCE_EXHAUSTED"


class RequestCancelledError(OmniError):
    """The request was aborted."""

    row = ErrorRow(grpc.StatusCode.CANCELLED, 499, "cancelled_error", 130)
    default_reason = "CANCELLED"


class UnimplementedError(OmniError):
    """This engine, connector or server does not do that."""

    row = ErrorRow(grpc.StatusCode.UNIMPLEMENTED, 501, "invalid_request_error", 7)
    default_reason = "UNIMPLEMENTED"


class UnavailableError(OmniError):
    """Not now; the only error that is retried on the caller's behalf."""

    row = ErrorRow(grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable", 6)
    default_reason = "UNAVAILABLE"


class DeadlineExceededError(OmniError):
    """It took longer than it was allowed to."""

    row = ErrorRow(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error", 6)
    default_reason = "DEADLINE_EXCEEDED"


class DataLossError(OmniError):
    """Data is gone or does not match its checksum or length."""

    row = ErrorRow(grpc.StatusCode.DATA_LOSS, 500, "server_error", 1)
    default_reason = "DATA_LOSS"


class InternalError(OmniError):
    """A fault of ours."""


TABLE: dict[grpc.StatusCode, type[OmniError]] = {
    cls.row.code: cls
    for cls in (
        InvalidRequestError,
        UnauthenticatedError,
        PermissionDeniedError,
        NotFoundError,
        AlreadyExistsError,
        ConflictError,
        FailedPreconditionError,
        ResourceExhaustedError,
        RequestCancelledError,
        UnimplementedError,
        UnavailableError,
        DeadlineExceededError,
        DataLossError,
        InternalError,
    )
}
_BY_NUMBER: dict[int, type[OmniError]] = {code.value[0]: cls for code, cls in TABLE.items()}


def from_status(status: status_pb2.Status) -> OmniError:
    """The typed error behind a ``google.rpc.Status``; codes without a row of their own become ``InternalError``."""
    cls = _BY_NUMBER.get(status.code, InternalError)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = to_seconds(retry.retry_delay)
    return cls(
        status.message or code_pb2.Code.Name(status.code),
        reason=info.reason or None,
        metadata=dict(info.metadata),
        violations=[FieldViolation(v.field, v.description) for v in bad.field_violations],
        retry_after_s=retry_after_s,
    )


def from_rpc_error(error: grpc.aio.AioRpcError) -> OmniError:
    """The typed error behind a failed call, from its trailers if they carry details that can be read."""
    trailing: Iterable[tuple[str, str | bytes]] = cast("Any", error.trailing_metadata()) or ()
    for key, value in trailing:
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            with contextlib.suppress(DecodeError):
                status.ParseFromString(value)
                if status.code == error.code().value[0]:
                    return from_status(status)
    return TABLE.get(error.code(), InternalError)(error.details() or error.code().name)


def from_exception(error: BaseException) -> OmniError:
    """Any exception as a typed error. Unknown ones become ``InternalError`` and show only their type to the caller."""
    if isinstance(error, OmniError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc_error(error)
    if isinstance(error, TimeoutError):
        return DeadlineExceededError(str(error) or "deadline exceeded")
    return InternalError(f"internal error ({type(error).__name__})")


def trailers(error: OmniError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that carries the details of ``error``."""
    return ((_STATUS_DETAILS_KEY, error.to_status().SerializeToString()),)


def _clip(text: str, limit_bytes: int) -> str:
    """``text``, or as much of its beginning as fits with an ellipsis behind it."""
    if len(text) * 4 <= limit_bytes or len(encoded := text.encode(errors="replace")) <= limit_bytes:
        return text
    return encoded[: limit_bytes - 3].decode(errors="ignore") + "…"
