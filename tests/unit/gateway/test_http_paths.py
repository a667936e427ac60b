"""Paths to handlers."""

from __future__ import annotations

import pytest

from gateway.http.paths import PathTable


@pytest.fixture
def table() -> PathTable[str]:
    table: PathTable[str] = PathTable()
    table.add("GET", "/v1/models/{model:path}", "model")
    table.add("GET", "/v1/models", "models")
    table.add("POST", "/v1/chat", "chat")
    table.add("GET", "/v1/things/{thing}", "thing")
    table.add("DELETE", "/v1/things/{thing}", "delete")
    table.add("POST", "/v1/things/{thing}:stop", "stop")
    table.add("GET", "/v1/things/{thing}/parts/{part}", "part")
    return table


@pytest.mark.parametrize(
    ("method", "path", "handler", "params"),
    [
        ("GET", "/v1/models", "models", {}),
        ("HEAD", "/v1/models", "models", {}),
        ("GET", "/v1/models/a/b", "model", {"model": "a/b"}),
        ("GET", "/v1/things/a:b", "thing", {"thing": "a:b"}),
        ("DELETE", "/v1/things/a", "delete", {"thing": "a"}),
        ("POST", "/v1/things/a:stop", "stop", {"thing": "a"}),
        ("GET", "/v1/things/a/parts/b.c", "part", {"thing": "a", "part": "b.c"}),
    ],
)
def test_found(table: PathTable[str], method: str, path: str, handler: str, params: dict[str, str]) -> None:
    found = table.find(method, path)
    assert (found.handler, found.params) == (handler, params)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/models", ("GET", "HEAD")),
        ("GET", "/v1/chat", ("POST",)),
        ("POST", "/v1/things/a", ("DELETE", "GET", "HEAD")),
        ("PUT", "/v1/things/a:stop", ("DELETE", "GET", "HEAD", "POST")),
        ("GET", "/v1/things/", ()),
        ("GET", "/v1/models/", ()),
        ("GET", "/v1/chat/", ()),
        ("GET", "", ()),
    ],
)
def test_not_found(table: PathTable[str], method: str, path: str, allowed: tuple[str, ...]) -> None:
    found = table.find(method, path)
    assert found.handler is None
    assert found.allowed == allowed


def test_twice_is_a_mistake(table: PathTable[str]) -> None:
    with pytest.raises(ValueError, match="there twice"):
        table.add("POST", "/v1/things/{thing}:stop", "other")
