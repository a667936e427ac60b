"""What other control planes have written a moment ago, and the table may not show yet.

Who was just answered by another one must not be told here that there is no such pipeline, and a verb on a whole stage
must not miss a replica that has registered there.
"""

from __future__ import annotations

from typing import Final

from control_plane import codec, compat
from control_plane.etcd import EtcdClient, KeyValue
from control_plane.keys import StageKey
from control_plane.table import Table
from omni.v1 import pipeline_pb2
from omnicore.errors import NotFoundError, UnavailableError

_CATCH_UP_S: Final = 10.0


async def catch_up(client: EtcdClient, table: Table, pipeline: str) -> None:
    """Wait until the table has the plan and the replicas that were written before this call; what left a moment ago it
    may still show. Raises ``UnavailableError`` if etcd is away, or its watch too far behind.

    The revision of the store is none to wait for: it moves with the keys of others, too, which no table hears of."""
    plan = await client.get(table.keys.pipeline(pipeline))
    replicas = await client.get_prefix(f"{table.keys.replicas}{pipeline}/")
    written = [kv.mod_revision for kv in replicas.kvs] + ([plan.mod_revision] if plan is not None else [])
    await require_revision(table, max(written, default=0))


async def require_revision(table: Table, revision: int) -> None:
    """Wait until the table knows whatever was written up to ``revision``. Raises ``UnavailableError``."""
    if not await table.wait_revision(revision, _CATCH_UP_S):
        raise UnavailableError(
            f"this control plane is at revision {table.revision} and does not catch up with {revision}: etcd sends it "
            "nothing; ask another one, or retry",
            reason="BEHIND",
            metadata={"revision": table.revision, "wanted": revision},
            retry_after_s=1.0,
        )


async def find_plan(client: EtcdClient, table: Table, name: str) -> pipeline_pb2.Pipeline:
    """The plan of that name, as ``Table.pipeline`` has it. Raises ``NotFoundError`` naming those that exist,
    ``RecordError`` if it cannot be read. While etcd is away, the last view answers."""
    plan = table.pipeline(name)
    if plan is None:
        try:
            kv = await client.get(table.keys.pipeline(name))
        except UnavailableError:
            if not table.stale:
                raise
            kv = None
        if kv is not None:
            stored = read_plan(kv)
            await table.wait_revision(kv.mod_revision)
            plan = table.pipeline(name) or stored
    if plan is None:
        raise no_plan(table, name)
    return plan


async def find_stage(client: EtcdClient, table: Table, stage: StageKey) -> pipeline_pb2.Stage:
    """A stage of a plan. Raises as ``find_plan``, and ``NotFoundError`` naming the stages that there are."""
    try:
        return compat.find_stage(await find_plan(client, table, stage.pipeline), stage.stage_id)
    except NotFoundError as error:
        if error.reason != "STAGE_NOT_FOUND":
            raise
    await catch_up(client, table, stage.pipeline)  # the plan may have been applied anew elsewhere
    return compat.find_stage(await find_plan(client, table, stage.pipeline), stage.stage_id)


def no_plan(table: Table, name: str) -> NotFoundError:
    """The error for a pipeline that does not exist, naming those that do."""
    return compat.no_pipeline(name, (known.name for known in table.pipelines()))


def read_plan(kv: KeyValue) -> pipeline_pb2.Pipeline:
    """The plan that ``kv`` holds. Raises ``RecordError`` naming the key and what to do."""
    try:
        plan = codec.decode_pipeline(kv.value)
    except codec.RecordError as error:
        raise codec.RecordError(
            f"the plan in etcd key {kv.key} cannot be read ({compat.shorten(error.message)}): apply the pipeline "
            "again, or delete it",
            metadata={"key": kv.key},
        ) from error
    plan.name = kv.key.rpartition("/")[2]
    return plan
