"""The service as it is launched."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from omnicore.clock import ManualClock
from tests.integration.control_plane.harness import Client, Worker, beating, cluster, until, watching
from tests.support.etcd import etcd_server
from tests.support.processes import Services, services

# Processes take long to start on a busy machine.
pytestmark = pytest.mark.timeout(180)

__all__ = ["services"]


async def serving(client: Client) -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service="omni.v1.RegistryService"), wait_for_ready=True)
    return int(response.status)


async def test_embedded_etcd_starts_serves_and_goes_with_it(services: Services) -> None:
    plane = await services.start("control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded")
    client = Client(plane.ready["address"])
    async with client.channel:
        worker = Worker(await client.apply())
        await worker.register(client)
        assert await serving(client) == health_pb2.HealthCheckResponse.SERVING
        names = await _reflected(client)
        assert {"omni.v1.RegistryService", "omni.v1.PipelineService", "omni.v1.AdminService"} <= names
        assert "Listening address=" in plane.logs()
    socket = Path(plane.ready["etcd"][0].removeprefix("unix:"))
    assert socket.exists()
    assert await plane.terminate() == 0
    assert not socket.exists()
    assert "Traceback" not in plane.logs()


async def test_it_starts_before_etcd_and_says_so(services: Services) -> None:
    async with etcd_server() as etcd:
        etcd.kill()
        plane = services.spawn("control-plane", "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint)
        await until(lambda: "Listening address=" in plane.logs(), "listening")
        address = plane.logs().split("Listening address=")[1].split()[0]
        client = Client(address)
        async with client.channel:
            assert await serving(client) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not plane.ready_path.exists()
            await etcd.restart()
            await plane.wait_ready()
            assert plane.ready["address"] == address
            assert await serving(client) == health_pb2.HealthCheckResponse.SERVING
            await client.apply()


async def test_a_control_plane_killed_under_beats_costs_nobody(services: Services) -> None:
    async with etcd_server() as etcd:
        flags = ("--listen", "127.0.0.1:0", "--etcd", etcd.endpoint, "--lease-ttl-s", "6")
        first, second = [await services.start("control-plane", *flags) for _ in range(2)]
        clients = [Client(first.ready["address"]), Client(second.ready["address"])]
        async with clients[0].channel, clients[1].channel:
            worker = Worker(await clients[0].apply())
            await worker.register(clients[0])
            epoch = worker.claim.replica.epoch
            async with watching(clients[1]) as watcher, beating(worker, *clients):
                await until(lambda: len(worker.answers) > 3, "beats")
                first.kill()
                count = len(worker.answers)
                await until(lambda: len(worker.answers) > count + 3, "beats at the other one")
                # ... for longer than the lease would have lived.
                await until(lambda: len(worker.answers) > count + 150, "beats go on")
                await until(lambda: bool((r := watcher.one()) and not r.suspect), "trust")
                replica = watcher.one()
                assert replica is not None
                assert replica.ref.epoch == epoch


async def test_a_frozen_control_plane_suspects_nobody_when_it_wakes(services: Services) -> None:
    async with etcd_server() as etcd:
        flags = ("--listen", "127.0.0.1:0", "--etcd", etcd.endpoint, "--heartbeat-interval-s", "1")
        plane = await services.start("control-plane", *flags)
        client = Client(plane.ready["address"])
        async with client.channel:
            worker = Worker(await client.apply())
            await worker.register(client)
            async with watching(client) as watcher, beating(worker, client):
                await until(lambda: len(worker.answers) > 3, "beats")
                plane.freeze()
                await asyncio.sleep(4)  # longer than what makes suspect
                plane.thaw()
                count = len(worker.answers)
                await until(lambda: len(worker.answers) > count + 10, "beats go on")
                assert not any(replica.suspect for frame in watcher.frames for replica in frame.changed)


async def test_wrong_flags_end_it_with_code_2(services: Services) -> None:
    plane = services.spawn("control-plane", "--heartbeat-interval-s", "9")
    assert await plane.wait_exit() == 2
    assert "--heartbeat-interval-s: must be at most" in plane.logs()
    assert "Traceback" not in plane.logs()


async def test_a_killed_worker_is_suspect_at_once_and_gone_after_the_ttl(services: Services) -> None:
    async with cluster(ttl_s=10) as c:
        _, client = await c.control_plane(clock=ManualClock())  # by which no beat is ever missed
        await client.apply()
        command = [sys.executable, "-m", "tests.integration.control_plane.harness", client.address]
        worker = await asyncio.create_subprocess_exec(*command)
        async with watching(client) as watcher:
            await until(lambda: watcher.ids() == {0}, "registration")
            await until(lambda: bool((r := watcher.one()) and r.load.queue_length), "beats")
            worker.kill()
            await until(lambda: bool((r := watcher.one()) and r.suspect), "suspect, by the broken stream")
            await until(lambda: watcher.ids() == set(), "removal")
        await worker.wait()


async def test_a_store_of_another_schema_is_left_alone(services: Services) -> None:
    async with etcd_server() as etcd:
        await asyncio.to_thread(etcd.ctl, "put", "/omni/v1/meta", '{"schema_version": 2}')
        plane = services.spawn("control-plane", "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint)
        assert await plane.wait_exit() == 5
        assert "schema version 2" in plane.logs()


async def test_a_second_signal_ends_it_at_once(services: Services) -> None:
    plane = await services.start("control-plane", "--listen", "127.0.0.1:0", "--etcd", "embedded", "--drain-s", "60")
    client = Client(plane.ready["address"])
    async with client.channel, watching(client):
        os.kill(plane.pid, signal.SIGTERM)
        await until(lambda: "stopping" in plane.logs(), "shutdown")
        os.kill(plane.pid, signal.SIGTERM)
        assert await plane.wait_exit() in (0, 128 + signal.SIGTERM)


async def _reflected(client: Client) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)

    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    async for response in stub.ServerReflectionInfo(requests()):
        return {service.name for service in response.list_services_response.service}
    return set()
