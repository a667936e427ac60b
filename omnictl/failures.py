"""How errors look on the terminal: one ``error:`` line, the fields that are wrong, and what to do next."""

from __future__ import annotations

from omnicore import errors

_HINTS: dict[str, str] = {
    "NOT_FOUND": "'omnictl get pipelines|stages|replicas' lists what exists",
    "CANNOT_CONNECT": (
        "is it running? 'omnictl up FILE' starts a cluster on this machine; --server and --gateway name another"
    ),
    "CONNECTION_LOST": "it may be restarting: try again, or look at 'omnictl status'",
    "CONFLICT": "look at it again with 'omnictl get', then repeat the command",
    "CONTEXT_NOT_FOUND": "'omnictl context list' shows those that there are",
    "KEY_NOT_FOUND": "'omnictl etcd ls -o name' lists the keys that exist",
    "ETCD_COMPACTED": "etcd has forgotten that history: begin anew, without --revision",
    "TOO_MANY_WATCHES": "end one of them, or ask another control plane with --server",
    "REPLICA_UNHEALTHY": "'omnictl get replicas' shows it; --skip-unhealthy leaves such replicas out",
    "RESTART_RUNS": "wait for it, or look at 'omnictl watch replicas'",
    "RESTART_NOT_BACK": (
        "look at its launcher's log, or start it by hand; once 'omnictl get replicas' shows it, "
        "the same command begins anew"
    ),
    "INVALID_API_KEY": "name a file with your API key: --api-key-file; 'omnictl api-key create' makes keys",
    "ADDRESS_IN_USE": "stop what listens there, or choose another port",
}


def render(error: errors.OmniError, command: str = "omnictl") -> str:
    """The lines for standard error, without final newline. ``command`` is the one that failed."""
    lines = [f"error: {one_line(error.message)}"]
    for violation in error.violations:
        text = f"{violation.field}: {violation.description}" if violation.field else violation.description
        named = violation.field and error.message.startswith(f"{violation.field}:") and len(error.violations) == 1
        if one_line(text) not in lines[0] and not named:
            lines.append(f"  {one_line(text)}")
    if hint := hint_for(error, command):
        lines.append(f"hint: {hint}")
    return "\n".join(lines)


def hint_for(error: errors.OmniError, command: str) -> str:
    """What to do next, or empty."""
    if "hint" in error.metadata:
        return error.metadata["hint"]
    if error.reason == "USAGE":
        return f"see '{error.metadata.get('command') or command} --help'"
    if error.retry_after_s is not None:
        return f"try again in {error.retry_after_s:g} s"
    if error.reason in _HINTS:
        return _HINTS[error.reason]
    if isinstance(error, errors.NotFoundError):
        return _HINTS["NOT_FOUND"]
    if isinstance(error, errors.UnauthenticatedError):
        return "give an administrator's token with --token-file, or a certificate with --tls-cert and --tls-key"
    if isinstance(error, errors.PermissionDeniedError):
        return "this needs an administrator's certificate or token: --tls-cert and --tls-key, or --token-file"
    if isinstance(error, errors.DeadlineExceededError):
        return "give it longer with --timeout, or look at 'omnictl status'"
    if isinstance(error, errors.UnimplementedError):
        return "compare the versions with 'omnictl version'"
    if isinstance(error, errors.UnavailableError):
        return "'omnictl status' shows what is missing"
    return ""


def violations_of(error: errors.OmniError, file: str) -> list[str]:
    """``file: path: message`` for every fault of a deploy file, ready to print one per line."""
    if not error.violations:
        return [f"{file}: {one_line(error.message)}"]
    return [
        f"{file}: {v.field}: {one_line(v.description)}" if v.field else f"{file}: {one_line(v.description)}"
        for v in error.violations
    ]


def one_line(text: str) -> str:
    """``text`` without line breaks or control characters, so that a server cannot draw on the terminal."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
