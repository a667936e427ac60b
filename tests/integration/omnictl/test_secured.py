"""omnictl against a control plane that wants certificates and tokens, over an etcd with users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.omnictl.cli import Cli, Done
from tests.support.certificates import DevCerts
from tests.support.etcd import enable_auth, etcd_server
from tests.support.processes import Services
from tests.support.processes import services as services  # a fixture

pytestmark = pytest.mark.timeout(240)
_PASSWORD = "a-password-of-etcd"
_ONE = "pipeline: one\nstages: [{stage_id: 0, engine: sim, final_output_type: text}]\n"


class Secured:
    """The control plane's address, and omnictl with any credentials."""

    def __init__(self, cli: Cli, certs: DevCerts, address: str) -> None:
        self.cli = cli
        self.certs = certs
        self.address = address

    async def run(self, *argv: str, role: str = "", token: str = "", input: str | None = None) -> Done:
        """Run with the certificate of ``role``, and the token in the file ``token``."""
        flags = [*(self.certs.flags(role) if role else ())]
        if token:
            flags += ["--token-file", self.certs.path(token)]
        return await asyncio.to_thread(self.cli.run, "--server", self.address, *argv, *flags, input=input)


@pytest.fixture
async def secured(tmp_path: Path, services: Services) -> AsyncIterator[Secured]:
    certs = DevCerts.make(tmp_path / "certs")
    password = tmp_path / "password"
    password.write_text(_PASSWORD)
    async with etcd_server(certificates=certs.for_etcd()) as node:
        enable_auth(
            node,
            root_password=_PASSWORD,
            user="omni",
            password=_PASSWORD,
            prefix="/omni/",
            certificates=certs.for_etcd(),
        )
        running = await services.start(
            "control-plane", "--listen", "127.0.0.1:0", "--etcd", node.endpoint,
            "--etcd-ca", certs.path("ca.pem"), "--etcd-cert", certs.path("control-plane.pem"),
            "--etcd-key", certs.path("control-plane.key"),
            "--etcd-user", "omni", "--etcd-password-file", str(password),
            "--admin-token-file", certs.path("admin.token"), *certs.flags("control-plane"),
        )  # fmt: skip
        yield Secured(Cli(tmp_path), certs, str(running.ready["address"]))


async def test_certificates_and_tokens(secured: Secured) -> None:
    applied = await secured.run("apply", "-f", "-", role="admin", input=_ONE)
    assert (applied.code, applied.out) == (0, "pipeline one created (generation 1)\n")

    plaintext = await secured.run("get", "pipelines")
    assert plaintext.code == 6
    assert "does it want --tls-ca, --tls-cert, --tls-key?" in plaintext.err

    # Who has a certificate may look; changing things is for administrators.
    assert (await secured.run("get", "pipelines", "-o", "name", role="worker")).out == "one\n"
    refused = await secured.run("delete", "pipeline", "one", role="worker")
    assert refused.code == 3
    assert "hint: " in refused.err
    assert "--token-file" in refused.err
    # etcd's content, too: it tells more than the tables.
    assert (await secured.run("etcd", "ls", role="gateway")).code == 3

    # An administrator is one by certificate or by token.
    assert (await secured.run("etcd", "ls", "-o", "name", role="gateway", token="admin.token")).out == (
        "/omni/v1/default/pipelines/one\n/omni/v1/meta\n"
    )
    for command in (("etcd", "leases"), ("etcd", "status"), ("top", "--once")):
        assert (await secured.run(*command, role="admin")).code == 0, command
    wrong = await secured.run("etcd", "ls", role="gateway", token="registration.token")
    assert wrong.code == 3


async def test_credentials_of_the_context_and_what_is_wrong_with_them(secured: Secured, tmp_path: Path) -> None:
    cli, certs = secured.cli, secured.certs
    await asyncio.to_thread(cli.ok, "context", "set", "prod", "--server", secured.address, *certs.flags("admin"))
    assert (await asyncio.to_thread(cli.run, "get", "pipelines")).code == 0

    strangers = DevCerts.make(tmp_path / "strangers")
    done = await secured.run("get", "pipelines")
    assert done.code == 0  # flags and context go together
    other = await asyncio.to_thread(cli.run, "get", "pipelines", *strangers.flags("admin"))
    assert other.code == 6
    assert "its certificate is not accepted as that of control-plane.omniplane.internal" in other.err
    missing = await asyncio.to_thread(cli.run, "get", "pipelines", "--tls-ca", certs.path("ca.pem"))
    assert missing.code == 2
    assert "--tls-cert: required" in missing.err
    elsewhere = await asyncio.to_thread(cli.run, "get", "pipelines", "--tls-domain", "other.internal")
    assert elsewhere.code == 6
    assert "control-plane.other.internal" in elsewhere.err
