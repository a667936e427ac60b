"""Running as a service: event loop, signals, ready file, children that die with their parent."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvloop

from omnicore import errors, heap
from omnicore.config import option
from omnicore.log import setup_logging

RESTART_EXIT_CODE = 75
"""Exit code of a service that ended so that its launcher starts it anew at once: no failure, and no wish to stay away.
EX_TEMPFAIL of sysexits.h, which systemd and others know as "try again"."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)
# Arguments: signal, process id of the parent (which may have ended before we asked), program, its arguments.
_DYING_WITH_PARENT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]), 0, 0, 0)
if os.getppid() != int(sys.argv[2]):
    os._exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""


def skip_native_finalizers() -> None:
    """From now on this process ends with the exit code it means to, whatever finalizers of native libraries would do.

    Some libraries crash when the C runtime takes them down, after Python has ended in good order (UCX in NIXL's wheel:
    SIGSEGV in the finalizer of its libnl). Whoever loads one calls this right after it was loaded, and again after it
    has loaded plug-ins: such libraries register their finalizers then, and what is registered last runs first. Python's
    own end (``atexit``, threads, buffers) is untouched, and C streams are written out; then the process is gone.
    """
    # on_exit(3) of glibc, for which all such wheels are built; it hands its functions the exit code first. What cannot
    # be found is not needed: musl runs no finalizers of libraries at exit.
    on_exit = getattr(_libc, "on_exit", None)
    if on_exit is not None:
        on_exit(_libc._exit, None)
        on_exit(_libc.fcloseall, None)  # ignores what it is handed


def die_with_parent(sig: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent ends. For children that are not ours, see
    ``dying_with_parent``."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)


def dying_with_parent(command: Sequence[str], sig: signal.Signals = signal.SIGTERM) -> list[str]:
    """``command`` (its program by absolute path), so wrapped that the process gets ``sig`` when this one ends.

    Start it with ``subprocess.Popen`` from the main thread and without ``preexec_fn``: that would fork, and a fork
    beside gRPC's threads runs gRPC's handlers in the child, which now and then abort it. Without one it is a vfork,
    which runs nothing of ours.
    """
    return [sys.executable, "-I", "-S", "-c", _DYING_WITH_PARENT, str(int(sig)), str(os.getpid()), *command]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The process"""

    ready_file: str = option("", help="file to write once it serves: JSON with its addresses and process id")
    log_level: str = option("info", help="least level to log", choices=("debug", "info", "warning", "error"))
    log_json: bool = option(False, help="log JSON lines rather than text")
    die_with_parent: bool = option(False, help="stop when the process that started this one ends")

    def begin(self, service: str) -> None:
        """Log as ``service``, and die with the parent if that is asked for. Call it first in ``main``."""
        if self.die_with_parent:
            die_with_parent()
        setup_logging(service, self.log_level, self.log_json)


class Shutdown:
    """SIGTERM and SIGINT as an event. The second signal exits at once, with 128 + its number."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._signal: signal.Signals | None = None

    def install(self) -> None:
        """Take over both signals; call from the running loop."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._on_signal, sig)

    def request(self) -> None:
        """Begin the shutdown without a signal."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """A shutdown was asked for."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return when a shutdown was asked for."""
        await self._event.wait()

    def _on_signal(self, sig: signal.Signals) -> None:
        if self._signal is not None:
            os._exit(128 + int(sig))
        self._signal = sig
        self._event.set()


def write_ready_file(path: str, content: Mapping[str, Any]) -> None:
    """Tell whoever started us that we serve: JSON, written whole or not at all. Nothing for an empty ``path``."""
    if not path:
        return
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    partial.write_bytes(orjson.dumps({"pid": os.getpid(), **content}))
    partial.rename(target)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a service on uvloop and return its exit code; typed errors become one line and their own code."""
    try:
        return uvloop.run(heap.tended(main))
    except errors.OmniError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.row.exit_code
