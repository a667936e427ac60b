"""What this process has open."""

from __future__ import annotations

import contextlib
from pathlib import Path


def open_pools() -> set[tuple[str, int]]:
    """Descriptors of shared memory pools, each with the pool's inode.

    Compare what is new, not how many there are: pools that earlier tests have left are collected at any time, and
    threads of libraries open and close what they like.
    """
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed a moment ago
            if "memfd:omni-pool" in str(path.readlink()):
                found.add((path.name, path.stat().st_ino))
    return found
