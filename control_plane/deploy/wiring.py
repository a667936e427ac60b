"""Connectors of the plan: those that edges use, each of a known kind and with checked options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from control_plane.deploy.connector_keys import check_options, kind_of, unknown_kind
from control_plane.deploy.document import Value
from control_plane.deploy.faults import Faults, did_you_mean
from control_plane.deploy.graph import Graph, inline_name
from control_plane.deploy.kinds import INVALID, check_keys
from control_plane.deploy.schema import CONNECTOR_KEYS, SHORT_NAME
from control_plane.deploy.stages import StageDraft
from omni.v1 import pipeline_pb2


def plan_connectors(
    root: Value, graph: Graph, drafts: Sequence[StageDraft], faults: Faults
) -> list[pipeline_pb2.Connector]:
    """Connectors in order of their names. Those that no edge uses are checked, and left out with a warning.

    Options that models read (``codec_chunk_frames``, …) are given to the stages at both ends of the edges that use the
    connector: connectors themselves have no use for them.
    """
    defined = dict(root.at("connectors").map)
    wanted = set()
    inline: dict[str, Value] = {}
    for use in graph.uses:
        if not isinstance(use.connector, str):
            inline[inline_name(use.pair)] = use.place
        elif use.connector in defined:
            wanted.add(use.connector)
        else:
            hint = did_you_mean(use.connector, defined) if defined else "; there are no `connectors`"
            faults.error(use.place, f"connector {use.connector!r} is not defined under `connectors`{hint}")
    planned: dict[str, _Planned] = {}
    for name, place in defined.items():
        connector = _connector(name, place, name in wanted, faults)
        if connector is not None and name in wanted:
            planned[name] = connector
        elif connector is not None:
            faults.warn(place, "no edge uses this connector: it is left out of the plan")
    for name, place in inline.items():
        if name in defined:
            faults.error(place, f"its name in the plan would be {name!r}, which `connectors` has already")
        elif (connector := _connector(name, place, True, faults)) is not None:
            planned[name] = connector
    for draft in drafts:
        _connect(
            draft, [planned[e.connector] for e in graph.edges_of(draft.stage_id) if e.connector in planned], faults
        )
    return [planned[name].message for name in sorted(planned)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    message: pipeline_pb2.Connector
    place: Value
    model_options: dict[str, Any]


def _connect(draft: StageDraft, connectors: Sequence[_Planned], faults: Faults) -> None:
    """A worker has one connector of each kind, so its edges must agree on the options."""
    by_kind: dict[str, _Planned] = {}
    for connector in connectors:
        other = by_kind.setdefault(connector.message.kind, connector)
        if other.message.extra != connector.message.extra:
            faults.error(
                connector.place.at("extra"),
                f"differs from {other.place.at('extra').path}, but stage {draft.stage_id} uses both and can have only "
                f"one connector of kind {connector.message.kind!r}",
            )
        draft.connector_options.update(connector.model_options)


def _connector(name: str, place: Value, used: bool, faults: Faults) -> _Planned | None:
    named = Value(name, place.line, place.document, place.parent, place.step)
    if SHORT_NAME.check(named, faults) is INVALID:
        return None
    if not isinstance(place.data, dict):
        faults.error(place, "expected a mapping: {name: KIND, extra: {…}}")
        return None
    fields = check_keys(place, CONNECTOR_KEYS, faults, required=("name",))
    if "name" not in fields:
        return None
    kind = kind_of(fields["name"])
    if not kind:
        text = unknown_kind(fields["name"])
        if used:
            faults.error(place.at("name"), text)
        else:
            faults.warn(place.at("name"), f"{text}; no edge uses it, so it is left out of the plan")
        return None
    message = pipeline_pb2.Connector(name=name, kind=kind)
    model: dict[str, Any] = {}
    if "extra" in fields:
        own, model = check_options(kind, place.at("extra"), faults)
        if not faults:  # wrong values have been reported, and might not fit into a message
            message.extra.update(own)
    return _Planned(message, place, model)
