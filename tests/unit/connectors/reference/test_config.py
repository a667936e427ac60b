"""Specs, files, roles and ports: what decides which connector a stage gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.reference import (
    ConnectorSpec,
    OmniTransferConfig,
    TransferConfigError,
    get_connectors_config_for_stage,
    load_omni_transfer_config,
    resolve_connector_spec,
)
from connectors.reference.ports import (
    KV_RANK_PORT_STRIDE,
    KV_REPLICA_PORT_STRIDE,
    Purpose,
    connector_port,
    detect_local_ip,
    resolve_host,
)
from omnicore import errors

EXAMPLE = Path(__file__).parents[4] / "examples" / "connectors" / "reference.yaml"
MOONCAKE, SHM = "MooncakeTransferEngineConnector", "SharedMemoryConnector"


def chain(extra: dict[str, Any] | None = None, name: str = MOONCAKE) -> OmniTransferConfig:
    """0 → 1 → 2."""
    edges: dict[Any, ConnectorSpec] = {(0, 1): ConnectorSpec(name, extra or {}), (1, 2): ConnectorSpec(name)}
    return OmniTransferConfig(edges)


def test_n_08_a_spec_has_a_name_and_options_of_its_own() -> None:
    assert ConnectorSpec("x") == ConnectorSpec("x", {})
    first, second = ConnectorSpec("x"), ConnectorSpec("x")
    first.extra["a"] = 1
    assert second.extra == {}


def test_n_09_n_10_n_11_edges_are_found_by_text_or_number_else_the_default() -> None:
    config = chain({"a": 1})
    first = config.get_connector_for_edge(0, "1")
    assert first is config.get_connector_for_edge("0", 1)
    assert first is not config.get_connector_for_edge(1, 2)
    assert config.get_connector_for_edge(2, 3) is None
    assert (config.has_connector_for_edge("0", "1"), config.has_connector_for_edge(1, 0)) == (True, False)
    config.default_connector = ConnectorSpec("default")
    assert config.get_connector_for_edge(2, 3) == ConnectorSpec("default")
    assert config.has_connector_for_edge(1, 0)
    assert OmniTransferConfig().connectors == {}


def test_n_13_nothing_gives_none_and_the_example_loads_from_file_and_dict() -> None:
    assert load_omni_transfer_config() is None
    from_file = load_omni_transfer_config(EXAMPLE)
    assert from_file is not None
    assert from_file.get_connector_for_edge(0, 1) == ConnectorSpec(
        "MooncakeTransferEngineConnector",
        {"host": "auto", "zmq_port": 50051, "protocol": "tcp", "memory_pool_size": 268435456},
    )
    assert from_file.get_connector_for_edge(1, 2) == ConnectorSpec(SHM, {"shm_threshold_bytes": 4096})
    assert load_omni_transfer_config(str(EXAMPLE), {"ignored": "beside a path"}) == from_file


@pytest.mark.parametrize("older", [False, True])
def test_n_13_both_forms_of_the_reference(older: bool) -> None:
    connectors = {"fast": {"name": MOONCAKE, "extra": {"zmq_port": 1}}}
    stages = [
        {"stage_id": 0, "output_connectors": {"to_stage_1": "fast"}},
        {"stage_id": 1, "input_connectors": {"from_stage_0": "fast"}, "engine_input_source": [0]},
        {"stage_id": 2, "engine_input_source": [1, "0"]},
    ]
    edges = [{"from": 2, "to": 3}]
    new: dict[str, Any] = {"connectors": connectors, "stages": stages, "edges": edges}
    old: dict[str, Any] = {"runtime": {"connectors": connectors, "edges": edges}, "stage_args": stages}
    config = load_omni_transfer_config(config_dict=old if older else new, default_shm_threshold=7)
    assert config is not None
    shm = ConnectorSpec(SHM, {"shm_threshold_bytes": 7})
    assert config.connectors == {
        ("0", "1"): ConnectorSpec(MOONCAKE, {"zmq_port": 1}),
        ("1", "2"): shm,
        ("0", "2"): shm,
        ("2", "3"): shm,
    }
    config.connectors["0", "1"].extra["role"] = "sender"
    assert config.connectors["1", "2"].extra is not config.connectors["0", "2"].extra


def test_n_10_a_default_connector_of_the_file_joins_what_says_nothing() -> None:
    document = {"default_connector": {"name": MOONCAKE}, "edges": [{"from": 0, "to": 1}]}
    config = load_omni_transfer_config(config_dict=document)
    assert config is not None
    assert config.get_connector_for_edge(0, 1) == config.get_connector_for_edge(5, 6) == ConnectorSpec(MOONCAKE)


def test_both_ends_of_an_edge_may_add_options_but_not_contradict() -> None:
    def stages(first: Any, second: Any) -> dict[str, Any]:
        return {
            "stages": [
                {"stage_id": 0, "output_connectors": {"to_stage_1": {"name": MOONCAKE, "extra": first}}},
                {"stage_id": 1, "input_connectors": {"from_stage_0": {"name": MOONCAKE, "extra": second}}},
            ]
        }

    config = load_omni_transfer_config(config_dict=stages({"a": 1, "b": 2}, {"b": 2, "sender_host": "h"}))
    assert config is not None
    assert config.connectors["0", "1"].extra == {"a": 1, "b": 2, "sender_host": "h"}
    with pytest.raises(TransferConfigError, match=r"stages\[1\].*extra.a: 2, but the other end of 0→1 says 1"):
        load_omni_transfer_config(config_dict=stages({"a": 1}, {"a": 2}))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "config: must be a mapping"),
        ({"stages": {}, "edges": [{"from": 0}]}, r"edges\[0\]: has no to"),
        ({"edges": [{"to": 0}]}, r"edges\[0\]: has no from"),
        ({"edges": 3}, "edges: must be a list"),
        ({"stages": [{}]}, r"stages\[0\].stage_id: required"),
        ({"stages": [{"stage_id": None}]}, r"stages\[0\].stage_id: .*must be a stage's id"),
        ({"stages": [{"stage_id": 0, "output_connectors": {"stage_1": "x"}}]}, "must be to_stage_N"),
        ({"stages": [{"stage_id": 0, "output_connectors": {"to_stage_1": "x"}}]}, "no connector is called 'x'"),
        ({"stages": [{"stage_id": 0, "output_connectors": {"to_stage_1": {}}}]}, "name: required"),
        ({"stages": [{"stage_id": 0, "output_connectors": {"to_stage_1": {"name": "a", "x": 1}}}]}, "x: unknown"),
        ({"connectors": {"a": {"name": "b", "extra": []}}, "edges": []}, None),
        ({"connectors": {"a": {"name": "b", "extra": [1]}}}, "connectors.a.extra: must be a mapping"),
        ({"connectors": {1: {"name": "b"}}}, "connectors: must be a mapping with text keys"),
    ],
)
def test_n_13_what_is_wrong_is_named(document: Any, message: str | None) -> None:
    if message is None:
        assert load_omni_transfer_config(config_dict=document) is not None
        return
    with pytest.raises(TransferConfigError, match=message) as raised:
        load_omni_transfer_config(config_dict=document)
    assert isinstance(raised.value, ValueError)


def test_n_13_broken_and_missing_files_are_errors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("stages: [\n  - {")
    with pytest.raises(TransferConfigError, match=r"broken\.yaml"):
        load_omni_transfer_config(broken)
    with pytest.raises(FileNotFoundError):
        load_omni_transfer_config(tmp_path / "none.yaml")
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    config = load_omni_transfer_config(empty)
    assert config is not None
    assert config.connectors == {}


# --- roles ------------------------------------------------------------------------------------------------------------


def test_m_25_m_26_a_stage_gets_its_edges_with_their_roles() -> None:
    config = chain({"zmq_port": 60000, "host": "10.0.0.1"})
    assert get_connectors_config_for_stage(None, 1) == {}
    assert get_connectors_config_for_stage(config, 7) == {}
    middle = get_connectors_config_for_stage(config, "1")
    assert list(middle) == ["from_stage_0", "to_stage_2"]
    assert middle["from_stage_0"]["spec"] == {
        "name": MOONCAKE,
        "extra": {"zmq_port": 60000, "host": "10.0.0.1", "role": "receiver", "from_stage": 0, "to_stage": 1},
    }
    assert middle["to_stage_2"]["spec"]["extra"] == {"role": "sender", "from_stage": 1, "to_stage": 2}
    assert list(get_connectors_config_for_stage(config, 0)) == ["to_stage_1"]
    assert list(get_connectors_config_for_stage(config, 2)) == ["from_stage_1"]
    assert "role" not in config.connectors["0", "1"].extra, "the edge itself has no role"


def test_m_20_m_21_w_09_both_ends_compute_the_same_port_for_every_rank() -> None:
    """At any TP size: rank r of the receiver asks where rank r of the sender listens; the middle has both ends."""
    config = chain({"zmq_port": 40000, "host": "10.0.0.1"})
    seen: set[int] = set()
    for rank in range(4):
        sender = get_connectors_config_for_stage(config, 0, local_rank=rank, replica_id=2)["to_stage_1"]
        middle = get_connectors_config_for_stage(config, 1, local_rank=rank, replica_id=2)
        listens = sender["spec"]["extra"]["zmq_port"]
        receiver = middle["from_stage_0"]["spec"]["extra"]
        assert (receiver["sender_host"], receiver["sender_zmq_port"]) == ("10.0.0.1", listens)
        assert "zmq_port" not in receiver
        seen |= {listens, middle["to_stage_2"]["spec"]["extra"]["zmq_port"]}
    assert len(seen) == 8, "no two listen at the same port"


def test_k_14_each_rank_uses_another_port() -> None:
    def port(rank: int) -> int:
        spec = resolve_connector_spec(ConnectorSpec(MOONCAKE), stage_id=0, role="sender", local_rank=rank)
        return int(spec.extra["zmq_port"])

    assert [port(rank) for rank in (0, 1, 2)] == [50051, 50067, 50083]


def test_m_23_roles_and_addresses_are_only_for_those_that_need_them() -> None:
    plain = resolve_connector_spec(ConnectorSpec(SHM, {"a": 1}), stage_id=1, role="receiver", local_rank=3)
    assert plain.extra == {"a": 1, "stage_id": 1, "role": "receiver"}
    unknown = resolve_connector_spec(ConnectorSpec("Unknown"), stage_id="1", role="sender")
    assert "zmq_port" not in unknown.extra
    named = resolve_connector_spec(ConnectorSpec(MOONCAKE), stage_id="thinker", role="sender")
    assert "zmq_port" not in named.extra, "a stage without number has no computed port"


def test_what_the_file_says_about_the_sender_wins() -> None:
    given = {"role": "receiver", "sender_host": "h", "sender_zmq_port": 9, "from_stage": 0}
    spec = resolve_connector_spec(ConnectorSpec(MOONCAKE, given), stage_id=1)
    assert (spec.extra["sender_host"], spec.extra["sender_zmq_port"]) == ("h", 9)
    auto = resolve_connector_spec(ConnectorSpec(MOONCAKE, {"host": "auto", "role": "receiver"}), stage_id=1)
    assert "sender_host" not in auto.extra, "somebody must say it: update_sender_info"
    with pytest.raises(errors.InvalidRequestError, match="zmq_port: must be a port to count from"):
        resolve_connector_spec(ConnectorSpec(MOONCAKE, {"zmq_port": "auto"}), stage_id=1)


# --- ports ------------------------------------------------------------------------------------------------------------


def test_m_22_no_two_workers_of_a_host_share_a_port() -> None:
    for purpose in ("request_forwarding", "kv_transfer", "orchestrator"):
        ports = [
            connector_port(1024, purpose=purpose, from_stage=stage, local_rank=rank, replica_id=replica)
            for replica in range(4)
            for rank in range(64)
            for stage in range(16)
        ]
        assert len(set(ports)) == len(ports) == 4 * 64 * 16
    assert (KV_RANK_PORT_STRIDE, KV_REPLICA_PORT_STRIDE) == (16, 1024)
    assert connector_port(50051, from_stage=0) == 50151, "the reference's own example"


@given(st.integers(-70000, 70000), st.integers(-3, 100), st.integers(-3, 100), st.integers(-3, 100), st.booleans())
def test_m_22_what_is_out_of_range_is_an_error_and_nobody_elses_port(
    base: int, stage: int, rank: int, replica: int, kv: bool
) -> None:
    purpose: Purpose = "kv_transfer" if kv else "request_forwarding"
    inside = 0 <= stage < 16 and 0 <= rank < 64 and 0 <= replica < 64
    expected = base + 100 * kv + replica * 1024 + rank * 16 + stage
    if inside and 1 <= expected <= 65535:
        assert connector_port(base, purpose=purpose, from_stage=stage, local_rank=rank, replica_id=replica) == expected
        return
    with pytest.raises(errors.InvalidRequestError):
        connector_port(base, purpose=purpose, from_stage=stage, local_rank=rank, replica_id=replica)


def test_m_24_auto_hosts_mean_an_address_of_this_host() -> None:
    own = detect_local_ip()
    assert own.count(".") == 3
    assert {resolve_host(host) for host in ("auto", "AUTO", "", "*", "0.0.0.0", "::")} == {own}
    assert resolve_host("10.1.2.3") == "10.1.2.3"
