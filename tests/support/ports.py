"""TCP ports that a test may close and open again, or give to another process."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

# Below what Linux gives to sockets that ask for any port (32768 and above): none of those can take it meanwhile.
_PORTS = range(24_000, 32_000)
_held: list[IO[bytes]] = []


def reserved_port() -> int:
    """A port that is free at every address and that no other test of this user gets, in whatever process, until this
    process ends."""
    directory = Path(tempfile.gettempdir()) / f"omni-test-ports-{os.getuid()}"
    directory.mkdir(exist_ok=True)
    for port in random.sample(_PORTS, len(_PORTS)):
        lock = (directory / str(port)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("0.0.0.0", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise RuntimeError(f"every port from {_PORTS.start} to {_PORTS.stop - 1} is taken")
