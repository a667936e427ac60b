"""What operators change while gateways serve: the balancing policy of a stage, at every gateway, for good."""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.stage_pool import StagePool
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from tests.bugs.harness import TEXT, start_gateway, system
from tests.support.processes import wait_until

STAGE = types_pb2.StageRef(pipeline="text", stage_id=0)
CALM_S = 3.0
"""Between beats: a busy machine makes nobody suspect, whom others would then be preferred to."""


def pool_of(gateway: Gateway) -> StagePool | None:
    return gateway.router.pools.get(("text", 0))


async def uses(gateway: Gateway, policy: str) -> None:
    def it_does() -> bool:
        pool = pool_of(gateway)
        return pool is not None and pool.policy == policy

    await wait_until(it_does, what=f"policy {policy}")


async def test_a_policy_reaches_every_gateway_and_outlives_all_services() -> None:
    async with system(heartbeat_interval_s=CALM_S, balancing_policy="least-queue-length") as made:
        await made.apply(TEXT)
        for _ in range(2):
            await made.worker()
        await made.routable(2)
        second, _ = await start_gateway(made.stack, made.client.address)
        await uses(made.gateway, "least-queue-length")
        await uses(second, GatewayConfig(control_plane=("127.0.0.1:1",)).balancing_policy)

        await made.client.admin.SetBalancingPolicy(pb.SetBalancingPolicyRequest(stage=STAGE, policy="round-robin"))
        for gateway in (made.gateway, second):
            await uses(gateway, "round-robin")
        for _ in range(6):
            status, _ = await made.chat()
            assert status == 200
        pool = pool_of(made.gateway)
        assert pool is not None
        assert Counter(slot.calls for slot in pool.slots.values()) == {3: 2}, "turns are taken"

        # Nobody who knew of it is left: another control plane over the same etcd, another gateway.
        await made.plane.stop()
        plane, client = await made.cluster.control_plane()
        third, _ = await start_gateway(made.stack, client.address)
        await uses(third, "round-robin")
        status_now = await client.admin.GetClusterStatus(pb.GetClusterStatusRequest())
        assert [stage.balancing_policy for stage in status_now.stages] == ["round-robin"]

        await client.admin.SetBalancingPolicy(pb.SetBalancingPolicyRequest(stage=STAGE))
        await uses(third, "power-of-two")
        assert plane.table.loaded


async def test_requests_that_run_are_not_touched_by_a_change() -> None:
    async with system(heartbeat_interval_s=CALM_S) as made:
        await made.apply(TEXT.replace("tokens: 4", "tokens: 40, tpot_ms: 20"))
        for _ in range(2):
            await made.worker()
        await made.routable(2)
        running = asyncio.create_task(made.chat())
        pool = pool_of(made.gateway)
        assert pool is not None
        await wait_until(lambda: pool.bound_requests == 1, what="running")
        for policy in ("random", "round-robin", "least-queue-length"):
            await made.client.admin.SetBalancingPolicy(pb.SetBalancingPolicyRequest(stage=STAGE, policy=policy))
            await uses(made.gateway, policy)
        status, body = await running
        assert status == 200
        assert body["usage"]["completion_tokens"] == 40
