"""Files of API keys: what is accepted, what is refused and how it is named, and that no key is ever shown."""

from __future__ import annotations

import orjson
import pytest

from omnicore import api_keys
from omnicore.api_keys import ApiKey, KeyRole, Priority
from omnicore.errors import InvalidRequestError

DIGEST = "a" * 64


def test_a_key_is_found_and_others_are_not() -> None:
    first, second = api_keys.new_key(), api_keys.new_key()
    assert first != second
    own = ApiKey(
        id="alice",
        sha256=api_keys.hashed(first),
        roles=frozenset({KeyRole.CLIENT, KeyRole.READ}),
        requests_per_minute=60,
        tokens_per_minute=1000,
        max_concurrent=3,
        priority=Priority.LOW,
        expires_s=1.8e9,
        disabled=True,
    )
    content = f"# keys\n\n{api_keys.line(own)}\n{api_keys.line(ApiKey('bob', DIGEST))}".encode()
    assert first.encode() not in content
    table = api_keys.parse("--api-keys", content)
    assert len(table) == 2
    assert table.find(first.encode()) == own
    assert table.find(second.encode()) is None
    assert table.find(own.sha256.encode()) is None
    assert table.find(b"\xff" * 50) is None


def test_roles_include_those_below() -> None:
    held = {role: ApiKey("k", DIGEST, roles=frozenset({role})) for role in KeyRole}
    assert [held[KeyRole.READ].may(role) for role in KeyRole] == [True, False, False]
    assert [held[KeyRole.CLIENT].may(role) for role in KeyRole] == [True, True, False]
    assert [held[KeyRole.ADMIN].may(role) for role in KeyRole] == [True, True, True]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": ""}, "id: must be"),
        ({"id": "a b"}, "id: must be"),
        ({"id": 7}, "id: must be"),
        ({"sha256": "omni_secret"}, "sha256: must be the 64 hex digits"),
        ({"sha256": DIGEST.upper()}, "sha256: must be the 64 hex digits"),
        ({"roles": []}, "roles: must be a list of at least one of read, client, admin"),
        ({"roles": ["root"]}, "roles: must be"),
        ({"roles": "client"}, "roles: must be"),
        ({"requests_per_minute": -1}, "requests_per_minute: must be a whole number"),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute: must be a whole number"),
        ({"max_concurrent": True}, "max_concurrent: must be a whole number"),
        ({"priority": "urgent"}, "priority: must be one of high, normal, low"),
        ({"expires": "tomorrow"}, "expires: must be a date or a time with its zone"),
        ({"expires": "2027-01-01T00:00:00"}, "expires: must be a date or a time with its zone"),
        ({"expires": 5}, "expires: must be a date"),
        ({"disabled": "no"}, "disabled: must be true or false"),
        ({"max_concurent": 1}, "unknown field, did you mean 'max_concurrent'?"),
        ({"omni_secret": 1}, "unknown field; known:"),
    ],
)
def test_a_wrong_line_is_named_and_not_shown(fields: dict[str, object], message: str) -> None:
    line = orjson.dumps({"id": "alice", "sha256": DIGEST} | fields)
    with pytest.raises(InvalidRequestError) as refused:
        api_keys.parse("--api-keys", b"\n" + line)
    assert refused.value.message.startswith("--api-keys: line 2 of the file: ")
    assert message in refused.value.message
    assert "omni_secret" not in refused.value.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no key"),
        (b"# none yet\n", "holds no key"),
        (b"omni_secret", "line 1 of the file: not JSON"),
        (b'["omni_secret"]', "must be a JSON object"),
        (f'{{"id":"a","sha256":"{DIGEST}"}}\n{{"id":"a","sha256":"{"b" * 64}"}}'.encode(), "its id 'a' is in line 1"),
        (f'{{"id":"a","sha256":"{DIGEST}"}}\n{{"id":"b","sha256":"{DIGEST}"}}'.encode(), "its key is in line 1"),
    ],
)
def test_wrong_files(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="--api-keys") as refused:
        api_keys.parse("--api-keys", content)
    assert message in refused.value.message
    assert "omni_secret" not in refused.value.message


def test_expiry_is_a_date_or_a_time() -> None:
    assert api_keys.parse_time("2027-01-01") == api_keys.parse_time("2027-01-01T01:00:00+01:00")


@pytest.mark.parametrize("key", ["short", "x" * 600, "blank " * 10, "ü" * 40])
def test_what_people_make_up_is_no_key(key: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        api_keys.hashed(key)
    assert key not in refused.value.message
