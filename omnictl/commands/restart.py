"""``omnictl restart``: the replicas of a stage, one after the other, while the others serve."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

from omni.v1 import admin_service_pb2 as pb
from omni.v1 import types_pb2
from omnicore.clock import SYSTEM_CLOCK
from omnicore.durations import to_duration
from omnictl import connect, failures, output, refs, rows
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.settings import seconds
from omnictl.streams import responses

_MAX_UNAVAILABLE = 10_000  # what the control plane takes


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
            "next one's turn comes. If one has not left a minute after its deadline, or is not back in time, the\n"
            "rest is left alone and the exit code is 6. Replicas that are cordoned, drained for good or evicted\n"
            "before or in their turn are left alone, without an error.\n"
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
    steps = responses(
        settings,
        lambda plane: plane.admin.RestartStage(request),
        note=lambda text: print(text, file=sys.stderr),
        may_end=True,
    )
    try:
        async with contextlib.aclosing(steps):
            async for step in steps:
                _print(step, args.output, SYSTEM_CLOCK.monotonic() - begun_s)
    except asyncio.CancelledError:
        print("note: replicas that were asked to drain go on; the rest of the stage is left alone", file=sys.stderr)
        raise
    return 0


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
