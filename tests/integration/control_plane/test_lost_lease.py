"""The lease of a replica that serves is revoked by hand, as ``etcdctl lease revoke`` does it, or ends while the only
control plane stands still: no request minds."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
import yaml

from control_plane.etcd import EtcdClient
from tests.integration.control_plane.harness import READY, Client, watching
from tests.support.gateways import until_routable
from tests.support.processes import Services, services, wait_until

__all__ = ["services"]

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)

STAGE = {"stage_id": 0, "engine": "sim", "model": "none", "sim": {"output": "text", "tokens": 200, "tpot_ms": 10}}
DEPLOY = yaml.safe_dump({"pipeline": "demo", "async_chunk": True, "stages": [STAGE]})
RECORD = "/omni/v1/default/replicas/demo/0/0"


class Answer:
    """A streamed chat; ``text`` grows as it comes."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self.finish = ""
        self.errors: list[object] = []
        self.task = asyncio.create_task(self._read(url))

    async def _read(self, url: str) -> None:
        body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                data = line.decode().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    self.errors.append(event["error"])
                for choice in event.get("choices", ()):
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice.get("finish_reason") or self.finish


async def test_it_is_claimed_anew_once_and_requests_go_on(services: Services) -> None:
    # Beats are rare enough that a busy machine makes nobody suspect.
    flags = ("--listen", "127.0.0.1:0", "--etcd", "embedded", "--heartbeat-interval-s", "1.5")
    control_plane = await services.start("control-plane", *flags)
    address = control_plane.ready["address"]
    client = Client(address)
    async with client.channel, EtcdClient(control_plane.ready["etcd"]) as etcd:
        await client.apply(DEPLOY)
        gateway = services.spawn(
            "gateway", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--control-plane", address
        )
        stage = ("--pipeline", "demo", "--stage-id", "0")
        worker = services.spawn("stage-worker", *stage, "--control-plane", address, "--listen", "127.0.0.1:0")
        for process in (gateway, worker):
            await process.wait_ready()
        url = f"http://{gateway.ready['http']}"
        await until_routable(url, "demo", {0: 1})
        epoch = worker.ready["epoch"]
        assert (await client.replicas())[0].drain_limit.seconds == 30, "what a stage worker registers by itself"

        async with watching(client) as watcher:
            answer = Answer(url)
            await wait_until(lambda: bool(answer.text), what="the first words")
            record = await etcd.get(RECORD)
            assert record is not None
            await etcd.revoke_lease(record.lease_id)

            def back() -> bool:
                found = watcher.one(stage_id=0)
                return found is not None and found.ref.epoch > epoch and found.state == READY

            await wait_until(back, what="a new claim on the same id")
            async with asyncio.timeout(60):
                await answer.task
            assert answer.errors == []
            assert answer.finish
            await until_routable(url, "demo", {0: 1})
            again = Answer(url)
            async with asyncio.timeout(60):
                await again.task
            assert (again.text, again.finish, again.errors) == (answer.text, answer.finish, [])
            epochs = {replica.ref.epoch for frame in watcher.frames for replica in frame.changed}
            assert len(epochs) == 2, "once"
            lapsed = [ref.epoch for frame in watcher.frames for ref in frame.lapsed]
            assert lapsed in ([epoch], []), "no operator's doing; none if the next claim came with it"
            assert set(watcher.table) == {("demo", 0, 0)}
        assert worker.running
        record = await etcd.get(RECORD)
        assert record is not None
        assert record.create_revision == max(epochs)
        assert record.lease_id


async def test_it_ends_while_the_control_plane_stands_still(services: Services) -> None:
    """The gateway is told of the end as of a change, before the worker has claimed anew."""
    etcd = await services.start("etcd", "--client-listen", "127.0.0.1:0")
    flags = ("--etcd", etcd.ready["endpoints"][0], "--lease-ttl-s", "3", "--heartbeat-interval-s", "0.5")
    control_plane = await services.start("control-plane", "--listen", "127.0.0.1:0", *flags)
    address = control_plane.ready["address"]
    client = Client(address)
    async with client.channel:
        await client.apply(DEPLOY.replace("200", "5"))
        # A request that finds nobody fails at once.
        ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--route-wait-s", "0")
        gateway = services.spawn("gateway", *ports, "--control-plane", address)
        stage = ("--pipeline", "demo", "--stage-id", "0")
        worker = services.spawn("stage-worker", *stage, "--control-plane", address, "--listen", "127.0.0.1:0")
        for process in (gateway, worker):
            await process.wait_ready()
        url = f"http://{gateway.ready['http']}"
        await until_routable(url, "demo", {0: 1})
        epoch: int = worker.ready["epoch"]
        enough = asyncio.Event()
        async with EtcdClient(etcd.ready["endpoints"]) as store, asyncio.TaskGroup() as asking:
            for _ in range(3):
                asking.create_task(_ask_until(enough, url))
            record = await store.get(RECORD)
            assert record is not None
            control_plane.freeze()
            while await store.get(RECORD) is not None:
                await asyncio.sleep(0.05)
            control_plane.thaw()
            async with asyncio.timeout(60):
                while not any(found.ref.epoch > epoch for found in (await client.replicas()).values()):
                    await asyncio.sleep(0.05)
            await until_routable(url, "demo", {0: 1})
            enough.set()
        assert worker.running


async def _ask_until(enough: asyncio.Event, url: str) -> None:
    """Chats, one after the other; raises for one that does not come to its end."""
    while not enough.is_set():
        answer = Answer(url)
        await answer.task
        assert answer.errors == []
        assert answer.finish
