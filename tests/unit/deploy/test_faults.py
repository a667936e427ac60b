"""Wrong files: every fault is named by its path and line, with what is accepted and the nearest valid name."""

# ruff: noqa: E501 -- a table, one fault in each line

from __future__ import annotations

import contextlib
import time

import pytest

from control_plane.deploy import plan_pipeline
from omnicore.errors import InvalidRequestError
from tests.unit.deploy.helpers import chain, faults

SHM = "connectors: {shm: {name: shm}}"


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        # Top level
        ("stagez: []\nstages: [{stage_id: 0}]", "stagez", "line 1: unknown key 'stagez'; did you mean 'stages'?"),
        ("async_chunk: true", "stages", "required"),
        ("stages: []", "stages", "required"),
        ("stages: null", "stages", "required"),
        ("stages: 3", "stages", "expected a list"),
        ("stages: [3]", "stages[0]", "expected a mapping"),
        ('async_chunk: "no"\nstages: [{stage_id: 0}]', "async_chunk", "got str 'no'; write it without quotes"),
        ("async_chunk: 1\nstages: [{stage_id: 0}]", "async_chunk", "expected true or false, got int 1"),
        ("pipeline: a b\nstages: [{stage_id: 0}]", "pipeline", "expected a name"),
        ("session_mode: duplexx\nstages: [{stage_id: 0}]", "session_mode", "did you mean 'duplex'?"),
        ("stage_args: []\nstages: [{stage_id: 0}]", "stage_args", "older schema"),
        ("base_config: b.yaml\nstages: [{stage_id: 0}]", "base_config", "put it before this document"),
        # Stages
        ("stages: [{devices: '0'}]", "stages[0].stage_id", "required"),
        ("stages: [{stage_id: 0}, {stage_id: 0}]", "stages[1].stage_id", "given twice, first at stages[0].stage_id"),
        ("stages: [{stage_id: -1}]", "stages[0].stage_id", "from 0 to 65535, got -1"),
        ("stages: [{stage_id: '0'}]", "stages[0].stage_id", "write it without quotes"),
        ("stages: [{stage_id: true}]", "stages[0].stage_id", "got bool true"),
        (chain(1, stage_0="gpu_memory_utilisation: 0.5"), "stages[0].gpu_memory_utilisation", "'gpu_memory_utilization'"),
        (chain(1, stage_0="num_replica: 2"), "stages[0].num_replica", "did you mean 'num_replicas'?"),
        (chain(1, stage_0="num_replicas: 0"), "stages[0].num_replicas", "from 1 to 4096, got 0"),
        (chain(1, stage_0="num_replicas: -1"), "stages[0].num_replicas", "got -1"),
        (chain(1, stage_0="gpu_memory_utilization: 1.5"), "stages[0].gpu_memory_utilization", "at most 1, got 1.5"),
        (chain(1, stage_0="gpu_memory_utilization: 0"), "stages[0].gpu_memory_utilization", "above 0"),
        (chain(1, stage_0="max_num_batched_tokens: 0"), "stages[0].max_num_batched_tokens", "at least 1"),
        (chain(1, stage_0="max_num_seqs: 2.5"), "stages[0].max_num_seqs", "got float 2.5"),
        (chain(1, stage_0="max_num_seqs: 4294967296"), "stages[0].max_num_seqs", "at most 4294967295"),
        (chain(1, stage_0="enforce_eager: 'true'"), "stages[0].enforce_eager", "write it without quotes"),
        (chain(1, stage_0="dtype: bfloat61"), "stages[0].dtype", "did you mean 'bfloat16'?"),
        (chain(1, stage_0="worker_cls: Worker"), "stages[0].worker_cls", "dotted path"),
        (chain(1, stage_0="quantization: 8"), "stages[0].quantization", "expected text, or a mapping, got int 8"),
        (chain(1, stage_0="hf_overrides: x"), "stages[0].hf_overrides", "expected a mapping, got str 'x'"),
        (chain(1, stage_0="kv_transfer_config: x"), "stages[0].kv_transfer_config", "expected a mapping, got str 'x'"),
        (chain(1, stage_0="kv_transfer_config: {kv_rol: x}"), "stages[0].kv_transfer_config.kv_rol", "'kv_role'"),
        (chain(1, stage_0="parallel_config: {tp: 2}"), "stages[0].parallel_config.tp", "known: tensor_parallel_size"),
        (chain(1, stage_0="omni_kv_config: {need_send: true}"), "stages[0].omni_kv_config.need_send", "need_send_cache"),
        (chain(1, stage_0="final_output_type: txt"), "stages[0].final_output_type", "did you mean 'text'?"),
        (chain(1, stage_0="final_output: false"), "stages", "clients would get nothing"),
        (chain(1, "async_chunk: false", stage_0="async_chunk: true"), "stages[0].async_chunk", "holds for all stages"),
        (chain(1, stage_0="env: {A-B: x}"), "stages[0].env.A-B", "variable name"),
        (chain(1, stage_0="env: {A: true}"), "stages[0].env.A", "put it in quotes"),
        (chain(1, stage_0="additional_config: {x: 99999999999999999}"), "stages[0].additional_config.x", "2^53"),
        (chain(1, stage_0="additional_config: {x: .nan}"), "stages[0].additional_config.x", "finite"),
        (chain(1, stage_0="model: 7"), "stages[0].model", "put it in quotes"),
        (chain(1, stage_0="engine: a/b"), "stages[0].engine", "expected a name"),
        (chain(1, stage_0="engine_args: {stage_id: 0}"), "stages[0].engine_args.stage_id", "one level up"),
        (chain(1, stage_0="engine_args: []"), "stages[0].engine_args", "expected a mapping, got a list"),
        (chain(1, stage_0="dtype: half, engine_args: {dtype: auto}"), "stages[0].engine_args.dtype", "disagrees with"),
        (chain(1, stage_0="runtime: {device: 0}"), "stages[0].runtime.device", "did you mean 'devices'?"),
        (chain(1, stage_0="sim: {ttft: 3}"), "stages[0].sim.ttft", "did you mean 'ttft_ms'?"),
        (chain(1, stage_0="sim: {output: wav}"), "stages[0].sim.output", "one of text, tensor, audio, image"),
        (chain(1, stage_0="sim: {fail_rate: 2}"), "stages[0].sim.fail_rate", "at most 1"),
        (chain(1, stage_0='"a.b": 1'), 'stages[0]["a.b"]', "unknown key"),
        # Sampling
        (chain(1, stage_0="default_sampling_params: 3"), "stages[0].default_sampling_params", "a mapping, got int 3"),
        *(
            (chain(1, stage_0=f"default_sampling_params: {{{given}}}"), f"stages[0].default_sampling_params.{key}", said)
            for given, key, said in (
                ("temprature: 1", "temprature", "did you mean 'temperature'?"),
                ("temperature: -0.1", "temperature", "at least 0"),
                ("temperature: '1'", "temperature", "expected a number of at least 0, got str '1'"),
                ("temperature: .inf", "temperature", "expected a number"),
                ("top_p: 0", "top_p", "above 0"),
                ("top_p: 1.1", "top_p", "at most 1"),
                ("top_k: 0", "top_k", "-1 or an integer of at least 1"),
                ("max_tokens: 0", "max_tokens", "at least 1"),
                ("seed: 1.5", "seed", "expected an integer"),
                ("seed: 99999999999999999999", "seed", "at most"),
                ("detokenize: 1", "detokenize", "true or false"),
                ("repetition_penalty: 0", "repetition_penalty", "above 0"),
                ("num_inference_steps: 0", "num_inference_steps", "at least 1"),
                ("guidance_scale: -1", "guidance_scale", "at least 0"),
                ("stop_token_ids: [-1]", "stop_token_ids[0]", "at least 0"),
                ("stop: [1]", "stop", "expected text, or a list, each item text"),
                ("min_tokens: 9, max_tokens: 8", "min_tokens", "9 is more than max_tokens = 8"),
            )
        ),
        # Devices
        (chain(1, stage_0="devices: '0,x'"), "stages[0].devices", "expected device ids"),
        (chain(1, stage_0="devices: 'cpu'"), "stages[0].devices", "leave `devices` out"),
        (chain(1, stage_0="devices: '0,0'"), "stages[0].devices", "device 0 is listed twice"),
        (chain(1, stage_0="devices: [0, 00]"), "stages[0].devices", "device 0 is listed twice"),
        (chain(1, stage_0="devices: {a: 1}"), "stages[0].devices", "got a mapping"),
        (chain(1, stage_0="devices: true"), "stages[0].devices", "got bool true"),
        (chain(1, stage_0="devices: '0,'"), "stages[0].devices", "expected device ids"),
        (chain(1, stage_0="devices: -1"), "stages[0].devices", "expected device ids"),
        (
            chain(1, stage_0="devices: '0,1,2', num_replicas: 2, tensor_parallel_size: 2"),
            "stages[0].devices",
            "3 devices given, 4 needed: 2 replica(s) × 2 rank(s) each",
        ),
        (
            chain(1, stage_0="devices: '0,1,2,3,4,5,6', tensor_parallel_size: 2, data_parallel_size: 2, num_replicas: 2"),
            "stages[0].devices",
            "7 devices given, 8 needed",
        ),
        (chain(1, stage_0="devices: '0,1,2', num_replicas: 2"), "stages[0].devices", "split evenly"),
        (
            chain(1, stage_0="devices: '0', parallel_config: {ulysses_degree: 2, cfg_parallel_size: 2}"),
            "stages[0].devices",
            "1 device given, 4 needed",
        ),
        (
            chain(1, stage_0="tensor_parallel_size: 2, parallel_config: {tensor_parallel_size: 4}"),
            "stages[0].parallel_config.tensor_parallel_size",
            "4 disagrees with stages[0].tensor_parallel_size (2",
        ),
        # Edges
        (chain(2, "edges: [{from: 0, to: 2}]"), "edges[0].to", "no stage 2; stages are 0, 1"),
        (chain(2, "edges: [{from: 0}]"), "edges[0].to", "required"),
        (chain(2, "edges: [{from: 0, to: 1, window: 3}]"), "edges[0].window", "did you mean 'window_size'?"),
        (chain(2, "edges: [{from: 0, to: 1, window_size: 0}]"), "edges[0].window_size", "-1 or an integer of at least 1"),
        (chain(2, "edges: [{from: 0, to: 1, window_size: zero}]"), "edges[0].window_size", "got str 'zero'"),
        (chain(2, "edges: [{from: 0, to: 1, max_inflight: 0}]"), "edges[0].max_inflight", "at least 1, got 0"),
        (chain(2, "edges: [{from: 0, to: 1, chunk_timeout_s: 0}]"), "edges[0].chunk_timeout_s", "at least 0.001"),
        (chain(2, "edges: [{from: 0, to: 1, chunk_by: word}]"), "edges[0].chunk_by", "one of step, sentence, final"),
        (chain(2, "edges: [{from: 0, to: 1}, {from: 0, to: 1}]"), "edges[1]", "0 → 1 is given twice"),
        (chain(2, "edges: [{from: 1, to: 1}]"), "edges[0].to", "leads back to its own stage"),
        (chain(2, "edges: {from: 0}"), "edges", "expected a list"),
        (chain(2, "edges: [5]"), "edges[0]", "expected a mapping"),
        (
            chain(3, "edges: [{from: 0, to: 1}, {from: 1, to: 2}, {from: 2, to: 0}]"),
            "edges[2]",
            "cycle: 0 → 1 → 2 → 0",
        ),
        # Connectors
        (chain(2, SHM, stage_0="output_connectors: {to_stag_1: shm}"), "stages[0].output_connectors.to_stag_1", "'to_stage_1'"),
        (chain(2, SHM, stage_0="output_connectors: {to_stage_7: shm}"), "stages[0].output_connectors.to_stage_7", "no stage"),
        (chain(2, SHM, stage_0="output_connectors: {to_stage_0: shm}"), "stages[0].output_connectors.to_stage_0", "itself"),
        (chain(2, SHM, stage_1="input_connectors: {from_stage_0: shn}"), "stages[1].input_connectors.from_stage_0", "did you mean 'shm'?"),
        (chain(2, stage_1="input_connectors: {from_stage_0: shm}"), "stages[1].input_connectors.from_stage_0", "there are no `connectors`"),
        (chain(2, SHM, stage_1="input_connectors: {from_stage_0: 4}"), "stages[1].input_connectors.from_stage_0", "got int 4"),
        (
            chain(
                2,
                "connectors: {a: {name: shm}, b: {name: grpc}}",
                stage_0="output_connectors: {to_stage_1: a}",
                stage_1="input_connectors: {from_stage_0: b}",
            ),
            "stages[1].input_connectors.from_stage_0",
            "uses 'b' here, but 'a' at stages[0].output_connectors.to_stage_1",
        ),
        (
            chain(3, SHM + "\nedges: [{from: 0, to: 1}, {from: 1, to: 2}]", stage_0="output_connectors: {to_stage_2: shm}"),
            "stages[0].output_connectors.to_stage_2",
            "there is no edge 0 → 2",
        ),
        (
            chain(2, "connectors: {a: {name: rdma_connector}}", stage_0="output_connectors: {to_stage_1: a}"),
            "connectors.a.name",
            "unknown connector class 'rdma_connector'",
        ),
        (
            chain(2, "connectors: {a: {name: SharedMemoryConector}}", stage_0="output_connectors: {to_stage_1: a}"),
            "connectors.a.name",
            "did you mean 'SharedMemoryConnector'?",
        ),
        (chain(1, "connectors: {a: {}}"), "connectors.a.name", "required"),
        (chain(1, "connectors: {a: shm}"), "connectors.a", "expected a mapping"),
        (chain(1, "connectors: [shm]"), "connectors", "expected a mapping"),
        (chain(1, "connectors: {a: {name: shm, extras: {}}}"), "connectors.a.extras", "did you mean 'extra'?"),
        (chain(1, "connectors: {a: {name: shm, extra: 4}}"), "connectors.a.extra", "expected a mapping, got int 4"),
        *(
            (chain(1, f"connectors: {{a: {{name: {kind}, extra: {{{given}}}}}}}"), f"connectors.a.extra.{key}", said)
            for kind, given, key, said in (
                ("shm", "shm_threshold_byte: 1", "shm_threshold_byte", "did you mean 'shm_threshold_bytes'?"),
                ("shm", "shm_threshold_bytes: -1", "shm_threshold_bytes", "from 0 to 65536"),
                ("shm", "memory_pool_size: 0", "memory_pool_size", "at least 1"),
                ("shm", "memory_pool_size: 4GiB", "memory_pool_size", "got str '4GiB'"),
                ("shm", "memory_pool_device: cuda", "memory_pool_device", "one of cpu"),
                ("shm", "pool_bytes: 1, memory_pool_size: 2", "memory_pool_size", "they are the same"),
                ("shm", "qqqqq: 1", "qqqqq", "unknown option"),
                ("mooncake", "protocol: rmda", "protocol", "did you mean 'rdma'?"),
                ("mooncake", "zmq_port: 70000", "zmq_port", "expected an integer from 0 to 65535"),
                ("mooncake", "memory_pool_device: gpu", "memory_pool_device", "expected a memory"),
                ("mooncake", "host: ''", "host", "empty text"),
                ("mooncake", "memory_pool_sise: 1", "memory_pool_sise", "did you mean 'memory_pool_size'?"),
                ("nixl", "backends: []", "backends", "at least 1"),
                ("mooncake", "protocol: ascend", "protocol", "one of tcp, rdma, nvlink"),
                ("auto", "among: []", "among", "at least 1"),
                ("auto", "among: [shn]", "among[0]", "did you mean 'shm'?"),
                ("auto", "among: [shm, auto]", "among[1]", "cannot be among its own choices"),
                ("auto", "among: [shm, SharedMemoryConnector]", "among[1]", "'shm' is there twice"),
                ("auto", "options: {nixl: {}}", "options.nixl", "is not in `among` (nothing)"),
                ("auto", "among: [nixl], options: {nixl: 1}", "options.nixl", "expected a mapping"),
                ("auto", "among: [nixl], options: {nixl: {pool_bites: 1}}", "options.nixl.pool_bites", "'pool_bytes'"),
                ("auto", "pool_bytes: 1", "pool_bytes", "unknown option"),
            )
        ),
        (
            chain(
                3,
                "connectors: {a: {name: shm}, b: {name: shm, extra: {checksum: true}}}",
                stage_1="input_connectors: {from_stage_0: a}, output_connectors: {to_stage_2: b}",
            ),
            "connectors.b.extra",
            "stage 1 uses both",
        ),
        # Entry points
        (chain(1, "entrypoints: {chat: 3}"), "entrypoints.chat", "no stage 3"),
        (chain(1, "entrypoints: {chatt: 0}"), "entrypoints.chatt", "did you mean 'chat'?"),
        (chain(1, "entrypoints: {speech: 0}"), "entrypoints.speech", "no audio output"),
        (chain(2, "entrypoints: {chat: 1}", stage_0="final_output: true", stage_1="final_output: false"), "entrypoints.chat", "no stage with final_output"),
        # Platforms
        (chain(1, "platforms: {npu: {stages: [{stage_id: 4}]}}"), "platforms.npu.stages[0].stage_id", "no stage 4; known: 0"),
        (chain(1, "platforms: {npu: {stages: [{devices: '1'}]}}"), "platforms.npu.stages[0].stage_id", "required"),
        (chain(1, "platforms: {npu: {stages: [{stage_id: 0, device: '1'}]}}"), "platforms.npu.stages[0].device", "'devices'"),
        (chain(1, "platforms: {npu: {stage: []}}"), "platforms.npu.stage", "did you mean 'stages'?"),
        (chain(1, "platforms: {npu: 3}"), "platforms.npu", "expected a mapping"),
        (chain(1, "platforms: 3"), "platforms", "expected a mapping"),
        # Prefill and decode
        (chain(1, stage_0="is_prefill_only: true, is_decode_only: true"), "stages[0].is_decode_only", "not both"),
        (chain(1, stage_0="is_prefill_only: true"), "stages[0].kv_transfer_config", "required for stage 0"),
        (
            chain(1, stage_0="is_prefill_only: true, kv_transfer_config: {kv_role: kv_consumer}"),
            "stages[0].kv_transfer_config.kv_role",
            "kv_producer or kv_both, not kv_consumer",
        ),
        (
            chain(
                2,
                stage_0="is_prefill_only: true, kv_transfer_config: {kv_role: kv_producer, kv_connector: A}",
                stage_1="is_decode_only: true, kv_transfer_config: {kv_role: kv_consumer, kv_connector: B}",
            ),
            "stages[1].kv_transfer_config.kv_connector",
            "B disagrees with A of prefill stage 0",
        ),
        (
            chain(
                2,
                stage_0="is_prefill_only: true, tensor_parallel_size: 2, kv_transfer_config: {kv_role: kv_producer}",
                stage_1="is_decode_only: true, kv_transfer_config: {kv_role: kv_consumer}",
            ),
            "stages[1].tensor_parallel_size",
            "1 disagrees with 2",
        ),
    ],
)  # fmt: skip
def test_fault_is_named(text: str, path: str, said: str) -> None:
    found = faults(text)
    assert path in found
    assert said in found[path]


