"""Whole files: the examples, the reference page, files that users of vLLM-Omni have, and random ones."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.options import GrpcOptions, ShmOptions
from control_plane.deploy import plan_pipeline, reference
from control_plane.deploy.connector_tables import OPTIONS
from control_plane.deploy.schema import (
    ALL_STAGE_KEYS,
    EDGE_KEYS,
    PLATFORMS,
    SAMPLING_EXTRA_KEYS,
    SAMPLING_KEYS,
    SIM_KEYS,
    TOP_KEYS,
)
from omni.v1 import pipeline_pb2, sampling_pb2
from omnicore.errors import InvalidRequestError
from stage_worker.engines.sim_options import SimOptions, sim_options

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml")) + sorted(ROOT.glob("examples/deploy/*.yaml"))
PEERS_VARIABLE = "OMNIPLANE_PEER_DEPLOYS"
PEERS = Path(os.environ.get(PEERS_VARIABLE, ROOT.parent / "shared" / "peer-deploys"))

_SETTINGS = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("engine", ["", "sim"])
def test_examples_plan_without_a_warning(path: Path, engine: str) -> None:
    found = plan_pipeline(path.read_text(encoding="utf-8"), engine=engine)
    assert not found.warnings
    for stage in found.pipeline.stages:
        if stage.engine == "sim":
            sim_options(stage)  # the engine accepts what the plan says


def test_the_speech_example_is_what_the_demo_needs() -> None:
    pipeline = plan_pipeline((ROOT / "examples/speech.yaml").read_text(encoding="utf-8")).pipeline
    assert [(s.name, s.engine, s.num_replicas, s.final_output_type) for s in pipeline.stages] == [
        ("thinker", "vllm", 1, "text"),
        ("talker", "hibari-acoustic", 2, ""),
        ("code2wav", "hibari-vocoder", 1, "audio"),
    ]
    assert [(e.from_stage, e.to_stage, e.connector, e.window_size, e.chunk_by) for e in pipeline.edges] == [
        (0, 1, "shm", 4, pipeline_pb2.CHUNK_BY_SENTENCE),
        (1, 2, "shm", 4, pipeline_pb2.CHUNK_BY_STEP),
    ]
    assert dict(pipeline.entrypoints) == {"chat": 0, "speech": 1}
    assert pipeline.async_chunk


def test_the_reference_page_is_what_the_schema_says() -> None:
    page = (ROOT / "docs/deploy-yaml.md").read_text(encoding="utf-8")
    assert page == reference.put_into(page), "run: python -m control_plane.deploy.reference docs/deploy-yaml.md"


def test_the_schema_agrees_with_those_who_read_the_plan() -> None:
    only_in_requests = {"extra", "logprobs", "structured_output"}
    assert set(SIM_KEYS) == {field.name for field in dataclasses.fields(SimOptions)}
    assert set(SAMPLING_KEYS) == set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - only_in_requests
    for kind, options in (("shm", ShmOptions), ("grpc", GrpcOptions)):
        assert {field.name for field in dataclasses.fields(options)} <= set(OPTIONS[kind])


# Files that users of vLLM-Omni have


def peer_files() -> list[Path]:
    return sorted(PEERS.glob("*.yaml")) if PEERS.is_dir() else []


def with_bases(path: Path) -> str:
    """The file's text, after that of the file it is laid over."""
    text = path.read_text(encoding="utf-8")
    base = yaml.safe_load(text).get("base_config")
    return f"{with_bases(path.parent / base)}\n---\n{text}" if base else text


@pytest.mark.skipif(not peer_files(), reason=f"no vLLM-Omni deploy files at {PEERS}; set {PEERS_VARIABLE}")
@pytest.mark.parametrize("path", peer_files(), ids=lambda path: path.stem)
def test_files_of_vllm_omni_load(path: Path) -> None:
    text = with_bases(path)
    for platform in ("", *PLATFORMS):
        for engine in ("", "sim"):
            found = plan_pipeline(text, name=path.stem, platform=platform, engine=engine)
            stages = found.pipeline.stages
            assert any(stage.final_output for stage in stages)
            assert [(edge.from_stage, edge.to_stage) for edge in found.pipeline.edges] == [
                (a.stage_id, b.stage_id) for a, b in itertools.pairwise(stages)
            ]
            for stage in stages if engine else ():
                sim_options(stage)


