"""Plans: applying, reading and deleting them. Reading deploy files is ``control_plane.deploy``'s."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Final

from control_plane import codec, paging, validate
from control_plane.answers import Answer, check_request_id, log_fields
from control_plane.deploy import plan_pipeline
from control_plane.etcd import (
    EtcdClient,
    KeyValue,
    WriteOutcomeUnknown,
    mod_revision_is,
    op_delete,
    op_delete_prefix,
    op_put,
)
from control_plane.keys import MAX_NAME_LENGTH, NAME_RULE, is_name
from control_plane.plans import find_plan, no_plan
from control_plane.table import Table
from omni.v1 import pipeline_pb2
from omni.v1 import pipeline_service_pb2 as pb
from omnicore.errors import ConflictError, InvalidRequestError
from omnicore.log import get_logger

_log = get_logger(__name__)

_DEFAULT_PAGE_SIZE: Final = 100
_MAX_CONFLICTS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """The outcome of an apply."""

    pipeline: pipeline_pb2.Pipeline
    changed: bool
    warnings: tuple[str, ...]
    revision: int


class Pipelines:
    """The plans of one cluster."""

    def __init__(self, client: EtcdClient, table: Table) -> None:
        self._client = client
        self._table = table
        self._keys = table.keys

    async def apply(self, request: pb.ApplyPipelineRequest) -> Applied:
        """Plan a deploy file and store the plan, unless it is in force already. Raises ``InvalidRequestError``."""
        _check_request(request)
        # A file of a megabyte takes a while to read; beats must not wait for it.
        result = await asyncio.to_thread(
            plan_pipeline, request.deploy_yaml, name=request.name, engine=request.engine, platform=request.platform
        )
        plan, warnings = result.pipeline, tuple(result.warnings)
        if not is_name(plan.name):
            raise InvalidRequestError.field("name", f"must be {NAME_RULE}, got {validate.shown(plan.name)}")
        self._table.require_loaded()
        path = self._keys.pipeline(plan.name)
        for _ in range(_MAX_CONFLICTS):
            kv = await self._client.get(path)
            stored = _readable(kv)
            plan.generation = stored.generation if stored is not None else 0
            if kv is not None and stored == codec.decode_pipeline(codec.encode_pipeline(plan)):
                await self._table.wait_revision(kv.mod_revision)
                return Applied(plan, changed=False, warnings=warnings, revision=kv.mod_revision)
            plan.generation += 1
            if request.validate_only:
                return Applied(plan, changed=True, warnings=warnings, revision=self._table.revision)
            try:
                written = await self._client.txn(
                    [mod_revision_is(path, kv.mod_revision if kv is not None else 0)],
                    [op_put(path, codec.encode_pipeline(plan))],
                )
            except WriteOutcomeUnknown:
                continue  # if it was applied, the next round finds it in force
            if written.succeeded:
                _log.info(
                    "pipeline applied",
                    pipeline=plan.name,
                    generation=plan.generation,
                    stages=len(plan.stages),
                    **log_fields(request.request_id),
                )
                await self._table.wait_revision(written.revision)
                return Applied(plan, changed=True, warnings=warnings, revision=written.revision)
        raise ConflictError(
            f"pipeline {plan.name!r} is applied by others all the time",
            reason="PIPELINE_CONTENDED",
            metadata={"pipeline": plan.name},
        )

    async def get(self, name: str) -> pipeline_pb2.Pipeline:
        """One plan. Raises what ``find_plan`` does."""
        _check_name(name)
        self._table.require_loaded()
        return await find_plan(self._client, self._table, name)

    def page(self, size: int, token: str) -> tuple[list[pipeline_pb2.Pipeline], str]:
        """One page of plans by name, and the token of the next page."""
        after = paging.decode_token(token, (str,)) if token else ("",)
        self._table.require_loaded()
        wanted = paging.page_size(size, _DEFAULT_PAGE_SIZE)
        rest = [pipeline for pipeline in self._table.pipelines() if (pipeline.name,) > after]
        return rest[:wanted], paging.encode_token(rest[wanted - 1].name) if len(rest) > wanted else ""

    async def delete(self, request: pb.DeletePipelineRequest) -> int:
        """Remove a plan and return the revision. Its replicas are told to drain by their next beats."""
        name = request.name
        _check_name(name)
        faults = validate.Faults()
        check_request_id(faults, request.request_id)
        faults.raise_if_any()
        self._table.require_loaded()
        kind = pb.DeletePipelineResponse
        async with Answer(self._client, self._keys, "DeletePipeline", request.request_id, request, kind) as answer:
            revision = await self._delete(name, answer)
        _log.info("pipeline deleted", pipeline=name, **log_fields(request.request_id))
        await self._table.wait_revision(revision)
        return revision

    async def _delete(self, name: str, answer: Answer[pb.DeletePipelineResponse]) -> int:
        path = self._keys.pipeline(name)
        repeated = False
        while True:
            try:
                known, (kv,) = await answer.look(path)
                if known is not None:
                    return known.revision
                if kv is None and not repeated:
                    raise no_plan(self._table, name)
                if kv is None:
                    return self._table.revision  # by our own first try, whose answer was lost
                result = await self._client.txn(
                    [mod_revision_is(path, kv.mod_revision), *answer.conditions],
                    # Not those that the table knows of: it may not have heard of one that was set a moment ago.
                    [
                        op_delete(path),
                        op_delete_prefix(self._keys.policies_of(name)),
                        *answer.ops(pb.DeletePipelineResponse()),
                    ],
                )
            except WriteOutcomeUnknown:
                repeated = True
                continue
            if result.succeeded:
                return result.revision


def _check_name(name: str) -> None:
    if not is_name(name):
        raise InvalidRequestError.field("name", f"must be {NAME_RULE}, got {validate.shown(name)}")


def _check_request(request: pb.ApplyPipelineRequest) -> None:
    faults = validate.Faults()
    if not request.deploy_yaml.strip():
        faults.add("deploy_yaml", "required: the text of a deploy file")
    for field in ("name", "engine", "platform"):
        if len(value := getattr(request, field)) > MAX_NAME_LENGTH:
            faults.add(field, f"at most {MAX_NAME_LENGTH} characters, got {len(value)}")
    check_request_id(faults, request.request_id)
    faults.raise_if_any()


def _readable(kv: KeyValue | None) -> pipeline_pb2.Pipeline | None:
    if kv is None:
        return None
    try:
        return codec.decode_pipeline(kv.value)
    except codec.RecordError as error:
        _log.warning("unreadable plan is replaced", key=kv.key, error=error)
        return None
