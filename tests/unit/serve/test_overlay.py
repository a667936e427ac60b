"""What flags add to a deploy file: held against what the control plane makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from control_plane.deploy import plan_pipeline
from omni.v1 import pipeline_pb2
from omnicore.errors import InvalidRequestError
from omniplane.serve import overlay
from omniplane.serve.app import parse
from omniplane.serve.overlay import StageKeys

FILE = """
pipeline: three
engine: sim
async_chunk: false
stages:
  - {stage_id: 0, name: ar, max_num_seqs: 4}
  - {stage_id: 1, name: dit, quantization: int8}
  - {stage_id: 2, name: voc, tensor_parallel_size: 1}
edges: [{from: 0, to: 1}, {from: 1, to: 2}]
"""
HEAD = ("--deploy-config", "f", "-oma", "127.0.0.1", "-omp", "1", "--stage-id", "0")


def _planned(*argv: str, file: str = FILE) -> dict[int, pipeline_pb2.Stage]:
    config, flags = parse(argv)
    alone = plan_pipeline(file).pipeline
    single = overlay.stage_keys(config, flags)
    under, over = overlay.layers(alone, overlay.engine_keys(config), config.stage_id, single)
    text = overlay.text(file, overlay.top_keys(config), under, over)
    return {stage.stage_id: stage for stage in plan_pipeline(text).pipeline.stages}


def _args(stage: pipeline_pb2.Stage) -> dict[str, Any]:
    return dict(json_format.MessageToDict(stage.engine_args))


def test_without_flags_the_file_is_sent_as_it_is() -> None:
    assert overlay.text(FILE, {}, {}, {}) == FILE


def test_flags_of_a_plain_launch_go_before_the_file_in_every_stage() -> None:
    stages = _planned("--deploy-config", "f", "--quantization", "fp8", "--trust-remote-code", "--max-num-seqs", "2")
    assert [_args(stage)["quantization"] for stage in stages.values()] == ["fp8"] * 3
    assert [_args(stage)["trust_remote_code"] for stage in stages.values()] == [True] * 3
    assert [stage.max_num_seqs for stage in stages.values()] == [2] * 3


def test_flags_of_a_head_win_in_its_own_stage_and_are_defaults_elsewhere() -> None:
    stages = _planned(*HEAD, "--quantization", "fp8", "-tp", "2")
    assert [_args(stage)["quantization"] for stage in stages.values()] == ["fp8", "int8", "fp8"]
    assert [stage.tensor_parallel_size for stage in stages.values()] == [2, 2, 1]


def test_flags_of_single_stages_go_before_all_others() -> None:
    stages = _planned(
        *HEAD,
        *("--quantization", "fp8", "--stage-0-quantization", "awq", "--stage-1-quantization=null"),
        *("--stage-overrides", '{"2": {"max_num_seqs": 7}, "0": {"max_num_seqs": 9}}', "--stage-0-max-num-seqs", "3"),
        *("--stage-1-enforce-eager", "--stage-1-hf-overrides", '{"a": 1}'),
    )
    assert [_args(stage).get("quantization") for stage in stages.values()] == ["awq", None, "fp8"]
    assert [stage.max_num_seqs for stage in stages.values()] == [3, 0, 7]
    assert _args(stages[1])["enforce_eager"] is True
    assert _args(stages[1])["hf_overrides"] == {"a": 1}


def test_the_model_is_for_stages_that_name_none() -> None:
    file = FILE.replace("name: dit,", "name: dit, model: own,").replace(
        "engine: sim", "engine: sim\nmodel: of-the-file"
    )
    stages = _planned("given/model", "--deploy-config", "f", file=file)
    assert [stage.model for stage in stages.values()] == ["given/model", "own", "given/model"]


def test_a_size_that_the_file_has_in_its_parallel_config_is_changed_there() -> None:
    file = FILE.replace("name: ar,", "name: ar, parallel_config: {tensor_parallel_size: 4},")
    assert _planned(*HEAD, "-tp", "2", file=file)[0].tensor_parallel_size == 2
    assert _planned(*HEAD[:-1], "1", "-tp", "2", file=file)[0].tensor_parallel_size == 4


def test_async_chunk() -> None:
    config, _ = parse(("--deploy-config", "f", "--async-chunk"))
    text = overlay.text(FILE, overlay.top_keys(config), {}, {})
    assert plan_pipeline(text).pipeline.async_chunk is True


def test_stage_flags_are_taken_out_of_the_command_line() -> None:
    rest, flags = overlay.split_stage_flags(
        ["m", "--stage-id", "1", "--stage-0-a-b", "1.5", "--stage-12-c", "--stage-init-timeout", "3", "--stage-0-d=x y"]
    )
    assert rest == ["m", "--stage-id", "1", "--stage-init-timeout", "3"]
    assert flags == StageKeys({0: {"a_b": 1.5, "d": "x y"}, 12: {"c": True}})


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {}}', '{"0": 1}'])
def test_overrides_that_are_wrong_name_the_flag(text: str) -> None:
    config, flags = parse(("--deploy-config", "f", "--stage-overrides", text))
    with pytest.raises(InvalidRequestError, match=r"^--stage-overrides: "):
        overlay.stage_keys(config, flags)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("ByteDance-Seed/BAGEL-7B-MoT", "BAGEL-7B-MoT"),
        ("/models/my model/", "my-model"),
        ("plain", "plain"),
        ("_.x", "x"),
        ("", ""),
        ("///", ""),
    ],
)
def test_a_pipeline_is_named_after_its_model(model: str, name: str) -> None:
    assert overlay.pipeline_name(model) == name


def test_a_headless_flag_that_the_plan_does_not_have_is_told() -> None:
    stages = _planned(*HEAD, "--quantization", "fp8", "--max-num-seqs", "2", "-tp", "2")
    assert overlay.disagreements(stages[0], {"quantization": "fp8", "max_num_seqs": 2, "tensor_parallel_size": 2}) == []
    assert overlay.disagreements(stages[0], {"enforce_eager": False}) == []
    assert overlay.disagreements(stages[0], {"quantization": "awq", "dtype": "half"}) == [
        'quantization: "awq" here, "fp8" in the plan',
        'dtype: "half" here, not set in the plan',
    ]
