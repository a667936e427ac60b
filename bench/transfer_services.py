"""The services that some connectors need beside them, for as long as a benchmark runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from connectors.payload import JsonValue
from tests.support.stores import Daemon, MooncakeMaster, YuanrongWorker

_MIB = 1 << 20


class Services:
    """Started when a kind of connector first asks; all end with ``close``."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._daemons: list[Daemon] = []

    def options(self, kind: str) -> Mapping[str, Mapping[str, JsonValue]]:
        """What a connector of this kind must be told: "both" ends, and one of "produce" and "consume". Raises
        ``RuntimeError`` if its service cannot run here."""
        room = self._largest + 32 * _MIB
        match kind:
            case "shm":
                return {"produce": {"pool_bytes": room}}
            case "grpc":
                return {"both": {"pool_bytes": room}}
            case "mooncake_store":
                master = self._start(MooncakeMaster)
                staging: dict[str, JsonValue] = {"localbuf": room, "pool_bytes": room}
                return {"both": master | staging, "produce": {"segment": 2 * room}, "consume": {"segment": 0}}
            case "yuanrong":
                # It gives memory back some time after an object was deleted.
                return {"both": {**self._start(lambda: YuanrongWorker(4 * room // _MIB)), "pool_bytes": 2 * room}}
        # One-sided: a pool to publish into on one side, one to receive into on the other.
        local: dict[str, JsonValue] = {"host": "127.0.0.1"} if kind == "mooncake" else {}
        return {
            "both": local,
            "produce": {"pool_bytes": room, "receive_pool_bytes": 0},
            "consume": {"receive_pool_bytes": room},
        }

    def close(self) -> None:
        """End them all."""
        while self._daemons:
            self._daemons.pop().close()

    def _start(self, make: Any) -> dict[str, JsonValue]:
        try:
            daemon = make()
            self._daemons.append(daemon)
            daemon.start()
        except (pytest.fail.Exception, pytest.skip.Exception) as error:
            raise RuntimeError(str(error)) from None
        extra: dict[str, JsonValue] = daemon.extra()
        return extra
