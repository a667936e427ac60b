"""Where etcd is and how we identify ourselves to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import grpc

from omnicore import errors

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

    @classmethod
    def from_files(
        cls, *, ca: str = "", cert: str = "", key: str = "", user: str = "", password_file: str = ""
    ) -> EtcdCredentials | None:
        """Read from the files named; empty names are left out, and ``None`` is returned if all are empty.

        The password is the file's content without its last line break. Raises ``InvalidRequestError`` that names a
        file which cannot be read.
        """
        if not any((ca, cert, key, user, password_file)):
            return None
        password = _read("password_file", password_file) or b""
        return cls(
            _read("ca", ca),
            _read("cert", cert),
            _read("key", key),
            user,
            password.decode().removesuffix("\n").removesuffix("\r"),
        )

    @property
    def tls(self) -> bool:
        """True if the connection is to be encrypted."""
        return self.ca is not None or self.cert is not None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The TLS part, for gRPC."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def _read(field: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise errors.InvalidRequestError.field(field, f"cannot read {path}: {error.strerror}") from error


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
