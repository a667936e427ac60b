"""What may be started: plaintext beyond loopback only where it is asked for, and the error names the flags."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest

from tests.integration.security.harness import serial
from tests.support.certificates import DevCerts
from tests.support.processes import Services
from tests.support.processes import services as services  # a fixture

pytestmark = pytest.mark.timeout(240)

WORKER = ("stage-worker", "--pipeline", "p", "--stage-id", "0")
REMEDY = "--tls-ca, --tls-cert and --tls-key, or say --insecure"
# 192.0.2.0/24 is for documentation: nobody is there, and nothing is sent before the check.
COMMANDS = [
    ("--listen", REMEDY, ("control-plane", "--listen", "0.0.0.0:0", "--etcd", "127.0.0.1:1")),
    ("--listen", REMEDY, ("control-plane", "--listen", "[::]:0", "--etcd", "127.0.0.1:1")),
    (
        "--etcd",
        "--etcd-ca (and --etcd-cert with --etcd-key), or https://host:port, or say --insecure",
        ("control-plane", "--listen", "127.0.0.1:0", "--etcd", "127.0.0.1:1,192.0.2.1:2379"),
    ),
    ("--grpc", REMEDY, ("gateway", "--http", "127.0.0.1:0", "--grpc", "0.0.0.0:0", "--control-plane", "127.0.0.1:1")),
    (
        "--control-plane",
        REMEDY,
        ("gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", "control-plane.example:7700"),
    ),
    ("--control-plane", REMEDY, (*WORKER, "--control-plane", "127.0.0.1:1,192.0.2.1:7700")),
    ("--listen", REMEDY, (*WORKER, "--control-plane", "127.0.0.1:1", "--listen", "192.0.2.1:0")),
    ("--tls-key", "go together", (*WORKER, "--control-plane", "127.0.0.1:1", "--tls-ca", "a", "--tls-cert", "b")),
    (
        "--http-tls-key",
        "go together",
        ("gateway", "--http", "127.0.0.1:0", "--control-plane", "127.0.0.1:1", "--http-tls-cert", "a"),
    ),
    (
        "--admin-token-file",
        "cannot read",
        ("control-plane", "--listen", "127.0.0.1:0", "--etcd", "127.0.0.1:1", "--admin-token-file", "/nonexistent"),
    ),
]


async def test_refused_with_exit_code_2_and_the_flags(services: Services) -> None:
    started = [(services.spawn(*command), flag, remedy) for flag, remedy, command in COMMANDS]
    for process, flag, remedy in started:
        assert await process.wait_exit(180) == 2, process.logs()
        last = process.logs().splitlines()[-1]
        assert last.startswith(f"error: {flag}: "), last
        assert remedy in last


async def test_insecure_is_insecure(services: Services) -> None:
    control_plane = await services.start(
        "control-plane", "--listen", "0.0.0.0:0", "--etcd", "embedded", "--insecure"
    )  # fmt: skip
    assert "anybody who can connect can do anything" in control_plane.logs()
    port = control_plane.ready["address"].rpartition(":")[2]
    gateway = await services.start(
        "gateway", "--http", "0.0.0.0:0", "--grpc", "127.0.0.1:0", "--control-plane", f"127.0.0.1:{port}"
    )
    assert "HTTP without TLS beyond loopback" in gateway.logs(), "open by custom, but said"


async def test_mutual_tls_may_listen_anywhere(services: Services, certs: DevCerts) -> None:
    control_plane = await services.start(
        "control-plane", "--listen", "0.0.0.0:0", "--etcd", "embedded", *certs.flags("control-plane")
    )
    assert "anybody" not in control_plane.logs()


async def test_environment_says_the_same_as_flags(services: Services, certs: DevCerts) -> None:
    environment = {
        "OMNI_CONTROL_PLANE_TLS_CA": certs.path("ca.pem"),
        "OMNI_CONTROL_PLANE_TLS_CERT": certs.path("control-plane.pem"),
        "OMNI_CONTROL_PLANE_TLS_KEY": certs.path("control-plane.key"),
    }
    await services.start("control-plane", "--listen", "0.0.0.0:0", "--etcd", "embedded", env=environment)


async def test_https_follows_its_files(services: Services, tmp_path: Path) -> None:
    certs = DevCerts.make(tmp_path / "certs")
    control_plane = await services.start("control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded")
    gateway = await services.start(
        "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane",
        control_plane.ready["address"], "--http-tls-cert", certs.path("gateway.pem"),
        "--http-tls-key", certs.path("gateway.key"),
    )  # fmt: skip
    address = gateway.ready["http"]

    first = await serial(address, certs, "localhost")
    DevCerts.make(certs.directory, "--role", "gateway")
    assert await serial(address, certs, "localhost") != first
    context = ssl.create_default_context(cafile=certs.path("ca.pem"))
    async with aiohttp.ClientSession() as http:
        async with http.get(f"https://{address}/health", ssl=context) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(f"https://{address}/health")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://{address}/health")
