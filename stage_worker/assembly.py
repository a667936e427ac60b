"""Puts together what the calls of a worker work with."""

from __future__ import annotations

import os
from collections.abc import Callable

from connectors.channels import PeerChannels
from connectors.connector_set import ConnectorSet
from omni.v1 import pipeline_pb2
from omnicore.clock import Clock
from omnicore.grpc_stream import Dial
from omnicore.tracing import SpanSink
from stage_worker.calls import CallTable, WorkerParts
from stage_worker.config import StageWorkerConfig
from stage_worker.engine import Engine
from stage_worker.flows import FlowTable
from stage_worker.identity import Identity
from stage_worker.links import PeerLinks
from stage_worker.progress import Progress
from stage_worker.reading import Reads
from stage_worker.ready_inputs import Releaser
from stage_worker.retention import Retention
from stage_worker.stage_connectors import connector_options, publishes
from stage_worker.tracing import CallTracing
from stage_worker.transfer_metrics import TransferMetrics


def make_parts(
    config: StageWorkerConfig,
    pipeline: pipeline_pb2.Pipeline,
    stage: pipeline_pb2.Stage,
    engine: Engine,
    *,
    identity: Identity,
    channels: PeerChannels,
    dial: Callable[[str], Dial],
    spans: SpanSink | None,
    on_calls_changed: Callable[[], None],
    clock: Clock,
) -> WorkerParts:
    """Those of one worker, for a stage of ``pipeline``; no call is traced without ``spans``. Raises what the connectors
    raise for a wrong plan."""
    connectors = ConnectorSet(
        lambda: identity.data_owner,
        lambda: identity.endpoint,
        channels.fetch,
        pool_bytes=config.pool_bytes if publishes(pipeline, stage) else 0,
        clock=clock,
        options=connector_options(pipeline, stage, os.environ),
    )
    keeper = Retention(clock, config.retain_bytes)
    connectors.store.make_room = keeper.make_room
    flows = FlowTable(connectors.store.release, clock, open_wait_s=config.flow_open_timeout_s, keeper=keeper)
    metrics = TransferMetrics(pipeline.name, connectors.usages, lambda: len(flows), keeper)
    connectors.store.on_freed = metrics.freed
    reads = Reads(
        connectors.get,
        metrics,
        [edge for edge in pipeline.edges if edge.to_stage == stage.stage_id],
        chunk_timeout_s=config.chunk_timeout_s,
        locate=identity.locate,
    )
    traced = CallTracing(spans, identity) if spans is not None else None
    reads.on_end = traced.has_read if traced is not None else None
    return WorkerParts(
        identity=identity,
        pipeline=pipeline,
        stage=stage,
        engine=engine,
        connectors=connectors,
        flows=flows,
        links=PeerLinks(lambda: identity.current, dial, reads),
        releaser=Releaser(channels),
        reads=reads,
        metrics=metrics,
        progress=Progress(),
        calls=CallTable(on_calls_changed),
        tracing=traced,
    )
