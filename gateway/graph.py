"""The stage graph of a pipeline, and which part of it a request needs. Pure.

A request enters at one stage and wants some modalities back. It needs exactly the stages that lie on a path from the
entry to a stage whose final output it wants; only the edges among those carry data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.routing import AUTO, auto_choices, needed_connectors


@dataclasses.dataclass(frozen=True, slots=True)
class StageStep:
    """One needed stage of a request."""

    stage: pipeline_pb2.Stage
    stage_id: int
    """Logical stage id."""
    inputs: tuple[pipeline_pb2.Edge, ...]
    """Edges from needed stages, by ascending producer."""
    outputs: tuple[pipeline_pb2.Edge, ...]
    """Edges to needed stages, by ascending consumer."""
    is_entry: bool
    emits: bool
    """Its output goes to the client."""
    makes_text: bool
    """That output is text."""
    companions: bool
    """A request may have some here."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoutePlan:
    """The stages of one kind of request, producers before their consumers."""

    steps: tuple[StageStep, ...]
    async_chunk: bool
    connectors: Mapping[str, str]
    """Connector name, as edges say it, to its kind."""
    choices: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    """Connector name to the kinds that its "auto" may take, where the deploy file says that."""

    def connector_kind(self, edge: pipeline_pb2.Edge) -> str:
        """What to publish with on this edge; "auto" where the edge does not say."""
        return self.connectors.get(edge.connector, edge.connector) or AUTO

    def among(self, edge: pipeline_pb2.Edge) -> frozenset[str]:
        """The kinds that "auto" may take on this edge; empty for any."""
        return self.choices.get(edge.connector, frozenset())


class PipelineGraph:
    """A pipeline with what is derived from it. Immutable; plans are kept, since requests come in few kinds."""

    def __init__(self, pipeline: pipeline_pb2.Pipeline) -> None:
        self.pipeline = pipeline
        self.name = pipeline.name
        self.stages: dict[int, pipeline_pb2.Stage] = {stage.stage_id: stage for stage in pipeline.stages}
        self.entrypoints: dict[str, int] = dict(pipeline.entrypoints)
        self._plans: dict[tuple[str, tuple[str, ...]], RoutePlan] = {}
        self._modalities: dict[str | None, list[str]] = {}
        self._needed_connectors: dict[int, frozenset[str]] = {}

    @property
    def strict_sessions(self) -> bool:
        """A session whose replica is gone is refused, unless its request says otherwise."""
        return self.pipeline.session_policy == types_pb2.SESSION_POLICY_STRICT

    @property
    def tasks(self) -> list[str]:
        """What can be asked of it: "chat", "speech", …"""
        return sorted(self.entrypoints)

    def modalities(self, task: str | None = None) -> list[str]:
        """Output modalities in order of their stages: those that ``task`` can reach, or all."""
        if (known := self._modalities.get(task)) is not None:
            return known
        reachable = set(self.stages)
        if task is not None:
            reachable = self._closure({self.entrypoints[task]}, forward=True)
        found = [
            stage.final_output_type
            for stage_id, stage in sorted(self.stages.items())
            if stage.final_output and stage_id in reachable
        ]
        self._modalities[task] = list(dict.fromkeys(found))
        return self._modalities[task]

    def plan(self, task: str, modalities: Iterable[str]) -> RoutePlan:
        """The stages that ``task`` needs for ``modalities``.

        Raises ``KeyError`` for a task that is not offered and ``ValueError`` for a modality that it cannot reach;
        validation has refused both before.
        """
        asked = (task, tuple(modalities))
        if (known := self._plans.get(asked)) is not None:
            return known
        wanted = frozenset(asked[1])
        entry = self.entrypoints[task]
        if missing := wanted - set(self.modalities(task)):
            raise ValueError(f"{task} of {self.name} has no {', '.join(sorted(missing))}")
        emitters = {s.stage_id for s in self.stages.values() if s.final_output and s.final_output_type in wanted}
        below = self._closure({entry}, forward=True)
        needed = below & self._closure(emitters & below, forward=False)
        steps = tuple(self._step(stage_id, entry, needed, emitters) for stage_id in self._ordered(needed))
        kinds = {connector.name: connector.kind for connector in self.pipeline.connectors}
        plan = RoutePlan(steps, self.pipeline.async_chunk, kinds, auto_choices(self.pipeline.connectors))
        self._plans[asked] = plan
        return plan

    def needed_connectors(self, stage_id: int) -> frozenset[str]:
        """Kinds of connector that replicas of a stage move data with; "auto" among them means any."""
        if (known := self._needed_connectors.get(stage_id)) is None:
            pipeline = self.pipeline
            known = self._needed_connectors[stage_id] = needed_connectors(pipeline.edges, pipeline.connectors, stage_id)
        return known

    def edge(self, from_stage: int, to_stage: int) -> pipeline_pb2.Edge | None:
        """The edge between two stages, if there is one."""
        return next((e for e in self.pipeline.edges if (e.from_stage, e.to_stage) == (from_stage, to_stage)), None)

    def connector_of(self, edge: pipeline_pb2.Edge) -> tuple[str, frozenset[str]]:
        """Its connector's kind, and what "auto" may take of it; see ``RoutePlan``."""
        kinds = {connector.name: connector.kind for connector in self.pipeline.connectors}
        kind = kinds.get(edge.connector, edge.connector) or AUTO
        return kind, auto_choices(self.pipeline.connectors).get(edge.connector, frozenset())

    def _step(self, stage_id: int, entry: int, needed: set[int], emitters: set[int]) -> StageStep:
        edges = [e for e in self.pipeline.edges if e.from_stage in needed and e.to_stage in needed]
        stage = self.stages[stage_id]
        outputs = tuple(sorted((e for e in edges if e.from_stage == stage_id), key=lambda e: e.to_stage))
        return StageStep(
            stage=stage,
            stage_id=stage_id,
            inputs=tuple(sorted((e for e in edges if e.to_stage == stage_id), key=lambda e: e.from_stage)),
            outputs=outputs,
            is_entry=stage_id == entry,
            emits=stage_id in emitters,
            makes_text=stage.final_output_type == "text",
            # Whose input and output nobody else sees, nobody compares.
            companions=bool(stage.companions.roles) and stage_id == entry and bool(outputs),
        )

    def _closure(self, start: set[int], *, forward: bool) -> set[int]:
        found, frontier = set(start), list(start)
        while frontier:
            here = frontier.pop()
            for edge in self.pipeline.edges:
                source, target = (edge.from_stage, edge.to_stage) if forward else (edge.to_stage, edge.from_stage)
                if source == here and target not in found:
                    found.add(target)
                    frontier.append(target)
        return found

    def _ordered(self, needed: set[int]) -> Sequence[int]:
        """Producers first; the plan is acyclic (the control plane checked), so this ends."""
        ordered: list[int] = []
        left = set(needed)
        while left:
            free = sorted(
                stage_id
                for stage_id in left
                if not any(e.to_stage == stage_id and e.from_stage in left for e in self.pipeline.edges)
            )
            if not free:
                raise ValueError(f"pipeline {self.name} has a cycle among stages {sorted(left)}")
            ordered += free
            left -= set(free)
        return ordered
