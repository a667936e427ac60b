"""KV caches between stages of different tensor-parallel sizes, over real workers; their ranks agree through one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc.aio
import numpy as np
import pytest

from connectors import dtypes
from connectors.held import edge_key
from connectors.payload import Payload
from connectors.tensor_parallel import KvLayout, merge_heads, plan_ranks, rank_key
from omni.v1 import transfer_pb2, transfer_service_pb2_grpc
from omni.v1 import transfer_service_pb2 as pb
from omnicore import rpc
from stage_worker.worker import Worker
from tests.integration.stage_worker.cluster import assert_empty, local_worker, pipeline

# All workers of a test share its process: on a busy machine they take many times as long.
pytestmark = pytest.mark.timeout(240)

TOKENS, HEADS, HEAD_DIM = 40, 8, 128
EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)


def layout(tp_size: int) -> KvLayout:
    return KvLayout(tp_size, kv_heads=HEADS, head_dim=HEAD_DIM, layers=2, dtype="bfloat16", block_size=16)


def cache(layer: int) -> np.ndarray[Any, Any]:
    """Keys and values of one layer over all heads: [2, tokens, heads, head_dim], bfloat16."""
    values = np.random.default_rng(layer).integers(0, 2**16, (2, TOKENS, HEADS, HEAD_DIM), dtype=np.uint16)
    return dtypes.mark(values, "bfloat16")


@pytest.mark.parametrize(("producers", "consumers"), [(4, 2), (4, 1), (2, 4), (16, 16)])
async def test_ranks_of_any_two_sizes_hand_over_their_caches(producers: int, consumers: int) -> None:
    """One worker for each producer rank, and one that reads for the consumer ranks in turn."""
    plan = plan_ranks(layout(producers), layout(consumers))
    stages = pipeline()
    async with contextlib.AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(local_worker(stages, 0, pool_bytes=1 << 20)) for _ in range(producers)
        ]
        reader = await stack.enter_async_context(local_worker(stages, 1, pool_bytes=0))
        handles: dict[int, transfer_pb2.TransferHandle] = {}
        for rank, worker in enumerate(workers):
            first = plan.producer.first_head(rank)
            mine = {f"layer{n}": cache(n)[:, :, first : first + plan.producer.heads_per_rank] for n in range(2)}
            if plan.readers(rank):
                key = rank_key(edge_key(EDGE, 0), rank)
                put = worker.parts.connectors.put
                handles[rank] = await put("auto", key, EDGE, 0, Payload(mine), plan.readers(rank))
        for rank in range(consumers):
            await _check_rank(rank, plan, handles, reader)
        await assert_empty([*workers, reader])


async def _check_rank(rank: int, plan: Any, handles: dict[int, transfer_pb2.TransferHandle], reader: Worker) -> None:
    first, count = plan.consumer.first_head(rank), plan.consumer.heads_per_rank
    async with contextlib.AsyncExitStack() as reading:
        got = {
            source: await reading.enter_async_context(reader.parts.connectors.get(handles[source]))
            for source in plan.producers_of(rank)
        }
        for layer in range(2):
            parts = {source: payload.tensors[f"layer{layer}"] for source, payload in got.items()}
            merged = merge_heads(plan, rank, parts, axis=2)
            assert dtypes.dtype_name(merged.dtype) == "bfloat16"
            np.testing.assert_array_equal(merged, cache(layer)[:, :, first : first + count])
    for source in plan.producers_of(rank):
        reader.parts.releaser.release(handles[source])


async def agree(worker: Worker, rank: int, failure: str = "", ranks: int = 4, timeout_s: int = 60) -> pb.AgreeResponse:
    """The vote of one rank, over its own connection."""
    async with rpc.channel(worker.identity.endpoint) as channel:
        request = pb.AgreeRequest(
            owner=worker.identity.current, topic="req1/0/0-1/0", rank=rank, ranks=ranks, failure=failure
        )
        request.timeout.FromSeconds(timeout_s)
        return await transfer_service_pb2_grpc.TransferServiceStub(channel).Agree(request)


async def test_ranks_agree_that_all_have_it() -> None:
    async with local_worker(pipeline(), 1) as worker:
        assert await asyncio.gather(*(agree(worker, rank) for rank in range(4))) == [pb.AgreeResponse(good=True)] * 4


async def test_bug_60_four_ranks_give_one_verdict_when_one_of_them_has_nothing() -> None:
    bad = pb.AgreeResponse(good=False, reason="rank 2: missing chunk 3")
    async with local_worker(pipeline(), 1) as worker:
        votes = [agree(worker, rank, "missing chunk 3" if rank == 2 else "") for rank in range(4)]
        assert await asyncio.gather(*votes) == [bad] * 4
        assert await agree(worker, 3) == bad, "who asks again is told the same"


async def test_bug_60_a_rank_that_never_votes_fails_the_others_at_their_deadline() -> None:
    async with local_worker(pipeline(), 1) as worker:
        votes = await asyncio.gather(*(agree(worker, rank, timeout_s=1) for rank in (0, 1, 3)))
        assert votes == [pb.AgreeResponse(good=False, reason="no vote of ranks [2] in time")] * 3


async def test_votes_are_checked() -> None:
    async with local_worker(pipeline(), 1) as worker:
        with pytest.raises(grpc.aio.AioRpcError, match="rank: must be 0 to 3, got 4") as caught:
            await agree(worker, 4)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_ranks_that_wait_are_told_when_the_worker_stops() -> None:
    async with contextlib.AsyncExitStack() as stack:
        worker = await stack.enter_async_context(local_worker(pipeline(), 1))
        vote = asyncio.create_task(agree(worker, 0))
        while not len(worker.agreement):
            await asyncio.sleep(0.01)
        await stack.aclose()
        assert await vote == pb.AgreeResponse(good=False, reason="the worker that counts votes stops")
