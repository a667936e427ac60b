"""Names that the shell may complete a word with: those of the cluster and of the context file."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from omni.v1 import inspect_service_pb2, pipeline_pb2, types_pb2
from omnicore.errors import OmniError
from omnictl import connect, rows
from omnictl import context as contexts
from omnictl.settings import Settings

# A key press waits for it.
_TIMEOUT_S = 1.5
_MAX_KEYS = 200
_DEPTHS = {"pipelines": 1, "pipeline": 1, "pl": 1, "edges": 1, "edge": 1, "ed": 1}
_STAGE_KINDS = ("stages", "stage", "st", "policies", "policy", "po")


async def find(settings: Settings, kind: str, words: Sequence[str]) -> list[str]:
    """What may stand for the last of ``words``, which is a ``kind``: "pipeline", "stage", "replica", "name" (of the
    kind that the first word says), "stage-of" (of the pipeline that the first word says), "key" or "context".

    Empty where nothing is known: also where the cluster does not answer at once.
    """
    if kind == "context":
        known = contexts.load_or_none(settings.context_path) or contexts.Contexts()
        return sorted(known.contexts)
    quick = dataclasses.replace(settings, timeout_s=_TIMEOUT_S)
    try:
        async with asyncio.timeout(2 * _TIMEOUT_S), connect.control_plane(quick) as plane:
            return await _ask(plane, kind, [*words] or [""])
    except (OmniError, TimeoutError):
        return []


async def _ask(plane: connect.ControlPlane, kind: str, words: list[str]) -> list[str]:
    current = words[-1]
    if kind == "key":
        request = inspect_service_pb2.ListKeysRequest(prefix=current, keys_only=True, page_size=_MAX_KEYS)
        page: inspect_service_pb2.ListKeysResponse = await plane.call(plane.inspect.ListKeys, request)
        keys = [key.key for key in page.keys]
        # Below the cluster's prefix, which is the first three parts, as the user began to type them.
        return keys if current.startswith("/") else [key.split("/", 4)[-1] for key in keys]
    depth = {"pipeline": 1, "stage": 2, "stage-of": 2}.get(kind, 3)
    if kind == "name":
        depth = 2 if words[0] in _STAGE_KINDS else _DEPTHS.get(words[0], 3)
    plans = await plane.list_pipelines()
    if kind == "stage-of":
        chosen = [plan for plan in plans if plan.name in words[:-1]] or (plans if len(plans) == 1 else [])
        return [stage.name for plan in chosen for stage in plan.stages]
    replicas = (await plane.list_replicas()).replicas if depth == 3 and "/" in current else []
    return names(plans, replicas, current, depth)


def names(
    plans: Sequence[pipeline_pb2.Pipeline], replicas: Sequence[types_pb2.Replica], current: str, depth: int
) -> list[str]:
    """The next part of a name PIPELINE/STAGE/REPLICA of at most ``depth`` parts of which ``current`` was typed; a "/"
    at the end where more may follow. Stages are offered by name, or by id if the typed part is a number."""
    parts = current.split("/")
    if len(parts) == 1:
        return [plan.name + ("/" if depth > 1 else "") for plan in plans]
    plan = next((plan for plan in plans if plan.name == parts[0]), None)
    if plan is None or len(parts) > depth:
        return []
    if len(parts) == 2:
        words = [str(s.stage_id) if parts[1].isdecimal() else s.name for s in plan.stages]
        return [f"{plan.name}/{word}{'/' if depth > 2 else ''}" for word in words]
    stage_ids = [s.stage_id for s in plan.stages if parts[1] in (s.name, str(s.stage_id))]
    found = [r for r in replicas if r.ref.stage.pipeline == plan.name and r.ref.stage.stage_id in stage_ids]
    return [f"{plan.name}/{parts[1]}/{rows.replica_name(r.ref).rpartition('/')[2]}" for r in found]
