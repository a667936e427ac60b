"""Where etcd is and how we identify ourselves to it."""

from __future__ import annotations

import dataclasses
import ssl
from collections.abc import Mapping, Sequence

import grpc

from omnicore import errors
from omnicore.reloaded import Reloaded
from omnicore.tls import load_certificate

_ACCEPTED = 'accepted are "host:port", "http://host:port", "https://host:port" and "unix:/path"'


@dataclasses.dataclass(frozen=True, slots=True)
class EtcdCredentials:
    """TLS and user of an etcd connection; all parts are optional.

    ``ca``, ``cert`` and ``key`` are PEM. ``cert`` and ``key`` (the client's) go together. Without ``ca`` but with
    ``cert``, or with "https://" endpoints, the system's authorities are trusted.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = dataclasses.field(default=None, repr=False)
    user: str = ""
    password: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise errors.InvalidRequestError.field("cert", "a client certificate and its key go together")
        if self.password and not self.user:
            raise errors.InvalidRequestError.field("user", "a password needs a user")

    @property
    def tls(self) -> bool:
        """True if the connection is to be encrypted."""
        return self.ca is not None or self.cert is not None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The TLS part, for gRPC."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


class EtcdCredentialFiles:
    """Credentials from files, as they are now: certificates and passwords rotate without a restart."""

    def __init__(self, *, ca: str = "", cert: str = "", key: str = "", user: str = "", password_file: str = "") -> None:
        """Empty names are left out. Raises ``InvalidRequestError`` that names the flag whose file is wrong."""
        files = {"--etcd-ca": ca, "--etcd-cert": cert, "--etcd-key": key, "--etcd-password-file": password_file}
        self._user = user
        self._files = Reloaded("etcd credentials", {flag: path for flag, path in files.items() if path}, self._make)

    def current(self) -> EtcdCredentials:
        """Reads the files again if they have changed."""
        return self._files.get()

    def _make(self, contents: Mapping[str, bytes]) -> EtcdCredentials:
        password = contents.get("--etcd-password-file", b"").decode(errors="replace")
        made = EtcdCredentials(
            contents.get("--etcd-ca"),
            contents.get("--etcd-cert"),
            contents.get("--etcd-key"),
            self._user,
            password.removesuffix("\n").removesuffix("\r"),
        )
        if made.cert is not None and made.key is not None:
            pair = {"--etcd-cert": made.cert, "--etcd-key": made.key}
            load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pair)
        return made


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One member's client address: ``target`` for gRPC, ``tls`` if the address itself asks for it."""

    target: str
    tls: bool


def parse_endpoints(endpoints: Sequence[str]) -> list[Endpoint]:
    """Addresses as people write them. Raises ``InvalidRequestError`` with what is accepted."""
    if isinstance(endpoints, str) or not endpoints:
        raise errors.InvalidRequestError.field("endpoints", f"needs a list of at least one address; {_ACCEPTED}")
    return [_parse(text) for text in endpoints]


def _parse(text: str) -> Endpoint:
    scheme, separator, rest = text.partition("://")
    if text.startswith("unix:"):
        path = text.removeprefix("unix:").removeprefix("//")
        if path.startswith("/"):
            return Endpoint(f"unix:{path}", tls=False)
    elif not separator or scheme in ("http", "https"):
        host, _, port = (rest if separator else text).rstrip("/").rpartition(":")
        if host and "/" not in host and port.isdigit() and 0 < int(port) < 65536:
            return Endpoint(f"{host}:{port}", tls=scheme == "https")
    raise errors.InvalidRequestError.field("endpoints", f"cannot use {text!r}; {_ACCEPTED}")
