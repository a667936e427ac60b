"""A process beside a launcher that ends what the launcher leaves when it is killed.

The kernel asks children to stop when their parent dies (``omnicore.process.dying_with_parent``), and a healthy one then
lets its requests end and goes. One that hangs does not, nor do processes that an engine started and lost. The guardian
notices the launcher's end by the end of a pipe, gives every process group the grace that it would have had, and kills
what is left of it. While the launcher lives it does nothing.

Not guaranteed: anything, if the guardian is killed as well. It runs in a session of its own, so that the terminal's
signals and a killed process group of the launcher do not reach it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

_CLOSE_WAIT_S = 5.0

# Lines on standard input: "+ PID START GRACE_S" and "- PID". START is the process's start time in clock ticks since
# boot, which tells it from a later one with the same id. A group whose leader is gone keeps the leader's id from being
# used again, so without a process of that id the group is either still ours or empty.
_PROGRAM = """\
import os, signal, sys, time

def started(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except OSError:
        return None

def lives(pid, start):
    if started(pid) not in (None, start):
        return False
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(sig, signal.SIG_IGN)
groups = {}
for line in sys.stdin:
    word, pid, *rest = line.split()
    if word == "+":
        groups[int(pid)] = (rest[0], float(rest[1]))
    else:
        groups.pop(int(pid), None)
ended = time.monotonic()
while groups:
    late = time.monotonic() - ended
    for pid, (start, grace) in list(groups.items()):
        if not lives(pid, start):
            del groups[pid]
        elif late >= grace:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
            del groups[pid]
    time.sleep(0.1)
"""


class Guardian:
    """The guardian of this process. Start it from the main thread; ``close`` it once nothing of ours runs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def watch(self, pid: int, grace_s: float) -> None:
        """The process group of ``pid`` may live for ``grace_s`` seconds after our end."""
        if (start := _start_ticks(pid)) is not None:
            self._say(f"+ {pid} {start} {grace_s:g}")

    def forget(self, pid: int) -> None:
        """Nothing of the process group of ``pid`` is left."""
        self._say(f"- {pid}")

    def close(self) -> None:
        """End it. What it still watches gets its grace, then its end."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        # If it waits for somebody's grace to end, it ends by itself after that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_WAIT_S)

    def _say(self, line: str) -> None:
        if self._process.stdin is not None:
            # Killed by somebody: there is nobody to tell, and the kernel's signal is still there for the children.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line + "\n")


def _start_ticks(pid: int) -> str | None:
    """Field 22 of /proc/PID/stat, counted after the command's name, which may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
