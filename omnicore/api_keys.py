"""Files of API keys: who may use a gateway over HTTP and gRPC, as what, and how much.

One key a line, as a JSON object, so that a line can be appended, and a wrong one be named; empty lines and lines with
``#`` in front do not count::

    {"id":"alice","sha256":"9f86…","roles":["client"],"requests_per_minute":600,"priority":"normal"}

The key itself is in no file: the line has its SHA-256. Keys are 256 random bits, which no dictionary holds and nobody
can try through, so a slow hash (scrypt) would protect nothing and cost each request milliseconds; nor does a salt help
where no two keys are alike. The digest finds the key by one look-up: what its time tells an attacker is about digests,
which nobody can aim. Keys that people made up are not for this file: ``hashed`` refuses what is short.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from omnicore.errors import InvalidRequestError

MIN_LENGTH = 32
MAX_LENGTH = 512
_PREFIX = "omni_"
_RANDOM_BYTES = 32
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST = 2**53 - 1  # what every reader of JSON can hold


class KeyRole(enum.StrEnum):
    """What a key may do; each may do what those before it may."""

    READ = "read"
    """Look: models, requests, state."""
    CLIENT = "client"
    """Send requests."""
    ADMIN = "admin"
    """Change things, and end the requests of others."""

    def includes(self, other: KeyRole) -> bool:
        """Whether who has this role may do what ``other`` may."""
        return _RANK[self] >= _RANK[other]


_RANK = {role: rank for rank, role in enumerate(KeyRole)}


class Priority(enum.IntEnum):
    """Classes of requests; smaller is sooner."""

    HIGH = 0
    NORMAL = 1
    LOW = 2

    @property
    def label(self) -> str:
        """As people write it."""
        return self.name.lower()


_PRIORITIES = {priority.label: priority for priority in Priority}


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file. Limits of 0 are none."""

    id: str
    """For logs, metrics and people."""
    sha256: str
    """Of the key, 64 hex digits."""
    roles: frozenset[KeyRole] = frozenset({KeyRole.CLIENT})
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and completions."""
    max_concurrent: int = 0
    """Requests that run or wait."""
    priority: Priority = Priority.NORMAL
    """Of its requests that name none; none goes before it."""
    expires_s: float | None = None
    """Wall time."""
    disabled: bool = False

    def may(self, role: KeyRole) -> bool:
        """Whether it has ``role``."""
        return any(own.includes(role) for own in self.roles)


class KeyTable:
    """The keys of a file, found by what callers send."""

    def __init__(self, keys: Mapping[bytes, ApiKey]) -> None:
        """``keys`` by the digest of each."""
        self._keys = dict(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    def find(self, key: bytes) -> ApiKey | None:
        """The line of ``key``, also if it is disabled or has expired."""
        digest = hashlib.sha256(key).digest()
        found = self._keys.get(digest)
        # Equal by now; said in constant time as well, so that nothing hangs on how a dict compares.
        return found if found is not None and hmac.compare_digest(bytes.fromhex(found.sha256), digest) else None


def new_key() -> str:
    """A key that nobody has."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def hashed(key: str) -> str:
    """What the file holds of ``key``. Raises ``InvalidRequestError`` for what cannot be one; never shows it."""
    if not MIN_LENGTH <= len(key) <= MAX_LENGTH or not all("!" <= char <= "~" for char in key):
        raise InvalidRequestError.field(
            "key", f"must be {MIN_LENGTH} to {MAX_LENGTH} visible ASCII characters without blanks, and random"
        )
    return hashlib.sha256(key.encode()).hexdigest()


def parse(flag: str, content: bytes) -> KeyTable:
    """The keys of a file that ``flag`` named. Raises ``InvalidRequestError`` that names line and field; also for a file
    without any key, which is what is there while another one is being written."""
    lines = _Lines(flag, content)
    if not lines.keys:
        raise InvalidRequestError.field(flag, "the file holds no key; `omnictl api-key create` makes one")
    return KeyTable({bytes.fromhex(key.sha256): key for key in lines.keys})


def check_addition(flag: str, content: bytes, addition: ApiKey) -> None:
    """Raise ``InvalidRequestError`` unless a line of ``addition`` may follow ``content``, which may be empty; what is
    wrong with the one is told apart from what is wrong with the other."""
    lines = _Lines(flag, content)
    try:
        lines.add(addition, content.count(b"\n") + 1)
    except ValueError as error:
        told = f"not added, {error}; choose another, or take that line out"
        raise InvalidRequestError.field(flag, told) from None


