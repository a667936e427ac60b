"""Where others reach this worker, and what is known of the host."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from connectors.pool import boot_id
from omni.v1 import types_pb2
from omnicore.config import split_host_port
from omnicore.errors import InvalidRequestError, UnavailableError


def probe_address(target: str) -> str:
    """The source address that this host uses to reach ``target`` ("host:port"). Nothing is sent: connecting a UDP
    socket only asks the routing table. Raises ``UnavailableError`` if no route or name leads there."""
    host, port = split_host_port(target)
    try:
        found = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UnavailableError(
            f"control plane {target}: {error}", reason="UNKNOWN_HOST", metadata={"address": target}
        ) from error
    last: OSError | None = None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                last = error
                continue
            return str(probe.getsockname()[0])
    raise UnavailableError(f"no route to {target}: {last}", reason="NO_ROUTE", metadata={"address": target}) from last


def listen_and_advertised(listen: str, advertise: str, control_plane: Sequence[str]) -> tuple[str, int, str]:
    """Host and port to listen on, and the host to advertise.

    Without ``listen`` ("host:port") it is any port of the address that leads to the first control plane, so that a
    worker is not reachable from elsewhere. ``advertise`` wins over everything; else a specific listen address is
    advertised as it is, and for a wildcard one the address that leads to the control plane. Raises
    ``InvalidRequestError`` for a wildcard address to advertise.
    """
    if advertise and _is_wildcard(advertise):
        raise InvalidRequestError.field("--advertise", f"{advertise} is no address that others can reach")
    host, port = split_host_port(listen) if listen else ("", 0)
    if not host:
        probed = probe_address(control_plane[0])
        # An advertised address may belong to a NAT in front of this host: bind what this host has.
        return probed, port, advertise or probed
    if advertise:
        return host, port, advertise
    return host, port, probe_address(control_plane[0]) if _is_wildcard(host) else host


def placement(devices: Sequence[str], topology_domain: str) -> types_pb2.Placement:
    """Where this process runs."""
    return types_pb2.Placement(
        host=socket.gethostname(),
        boot_id=boot_id(),
        devices=devices,
        topology_domain=topology_domain,
        pid=os.getpid(),
    )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
