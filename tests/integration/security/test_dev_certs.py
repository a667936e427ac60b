"""``scripts/dev-certs``: what it makes, and what running it again changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.certificates import DevCerts

SCRIPT = Path(__file__).parents[3] / "scripts" / "dev-certs"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=30, check=False)


def test_only_the_authority_is_public(tmp_path: Path) -> None:
    certs = DevCerts.make(tmp_path / "new", "host.example", "10.0.0.5", "fd00::5")
    modes = {path.name: path.stat().st_mode & 0o077 for path in certs.directory.iterdir()}
    assert {name for name, mode in modes.items() if mode} == {"ca.pem"}
    said = subprocess.run(
        ["openssl", "x509", "-in", certs.path("gateway.pem"), "-noout", "-ext", "subjectAltName,extendedKeyUsage"],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    for part in ("DNS:gateway.omniplane.internal", "DNS:host.example", "IP Address:10.0.0.5", "IP Address:FD00:"):
        assert part in said
    assert "TLS Web Server Authentication, TLS Web Client Authentication" in said


def test_run_again_it_renews_certificates_only(tmp_path: Path) -> None:
    certs = DevCerts.make(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    DevCerts.make(tmp_path)
    kept = {path.name for path in tmp_path.iterdir() if before.get(path.name) == path.read_bytes()}
    assert kept == {"ca.pem", "ca.key", "registration.token", "admin.token"}
    assert len(certs.token("admin")) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Usage: scripts/dev-certs"),
        (("DIR", "--nonsense"), "unknown flag --nonsense"),
        (("DIR", "--role", "king"), "unknown role king"),
        (("DIR", "--days"), "--days needs a value"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(*(tmp_path / "made" if argument == "DIR" else argument for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert run("--help").returncode == 0
