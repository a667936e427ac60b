"""``omnictl get``: pipelines, stages and replicas, once or as they change."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import NotFoundError
from omnictl import connect, output, refs, rows, watch
from omnictl.commands.base import Commands, add_output_flag, settings_of
from omnictl.parser import usage_error
from omnictl.settings import Settings
from omnictl.tasks import together

_KINDS = {
    "pipelines": ("pipelines", "pipeline", "pl"),
    "stages": ("stages", "stage", "st"),
    "replicas": ("replicas", "replica", "rp"),
}
_DEPTH = {"pipelines": 1, "stages": 2, "replicas": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshot:
    pipelines: list[pipeline_pb2.Pipeline]
    table: connect.ReplicaTable


@dataclasses.dataclass(frozen=True, slots=True)
class _View:
    """What ``get`` shows of one kind: records with their columns, names and JSON."""

    columns: Sequence[output.Column[Any]]
    records: Sequence[Any]
    name: Callable[[Any], str]
    to_json: Callable[[Any], Any]


def add(commands: Commands) -> None:
    """Add ``get``."""
    parser = commands.add(
        "get",
        _run,
        description="Show pipelines, stages or replicas.",
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
        notes=(
            "LOAD is running+waiting requests. READY counts routable replicas (stages) or stages that have one\n"
            "(pipelines). --watch prints a row when something other than load or age changed; with -o json it\n"
            "prints one object a line, load included."
        ),
    )
    parser.add_argument(
        "kind",
        metavar="KIND",
        choices=[word for words in _KINDS.values() for word in words],
        help="pipelines (pl), stages (st) or replicas (rp)",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="PIPELINE, PIPELINE/STAGE or PIPELINE/STAGE/REPLICA")
    add_output_flag(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="then print every change, until interrupted")
    parser.add_argument("--no-headers", action="store_true", help="leave out the headings of a table")


async def _run(args: argparse.Namespace) -> int:
    settings = settings_of(args)
    kind = next(kind for kind, words in _KINDS.items() if args.kind in words)
    selector = refs.parse_selector(args.name, depth=_DEPTH[kind], what="NAME")
    if args.watch and args.output == "yaml":
        raise usage_error("--watch: prints table, wide, json or name, not yaml", "omnictl get")
    if args.watch:
        return await _watch(settings, kind, selector, args)
    async with connect.control_plane(settings) as plane:
        snapshot = await _snapshot(plane, selector)
    view = _view(kind, snapshot.pipelines, snapshot.table.replicas, selector)
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
) -> _View:
    stage_id = refs.stage_id_of(pipelines[0], selector.stage) if selector.stage and pipelines else None
    if kind == "pipelines":
        return _View(
            rows.pipeline_columns(),
            rows.pipeline_rows(pipelines, replicas),
            lambda row: str(row.pipeline.name),
            lambda row: output.to_dict(row.pipeline),
        )
    if kind == "stages":
        stages = [s for s in rows.stage_rows(pipelines, replicas) if stage_id is None or s.stage.stage_id == stage_id]
        return _View(rows.stage_columns(), stages, lambda row: str(row.name), lambda row: row.to_json())
    chosen = [r for r in replicas if stage_id is None or r.ref.stage.stage_id == stage_id]
    if selector.replica_id is not None:
        chosen = [r for r in chosen if r.ref.replica_id == selector.replica_id]
        if not chosen:
            raise NotFoundError(f"no replica {selector}", reason="REPLICA_NOT_FOUND", metadata={"replica": selector})
    return _View(
        rows.replica_columns(refs.names(pipelines), time.time),
        chosen,
        lambda replica: rows.replica_name(replica.ref),
        output.to_dict,
    )


def _print(view: _View, kind: str, selector: refs.Selector, snapshot: _Snapshot, args: argparse.Namespace) -> None:
    if args.output in ("json", "yaml"):
        records = [view.to_json(record) for record in view.records]
        depth = str(selector).count("/") + 1 if str(selector) else 0
        if depth == _DEPTH[kind]:
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
    printer = _ChangePrinter(args.output, no_headers=args.no_headers)

    def on_change(plans: watch.PlanState, replicas: watch.ReplicaState, changes: list[watch.Change]) -> None:
        pipelines = [p for p in plans.ordered() if selector.pipeline in ("", p.name)]
        view = _view(kind, pipelines, replicas.ordered(), stage_only)
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


class _ChangePrinter:
    """Prints rows as they change, under headings printed once, in columns that only widen."""

    _QUIET = frozenset({"AGE", "LOAD", "KV"})
    """Columns whose change alone is not worth a row."""
    _ROOM = {"STATE": len("READY,CORDONED")}
    """Columns that are wider than the first rows need, since later ones will."""

    def __init__(self, form: str, *, no_headers: bool) -> None:
        self._form = form
        self._headers_due = not no_headers
        self._widths: list[int] = []
        self._shown: dict[str, tuple[str, list[str]]] = {}
        """What was printed last of each record: what decides whether to print it again, and the row."""

    def replicas(self, view: _View, changes: Sequence[watch.Change]) -> None:
        """Print replicas that were added, changed or removed."""
        for change in changes:
            name = view.name(change.replica)
            gone = change.kind is watch.Kind.DELETED
            if self._form == "json":
                output.print_json({"type": change.kind.value, "replica": view.to_json(change.replica)}, compact=True)
            elif self._form == "name" and not gone:
                self._print_name(name)
            else:
                self._print_row(view, name, _with(view, self._texts(view, change.replica), "STATE", "GONE", gone))

    def rows(self, view: _View) -> None:
        """Print the records of ``view`` that read differently from when they were last printed, and those gone."""
        present = {view.name(record): record for record in view.records}
        for name in [name for name in self._shown if name not in present]:
            texts = self._shown.pop(name)[1]
            if self._form == "json":
                output.print_json({"type": "DELETED", "name": name}, compact=True)
            elif self._form != "name":
                self._print_row(view, name, _with(view, texts, "READY", "GONE", True))
                del self._shown[name]
        for name, record in present.items():
            if self._form == "json":
                value, known = view.to_json(record), name in self._shown
                if self._is_new(name, str(value), []):
                    output.print_json({"type": "MODIFIED" if known else "ADDED", "record": value}, compact=True)
            elif self._form == "name":
                self._print_name(name)
            else:
                self._print_row(view, name, self._texts(view, record))

    def _texts(self, view: _View, record: Any) -> list[str]:
        return output.cells(view.columns, record, wide=self._form == "wide")

    def _is_new(self, name: str, content: str, texts: list[str]) -> bool:
        known = self._shown.get(name)
        self._shown[name] = (content, texts)
        return known is None or known[0] != content

    def _print_name(self, name: str) -> None:
        if self._is_new(name, "", []):
            print(name, flush=True)

    def _print_row(self, view: _View, name: str, texts: list[str]) -> None:
        heads = output.headings(view.columns, wide=self._form == "wide")
        lasting = [text for head, text in zip(heads, texts, strict=True) if head not in self._QUIET]
        if not self._is_new(name, "\0".join(lasting), texts):
            return
        if not self._widths:
            everything = [self._texts(view, record) for record in view.records]
            columns = zip(heads, texts, *everything, strict=True)
            self._widths = [max(self._ROOM.get(column[0], 0), *map(output.width, column)) for column in columns]
        if self._headers_due:
            self._headers_due = False
            print(output.line(heads, self._widths))
        self._widths = [max(w, output.width(text)) for w, text in zip(self._widths, texts, strict=True)]
        print(output.line(texts, self._widths), flush=True)


def _with(view: _View, texts: list[str], heading: str, text: str, condition: bool) -> list[str]:
    """``texts`` with another text under ``heading``, if ``condition``."""
    if not condition:
        return texts
    at = [column.heading for column in view.columns].index(heading)  # shown in every format, so in the same place
    return [*texts[:at], text, *texts[at + 1 :]]
