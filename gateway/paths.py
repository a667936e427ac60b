"""Which connector each pair of replicas hands data over by, on edges whose connector is "auto"."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Final

from gateway.graph import RoutePlan
from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import FailedPreconditionError
from omnicore.log import get_logger
from omnicore.paths import End, Path, choose_path
from omnicore.routing import AUTO

_log = get_logger(__name__)

MAX_PAIRS: Final = 16384
"""Choices kept: the pairs of two stages with 128 replicas each. One costs about half a kilobyte."""
_UNKNOWN: Final = Path(AUTO, "", "a replica says of no connector that it has it")

PathKey = tuple[str, int, int, str, str]
"""Pipeline, producer stage, consumer stage, connector, backend."""
_PairKey = tuple[str, int, int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Chosen:
    producer: types_pb2.Replica
    consumer: types_pb2.Replica
    plan: RoutePlan
    path: Path


class EdgePaths:
    """Chooses, remembers, and says what it chose.

    A choice holds as long as both replicas' records do: what moves or changes its connectors has a new record, and is
    chosen for anew with the next request."""

    def __init__(self) -> None:
        self._chosen: dict[_PairKey, _Chosen] = {}
        self._calls: collections.Counter[PathKey] = collections.Counter()

    @property
    def calls(self) -> Mapping[PathKey, int]:
        """Calls that were dispatched over each path. Only of edges whose connector is "auto"."""
        return self._calls

    def connector(
        self, plan: RoutePlan, edge: pipeline_pb2.Edge, producer: types_pb2.Replica, consumer: types_pb2.Replica
    ) -> str:
        """What the producer's worker is told to publish with; "auto", which leaves it to the worker, where nothing is
        known of the replicas' connectors, or none is common."""
        stage = producer.ref.stage
        key = (stage.pipeline, edge.from_stage, edge.to_stage, producer.ref.replica_id, consumer.ref.replica_id)
        known = self._chosen.get(key)
        if known is None or known.producer is not producer or known.consumer is not consumer or known.plan is not plan:
            path = self._choose(plan, edge, producer, consumer)
            if known is None or known.path != path:
                self._say(edge, producer, consumer, path)
            if known is None and len(self._chosen) >= MAX_PAIRS:
                self._chosen.clear()
            known = self._chosen[key] = _Chosen(producer, consumer, plan, path)
        self._calls[stage.pipeline, edge.from_stage, edge.to_stage, known.path.connector, known.path.backend] += 1
        return known.path.connector

    @staticmethod
    def _choose(
        plan: RoutePlan, edge: pipeline_pb2.Edge, producer: types_pb2.Replica, consumer: types_pb2.Replica
    ) -> Path:
        if not producer.connectors or not consumer.connectors:
            return _UNKNOWN
        try:
            return choose_path(_end(producer), _end(consumer), AUTO, plan.among(edge))
        except FailedPreconditionError as error:
            return dataclasses.replace(_UNKNOWN, reason=error.message)

    def _say(
        self, edge: pipeline_pb2.Edge, producer: types_pb2.Replica, consumer: types_pb2.Replica, path: Path
    ) -> None:
        stage = producer.ref.stage
        first = (stage.pipeline, edge.from_stage, edge.to_stage, path.connector, path.backend) not in self._calls
        # Once for every edge and path where people look; for each pair of replicas only where they look closely.
        (_log.info if first else _log.debug)(
            "path of an edge",
            edge=f"{edge.from_stage}->{edge.to_stage}",
            producer=_name(producer),
            consumer=_name(consumer),
            connector=path.connector,
            backend=path.backend,
            reason=path.reason,
        )


def _end(replica: types_pb2.Replica) -> End:
    return End.of(_name(replica), replica.connectors, replica.placement)


def _name(replica: types_pb2.Replica) -> str:
    ref = replica.ref
    return f"{ref.stage.pipeline}/{ref.stage.stage_id}/{ref.replica_id}"
