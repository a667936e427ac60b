"""``omnictl get``: pipelines, stages and replicas, once or as they change."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import NotFoundError
from omnicore.tasks import together
from omnictl import connect, edges, output, refs, rows, watch
from omnictl.changes import ChangePrinter, View
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.parser import Parser, usage_error
from omnictl.settings import Settings

_KINDS = {
    "pipelines": ("pipelines", "pipeline", "pl"),
    "stages": ("stages", "stage", "st"),
    "replicas": ("replicas", "replica", "rp"),
    "edges": ("edges", "edge", "ed"),
    "policies": ("policies", "policy", "po"),
}
_DEPTH = {"pipelines": 1, "stages": 2, "replicas": 3, "edges": 1, "policies": 2}
# Of the name of one record: an edge or a policy has no name that selects it alone.
_COMPLETE = {"pipelines": 1, "stages": 2, "replicas": 3}
KINDS = tuple(word for words in _KINDS.values() for word in words)
"""What may stand for KIND."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshot:
    pipelines: list[pipeline_pb2.Pipeline]
    table: connect.ReplicaTable


def add(commands: Commands) -> None:
    """Add ``get``."""
    parser = commands.add(
        "get",
        _run,
        description="Show pipelines, stages, replicas, edges or policies.",
        examples=(
            "omnictl get pipelines",
            "# stages of one pipeline, then the replicas of one stage, by id or name",
            "omnictl get stages speech",
            "omnictl get replicas speech/talker -o wide",
            "# one line for every change, until interrupted",
            "omnictl get replicas --watch",
            "# for programs",
            "omnictl get replicas -o json | jq -r '.replicas[].endpoint'",
        ),
        notes=_NOTES,
    )
    _add_arguments(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="then print every change, until interrupted")
    follow = commands.add(
        "watch",
        _run,
        description="Follow pipelines, stages, replicas, edges or policies. The same as 'omnictl get --watch'.",
        examples=("omnictl watch replicas", "omnictl watch replicas speech/talker -o json", "omnictl watch stages"),
        notes=_NOTES,
    )
    _add_arguments(follow, formats=("table", "wide", "json", "name"))
    follow.set_defaults(watch=True)


_NOTES = """\
LOAD is running+waiting requests. READY counts routable replicas (stages) or stages that have one (pipelines).
PAIRS of an edge are pairs of replicas by the connector that data takes between them. A watch prints a row when
something other than load or age changed; with -o json it prints one object a line, load included."""


def _add_arguments(parser: Parser, formats: Sequence[str] = output.FORMATS) -> None:
    parser.add_argument(
        "kind",
        metavar="KIND",
        choices=KINDS,
        help="pipelines (pl), stages (st), replicas (rp), edges (ed) or policies (po)",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="PIPELINE, PIPELINE/STAGE or PIPELINE/STAGE/REPLICA")
    parser.completes |= {"kind": "=".join(["", *_KINDS]), "name": "name"}
    add_output_flag(parser, formats)
    parser.add_argument("--pairs", action="store_true", help="edges: every pair of replicas, its path, and why")
    parser.add_argument("--no-headers", action="store_true", help="leave out the headings of a table")


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    kind = next(kind for kind, words in _KINDS.items() if args.kind in words)
    selector = refs.parse_selector(args.name, depth=_DEPTH[kind], what="NAME")
    if args.watch and args.output == "yaml":
        raise usage_error("--watch: prints table, wide, json or name, not yaml", f"omnictl {args.command}")
    if args.pairs and kind != "edges":
        raise usage_error(f"--pairs: goes with edges, not with {kind}", f"omnictl {args.command}")
    if args.watch:
        return await _watch(settings, kind, selector, args)
    async with connect.control_plane(settings) as plane:
        snapshot = await _snapshot(plane, selector)
    view = _view(kind, snapshot.pipelines, snapshot.table.replicas, selector, pairs=args.pairs)
    if snapshot.table.stale:
        print("warning: etcd does not answer; this is the last that was known", file=sys.stderr)
    _print(view, kind, selector, snapshot, args)
    return 0


async def _snapshot(plane: connect.ControlPlane, selector: refs.Selector) -> _Snapshot:
    plans, table = await together(
        # A name that does not exist is an error of GetPipeline, with those that do.
        _one(plane, selector.pipeline) if selector.pipeline else plane.list_pipelines(),
        plane.list_replicas(selector.pipeline),
    )
    return _Snapshot(plans, table)