def test_all_faults_of_a_file_are_reported_each_with_its_line() -> None:
    found = faults(
        """
        # a comment → with unicode
        async_chunk: "yes"
        stages:
          - stage_id: 0
            num_replicas: 0
            gpu_memory_utilization: 1.7
            output_connectors:
              to_stage_1: sham
          - stage_id: 1
            enforce_eager: 1
        connectors:
          shm:
            name: shm
        edges:
          - from: 0
            to: 1
            max_inflight: 0
        """
    )
    assert {path: description.split(":")[0] for path, description in found.items()} == {
        "async_chunk": "line 3",
        "stages[0].num_replicas": "line 6",
        "stages[0].gpu_memory_utilization": "line 7",
        "stages[0].output_connectors.to_stage_1": "line 9",
        "stages[1].enforce_eager": "line 11",
        "edges[0].max_inflight": "line 18",
    }


def test_a_fault_is_reported_once_although_the_file_is_looked_at_twice() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_pipeline("stages: [{stage_id: 0, num_replicas: 0}]", name="p")
    assert [violation.field for violation in caught.value.violations] == ["stages[0].num_replicas"]
    assert caught.value.message == (
        "the deploy file has 1 fault: stages[0].num_replicas (line 1: expected an integer from 1 to 4096, got 0)"
    )


