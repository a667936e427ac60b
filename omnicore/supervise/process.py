"""One child process: its log, its ready file, its end.

Guarantees: a child never outlives this process, not even when this one is killed (the kernel's parent-death signal is
set before the child's program starts); nothing of its process group is left after ``stop``, or after its own end.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from omnicore.process import dying_with_parent

_POLL_S = 0.03  # how soon a ready file, or an end, is noticed
_TAIL_BYTES = 16 * 1024
_STDERR = 2


class ProcessEndedError(Exception):
    """The process ended before it was ready; ``code`` is its return code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(end_text(code))
        self.code = code


@dataclasses.dataclass(frozen=True, slots=True)
class Files:
    """Where a process logs and where it says that it is ready."""

    log: Path | None
    """None: it writes to this process's standard error."""
    ready: Path


class Process:
    """A running child. Made by ``start``."""

    def __init__(self, process: subprocess.Popen[bytes], files: Files, log_start: int) -> None:
        self._process = process
        self._files = files
        self._log_start = log_start

    @classmethod
    def start(cls, command: tuple[str, ...], files: Files, environ: Mapping[str, str] | None = None) -> Process:
        """Start ``command`` (its program by absolute path) in its own session, its output appended to its log and
        ``environ`` added to our environment. Call it from the main thread: the parent that a child dies with is the
        thread that started it."""
        files.ready.unlink(missing_ok=True)
        if files.log is not None:
            files.log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(files.log.open("ab")) if files.log is not None else None
            output: BinaryIO | int = log if log is not None else _STDERR
            log_start = log.tell() if log is not None else 0
            # Not asyncio's subprocesses: see dying_with_parent. Its wrapper is there because a child asks for a
            # parent-death signal itself only once it has come that far.
            process = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # A session of its own: the terminal's Ctrl-C must reach only us, who stop children in order.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environ or {})},
            )
        return cls(process, files, log_start)

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """The content of its ready file, once it is there. Raises ``ProcessEndedError`` or ``TimeoutError``."""
        async with asyncio.timeout(timeout_s):
            while True:
                code = self._process.poll()  # before the look at the file: it may write that and end in between
                # The file appears whole (it is renamed into place), so what can be read is complete.
                with contextlib.suppress(FileNotFoundError):
                    content: dict[str, Any] = orjson.loads(self._files.ready.read_bytes())
                    return content
                if code is not None:
                    raise ProcessEndedError(code)
                await asyncio.sleep(_POLL_S)

    async def wait(self) -> int:
        """Its return code, once it has ended, negative for a signal. Whatever it left in its group is killed."""
        while (code := self._process.poll()) is None:  # noqa: ASYNC110 -- kernels before 5.3 have no pidfd to wait on
            await asyncio.sleep(_POLL_S)
        self.signal_group(signal.SIGKILL)
        return code

    async def stop(self, grace_s: float) -> bool:
        """Ask it to end, then make it. True if it ended within ``grace_s`` seconds by itself."""
        self._process.send_signal(signal.SIGTERM)  # does nothing to one that has ended
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
            return True
        except TimeoutError:
            self.signal_group(signal.SIGKILL)
            await self.wait()
            return False

    def signal_group(self, sig: signal.Signals) -> None:
        """Send ``sig`` to it and all it started, if any of them is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, sig)

    def tail(self, lines: int) -> list[str]:
        """The last lines that it wrote since ``start``; none where it has no log of its own."""
        if self._files.log is None:
            return []
        try:
            with self._files.log.open("rb") as log:
                return _tail(log, self._log_start, lines)
        except FileNotFoundError:
            return []


def _tail(log: BinaryIO, start: int, lines: int) -> list[str]:
    end = log.seek(0, os.SEEK_END)
    begin = max(start, end - _TAIL_BYTES)
    log.seek(begin)
    found = log.read().decode(errors="replace").splitlines()
    if begin > start:
        found = found[1:]  # begins in mid-line
    return [line.rstrip() for line in found if line.strip()][-lines:]


def end_text(code: int) -> str:
    """How a process ended, for people: "exited with code 1", "was killed by SIGKILL"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
