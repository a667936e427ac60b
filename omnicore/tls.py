"""Certificates from files: what this process shows to others, and which authorities it believes.

Before they are used, and again whenever they change, a handshake in memory proves that certificate, key and authority
belong together, are valid now and name what they must. So a wrong set is a start-up error that says what is wrong, and
a wrong change is a line in the log, not an outage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from omnicore.errors import InvalidRequestError
from omnicore.log import get_logger
from omnicore.reloaded import Reloaded

_log = get_logger(__name__)

CA, CERT, KEY = "--tls-ca", "--tls-cert", "--tls-key"

WARN_BEFORE_S = 7 * 86400.0
_WARN_EVERY_S = 3600.0
_HOSTNAME_MISMATCH = 62  # X509_V_ERR_HOSTNAME_MISMATCH of openssl/x509_vfy.h


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """One set of PEM files, checked."""

    ca: bytes
    cert: bytes
    key: bytes = dataclasses.field(repr=False)
    valid_until_s: float
    """Wall time, seconds since 1970."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client that shows the certificate, and believes servers that the authority signed."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def client_context(self) -> ssl.SSLContext:
        """The same, for a client that speaks HTTP/2 by itself."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_configuration(self) -> Any:
        """For a server that shows the certificate, and demands one that the authority signed."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], root_certificates=self.ca)

    def server_context(self) -> ssl.SSLContext:
        """The same, for a server that speaks HTTP/2 by itself."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        _believe(context, self.ca)
        load_certificate(context, {CERT: self.cert, KEY: self.key})
        return context


class IdentityFiles:
    """The identity in three files, as they are now."""

    def __init__(self, ca: str, cert: str, key: str, server_name: str = "") -> None:
        """``ca`` holds one or more authorities, ``cert`` the certificate and what links it to one of them. A server's
        certificate must be for the DNS name ``server_name``, which its callers look for; empty: only a client's.
        Raises ``InvalidRequestError`` that names the flag whose file is wrong."""
        self._server_name = server_name
        self._warned_s = float("-inf")
        self._files = Reloaded("TLS certificate", {CA: ca, CERT: cert, KEY: key}, self._make)

    def current(self) -> Identity:
        """Reads the files again if they have changed; says so in the log if the certificate ends soon."""
        identity = self._files.get()
        left_s = identity.valid_until_s - time.time()
        if left_s < WARN_BEFORE_S and time.monotonic() - self._warned_s > _WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _log.warning("TLS certificate ends soon, or has ended: renew it", days_left=round(left_s / 86400, 1))
        return identity

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server. A changed certificate is shown, a changed authority believed, from the next handshake on."""
        identity = self.current()
        return grpc.dynamic_ssl_server_credentials(
            identity.server_configuration(), _fetcher(self.current, identity), require_client_authentication=True
        )

    def _make(self, contents: Mapping[str, bytes]) -> Identity:
        said = _prove(contents, self._server_name)
        names = ",".join(str(name) for _, name in said.get("subjectAltName", ()))
        _log.info("TLS certificate", names=names, valid_until=said["notAfter"])
        valid_until_s = float(ssl.cert_time_to_seconds(said["notAfter"]))
        return Identity(contents[CA], contents[CERT], contents[KEY], valid_until_s)


def _fetcher(current: Callable[[], Identity], given: Identity) -> Callable[[], Any]:
    """What gRPC calls before every handshake, in threads of its own: a new configuration, or None for the last one."""
    last = given

    def fetch() -> Any:
        nonlocal last
        identity = current()
        if identity is last:
            return None
        last = identity
        return identity.server_configuration()

    return fetch


def _prove(contents: Mapping[str, bytes], server_name: str) -> Mapping[str, Any]:
    """What the certificate says. Raises what is wrong with it as a client's and, if ``server_name`` is given, as that
    server's."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        _believe(context, contents[CA])
        load_certificate(context, {CERT: contents[CERT], KEY: contents[KEY]})
    server.verify_mode = ssl.CERT_REQUIRED
    if server_name:
        client.check_hostname = True
    else:
        client.verify_mode = ssl.CERT_NONE
    try:
        return _handshake(client, server, server_name or None)
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or "the handshake failed"
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == _HOSTNAME_MISMATCH:
            told = f"the certificate is that of another role: its callers look for {server_name!r}"
            raise InvalidRequestError.field(CERT, told) from None
        raise InvalidRequestError.field(CERT, f"cannot be used with the authority of {CA}: {why}") from None


def _believe(context: ssl.SSLContext, ca: bytes) -> None:
    with _readable(ca) as path:
        try:
            context.load_verify_locations(path)
        except ssl.SSLError:
            raise InvalidRequestError.field(CA, "the file holds no PEM certificates") from None


def load_certificate(context: ssl.SSLContext, contents: Mapping[str, bytes]) -> None:
    """Have ``context`` show a certificate. ``contents`` are the PEM files of certificate and key, in this order, by the
    flag that named them. Raises ``InvalidRequestError`` that names the flag whose file is wrong."""
    (cert_flag, cert_pem), (key_flag, key_pem) = contents.items()

    def never() -> bytes:
        raise InvalidRequestError.field(key_flag, "the key is encrypted; give it without a passphrase")

    with _readable(cert_pem) as cert, _readable(key_pem) as key:
        try:
            context.load_cert_chain(cert, key, never)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise InvalidRequestError.field(
                    key_flag, f"the key is not that of the certificate in {cert_flag}"
                ) from None
            # OpenSSL does not tell which of the two it could not read.
            if b"-----BEGIN CERTIFICATE-----" in cert_pem:
                raise InvalidRequestError.field(key_flag, "the file holds no usable PEM private key") from None
            raise InvalidRequestError.field(cert_flag, "the file holds no usable PEM certificate") from None


@contextlib.contextmanager
def _readable(content: bytes) -> Iterator[Path]:
    """A file that holds ``content``, in memory only: Python's ``ssl`` takes certificates from files alone, and reading
    the named ones once more could meet others than those that were checked."""
    fd = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext, server_name: str | None) -> Mapping[str, Any]:
    """Both ends in this process; returns the client's certificate as the server saw it. Raises ``ssl.SSLError``."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=server_name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    pending = list(ends)
    for _ in range(20):  # a handshake takes three turns
        for end in list(pending):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                pending.remove(end)
        if not pending:
            return ends[1].getpeercert() or {}
    raise ssl.SSLError("the handshake does not end")
