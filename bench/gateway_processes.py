"""Processes of others under a benchmark: started on one core, counted with all their children, ended together."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import harness
from omnicore.process import dying_with_parent

SOURCES = Path(__file__).parent


@contextlib.contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started in the block runs on ``cores``. All others may be given to a process later."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def compiled(name: str, folder: Path) -> Path | None:
    """``bench/NAME.c`` as a program in ``folder``; None where there is no C compiler. Raises ``RuntimeError``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    program = folder / name
    if not program.exists():
        made = subprocess.run(
            [compiler, "-O2", "-o", str(program), str(SOURCES / f"{name}.c")], capture_output=True, text=True
        )
        if made.returncode != 0:
            raise RuntimeError(f"{compiler}: {made.stderr}")
    return program


def free_port() -> int:
    """A port that nothing listens on now: for programs that cannot take one themselves and tell it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A program (by absolute path) with a log, in a process group of its own."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                dying_with_parent(argv, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the first process of its group."""
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """To the whole group, if there is still one."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """End all of it at once."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        self.process.wait()

    def log_tail(self) -> str:
        """The end of what it said."""
        return self.log_path.read_text(errors="replace")[-2000:]


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def tree_cpu_s(pid: int) -> float:
    """User and system time of a process and its descendants so far, in seconds."""
    total = 0.0
    for each in tree(pid):
        with contextlib.suppress(OSError):
            total += harness.cpu_seconds(each)
    return total


def tree_mib(pid: int) -> float:
    """Resident memory of a process and its descendants, in MiB; shared pages count in each."""
    total = 0.0
    for each in tree(pid):
        with contextlib.suppress(OSError, StopIteration):
            total += harness.resident_mib(each)
    return total


class ForeignCpu:
    """How much others use the machine: all CPU time less that of ``pids`` and of this process with its children."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._begin = self._now()

    def _now(self) -> tuple[float, float, float]:
        ours = sum(tree_cpu_s(pid) for pid in self._pids) + sum(os.times()[:4])
        return time.monotonic(), harness.busy_seconds(), ours

    def cores(self) -> float:
        """Cores in use by others since it was made."""
        begin, now = self._begin, self._now()
        return max(0.0, ((now[1] - begin[1]) - (now[2] - begin[2])) / (now[0] - begin[0]))
