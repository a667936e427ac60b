"""Finding out before anything starts that an address is taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from pathlib import Path

from omnicore.config import join_host_port, split_host_port
from omnicore.errors import InvalidRequestError, UnavailableError

_CONNECT_TIMEOUT_S = 3.0
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp


def check_free(flag: str, address: str, *, bind: bool = False) -> None:
    """Raise, naming ``flag`` and the port, unless ``address`` ("host:port") can be listened on. Port 0 always can,
    unless ``bind``: then the host must be this machine's also with port 0."""
    host, port = split_host_port(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise InvalidRequestError(f"{flag}: unknown host {host!r}: {error.strerror}", reason="USAGE") from error
    if port == 0 and not bind:
        return
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port that only waits for old connections to fade is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UnavailableError(
                    f"{flag}: port {port} of {host} is in use{_user(port)}",
                    reason="ADDRESS_IN_USE",
                    metadata={
                        "address": address,
                        "hint": f"stop what listens there, or pass {flag} {host}:PORT; port 0 takes any free one",
                    },
                ) from error
            raise InvalidRequestError(
                f"{flag}: cannot listen on {address}: {error.strerror}", reason="USAGE"
            ) from error


def check_bindable(flag: str, host: str) -> None:
    """Raise, naming ``flag``, unless ``host`` is an address of this machine that can be listened on."""
    check_free(flag, join_host_port(host, 0), bind=True)


def check_reachable(flag: str, endpoints: Sequence[str]) -> None:
    """Raise unless something listens at one of ``endpoints`` ("host:port" or "unix:PATH"). Endpoints in a form that
    only services understand are left to them."""
    failures = []
    for endpoint in endpoints:
        plain = endpoint.removeprefix("https://").removeprefix("http://")
        try:
            if plain.startswith("unix:"):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                    probe.connect(plain.removeprefix("unix:").removeprefix("//"))
            else:
                socket.create_connection(split_host_port(plain), timeout=_CONNECT_TIMEOUT_S).close()
            return
        except ValueError:
            return
        except OSError as error:
            failures.append(f"{endpoint} ({(error.strerror or str(error)).lower()})")
    if failures:
        raise UnavailableError(
            f"{flag}: nothing listens at {', '.join(failures)}",
            reason="CANNOT_CONNECT",
            metadata={"hint": f"start etcd first, or leave {flag} out: a private one is then started"},
        )


def _user(port: int) -> str:
    """ " by python3 (pid 12)" if we may know, else nothing."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        if Path(table).exists()
        for fields in map(str.split, Path(table).read_text().splitlines()[1:])
        if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in wanted for fd in (process / "fd").iterdir()):
                return f" by {(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue  # it ended, or it is somebody else's: then we may not know
    return ""
