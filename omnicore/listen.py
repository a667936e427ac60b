"""Why an address cannot be listened at, in the words that every service uses, and what to do about it."""

from __future__ import annotations

import errno
import os
import socket

from omnicore.config import join_host_port
from omnicore.errors import UnavailableError

_WHAT_TO_DO = {
    errno.EADDRINUSE: "stop what listens there, or choose another port",
    errno.EADDRNOTAVAIL: "choose an address of this machine",
    errno.EACCES: "choose a port from 1024 on",
}


def cannot_listen(host: str, port: int, error: OSError | None, reason: str = "ADDRESS_IN_USE") -> UnavailableError:
    """The error of a service that cannot have ``host:port``; ``error`` None: the kernel is asked why."""
    address = join_host_port(host, port)
    error = error or _why_not(host, port)
    message = f"cannot listen on {address}"
    if error is not None:
        number = error.errno or 0
        # Names that resolve to nothing have numbers of their own, below 0; to the others ``socket`` adds words.
        message += f": {os.strerror(number) if number > 0 else error.strerror or error}"
        if to_do := _WHAT_TO_DO.get(number):
            message += f"; {to_do}"
    return UnavailableError(message, reason=reason, metadata={"address": address})


def _why_not(host: str, port: int) -> OSError | None:
    """What the kernel says to who would listen there; gRPC tells no reason."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.create_server(address[:2], family=family):
            return None
    except OSError as error:
        return error
