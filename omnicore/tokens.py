"""Bearer tokens in files: one a line, the first is sent, all are accepted."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from omnicore.errors import InvalidRequestError
from omnicore.reloaded import Reloaded

MIN_LENGTH = 16
MAX_LENGTH = 1024
_SCHEME = "bearer "


class TokenFile:
    """The tokens of one file: one a line, without blanks inside; empty lines and lines with ``#`` in front do not
    count. To rotate: add the new one at servers, put it first at callers, then remove the old one at servers. Changes
    are seen without a restart."""

    def __init__(self, flag: str, path: str) -> None:
        """Raises ``InvalidRequestError`` that names ``flag`` if the file cannot be read or holds no usable token."""
        self._tokens = Reloaded(f"tokens of {flag}", {flag: path}, _parse)

    def first(self) -> str:
        """The token to send."""
        return self._tokens.get()[0]

    def holds(self, token: str) -> bool:
        """Whether it is one of these. Takes the same time for every token of the same length."""
        given = _digest(token)
        found = False
        for known in self._tokens.get():
            found |= hmac.compare_digest(given, _digest(known))
        return found


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries ``token``."""
    return (("authorization", f"Bearer {token}"),)


def sent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The token in a call's metadata, or ""."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _parse(contents: Mapping[str, bytes]) -> tuple[str, ...]:
    ((flag, content),) = contents.items()
    tokens = []
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        # Never the token itself in the message.
        if not MIN_LENGTH <= len(text) <= MAX_LENGTH or not all(0x21 <= byte <= 0x7E for byte in text):
            raise InvalidRequestError.field(
                flag,
                f"line {number} of the file is no token: {MIN_LENGTH} to {MAX_LENGTH} visible ASCII characters "
                "without blanks, one token a line",
            )
        tokens.append(text.decode("ascii"))
    if not tokens:
        raise InvalidRequestError.field(flag, "the file holds no token")
    return tuple(tokens)
