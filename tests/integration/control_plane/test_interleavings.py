"""What two tries of one request do to each other, at whichever point the one comes between two steps of the other.

Not by luck: the control plane under test has a connection to etcd that lets the other try happen, all of it, before its
first call to etcd, then, from the start, before its second one, and so on until there is no such call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from control_plane import codec
from control_plane.etcd import Compare, EtcdClient, KeyValue, Lease, Op, TxnResult, WriteOutcomeUnknown
from omni.v1 import admin_service_pb2 as pb
from omni.v1 import pipeline_service_pb2 as pipeline_pb
from omni.v1 import registry_service_pb2 as registry_pb
from omni.v1 import types_pb2
from tests.integration.control_plane.harness import Client, Cluster, Worker, cluster, until, watching
from tests.integration.control_plane.test_admin import refusal

# A busy machine takes several times as long as a free one.
pytestmark = pytest.mark.timeout(180)

STAGE = types_pb2.StageRef(pipeline="demo", stage_id=1)
# More calls to etcd than any verb makes.
MOST_CALLS = 12

Act = Callable[[], Awaitable[object]]


class Interrupted(EtcdClient):
    """A connection that lets something else happen before one of its calls, or loses the answer to a write."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        super().__init__(endpoints, timeout_s=10.0)
        self._before: tuple[int, Act] | None = None
        self._lose = False

    def interrupt(self, call: int, act: Act) -> None:
        """Let ``act`` happen before the call to etcd after ``call`` others."""
        self._before = call, act

    def lose_next_answer(self) -> None:
        """Let the next write that takes effect end as one whose answer was lost."""
        self._lose = True

    @property
    def interrupted(self) -> bool:
        """Whether that has happened."""
        return self._before is None

    async def _step(self) -> None:
        if self._before is None:
            return
        left, act = self._before
        self._before = (left - 1, act) if left else None
        if not left:
            await act()

    async def get(self, key: str) -> KeyValue | None:
        await self._step()
        return await super().get(key)

    async def grant_lease(self, ttl_s: int, lease_id: int = 0) -> Lease:
        await self._step()
        return await super().grant_lease(ttl_s, lease_id)

    async def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        await self._step()
        result = await super().txn(compare, success, failure)
        if self._lose and result.succeeded and any(not op.HasField("request_range") for op in success):
            self._lose = False
            raise WriteOutcomeUnknown("the answer was lost")
        return result


async def interrupted_plane(c: Cluster) -> tuple[Interrupted, Client]:
    etcd_client = Interrupted([c.etcd.endpoint])
    _, client = await c.control_plane(etcd_client=etcd_client)
    return etcd_client, client


async def leave(client: Client, worker: Worker) -> None:
    request = registry_pb.DeregisterRequest(replica=worker.claim.replica, lease_id=worker.claim.lease_id)
    await client.registry.Deregister(request)


async def succeeded_by_another(client: Client, worker: Worker) -> None:
    """Another instance holds the id."""
    await leave(client, worker)
    successor = Worker(await client.apply())
    await successor.register(client)
    assert successor.replica_id == worker.replica_id


async def delete(client: Client) -> None:
    await client.pipelines.DeletePipeline(pipeline_pb.DeletePipelineRequest(name="demo"))


class Case:
    """A verb with a request id, and what makes its subject gone or another one after its first try."""

    def __init__(self, verb: str, after: str) -> None:
        self.verb, self.after = verb, after

    def request(self, worker: Worker, request_id: str) -> Message:
        replica = worker.claim.replica
        match self.verb:
            case "CordonReplica":
                return pb.CordonReplicaRequest(replica=replica, request_id=request_id)
            case "UncordonReplica":
                return pb.UncordonReplicaRequest(replica=replica, request_id=request_id)
            case "DrainReplica":
                return pb.DrainReplicaRequest(replica=replica, request_id=request_id)
            case "EvictReplica":
                return pb.EvictReplicaRequest(replica=replica, request_id=request_id)
            case "SetBalancingPolicy":
                return pb.SetBalancingPolicyRequest(stage=STAGE, policy="random", request_id=request_id)
            case _:
                return pipeline_pb.DeletePipelineRequest(name="demo", request_id=request_id)

    def ask(self, client: Client, request: Message) -> Awaitable[Any]:
        stub = client.pipelines if self.verb == "DeletePipeline" else client.admin
        answer: Awaitable[Any] = getattr(stub, self.verb)(request)
        return answer

    async def change(self, client: Client, worker: Worker) -> None:
        match self.after:
            case "it leaves":
                await leave(client, worker)
            case "another one":
                await succeeded_by_another(client, worker)
            case "the pipeline is deleted":
                await delete(client)


