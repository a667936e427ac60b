"""Certificates and tokens for tests, as ``scripts/dev-certs`` makes them."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

from omnicore.security import SecurityConfig
from tests.support.etcd import Certificates

_SCRIPT = Path(__file__).parents[2] / "scripts" / "dev-certs"


@dataclasses.dataclass(frozen=True, slots=True)
class DevCerts:
    """A directory that the script filled."""

    directory: Path

    @classmethod
    def make(cls, directory: Path, *arguments: str) -> DevCerts:
        """Run the script, also once more for the same directory: that renews. ``arguments`` are its further ones."""
        subprocess.run([_SCRIPT, directory, *arguments], check=True, capture_output=True, timeout=120)
        return cls(directory)

    def path(self, name: str) -> str:
        """Such as "ca.pem", "worker.key" or "admin.token"."""
        return str(self.directory / name)

    def settings(self, role: str) -> SecurityConfig:
        """The TLS flags of a service with this role."""
        return SecurityConfig(
            tls_ca=self.path("ca.pem"), tls_cert=self.path(f"{role}.pem"), tls_key=self.path(f"{role}.key")
        )

    def flags(self, role: str) -> tuple[str, ...]:
        """The same on a command line."""
        return (
            *("--tls-ca", self.path("ca.pem")),
            *("--tls-cert", self.path(f"{role}.pem")),
            *("--tls-key", self.path(f"{role}.key")),
        )

    def for_etcd(self) -> Certificates:
        """The etcd member's, and the control plane's as its client."""
        names = ("ca.pem", "etcd.pem", "etcd.key", "control-plane.pem", "control-plane.key")
        return Certificates(*(self.directory / name for name in names))

    def token(self, name: str) -> str:
        """The content of "registration" or "admin"."""
        return (self.directory / f"{name}.token").read_text().strip()
