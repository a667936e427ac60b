"""Two gateway processes on one port against one, on any number of cores.

Each process gets the same share of a core, through the kernel's CPU quota (cgroup), small enough that load and workers
can keep up with two of them on two cores. So what is compared is what a second process adds, not a second core. Each
has 64 connections: with 32 there is nothing to answer for part of its share, since who waits asks nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

SHARE = 0.2
"""Of a core, for each process."""
_PERIOD_US = 10_000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


def no_quota() -> str:
    """Why this process cannot limit others; empty if it can."""
    try:
        with quotas([]):
            return ""
    except OSError as error:
        return f"no CPU quotas: {error}"


@contextlib.contextmanager
def quotas(pids: Sequence[int], share: float = SHARE) -> Iterator[None]:
    """Each of these processes has ``share`` of a core for the block. Raises ``OSError`` where that is not allowed."""
    with contextlib.ExitStack() as groups:
        for index, pid in enumerate(pids or [0]):
            groups.enter_context(_group(f"omniplane-bench-{os.getpid()}-{index}", pid, share))
        yield


@contextlib.contextmanager
def _group(name: str, pid: int, share: float) -> Iterator[None]:
    old = (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "tasks").exists()
    root = _V1 if old else _V2
    group = root / name
    group.mkdir()
    try:
        if old:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(_PERIOD_US * share)))
        else:
            (group / "cpu.max").write_text(f"{int(_PERIOD_US * share)} {_PERIOD_US}")
        if pid:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        members = (group / "cgroup.procs").read_text().split()
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                (root / "cgroup.procs").write_text(member)
        group.rmdir()
