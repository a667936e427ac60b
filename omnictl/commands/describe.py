"""``omnictl describe``: everything about one pipeline or replica, for reading."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterable

from google.protobuf import json_format
from google.protobuf.message import Message

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import NotFoundError
from omnictl import connect, output, refs, rows
from omnictl.commands.base import Commands, settings_of

Pairs = Iterable[tuple[str, str]]


def add(commands: Commands) -> None:
    """Add ``describe``."""
    parser = commands.add(
        "describe",
        _run,
        description="Show everything about a pipeline or a replica.",
        examples=("omnictl describe pipeline speech", "omnictl describe replica speech/talker/0"),
    )
    parser.add_argument(
        "kind",
        metavar="KIND",
        choices=("pipeline", "pipelines", "pl", "replica", "replicas", "rp"),
        help="pipeline (pl) or replica (rp)",
    )
    parser.add_argument("name", metavar="NAME", help="PIPELINE, or PIPELINE/STAGE/REPLICA")


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    if args.kind in ("pipeline", "pipelines", "pl"):
        selector = refs.parse_selector(args.name, depth=1, what="NAME")
        async with connect.control_plane(settings) as plane:
            plan = await plane.get_pipeline(selector.pipeline)
            replicas = (await plane.list_replicas(selector.pipeline)).replicas
        print(describe_pipeline(plan, replicas))
        return 0
    selector = refs.parse_replica(args.name)
    async with connect.control_plane(settings) as plane:
        plan = await plane.get_pipeline(selector.pipeline)
        stage_id = refs.stage_id_of(plan, selector.stage)
        table = await plane.list_replicas(selector.pipeline, stage_id)
    for replica in table.replicas:
        if replica.ref.replica_id == selector.replica_id:
            print(describe_replica(replica, plan, time.time()))
            return 0
    raise NotFoundError(f"no replica {selector}", reason="REPLICA_NOT_FOUND", metadata={"replica": selector})


def describe_pipeline(plan: pipeline_pb2.Pipeline, replicas: list[types_pb2.Replica]) -> str:
    """The plan as indented text."""
    tasks = ", ".join(f"{task} → {plan.entrypoints[task]}" for task in sorted(plan.entrypoints))
    head = [
        ("Name", plan.name),
        ("Generation", str(plan.generation)),
        ("Source", plan.source_sha256),
        ("Mode", "async-chunk" if plan.async_chunk else "sync"),
        ("Tasks", tasks),
    ]
    parts = [_pairs(head)]
    for row in rows.stage_rows([plan], replicas):
        stage = row.stage
        pairs = [
            ("Engine", stage.engine),
            ("Model", stage.model),
            ("Replicas", f"{row.routable} routable, {len(row.replicas)} registered, {stage.num_replicas} planned"),
            ("Tensor parallel", str(stage.tensor_parallel_size)),
            ("Devices", ", ".join(stage.devices)),
            ("Output", stage.final_output_type if stage.final_output else "to other stages only"),
            ("Max sequences", str(stage.max_num_seqs or "engine's own")),
            ("Sampling", _compact(stage.default_sampling_params)),
            ("Engine options", _compact(stage.engine_args)),
            ("Config", stage.config_sha256),
        ]
        parts.append(f"Stage {stage.stage_id} ({stage.name}):\n{_pairs(pairs, indent=2)}")
    if plan.edges:
        parts.append("Edges:\n" + "\n".join(f"  {_edge(edge)}" for edge in plan.edges))
    return "\n".join(parts)


def describe_replica(replica: types_pb2.Replica, plan: pipeline_pb2.Pipeline, now_s: float) -> str:
    """The record as indented text."""
    names = refs.names([plan])
    since = replica.register_time.ToDatetime(datetime.UTC).isoformat(timespec="seconds")
    registered_s = replica.register_time.ToNanoseconds() / 1e9
    where, shared = replica.placement, replica.fingerprint
    parts = [
        _pairs(
            [
                ("Name", rows.replica_name(replica.ref)),
                ("Stage", names.get((replica.ref.stage.pipeline, replica.ref.stage.stage_id), "")),
                ("State", rows.state_text(replica)),
                ("Routable", "yes" if rows.is_routable(replica) else "no"),
                ("Endpoint", replica.endpoint),
                ("Epoch", str(replica.ref.epoch)),
                ("Instance", replica.instance_uuid),
                ("Engine", replica.engine),
                ("Registered", f"{since} ({output.age(now_s - registered_s)} ago)"),
            ]
        ),
        "Placement:\n"
        + _pairs(
            [
                ("Host", where.host),
                ("Pid", str(where.pid or "")),
                ("Devices", ", ".join(where.devices)),
                ("Domain", where.topology_domain),
                ("Boot id", where.boot_id),
            ],
            indent=2,
        ),
        "Fingerprint:\n"
        + _pairs(
            [
                ("Model", shared.model),
                ("Config", shared.config_sha256),
                ("Tensor parallel", str(shared.tensor_parallel_size)),
                ("KV layout", shared.kv_layout),
                ("Protocol", shared.protocol_version),
            ],
            indent=2,
        ),
    ]
    if replica.HasField("load"):
        load = replica.load
        pairs = [
            ("Running", str(load.running)),
            ("Waiting", str(load.waiting)),
            ("KV in use", f"{load.kv_usage_ratio:.1%}"),
            ("Pool free", f"{load.transfer_pool_free_bytes / 2**20:.1f} MiB"),
            ("Transfers", str(load.inflight_transfers)),
        ]
        parts.append("Load:\n" + _pairs(pairs, indent=2))
    if replica.connectors:
        offers = [
            f"  {offer.name}{f' at {offer.address}' if offer.address else ''}{'' if offer.healthy else ' (unhealthy)'}"
            for offer in replica.connectors
        ]
        parts.append("Connectors, best first:\n" + "\n".join(offers))
    return "\n".join(parts)


def _edge(edge: pipeline_pb2.Edge) -> str:
    cut = pipeline_pb2.ChunkBy.Name(edge.chunk_by).removeprefix("CHUNK_BY_").lower()
    window = "unlimited" if edge.window_size < 0 else str(edge.window_size)
    inflight = str(edge.max_inflight or "unlimited")
    connector = edge.connector or "auto"
    return f"{edge.from_stage} → {edge.to_stage}  by {cut}, window {window}, inflight {inflight}, connector {connector}"


def _compact(message: Message) -> str:
    values = json_format.MessageToDict(message, preserving_proto_field_name=True)
    shown = {key: json.dumps(output.whole_numbers(value), ensure_ascii=False) for key, value in sorted(values.items())}
    return ", ".join(f"{key}={value}" for key, value in shown.items())


def _pairs(pairs: Pairs, indent: int = 0) -> str:
    shown = [(key, value or "-") for key, value in pairs]
    width = max(len(key) for key, _ in shown) + 1
    return "\n".join(f"{' ' * indent}{key + ':':<{width}}  {value}" for key, value in shown)
