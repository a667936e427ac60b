"""Which stages a request needs."""

from __future__ import annotations

import pytest

from gateway.graph import PipelineGraph
from omni.v1 import pipeline_pb2
from tests.support.pipelines import speech_pipeline, text_pipeline


def ids(graph: PipelineGraph, task: str, *modalities: str) -> list[int]:
    return [step.stage_id for step in graph.plan(task, modalities).steps]


def test_text_needs_only_the_thinker() -> None:
    graph = PipelineGraph(speech_pipeline())
    plan = graph.plan("chat", ["text"])
    (step,) = plan.steps
    assert (step.stage_id, step.is_entry, step.emits, step.inputs, step.outputs) == (0, True, True, (), ())


def test_audio_needs_the_whole_path_and_says_who_emits() -> None:
    graph = PipelineGraph(speech_pipeline())
    assert ids(graph, "chat", "text", "audio") == [0, 1, 2]
    assert [step.emits for step in graph.plan("chat", ["text", "audio"]).steps] == [True, False, True]
    assert [step.emits for step in graph.plan("chat", ["audio"]).steps] == [False, False, True]


def test_a_task_enters_where_the_pipeline_says_and_ignores_what_is_above() -> None:
    graph = PipelineGraph(speech_pipeline())
    first, last = graph.plan("speech", ["audio"]).steps
    assert first.is_entry
    assert first.inputs == ()  # the thinker is not part of it
    assert [edge.from_stage for edge in last.inputs] == [1]


def test_modalities_are_those_the_task_can_reach() -> None:
    graph = PipelineGraph(speech_pipeline())
    assert graph.modalities() == ["text", "audio"]
    assert graph.modalities("speech") == ["audio"]
    with pytest.raises(ValueError, match="has no text"):
        graph.plan("speech", ["text"])


def test_fan_out_and_fan_in_come_in_order_of_their_edges() -> None:
    pipeline = pipeline_pb2.Pipeline(name="diamond", entrypoints={"chat": 7})
    for stage_id in (1, 3, 5, 7):
        pipeline.stages.add(stage_id=stage_id, final_output=stage_id == 1, final_output_type="image")
    for source, target in ((7, 5), (7, 3), (5, 1), (3, 1)):
        pipeline.edges.add(from_stage=source, to_stage=target)
    steps = PipelineGraph(pipeline).plan("chat", ["image"]).steps
    assert [step.stage_id for step in steps] == [7, 3, 5, 1]
    assert [edge.to_stage for edge in steps[0].outputs] == [3, 5]
    assert [edge.from_stage for edge in steps[3].inputs] == [3, 5]


def test_connector_names_become_kinds() -> None:
    plan = PipelineGraph(speech_pipeline()).plan("chat", ["audio"])
    assert plan.connector_kind(plan.steps[0].outputs[0]) == "shm"
    assert plan.connector_kind(pipeline_pb2.Edge()) == "auto"


def test_plans_are_made_once_per_kind_of_request() -> None:
    graph = PipelineGraph(text_pipeline())
    assert graph.plan("chat", ["text"]) is graph.plan("chat", ("text",))


def test_a_cycle_is_an_error_and_not_a_hang() -> None:
    pipeline = speech_pipeline()
    pipeline.edges.add(from_stage=2, to_stage=0)
    with pytest.raises(ValueError, match="cycle"):
        PipelineGraph(pipeline).plan("chat", ["audio"])
