"""Stages whose requests run more than once, for classifier-free guidance."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.deploy.faults import Faults
from control_plane.deploy.graph import Graph
from control_plane.deploy.stages import StageDraft
from omni.v1 import pipeline_pb2
from omnicore.durations import to_duration


def check_companions(drafts: Sequence[StageDraft], graph: Graph, async_chunk: bool, faults: Faults) -> None:
    """Companions have a prompt, somebody who reads what they make, and no chunks that flow."""
    consumers = {pair[1] for pair in graph.pairs}
    producers = {pair[0] for pair in graph.pairs}
    for draft in drafts:
        if "companions" not in draft.fields:
            continue
        place = draft.place.at("companions")
        roles = draft.fields["companions"].get("roles", [])
        if len(set(roles)) < len(roles):
            faults.error(place.at("roles"), "a role is named twice")
        if draft.stage_id in consumers:
            faults.error(place, "only for a stage that requests enter at: their prompts are made of the request's")
        if draft.stage_id not in producers:
            faults.error(place, "no edge leaves the stage: nobody reads what companions make")
        if async_chunk:
            faults.error(place, "needs async_chunk: false at the top level: bundles are handed over when complete")


def companion_plan(draft: StageDraft) -> pipeline_pb2.CompanionPlan | None:
    """As the plan says it; None for a stage without."""
    said = draft.fields.get("companions")
    if said is None:
        return None
    plan = pipeline_pb2.CompanionPlan(
        roles=said["roles"],
        only_if_negative=said.get("only_if_negative", False),
        max_tokens=said.get("max_tokens", 0),
    )
    if "timeout_s" in said:
        plan.timeout.CopyFrom(to_duration(said["timeout_s"]))
    return plan
