"""``omnictl describe``: everything about one pipeline, stage or replica, for reading."""

from __future__ import annotations

import argparse
import datetime
import json
import textwrap
import time
from collections.abc import Iterable

from google.protobuf import json_format
from google.protobuf.message import Message

from omni.v1 import inspect_service_pb2, pipeline_pb2, types_pb2
from omnicore.durations import to_seconds
from omnicore.errors import NotFoundError, OmniError
from omnictl import connect, failures, load, output, refs, rows
from omnictl.commands.base import Commands, settings_of

Pairs = Iterable[tuple[str, str]]


_KINDS = {
    "pipeline": ("pipeline", "pipelines", "pl"),
    "stage": ("stage", "stages", "st"),
    "replica": ("replica", "replicas", "rp"),
}
_PARSE = {"pipeline": refs.parse_pipeline, "stage": refs.parse_stage, "replica": refs.parse_replica}


def add(commands: Commands) -> None:
    """Add ``describe``."""
    parser = commands.add(
        "describe",
        _run,
        description="Show everything about a pipeline, a stage or a replica.",
        examples=(
            "omnictl describe pipeline speech",
            "omnictl describe stage speech/talker",
            "omnictl describe replica speech/talker/0",
        ),
        notes="For reading; 'omnictl get KIND NAME -o json' is for programs.",
    )
    parser.add_argument(
        "kind",
        metavar="KIND",
        choices=tuple(word for words in _KINDS.values() for word in words),
        help="pipeline (pl), stage (st) or replica (rp)",
    )
    parser.add_argument("name", metavar="NAME", help="PIPELINE, PIPELINE/STAGE or PIPELINE/STAGE/REPLICA")
    parser.completes |= {"kind": "=".join(["", *_KINDS]), "name": "name"}


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    kind = next(kind for kind, words in _KINDS.items() if args.kind in words)
    selector = _PARSE[kind](args.name)
    async with connect.control_plane(settings) as plane:
        if kind == "pipeline":
            plan = await plane.get_pipeline(selector.pipeline)
            print(describe_pipeline(plan, (await plane.list_replicas(selector.pipeline)).replicas))
        elif kind == "stage":
            plan = await plane.get_pipeline(selector.pipeline)
            stage_id = refs.stage_id_of(plan, selector.stage)
            print(describe_stage(plan, stage_id, (await plane.list_replicas(selector.pipeline)).replicas, time.time()))
        else:
            print(await _replica(plane, selector))
    return 0


async def _replica(plane: connect.ControlPlane, selector: refs.Selector) -> str:
    plan = await plane.get_pipeline(selector.pipeline)
    stage_id = refs.stage_id_of(plan, selector.stage)
    table = await plane.list_replicas(selector.pipeline, stage_id)
    for replica in table.replicas:
        if replica.ref.replica_id == selector.replica_id:
            return describe_replica(replica, plan, time.time(), await _beat(plane, replica))
    raise NotFoundError(f"no replica {selector}", reason="REPLICA_NOT_FOUND", metadata={"replica": selector})


async def _beat(plane: connect.ControlPlane, replica: types_pb2.Replica) -> str:
    """When it last beat, as far as the control plane that was asked knows."""
    request = inspect_service_pb2.ListPulsesRequest(pipeline=replica.ref.stage.pipeline)
    try:
        answer: inspect_service_pb2.ListPulsesResponse = await plane.call(plane.inspect.ListPulses, request)
    except OmniError as error:
        return f"unknown: {failures.one_line(error.message)}"
    for pulse in answer.pulses:
        if pulse.replica == replica.ref:
            often = f", fell silent {output.plural(pulse.suspicions, 'time')} lately" if pulse.suspicions else ""
            return f"{load.beat_text(to_seconds(pulse.beat_age))} ago at {plane.address}{often}"
    return f"not at {plane.address}: at another control plane, or never"


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
    parts += [
        f"Stage {row.stage.stage_id} ({row.stage.name}):\n{_pairs(_stage(row), indent=2)}"
        for row in rows.stage_rows([plan], replicas)
    ]
    if plan.edges:
        parts.append("Edges:\n" + "\n".join(f"  {_edge(edge)}" for edge in plan.edges))
    return "\n".join(parts)


