"""Addresses at which peers reach an engine."""

from __future__ import annotations

import ipaddress
import socket

from omnicore import errors


def own_ipv4(host: str, field: str) -> str:
    """``host`` as an IPv4 address; "auto": the one that leads out of this machine, loopback if none does. Raises
    ``InvalidRequestError`` naming ``field``."""
    if host == "auto":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
            except OSError:
                return "127.0.0.1"
            return str(probe.getsockname()[0])
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError as error:
        raise errors.InvalidRequestError.field(field, f"{host!r} has no IPv4 address: {error}") from None
    if ipaddress.IPv4Address(address).is_unspecified:
        raise errors.InvalidRequestError.field(field, f"{host!r} is no address that peers can reach")
    return str(address)


def check_free(host: str, port: int) -> None:
    """Raises ``FailedPreconditionError`` ADDRESS_IN_USE if nobody could listen there now; port 0 is always free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise errors.FailedPreconditionError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                reason="ADDRESS_IN_USE",
                metadata={"address": f"{host}:{port}"},
            ) from error


def free_port(host: str) -> int:
    """A port on which nobody listens now; another process may be quicker to take it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
