"""Two hosts on one machine: network namespaces with a cable between them. Needs root and iproute2.

Each host has its own network, host name and boot id, so that what is only reachable inside a host is not reachable
from the other one, and nobody takes them for one machine. Files and processes are shared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCKER_LIKE = "172.17.0.1/16"
"""Address of the first network card of a host that has Docker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One of the two."""

    namespace: str
    name: str
    address: str
    """On the cable."""
    second_address: str
    """On the cable as well."""
    boot_id_file: Path

    def command(self, *command: str) -> list[str]:
        """``command``, as it is run on this host."""
        inside = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && hostname "$1" && shift 1 && exec "$@"'
        unshared = ["unshare", "--mount", "--uts", "sh", "-c", inside, str(self.boot_id_file), self.name]
        return [shutil.which("ip") or "ip", "netns", "exec", self.namespace, *unshared, *command]

    def python(self, *arguments: str) -> list[str]:
        """A Python of ours on this host."""
        return self.command(sys.executable, *arguments)


def require_namespaces() -> None:
    """Skip the test where namespaces cannot be made, and say why."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2: there is no ip command")
    probe = f"omni-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; the first card of the second one is Docker's."""
    tag = f"{os.getpid() % 100_000:05d}"
    hosts = []
    for number, name in enumerate(("host-a", "host-b"), start=1):
        boot_id = directory / f"{name}.boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        hosts.append(Host(f"omni-{tag}-{name}", name, f"10.77.0.{number}", f"10.77.1.{number}", boot_id))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
        first, second = hosts
        # A cable to nowhere, as kernels without bridges have it, too; both ends up, so that it has a carrier.
        _ip("-n", second.namespace, "link", "add", "docker0", "type", "veth", "peer", "name", "container")
        _ip("-n", second.namespace, "addr", "add", DOCKER_LIKE, "dev", "docker0")
        for end in ("docker0", "container"):
            _ip("-n", second.namespace, "link", "set", end, "up")
        ends = [f"omni{tag}a", f"omni{tag}b"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _ip("link", "set", end, "netns", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            for address in (host.address, host.second_address):
                _ip("-n", host.namespace, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", host.namespace, "link", "set", end, "up")
        yield first, second


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)
