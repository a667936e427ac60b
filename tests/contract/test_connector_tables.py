"""The deploy file's tables of connectors say what the connectors take: the control plane loads none of them."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from connectors import options, registry
from control_plane.deploy.connector_tables import AUTO, KINDS, OPTIONS, SAME_AS
from control_plane.deploy.document import Value
from control_plane.deploy.faults import Faults
from omnicore import errors

CLASSES: dict[str, type[Any]] = {
    "shm": options.ShmOptions,
    "grpc": options.GrpcOptions,
    "cuda_ipc": options.CudaIpcOptions,
    "mooncake": options.MooncakeOptions,
    "mooncake_store": options.MooncakeStoreOptions,
    "nixl": options.NixlOptions,
    "mori": options.MoriOptions,
    "yuanrong": options.YuanrongOptions,
    "yuanrong_transfer_engine": options.YuanrongTransferEngineOptions,
}
PAIRS = [(kind, field.name) for kind, cls in CLASSES.items() for field in dataclasses.fields(cls)]
CANDIDATES: list[Any] = [True, False, "auto", "tcp", "npu:0", "", *range(-1, 4), 0.05, 0.5, 2**16, 2**16 + 1, 2**20]


def test_kinds_are_those_of_the_registry() -> None:
    assert set(KINDS) == {AUTO, *registry.list_connectors()} == {AUTO, *CLASSES}


@pytest.mark.parametrize("kind", list(CLASSES))
def test_options_are_those_of_the_connector(kind: str) -> None:
    assert set(OPTIONS[kind]) == {field.name for field in dataclasses.fields(CLASSES[kind])}
    assert set(SAME_AS[kind].values()) <= set(OPTIONS[kind])


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_what_the_plan_accepts_the_connector_accepts(kind: str, name: str) -> None:
    """And numbers that the plan refuses, the connector refuses as well."""
    numeric = typing.get_type_hints(CLASSES[kind])[name] in (int, float)
    for candidate in CANDIDATES:
        faults = Faults()
        OPTIONS[kind][name].kind.check(Value(candidate, 1), faults)
        try:
            options.parse_options(CLASSES[kind], kind, {name: candidate})
            accepted = True
        except errors.InvalidRequestError:
            accepted = False
        if not faults:
            assert accepted, f"{kind}.{name} = {candidate!r} is accepted by the plan only"
        elif numeric and not (isinstance(candidate, float) and candidate.is_integer()):
            assert not accepted or candidate > 2**16, f"{kind}.{name} = {candidate!r} is accepted by the connector only"