class _Lines:
    """The keys of a file in their order; no two have the same id or the same key."""

    def __init__(self, flag: str, content: bytes) -> None:
        self.keys: list[ApiKey] = []
        self._taken: dict[str, int] = {}
        for number, line in enumerate(content.split(b"\n"), 1):
            text = line.strip()
            if not text or text.startswith(b"#"):
                continue
            try:
                self.add(_parse_line(text), number)
            except ValueError as error:
                raise InvalidRequestError.field(flag, f"line {number} of the file: {error}") from None

    def add(self, key: ApiKey, number: int) -> None:
        """Raises ``ValueError`` that says which line is in the way."""
        for name, what in ((key.id, f"id {key.id!r}"), (key.sha256, "key")):
            if name in self._taken:
                raise ValueError(f"its {what} is in line {self._taken[name]} already")
            self._taken[name] = number
        self.keys.append(key)


def line(key: ApiKey) -> str:
    """``key`` as a line of the file, without its end; what has its default is left out."""
    row: dict[str, Any] = {"id": key.id, "sha256": key.sha256, "roles": sorted(key.roles)}
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        if value := getattr(key, name):
            row[name] = value
    if key.priority is not Priority.NORMAL:
        row["priority"] = key.priority.label
    if key.expires_s is not None:
        row["expires"] = datetime.datetime.fromtimestamp(key.expires_s, datetime.UTC).isoformat(timespec="seconds")
    if key.disabled:
        row["disabled"] = True
    text = orjson.dumps(row)
    _parse_line(text)
    return text.decode()


_FIELDS = (
    *("id", "sha256", "roles", "requests_per_minute", "tokens_per_minute", "max_concurrent"),
    *("priority", "expires", "disabled", "comment"),
)


def _parse_line(text: bytes) -> ApiKey:
    """Raises ``ValueError`` that names the field, and never shows what a key might be."""
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError("must be a JSON object")  # noqa: TRY004 -- one kind of error for all that is wrong
    for name in row:
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, 1)
            raise ValueError(f"unknown field{f', did you mean {near[0]!r}?' if near else ''}; known: {_FIELDS}")
    key_id = row.get("id")
    if not isinstance(key_id, str) or not _ID.fullmatch(key_id):
        raise ValueError("id: must be 1 to 64 letters, digits, '.', '_', '@' or '-', beginning with a letter or digit")
    digest = row.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("sha256: must be the 64 hex digits, in lower case, that 'omnictl api-key hash' prints")
    return ApiKey(
        id=key_id,
        sha256=digest,
        roles=_roles(row.get("roles", [KeyRole.CLIENT])),
        requests_per_minute=_limit(row, "requests_per_minute"),
        tokens_per_minute=_limit(row, "tokens_per_minute"),
        max_concurrent=_limit(row, "max_concurrent"),
        priority=parse_priority(row.get("priority", Priority.NORMAL.label)),
        expires_s=None if row.get("expires") is None else parse_time(row["expires"]),
        disabled=_flag(row, "disabled"),
    )


def parse_priority(value: Any) -> Priority:
    """ "high", "normal" or "low". Raises ``ValueError``."""
    if not isinstance(value, str) or value not in _PRIORITIES:
        raise ValueError(f"priority: must be one of {', '.join(_PRIORITIES)}")
    return _PRIORITIES[value]


def parse_time(value: Any) -> float:
    """Seconds since the epoch of an ISO 8601 time with its zone, or of a date (its begin, UTC). Raises
    ``ValueError``."""
    try:
        when = datetime.datetime.fromisoformat(value)
        if isinstance(value, str) and len(value) <= len("2027-01-01"):
            when = when.replace(tzinfo=datetime.UTC)
        if when.tzinfo is None:
            raise ValueError
        return when.timestamp()
    except (ValueError, TypeError, OverflowError):
        raise ValueError("expires: must be a date or a time with its zone, such as 2027-01-31T12:00:00Z") from None


def _roles(value: Any) -> frozenset[KeyRole]:
    known = [role.value for role in KeyRole]
    if not isinstance(value, list) or not value or not all(isinstance(role, str) and role in known for role in value):
        raise ValueError(f"roles: must be a list of at least one of {', '.join(known)}")
    return frozenset(KeyRole(role) for role in value)


def _limit(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise ValueError(f"{name}: must be a whole number, 0 (no limit) or more")
    return value


def _flag(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name}: must be true or false")  # noqa: TRY004 -- as above
    return value