def describe_stage(plan: pipeline_pb2.Pipeline, stage_id: int, replicas: list[types_pb2.Replica], now_s: float) -> str:
    """A stage with its edges and replicas, as indented text."""
    (row,) = (row for row in rows.stage_rows([plan], replicas) if row.stage.stage_id == stage_id)
    parts = [_pairs([("Name", row.name), ("Stage", row.stage.name), *_stage(row)])]
    edges = [edge for edge in plan.edges if stage_id in (edge.from_stage, edge.to_stage)]
    if edges:
        parts.append("Edges:\n" + "\n".join(f"  {_edge(edge)}" for edge in edges))
    if row.replicas:
        columns = [c for c in rows.replica_columns(refs.names([plan]), lambda: now_s) if c.heading != "STAGE"]
        parts.append("Replicas:\n" + textwrap.indent(output.table(columns, row.replicas), "  "))
    return "\n".join(parts)


def _stage(row: rows.StageRow) -> list[tuple[str, str]]:
    stage = row.stage
    return [
        ("Engine", stage.engine),
        ("Model", stage.model),
        ("Replicas", f"{row.routable} routable, {len(row.replicas)} registered, {stage.num_replicas} planned"),
        ("Balancing", stage.balancing_policy or "gateways' own"),
        ("Tensor parallel", str(stage.tensor_parallel_size)),
        ("Devices", ", ".join(stage.devices)),
        ("Output", stage.final_output_type if stage.final_output else "to other stages only"),
        ("Max sequences", str(stage.max_num_seqs or "engine's own")),
        ("Sampling", _compact(stage.default_sampling_params)),
        ("Engine options", _compact(stage.engine_args)),
        ("Config", stage.config_sha256),
    ]


def describe_replica(replica: types_pb2.Replica, plan: pipeline_pb2.Pipeline, now_s: float, heartbeat: str = "") -> str:
    """The record as indented text. ``heartbeat`` says when it last beat."""
    names = refs.names([plan])
    since = replica.register_time.ToDatetime(datetime.UTC).isoformat(timespec="seconds")
    registered_s = replica.register_time.ToNanoseconds() / 1e9
    head = [
        ("Name", rows.replica_name(replica.ref)),
        ("Stage", names.get((replica.ref.stage.pipeline, replica.ref.stage.stage_id), "")),
        ("State", rows.state_text(replica)),
        ("Routable", "yes" if rows.is_routable(replica, plan) else "no"),
        ("Endpoint", replica.endpoint),
        ("Epoch", str(replica.ref.epoch)),
        ("Instance", replica.instance_uuid),
        ("Engine", replica.engine),
        ("Registered", f"{since} ({output.age(now_s - registered_s)} ago)"),
        *([("Heartbeat", heartbeat)] if heartbeat else []),
        *([("Draining", _drain(replica.drain))] if replica.HasField("drain") else []),
    ]
    parts = [
        _pairs(head),
        "Placement:\n" + _pairs(_placement(replica.placement), indent=2),
        "Fingerprint:\n" + _pairs(_fingerprint(replica.fingerprint), indent=2),
    ]
    if replica.HasField("load"):
        parts.append("Load:\n" + _pairs(_load(replica.load), indent=2))
    if replica.connectors:
        parts.append("Connectors, best first:\n" + "\n".join(f"  {_offer(offer)}" for offer in replica.connectors))
    return "\n".join(parts)


def _placement(where: types_pb2.Placement) -> Pairs:
    return [
        ("Host", where.host),
        ("Pid", str(where.pid or "")),
        ("Devices", ", ".join(where.devices)),
        ("Domain", where.topology_domain),
        ("Boot id", where.boot_id),
    ]


def _fingerprint(shared: types_pb2.StageFingerprint) -> Pairs:
    return [
        ("Model", shared.model),
        ("Config", shared.config_sha256),
        ("Tensor parallel", str(shared.tensor_parallel_size)),
        ("KV layout", shared.kv_layout),
        ("Protocol", shared.protocol_version),
    ]


def _load(report: types_pb2.LoadReport) -> Pairs:
    return [
        ("Running", str(report.running)),
        ("Waiting", str(report.waiting)),
        ("KV in use", f"{report.kv_usage_ratio:.1%}"),
        ("Pool free", f"{report.transfer_pool_free_bytes / 2**20:.1f} MiB"),
        ("Transfers", str(report.inflight_transfers)),
        ("Outputs", str(report.outputs_total)),
    ]


def _offer(offer: types_pb2.ConnectorOffer) -> str:
    how = f" over {offer.backend}" if offer.backend else ""
    where = f" at {offer.address}" if offer.address else ""
    return f"{offer.name}{how}{where}{'' if offer.healthy else ' (unhealthy)'}"


def _drain(order: types_pb2.DrainOrder) -> str:
    limit = f"within {to_seconds(order.limit):g} s" if order.HasField("limit") else "within the worker's own limit"
    return f"{limit}{', to be restarted' if order.restart else ''}{f': {order.reason}' if order.reason else ''}"


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
