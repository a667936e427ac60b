"""The stage graph: edges, the connectors they use, and where requests enter."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Final

from control_plane.deploy.document import Value
from control_plane.deploy.faults import Faults, did_you_mean, shorten
from control_plane.deploy.kinds import INVALID, check_keys
from control_plane.deploy.schema import CONNECTOR_USE, EDGE_KEYS, FROM_STAGE, TO_STAGE
from control_plane.deploy.stages import StageDraft
from omni.v1 import pipeline_pb2
from omnicore.durations import to_duration

DEFAULT_WINDOW: Final = 16
"""Unacknowledged chunks of a request on an async edge: deep enough that a hop's latency is hidden at one chunk per
engine step, small enough that a slow consumer stops its producer within a second of audio."""

Pair = tuple[int, int]


@dataclasses.dataclass(slots=True)
class EdgeDraft:
    """One edge on its way into the plan."""

    pair: Pair
    place: Value
    fields: dict[str, Any]
    connector: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One place that says which connector an edge uses."""

    pair: Pair
    place: Value
    connector: Any
    """Name of an entry of ``connectors``, or the connector itself: {name, extra}."""


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Edges in order of their ends, and every place that names a connector of theirs."""

    edges: list[EdgeDraft]
    uses: list[Use]

    @property
    def pairs(self) -> list[Pair]:
        """The ends of all edges."""
        return [edge.pair for edge in self.edges]

    def edges_of(self, stage_id: int) -> list[EdgeDraft]:
        """Edges that begin or end at a stage."""
        return [edge for edge in self.edges if stage_id in edge.pair]


def plan_graph(root: Value, drafts: Sequence[StageDraft], complete: bool, faults: Faults) -> Graph:
    """The graph that the file means. ``complete``: all stage ids are good, so that references can be judged."""
    ids = [draft.stage_id for draft in drafts]
    uses = [use for draft in drafts for use in _stage_uses(draft, ids, complete, faults)]
    given = root.map.get("edges")
    if given is not None and isinstance(given.data, list):
        edges = _written_edges(given, ids, complete, faults)
        uses += [
            Use(edge.pair, edge.place.at("connector"), edge.fields["connector"])
            for edge in edges.values()
            if "connector" in edge.fields
        ]
        origin = "`edges`"
    else:
        edges = _derived_edges(root, ids, uses)
        origin = "the chain of stages, as there are no `edges`"
    for use in uses:
        if use.pair not in edges and complete:
            there = ", ".join(arrow(pair) for pair in edges) or "none"
            faults.error(use.place, f"there is no edge {arrow(use.pair)} in {origin}; there is {shorten(there, 200)}")
    if cycle := find_cycle(ids, edges):
        place = edges[cycle[-2], cycle[-1]].place
        faults.error(place, f"the edges form a cycle: {' → '.join(map(str, cycle))}")
    _attach_connectors(edges, uses, faults)
    return Graph([edges[pair] for pair in sorted(edges)], [use for use in uses if use.pair in edges])


def arrow(pair: Pair) -> str:
    """ "0 → 1"."""
    return f"{pair[0]} → {pair[1]}"


def _stage_uses(draft: StageDraft, ids: Sequence[int], complete: bool, faults: Faults) -> Iterable[Use]:
    for key, pattern, prefix in (
        ("input_connectors", FROM_STAGE, "from_stage_"),
        ("output_connectors", TO_STAGE, "to_stage_"),
    ):
        for name, item in draft.place.at(key).map.items():
            match = pattern.fullmatch(name)
            others = [f"{prefix}{stage_id}" for stage_id in ids if stage_id != draft.stage_id]
            if match is None:
                faults.error(item, f"unknown key {shorten(name)!r}{did_you_mean(name, others)}")
                continue
            other = int(match.group(1))
            if other not in ids or other == draft.stage_id:
                if complete:
                    what = "the stage itself" if other == draft.stage_id else f"no stage: {_known(ids)}"
                    faults.error(item, f"{other} is {what}")
                continue
            if item.data is None:
                continue
            connector = CONNECTOR_USE.check(item, faults)
            if connector is not INVALID:
                pair = (other, draft.stage_id) if key == "input_connectors" else (draft.stage_id, other)
                yield Use(pair, item, connector)


def _known(ids: Iterable[int]) -> str:
    return f"stages are {', '.join(map(str, ids))}"


def _written_edges(given: Value, ids: Sequence[int], complete: bool, faults: Faults) -> dict[Pair, EdgeDraft]:
    edges: dict[Pair, EdgeDraft] = {}
    for item in given.items:
        if not isinstance(item.data, dict):
            continue  # reported by the schema
        fields = check_keys(item, EDGE_KEYS, faults, required=("from", "to"))
        if "from" not in fields or "to" not in fields:
            continue
        bad = [end for end in ("from", "to") if fields[end] not in ids]
        for end in bad if complete else ():
            faults.error(item.at(end), f"there is no stage {fields[end]}; {_known(ids)}")
        pair = (fields["from"], fields["to"])
        if bad:
            continue
        if pair[0] == pair[1]:
            faults.error(item.at("to"), f"the edge {arrow(pair)} leads back to its own stage")
        elif pair in edges:
            first = edges[pair].place
            faults.error(item, f"the edge {arrow(pair)} is given twice, first at {first.path} ({first.where})")
        else:
            edges[pair] = EdgeDraft(pair, item, fields)
    return edges


def _derived_edges(root: Value, ids: Sequence[int], uses: Sequence[Use]) -> dict[Pair, EdgeDraft]:
    """Edges that the connectors name, if those touch every stage; else the chain in order of stage ids."""
    named = {use.pair: use.place for use in uses}
    touched = {stage_id for pair in named for stage_id in pair}
    if len(ids) > 1 and touched == set(ids):
        return {pair: EdgeDraft(pair, place, {}) for pair, place in named.items()}
    place = root.at("stages")
    return {pair: EdgeDraft(pair, named.get(pair, place), {}) for pair in itertools.pairwise(ids)}


def find_cycle(ids: Sequence[int], edges: Iterable[Pair]) -> list[int]:
    """Stages of a cycle, the first one again at its end; empty where there is none."""
    following: dict[int, list[int]] = {stage_id: [] for stage_id in ids}
    for a, b in edges:
        following[a].append(b)
    done: set[int] = set()
    for root in ids:
        if root in done:
            continue
        path = {root: iter(following[root])}  # depth first; insertion order is the way down
        while path:
            node = next(reversed(path))
            step = next((n for n in path[node] if n not in done), None)
            if step is None:
                done.add(node)
                del path[node]
            elif step in path:
                way = list(path)
                return [*way[way.index(step) :], step]
            else:
                path[step] = iter(following[step])
    return []


def _attach_connectors(edges: dict[Pair, EdgeDraft], uses: Sequence[Use], faults: Faults) -> None:
    first: dict[Pair, Use] = {}
    for use in uses:
        edge = edges.get(use.pair)
        if edge is None:
            continue
        other = first.setdefault(use.pair, use)
        if other.connector != use.connector:
            faults.error(
                use.place,
                f"the edge {arrow(use.pair)} uses {_shown(use)} here, but {_shown(other)} "
                f"at {other.place.path} ({other.place.where})",
            )
        else:
            edge.connector = use.connector if isinstance(use.connector, str) else inline_name(use.pair)


def inline_name(pair: Pair) -> str:
    """Name in the plan of a connector that is described where it is used."""
    return f"stage_{pair[0]}_to_{pair[1]}"


def _shown(use: Use) -> str:
    return repr(use.connector) if isinstance(use.connector, str) else "connector options of its own"


def edge_message(edge: EdgeDraft, producer: StageDraft, async_chunk: bool, faults: Faults) -> pipeline_pb2.Edge:
    """The edge as it goes into the plan, with its defaults."""
    text = producer.makes_text
    chunk_by = ("sentence" if text else "step") if async_chunk else "final"
    said = edge.fields.get("chunk_by")
    if said is not None:
        if not async_chunk and said != "final":
            faults.warn(edge.place.at("chunk_by"), f"{said!r} has no effect: async_chunk is false")
        else:
            chunk_by = said
    timeout_s = edge.fields.get("chunk_timeout_s")
    return pipeline_pb2.Edge(
        from_stage=edge.pair[0],
        to_stage=edge.pair[1],
        connector=edge.connector,
        window_size=edge.fields.get("window_size", DEFAULT_WINDOW if async_chunk else -1),
        max_inflight=edge.fields.get("max_inflight", 0),
        chunk_by=pipeline_pb2.ChunkBy.Value(f"CHUNK_BY_{chunk_by.upper()}"),
        chunk_timeout=None if timeout_s is None else to_duration(timeout_s),
    )


def reachable(start: int, edges: Iterable[Pair]) -> set[int]:
    """Stages that a request that enters at ``start`` may come to."""
    pairs = list(edges)
    seen, todo = {start}, [start]
    while todo:
        node = todo.pop()
        fresh = {b for a, b in pairs if a == node} - seen
        seen |= fresh
        todo.extend(fresh)
    return seen
