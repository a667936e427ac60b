"""What a session tells its replica: all of it, once, in few frames that any reader of the proto understands."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.unsent import Unsent
from omni.v1 import prompt_pb2, stage_service_pb2

_SIZES = st.one_of(st.integers(0, 200), st.sampled_from([127, 128, 16_383, 16_384, 600_000, 1_100_000]))


def _call(call_id: int, size: int) -> stage_service_pb2.StageCall:
    return stage_service_pb2.StageCall(call_id=call_id, prompt=prompt_pb2.Prompt(text="x" * size))


@given(
    sizes=st.lists(_SIZES, max_size=6),
    aborts=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    lazy=st.lists(st.integers(0, 300), max_size=3),
    sources=st.integers(0, 2),
    drain=st.booleans(),
)
def test_frames_say_what_was_put_in(
    sizes: list[int], aborts: list[int], lazy: list[int], sources: int, drain: bool
) -> None:
    unsent = Unsent()
    calls = [_call(number, size) for number, size in enumerate(sizes)]
    for call in calls:
        unsent.begin(call)
    unsent.aborts += aborts
    unsent.lazy_aborts += lazy
    unsent.sources += [stage_service_pb2.NewSource(call_id=number) for number in range(sources)]
    unsent.drain_heard = drain
    frames = [stage_service_pb2.SessionRequest.FromString(frame) for frame in unsent.frames()]
    assert [call for frame in frames for call in frame.calls] == calls
    assert [call_id for frame in frames for call_id in frame.aborts] == aborts + lazy
    assert sum(len(frame.sources) for frame in frames) == sources
    assert [frame.drain_heard for frame in frames] == [False] * (len(frames) - drain) + [True] * drain
    assert all(len(frame.calls) < 2 or frame.ByteSize() < 1_100_000 for frame in frames)
    assert list(unsent.frames()) == []


def test_small_calls_and_aborts_share_a_frame_and_what_is_taken_back_never_leaves() -> None:
    unsent = Unsent()
    for number in range(50):
        unsent.begin(_call(number, 10))
    unsent.aborts.append(7)
    assert unsent.take_back(3)
    assert not unsent.take_back(3)
    (frame,) = map(stage_service_pb2.SessionRequest.FromString, unsent.frames())
    assert [call.call_id for call in frame.calls] == [number for number in range(50) if number != 3]
    assert not unsent.take_back(4), "it has left"


def test_what_can_wait_leaves_with_the_next_frame_or_when_it_is_hurried() -> None:
    unsent = Unsent()
    assert not unsent.hurry()
    unsent.lazy_aborts.append(1)
    assert unsent.hurry()
    assert unsent.aborts == [1]
    unsent.begin(_call(1, 1))
    unsent.clear()
    assert list(unsent.frames()) == []
