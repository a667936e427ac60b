"""Whom a receiver asks for a key about which it knows nothing else."""

from __future__ import annotations

import re
import threading

from connectors.reference.base import Stage
from connectors.reference.metadata import checked_address
from omnicore import errors
from omnicore.log import get_logger

_log = get_logger(__name__)

_RANK_KEY = re.compile(r".+_(\d+)_\d+_(\d+)_\d+")


def rank_of(key: str, from_stage: Stage) -> int | None:
    """The sender's rank that a key names: ``REQUEST_STAGE_CHUNK_FROM_TO`` with ranks FROM and TO; None in others."""
    match = _RANK_KEY.fullmatch(key)
    return int(match[2]) if match is not None and match[1] == str(from_stage) else None


class Senders:
    """The default sender, and one for each rank that is known. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._default = ""
        self._by_rank: dict[int, str] = {}

    def update(self, host: str, port: int, rank: int | None = None) -> None:
        """Set the default sender, or that of one rank. Raises ``InvalidRequestError`` for what is no address or rank;
        nothing is changed then."""
        endpoint = checked_address(host, port, "sender_host")
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
            raise errors.InvalidRequestError.field("sender_rank", f"must be 0 or more, got {rank!r}")
        with self._lock:
            if rank is None:
                self._default = endpoint
            else:
                self._by_rank[rank] = endpoint
        _log.info("sender info updated", rank="default" if rank is None else rank, endpoint=endpoint)

    def find(self, rank: int | None) -> str:
        """The sender of a rank, else the default one. Raises ``FailedPreconditionError`` if there is neither."""
        with self._lock:
            endpoint = self._by_rank.get(rank, self._default) if rank is not None else self._default
        if not endpoint:
            raise errors.FailedPreconditionError(
                "there is no metadata and no sender is known: call update_sender_info, or give sender_host and "
                "sender_zmq_port",
                reason="NO_SENDER",
            )
        return endpoint

    @property
    def default(self) -> str:
        """ "host:port" of the default sender, "" if there is none."""
        return self._default
