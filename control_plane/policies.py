"""How gateways choose among the replicas of a stage: an operator's word, kept beside the plan and shown in it.

A policy is written only while its stage exists, in a transaction that compares the plan; deleting the plan deletes its
policies. Gateways get it with the plan (``Stage.balancing_policy``).
"""

from __future__ import annotations

from typing import Final

from control_plane import codec, compat, validate
from control_plane.answers import Answer, check_request_id, log_fields
from control_plane.etcd import EtcdClient, KeyValue, WriteOutcomeUnknown, mod_revision_is, op_delete, op_put
from control_plane.plans import no_plan, read_plan
from control_plane.table import Table
from omni.v1 import admin_service_pb2 as pb
from omnicore.errors import ConflictError
from omnicore.log import get_logger
from omnicore.policies import BALANCING_POLICIES

_log = get_logger(__name__)

_ATTEMPTS: Final = 16


async def set_policy(
    client: EtcdClient, table: Table, request: pb.SetBalancingPolicyRequest
) -> pb.SetBalancingPolicyResponse:
    """Set the policy of a stage, or take it back. Raises ``InvalidRequestError`` naming the known policies, and
    ``NotFoundError`` for a stage that no plan has."""
    _check(request)
    table.require_loaded()
    stage, keys = validate.stage_key(request.stage), table.keys
    path, plan_path = keys.policy(stage), keys.pipeline(stage.pipeline)
    kind = pb.SetBalancingPolicyResponse
    lost: str | None = None
    async with Answer(client, keys, "SetBalancingPolicy", request.request_id, request, kind) as answer:
        for _ in range(_ATTEMPTS):
            known, (plan, before) = await answer.look(plan_path, path)
            if known is not None:
                return known
            if plan is None:
                raise no_plan(table, stage.pipeline)
            compat.find_stage(read_plan(plan), stage.stage_id)
            response = kind(previous_policy=_readable(before))
            if lost is not None and response.previous_policy == request.policy:
                response.previous_policy = lost  # it is in force by our own try, whose outcome was lost
            change = op_put(path, codec.encode_policy(request.policy)) if request.policy else op_delete(path)
            try:
                result = await client.txn(
                    [
                        mod_revision_is(plan_path, plan.mod_revision),
                        mod_revision_is(path, before.mod_revision if before is not None else 0),
                        *answer.conditions,
                    ],
                    [change, *answer.ops(response)],
                )
            except WriteOutcomeUnknown:
                lost = response.previous_policy
                continue  # setting it twice is setting it once
            if result.succeeded:
                _log.info(
                    "balancing policy set",
                    stage=stage,
                    policy=request.policy or "none: each gateway's own",
                    previous=response.previous_policy,
                    **log_fields(request.request_id),
                )
                await table.wait_revision(result.revision)
                response.revision = result.revision
                return response
    raise ConflictError(f"the policy of stage {stage} is changed by others all the time", reason="POLICY_CONTENDED")


def _check(request: pb.SetBalancingPolicyRequest) -> None:
    faults = validate.Faults()
    validate.stage_ref(faults, "stage", request.stage, present=request.HasField("stage"))
    if request.policy and request.policy not in BALANCING_POLICIES:
        known = ", ".join(BALANCING_POLICIES)
        faults.add("policy", f"unknown policy {validate.shown(request.policy)}; known: {known}, or empty for none")
    check_request_id(faults, request.request_id)
    faults.raise_if_any()


def _readable(kv: KeyValue | None) -> str:
    if kv is None:
        return ""
    try:
        return codec.decode_policy(kv.value)
    except codec.RecordError as error:
        _log.warning("unreadable policy is replaced", key=kv.key, error=error)
        return ""
