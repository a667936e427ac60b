"""One restart of a stage at a time: a key in etcd says so, under a lease that lives as long as the call.

Guarantees: of two calls one holds the stage; a repeat of the same request takes it from the call before, whose control
plane may have died with it, and from then on ``fence`` holds for nothing that the former holder writes. Not guaranteed:
that the former holder knows at once; ``keep`` tells it within seconds, and every step that it fences.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, NoReturn, Self

from control_plane import codec, validate
from control_plane.etcd import (
    Compare,
    EtcdClient,
    KeyValue,
    LeaseLost,
    WriteOutcomeUnknown,
    create_revision_is,
    mod_revision_is,
    op_get,
    op_put,
)
from control_plane.keys import Keys, StageKey
from control_plane.records import found
from omnicore.errors import ConflictError, OmniError, UnavailableError
from omnicore.log import get_logger

_log = get_logger(__name__)

_TTL_S: Final = 15
_CHECK_S: Final = 2.0


class RestartLock:
    """The right to restart a stage. Use as ``async with``, with ``keep`` running meanwhile. Entering it raises
    ``ConflictError`` [RESTART_RUNS] while another request holds the stage."""

    def __init__(self, client: EtcdClient, keys: Keys, stage: StageKey, request_id: str, reason: str) -> None:
        self._client = client
        self._stage = stage
        self._request_id = request_id
        self._path = keys.restart(stage)
        self._note = codec.encode_note(request_id=request_id, reason=reason[:1000])
        self._lease_id = 0
        self.locked_at = 0
        """The revision since when it is held."""

    async def __aenter__(self) -> Self:
        self._lease_id = (await self._client.grant_lease(_TTL_S)).lease_id
        try:
            self.locked_at = await self._take()
        except BaseException:
            await self._release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._release()

    @property
    def fence(self) -> Compare:
        """Holds for writes while the stage is held by this call."""
        return mod_revision_is(self._path, self.locked_at)

    async def check(self) -> None:
        """Raise ``ConflictError`` [RESTART_TAKEN_OVER] if it is not held any more."""
        holder = await self._client.get(self._path)
        if holder is None or holder.lease_id != self._lease_id:
            raise ConflictError(
                f"a repeat of this request has taken over the restart of stage {self._stage}",
                reason="RESTART_TAKEN_OVER",
                metadata={"stage": self._stage},
            )

    async def keep(self) -> NoReturn:
        """Refresh it for ever. Raises what ``check`` does, and ``UnavailableError`` once it was lost to time."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._client.refresh_lease(self._lease_id)
                await self.check()
            except LeaseLost:
                raise UnavailableError(
                    f"etcd was away for too long: another restart of stage {self._stage} may have begun; "
                    "repeat with the same request id to go on",
                    reason="RESTART_LOCK_LOST",
                ) from None
            except UnavailableError as error:
                _log.warning("lock of a restart not refreshed", stage=self._stage, error=error)

    async def _take(self) -> int:
        condition = create_revision_is(self._path, 0)
        while True:
            try:
                put = op_put(self._path, self._note, self._lease_id)
                result = await self._client.txn([condition], [put], [op_get(self._path)])
            except WriteOutcomeUnknown:
                continue
            holder = None if result.succeeded else found(result)
            if result.succeeded or (holder is not None and holder.lease_id == self._lease_id):
                return result.revision if holder is None else holder.mod_revision
            if holder is None:
                condition = create_revision_is(self._path, 0)
            elif _is_of(holder, self._request_id):
                condition = mod_revision_is(self._path, holder.mod_revision)
            else:
                text = validate.shown(holder.value.decode(errors="replace"), 300)
                raise ConflictError(
                    f"stage {self._stage} is being restarted: {text}",
                    reason="RESTART_RUNS",
                    metadata={"stage": self._stage},
                )

    async def _release(self) -> None:
        try:
            await self._client.revoke_lease(self._lease_id)
        except OmniError as error:
            _log.warning("lease left to run out", lease=f"{self._lease_id:x}", error=error)


def _is_of(holder: KeyValue, request_id: str) -> bool:
    """Whether a lock is to be taken over by this request: it is its own, or what a hand has left in its place."""
    try:
        of = codec.decode_note(holder.value).get("request_id")
    except codec.RecordError as error:
        _log.warning("unreadable lock of a restart is replaced", key=holder.key, error=error)
        return True
    return bool(request_id) and of == request_id