async def _one(plane: connect.ControlPlane, name: str) -> list[pipeline_pb2.Pipeline]:
    return [await plane.get_pipeline(name)]


def _view(
    kind: str,
    pipelines: list[pipeline_pb2.Pipeline],
    replicas: list[types_pb2.Replica],
    selector: refs.Selector,
    *,
    pairs: bool = False,
) -> View:
    stage_id = refs.stage_id_of(pipelines[0], selector.stage) if selector.stage and pipelines else None
    if kind == "pipelines":
        return View(
            rows.pipeline_columns(),
            rows.pipeline_rows(pipelines, replicas),
            lambda row: str(row.pipeline.name),
            lambda row: output.to_dict(row.pipeline),
        )
    if kind == "stages":
        stages = [s for s in rows.stage_rows(pipelines, replicas) if stage_id is None or s.stage.stage_id == stage_id]
        return View(rows.stage_columns(), stages, lambda row: str(row.name), lambda row: row.to_json())
    if kind == "edges":
        found = edges.edge_rows(pipelines, replicas)
        if pairs:
            each = [pair for row in found for pair in row.pairs()]
            return View(
                edges.pair_columns(), each, lambda row: f"{row.producer} {row.consumer}", lambda row: row.to_json()
            )
        return View(edges.edge_columns(), found, lambda row: str(row.name), lambda row: row.to_json())
    if kind == "policies":
        stages_too = [rows.PolicyRow(plan, stage) for plan in pipelines for stage in plan.stages]
        policies = [row for row in stages_too if stage_id is None or row.stage.stage_id == stage_id]
        return View(rows.policy_columns(), policies, lambda row: str(row.name), lambda row: row.to_json())
    chosen = [r for r in replicas if stage_id is None or r.ref.stage.stage_id == stage_id]
    if selector.replica_id is not None:
        chosen = [r for r in chosen if r.ref.replica_id == selector.replica_id]
        if not chosen:
            raise NotFoundError(f"no replica {selector}", reason="REPLICA_NOT_FOUND", metadata={"replica": selector})
    return View(
        rows.replica_columns(refs.names(pipelines), time.time),
        chosen,
        lambda replica: rows.replica_name(replica.ref),
        output.to_dict,
    )


def _print(view: View, kind: str, selector: refs.Selector, snapshot: _Snapshot, args: argparse.Namespace) -> None:
    if args.output in ("json", "yaml"):
        records = [view.to_json(record) for record in view.records]
        depth = str(selector).count("/") + 1 if str(selector) else 0
        if depth == _COMPLETE.get(kind):
            output.print_structured(records[0], args.output)
        else:
            value = {kind: records, "revision": str(snapshot.table.revision), "stale": snapshot.table.stale}
            output.print_structured(value, args.output)
    elif args.output == "name":
        for record in view.records:
            print(view.name(record))
    elif not view.records:
        print(f"no {kind}{f' in {selector}' if str(selector) else ''}", file=sys.stderr)
    else:
        text = output.table(view.columns, view.records, wide=args.output == "wide")
        print(text.split("\n", 1)[1] if args.no_headers else text)


async def _watch(settings: Settings, kind: str, selector: refs.Selector, args: argparse.Namespace) -> int:
    stage_only = dataclasses.replace(selector, replica_id=None)
    async with connect.control_plane(settings) as plane:
        # Refuses an unknown pipeline or stage; a replica may be one that is yet to come.
        _view(kind, (await _snapshot(plane, selector)).pipelines, [], stage_only)
    printer = ChangePrinter(args.output, no_headers=args.no_headers)

    def on_change(plans: watch.PlanState, replicas: watch.ReplicaState, changes: list[watch.Change]) -> None:
        pipelines = [p for p in plans.ordered() if selector.pipeline in ("", p.name)]
        view = _view(kind, pipelines, replicas.ordered(), stage_only, pairs=args.pairs)
        if kind == "replicas":
            printer.replicas(view, [c for c in changes if _selected(c.replica, pipelines, selector)])
        else:
            printer.rows(view)

    await watch.follow_cluster(settings, selector.pipeline, on_change)
    return 0


def _selected(replica: types_pb2.Replica, pipelines: list[pipeline_pb2.Pipeline], selector: refs.Selector) -> bool:
    ref = replica.ref
    if selector.stage and pipelines and ref.stage.stage_id != refs.stage_id_of(pipelines[0], selector.stage):
        return False
    return selector.replica_id is None or ref.replica_id == selector.replica_id
