"""``omnictl cordon|uncordon|drain|evict``: the verbs that change replicas."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from omni.v1 import admin_service_pb2, types_pb2
from omnicore.durations import to_duration
from omnicore.errors import DeadlineExceededError
from omnictl import connect, refs, rows
from omnictl.commands.base import Commands, settings_of
from omnictl.parser import usage_error
from omnictl.settings import seconds

_POLL_S = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class _Verb:
    name: str
    description: str
    method: Callable[[connect.ControlPlane], Any]
    request: Callable[[types_pb2.ReplicaRef, argparse.Namespace], Any]
    done: str
    notes: str = ""


def _cordon(replica: types_pb2.ReplicaRef, args: argparse.Namespace) -> admin_service_pb2.CordonReplicaRequest:
    return admin_service_pb2.CordonReplicaRequest(replica=replica, request_id=connect.request_id(), reason=args.reason)


def _uncordon(replica: types_pb2.ReplicaRef, _: argparse.Namespace) -> admin_service_pb2.UncordonReplicaRequest:
    return admin_service_pb2.UncordonReplicaRequest(replica=replica, request_id=connect.request_id())


def _drain(replica: types_pb2.ReplicaRef, args: argparse.Namespace) -> admin_service_pb2.DrainReplicaRequest:
    request = admin_service_pb2.DrainReplicaRequest(
        replica=replica, request_id=connect.request_id(), reason=args.reason
    )
    if args.deadline is not None:
        request.deadline.CopyFrom(to_duration(seconds(args.deadline, "--deadline")))
    return request


def _evict(replica: types_pb2.ReplicaRef, args: argparse.Namespace) -> admin_service_pb2.EvictReplicaRequest:
    return admin_service_pb2.EvictReplicaRequest(replica=replica, request_id=connect.request_id(), reason=args.reason)


_VERBS = (
    _Verb(
        "cordon",
        "Take replicas out of routing. What runs on them goes on.",
        lambda plane: plane.admin.CordonReplica,
        _cordon,
        "cordoned",
    ),
    _Verb(
        "uncordon",
        "Put replicas back into routing.",
        lambda plane: plane.admin.UncordonReplica,
        _uncordon,
        "uncordoned",
    ),
    _Verb(
        "drain",
        "Let replicas finish what they have, then leave and exit.",
        lambda plane: plane.admin.DrainReplica,
        _drain,
        "draining",
        notes="Returns once the replicas are marked; --wait returns once they are gone.",
    ),
    _Verb(
        "evict",
        "Remove replicas now. Requests on them fail or are replayed elsewhere.",
        lambda plane: plane.admin.EvictReplica,
        _evict,
        "evicted",
    ),
)


def add(commands: Commands) -> None:
    """Add the verbs."""
    for verb in _VERBS:
        parser = commands.add(
            verb.name,
            functools.partial(_run, verb),
            description=verb.description,
            examples=(
                f"omnictl {verb.name} speech/talker/0",
                "# several at once, stages by id",
                f"omnictl {verb.name} speech/1/0 speech/1/1",
            ),
            notes=verb.notes,
        )
        parser.add_argument(
            "replicas", metavar="REPLICA", nargs="+", help="PIPELINE/STAGE/REPLICA, as 'omnictl get replicas' shows it"
        )
        parser.add_argument("--epoch", metavar="N", help="only if the replica still has this epoch")
        if verb.name != "uncordon":
            parser.add_argument("--reason", metavar="TEXT", default="", help="for the logs")
        if verb.name == "drain":
            parser.add_argument("--deadline", metavar="DURATION", help="requests may take this long, such as 30s")
            parser.add_argument(
                "--wait", metavar="DURATION", help="wait until the replicas are gone, at most this long"
            )


async def _run(verb: _Verb, args: argparse.Namespace) -> int:
    settings = settings_of(args)
    selectors = [refs.parse_replica(text) for text in args.replicas]
    epoch = _epoch(verb.name, args.epoch)
    if epoch and len(selectors) > 1:
        raise usage_error("--epoch: goes with one REPLICA only", f"omnictl {verb.name}")
    wait_s = seconds(args.wait, "--wait") if getattr(args, "wait", None) else None
    async with connect.control_plane(settings) as plane:
        # All names are resolved before anything is changed.
        found = [await _resolve(plane, selector, epoch) for selector in selectors]
        for ref in found:
            await plane.call(verb.method(plane), verb.request(ref, args))
            print(f"{rows.replica_name(ref)} {verb.done}", flush=True)
        if wait_s is not None:
            await _wait_until_gone(plane, found, wait_s)
    return 0


async def _resolve(plane: connect.ControlPlane, selector: refs.Selector, epoch: int) -> types_pb2.ReplicaRef:
    stage_id = refs.stage_id_of(await plane.get_pipeline(selector.pipeline), selector.stage)
    return types_pb2.ReplicaRef(
        stage=types_pb2.StageRef(pipeline=selector.pipeline, stage_id=stage_id),
        replica_id=selector.replica_id or 0,
        epoch=epoch,
    )


def _epoch(command: str, text: str | None) -> int:
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**64):
        raise usage_error(f"--epoch: must be a whole number above 0, got {text!r}", f"omnictl {command}")
    return int(text)


async def _wait_until_gone(plane: connect.ControlPlane, leaving: list[types_pb2.ReplicaRef], timeout_s: float) -> None:
    """Poll until none of the claims is held any more. Another instance that took an id meanwhile does not count."""
    before = {rows.replica_name(r.ref): r.ref.epoch for r in (await plane.list_replicas()).replicas}
    waiting = {rows.replica_name(ref): before.get(rows.replica_name(ref)) for ref in leaving}
    try:
        async with asyncio.timeout(timeout_s):
            while waiting:
                held = {rows.replica_name(r.ref): r.ref.epoch for r in (await plane.list_replicas()).replicas}
                for name in [name for name, epoch in waiting.items() if held.get(name) != epoch or epoch is None]:
                    del waiting[name]
                    print(f"{name} gone", flush=True)
                if waiting:
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        names = ", ".join(waiting)
        raise DeadlineExceededError(
            f"still there after {timeout_s:g} s: {names}",
            reason="STILL_DRAINING",
            metadata={"hint": "wait longer with --wait, or remove them with 'omnictl evict'"},
        ) from None
