"""One module per command; each has ``add`` (flags and help) and an async function that runs it."""

from __future__ import annotations

from omnictl.commands import (
    api_key,
    apply,
    chat,
    collective,
    completion,
    context,
    delete,
    describe,
    down,
    etcd,
    get,
    policy,
    replica,
    request,
    restart,
    status,
    top,
    up,
    validate,
    version,
)
from omnictl.commands.base import Commands
from omnictl.parser import Group, Parser

_GROUPS = (
    Group("Run a cluster on this machine", ("up", "down")),
    Group("Look", ("status", "get", "describe", "top", "watch", "etcd")),
    Group("Change pipelines", ("validate", "apply", "delete", "policy")),
    Group("Change replicas", ("cordon", "uncordon", "drain", "evict", "restart")),
    Group("Call engines", ("sleep", "wake", "profile", "reset-cache")),
    Group("Use", ("chat", "request")),
    Group("Other", ("api-key", "context", "version", "completion")),
)
_MODULES = (
    *(up, down, status, get, describe, top, etcd, validate, apply, delete, policy, replica, restart, collective),
    *(chat, request, api_key, context, version, completion),
)
_NOTES = """\
Addresses and credentials come from flags, else environment variables, else the current context (see
"omnictl context"), which "omnictl up" sets. Exit codes: 0 done, 1 internal error, 2 wrong input, 3 not allowed,
4 not found, 5 conflict or wrong state, 6 unavailable or too slow, 7 not implemented, 130 interrupted."""


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
            "# a new version of one stage, without a failed request",
            "omnictl restart speech/talker",
        ),
        groups=_GROUPS,
        notes=_NOTES,
    )
    commands = Commands(root)
    for module in _MODULES:
        module.add(commands)
    return root
