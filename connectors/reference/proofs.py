"""Who may ask for a key, and who may answer: HMACs over a secret that both ends of an edge have been given."""

from __future__ import annotations

import hmac
import secrets

from omni.v1 import reference_transfer_service_pb2 as pb
from omnicore import errors

NONCE_BYTES = 16
MAX_KEY_BYTES = 2048
"""The reference's keys are request ids with a few numbers."""
MAX_HANDLE_BYTES = 1024 * 1024
"""64 KiB inline, 64 KiB of facts, headers of 4096 tensors with names of some length."""


def ask(key: str, consumer: str, secret: bytes) -> pb.QueryRequest:
    """A request for a key."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    request = pb.QueryRequest(key=key, consumer=consumer, nonce=nonce)
    if secret:
        request.proof = _proof(secret, b"query", key.encode(), consumer.encode(), nonce)
    return request


def check_request(request: pb.QueryRequest, secret: bytes) -> None:
    """Raises ``InvalidRequestError`` for fields beyond their limits and ``PermissionDeniedError`` for a request that
    was made with another secret, or without the one that is needed."""
    if not 1 <= len(request.key.encode()) <= MAX_KEY_BYTES:
        raise errors.InvalidRequestError.field("key", f"must be 1 to {MAX_KEY_BYTES} bytes long")
    if not request.consumer:
        raise errors.InvalidRequestError.field("consumer", "required")
    if len(request.nonce) != NONCE_BYTES:
        raise errors.InvalidRequestError.field("nonce", f"must be {NONCE_BYTES} bytes long")
    if not secret:
        return
    wanted = _proof(secret, b"query", request.key.encode(), request.consumer.encode(), request.nonce)
    if not hmac.compare_digest(wanted, request.proof):
        raise errors.PermissionDeniedError(
            f"key {request.key!r} is given only to who has the secret of its edge", reason="WRONG_SECRET"
        )


def answer(request: pb.QueryRequest, handle: bytes, secret: bytes) -> pb.QueryResponse:
    """The handle, with the proof that its owner knows the secret."""
    response = pb.QueryResponse(handle=handle)
    if secret:
        response.proof = _proof(secret, b"answer", request.nonce, handle)
    return response


def check_answer(request: pb.QueryRequest, response: pb.QueryResponse, secret: bytes) -> None:
    """Raises ``PermissionDeniedError`` for an answer of somebody without the secret, ``DataLossError`` for one that is
    too large."""
    if len(response.handle) > MAX_HANDLE_BYTES:
        raise errors.DataLossError(f"the handle of {request.key!r} is larger than {MAX_HANDLE_BYTES} bytes")
    if secret and not hmac.compare_digest(_proof(secret, b"answer", request.nonce, response.handle), response.proof):
        raise errors.PermissionDeniedError(
            f"who answered for key {request.key!r} does not have the secret of its edge", reason="WRONG_SECRET"
        )


def _proof(secret: bytes, *parts: bytes) -> bytes:
    message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(secret, message, "sha256")
