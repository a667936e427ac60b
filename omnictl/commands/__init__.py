"""One module per command; each has ``add`` (flags and help) and an async function that runs it."""

from __future__ import annotations

from omnictl.commands import (
    apply,
    chat,
    completion,
    delete,
    describe,
    down,
    get,
    replica,
    status,
    up,
    validate,
    version,
)
from omnictl.commands.base import Commands
from omnictl.parser import Group, Parser

_GROUPS = (
    Group("Run a cluster on this machine", ("up", "down")),
    Group("Look", ("status", "get", "describe")),
    Group("Change pipelines", ("validate", "apply", "delete")),
    Group("Change replicas", ("cordon", "uncordon", "drain", "evict")),
    Group("Use", ("chat",)),
    Group("Other", ("version", "completion")),
)
_NOTES = """\
Addresses come from flags, else environment variables, else the context file that "omnictl up" writes
(~/.config/omnictl/context.json, or $OMNICTL_CONTEXT). Exit codes: 0 done, 2 wrong input, 4 not found,
5 conflict or wrong state, 6 unavailable or too slow, 130 interrupted."""


def build_parser() -> Parser:
    """The whole command line."""
    root = Parser(
        prog="omnictl",
        description="Runs, inspects and uses Omniplane clusters.",
        examples=(
            "# start everything on this machine, then ask it something",
            "omnictl up examples/speech.yaml",
            'omnictl chat speech "Why is the sky blue?" --audio answer.wav',
            "# who serves what, and follow it",
            "omnictl get replicas --watch",
        ),
        groups=_GROUPS,
        notes=_NOTES,
    )
    commands = Commands(root)
    for module in (up, down, status, get, describe, validate, apply, delete, replica, chat, version, completion):
        module.add(commands)
    return root
