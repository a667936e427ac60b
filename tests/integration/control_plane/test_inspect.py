"""What operators see of the store and of the beats, against a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc.aio
import pytest

from omni.v1 import inspect_service_pb2 as pb
from omni.v1 import inspect_service_pb2_grpc
from omnicore import errors
from omnicore.durations import to_seconds
from tests.integration.control_plane.harness import Client, Worker, beating, cluster
from tests.support.processes import wait_until


def _stub(client: Client) -> inspect_service_pb2_grpc.InspectServiceAsyncStub:
    return inspect_service_pb2_grpc.InspectServiceStub(client.channel)


async def _error(call: Awaitable[Any]) -> errors.OmniError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


async def test_keys_of_the_cluster_and_no_others_page_by_page() -> None:
    async with cluster() as made:
        client = await made.start()
        # Some of them look like ours, or like those about the store.
        for key in (
            "/elsewhere",
            "/omni/v1/default2/pipelines/secret",
            "/omni/v1/meta.restored.default2",
            "/omni/v1/metals/pipelines/secret",
            "/omni/v1/other/pipelines/secret",
        ):
            await made.etcd_client.put(key, b"{}")
        about_the_store = ["/omni/v1/meta", "/omni/v1/meta.restored.default"]
        await made.etcd_client.put(about_the_store[1], b"{}")
        workers = [Worker(await client.apply()) for _ in range(3)]
        for worker in workers:
            await worker.register(client)
        stub = _stub(client)
        whole = await stub.ListKeys(pb.ListKeysRequest())
        names = [key.key for key in whole.keys]
        assert names == sorted(names)
        assert [name for name in names if not name.startswith("/omni/v1/default/")] == about_the_store
        assert len(names) == 1 + 3 * 2 + 2, "the plan; a claim and its index entry for each"
        for prefix, found in (("/omni/v1/meta", about_the_store), (about_the_store[1], about_the_store[1:])):
            listed = await stub.ListKeys(pb.ListKeysRequest(prefix=prefix))
            assert [key.key for key in listed.keys] == found
        below = await stub.ListKeys(pb.ListKeysRequest(prefix="/omni/v1/default/"))
        assert [key.key for key in below.keys] == names[:-2]
        paged: list[str] = []
        revisions: set[int] = set()
        request = pb.ListKeysRequest(page_size=2, keys_only=True)
        while True:
            page = await stub.ListKeys(request)
            assert len(page.keys) <= 2
            assert not any(key.value for key in page.keys)
            revisions.add(page.revision)
            paged += [key.key for key in page.keys]
            request.page_token = page.next_page_token
            if not page.next_page_token:
                break
        assert paged == names
        assert len(revisions) == 1, "one listing is of one revision, whatever is written meanwhile"
        replicas = await stub.ListKeys(pb.ListKeysRequest(prefix="replicas/"))
        assert [key.create_revision for key in replicas.keys] == [w.claim.replica.epoch for w in workers]
        assert [key.lease_id for key in replicas.keys] == [w.claim.lease_id for w in workers]


async def test_one_key_by_its_short_and_its_whole_name() -> None:
    async with cluster() as made:
        stub = _stub(await made.start())
        short = await stub.GetKey(pb.GetKeyRequest(key="pipelines/demo"))
        whole = await stub.GetKey(pb.GetKeyRequest(key="/omni/v1/default/pipelines/demo"))
        assert short.key == whole.key
        assert b'"thinker"' in short.key.value
        assert b"schema_version" in (await stub.GetKey(pb.GetKeyRequest(key="/omni/v1/meta"))).key.value
        error = await _error(stub.GetKey(pb.GetKeyRequest(key="pipelines/nope")))
        assert (type(error), error.reason) == (errors.NotFoundError, "KEY_NOT_FOUND")


@pytest.mark.parametrize("key", ["/omni/v1/other/pipelines/p", "/", "/omni/v1/", "/omni/v1/defaul", "x" * 2000])
async def test_keys_of_others_are_refused(key: str) -> None:
    async with cluster() as made:
        stub = _stub((await made.control_plane())[1])
        for call in (stub.GetKey(pb.GetKeyRequest(key=key)), stub.ListKeys(pb.ListKeysRequest(prefix=key))):
            error = await _error(call)
            assert isinstance(error, errors.InvalidRequestError)
            assert error.violations[0].field in ("key", "prefix")


@pytest.mark.parametrize("token", ["x", "WyJhIiwtMV0=", "WyJhIiw5OTk5OTk5OTk5OTk5OTk5OTk5OV0=", "WzFd"])
async def test_forged_page_tokens_are_refused(token: str) -> None:
    async with cluster() as made:
        stub = _stub((await made.control_plane())[1])
        assert isinstance(await _error(stub.ListKeys(pb.ListKeysRequest(page_token=token))), errors.InvalidRequestError)


async def test_a_watch_sees_every_change_and_resumes() -> None:
    async with cluster() as made:
        client = await made.start()
        stub = _stub(client)
        async with _watching(stub, pb.WatchKeysRequest(prefix="replicas/")) as seen:
            await wait_until(lambda: bool(seen), what="a sign of life")
            worker = Worker(await client.apply())
            await worker.register(client)
            await wait_until(lambda: bool(_events(seen)), what="the claim")
            ((kind, key),) = _events(seen)
            assert (kind, key) == (pb.KEY_EVENT_TYPE_PUT, "/omni/v1/default/replicas/demo/1/0")
        before = worker.claim.replica.epoch - 1
        await made.etcd_client.delete("/omni/v1/default/replicas/demo/1/0")
        async with _watching(stub, pb.WatchKeysRequest(prefix="replicas/", resume_revision=before)) as again:
            await wait_until(lambda: len(_events(again)) == 2, what="both changes")
            assert [kind for kind, _ in _events(again)] == [pb.KEY_EVENT_TYPE_PUT, pb.KEY_EVENT_TYPE_DELETE]


async def test_a_watch_of_what_is_about_the_store_shows_nothing_of_others() -> None:
    async with cluster() as made:
        client = await made.start()
        async with _watching(_stub(client), pb.WatchKeysRequest(prefix="/omni/v1/meta")) as seen:
            await wait_until(lambda: bool(seen), what="a sign of life")
            await made.etcd_client.put("/omni/v1/meta.restored.other", b"{}")
            await made.etcd_client.put("/omni/v1/metals/pipelines/secret", b"{}")
            await made.etcd_client.put("/omni/v1/meta.restored.default", b"{}")
            await wait_until(lambda: bool(_events(seen)), what="its own mark")
            assert [key for _, key in _events(seen)] == ["/omni/v1/meta.restored.default"]


async def test_history_that_is_gone_and_too_many_watches_are_said() -> None:
    async with cluster() as made:
        client = await made.start()
        stub = _stub(client)
        await client.apply("pipeline: other\nstages: [{stage_id: 0, engine: sim, final_output_type: text}]\n")
        revision = await made.etcd_client.put("/omni/v1/default/x", b"1")
        await made.etcd_client.compact(revision)
        call = stub.WatchKeys(pb.WatchKeysRequest(resume_revision=1))
        assert (await _error(call.read())).reason == "ETCD_COMPACTED"
        async with contextlib.AsyncExitStack() as stack:
            watches = [await stack.enter_async_context(_watching(stub, pb.WatchKeysRequest())) for _ in range(16)]
            await wait_until(lambda: all(watches), what="a sign of life of each")
            error = await _error(stub.WatchKeys(pb.WatchKeysRequest()).read())
            assert (type(error), error.reason) == (errors.ResourceExhaustedError, "TOO_MANY_WATCHES")


async def test_watchers_are_sent_elsewhere_when_a_control_plane_stops() -> None:
    async with cluster() as made:
        plane, client = await made.control_plane()
        responses = aiter(_stub(client).WatchKeys(pb.WatchKeysRequest()))
        await anext(responses)
        reading = asyncio.create_task(_error(_rest(responses)))
        await plane.stop()
        error = await reading
        assert (type(error), error.reason) == (errors.UnavailableError, "STOPPING")


async def test_leases_with_their_keys() -> None:
    async with cluster() as made:
        client = await made.start()
        foreign = await made.etcd_client.grant_lease(60)
        await made.etcd_client.put("/elsewhere", b"x", lease_id=foreign.lease_id)
        worker = Worker(await client.apply())
        await worker.register(client)
        stub = _stub(client)
        leases = {lease.lease_id: lease for lease in (await stub.ListLeases(pb.ListLeasesRequest())).leases}
        mine = leases[worker.claim.lease_id]
        assert list(mine.keys) == [
            f"/omni/v1/default/instances/{worker.request.instance_uuid}",
            "/omni/v1/default/replicas/demo/1/0",
        ]
        assert 0 <= to_seconds(mine.ttl) <= to_seconds(mine.granted_ttl)
        other = leases[foreign.lease_id]
        assert (list(other.keys), other.other_keys) == ([], 1)
        page = await stub.ListLeases(pb.ListLeasesRequest(page_size=1))
        rest = await stub.ListLeases(pb.ListLeasesRequest(page_size=1, page_token=page.next_page_token))
        assert [page.leases[0].lease_id, rest.leases[0].lease_id] == sorted(leases)
        assert not rest.next_page_token


async def test_how_the_store_is() -> None:
    async with cluster() as made:
        status = await _stub(await made.start()).GetStoreStatus(pb.GetStoreStatusRequest())
        (member,) = status.members
        assert member.leader
        assert member.answered
        assert status.db_size_bytes > 0


async def test_who_beats_here_and_since_when() -> None:
    async with cluster() as made:
        client = await made.start()
        _, other = await made.control_plane()
        worker = Worker(await client.apply())
        worker.load.running = 3
        await worker.register(client)
        async with beating(worker, client):
            await wait_until(lambda: len(worker.answers) > 1, what="beats")
            (pulse,) = (await _stub(client).ListPulses(pb.ListPulsesRequest())).pulses
            assert pulse.replica == worker.claim.replica
            assert to_seconds(pulse.beat_age) < 5
            assert pulse.load.running == 3
            assert not pulse.suspect
            assert not (await _stub(client).ListPulses(pb.ListPulsesRequest(pipeline="other"))).pulses
            assert not (await _stub(other).ListPulses(pb.ListPulsesRequest())).pulses


async def test_everything_is_unavailable_while_etcd_is_away() -> None:
    async with cluster(etcd_timeout_s=2.0) as made:
        stub = _stub(await made.start())
        made.etcd.kill()
        for call in (
            stub.GetKey(pb.GetKeyRequest(key="pipelines/demo")),
            stub.ListKeys(pb.ListKeysRequest()),
            stub.ListLeases(pb.ListLeasesRequest()),
            stub.GetStoreStatus(pb.GetStoreStatusRequest()),
        ):
            assert isinstance(await _error(call), errors.UnavailableError)


@contextlib.asynccontextmanager
async def _watching(
    stub: inspect_service_pb2_grpc.InspectServiceAsyncStub, request: pb.WatchKeysRequest
) -> AsyncIterator[list[pb.WatchKeysResponse]]:
    seen: list[pb.WatchKeysResponse] = []
    call = stub.WatchKeys(request)

    async def follow() -> None:
        async for response in call:
            seen.append(response)  # noqa: PERF401 -- others look at it meanwhile

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        call.cancel()
        task.cancel()
        await asyncio.wait({task})


def _events(seen: list[pb.WatchKeysResponse]) -> list[tuple[int, str]]:
    return [(event.type, event.key.key) for response in seen for event in response.events]


async def _rest(responses: AsyncIterator[pb.WatchKeysResponse]) -> None:
    async for _ in responses:
        pass
