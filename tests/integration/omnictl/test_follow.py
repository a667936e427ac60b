"""Watches over control planes that go away and come back."""

from __future__ import annotations

import asyncio

import pytest

from omni.v1 import pipeline_service_pb2, registry_service_pb2
from omnicore.errors import UnavailableError
from omnictl import watch
from omnictl.settings import Settings
from tests.integration.omnictl.servers import ScriptedControlPlane, serving, settings_for
from tests.support.ports import reserved_port
from tests.support.processes import wait_until
from tests.unit.omnictl.records import replica, speech_pipeline


class _Follower:
    def __init__(self, settings: Settings) -> None:
        self.changes: list[tuple[watch.Kind, int]] = []
        self.notes: list[str] = []
        self.calls = 0
        self.task = asyncio.create_task(watch.follow_cluster(settings, "", self._on_change, note=self.notes.append))

    def _on_change(self, plans: watch.PlanState, replicas: watch.ReplicaState, changes: list[watch.Change]) -> None:
        self.calls += 1
        self.changes += [(change.kind, change.replica.ref.replica_id) for change in changes]

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def _first(plane: ScriptedControlPlane) -> None:
    plane.pipelines.put_nowait(
        pipeline_service_pb2.WatchPipelinesResponse(revision=3, snapshot=True, changed=[speech_pipeline()])
    )
    plane.replicas.put_nowait(
        registry_service_pb2.WatchReplicasResponse(revision=5, snapshot=True, changed=[replica(0, 0)])
    )


async def test_a_stream_that_breaks_is_resumed_where_it_was() -> None:
    plane = ScriptedControlPlane()  # type: ignore[abstract] # it implements what watches call
    async with serving(plane, reserved_port()) as server:
        follower = _Follower(settings_for(server=server.port))
        _first(plane)
        await wait_until(lambda: follower.changes == [(watch.Kind.ADDED, 0)], what="the snapshot")
    await wait_until(lambda: len(follower.notes) == 1, what="the note about the break")
    again = ScriptedControlPlane()  # type: ignore[abstract] # it implements what watches call
    async with serving(again, server.port):
        again.replicas.put_nowait(registry_service_pb2.WatchReplicasResponse(revision=6, changed=[replica(0, 1)]))
        await wait_until(lambda: len(follower.changes) == 2, what="the change after the break")
        assert again.resumed == [5]
        assert follower.notes[1] == f"following again, at 127.0.0.1:{server.port}"
        await follower.stop()


async def test_nothing_is_shown_before_both_snapshots() -> None:
    plane = ScriptedControlPlane()  # type: ignore[abstract] # it implements what watches call
    async with serving(plane) as server:
        follower = _Follower(settings_for(server=server.port))
        plane.replicas.put_nowait(
            registry_service_pb2.WatchReplicasResponse(revision=5, snapshot=True, changed=[replica(0, 0)])
        )
        await wait_until(plane.replicas.empty, what="the replicas")
        assert follower.calls == 0
        plane.pipelines.put_nowait(pipeline_service_pb2.WatchPipelinesResponse(revision=3, snapshot=True))
        await wait_until(lambda: follower.changes == [(watch.Kind.ADDED, 0)], what="the first view")
        assert follower.calls == 1
        await follower.stop()


async def test_no_control_plane_at_first_is_an_error_at_once() -> None:
    follower = _Follower(settings_for(server=reserved_port()))
    with pytest.raises(UnavailableError, match="cannot reach the control plane"):
        await follower.task
