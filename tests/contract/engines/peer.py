"""A peer of a transfer engine, as a process of its own: memory that others read, and nothing else.

It writes one JSON line when it is ready and one for each word on standard input; it ends when that ends.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from connectors.engines.base import LocalRegion, RemoteRegion, TransferEngine
from connectors.engines.mooncake import MooncakeEngine
from connectors.engines.mori import MoriEngine
from connectors.engines.nixl import NixlEngine
from connectors.engines.yuanrong_transfer_engine import YuanrongTransferEngine
from omnicore import process
from tests.doubles.loading import installed

PERIOD = 251
"""Bytes repeat after this many, a prime: at no power of two."""


def pattern(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What every peer holds: byte n is n modulo ``PERIOD``, plus 1. No byte is 0."""
    once = np.arange(1, PERIOD + 1, dtype=np.uint8)
    return np.tile(once, size_bytes // PERIOD + 1)[:size_bytes]


@contextlib.contextmanager
def running_engine(kind: str) -> Iterator[TransferEngine]:
    """An engine of this kind; where its library cannot load here, over the double."""
    engine = make_engine(kind)
    try:
        yield engine
    finally:
        engine.close()


def make_engine(kind: str) -> TransferEngine:
    match kind:
        case "mooncake":
            return MooncakeEngine(host="127.0.0.1")
        case "nixl":
            return NixlEngine()
        case "mori":
            with installed("mori"):
                return MoriEngine(host="127.0.0.1")
        case "yuanrong_transfer_engine":
            with installed("yuanrong"):
                return YuanrongTransferEngine(host="127.0.0.1")
        case _:
            raise ValueError(kind)


def remote(answer: dict[str, Any]) -> RemoteRegion:
    """What a handle of the peer would say."""
    return RemoteRegion(
        session=answer["session"],
        engine=base64.b64decode(answer["engine"]),
        region=base64.b64decode(answer["region"]),
        address=answer["address"],
        size_bytes=answer["size_bytes"],
    )


def _say(**answer: object) -> None:
    print(orjson.dumps(answer).decode(), flush=True)


def main(kind: str, size_bytes: int) -> None:
    """Serve until standard input ends."""
    process.die_with_parent()
    memory = pattern(size_bytes)
    with running_engine(kind) as engine:
        region: LocalRegion = engine.register(memory.ctypes.data, memory.nbytes, "cpu")
        _say(
            session=engine.session,
            engine=base64.b64encode(engine.descriptor).decode(),
            region=base64.b64encode(region.descriptor).decode(),
            address=region.address,
            size_bytes=region.size_bytes,
        )
        for line in sys.stdin:
            match line.strip():
                case "unregister":
                    engine.unregister(region)
                case "intact":
                    _say(intact=bool((memory == pattern(size_bytes)).all()))
                    continue
                case _:
                    times = os.times()
                    _say(cpu_s=times.user + times.system)
                    continue
            _say(done=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
