"""Rows of ``omnictl get edges``: the edges of plans, and what data takes between the replicas at their ends.

What is shown is what gateways choose, by the same rule (``omnicore.paths``) from the same records."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from omni.v1 import pipeline_pb2, types_pb2
from omnicore.errors import FailedPreconditionError
from omnicore.paths import End, Path, choose_path
from omnicore.routing import AUTO, auto_choices
from omnictl.output import Column, to_dict
from omnictl.rows import replica_name

NO_PATH: Final = "none"
# Without flows, data is published before its consumer is known: into shared memory, from where others fetch it.
_BEFORE_CONSUMER: Final = frozenset({"shm"})


@dataclasses.dataclass(frozen=True, slots=True)
class PairRow:
    """Two replicas at the ends of an edge, and what data takes between them."""

    edge: str
    """ "PIPELINE/FROM-TO"."""
    producer: str
    consumer: str
    path: Path

    @property
    def name(self) -> str:
        """ "EDGE PRODUCER CONSUMER"."""
        return f"{self.edge} {self.producer} {self.consumer}"

    def to_json(self) -> dict[str, Any]:
        """Stable JSON."""
        return {
            "edge": self.edge,
            "producer": self.producer,
            "consumer": self.consumer,
            "connector": self.path.connector,
            "backend": self.path.backend,
            "reason": self.path.reason,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class EdgeRow:
    """An edge of a plan, with the replicas at both ends."""

    pipeline: pipeline_pb2.Pipeline
    edge: pipeline_pb2.Edge
    producers: Sequence[types_pb2.Replica]
    consumers: Sequence[types_pb2.Replica]

    @property
    def name(self) -> str:
        """ "PIPELINE/FROM-TO"."""
        return f"{self.pipeline.name}/{self.edge.from_stage}-{self.edge.to_stage}"

    @property
    def wanted(self) -> str:
        """The kind of connector that the deploy file wants."""
        kinds = {connector.name: connector.kind for connector in self.pipeline.connectors}
        return kinds.get(self.edge.connector, self.edge.connector) or AUTO

    def to_json(self) -> dict[str, Any]:
        """Stable JSON: the edge of the plan, and how many pairs of replicas take which connector."""
        return {
            "pipeline": self.pipeline.name,
            "edge": to_dict(self.edge),
            "status": {"pairs": len(self.producers) * len(self.consumers), "connectors": self.connectors()},
        }

    def pairs(self) -> Iterator[PairRow]:
        """Every pair of replicas; "none" where they have no path in common, with what is in the way."""
        wanted = self.wanted
        among = auto_choices(self.pipeline.connectors).get(self.edge.connector, frozenset())
        if not self.pipeline.async_chunk:
            among = _BEFORE_CONSUMER
        ends = [[_end(replica) for replica in replicas] for replicas in (self.producers, self.consumers)]
        for producer in ends[0]:
            for consumer in ends[1]:
                try:
                    path = choose_path(producer, consumer, wanted, among)
                except FailedPreconditionError as error:
                    path = Path(NO_PATH, "", error.message)
                yield PairRow(self.name, producer.name, consumer.name, path)

    def connectors(self) -> dict[str, int]:
        """How many pairs of replicas take which connector, "mooncake(tcp)" where it moves bytes by several ways."""
        found = collections.Counter(
            f"{row.path.connector}({row.path.backend})" if row.path.backend else row.path.connector
            for row in self.pairs()
        )
        return dict(sorted(found.items()))


def edge_rows(pipelines: Iterable[pipeline_pb2.Pipeline], replicas: Iterable[types_pb2.Replica]) -> list[EdgeRow]:
    """Every edge of every plan, in order, with the replicas at its ends."""
    by_stage: dict[tuple[str, int], list[types_pb2.Replica]] = {}
    for replica in replicas:
        by_stage.setdefault((replica.ref.stage.pipeline, replica.ref.stage.stage_id), []).append(replica)
    return [
        EdgeRow(
            pipeline,
            edge,
            by_stage.get((pipeline.name, edge.from_stage), ()),
            by_stage.get((pipeline.name, edge.to_stage), ()),
        )
        for pipeline in pipelines
        for edge in sorted(pipeline.edges, key=lambda edge: (edge.from_stage, edge.to_stage))
    ]


def edge_columns() -> list[Column[EdgeRow]]:
    """Columns of ``get edges``."""

    def end(row: EdgeRow, stage_id: int) -> str:
        return next((s.name for s in row.pipeline.stages if s.stage_id == stage_id), str(stage_id))

    def chunk(row: EdgeRow) -> str:
        return pipeline_pb2.ChunkBy.Name(row.edge.chunk_by).removeprefix("CHUNK_BY_").lower()

    return [
        Column("EDGE", lambda e: e.name),
        Column("FROM", lambda e: end(e, e.edge.from_stage)),
        Column("TO", lambda e: end(e, e.edge.to_stage)),
        Column("CHUNKS", chunk),
        Column("WINDOW", lambda e: "-" if e.edge.window_size < 0 else str(e.edge.window_size)),
        Column("CONNECTOR", lambda e: e.edge.connector or AUTO),
        Column("PAIRS", lambda e: ",".join(f"{name}:{n}" for name, n in e.connectors().items())),
        Column("INFLIGHT", lambda e: str(e.edge.max_inflight or "-"), wide=True),
    ]


def pair_columns() -> list[Column[PairRow]]:
    """Columns of ``get edges --pairs``."""
    return [
        Column("EDGE", lambda row: row.edge),
        Column("PRODUCER", lambda row: row.producer),
        Column("CONSUMER", lambda row: row.consumer),
        Column("CONNECTOR", lambda row: row.path.connector),
        Column("BACKEND", lambda row: row.path.backend or "-"),
        Column("REASON", lambda row: row.path.reason),
    ]


def _end(replica: types_pb2.Replica) -> End:
    return End.of(replica_name(replica.ref), replica.connectors, replica.placement)
