"""What a stage is asked, and how a pick scales."""

from __future__ import annotations

import time

from gateway.graph import PipelineGraph, StageStep
from gateway.stage_calls import merge_sampling
from omni.v1 import sampling_pb2
from tests.support.pipelines import speech_pipeline
from tests.unit.gateway.test_stage_pool import picked, pool_of, view

DEFAULTS = sampling_pb2.SamplingParams(
    temperature=0.4, max_tokens=64, seed=52, num_inference_steps=50, guidance_scale=5, stop=["END"]
)


def steps() -> tuple[StageStep, StageStep]:
    """Entry stage and last stage of the speech pipeline, with the same defaults."""
    pipeline = speech_pipeline()
    for stage in pipeline.stages:
        stage.default_sampling_params.CopyFrom(DEFAULTS)
    first, *_, last = PipelineGraph(pipeline).plan("chat", ["audio"]).steps
    return first, last


def test_defaults_hold_where_the_request_says_nothing_and_its_values_win() -> None:
    for step in steps():
        assert merge_sampling(step, sampling_pb2.SamplingParams()) == DEFAULTS
    entry, _ = steps()
    asked = sampling_pb2.SamplingParams(temperature=0, max_tokens=5, stop=["x"])
    merged = merge_sampling(entry, asked)
    assert (merged.temperature, merged.max_tokens, list(merged.stop), merged.seed) == (0, 5, ["x"], 52)


def test_later_stages_keep_their_limits_but_take_seed_and_diffusion_steps() -> None:
    _, last = steps()
    asked = sampling_pb2.SamplingParams(
        temperature=0, max_tokens=5, seed=1, num_inference_steps=8, guidance_scale=0, stop=["x"]
    )
    merged = merge_sampling(last, asked)
    assert (merged.seed, merged.num_inference_steps, merged.guidance_scale) == (1, 8, 0)
    assert (round(merged.temperature, 3), merged.max_tokens, list(merged.stop)) == (0.4, 64, ["END"])


def test_a_hundred_companions_go_where_their_parents_are() -> None:
    pool = pool_of(*(view(n) for n in range(4)), policy="random")
    for number in range(100):
        replica, _ = picked(pool, f"r{number}")
        for role in ("text", "img"):
            assert picked(pool, f"r{number}__cfg_{role}", affinity_from=f"r{number}") == (replica, "affinity")


def test_a_pick_takes_well_under_a_millisecond() -> None:
    pool = pool_of(*(view(n) for n in range(16)), policy="power-of-two")
    begin = time.process_time()
    for number in range(2000):
        pool.try_pick(f"r{number}")
    assert (time.process_time() - begin) / 2000 < 0.001
