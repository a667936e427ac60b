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
from omnictl import connect, output, refs, rows
from omnictl.commands.base import ACTION_FORMATS, Commands, add_output_flag, settings_of
from omnictl.parser import usage_error
from omnictl.settings import seconds

_POLL_S = 0.3
# How long --wait waits beyond the deadline that the requests got, and in all if they got none.
_LEAVE_S = 30.0
_WAIT_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Verb:
    name: str
    description: str
    method: Callable[[connect.ControlPlane], Any]
    request: Callable[[types_pb2.ReplicaRef, argparse.Namespace], Any]
    done: str
    examples: tuple[str, ...] = ()
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
        examples=(
            "# for maintenance: requests get two minutes to finish",
            "omnictl drain speech/talker/0 --deadline 2m --wait --reason 'new disk'",
        ),
        notes=(
            "Returns once the replicas are marked; with --wait once they are gone, or with exit code 6 if that takes\n"
            "too long. A drained process never comes back, and its launcher does not start another: to have a new one\n"
            "in its place, use 'omnictl restart'."
        ),
    ),
    _Verb(
        "evict",
        "Remove replicas now. Requests on them fail or are replayed elsewhere.",
        lambda plane: plane.admin.EvictReplica,
        _evict,
        "evicted",
        notes=(
            "The process is told to stop and cannot register again. It is for replicas that hang or answer wrongly;\n"
            "'omnictl drain' lets requests finish."
        ),
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
                *verb.examples,
            ),
            notes=verb.notes,
        )
        parser.add_argument(
            "replicas", metavar="REPLICA", nargs="+", help="PIPELINE/STAGE/REPLICA, as 'omnictl get replicas' shows it"
        )
        parser.completes["replicas"] = "replica"
        parser.add_argument("--epoch", metavar="N", help="only if the replica still has this epoch")
        if verb.name != "uncordon":
            parser.add_argument("--reason", metavar="TEXT", default="", help="for the logs")
        if verb.name == "drain":
            parser.add_argument(
                "--deadline",
                metavar="DURATION",
                help="requests may take this long, such as 30s; then they are ended (default: the worker's own limit)",
            )
            parser.add_argument("--wait", action="store_true", help="return once the replicas are gone")
            parser.add_argument(
                "--wait-timeout",
                metavar="DURATION",
                help="with --wait: give up after this long (default: 30s after the deadline, or 5m)",
            )
        add_output_flag(parser, ACTION_FORMATS)


async def _run(verb: _Verb, args: argparse.Namespace) -> int:
    settings = settings_of(args)
    selectors = [refs.parse_replica(text) for text in args.replicas]
    epoch = 0
    if args.epoch is not None:
        epoch = output.whole_number(args.epoch, "--epoch", f"omnictl {verb.name}", high=2**64 - 1)
    if args.epoch is not None and len(selectors) > 1:
        raise usage_error("--epoch: goes with one REPLICA only", f"omnictl {verb.name}")
    wait_s = _wait_s(args) if verb.name == "drain" else None
    verb.request(types_pb2.ReplicaRef(), args)  # raises for what it cannot hold, while nobody is asked yet
    report = output.Report(args.output)
    async with connect.control_plane(settings) as plane:
        # All names are resolved before anything is changed; one that is named twice, by id and name say, is one.
        by_name = {rows.replica_name(ref): ref for ref in [await _resolve(plane, s, epoch) for s in selectors]}
        found = list(by_name.values())
        # Claims, not ids: a successor that takes a drained replica's id meanwhile is another one.
        claims = await _claims(plane, found) if wait_s is not None else {}
        try:
            for ref in found:
                response = await plane.call(verb.method(plane), verb.request(ref, args))
                report.done(rows.replica_name(ref), verb.done, output.to_dict(response))
            if wait_s is not None:
                await _wait_until_gone(plane, claims, wait_s, report)
        finally:
            report.end()  # what was done before an error is said, too
    return 0


def _wait_s(args: argparse.Namespace) -> float | None:
    if not args.wait:
        if args.wait_timeout is not None:
            raise usage_error("--wait-timeout: goes with --wait", "omnictl drain")
        return None
    if args.wait_timeout is not None:
        return seconds(args.wait_timeout, "--wait-timeout")
    return seconds(args.deadline, "--deadline") + _LEAVE_S if args.deadline is not None else _WAIT_S


async def _resolve(plane: connect.ControlPlane, selector: refs.Selector, epoch: int) -> types_pb2.ReplicaRef:
    stage_id = refs.stage_id_of(await plane.get_pipeline(selector.pipeline), selector.stage)
    return types_pb2.ReplicaRef(
        stage=types_pb2.StageRef(pipeline=selector.pipeline, stage_id=stage_id),
        replica_id=selector.replica_id or 0,
        epoch=epoch,
    )


async def _claims(plane: connect.ControlPlane, chosen: list[types_pb2.ReplicaRef]) -> dict[str, int]:
    """The epochs under which ``chosen`` are held, by name."""
    held = {rows.replica_name(r.ref): r.ref.epoch for r in (await plane.list_replicas()).replicas}
    return {name: held[name] for ref in chosen if (name := rows.replica_name(ref)) in held}


async def _wait_until_gone(
    plane: connect.ControlPlane, claims: dict[str, int], timeout_s: float, report: output.Report
) -> None:
    """Poll until none of ``claims`` is held any more."""
    waiting = dict(claims)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                held = {rows.replica_name(r.ref): r.ref.epoch for r in (await plane.list_replicas()).replicas}
                for name in [name for name, epoch in waiting.items() if held.get(name) != epoch]:
                    del waiting[name]
                    report.done(name, "gone")
                if not waiting:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        names = ", ".join(waiting)
        raise DeadlineExceededError(
            f"still there after {timeout_s:g} s: {names}",
            reason="STILL_DRAINING",
            metadata={
                "hint": "they go on draining; wait longer with --wait-timeout, or remove them with 'omnictl evict'"
            },
        ) from None
