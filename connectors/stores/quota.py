"""How much one worker may have in a store: counted like memory, though none of it is here."""

from __future__ import annotations

from connectors.space import HeapSpace, Slot
from omni.v1 import transfer_pb2


class Quota(HeapSpace):
    """Room without memory: slots have no view, and say nothing about where their data is."""

    def allocate(self, size_bytes: int) -> Slot:
        """Take room now. Raises ``ResourceExhaustedError`` if there is not enough."""
        self.take(size_bytes)
        return _QuotaSlot(self, size_bytes)


class _QuotaSlot:
    view = memoryview(b"")

    def __init__(self, quota: Quota, size_bytes: int) -> None:
        self._quota: Quota | None = quota
        self._size_bytes = size_bytes

    def locate(self, handle: transfer_pb2.TransferHandle) -> None:
        """Nothing to say."""

    def free(self) -> None:
        """Give the room back, any number of times."""
        quota, self._quota = self._quota, None
        if quota is not None:
            quota.give_back(self._size_bytes)
