"""Admission: limits, order, and no place ever lost."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission import Admission
from omnicore import errors


async def test_runs_up_to_the_limit_then_queues_in_order() -> None:
    admission = Admission(max_inflight=1, max_queued=2, queue_timeout_s=30)
    await admission.enter()
    order: list[str] = []

    async def wait(name: str) -> None:
        await admission.enter()
        order.append(name)

    first = asyncio.create_task(wait("first"))
    second = asyncio.create_task(wait("second"))
    while admission.queued < 2:
        await asyncio.sleep(0)
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await admission.enter()
    assert refused.value.retry_after_s == 1.0
    admission.leave()
    await first
    admission.leave()
    await second
    admission.leave()
    assert order == ["first", "second"]
    assert admission.inflight == admission.queued == 0
    assert admission.rejected == {"queue_full": 1}


async def test_a_long_wait_ends() -> None:
    admission = Admission(max_inflight=1, max_queued=1, queue_timeout_s=0.01)
    await admission.enter()
    with pytest.raises(errors.ResourceExhaustedError):
        await admission.enter()
    assert admission.queued == 0
    admission.leave()
    assert admission.inflight == 0


async def test_a_cancelled_wait_passes_its_place_on() -> None:
    admission = Admission(max_inflight=1, max_queued=5, queue_timeout_s=30)
    await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    while not admission.queued:
        await asyncio.sleep(0)
    admission.leave()  # gives the place to `waiting`, which is cancelled before it runs
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert admission.inflight == 0


async def test_nothing_enters_while_draining() -> None:
    admission = Admission(1, 1, 1)
    admission.draining = True
    with pytest.raises(errors.UnavailableError) as refused:
        await admission.enter()
    assert refused.value.reason == "GATEWAY_DRAINING"
