"""Who this worker is, over all the claims it has held.

A worker that re-registers keeps its process, its data and its calls; only its epoch (and perhaps its replica id) is
new. Messages that name one of its earlier claims are therefore still meant for it, and accepted. A claim that this
process never held is another instance's and refused: that is what epochs are for.

A new claim is in the store, and so with gateways, before its answer is here. Who already names it is made to wait for
that answer rather than refused: a refusal would tell a gateway that the replica is somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator

from omni.v1 import types_pb2
from omnicore.errors import FailedPreconditionError, OmniError

CLAIM_WAIT_S = 2.0
"""Well below what a gateway waits for a session's welcome."""


class Identity:
    """The claims of one worker process. ``endpoint`` is where its gRPC server is reached, "host:port", and
    ``session_endpoint`` where sessions and subscriptions cost less."""

    def __init__(self, stage: types_pb2.StageRef, endpoint: str) -> None:
        self.instance_uuid = str(uuid.uuid4())
        self.endpoint = endpoint
        self.session_endpoint = ""
        self._current = types_pb2.ReplicaRef(stage=stage)
        self._first = self._current
        self._held: set[tuple[int, int]] = set()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def current(self) -> types_pb2.ReplicaRef:
        """The claim now; epoch 0 before the first. Not a copy: do not change it."""
        return self._current

    @property
    def data_owner(self) -> types_pb2.ReplicaRef:
        """The claim that handles carry: the first of this process, so that they outlive a re-registration."""
        return self._first

    @property
    def registered(self) -> bool:
        """True once there was a claim."""
        return bool(self._held)

    def adopt(self, claim: types_pb2.ReplicaRef) -> None:
        """This worker is ``claim`` from now on."""
        adopted = types_pb2.ReplicaRef()
        adopted.CopyFrom(claim)
        if not self._held:
            self._first = adopted
        self._current = adopted
        self._held.add((claim.replica_id, claim.epoch))

    @contextlib.contextmanager
    def claiming(self) -> Iterator[None]:
        """While a claim is asked for: it may be known elsewhere before it is here."""
        self._settled.clear()
        try:
            yield
        finally:
            self._settled.set()

    async def check_settled(self, ref: types_pb2.ReplicaRef, wait_s: float = CLAIM_WAIT_S) -> None:
        """``check``, once the claim that is being asked for is here, if ``ref`` may be that one."""
        if not self._settled.is_set() and ref.stage == self._current.stage and ref.epoch > self._current.epoch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._settled.wait()
        self.check(ref)

    def check(self, ref: types_pb2.ReplicaRef, *, any_epoch: bool = False) -> None:
        """Raises ``FailedPreconditionError`` unless ``ref`` is a claim that this process holds or held. With
        ``any_epoch``, epoch 0 means: whoever is here."""
        same_stage = ref.stage == self._current.stage
        if same_stage and (ref.replica_id, ref.epoch) in self._held:
            return
        if any_epoch and ref.epoch == 0 and (same_stage or not ref.HasField("stage")):
            return
        wanted, actual = replica_name(ref), replica_name(self._current)
        raise FailedPreconditionError(
            f"the caller means replica {wanted}, this is {actual}",
            reason="STALE_EPOCH" if same_stage else "WRONG_REPLICA",
            metadata={"wanted": wanted, "actual": actual},
        )

    def locate(self, error: OmniError, attempt: int) -> OmniError:
        """``error`` with the stage, replica and attempt where it arose, unless it names others already."""
        here = {
            "stage": str(self._current.stage.stage_id),
            "replica": str(self._current.replica_id),
            "attempt": str(attempt),
        }
        error.metadata = {**here, **error.metadata}
        return error


def replica_name(ref: types_pb2.ReplicaRef) -> str:
    """A claim for people: "speech/1/0@12" is replica 0 of stage 1, epoch 12."""
    return f"{ref.stage.pipeline}/{ref.stage.stage_id}/{ref.replica_id}@{ref.epoch}"
