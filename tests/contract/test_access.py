"""The table of who may call what, against the protos and the page that people read (docs/security.md)."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

import omni.v1
from omnicore import access
from omnicore.access import EVERYONE, Role


def _services() -> list[ServiceDescriptor]:
    found = []
    for module in pkgutil.iter_modules(omni.v1.__path__):
        if module.name.endswith("_pb2"):
            file: FileDescriptor = importlib.import_module(f"omni.v1.{module.name}").DESCRIPTOR
            found += list(file.services_by_name.values())
    return found


METHODS = {f"{service.full_name}/{method.name}" for service in _services() for method in service.methods}


def test_every_service_has_a_rule() -> None:
    assert METHODS
    missing = {method.rpartition("/")[0] for method in METHODS} - set(access.SERVICES)
    assert not missing, f"say in omnicore/access.py who may call {sorted(missing)}"


def test_every_exception_is_a_method() -> None:
    assert set(access.METHODS) <= METHODS


@pytest.mark.parametrize("method", sorted(METHODS))
def test_who_may_change_things(method: str) -> None:
    allowed = access.allowed(f"/{method}")
    assert allowed
    name = method.rpartition("/")[2]
    if name.startswith(("Apply", "Delete", "Cordon", "Uncordon", "Drain", "Evict", "Set", "Collective", "Restart")):
        assert allowed == {Role.ADMIN}
    if name in ("Register", "Heartbeat", "Deregister"):
        assert allowed == {Role.WORKER}
    if name == "Control":
        assert allowed == {Role.CONTROL_PLANE}


def test_the_page_tells_the_same() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    told = dict(re.findall(r"^\| `([A-Za-z]+Service(?:/[A-Za-z]+)?)` \| ([a-z, -]+) \|$", text, re.MULTILINE))
    ours = {
        name.removeprefix("omni.v1."): "everyone" if roles == EVERYONE else ", ".join(sorted(roles))
        for name, roles in {**access.SERVICES, **access.METHODS}.items()
        if name.startswith("omni.v1.")
    }
    assert told == ours


def test_what_is_not_listed_is_an_administrators() -> None:
    assert access.allowed("/omni.v1.NewService/Anything") == {Role.ADMIN}
    assert access.allowed("nonsense") == {Role.ADMIN}
    assert access.allowed("/grpc.health.v1.Health/Check") == EVERYONE
