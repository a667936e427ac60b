"""A stage split in prefill and decode; names of connectors that other systems use."""

from __future__ import annotations

import pytest

from tests.unit.deploy.helpers import chain, faults, plan

KV = (
    "kv_transfer_config: {kv_connector: C, kv_role: %s, kv_buffer_device: %s, kv_buffer_size: %s}, "
    "tensor_parallel_size: %d"
)


def split(decode: tuple[str, str, str, int], *, stages: int = 2) -> str:
    return chain(
        stages,
        stage_0="is_prefill_only: true, " + KV % ("kv_producer", "cuda", "1e9", 2),
        stage_1="is_decode_only: true, " + KV % decode,
    )


@pytest.mark.parametrize("stages", [2, 4])
def test_halves_that_agree_are_planned_whatever_follows_them(stages: int) -> None:
    pipeline = plan(split(("kv_consumer", "cuda", "1e9", 2), stages=stages))
    assert [stage.tensor_parallel_size for stage in pipeline.stages[:2]] == [2, 2]
    assert [stage.engine_args.fields.get("is_decode_only") is not None for stage in pipeline.stages] == [
        stage_id == 1 for stage_id in range(stages)
    ]


@pytest.mark.parametrize(
    ("decode", "key", "said"),
    [
        (("kv_consumer", "cpu", "1e9", 2), "kv_buffer_device", "cpu disagrees with cuda"),
        (("kv_consumer", "cuda", "2e9", 2), "kv_buffer_size", "disagrees with"),
        (("kv_producer", "cuda", "1e9", 2), "kv_role", "kv_consumer or kv_both, not kv_producer"),
    ],
)
def test_halves_that_disagree_are_named(decode: tuple[str, str, str, int], key: str, said: str) -> None:
    assert said in faults(split(decode))[f"stages[1].kv_transfer_config.{key}"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SharedMemoryConnector", "shm"),
        ("MooncakeConnector", "mooncake_store"),
        ("MooncakeStoreConnector", "mooncake_store"),
        ("MooncakeTransferEngineConnector", "mooncake"),
        ("MoriTransferEngineConnector", "mori"),
        ("YuanrongConnector", "yuanrong"),
        ("YuanrongTransferEngineConnector", "yuanrong_transfer_engine"),
        ("NixlConnector", "nixl"),
        ("CudaIpcConnector", "cuda_ipc"),
        ("yuanrong-te", "yuanrong_transfer_engine"),
    ],
)
def test_class_names_of_connectors_become_kinds(name: str, kind: str) -> None:
    (connector,) = plan(
        chain(2, f"connectors: {{a: {{name: {name}}}}}", stage_0="output_connectors: {to_stage_1: a}")
    ).connectors
    assert connector.kind == kind


def test_a_stage_may_say_that_it_does_not_understand_prompts() -> None:
    stages = plan(chain(2, stage_0="is_comprehension: false", stage_1="is_comprehension: true")).stages
    assert [stage.is_comprehension for stage in stages] == [False, True]
