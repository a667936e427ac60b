from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from connectors.connector_set import ConnectorSet
from connectors.grpc_fetch import GrpcConnector
from connectors.handles import HandleStore
from connectors.options import GrpcOptions, ShmOptions, parse_options
from connectors.payload import JsonValue
from connectors.registry import ConnectorContext, create_connector, list_connectors
from connectors.shm import ShmConnector
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from tests.support.descriptors import open_pools


async def no_fetch(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
    if handle.key:
        raise errors.UnavailableError("nobody to fetch from")
    yield b""


REF = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), epoch=1)


@pytest.fixture
def context() -> ConnectorContext:
    return ConnectorContext(HandleStore(lambda: REF, lambda: "h:1"), no_fetch, 1 << 16)


async def test_built_in_connectors(context: ConnectorContext) -> None:
    ours = {"cuda_ipc", "grpc", "mooncake", "mooncake_store", "mori", "nixl", "shm", "yuanrong"}
    assert {*ours, "yuanrong_transfer_engine"} <= {*list_connectors()}
    shm, fetch = create_connector("shm", context), create_connector("grpc", context)
    assert isinstance(shm, ShmConnector)
    assert isinstance(fetch, GrpcConnector)
    assert (shm.offer().name, shm.offer().healthy, shm.usage().pool_bytes) == ("shm", True, 1 << 16)
    assert (fetch.offer().name, fetch.offer().address) == ("grpc", "h:1")
    for connector in (shm, fetch):
        await connector.close()
        assert not connector.offer().healthy


@pytest.mark.parametrize(("kind", "hint"), [("shmm", "did you mean 'shm'"), ("pigeon", "known: "), ("", "known: ")])
def test_unknown_kinds_are_never_replaced(context: ConnectorContext, kind: str, hint: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="unknown kind") as caught:
        create_connector(kind, context)
    assert hint in caught.value.message
    assert "grpc" in caught.value.message
    assert "shm" in caught.value.message


class Installed:
    """Distributions on the import path, as pip leaves them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, name: str, entry_point: str, source: str) -> None:
        (self._root / f"{name}.py").write_text(source)
        info = self._root / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[omniplane.connectors]\n{entry_point}\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Installed(tmp_path)


async def test_other_packages_bring_connectors(installed: Installed, context: ConnectorContext) -> None:
    source = """
from connectors.grpc_fetch import GrpcConnector

def make(context, extra):
    return GrpcConnector(context.store, context.fetcher)
