"""``omnictl sleep|wake|profile|reset-cache``: one engine method on every replica of some stages."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from typing import Any, NamedTuple

from google.protobuf import json_format

from omni.v1 import admin_service_pb2, pipeline_pb2, types_pb2
from omnicore import errors
from omnicore.durations import to_duration
from omnictl import connect, failures, output, refs, rows
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.output import Column
from omnictl.parser import Parser, usage_error
from omnictl.settings import seconds

_DEFAULT_S = 30.0
_MAX_S = 600.0
# For the control plane itself, on top of what each replica may take.
_MARGIN_S = 10.0


class _Verb(NamedTuple):
    name: str
    description: str
    example: str
    notes: str


_VERBS = (
    _Verb(
        "sleep",
        "Let engines put their weights aside, to free their devices.",
        "omnictl sleep speech --stage talker --level 2",
        "A sleeping replica is not routed to until it is woken.",
    ),
    _Verb("wake", "Bring the weights of sleeping engines back.", "omnictl wake speech --stage talker,code2wav", ""),
    _Verb(
        "profile",
        "Start or stop the profilers of engines.",
        "omnictl profile start speech --stage thinker",
        "'profile stop' says where each replica has written its profile.",
    ),
    _Verb(
        "reset-cache",
        "Let engines forget cached prefixes.",
        "omnictl reset-cache speech --all-stages",
        "",
    ),
)
_NOTES = """\
All stages are checked before any replica is called: one unknown stage, or a replica that cannot take the call now,
refuses all of it (--skip-unhealthy leaves such replicas out). Afterwards every replica has a row; the exit code is 0
only if all have done it, else that of the first that has not."""


def add(commands: Commands) -> None:
    """Add the verbs."""
    for verb in _VERBS:
        parser = commands.add(
            verb.name,
            functools.partial(_run, verb.name),
            description=verb.description,
            examples=(
                verb.example,
                "# the only pipeline there is, a stage by its id",
                f"omnictl {verb.name}{' stop' if verb.name == 'profile' else ''} --stage 1",
            ),
            notes=f"{verb.notes}\n\n{_NOTES}".strip(),
        )
        if verb.name == "profile":
            parser.add_argument("action", metavar="ACTION", choices=("start", "stop"), help="start or stop")
        parser.add_argument(
            "pipeline", metavar="PIPELINE", nargs="?", default="", help="whose stages; the only one, if left out"
        )
        parser.completes["pipeline"] = "pipeline"
        _add_flags(parser, verb.name)


def _add_flags(parser: Parser, verb: str) -> None:
    parser.add_argument(
        "--stage",
        metavar="STAGE[,STAGE]",
        action="append",
        default=[],
        help="stage ids or names; repeatable",
    )
    parser.add_argument("--all-stages", action="store_true", help="every stage of the pipeline")
    if verb == "sleep":
        parser.add_argument("--level", metavar="N", help="1: weights go to host memory; 2: they are dropped")
    parser.add_argument(
        "--replica-timeout", metavar="DURATION", default="30s", help="for each replica, at most 10m (default 30s)"
    )
    parser.add_argument("--skip-unhealthy", action="store_true", help="leave out replicas that cannot take it now")
    add_output_flag(parser, output.FORMATS)


async def _run(verb: str, args: argparse.Namespace) -> int:
    command = f"omnictl {verb}"
    names = [part.strip() for text in args.stage for part in text.split(",") if part.strip()]
    if names and args.all_stages:
        raise usage_error("--stage and --all-stages: give one of the two", command)
    if not names and not args.all_stages:
        raise usage_error("--stage STAGE or --all-stages: one of the two is needed", command)
    limit_s = seconds(args.replica_timeout, "--replica-timeout")
    if limit_s > _MAX_S:
        raise usage_error(f"--replica-timeout: must be at most {_MAX_S:g} s, got {args.replica_timeout!r}", command)
    request = admin_service_pb2.CollectiveRpcRequest(
        method=_method(verb, args),
        timeout=to_duration(limit_s),
        request_id=connect.request_id(),
        skip_unhealthy=args.skip_unhealthy,
    )
    if (level := getattr(args, "level", None)) is not None:
        if level not in ("1", "2"):
            raise usage_error(f"--level: must be 1 or 2, got {level!r}", command)
        request.args["level"] = int(level)
    async with connect.control_plane(settings_of(args)) as plane:
        plan = await _plan(plane, args.pipeline, command)
        request.pipeline = plan.name
        request.stage_ids.extend(_stage_ids(plan, names) if names else ())
        response: admin_service_pb2.CollectiveRpcResponse = await plane.call(
            plane.admin.CollectiveRpc, request, limit_s + _MARGIN_S
        )
    return _show(response, plan, args.output)


def _method(verb: str, args: argparse.Namespace) -> types_pb2.ControlMethod.ValueType:
    if verb == "profile":
        starts = args.action == "start"
        return types_pb2.CONTROL_METHOD_START_PROFILE if starts else types_pb2.CONTROL_METHOD_STOP_PROFILE
    return {
        "sleep": types_pb2.CONTROL_METHOD_SLEEP,
        "wake": types_pb2.CONTROL_METHOD_WAKE_UP,
        "reset-cache": types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE,
    }[verb]


async def _plan(plane: connect.ControlPlane, name: str, command: str) -> pipeline_pb2.Pipeline:
    if name:
        return await plane.get_pipeline(name)
    plans = await plane.list_pipelines()
    if len(plans) != 1:
        known = ", ".join(plan.name for plan in plans) or "none"
        raise usage_error(f"PIPELINE: needed unless there is exactly one; there are: {known}", command)
    return plans[0]


def _stage_ids(plan: pipeline_pb2.Pipeline, names: list[str]) -> list[int]:
    """The ids behind ids, names and PIPELINE/STAGE, each once. Raises ``NotFoundError`` for the first unknown one."""
    ids = [refs.stage_id_of(plan, name.removeprefix(f"{plan.name}/")) for name in names]
    return sorted(set(ids))


def _show(response: admin_service_pb2.CollectiveRpcResponse, plan: pipeline_pb2.Pipeline, form: str) -> int:
    results = list(response.results)
    failed = [result for result in results if result.status.code]
    if form in ("json", "yaml"):
        output.print_structured(
            {"results": [_to_json(result) for result in results], "revision": str(response.revision)}, form
        )
    elif form == "name":
        for result in results:
            if not result.status.code:
                print(rows.replica_name(result.replica))
    elif results:
        print(output.table(columns(refs.names([plan])), results, wide=form == "wide"))
    if not results:
        print("no replica to call", file=sys.stderr)
    if not failed:
        return 0
    print(f"error: {len(failed)} of {output.plural(len(results), 'replica')} failed", file=sys.stderr)
    return errors.from_status(failed[0].status).row.exit_code


def columns(stage_names: dict[tuple[str, int], str]) -> list[Column[admin_service_pb2.ReplicaResult]]:
    """Columns of the results."""

    def stage(result: admin_service_pb2.ReplicaResult) -> str:
        ref = result.replica.stage
        return stage_names.get((ref.pipeline, ref.stage_id), "")

    return [
        Column("REPLICA", lambda r: rows.replica_name(r.replica)),
        Column("STAGE", stage),
        Column("RESULT", lambda r: errors.from_status(r.status).code.name if r.status.code else "done"),
        Column("DETAIL", _detail),
        Column("EPOCH", lambda r: str(r.replica.epoch), wide=True),
    ]


def _detail(result: admin_service_pb2.ReplicaResult) -> str:
    if result.status.code:
        return failures.one_line(errors.from_status(result.status).message)
    values = output.whole_numbers(json_format.MessageToDict(result.result))
    return failures.one_line(", ".join(f"{key}={_text(value)}" for key, value in values.items()))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _to_json(result: admin_service_pb2.ReplicaResult) -> dict[str, Any]:
    error = errors.from_status(result.status) if result.status.code else None
    return {
        "replica": output.to_dict(result.replica),
        "code": error.code.name if error is not None else "OK",
        "reason": error.reason if error is not None else "",
        "message": error.message if error is not None else "",
        "result": output.whole_numbers(json_format.MessageToDict(result.result)),
    }
