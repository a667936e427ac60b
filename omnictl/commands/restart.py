"""``omnictl restart``: the replicas of a stage, one after the other, while the others serve."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.clock import SYSTEM_CLOCK
from omnicore.durations import to_duration, to_seconds
from omnictl import connect, failures, output, refs, rows
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.settings import Settings, seconds
from omnictl.streams import responses
from omnictl.successors import Place, Successors

_MAX_UNAVAILABLE = 10_000  # what the control plane takes
_READY_TIMEOUT_S = 600.0  # what it waits if it is not told


def add(commands: Commands) -> None:
    """Add ``restart``."""
    parser = commands.add(
        "restart",
        _run,
        description="Restart the replicas of a stage, one after the other.",
        examples=(
            "omnictl restart speech/talker",
            "# two at a time, requests may take a minute",
            "omnictl restart speech/1 --max-unavailable 2 --deadline 1m --reason 'new image'",
        ),
        notes=(
            "Each replica is drained, its launcher starts a new process, and once that is READY under the same id the\n"
            "next one's turn comes. If it takes long, a note on stderr says what is awaited and who must start it. If\n"
            "one has not left a minute after its deadline, or is not back in time, the rest is left alone and the\n"
            "exit code is 6. Replicas that are cordoned, drained for good or evicted before or in their turn are left\n"
            "alone, without an error.\n"
            "Ctrl-C ends the command after the replicas that are under way; those finish by themselves."
        ),
    )
    parser.add_argument("stage", metavar="STAGE", help="PIPELINE/STAGE, by id or name")
    parser.completes["stage"] = "stage"
    parser.add_argument("--max-unavailable", metavar="N", default="1", help="replicas that may be away at a time")
    parser.add_argument(
        "--deadline",
        metavar="DURATION",
        help="requests may take this long (default: the worker's own limit, 30s unless it was started with another)",
    )
    parser.add_argument("--ready-timeout", metavar="DURATION", help="for a new process to become READY (default 10m)")
    parser.add_argument("--reason", metavar="TEXT", default="", help="for the logs")
    add_output_flag(parser, ("text", "json"))


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    selector = refs.parse_stage(args.stage)
    request = pb.RestartStageRequest(
        max_unavailable=output.whole_number(
            args.max_unavailable, "--max-unavailable", "omnictl restart", high=_MAX_UNAVAILABLE
        ),
        request_id=connect.request_id(),
        reason=args.reason,
    )
    if args.deadline is not None:
        request.drain_deadline.CopyFrom(to_duration(seconds(args.deadline, "--deadline")))
    if args.ready_timeout is not None:
        request.ready_timeout.CopyFrom(to_duration(seconds(args.ready_timeout, "--ready-timeout")))
    async with connect.control_plane(settings) as plane:
        plan = await plane.get_pipeline(selector.pipeline)
        stage_id = refs.stage_id_of(plan, selector.stage)
        request.stage.CopyFrom(types_pb2.StageRef(pipeline=plan.name, stage_id=stage_id))
    begun_s = SYSTEM_CLOCK.monotonic()
    # The same request goes on where it ended, at whichever control plane answers.
    steps = responses(settings, lambda plane: plane.admin.RestartStage(request), note=_note, may_end=True)
    ready_timeout_s = to_seconds(request.ready_timeout) or _READY_TIMEOUT_S
    successors = Successors(lambda place: _holder(settings, place), _note, ready_timeout_s)
    try:
        async with contextlib.aclosing(successors), contextlib.aclosing(steps):
            async for step in steps:
                _print(step, args.output, SYSTEM_CLOCK.monotonic() - begun_s)
                successors.take(step)
    except asyncio.CancelledError:
        _note("note: replicas that were asked to drain go on; the rest of the stage is left alone")
        raise
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr)


async def _holder(settings: Settings, place: Place) -> types_pb2.Replica | None:
    async with connect.control_plane(settings) as plane:
        table = await plane.list_replicas(place.pipeline, place.stage_id)
    return next((replica for replica in table.replicas if Place.of(replica.ref) == place), None)


def _print(step: pb.RestartStageResponse, form: str, after_s: float) -> None:
    if form == "json":
        output.print_json(output.to_dict(step), compact=True)
    else:
        print(line(step, after_s), flush=True)


def line(step: pb.RestartStageResponse, after_s: float) -> str:
    """One step as text; ``after_s``: seconds since the command began."""
    known = step.step in pb.RestartStep.values()
    word = pb.RestartStep.Name(step.step).removeprefix("RESTART_STEP_") if known else f"step {step.step}"
    name = rows.replica_name(step.replica) if step.HasField("replica") else ""
    detail = failures.one_line(step.detail)
    texts = {
        # Who has nothing to restart should read it.
        "PLANNED": f"restarting {detail or output.plural(step.total, 'replica')}",
        "DRAINING": f"{name} draining",
        "LEFT": f"{name} has left, awaiting its successor",
        "READY": f"{name} ready again",
        "SKIPPED": f"{name} left alone",
        "FAILED": f"{name} failed",
        "FINISHED": f"finished: {step.done} of {output.plural(step.total, 'replica')} restarted",
    }
    text = texts.get(word, f"{word.lower()} {name}".rstrip())
    if detail and word != "PLANNED":
        text += f": {detail}" if word in ("SKIPPED", "FAILED") else f" ({detail})"
    return f"[{step.done}/{step.total}] {output.age(after_s):>6}  {text}"
