"""An etcd of three members, with users: the leader dies, a member hangs, tokens expire. Another one with TLS."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from omni.v1 import pipeline_service_pb2, pipeline_service_pb2_grpc
from omnicore import rpc
from tests.fault.clients import load
from tests.fault.cluster import DEPLOY, GUARD_S, POLL_S, Cluster, apply, cluster
from tests.fault.record import record
from tests.support.etcd import Certificates, EtcdNode, enable_auth, etcd_cluster, etcd_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHER = DEPLOY.replace("pipeline: faults", "pipeline: other")
PAUSE_S = 2.0
"""Writes may stand still for so long when the leader is lost (an election takes half a second here)."""
SLACK_S = 8.0
TTL_S = 12
"""Leases that a busy machine refreshes in time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One worker is enough: what is asked of etcd is the same."""
    async with (
        etcd_cluster() as nodes,
        cluster(tmp_path_factory.mktemp("cluster"), etcd=nodes, workers=1, ttl_s=TTL_S) as running,
    ):
        yield running


async def leader(nodes: Sequence[EtcdNode]) -> EtcdNode:
    """Who leads, once all agree on that: one that was stopped takes itself for the leader for a moment."""
    begin_s = time.monotonic()
    while True:
        told = [json.loads(node.ctl("endpoint", "status", "-w", "json"))[0]["Status"] for node in nodes]
        leads = [node for node, status in zip(nodes, told, strict=True) if status["leader"] == _id_of(status)]
        if len(leads) == 1 and len({status["leader"] for status in told}) == 1:
            return leads[0]
        assert time.monotonic() < begin_s + GUARD_S, f"they do not agree on who leads: {told}"
        await asyncio.sleep(POLL_S)


def _id_of(status: dict[str, Any]) -> int:
    return int(status["header"]["member_id"])


async def beats_stay(system: Cluster, before: dict[int, int]) -> None:
    """Claims stay what they were, for longer than a refresh of their leases takes."""
    end_s = time.monotonic() + TTL_S / 3 + 1.0
    while time.monotonic() < end_s:
        for plane in system.control_planes:
            assert {n: r.ref.epoch for n, r in (await system.replicas(plane)).items()} == before
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("fault", ["leader SIGKILL", "leader SIGSTOP", "follower SIGSTOP"])
async def test_one_member_of_three(system: Cluster, fault: str) -> None:
    before = await system.claims(system.control_planes[0])
    first = await leader(system.etcd)
    victim = first if fault.startswith("leader") else next(node for node in system.etcd if node is not first)
    async with load(system) as requests:
        since_s = time.monotonic()
        victim.send(signal.SIGKILL if fault.endswith("SIGKILL") else signal.SIGSTOP)
        await apply(system.control_planes[0].address, OTHER)  # a write that needs the quorum
        paused_s = time.monotonic() - since_s
        await beats_stay(system, before)
        await system.heal()
    assert not requests.failed, requests.failed
    assert paused_s < PAUSE_S + SLACK_S
    async with rpc.channel(system.control_planes[0].address) as channel:
        stub = pipeline_service_pb2_grpc.PipelineServiceStub(channel)
        await stub.DeletePipeline(pipeline_service_pb2.DeletePipelineRequest(name="other"), timeout=10)
    record("etcd", f"{fault} of 3", "under load", f"nothing ({requests.count()})", write=paused_s)


@pytest.mark.asyncio
async def test_tokens_expire_and_a_password_is_wrong_for_a_while(tmp_path: Path) -> None:
    """Tokens live for two seconds, and are forgotten with a restart: nobody notices."""
    password = tmp_path / "password"
    password.write_text("secret")
    flags = {"--etcd-user": "omni", "--etcd-password-file": str(password)}
    async with etcd_server(flags=["--auth-token-ttl=2"]) as node:
        enable_auth(node, root_password="root", user="omni", password="secret", prefix="/omni/v1/")
        async with cluster(
            tmp_path, etcd=[node], etcd_flags=flags, workers=1, gateways=1, control_planes=1, ttl_s=TTL_S
        ) as system:
            before = await system.claims(system.control_planes[0])
            async with load(system, clients=2) as requests:
                await beats_stay(system, before)
                node.kill()
                await node.restart()
                await beats_stay(system, before)
            assert not requests.failed, requests.failed
    record("etcd", "tokens expire; restarted with users", "under load", f"nothing ({requests.count()})")


@pytest.mark.asyncio
async def test_tls_survives_a_restart(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    flags = {
        "--etcd-ca": str(certificates.ca),
        "--etcd-cert": str(certificates.client_cert),
        "--etcd-key": str(certificates.client_key),
    }
    async with (
        etcd_server(certificates=certificates) as node,
        cluster(
            tmp_path, etcd=[node], etcd_flags=flags, workers=1, gateways=1, control_planes=1, ttl_s=TTL_S
        ) as system,
    ):
        before = await system.claims(system.control_planes[0])
        async with load(system, clients=2) as requests:
            node.kill()
            await beats_stay(system, before)
            await node.restart(certificates.credentials)
            await system.settled()
            await beats_stay(system, before)
        assert not requests.failed, requests.failed
    record("etcd", "restarted, with TLS", "under load", f"nothing ({requests.count()})")