def test_a_bad_stage_id_does_not_make_every_reference_dangle() -> None:
    found = faults("stages: [{stage_id: zero}, {stage_id: 1}]\nedges: [{from: 0, to: 1}]\nentrypoints: {chat: 0}")
    assert list(found) == ["stages[0].stage_id"]


def test_the_error_fits_into_a_trailer_however_many_faults_there_are() -> None:
    text = "stages:\n" + "\n".join(f"  - {{stage_id: {i}, num_replica_{i}: {i}}}" for i in range(150))
    with pytest.raises(InvalidRequestError) as caught:
        plan_pipeline(text, name="p")
    status = caught.value.to_status().SerializeToString()
    assert len(status) < 6000  # 8 KiB is the usual limit, after base64
    assert caught.value.metadata["faults"] == "150"
    assert "more faults" in caught.value.violations[-1].description


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"stagez{i}: 1" for i in range(40_000)),
        "stages: [{stage_id: 0, sim: {" + ", ".join(f"tokenz{i}: 1" for i in range(40_000)) + "}}]",
        "connectors: {m: {name: mooncake, extra: {"
        + ", ".join(f"{i:x}qqq: 1" for i in range(40_000))
        + "}}}\nstages: [{stage_id: 0}]",
        "stages: [" + ", ".join(f"{{stage_id: {i}}}" for i in range(15_000)) + "]",
        "stages: [{stage_id: 0, engine_args: {" + ", ".join(f"k{i}: {i}" for i in range(40_000)) + "}}]",
        "stages: [{stage_id: 0, output_connectors: {" + ", ".join(f"to_stag_{i}: x" for i in range(40_000)) + "}}]",
        "stages: [{stage_id: 0}, {stage_id: 1}]\nedges: [" + "{from: 0, to: 1}, " * 9_000 + "]",
        "stages: [{stage_id: 0, devices: [" + ", ".join(str(i) for i in range(40_000)) + "]}]",
        "\n---\n".join("stages: [" + ", ".join(f"{{stage_id: {i}}}" for i in range(1_000)) + "]" for _ in range(16)),
        "---\na: 1\n" * 50_000,
    ],
    ids=["keys", "sim", "options", "stages", "engine_args", "outputs", "edges", "devices", "overlays", "documents"],
)
def test_a_huge_file_does_not_hold_up_the_control_plane(text: str) -> None:
    start = time.process_time()
    with contextlib.suppress(InvalidRequestError):
        plan_pipeline(text, name="p")
    assert time.process_time() - start < 15  # some seconds on a busy machine; minutes if anything is quadratic


def test_nothing_of_the_file_is_repeated_at_length() -> None:
    key = "k" * 300_000
    found = faults(f"stages: [{{stage_id: 0, {key}: {key}, model: '{key}'}}]\n{key}: 1")
    assert sum(len(path) + len(description) for path, description in found.items()) < 2000


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"name": "a/b"}, "name"),
        ({"name": ".."}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"name": "p", "engine": "../sim"}, "engine"),
        ({"name": "p", "platform": "npuu"}, "platform"),
        ({}, "pipeline"),
    ],
)
def test_arguments_of_the_call_are_checked(arguments: dict[str, str], path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_pipeline("stages: [{stage_id: 0}]", **arguments)
    assert [violation.field for violation in caught.value.violations] == [path]
