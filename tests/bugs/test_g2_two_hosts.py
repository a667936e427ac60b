"""A worker on another host, whose first network card leads nowhere; ``docs/known-failures.md`` has the list.

The other host is a network namespace of this one (iproute2, root): without the right to make one the tests are skipped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest

from omni.v1 import registry_service_pb2 as pb
from tests.bugs.harness import TEXT, USER
from tests.integration.control_plane.harness import Client
from tests.support.gateways import until_routable
from tests.support.processes import Services
from tests.support.processes import services as services


@dataclasses.dataclass(frozen=True, slots=True)
class Hosts:
    """This host's address towards the other one, that one's address towards us, and how to run something there."""

    here: str
    there: str
    prefix: tuple[str, ...]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Another host with two cards: one as Docker makes it, then the one that is connected with us."""
    number = os.getpid() % 60_000
    name, ours = f"omni-{number}", f"omni{number}"
    network = f"10.{200 + number // 15_000}.{number % 15_000 // 60}"
    last = number % 60 * 4
    here, there = f"{network}.{last + 1}", f"{network}.{last + 2}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        inside = ("-n", name)
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "add", "docker0", "type", "veth", "peer", "name", "docker1")
        _ip(*inside, "address", "add", "172.17.0.1/16", "dev", "docker0")
        _ip("link", "add", ours, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("address", "add", f"{here}/30", "dev", ours)
        _ip(*inside, "address", "add", f"{there}/30", "dev", "eth0")
        for card in ("docker0", "docker1", "eth0"):
            _ip(*inside, "link", "set", card, "up")
        _ip("link", "set", ours, "up")
        yield Hosts(here, there, ("ip", "netns", "exec", name))
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=60)


@contextlib.asynccontextmanager
async def control_plane(services: Services, hosts: Hosts) -> AsyncIterator[Client]:
    """On this host, reachable for the other one."""
    plane = await services.start("control-plane", "--listen", f"{hosts.here}:0", "--etcd", "embedded", "--insecure")
    client = Client(plane.ready["address"])
    async with client.channel:
        await client.apply(TEXT)
        yield client


async def endpoints(client: Client) -> list[str]:
    listed = await client.registry.ListReplicas(pb.ListReplicasRequest())
    return [replica.endpoint.rpartition(":")[0] for replica in listed.replicas]


def worker_flags(client: Client) -> tuple[str, ...]:
    return "--pipeline", "text", "--stage-id", "0", "--control-plane", client.address, "--insecure"


async def test_bug_23_the_advertised_address_is_the_one_that_leads_to_the_control_plane(
    services: Services, hosts: Hosts
) -> None:
    async with control_plane(services, hosts) as client:
        await services.start("stage-worker", *worker_flags(client), prefix=hosts.prefix)
        assert await endpoints(client) == [hosts.there]
        gateway = await services.start(
            "gateway", "--control-plane", client.address, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--insecure"
        )
        body = {"model": "text", "messages": USER}
        url = f"http://{gateway.ready['http']}"
        await until_routable(url, "text", {0: 1})
        async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()


async def test_bug_23_an_address_that_was_said_wins(services: Services, hosts: Hosts) -> None:
    async with control_plane(services, hosts) as client:
        await services.start("stage-worker", *worker_flags(client), "-ora", "172.17.0.1", prefix=hosts.prefix)
        assert await endpoints(client) == ["172.17.0.1"]
