from __future__ import annotations

import random

import pytest

from omni.v1 import pipeline_pb2
from omnicore.backoff import Backoff
from omnicore.clock import ManualClock
from omnicore.errors import InvalidRequestError
from omnicore.supervise.restart import RestartPolicy
from omnictl.local.plan import plan_workers
from tests.unit.omnictl.records import speech_pipeline


def _policy(clock: ManualClock) -> RestartPolicy:
    backoff = Backoff(initial_s=1, max_s=4, rng=random.Random(1))
    return RestartPolicy(clock, limit=4, window_s=60, backoff=backoff)


def test_restarts_slow_down_and_a_crash_loop_ends() -> None:
    policy = _policy(ManualClock())
    delays = [policy.after_end() for _ in range(4)]
    assert delays[3] is None
    assert [0.5 <= d / scale <= 1.5 for d, scale in zip(delays[:3], (1, 2, 4), strict=True) if d is not None] == [
        True,
        True,
        True,
    ]


def test_a_process_that_ran_long_starts_over() -> None:
    clock = ManualClock()
    policy = _policy(clock)
    for _ in range(50):
        delay = policy.after_end()
        assert delay is not None
        assert delay <= 1.5
        clock.advance(61)


def test_a_crash_loop_is_tried_ever_more_seldom_until_it_has_run_for_a_window() -> None:
    clock = ManualClock()
    policy = RestartPolicy(clock, limit=2, window_s=60, crash_loop_delay_s=100, crash_loop_max_s=300)
    ends: list[tuple[float | None, bool]] = []
    for _ in range(5):
        ends.append((policy.after_end(), policy.looping))
        clock.advance(ends[-1][0] or 0)
    assert ends[0][1] is False
    assert ends[1:] == [(100, True), (200, True), (300, True), (300, True)]
    clock.advance(61)
    policy.after_end()
    assert policy.looping is False


def _stage(devices: list[str], replicas: int) -> pipeline_pb2.Pipeline:
    stage = pipeline_pb2.Stage(stage_id=3, name="dit", devices=devices, num_replicas=replicas)
    return pipeline_pb2.Pipeline(name="p", stages=[stage])


@pytest.mark.parametrize(
    ("devices", "replicas", "shares"),
    [
        ([], 2, [(), ()]),
        (["0", "1"], 1, [("0", "1")]),
        (["0", "1"], 2, [("0",), ("1",)]),
        (["0", "1", "2", "3"], 2, [("0", "1"), ("2", "3")]),
        (["0"], 2, [("0",), ("0",)]),
        (["0", "1"], 4, [("0",), ("0",), ("1",), ("1",)]),
        (["0"], 0, []),
    ],
)
def test_devices_are_split_evenly(devices: list[str], replicas: int, shares: list[tuple[str, ...]]) -> None:
    assert [worker.devices for worker in plan_workers(_stage(devices, replicas))] == shares


def test_an_uneven_split_names_the_stage() -> None:
    with pytest.raises(InvalidRequestError, match=r"stages\[3\]\.devices: 3 devices .* among 2 replicas of 'dit'"):
        plan_workers(_stage(["0", "1", "2"], 2))


def test_workers_are_named_after_their_stage() -> None:
    assert [worker.name for worker in plan_workers(speech_pipeline())] == [
        "thinker-0",
        "talker-0",
        "talker-1",
        "code2wav-0",
    ]


def test_stages_of_one_name_are_told_apart_and_names_become_safe() -> None:
    plan = pipeline_pb2.Pipeline(
        name="p",
        stages=[
            pipeline_pb2.Stage(stage_id=0, name="a", num_replicas=1),
            pipeline_pb2.Stage(stage_id=1, name="a", num_replicas=1),
            pipeline_pb2.Stage(stage_id=2, name="../b c", num_replicas=1),
        ],
    )
    assert [worker.name for worker in plan_workers(plan)] == ["stage-0-0", "stage-1-0", ".._b_c-0"]
