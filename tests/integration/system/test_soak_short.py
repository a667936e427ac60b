"""The soak of the data plane, seconds of it: every byte right, nothing left, whoever was killed."""

from __future__ import annotations

import pytest

from bench.soak import Plan, soak


@pytest.mark.timeout(180)  # five processes of ours start one after the other
async def test_transfers_survive_kills_aborts_and_expiry() -> None:
    plan = Plan(small=600, large=6, large_bytes=1 << 20, kills=2, ttl_s=0.5)
    outcome = await soak(plan)
    assert outcome.complaints == []
    figures = outcome.figures
    assert figures["kills"] == plan.kills
    assert figures["failures"] == 0
    for name, wanted in (("small", plan.small), ("large", plan.large)):
        assert int(figures[name]) >= wanted, name
