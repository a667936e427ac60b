"""Platform sections, several documents, and old layouts."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from omni.v1 import pipeline_pb2
from tests.unit.deploy.helpers import chain, faults, plan, result

PLATFORMS = """
    stages:
      - stage_id: 0
        gpu_memory_utilization: 0.95
        devices: "0,1"
        tensor_parallel_size: 2
        enforce_eager: true
        default_sampling_params: {temperature: 0.5, max_tokens: 8192}
        parallel_config: {tensor_parallel_size: 2, enable_expert_parallel: true}
      - stage_id: 1
        devices: "2"
    platforms:
      npu:
        stages:
          - {stage_id: 0, gpu_memory_utilization: 0.8}
          - {stage_id: 1, gpu_memory_utilization: 0.65, devices: "3"}
      xpu:
        model_runner: v2
        stages:
          - stage_id: 0
            devices: "0,1,2,3,4,5,6,7"
            tensor_parallel_size: 8
            quantization: fp8
            enable_expert_parallel: true
            enforce_eager: null
            worker_cls: vllm_omni.platforms.xpu.worker.xpu_ar_worker.XPUARWorker
            default_sampling_params: {max_tokens: 2048}
            parallel_config: {tensor_parallel_size: 8}
    """


def args(stage: pipeline_pb2.Stage) -> dict[str, Any]:
    return json_format.MessageToDict(stage.engine_args)


def test_a_platform_section_changes_what_it_names_and_keeps_the_rest() -> None:
    base, npu = plan(PLATFORMS), plan(PLATFORMS, platform="npu")
    assert [args(stage).get("gpu_memory_utilization") for stage in base.stages] == [0.95, None]
    assert [args(stage).get("gpu_memory_utilization") for stage in npu.stages] == [0.8, 0.65]
    assert [list(stage.devices) for stage in npu.stages] == [["0", "1"], ["3"]]
    assert args(npu.stages[0])["enforce_eager"] is True


def test_mappings_are_merged_key_by_key_and_null_takes_a_key_away() -> None:
    stage = plan(PLATFORMS, platform="xpu").stages[0]
    params = stage.default_sampling_params
    assert (params.temperature, params.max_tokens, stage.tensor_parallel_size) == (0.5, 2048, 8)
    assert args(stage)["parallel_config"] == {"tensor_parallel_size": 8.0, "enable_expert_parallel": True}
    assert args(stage)["quantization"] == "fp8"
    assert args(stage)["model_runner"] == "v2"
    assert "enforce_eager" not in args(stage)


def test_a_platform_without_a_section_changes_nothing_and_says_so() -> None:
    found = result(PLATFORMS, platform="rocm")
    assert found.pipeline.stages == plan(PLATFORMS).stages
    assert "no section for platform 'rocm' (there is npu, xpu)" in found.warnings[0]
    assert not result(chain(1), platform="rocm").warnings


def test_an_unknown_platform_section_is_noted_and_usable() -> None:
    text = chain(1, "platforms: {nqu: {stages: [{stage_id: 0, dtype: half}]}}")
    assert "did you mean 'npu'?" in result(text).warnings[0]
    assert args(plan(text, platform="nqu").stages[0]) == {"dtype": "half"}


def test_faults_of_a_platform_stand_where_they_are_written() -> None:
    text = chain(1, "platforms: {npu: {stages: [{stage_id: 0, devices: '0,1', num_replicas: 3}]}}")
    assert not result(text).warnings
    assert "3 needed" in faults(text, platform="npu")["platforms.npu.stages[0].devices"]


def test_a_document_is_laid_over_the_one_before() -> None:
    base = "pipeline: base\nasync_chunk: false\ntrust_remote_code: true\n" + chain(
        2,
        "connectors: {shm: {name: shm, extra: {put_wait_s: 1}}}\n"
        "platforms: {npu: {stages: [{stage_id: 0, dtype: half}]}}",
        stage_0="devices: '0', default_sampling_params: {seed: 1, max_tokens: 5}",
        stage_1="input_connectors: {from_stage_0: shm}",
    )
    over = (
        "base_config: base.yaml\npipeline: over\nasync_chunk: true\n"
        "connectors: {shm: {extra: {checksum: true}}}\n"
        "stages: [{stage_id: 0, devices: '1', default_sampling_params: {seed: 2}}, {stage_id: 2, engine: sim}]\n"
        "platforms: {npu: {stages: [{stage_id: 0, enforce_eager: true}]}}\n"
    )
    pipeline = plan(base + "\n---\n" + over, name="", platform="npu")
    assert (pipeline.name, pipeline.async_chunk, len(pipeline.stages)) == ("over", True, 3)
    first = pipeline.stages[0]
    assert (list(first.devices), first.default_sampling_params.seed, first.default_sampling_params.max_tokens) == (
        ["1"], 2, 5,
    )  # fmt: skip
    assert args(first) == {"trust_remote_code": True, "dtype": "half", "enforce_eager": True}
    assert json_format.MessageToDict(pipeline.connectors[0].extra) == {"put_wait_s": 1.0, "checksum": True}


def test_faults_name_the_document() -> None:
    base = "stages:\n  - stage_id: 0\n    devices: '0'\n"
    over = "base_config: b.yaml\nstages:\n  - stage_id: 0\n    device: 1\n"
    assert faults(f"{base}---\n{over}") == {
        "stages[0].device": "document 2, line 4: unknown key 'device'; did you mean 'devices'?"
    }


def test_base_config_alone_explains_itself() -> None:
    found = faults("base_config: bagel.yaml\npipeline: bagel_think")
    assert found["base_config"] == (
        "line 1: the text of str 'bagel.yaml' is needed: put it before this document, with a line '---' between them, "
        "or copy its keys in here (the control plane opens no files)"
    )


def test_old_layout_is_flattened_with_a_warning() -> None:
    old = result(
        """
        stages:
          - stage_id: 0
            runtime:
              devices: "0,1"
              num_replicas: 2
            engine_args:
              max_num_seqs: 4
              dtype: half
              hf_overrides: {a: 1}
              model_stage: thinker
            hf_overrides: {b: 2}
        """
    )
    new = plan(
        """
        stages:
          - stage_id: 0
            devices: "0,1"
            num_replicas: 2
            max_num_seqs: 4
            dtype: half
            hf_overrides: {a: 1, b: 2}
            engine_args: {model_stage: thinker}
        """
    )
    assert old.pipeline.stages == new.stages
    assert old.warnings == (
        "stages[0].runtime (line 4): old layout; write these keys one level up: devices, num_replicas",
        "stages[0].engine_args (line 7): old layout; write these keys one level up: max_num_seqs, dtype, hf_overrides",
    )


def test_old_layout_in_a_base_and_the_new_one_over_it() -> None:
    base = "stages: [{stage_id: 0, engine_args: {dtype: half, x: 1}, runtime: {devices: '0'}}]"
    over = "stages: [{stage_id: 0, dtype: auto, devices: '1', engine_args: {x: 2}}]"
    stage = plan(f"{base}\n---\n{over}").stages[0]
    assert (args(stage), list(stage.devices)) == ({"dtype": "auto", "x": 2.0}, ["1"])


def test_an_aligner_alone_is_one_stage() -> None:
    found = result("forced_aligner: {model: org/aligner, runner: pooling, dtype: bfloat16}")
    (stage,) = found.pipeline.stages
    assert (stage.stage_id, stage.model) == (0, "org/aligner")
    assert args(stage) == {"runner": "pooling", "dtype": "bfloat16"}
    assert "the aligner alone is planned" in found.warnings[0]
    assert "'dtype'" in faults("forced_aligner: {dtyp: half}")["forced_aligner.dtyp"]
    beside = result(chain(1, "forced_aligner: {model: m}"))
    assert "stages are planned without it" in beside.warnings[0]
