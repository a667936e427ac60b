"""``omnictl down``: stops the cluster that ``omnictl up`` runs on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path

from omnicore.errors import DeadlineExceededError, FailedPreconditionError
from omnictl import context
from omnictl.commands.base import Commands, settings_of
from omnictl.settings import seconds

_POLL_S = 0.1


def add(commands: Commands) -> None:
    """Add ``down``."""
    parser = commands.add(
        "down",
        _run,
        description="Stop the cluster that 'omnictl up' runs on this machine.",
        examples=("omnictl down",),
        notes="Requests may finish, as after Ctrl-C. It is not an error if nothing runs.",
        connects=False,
    )
    parser.add_argument("--wait", metavar="DURATION", default="60s", help="for the end of the cluster")


async def _run(args: argparse.Namespace) -> int:
    wait_s = seconds(args.wait, "--wait")
    settings = settings_of(args)
    found = settings.context
    if found is None:
        print("no cluster of 'omnictl up' runs here")
        return 0
    if found.pid <= 0 or not _is_omnictl(found.pid):
        raise FailedPreconditionError(
            f"{settings.context_path} does not describe a cluster of 'omnictl up'",
            reason="NOT_OURS",
            metadata={"hint": f"if it is out of date, remove {settings.context_path}"},
        )
    with contextlib.suppress(ProcessLookupError):
        os.kill(found.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(wait_s):
            while context.owner_lives(found) and _is_omnictl(found.pid):  # noqa: ASYNC110 -- another process's end
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise DeadlineExceededError(
            f"the cluster (pid {found.pid}) still runs after {wait_s:g} s",
            metadata={"hint": f"'kill {found.pid}' a second time stops it at once"},
        ) from None
    print(f"stopped {found.pipeline or 'the cluster'}")
    return 0


def _is_omnictl(pid: int) -> bool:
    """Process ids are reused: never signal one that became something else. A zombie has no command line."""
    try:
        return b"omnictl" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
