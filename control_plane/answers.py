"""An operator's request has its effect once, however often and wherever it is sent (AIP-155).

The answer to a request is written in the transaction of its effect, under a key made of the request's id, on the
condition that this key does not exist. So of two tries one has the effect, and the other one, finding the key, gives
the same answer: also at another control plane, after a lost reply, or when the first try's outcome was unknown.

Answers are kept for ``KEPT_S`` under a lease each, which bounds them in number. The store revision of an answer is that
of its key, so it need not be known when the answer is written. Requests without an id are not remembered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from control_plane import codec, validate
from control_plane.etcd import Compare, EtcdClient, KeyValue, Op, create_revision_is, op_get, op_put
from control_plane.keys import Keys
from control_plane.records import found
from omnicore.errors import InvalidRequestError, OmniError
from omnicore.log import get_logger

_log = get_logger(__name__)

KEPT_S: Final = 600
MAX_REQUEST_ID_LENGTH: Final = 200

A = TypeVar("A", bound=Message)


class Answer(Generic[A]):
    """The answer to one request, to be found or to be given. Use as ``async with``, around the whole verb::

    async with Answer(client, keys, verb, request.request_id, request, Response) as answer:
        while True:
            known, (subject,) = await answer.look(path_of_the_subject)
            if known is not None:
                return known
            ... a transaction with answer.conditions and answer.ops(response) in it; return if it succeeded

    What the verb is about is read together with the answer, as of one revision. Read one after the other, another try
    could come in between: "no answer yet", and then the subject gone or changed by that very request.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        verb: str,
        request_id: str,
        request: Message,
        kind: type[A],
        *,
        kept_s: int = KEPT_S,
        only_if: Sequence[Compare] = (),
    ) -> None:
        """``only_if``: what else must hold for the effect."""
        self._client = client
        self._verb = verb
        self._request_id = request_id
        self._path = keys.answer(request_id) if request_id else ""
        self._digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        self.kind = kind
        self._kept_s = kept_s
        self._only_if = list(only_if)
        self._lease_id = 0
        self._offered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Once offered, it may have been written even if that looked like a failure.
        if self._lease_id and not self._offered:
            try:
                await self._client.revoke_lease(self._lease_id)
            except OmniError as revocation:
                _log.warning("lease left to run out", lease=f"{self._lease_id:x}", error=revocation)

    async def look(self, *paths: str) -> tuple[A | None, list[KeyValue | None]]:
        """The answer that the request got already, with ``revision`` as it was, and what is at ``paths``; all as of one
        revision. Makes ready to give an answer if there is none.

        Raises ``InvalidRequestError`` if the id was used for something else, ``RecordError`` if the answer cannot be
        read."""
        wanted = [*([self._path] if self._path else []), *paths]
        seen = await self._client.txn([], [op_get(path) for path in wanted]) if wanted else None
        kvs = [found(seen, index) for index in range(len(wanted))] if seen is not None else []
        if not self._path:
            return None, kvs
        answer, *others = kvs
        if answer is not None:
            return self._read(answer), others
        if not self._lease_id:
            self._lease_id = (await self._client.grant_lease(self._kept_s)).lease_id
        return None, others

    @property
    def conditions(self) -> list[Compare]:
        """For the transaction of the effect: nobody has answered meanwhile, and what the verb itself asks for."""
        return [create_revision_is(self._path, 0), *self._only_if] if self._path else self._only_if

    def ops(self, answer: A) -> list[Op]:
        """For the transaction of the effect: remember ``answer``."""
        if not self._path:
            return []
        note = {
            "request_id": self._request_id,
            "verb": self._verb,
            "request_sha256": self._digest,
            "answer": json_format.MessageToDict(answer, preserving_proto_field_name=True),
        }
        self._offered = True
        return [op_put(self._path, codec.encode_note(**note), self._lease_id)]

    def _read(self, kv: KeyValue) -> A:
        answer = self.kind()
        try:
            note = codec.decode_note(kv.value)
            if (note.get("verb"), note.get("request_sha256")) != (self._verb, self._digest):
                raise InvalidRequestError.field(
                    "request_id",
                    f"{validate.shown(self._request_id)} was used for another request, a {note.get('verb')}; "
                    "use a new one for each",
                    reason="REQUEST_ID_REUSED",
                )
            fields = note.get("answer", {})
            if not isinstance(fields, dict):
                raise codec.RecordError('"answer" is not a JSON object')
            json_format.ParseDict(fields, answer, ignore_unknown_fields=True)
        except (codec.RecordError, json_format.ParseError) as error:
            raise codec.RecordError(
                f"what request {validate.shown(self._request_id)} was answered cannot be read: etcd key {kv.key} was "
                f"spoiled ({validate.shown(str(error), 200)}). Look whether the request had its effect; to have it "
                "again, use a new request id, or delete that key and repeat",
                metadata={"key": kv.key},
            ) from error
        answer.revision = kv.create_revision  # type: ignore[attr-defined]  # every control response has one
        return answer


def check_request_id(faults: validate.Faults, request_id: str) -> None:
    """A request id: any text, but not too long."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        faults.add("request_id", f"at most {MAX_REQUEST_ID_LENGTH} characters, got {len(request_id)}")


def log_fields(request_id: str) -> dict[str, str]:
    """For a log line about an operator's request: its id, if it has one, and no more of it than is allowed."""
    return {"request_id": request_id[:MAX_REQUEST_ID_LENGTH]} if request_id else {}