CASES = [
    Case("EvictReplica", ""),
    *(
        Case(verb, after)
        for verb in ("CordonReplica", "UncordonReplica", "DrainReplica")
        for after in ("it leaves", "another one")
    ),
    Case("SetBalancingPolicy", "the pipeline is deleted"),
    Case("DeletePipeline", ""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.verb}, {case.after or 'gone with it'}")
async def test_a_repeat_gets_the_first_answer_wherever_the_first_try_comes_between(case: Case) -> None:
    async with cluster() as c:
        client = await c.start()
        etcd_client, tested = await interrupted_plane(c)
        for call in range(MOST_CALLS):
            worker = Worker(await client.apply())
            await worker.register(client)
            request = case.request(worker, f"r{call}")
            answers: list[Message] = []

            async def first_try(worker: Worker = worker, request: Message = request, into: Any = answers) -> None:
                into.append(await case.ask(client, request))
                await case.change(client, worker)

            etcd_client.interrupt(call, first_try)
            answers.append(await case.ask(tested, request))
            if not etcd_client.interrupted:
                assert call >= 2, "the verb reads, and writes"
                return
            assert len(answers) == 2
            # Either try may be the one that did it; the other one says what it said.
            assert answers[0] == answers[1], f"before call {call}"
            # A clean slate: no replica of this round is left.
            for replica in (await client.replicas()).values():
                await client.registry.Deregister(registry_pb.DeregisterRequest(replica=replica.ref))
        raise AssertionError(f"more than {MOST_CALLS} calls to etcd")


async def test_a_registration_whose_answer_was_lost_is_one_claim() -> None:
    async with cluster() as c:
        client = await c.start()
        etcd_client, tested = await interrupted_plane(c)
        worker = Worker(await client.apply())
        async with watching(client) as watcher:
            etcd_client.lose_next_answer()
            claim = await worker.register(tested)
            await c.caught_up()
            last = Worker(await client.apply())
            await last.register(client)
            await until(lambda: watcher.ids() == {0, 1}, "both")
        epochs = [replica.ref.epoch for frame in watcher.frames for replica in frame.changed]
        assert epochs == [claim.replica.epoch, last.claim.replica.epoch], "and no other one before"
        assert (await client.replicas())[0].ref == claim.replica


@pytest.mark.parametrize("request_id", ["e1", ""])
async def test_an_eviction_whose_answer_was_lost_is_no_missing_replica(request_id: str) -> None:
    async with cluster() as c:
        client = await c.start()
        etcd_client, tested = await interrupted_plane(c)
        worker = Worker(await client.apply())
        await worker.register(client)
        etcd_client.lose_next_answer()
        request = pb.EvictReplicaRequest(replica=worker.claim.replica, request_id=request_id)
        evicted = await tested.admin.EvictReplica(request)
        assert await c.etcd_client.get("/omni/v1/default/replicas/demo/1/0") is None
        note = await c.etcd_client.get(f"/omni/v1/default/admin/evictions/{worker.request.instance_uuid}")
        assert note is not None
        assert evicted.revision == note.create_revision
        again = client.admin.EvictReplica(request)
        if request_id:
            assert await again == evicted
        else:
            assert (await refusal(again)).code == grpc.StatusCode.NOT_FOUND, "without an id, each call is new"


async def test_a_deletion_whose_answer_was_lost_is_no_missing_pipeline() -> None:
    async with cluster() as c:
        await c.start()
        etcd_client, tested = await interrupted_plane(c)
        etcd_client.lose_next_answer()
        await delete(tested)
        assert await c.etcd_client.get("/omni/v1/default/pipelines/demo") is None


@pytest.mark.parametrize("verb", sorted({case.verb for case in CASES}))
async def test_a_verb_whose_answer_was_lost_is_answered_as_it_was_done(verb: str) -> None:
    async with cluster() as c:
        client = await c.start()
        etcd_client, tested = await interrupted_plane(c)
        worker = Worker(await client.apply())
        await worker.register(client)
        case = Case(verb, "")
        etcd_client.lose_next_answer()
        answer = await case.ask(tested, case.request(worker, "r1"))
        assert await case.ask(client, case.request(worker, "r1")) == answer


async def test_what_a_policy_took_the_place_of_is_told_although_an_answer_was_lost() -> None:
    async with cluster() as c:
        client = await c.start()
        etcd_client, tested = await interrupted_plane(c)
        before = ""
        for policy in ("random", "round-robin", ""):
            etcd_client.lose_next_answer()
            request = pb.SetBalancingPolicyRequest(stage=STAGE, policy=policy)
            assert (await tested.admin.SetBalancingPolicy(request)).previous_policy == before
            stored = await c.etcd_client.get("/omni/v1/default/admin/policies/demo/1")
            assert (codec.decode_policy(stored.value) if stored else "") == policy
            before = policy
        assert (await client.admin.SetBalancingPolicy(request)).previous_policy == ""
