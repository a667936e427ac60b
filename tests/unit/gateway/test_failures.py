"""Pure pieces of failure handling: what may be mended, who is to blame, how long silence lasts, what retries cost."""

from __future__ import annotations

import pytest

from gateway import failures
from gateway.retry_budget import RetryBudget
from gateway.silence import Silence
from omnicore import errors


@pytest.mark.parametrize(
    ("error", "mendable", "budgeted"),
    [
        (errors.UnavailableError("x", reason="REPLICA_LOST"), True, False),
        (errors.UnavailableError("x", reason="REPLICA_HUNG"), True, False),
        (errors.UnavailableError("x", reason="DRAINING"), True, False),
        (errors.UnavailableError("x", reason="ENGINE_BUSY"), True, True),
        (errors.ResourceExhaustedError("x", reason="POOL_FULL"), True, True),
        (errors.DataLossError("x", reason="RETENTION_LOST"), True, False),
        (errors.DataLossError("x", reason="CHUNK_MISSING"), False, True),
        (errors.FailedPreconditionError("x", reason="STALE_EPOCH"), True, False),
        (errors.FailedPreconditionError("x"), False, True),
        (errors.DeadlineExceededError("x", reason="CHUNK_TIMEOUT"), True, True),
        (errors.DeadlineExceededError("x"), False, True),
        (errors.UnimplementedError("x", reason="RESUME_UNSUPPORTED"), True, False),
        (errors.UnimplementedError("x"), False, True),
        (errors.RequestCancelledError("x", reason="SESSION_BROKEN"), True, False),
        (errors.RequestCancelledError("x", reason="ABORTED"), False, True),
        (errors.InternalError("x"), False, True),
        (errors.InvalidRequestError("x"), False, True),
    ],
)
def test_what_may_be_mended(error: errors.OmniError, mendable: bool, budgeted: bool) -> None:
    assert failures.may_be_mended(error) is mendable
    assert failures.needs_budget(error) is budgeted


def test_a_silent_edge_blames_its_producer() -> None:
    error = errors.DeadlineExceededError("x", reason="CHUNK_TIMEOUT", metadata={"stage": 2, "peer_stage": 1})
    assert failures.blamed_stage(error) == 1
    assert failures.lost_producer(error) == 1
    own = errors.UnavailableError("x", reason="ENGINE_BUSY", metadata={"stage": 2})
    assert failures.blamed_stage(own) == 2
    assert failures.lost_producer(own) is None


def test_a_stage_that_answers_everything_with_errors_does_not_multiply_load() -> None:
    budget, retries = RetryBudget(), 0
    for _ in range(1000):
        budget.request_begun()
        retries += budget.take()
    assert 200 <= retries <= 220
    assert budget.refused == 1000 - retries


def stands(silence: Silence) -> tuple[bool, bool]:
    return silence.suspicious, silence.too_long


def test_silence_counts_while_frames_are_owed() -> None:
    silence, frames = Silence(1.5, 3.0), 1
    for _ in range(10):
        silence.tick(0.25, frames, owed=True)  # the first finds the call that has just begun
    assert stands(silence) == (True, False)
    for _ in range(3):
        silence.tick(0.25, frames, owed=True)
    assert stands(silence) == (True, True)
    silence.tick(0.25, frames + 1, owed=True)
    assert stands(silence) == (False, False)
    for _ in range(100):
        silence.tick(0.25, frames + 1, owed=False)
    assert stands(silence) == (False, False)


def test_time_in_which_this_process_did_not_run_is_not_held_against_the_other() -> None:
    silence = Silence(1.5, 3.0)
    silence.tick(0.25, 1, owed=True)
    silence.tick(60.0, 1, owed=True)
    assert not silence.suspicious


def test_never_hung() -> None:
    silence = Silence(1.5, 0.0)
    for _ in range(100):
        silence.tick(0.25, 0, owed=True)
    assert not silence.suspicious
    assert not silence.too_long