"""
    installed.add("extra_connector", "carrier-pigeon = extra_connector:make", source)
    assert "carrier-pigeon" in list_connectors()
    assert isinstance(create_connector("carrier-pigeon", context), GrpcConnector)
    connectors = ConnectorSet(lambda: REF, lambda: "h:1", no_fetch, pool_bytes=0, options={"carrier-pigeon": {}})
    assert connectors.offers()[0].name == "shm"
    assert connectors.resolve("carrier-pigeon") == "carrier-pigeon"
    await connectors.close()
    del sys.modules["extra_connector"]


@pytest.mark.parametrize("late", [True, False])
def test_a_missing_library_is_an_error_that_names_it(
    installed: Installed, context: ConnectorContext, late: bool
) -> None:
    use = "import no_such_library"
    source = f"def make(context, extra):\n    {use}\n" if late else f"{use}\n"
    installed.add(f"lacking{late}", f"lacking = lacking{late}:make", source)
    with pytest.raises(errors.FailedPreconditionError, match="no_such_library") as caught:
        create_connector("lacking", context)
    assert (caught.value.reason, caught.value.metadata["library"]) == ("LIBRARY_MISSING", "no_such_library")
    sys.modules.pop(f"lacking{late}", None)


@pytest.mark.parametrize(
    ("kind", "modules", "extra"),
    [
        ("nixl", ("nixl", "nixl._bindings"), "nixl"),
        ("mori", ("mori", "mori.io"), "mori"),
        ("yuanrong_transfer_engine", ("yr", "yr.datasystem"), "yuanrong-transfer-engine"),
    ],
)
def test_engines_without_their_library_are_errors_that_name_the_extra(
    kind: str, modules: tuple[str, ...], extra: str, context: ConnectorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(errors.FailedPreconditionError) as caught:
        create_connector(kind, context)
    assert caught.value.reason == "LIBRARY_MISSING"
    assert caught.value.metadata["library"] in modules
    assert f"pip install 'omniplane[{extra}]' brings it" in caught.value.message
    with pytest.raises(errors.InvalidRequestError, match=f"connectors.{kind}.extra.pol_bytes: .*'pool_bytes'"):
        create_connector(kind, context, {"pol_bytes": 1})


def test_a_name_defined_twice_is_an_error(installed: Installed, context: ConnectorContext) -> None:
    installed.add("usurper", "shm = usurper:make", "")
    with pytest.raises(errors.FailedPreconditionError, match="'shm' is defined twice"):
        list_connectors()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"shm_treshold_bytes": 1}, r"connectors.shm.extra.shm_treshold_bytes: .*did you mean 'shm_threshold_bytes'"),
        ({"zzz": 1}, "accepted: pool_bytes"),
        ({"checksum": "true"}, "must be true or false, got 'true'"),
        ({"checksum": 1}, "must be true or false"),
        ({"shm_threshold_bytes": 65537}, "must be 0 to 65536"),
        ({"shm_threshold_bytes": -1}, "must be 0 to 65536"),
        ({"shm_threshold_bytes": "64k"}, "must be a whole number"),
        ({"shm_threshold_bytes": 1.5}, "must be a whole number"),
        ({"shm_threshold_bytes": True}, "must be a whole number"),
        ({"put_wait_s": None}, "must be a number"),
        ({"put_wait_s": float("nan")}, "must be 0 to inf"),
        ({"pool_bytes": float("inf")}, "must be a whole number"),
        ({"max_peers": 0}, "must be 1 to inf"),
    ],
)
def test_wrong_options_are_named(extra: Mapping[str, JsonValue], message: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        parse_options(ShmOptions, "shm", extra)


def test_numbers_that_have_been_through_a_struct_are_whole_again() -> None:
    options = parse_options(GrpcOptions, "grpc", {"pool_bytes": 1024.0, "put_wait_s": 2, "checksum": True})
    assert options == GrpcOptions(pool_bytes=1024, put_wait_s=2.0, checksum=True)
    assert isinstance(options.pool_bytes, int)


async def test_auto_is_shared_memory_where_there_is_a_pool() -> None:
    with_pool = ConnectorSet(lambda: REF, lambda: "h:1", no_fetch, pool_bytes=1 << 16)
    without = ConnectorSet(lambda: REF, lambda: "h:1", no_fetch, pool_bytes=0)
    assert (with_pool.resolve("auto"), with_pool.resolve(""), without.resolve("auto")) == ("shm", "shm", "grpc")
    with pytest.raises(errors.InvalidRequestError, match="has no 'mooncake', it has: auto, shm, grpc"):
        with_pool.resolve("mooncake")
    assert [offer.name for offer in with_pool.offers()] == ["shm", "grpc"]
    for connectors in (with_pool, without):
        await connectors.close()
        assert [offer.healthy for offer in connectors.offers()] == [False, False]


def test_a_set_that_cannot_start_leaves_no_pool() -> None:
    before = open_pools()
    wrong: list[dict[str, dict[str, JsonValue]]] = [
        {"nope": {}},
        {"shm": {"nope": 1}},
        {"grpc": {"nope": 1}},
        {"auto": {"nope": 1}},
    ]
    for options in wrong:
        with pytest.raises(errors.InvalidRequestError):
            ConnectorSet(lambda: REF, lambda: "h:1", no_fetch, pool_bytes=1 << 16, options=options)
    assert not open_pools() - before


async def test_backends_of_later_versions_are_refused() -> None:
    connectors = ConnectorSet(lambda: REF, lambda: "h:1", no_fetch, pool_bytes=0)
    with pytest.raises(errors.UnimplementedError, match="backend None"):
        async with connectors.get(transfer_pb2.TransferHandle(key="k")):
            pass
    await connectors.close()
