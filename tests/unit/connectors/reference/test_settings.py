"""Options: the reference's names and defaults, checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.reference import (
    MooncakeConnector,
    MooncakeStoreConnector,
    MooncakeTransferEngineConnector,
    OmniConnectorFactory,
    SharedMemoryConnector,
    YuanrongConnector,
    YuanrongTransferEngineConnector,
)
from connectors.reference.classes import BY_NAME
from connectors.reference.connector import CoreConnector
from connectors.reference.settings import COMMON, expand_env_value, read_config
from omnicore import errors

MIB = 1024**2


@pytest.fixture
def variable() -> Iterator[str]:
    """An environment variable that only this test has."""
    name = "OMNI_TEST_REFERENCE_PORT"
    os.environ[name] = "4711"
    yield name
    del os.environ[name]


def read(cls: type[CoreConnector], **config: Any) -> dict[str, Any]:
    return read_config(cls.__name__, config, {**COMMON, **cls.options})[0]


def test_n_15_n_16_n_32_n_36_defaults_are_the_references() -> None:
    engine = read(MooncakeTransferEngineConnector)
    assert (engine["host"], engine["zmq_port"], engine["protocol"]) == ("auto", 50051, "rdma")
    assert (engine["memory_pool_size"], engine["memory_pool_device"], engine["device_name"]) == (1024**3, "cpu", "")
    assert (engine["sender_host"], engine["sender_zmq_port"], engine["buffer_ttl_seconds"]) == ("", 0, 300)
    store = read(MooncakeStoreConnector)
    assert (store["host"], store["master"]) == ("127.0.0.1", "127.0.0.1:50051")
    assert (store["proto"], store["rdma"]) == ("tcp", "")
    assert (store["segment"], store["localbuf"]) == (512 * MIB, 64 * MIB)
    assert store["metadata_server"] == "http://127.0.0.1:8080/metadata"
    shm = read(SharedMemoryConnector)
    assert (shm["shm_threshold_bytes"], shm["stage_id"], shm["device"]) == (65536, -1, "cuda:0")
    assert read(YuanrongConnector)["get_sub_timeout_ms"] == 1000


def test_n_07_m_23_flags_of_the_classes() -> None:
    raw = {name for name, cls in BY_NAME.items() if cls.supports_raw_data}
    roles = {name for name, cls in BY_NAME.items() if cls.needs_role}
    engines = {
        "MooncakeTransferEngineConnector",
        "MoriTransferEngineConnector",
        "NixlConnector",
        "YuanrongTransferEngineConnector",
        "GrpcConnector",
    }
    assert roles == engines
    assert raw == engines | {"CudaIpcConnector"}
    assert not SharedMemoryConnector.supports_raw_data


def test_n_14_m_35_names() -> None:
    assert MooncakeConnector is MooncakeStoreConnector
    assert set(BY_NAME) <= set(OmniConnectorFactory.list_registered_connectors())
    assert len(BY_NAME) == 10


def test_n_37_variables_are_put_in_and_must_be_set(variable: str) -> None:
    values = read(YuanrongTransferEngineConnector, zmq_port=f"${{{variable}}}", sender_host=f"h${variable}")
    assert (values["zmq_port"], values["sender_host"]) == (4711, "h4711")
    assert expand_env_value(5) == 5
    auto = read(YuanrongTransferEngineConnector, zmq_port="auto", rpc_port="auto", memory_pool_device="npu:3")
    assert (auto["zmq_port"], auto["rpc_port"], auto["memory_pool_device"]) == (0, 0, "npu:3")
    plain = read(YuanrongTransferEngineConnector)
    assert (plain["protocol"], plain["memory_pool_device"], plain["device_name"]) == ("ascend", "npu", "auto")
    with pytest.raises(errors.InvalidRequestError, match="OMNI_TEST_NOT_SET, which is not set") as raised:
        read(YuanrongTransferEngineConnector, host="${OMNI_TEST_NOT_SET}")
    assert raised.value.reason == "UNSET_VARIABLE"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zmq_port": 65536}, "zmq_port: must be 0 to 65535"),
        ({"zmq_port": "x"}, "zmq_port: must be a whole number"),
        ({"zmq_port": 1.5}, "zmq_port: must be a whole number"),
        ({"zmq_port": True}, "zmq_port: must be a whole number"),
        ({"zmq_port": []}, "zmq_port: must be a whole number"),
        ({"get_timeout_s": float("nan")}, "get_timeout_s: must be a number"),
        ({"role": "writer"}, "role: must be one of sender, receiver"),
        ({"host": 5}, "host: must be text"),
        ({"checksum": "yes"}, "checksum: must be true or false"),
        ({"consumers": 0}, "consumers: must be 1 to"),
        ({"memory_pool_device": "cuda:0"}, "memory_pool_device: must be one of cpu"),
        ({"from_stage": [0]}, "from_stage: must be text or a number"),
        ({"zmq_prot": 1}, "zmq_prot: no such option, did you mean 'zmq_port'?"),
        ({"protocl": "tcp"}, "did you mean 'protocol'"),
        ({5: 1}, "options have text names"),
    ],
)
def test_wrong_options_are_named(config: Any, message: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        read_config("MooncakeTransferEngineConnector", config, {**COMMON, **MooncakeTransferEngineConnector.options})


def test_options_of_models_and_nothing_are_accepted() -> None:
    values = read(SharedMemoryConnector, codec_chunk_frames=25, connector_get_sleep_s=0.01, shm_threshold_bytes=None)
    assert values["shm_threshold_bytes"] == 65536
    assert "codec_chunk_frames" not in values


def test_only_what_is_given_goes_to_the_kind() -> None:
    options = {**COMMON, **MooncakeTransferEngineConnector.options}
    assert read_config("x", {}, options)[1] == {}
    assert read_config("x", {"checksum": True, "zmq_port": "1"}, options)[1] == {"checksum": True}
