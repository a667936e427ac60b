"""``omnictl down``: stops the cluster that ``omnictl up`` runs on this machine."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from pathlib import Path

from omnicore.errors import DeadlineExceededError, FailedPreconditionError, NotFoundError
from omnictl import context
from omnictl.commands.base import Commands
from omnictl.settings import seconds

_POLL_S = 0.1


def add(commands: Commands) -> None:
    """Add ``down``."""
    parser = commands.add(
        "down",
        _run,
        description="Stop the cluster that 'omnictl up' runs on this machine.",
        examples=("omnictl down", "# one of several", "omnictl down --context local-2"),
        notes="Requests may finish, as after Ctrl-C. It is not an error if nothing runs.",
        connects=False,
    )
    parser.add_argument("--wait", metavar="DURATION", default="60s", help="for the end of the cluster")


async def _run(args: argparse.Namespace) -> int:
    wait_s = seconds(args.wait, "--wait")
    path = context.context_path(os.environ)
    name, found = _chosen(context.load(path), getattr(args, "context", None) or "", path)
    if found is None:
        print("no cluster of 'omnictl up' runs here")
        return 0
    if found.pid <= 0 or not _is_omnictl(found.pid):
        raise FailedPreconditionError(
            f"context {name!r} of {path} does not describe a cluster of 'omnictl up'",
            reason="NOT_OURS",
            metadata={"hint": f"if it is out of date, remove it with 'omnictl context delete {name}'"},
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


def _chosen(known: context.Contexts, wanted: str, path: Path) -> tuple[str, context.Context | None]:
    """The context that is meant: by name, else the current one if it is of a cluster here, else the only one that is.
    Raises ``NotFoundError`` for an unknown name and ``FailedPreconditionError`` where several could be meant."""
    if wanted:
        if wanted not in known.contexts:
            names = ", ".join(sorted(known.contexts)) or "none"
            raise NotFoundError(f"no context {wanted!r} in {path}; it has: {names}", reason="CONTEXT_NOT_FOUND")
        return wanted, known.contexts[wanted]
    here = {name: found for name, found in known.contexts.items() if found.pid and context.owner_lives(found)}
    if known.current in here:
        return known.current, here[known.current]
    if len(here) > 1:
        raise FailedPreconditionError(
            f"several clusters run here: {', '.join(sorted(here))}",
            reason="AMBIGUOUS",
            metadata={"hint": "choose one with --context"},
        )
    return next(iter(here.items()), ("", None))


def _is_omnictl(pid: int) -> bool:
    """Process ids are reused: never signal one that became something else. A zombie has no command line."""
    try:
        return b"omnictl" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
