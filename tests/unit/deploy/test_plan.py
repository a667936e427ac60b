"""Good files: what is read, what is passed on, and what is derived."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from tests.unit.deploy.helpers import chain, faults, plan, result

STEP, SENTENCE, FINAL = (
    pipeline_pb2.CHUNK_BY_STEP,
    pipeline_pb2.CHUNK_BY_SENTENCE,
    pipeline_pb2.CHUNK_BY_FINAL,
)


def args(stage: pipeline_pb2.Stage) -> dict[str, Any]:
    return json_format.MessageToDict(stage.engine_args)


def edges(pipeline: pipeline_pb2.Pipeline) -> list[tuple[int, int]]:
    return [(edge.from_stage, edge.to_stage) for edge in pipeline.edges]


def test_smallest_file_gets_all_defaults() -> None:
    pipeline = plan("stages: [{stage_id: 0}]", name="small")
    stage = pipeline.stages[0]
    assert (pipeline.name, pipeline.async_chunk, dict(pipeline.entrypoints)) == ("small", True, {"chat": 0})
    assert (stage.name, stage.engine, stage.num_replicas, stage.tensor_parallel_size) == ("stage-0", "vllm", 1, 1)
    assert (stage.final_output, stage.final_output_type, stage.is_comprehension) == (True, "text", True)
    assert (list(stage.devices), stage.model, args(stage), stage.max_num_seqs) == ([], "", {}, 0)
    assert not pipeline.edges
    assert pipeline.generation == 0
    assert len(pipeline.source_sha256) == len(stage.config_sha256) == 64


def test_keys_with_a_place_in_the_plan_go_there_and_all_others_to_the_engine() -> None:
    stage = plan(
        """
        stages:
          - stage_id: 0
            name: thinker
            engine: vllm
            model: org/model
            num_replicas: 2
            devices: "0,1,2,3"
            tensor_parallel_size: 2
            max_num_seqs: 3
            max_num_batched_tokens: 32768
            gpu_memory_utilization: 1
            enable_prefix_caching: false
            enforce_eager: true
            trust_remote_code: true
            distributed_executor_backend: mp
            quantization: fp8
            worker_cls: a.b.C
            enable_expert_parallel: true
            load_format: dummy
            hf_overrides: {rope_parameters: {mrope_section: [0, 32, 32], rope_type: default}}
            omni_kv_config: {need_send_cache: true, need_recv_cache: false}
            compilation_config: {cudagraph_capture_sizes: [1, 2]}
            env: {PORT: 23000, MODE: "x"}
            kv_cache_memory_bytes: null
            engine_args: {my_own_option: {a: [1, null, "x"]}}
            engine_extras: {another: 1.5}
        """
    ).stages[0]
    assert (stage.name, stage.model, stage.num_replicas, list(stage.devices)) == (
        "thinker", "org/model", 2, ["0", "1", "2", "3"],
    )  # fmt: skip
    assert (stage.tensor_parallel_size, stage.max_num_seqs) == (2, 3)
    assert args(stage) == {
        "max_num_batched_tokens": 32768.0,
        "gpu_memory_utilization": 1.0,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "trust_remote_code": True,
        "distributed_executor_backend": "mp",
        "quantization": "fp8",
        "worker_cls": "a.b.C",
        "enable_expert_parallel": True,
        "load_format": "dummy",
        "hf_overrides": {"rope_parameters": {"mrope_section": [0.0, 32.0, 32.0], "rope_type": "default"}},
        "omni_kv_config": {"need_send_cache": True, "need_recv_cache": False},
        "compilation_config": {"cudagraph_capture_sizes": [1.0, 2.0]},
        "env": {"PORT": "23000", "MODE": "x"},
        "my_own_option": {"a": [1.0, None, "x"]},
        "another": 1.5,
    }


def test_all_twelve_parallel_sizes_are_passed_on_and_counted() -> None:
    config = (
        "pipeline_parallel_size: 1, data_parallel_size: 1, tensor_parallel_size: 4, enable_expert_parallel: true, "
        "sequence_parallel_size: 1, ulysses_degree: 1, ring_degree: 1, cfg_parallel_size: 1, "
        "vae_patch_parallel_size: 1, use_hsdp: false, hsdp_shard_size: -1, hsdp_replicate_size: 1"
    )
    stage = plan(chain(1, stage_0=f"devices: '4,5,6,7', parallel_config: {{{config}}}")).stages[0]
    assert len(args(stage)["parallel_config"]) == 12
    assert stage.tensor_parallel_size == 4


def test_top_level_engine_keys_hold_for_stages_that_do_not_say_otherwise() -> None:
    pipeline = plan(
        chain(
            2,
            "trust_remote_code: true\ndtype: bfloat16\nengine: sim\nmodel: m",
            stage_1="trust_remote_code: false, engine: vllm, model: n",
        )
    )
    assert [args(stage)["trust_remote_code"] for stage in pipeline.stages] == [True, False]
    assert [args(stage)["dtype"] for stage in pipeline.stages] == ["bfloat16", "bfloat16"]
    assert [(stage.engine, stage.model) for stage in pipeline.stages] == [("sim", "m"), ("vllm", "n")]


def test_sampling_parameters_are_typed() -> None:
    given = (
        "temperature: 0, top_p: 1, top_k: -1, max_tokens: 2048, seed: -52, detokenize: true, repetition_penalty: 1.05, "
        "skip_special_tokens: false, num_inference_steps: 50, guidance_scale: 0, stop: END, stop_token_ids: [1, 2], "
        "ignore_eos: true, min_tokens: 2, presence_penalty: -2, frequency_penalty: 2, height: 1024, strength: 0.5, "
        "include_stop_str_in_output: true, extra_args: {cfg_scale: 1.5}"
    )
    params = plan(chain(1, stage_0=f"default_sampling_params: {{{given}}}")).stages[0].default_sampling_params
    assert json_format.MessageToDict(params, preserving_proto_field_name=True) == {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 2048, "seed": "-52", "detokenize": True,
        "repetition_penalty": 1.05, "skip_special_tokens": False, "num_inference_steps": 50, "guidance_scale": 0.0,
        "stop": ["END"], "stop_token_ids": [1, 2], "ignore_eos": True, "min_tokens": 2, "presence_penalty": -2.0,
        "frequency_penalty": 2.0, "height": 1024,
        "extra": {"strength": 0.5, "include_stop_str_in_output": True, "extra_args": {"cfg_scale": 1.5}},
    }  # fmt: skip
    empty = plan("stages: [{stage_id: 0}]").stages[0].default_sampling_params
    assert not empty.HasField("temperature")


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ('"0"', ["0"]), ("0", ["0"]), ('"0,1"', ["0", "1"]), ('" 0 , 1 "', ["0", "1"]), ("[2, 3]", ["2", "3"]),
        ('["0", "1"]', ["0", "1"]), ('""', []), ("[]", []), ("null", []), ("GPU-8a-b", ["GPU-8a-b"]),
        ('"MIG-1,MIG-2"', ["MIG-1", "MIG-2"]),
    ],
)  # fmt: skip
def test_devices(written: str, devices: list[str]) -> None:
    replicas = max(1, len(devices))
    stage = plan(f"stages: [{{stage_id: 0, devices: {written}, num_replicas: {replicas}}}]").stages[0]
    assert list(stage.devices) == devices


def test_device_counts() -> None:
    enough = "devices: '0,1,2,3,4,5,6,7', tensor_parallel_size: 2, data_parallel_size: 2, num_replicas: 2"
    assert not result(chain(1, stage_0=enough)).warnings
    on_host = plan(chain(1, stage_0="num_replicas: 3, tensor_parallel_size: 2"))  # no devices: nothing to count
    assert on_host.stages[0].num_replicas == 3
    (warning,) = result(chain(1, stage_0="devices: '0,1'")).warnings
    assert warning == (
        "stages[0].devices (line 2): 2 devices given, 1 needed (1 replica(s) × 1 rank(s) each): some stay idle"
    )


def test_memory_claimed_twice_is_a_warning_that_names_the_device() -> None:
    both = chain(
        2, stage_0="devices: '0', gpu_memory_utilization: 0.8", stage_1="devices: '0', gpu_memory_utilization: 0.3"
    )
    (warning,) = result(both).warnings
    assert "device 0 claim 1.1 of its memory (stage 0: 0.8, stage 1: 0.3)" in warning
    exactly = both.replace("0.3", "0.2")
    assert not result(exactly).warnings


def test_edges_are_a_chain_unless_written() -> None:
    assert edges(plan(chain(3))) == [(0, 1), (1, 2)]
    unordered = plan("stages: [{stage_id: 7}, {stage_id: 3}]")
    assert [stage.stage_id for stage in unordered.stages] == [3, 7]
    assert edges(unordered) == [(3, 7)]
    fan = plan(chain(4, "edges: [{from: 0, to: 2}, {from: 1, to: 2}, {from: 0, to: 3}]"))
    assert edges(fan) == [(0, 2), (0, 3), (1, 2)]
    assert [stage.final_output for stage in fan.stages] == [False, False, True, True]


def test_connectors_of_all_stages_are_a_graph_of_their_own() -> None:
    shm = "connectors: {shm: {name: shm}}"
    star = plan(chain(3, shm, stage_2="input_connectors: {from_stage_0: shm, from_stage_1: shm}"))
    assert edges(star) == [(0, 2), (1, 2)]
    partly = plan(chain(3, shm, stage_1="input_connectors: {from_stage_0: shm}"))
    assert [(edge.from_stage, edge.to_stage, edge.connector) for edge in partly.edges] == [(0, 1, "shm"), (1, 2, "")]
    assert "there is no edge 0 → 2" in str(
        faults(chain(4, shm, stage_0="output_connectors: {to_stage_2: shm}"))
    )  # neither a chain nor the whole graph


def test_edge_options_and_defaults() -> None:
    written = "edges: [{from: 0, to: 1, window_size: -1, max_inflight: 1, connector: shm, chunk_by: final}]\n"
    edge = plan(chain(2, written + "connectors: {shm: {name: shm}}")).edges[0]
    assert (edge.window_size, edge.max_inflight, edge.connector, edge.chunk_by) == (-1, 1, "shm", FINAL)
    assert not edge.HasField("chunk_timeout"), "the worker's own"
    timed = plan(chain(2, "edges: [{from: 0, to: 1, chunk_timeout_s: 2.5}]")).edges[0]
    assert timed.chunk_timeout.ToMilliseconds() == 2500
    async_edge = plan(chain(2)).edges[0]
    assert (async_edge.window_size, async_edge.max_inflight, async_edge.connector) == (16, 0, "")
    sync_edge = plan(chain(2, "async_chunk: false")).edges[0]
    assert (sync_edge.window_size, sync_edge.chunk_by) == (-1, FINAL)


def test_text_is_cut_by_sentence_and_nothing_else_is() -> None:
    pipeline = plan(
        chain(
            4,
            stage_0="final_output: true",
            stage_1="engine: hibari-acoustic",
            stage_2="engine: sim, sim: {output: tensor}",
            stage_3="final_output_type: audio",
        )
    )
    assert [edge.chunk_by for edge in pipeline.edges] == [SENTENCE, STEP, STEP]
    simulated = plan(chain(3, "engine: sim"))
    assert [edge.chunk_by for edge in simulated.edges] == [SENTENCE, STEP]


def test_connectors_get_their_kind_and_only_the_options_they_know() -> None:
    shm = "{name: SharedMemoryConnector, extra: {memory_pool_size: 1024, shm_threshold_bytes: 65536, host: auto, "
    shm += "memory_pool_device: cpu, codec_chunk_frames: 25, codec_streaming: true}}"
    rdma = "{name: MooncakeTransferEngineConnector, extra: {host: auto, zmq_port: 50051, protocol: rdma, "
    rdma += "device_name: '', memory_pool_size: 4294967296, memory_pool_device: cpu}}"
    found = result(
        chain(
            3,
            f"connectors: {{a: {shm}, b: {rdma}, c: {{name: grpc}}, d: {{name: rdma_connector}}}}",
            stage_0="output_connectors: {to_stage_1: a}",
            stage_2="input_connectors: {from_stage_1: b}",
        )
    )
    connectors = {connector.name: connector for connector in found.pipeline.connectors}
    assert {name: connector.kind for name, connector in connectors.items()} == {"a": "shm", "b": "mooncake"}
    assert json_format.MessageToDict(connectors["a"].extra) == {"pool_bytes": 1024.0, "shm_threshold_bytes": 65536.0}
    rdma_options = {"pool_bytes": 4294967296.0, "host": "auto", "protocol": "rdma", "device_name": ""}
    assert json_format.MessageToDict(connectors["b"].extra) == rdma_options
    codec = {"codec_chunk_frames": 25.0, "codec_streaming": True}
    assert [args(stage).get("connector_extra") for stage in found.pipeline.stages] == [codec, codec, None]
    assert [warning.split(" ")[0] for warning in found.warnings] == [
        "connectors.a.extra.host",
        "connectors.b.extra.zmq_port",
        "connectors.c",
        "connectors.d.name",
    ]


def test_auto_says_what_it_may_choose_and_with_which_options() -> None:
    fast = "{name: auto, extra: {among: [shm, MooncakeTransferEngineConnector], options: {mooncake: {protocol: tcp, "
    fast += "memory_pool_size: 4096}}}}"
    pipeline = plan(chain(2, f"connectors: {{fast: {fast}}}", stage_0="output_connectors: {to_stage_1: fast}"))
    assert json_format.MessageToDict(pipeline.connectors[0].extra) == {
        "among": ["shm", "mooncake"],
        "options": {"mooncake": {"protocol": "tcp", "pool_bytes": 4096.0}},
    }


@pytest.mark.parametrize(
    ("kind", "given", "key", "value"),
    [
        ("mori", "backend_type: xgmi", "backend", "xgmi"),
        ("nixl", "transfer_timeout_s: 3", "get_timeout_s", 3.0),
        ("yuanrong_transfer_engine", "rpc_port: 5000", "port", 5000.0),
        ("mooncake_store", "protocol: rdma", "proto", "rdma"),
        ("mooncake", "shm_threshold_bytes: 7", "inline_bytes", 7.0),
    ],
)
def test_other_names_of_options_are_ours(kind: str, given: str, key: str, value: object) -> None:
    connector = f"{{name: {kind}, extra: {{{given}}}}}"
    pipeline = plan(chain(2, f"connectors: {{a: {connector}}}", stage_0="output_connectors: {to_stage_1: a}"))
    assert json_format.MessageToDict(pipeline.connectors[0].extra) == {key: value}


@pytest.mark.parametrize(
    ("kind", "device", "said"),
    [
        ("mooncake", "cuda", "the pool of 'mooncake' is host memory; between GPUs of one host 'cuda_ipc'"),
        ("cuda_ipc", "cpu", "the pool of 'cuda_ipc' is device memory; for host memory use 'shm'"),
        ("cuda_ipc", "cuda", ""),
        ("mooncake", "cpu", ""),
    ],
)
def test_where_a_pool_is_depends_on_the_kind(kind: str, device: str, said: str) -> None:
    connector = f"{{name: {kind}, extra: {{memory_pool_device: {device}}}}}"
    found = result(chain(2, f"connectors: {{a: {connector}}}", stage_0="output_connectors: {to_stage_1: a}"))
    assert bool(found.warnings) == bool(said)
    assert said in "".join(found.warnings)


def test_a_connector_may_be_described_where_it_is_used() -> None:
    inline = "{name: SharedMemoryConnector, extra: {shm_threshold_bytes: 1}}"
    pipeline = plan(
        chain(
            2,
            stage_0=f"output_connectors: {{to_stage_1: {inline}}}",
            stage_1=f"input_connectors: {{from_stage_0: {inline}}}",
        )
    )
    assert [(connector.name, connector.kind) for connector in pipeline.connectors] == [("stage_0_to_1", "shm")]
    assert pipeline.edges[0].connector == "stage_0_to_1"
    differing = chain(
        2,
        stage_0=f"output_connectors: {{to_stage_1: {inline}}}",
        stage_1="input_connectors: {from_stage_0: {name: shm}}",
    )
    assert "uses connector options of its own here" in faults(differing)["stages[1].input_connectors.from_stage_0"]
    wrong = chain(2, stage_0="output_connectors: {to_stage_1: {name: shm, extra: {put_wait: 1}}}")
    assert "'put_wait_s'" in faults(wrong)["stages[0].output_connectors.to_stage_1.extra.put_wait"]


def test_entry_points() -> None:
    assert dict(plan(chain(2, stage_1="final_output_type: audio")).entrypoints) == {"chat": 0, "speech": 0}
    assert dict(plan(chain(2, stage_1="final_output_type: image")).entrypoints) == {"chat": 0}
    written = plan(chain(3, "entrypoints: {chat: 0, speech: 1}", stage_2="final_output_type: audio"))
    assert dict(written.entrypoints) == {"chat": 0, "speech": 1}
    only_speech = result(chain(2, "entrypoints: {speech: 1}", stage_1="final_output_type: audio"))
    assert only_speech.warnings == ("stages[0] (line 2): no entry point leads to stage 0",)


def test_what_comes_out_of_a_stage() -> None:
    pipeline = plan(
        chain(
            4,
            "edges: [{from: 0, to: 1}, {from: 0, to: 2}, {from: 0, to: 3}]",
            stage_1="engine: hibari-vocoder",
            stage_2="default_sampling_params: {num_inference_steps: 5}",
            stage_3="sim: {output: audio}",
        )
    )
    assert [stage.final_output_type for stage in pipeline.stages] == ["", "audio", "image", "audio"]
    silent = result(chain(2, stage_0="final_output: true", stage_1="final_output: false, final_output_type: audio"))
    assert [warning.split(":")[1] for warning in silent.warnings] == [
        " has no effect",
        " no edge leaves the stage either",
    ]


def test_known_topologies_say_what_files_leave_out() -> None:
    bare = chain(3)
    pipeline = plan("pipeline: qwen3_omni_moe\n" + bare)
    assert [stage.final_output_type for stage in pipeline.stages] == ["text", "", "audio"]
    assert {stage.engine for stage in pipeline.stages} == {"vllm-omni"}
    by_name = result(bare, name="qwen3_omni_moe_mine")
    assert [stage.final_output_type for stage in by_name.pipeline.stages] == ["text", "", "audio"]
    assert "taken to mean the topology 'qwen3_omni_moe'" in by_name.warnings[0]
    says_itself = plan(chain(3, stage_0="engine: vllm"), name="qwen3_omni_moe")
    assert [stage.final_output_type for stage in says_itself.stages] == ["", "", "text"]
    other_count = result("pipeline: qwen3_omni_moe\n" + chain(2))
    assert "has 3 stage(s), this file 2" in other_count.warnings[0]
    typo = result("pipeline: qwen3_omni_mo\n" + bare)
    assert "nearest: 'qwen3_omni_moe'" in typo.warnings[0]


def test_engine_of_the_call_replaces_all_and_keeps_the_rest() -> None:
    text = chain(
        3,
        stage_0="dtype: bfloat16, sim: {tokens: 3}",
        stage_1="engine: hibari-acoustic, sim: {output: tensor}",
        stage_2="final_output_type: video",
    )
    real, sim = plan(text), plan(text, engine="sim")
    assert [stage.engine for stage in real.stages] == ["vllm", "hibari-acoustic", "vllm"]
    assert [args(stage) for stage in real.stages] == [{"dtype": "bfloat16"}, {}, {}]  # only sim gets its options
    assert {stage.engine for stage in sim.stages} == {"sim"}
    assert [args(stage) for stage in sim.stages] == [
        {"dtype": "bfloat16", "sim": {"tokens": 3.0}},
        {"sim": {"output": "tensor"}},
        {"sim": {"output": "image"}},  # in place of video
    ]
    assert sim.stages[2].final_output_type == "video"
    warnings = result(chain(1, stage_0="engine: vlm, final_output_type: text")).warnings
    assert warnings == (
        "stages[0].engine (line 2): engine 'vlm' is not one of the project's own; did you mean 'vllm'?",
    )


def test_a_split_stage() -> None:
    config = "kv_transfer_config: {kv_connector: C, kv_role: %s, kv_buffer_size: 1e9, engine_id: e}"
    pipeline = plan(
        chain(
            2,
            stage_0="is_prefill_only: true, " + config % "kv_producer",
            stage_1="is_decode_only: true, " + config % "kv_both",
        )
    )
    assert args(pipeline.stages[0])["kv_transfer_config"]["kv_role"] == "kv_producer"
    alone = chain(1, stage_0="is_prefill_only: true, " + config % "kv_producer")
    assert "no decode stage" in faults(alone)["stages[0].is_prefill_only"]


def test_hashes() -> None:
    base = plan(chain(1, stage_0="dtype: auto, devices: '0'"))
    again = plan(chain(1, stage_0="devices: '0', dtype: auto"))
    more = plan(chain(1, stage_0="dtype: auto, devices: '0,1', num_replicas: 2, name: x"))
    other = plan(chain(1, stage_0="dtype: half, devices: '0'"))
    digests = [pipeline.stages[0].config_sha256 for pipeline in (base, again, more, other)]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert base.source_sha256 != again.source_sha256
    text = chain(1)
    sources = {plan(text, name=n, engine=e).source_sha256 for n in ("a", "b") for e in ("", "sim")}
    assert len(sources) == 4
    assert plan(text).SerializeToString(deterministic=True) == plan(text).SerializeToString(deterministic=True)


def test_name_of_the_call_goes_before_that_of_the_file() -> None:
    assert plan("pipeline: mine\nstages: [{stage_id: 0}]", name="").name == "mine"
    assert plan("pipeline: mine\nstages: [{stage_id: 0}]", name="yours").name == "yours"


def test_keys_that_nothing_reads_yet_are_warned_about() -> None:
    found = result(chain(1, "session_mode: duplex\nduplex_session: {max_sessions: 4, idle_ttl_s: null}"))
    assert found.warnings == (
        "duplex_session (line 4): not used yet",
        "session_mode (line 3): not used yet: sessions take turns",
    )
    assert not result(chain(1, "session_mode: turn")).warnings