@pytest.mark.skipif(not peer_files(), reason=f"no vLLM-Omni deploy files at {PEERS}; set {PEERS_VARIABLE}")
def test_files_with_a_base_explain_themselves_when_it_is_missing() -> None:
    for path in peer_files():
        text = path.read_text(encoding="utf-8")
        if "base_config" in yaml.safe_load(text):
            with pytest.raises(InvalidRequestError) as caught:
                plan_pipeline(text, name=path.stem)
            assert "base_config" in [violation.field for violation in caught.value.violations]


# Random files: a plan or an InvalidRequestError, never anything else

_KEYS = st.sampled_from(
    [
        *TOP_KEYS,
        *ALL_STAGE_KEYS,
        *EDGE_KEYS,
        *SIM_KEYS,
        *SAMPLING_KEYS,
        *SAMPLING_EXTRA_KEYS,
        "from_stage_0",
        "to_stage_1",
    ]
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["shm", "text", "audio", "0,1", "auto", "SharedMemoryConnector", "vllm", "sim", "npu"]),
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(_KEYS, st.text(max_size=6)), inner, max_size=5)
    ),
    max_leaves=25,
)


def outcome(text: str, **arguments: str) -> None:
    refused: InvalidRequestError | None
    try:
        found = plan_pipeline(text, **arguments)
    except InvalidRequestError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.reason == "INVALID_DEPLOY"
        assert refused.violations
        assert len(refused.to_status().SerializeToString()) < 6000
    else:
        pipeline = found.pipeline
        assert pipeline_pb2.Pipeline.FromString(pipeline.SerializeToString()) == pipeline
        ids = [stage.stage_id for stage in pipeline.stages]
        assert ids == sorted(set(ids))
        assert all(edge.from_stage in ids and edge.to_stage in ids for edge in pipeline.edges)
        assert set(pipeline.entrypoints.values()) <= set(ids)
        known = {connector.name for connector in pipeline.connectors} | {""}
        assert {edge.connector for edge in pipeline.edges} <= known


@_SETTINGS
@given(st.text(alphabet=st.characters(), max_size=200))
def test_random_text(text: str) -> None:
    outcome(text, name="p")


@_SETTINGS
@given(st.text(alphabet="ab:-&*[]{}<>,!?|#'\" \n\t0", max_size=120))
def test_text_of_yaml_punctuation(text: str) -> None:
    outcome(text, name="p")


@_SETTINGS
@given(st.dictionaries(st.one_of(_KEYS, st.text(max_size=6)), _TREES, max_size=6))
def test_random_trees(tree: dict[str, Any]) -> None:
    outcome(yaml.safe_dump(tree, allow_unicode=True), name="p", platform="npu")


@_SETTINGS
@given(
    st.lists(
        st.dictionaries(st.sampled_from([*ALL_STAGE_KEYS]), _TREES, max_size=5).map(lambda keys: {**keys}), max_size=4
    ),
    st.fixed_dictionaries({}, optional=dict.fromkeys(("edges", "connectors", "entrypoints", "platforms"), _TREES)),
    st.sampled_from(["", "sim"]),
)
def test_stages_with_random_values(stages: list[dict[str, Any]], rest: dict[str, Any], engine: str) -> None:
    numbered = [{**stage, "stage_id": number} for number, stage in enumerate(stages)]
    outcome(yaml.safe_dump({**rest, "stages": numbered}), name="p", engine=engine)


@_SETTINGS
@given(st.sampled_from(EXAMPLES), st.data())
def test_examples_with_a_piece_replaced(path: Path, data: st.DataObject) -> None:
    text = path.read_text(encoding="utf-8")
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(len(text), begin + 20)))
    outcome(text[:begin] + data.draw(st.text(max_size=6)) + text[end:], name="p")
