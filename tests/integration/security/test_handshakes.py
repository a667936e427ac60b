"""Who gets a connection: both ends must have a certificate of the authority, valid now, the server that of its role."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest

from omnicore import rpc
from omnicore.access import Role
from omnicore.errors import InvalidRequestError, UnavailableError, UnimplementedError
from omnicore.security import Security, SecurityConfig
from tests.integration.security.harness import outcome, serving
from tests.support.certificates import DevCerts

READ = "RegistryService/ListReplicas"  # everyone who is connected may


async def refused(security: Security, address: str, peer: Role = Role.WORKER) -> str:
    """The words with which a connection fails."""
    async with security.channel(address, peer) as channel:
        error = await outcome(channel, READ)
    assert isinstance(error, UnavailableError)
    return error.message


async def test_members_reach_a_member_by_its_role_at_any_address(certs: DevCerts) -> None:
    async with serving(Security(certs.settings("worker"), serves=Role.WORKER)) as address:
        for role in Role:
            async with Security(certs.settings(role)).to_worker(address) as channel:
                assert isinstance(await outcome(channel, READ), UnimplementedError)
        # A member that is not what the caller looks for: nobody poses as a control plane.
        assert "Hostname Verification" in await refused(Security(certs.settings("worker")), address, Role.CONTROL_PLANE)


async def test_outsiders_get_no_connection(certs: DevCerts, strangers: DevCerts) -> None:
    async with serving(Security(certs.settings("worker"), serves=Role.WORKER)) as address:
        assert await refused(Security(strangers.settings("gateway")), address)
        # One who believes our authority, but shows a certificate of another one.
        posing = dataclasses.replace(strangers.settings("gateway"), tls_ca=certs.path("ca.pem"))
        credentials = grpc.ssl_channel_credentials(
            Path(posing.tls_ca).read_bytes(), Path(posing.tls_key).read_bytes(), Path(posing.tls_cert).read_bytes()
        )
        nobody = grpc.ssl_channel_credentials(Path(certs.path("ca.pem")).read_bytes())
        for shown in (credentials, nobody, None):
            async with rpc.channel(address, shown, "worker.omniplane.internal") as channel:
                assert isinstance(await outcome(channel, READ), UnavailableError)


async def test_a_server_of_another_authority_is_not_believed(certs: DevCerts, strangers: DevCerts) -> None:
    async with serving(Security(strangers.settings("worker"), serves=Role.WORKER)) as address:
        assert "CERTIFICATE_VERIFY_FAILED" in await refused(Security(certs.settings("gateway")), address)


async def test_expired_certificates(tmp_path: Path) -> None:
    certs = DevCerts.make(tmp_path)
    server = Security(certs.settings("worker"), serves=Role.WORKER)
    good = Path(certs.path("gateway.pem")).read_bytes(), Path(certs.path("gateway.key")).read_bytes()
    DevCerts.make(tmp_path, "--days", "-1", "--role", "gateway", "--role", "worker")
    expired = Path(certs.path("gateway.pem")).read_bytes(), Path(certs.path("gateway.key")).read_bytes()
    # Ours refuse to start with one…
    for role in (Role.GATEWAY, Role.WORKER):
        with pytest.raises(InvalidRequestError, match=r"--tls-cert: .*certificate has expired"):
            Security(certs.settings(role))
    # …and a server refuses a client that uses one all the same.
    ca = Path(certs.path("ca.pem")).read_bytes()
    async with serving(server) as address:
        for (cert, key), kind in ((good, UnimplementedError), (expired, UnavailableError)):
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
            async with rpc.channel(address, credentials, "worker.omniplane.internal") as channel:
                assert isinstance(await outcome(channel, READ), kind)


@pytest.mark.parametrize(
    ("serves", "files", "message"),
    [
        (Role.WORKER, {"tls_cert": "gateway.pem"}, "--tls-key: the key is not that of the certificate in --tls-cert"),
        (Role.WORKER, {"tls_cert": "worker.key"}, "--tls-cert: the file holds no usable PEM certificate"),
        (Role.WORKER, {"tls_key": "worker.pem"}, "--tls-key: the file holds no usable PEM private key"),
        (Role.WORKER, {"tls_key": "garbage"}, "--tls-key: the file holds no usable PEM private key"),
        (Role.WORKER, {"tls_ca": "garbage"}, "--tls-ca: the file holds no PEM certificates"),
        (Role.WORKER, {"tls_ca": "empty"}, "--tls-ca: the file holds no PEM certificates"),
        (Role.WORKER, {"tls_ca": "other-ca.pem"}, "--tls-cert: cannot be used with the authority of --tls-ca: "),
        (Role.WORKER, {"tls_key": "encrypted.key"}, "--tls-key: the key is encrypted; give it without a passphrase"),
        (
            Role.GATEWAY,
            {},
            "--tls-cert: the certificate is that of another role: its callers look for 'gateway.omniplane.internal'",
        ),
    ],
)
def test_wrong_files_are_named_at_the_start(
    certs: DevCerts, strangers: DevCerts, tmp_path: Path, serves: Role, files: dict[str, str], message: str
) -> None:
    for name in ("gateway.pem", "worker.pem", "worker.key"):
        shutil.copy(certs.path(name), tmp_path / name)
    shutil.copy(strangers.path("ca.pem"), tmp_path / "other-ca.pem")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "garbage").write_bytes(bytes(range(256)))
    encrypt = ("openssl", "pkcs8", "-topk8", "-in", "worker.key", "-passout", "pass:phrase", "-out", "encrypted.key")
    subprocess.run(encrypt, cwd=tmp_path, check=True, timeout=30)
    known = dataclasses.asdict(certs.settings("worker"))
    settings = SecurityConfig(**known | {field: str(tmp_path / name) for field, name in files.items()})
    with pytest.raises(InvalidRequestError, match="^" + re.escape(message)):
        Security(settings, serves=serves)


async def test_a_certificate_may_hang_on_an_intermediate_authority(certs: DevCerts, tmp_path: Path) -> None:
    """What links it to the authority stands behind it in the same file."""
    for name in ("ca.pem", "ca.key", "worker.key"):
        shutil.copy(certs.path(name), tmp_path / name)
    (tmp_path / "between.ext").write_text("basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign\n")
    (tmp_path / "leaf.ext").write_text("subjectAltName=DNS:Worker.omniplane.internal\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for command in (
        ("req", "-new", *curve, "-keyout", "between.key", "-subj", "/CN=between", "-out", "between.csr"),
        ("x509", "-req", "-in", "between.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
         "-extfile", "between.ext", "-out", "between.pem"),
        ("req", "-new", "-key", "worker.key", "-subj", "/CN=leaf", "-out", "leaf.csr"),
        ("x509", "-req", "-in", "leaf.csr", "-CA", "between.pem", "-CAkey", "between.key", "-CAcreateserial",
         "-days", "2", "-extfile", "leaf.ext", "-out", "leaf.pem"),
    ):  # fmt: skip
        subprocess.run(("openssl", *command), cwd=tmp_path, check=True, capture_output=True, timeout=30)
    (tmp_path / "chain.pem").write_bytes((tmp_path / "leaf.pem").read_bytes() + (tmp_path / "between.pem").read_bytes())
    settings = dataclasses.replace(
        certs.settings("worker"), tls_cert=str(tmp_path / "chain.pem"), tls_key=str(tmp_path / "worker.key")
    )
    chained = Security(settings, serves=Role.WORKER)
    async with serving(chained) as address:
        for caller in (chained, Security(certs.settings("worker"))):
            async with caller.to_worker(address) as channel:
                # The role's name counts in any spelling: only a worker may do this.
                assert isinstance(await outcome(channel, "TransferService/Claim"), UnimplementedError)
    with pytest.raises(InvalidRequestError, match="unable to get local issuer"):
        Security(dataclasses.replace(settings, tls_cert=str(tmp_path / "leaf.pem")))


def test_another_domain_is_another_cluster(tmp_path: Path) -> None:
    certs = DevCerts.make(tmp_path, "--domain", "blue.example", "--role", "worker")
    settings = certs.settings("worker")
    Security(dataclasses.replace(settings, tls_domain="blue.example"), serves=Role.WORKER)
    with pytest.raises(InvalidRequestError, match=r"worker\.omniplane\.internal"):
        Security(settings, serves=Role.WORKER)


def test_a_clients_certificate_needs_no_name(certs: DevCerts) -> None:
    assert Security(certs.settings("etcd")).encrypted
    assert not Security(SecurityConfig()).encrypted
