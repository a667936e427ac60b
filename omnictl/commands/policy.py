"""``omnictl policy get|set|unset``: how gateways choose among the replicas of a stage."""

from __future__ import annotations

import argparse

from omni.v1 import admin_service_pb2, pipeline_pb2, types_pb2
from omnicore.policies import BALANCING_POLICIES
from omnictl import connect, output, refs, rows
from omnictl.commands.base import ACTION_FORMATS, Commands, add_output_flag, settings_of

_KNOWN = ", ".join(BALANCING_POLICIES)


def add(commands: Commands) -> None:
    """Add ``policy``."""
    group = commands.group(
        "policy",
        description="Show or change how gateways choose among the replicas of a stage.",
        examples=(
            "omnictl policy get",
            "omnictl policy set speech/talker round-robin",
            "omnictl policy unset speech/1",
        ),
        notes=(
            f"Policies: {_KNOWN}.\n"
            "A change holds from a gateway's next choice on and outlives restarts; where none is\n"
            "set, each gateway uses the one of its flag --balancing-policy."
        ),
    )
    show = group.add(
        "get",
        _get,
        description="Show the policies that are set.",
        examples=("omnictl policy get", "omnictl policy get speech -o json"),
        notes="POLICY is '-' where none is set: each gateway then uses the one of its flag.",
    )
    show.add_argument("name", metavar="NAME", nargs="?", help="PIPELINE or PIPELINE/STAGE; all, if left out")
    show.completes["name"] = "stage"
    add_output_flag(show, output.FORMATS)
    change = group.add(
        "set",
        _set,
        description="Set the policy of stages.",
        examples=("omnictl policy set speech/talker round-robin", "omnictl policy set speech least-queue-length"),
        notes=f"Policies: {_KNOWN}.\nPIPELINE alone sets every stage of it.",
    )
    change.add_argument("name", metavar="STAGE", help="PIPELINE/STAGE, or PIPELINE for every stage")
    change.completes["name"] = "stage"
    change.add_argument("policy", metavar="POLICY", choices=BALANCING_POLICIES, help="see below")
    add_output_flag(change, ACTION_FORMATS)
    reset = group.add(
        "unset",
        _set,
        description="Take the policy of stages back: gateways use their own.",
        examples=("omnictl policy unset speech/talker",),
    )
    reset.add_argument("name", metavar="STAGE", help="PIPELINE/STAGE, or PIPELINE for every stage")
    reset.completes["name"] = "stage"
    reset.set_defaults(policy="")
    add_output_flag(reset, ACTION_FORMATS)


async def _get(args: argparse.Namespace) -> int:
    selector = refs.parse_selector(args.name, depth=2, what="NAME")
    async with connect.control_plane(settings_of(args)) as plane:
        plans = [await plane.get_pipeline(selector.pipeline)] if selector.pipeline else await plane.list_pipelines()
    stages = [
        rows.PolicyRow(plan, stage)
        for plan in plans
        for stage in plan.stages
        if not selector.stage or stage.stage_id == refs.stage_id_of(plan, selector.stage)
    ]
    output.print_records(
        rows.policy_columns(),
        stages,
        args.output,
        kind="policies",
        name=lambda s: s.name,
        to_json=lambda s: s.to_json(),
    )
    return 0


async def _set(args: argparse.Namespace) -> int:
    selector = refs.parse_stage_or_pipeline(args.name)
    report = output.Report(args.output)
    async with connect.control_plane(settings_of(args)) as plane:
        plan = await plane.get_pipeline(selector.pipeline)
        try:
            for stage in _chosen(plan, selector.stage):
                request = admin_service_pb2.SetBalancingPolicyRequest(
                    stage=types_pb2.StageRef(pipeline=plan.name, stage_id=stage.stage_id),
                    policy=args.policy,
                    request_id=connect.request_id(),
                )
                answer: admin_service_pb2.SetBalancingPolicyResponse = await plane.call(
                    plane.admin.SetBalancingPolicy, request
                )
                before = answer.previous_policy or "unset"
                what = f"policy {args.policy or 'unset'}" + (f" (was {before})" if before != args.policy else "")
                report.done(f"{plan.name}/{stage.stage_id}", what, output.to_dict(answer))
        finally:
            report.end()
    return 0


def _chosen(plan: pipeline_pb2.Pipeline, stage: str) -> list[pipeline_pb2.Stage]:
    if not stage:
        return list(plan.stages)
    stage_id = refs.stage_id_of(plan, stage)
    return [candidate for candidate in plan.stages if candidate.stage_id == stage_id]
