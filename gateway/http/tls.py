"""HTTPS: a certificate from two files, read anew when they change."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from omnicore.errors import InvalidRequestError
from omnicore.reloaded import Reloaded
from omnicore.tls import load_certificate

CERT, KEY = "--http-tls-cert", "--http-tls-key"


def https_context(cert: str, key: str) -> ssl.SSLContext | None:
    """For a server that shows the certificate in these files, as they are at the time of each handshake; None without
    files. Raises ``InvalidRequestError`` that names the flag whose file is missing or wrong."""
    if not cert and not key:
        return None
    for flag, path in ((CERT, cert), (KEY, key)):
        if not path:
            raise InvalidRequestError.field(flag, f"required: {CERT} and {KEY} go together")
    files = Reloaded("HTTPS certificate", {CERT: cert, KEY: key}, _context)

    # Called for every ClientHello, also one that names no server.
    def on_hello(connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = files.get()

    entry = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    entry.minimum_version = ssl.TLSVersion.TLSv1_2
    entry.sni_callback = on_hello
    return entry


def _context(contents: Mapping[str, bytes]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_certificate(context, contents)
    return context
